"""Pieces that the caller and workers share: each is worked off once, and no worker is left."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaykit.datasets.worker_pool import WorkerPool

Piece = tuple[int, int]
PIECES = [(k, k + 1) for k in range(12)]


def who(piece: Piece) -> tuple[Piece, int]:
    return piece, os.getpid()


def die(piece: Piece) -> None:
    """Leaves a process with the worker's pipes, so that their ends do not show its death."""
    if not os.fork():
        time.sleep(12)
        os._exit(0)
    os._exit(3)


class RuleFinding:
    """Leaves a file for each piece that was begun, and ends with the file of its number."""

    def __init__(self, folder: Path, last: Piece = (99, 100)) -> None:
        self.folder, self.last = folder, last

    def __call__(self, piece: Piece) -> Piece:
        (self.folder / str(piece[0])).touch()
        while piece >= self.last and not (self.folder / "go").exists():
            time.sleep(0.01)
        return piece


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    children = multiprocessing.active_children()
    yield
    assert multiprocessing.active_children() == children
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize(("count", "max_tasks"), [(1, None), (3, None), (20, None), (2, 5)])
def test_each_piece_is_processed_once(count, max_tasks):
    with WorkerPool(who, count, max_tasks=max_tasks) as pool:
        found = list(pool.results(PIECES))
    assert sorted(piece for piece, _ in found) == PIECES
    processes = [process for _, process in found]
    assert os.getpid() not in processes
    assert max_tasks or len(set(processes)) <= count
    assert max(map(processes.count, processes)) <= (max_tasks or len(PIECES))


def test_workers_continue_while_the_caller_works(tmp_path):
    with WorkerPool(RuleFinding(tmp_path), 1) as pool:
        futures = [pool.submit(piece) for piece in PIECES]
        begun = time.monotonic()
        while len(list(tmp_path.iterdir())) < len(PIECES) and time.monotonic() - begun < 30:
            time.sleep(0.01)
        assert not any(future.cancel() for future in futures)
        assert [future.result() for future in futures] == PIECES


def test_caller_takes_pieces_that_no_worker_has_begun(tmp_path):
    with WorkerPool(RuleFinding(tmp_path, PIECES[0]), 1) as pool:
        first, second, third = (pool.submit(piece) for piece in PIECES[:3])
        while not (tmp_path / "0").exists():
            time.sleep(0.01)
        assert (first.cancel(), second.cancel()) == (False, True)
        (tmp_path / "go").touch()
        assert (first.result(), third.result()) == (PIECES[0], PIECES[2])
    assert not (tmp_path / "1").exists()


def test_workers_do_not_run_far_ahead(tmp_path):
    """One result is with the caller, and four pieces are under way."""
    with WorkerPool(RuleFinding(tmp_path), 1) as pool:
        results = pool.results(PIECES)
        first = next(results)
        time.sleep(0.2)
        assert len(list(tmp_path.iterdir())) < len(PIECES)
        assert sorted([first, *results]) == PIECES


def test_death_is_noticed_while_another_process_has_the_pipes():
    with WorkerPool(die, 1) as pool, pytest.raises(RuntimeError, match="with exit code 3"):
        pool.submit(PIECES[0]).result(timeout=9)
