"""Writes on their way, over answers that need no Ray."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from replaykit.remote.outbox import MOST_UNDER_WAY, Outbox
from tests.remote.stand_in import failing, stand_in


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def outbox() -> Outbox:
    """One whose writes all fail, with what was written."""

    def call(name: str, data: Any, keywords: Any) -> Any:
        return failing(ValueError(f"write {data}"))

    return Outbox(lambda counts, rows: None, call)


def test_each_error_that_nobody_asked_for_is_raised_once() -> None:
    """In the order of the writes, one by whatever call comes next."""
    box = outbox()
    for number in range(3):
        box.put("add", number, {})
    box.put("add", 3, {}).seen = True  # somebody has asked
    for number in range(3):
        with pytest.raises(ValueError, match=f"write {number}"):
            box.settle()
    box.settle()


def test_errors_are_told_to_one_thread_each() -> None:
    """Of many threads that look at once, none is told of the error of another."""
    box, told = outbox(), []
    for number in range(MOST_UNDER_WAY):
        box.put("add", number, {})
    start = threading.Barrier(4)

    def look() -> None:
        start.wait()
        for _ in range(MOST_UNDER_WAY):
            try:
                box.settle()
            except ValueError as error:
                told.append(str(error))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == sorted(f"write {number}" for number in range(MOST_UNDER_WAY))
