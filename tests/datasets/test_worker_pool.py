"""Pieces that the caller and workers share: each is worked off once, and no worker is left."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replaykit.datasets.worker_pool import Piece, WorkerPool

PIECES = [(k, k + 1) for k in range(12)]


def who(piece: Piece) -> tuple[Piece, int]:
    return piece, os.getpid()


def noting(folder: Path) -> Callable[[Piece], Piece]:
    """Return a job that leaves a file for each piece that was begun."""

    def work(piece: Piece) -> Piece:
        (folder / str(piece[0])).touch()
        return piece

    return work


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    children = multiprocessing.active_children()
    yield
    assert multiprocessing.active_children() == children
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("count", [1, 20])
def test_caller_and_workers_share_the_pieces(count):
    found = []
    with WorkerPool(who, PIECES, count) as pool:
        while (piece := pool.take()) is not None:
            found.append(who(piece))
        while (answer := pool.answer()) is not None:
            found.append(answer)
    assert sorted(piece for piece, _ in found) == PIECES
    assert len({process for _, process in found} - {os.getpid()}) <= count


def test_workers_do_not_run_far_ahead(tmp_path):
    with WorkerPool(noting(tmp_path), PIECES, 1, ahead=2) as pool:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(list(tmp_path.iterdir())) == 2
        # What was taken is gone, what was not can still be had.
        assert pool.take(PIECES[0]) is None
        assert pool.take(PIECES[2]) == PIECES[2]
        # Each answer that is asked for makes room for the next piece.
        assert [pool.answer() for _ in range(11)] == [*PIECES[:2], *PIECES[3:]]
        assert pool.answer() is None


class Handed:
    """A queue that goes on when the other side has had what was put there for a while."""

    def __init__(self, queue: Any) -> None:
        self.queue, self.get = queue, queue.get

    def put(self, item: Any) -> None:
        self.queue.put(item)
        time.sleep(0.02)


def test_next_answer_is_available_immediately_after_another(tmp_path):
    pool = WorkerPool(noting(tmp_path), PIECES, 1, ahead=1)
    pool._answers = Handed(pool._answers)
    with pool:
        assert [pool.answer() for _ in PIECES] == PIECES
        assert pool.answer() is None


def test_worker_without_further_pieces_exits_at_once():
    before = multiprocessing.active_children()
    with WorkerPool(who, PIECES[:2], 2) as pool:
        answers = [pool.answer()[0] for _ in range(2)]
        begun = time.monotonic()
        while multiprocessing.active_children() != before and time.monotonic() - begun < 30:
            time.sleep(0.01)
        assert multiprocessing.active_children() == before
    assert sorted(answers) == PIECES[:2]
