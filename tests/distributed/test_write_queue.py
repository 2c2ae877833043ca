"""Writes on their way, over answers that need no Ray."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from replaykit.distributed import write_queue as module
from replaykit.distributed.requests import Reply, one_of
from replaykit.distributed.write_queue import MOST_UNDER_WAY, WriteQueue, leave_all
from replaykit.errors import ActorLost
from tests.distributed.stand_in import Ray, failing, no_answer, stand_in


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)


def write_queue() -> WriteQueue:
    """One whose writes all fail, with what was written."""

    return WriteQueue(actor=object())


def fails(number: int) -> Any:
    """Return a function that sends a failing write."""
    return lambda: Reply(failing(ValueError(f"write {number}")))


def test_each_unread_error_is_raised_once() -> None:
    """In the order of the writes, one by whatever call comes next."""
    box = write_queue()
    for number in range(3):
        box.put(fails(number))
    box.put(fails(3)).seen = True  # its error was read
    for number in range(3):
        with pytest.raises(ValueError, match=f"write {number}"):
            box.flush()
    box.flush()


def test_each_error_is_raised_in_one_thread_only() -> None:
    """Of many threads that look at once, none is told of the error of another."""
    box, told = write_queue(), []
    for number in range(MOST_UNDER_WAY):
        box.put(fails(number))
    start = threading.Barrier(4)

    def look() -> None:
        start.wait()
        for _ in range(MOST_UNDER_WAY):
            try:
                box.flush()
            except ValueError as error:
                told.append(str(error))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == sorted(f"write {number}" for number in range(MOST_UNDER_WAY))


def test_closing_reports_all_unread_errors() -> None:
    """The first, with the others in its text, each kind of them once."""
    box = write_queue()
    for number in (0, 1, 1, 1):
        box.put(fails(number))
    failed, unanswered = leave_all(None, box.actor)
    assert unanswered == 0
    found = one_of(failed)
    assert type(found) is ValueError
    assert str(found) == "write 0; 3 more writes have failed: ValueError: write 1 (3 times)"
    assert found.__cause__ is failed[0]
    assert one_of(failed[:1]) is failed[0]
    assert leave_all(None, box.actor) == ([], 0)

    class Odd(Exception):
        def __init__(self, one: int, other: int) -> None:
            super().__init__(f"{one} and {other}")

    many = one_of([Odd(1, 2), *(ValueError(f"{number}") for number in range(9))])
    assert type(many) is RuntimeError
    assert str(many).startswith("Odd: 1 and 2; 9 more writes have failed: ValueError: 0; ")
    assert str(many).endswith("ValueError: 4; and 4 others")


def test_pending_writes_outlive_their_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it has been answered; then it is let go, whether or not anybody asks."""
    monkeypatch.setattr(module, "_FEW", 2)
    monkeypatch.setattr(module, "_looked_at", [2])
    actor, here, largest = object(), len(module._PENDING), 0
    for _ in range(50):
        box = WriteQueue(actor=actor)
        box.put(lambda: Reply(lambda: [0, None]))
        largest = max(largest, len(module._PENDING) - here)
    assert 1 <= largest <= 6
    assert leave_all(None, actor) == ([], 0)
    assert len(module._PENDING) <= here
    failing_box = write_queue()
    failing_box.actor = actor
    failing_box.put(fails(0))
    failing_box.poll()
    del failing_box
    assert [str(error) for error in leave_all(None, actor)[0]] == ["write 0"]


def test_closing_reports_writes_lost_with_the_actor() -> None:
    def lost() -> Any:
        raise Ray.exceptions.RayActorError("killed")

    box = WriteQueue(actor=object())
    box.put(lambda: Reply(lost))
    (error,), unanswered = leave_all(None, box.actor)
    assert type(error) is ActorLost
    assert unanswered == 0


def test_program_exit_warns_of_lost_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PENDING", {})
    monkeypatch.setattr(module, "_AT_EXIT_SECONDS", 0.0)
    box = write_queue()
    box.put(fails(7))
    silent = WriteQueue(actor=object())
    silent.put(lambda: Reply(no_answer))
    with pytest.warns(RuntimeWarning, match=r"ValueError: write 7; TimeoutError: 1 messages"):
        module._leave_at_exit()
    assert not module._PENDING


def test_waiting_for_an_answer_does_not_block_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread asks for the same with a timeout of its own; both get one value."""
    come, asked = threading.Event(), threading.Event()

    class Slow(Ray):
        def get(self, ref: Any, timeout: float | None = None) -> Any:
            asked.set()
            if not come.wait(timeout):
                raise self.exceptions.GetTimeoutError
            return [0, "there"]

    monkeypatch.setattr("replaykit.distributed.requests.ray_module", Slow)
    reply = Reply(object())
    first = threading.Thread(target=reply.get, daemon=True)
    first.start()
    assert asked.wait(30)
    with pytest.raises(TimeoutError, match=r"within 0\.01 seconds"):
        reply.get(0.01)
    come.set()
    first.join(30)
    assert reply.get(0.0) == "there"
