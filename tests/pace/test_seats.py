"""Numbers of processes: one each, free again when one dies, not a child's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from replaykit.pace import INSERT, SAMPLE, SharedCounts
from replaykit.recovery.locks import Seat
from tests.support.refusals import refuses

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def in_child(work: Callable[[], bool]) -> int:
    """Runs it in a forked process; its exit code: 0 where it was true."""
    child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_child_process_gets_another_number(tmp_path: Path) -> None:
    seat = Seat(tmp_path)
    assert in_child(lambda: Seat(tmp_path).number == 1) == 0
    assert not seat.empty(0)
    assert seat.empty(1)
    assert seat.empty(7)
    seat.drop()
    assert Seat(tmp_path).number == 0


def test_forked_child_does_not_keep_the_number_of_a_killed_parent(tmp_path: Path) -> None:
    reading, writing = os.pipe()

    def parent() -> bool:
        seat = Seat(tmp_path)
        assert seat.number == 0
        if not os.fork():  # lives on when its parent is dead
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    assert in_child(parent) == -signal.SIGKILL
    seat = Seat(tmp_path)
    assert seat.number == 0
    for end in (writing, reading):
        os.close(end)


def test_processes_beyond_the_last_number_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Seat, "MOST", 2)
    kept = [Seat(tmp_path), Seat(tmp_path)]
    refuses(RuntimeError, "at most 2 processes", Seat, tmp_path)
    assert [seat.number for seat in kept] == [0, 1]


def test_unfinished_counts_vanish_with_their_process(tmp_path: Path) -> None:
    counts, other = SharedCounts(tmp_path), SharedCounts(tmp_path)

    def dies() -> bool:
        mine = SharedCounts(tmp_path)
        with mine.lock:
            mine.begin(SAMPLE, 5)
            mine.begin(INSERT, 3)
            mine.end(INSERT, 2, 2)
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    with other.lock:
        other.begin(SAMPLE, 4)
    assert in_child(dies) == -signal.SIGKILL
    with counts.lock:
        assert (counts.under_way(SAMPLE), counts.under_way(INSERT)) == (9, 1)
        assert counts.forget_dead()
        assert not counts.forget_dead()
        assert (counts.under_way(SAMPLE), counts.under_way(INSERT)) == (4, 0)
        assert counts.done() == (2, 0)
    # Who takes the seat of a dead one does not take over what was under way there.
    assert in_child(dies) == -signal.SIGKILL
    third = SharedCounts(tmp_path)
    with third.lock:
        assert third.under_way(SAMPLE) == 4
        third.waited(SAMPLE, 0.5)
    assert counts.seconds() == (0.0, 0.5)
    for one in (counts, other, third):
        one.drop()
