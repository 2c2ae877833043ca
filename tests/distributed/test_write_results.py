"""An error of a write is raised once, by whoever asks first."""

from __future__ import annotations

from typing import Any

import pytest

from replaykit.distributed.requests import Reply
from replaykit.distributed.write_queue import WriteQueue


class JustLate(Reply):
    """An answer that arrives right after a caller has given up."""

    def get(self, timeout: float | None = None) -> Any:
        if not self.known:
            self.store(None, ValueError("refused"))
            raise TimeoutError("no answer within 0 seconds")
        return super().get(timeout)


@pytest.mark.parametrize(("timeout", "error"), [(0, TimeoutError), (-1, ValueError)])
def test_an_error_that_arrives_after_a_timeout_is_not_lost(
    timeout: float, error: type[Exception]
) -> None:
    queue, reply = WriteQueue(), JustLate()
    written = queue.put(lambda: reply)
    with pytest.raises(error, match=r"answer|timeout"):
        written.result(timeout)
    with pytest.raises(ValueError, match="refused"):
        queue.flush()
    queue.flush()


def test_an_error_that_a_caller_has_received_is_not_raised_again() -> None:
    queue = WriteQueue()
    for refusal in (ValueError("refused"), TimeoutError("refused")):
        written = queue.put(lambda refusal=refusal: Reply.done(error=refusal))
        with pytest.raises(type(refusal), match="refused"):
            written.result(5)
        queue.flush()
