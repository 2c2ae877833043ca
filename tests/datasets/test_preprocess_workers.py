"""Mapping a data set by several processes: how work is divided, and what happens to the dead."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import TensorStorage
from replaykit.datasets import dataset_passes
from replaykit.datasets.dataset_passes import preprocess_rows
from replaykit.datasets.transfers import target_lock
from replaykit.datasets.worker_pool import Piece, WorkerPool
from replaykit.filesystem import private_path, siblings

HERE = os.getpid()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def rows_of(count: int) -> TensorStorage:
    return TensorStorage(TensorDict({"x": torch.arange(count)}, [count]))


def run(fn: Callable[[Any], Any], dest: Path, rows: int = 40, **options: Any) -> TensorDict:
    options = {"num_workers": 2, "mp_start_method": "fork", **options}
    return preprocess_rows(rows_of(rows), fn, dest=dest, **options)[:]


def with_pid(row: TensorDict) -> TensorDict:
    return TensorDict({"x": row["x"], "pid": torch.tensor(os.getpid())}, [])


def pids(rows: TensorDict) -> list[int]:
    assert rows["x"].equal(torch.arange(len(rows)))
    return rows["pid"].tolist()


# -- division ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "workers", "shares"),
    [(40, 2, [20, 20]), (40, 3, [14, 14, 12]), (40, 4, [10] * 4), (3, 8, [1] * 3)],
)
def test_a_small_data_set_is_divided_evenly_among_all_workers(out, rows, workers, shares):
    share = Counter(pids(run(with_pid, out, rows=rows, num_workers=workers)))
    assert HERE not in share
    assert sorted(share.values(), reverse=True) == shares


def test_pieces_of_large_rows_are_bounded_in_bytes(out, monkeypatch):
    monkeypatch.setattr(dataset_passes, "_PIECE_BYTES", 5 * 8)
    share = Counter(pids(run(with_pid, out, max_tasks_per_child=1)))
    assert set(share.values()) == {5}


def test_workers_are_replaced_after_their_pieces(out):
    share = Counter(pids(run(with_pid, out, chunksize=4, max_tasks_per_child=2)))
    assert sum(share.values()) == 40
    assert max(share.values()) <= 8


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's count of memory")
@pytest.mark.parametrize("dim", [0, 1])
def test_memory_is_that_of_a_few_rows(out, dim):
    def private() -> int:
        """Bytes of this process that are no file's."""
        lines = Path("/proc/self/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024

    mebibyte = 1 << 20
    data = torch.ones(256, 256, 2048, dtype=torch.uint8)  # 128 MiB, in rows of half a mebibyte
    storage = TensorStorage(TensorDict({"x": data}, [256, 256]))
    most = 0

    def measured(row: TensorDict) -> TensorDict:
        nonlocal most
        most = max(most, private())
        return TensorDict({"sum": row["x"].sum()}, [])

    before = private()
    result = preprocess_rows(storage, measured, dim=dim, num_workers=0, dest=out)
    assert result[:]["sum"].eq(mebibyte / 2).all()
    assert most - before < 80 * mebibyte


# -- pools of the user's -------------------------------------------------------------------------


def noise(row: TensorDict) -> TensorDict:
    return TensorDict({"x": row["x"], "pid": torch.tensor(os.getpid()), "n": torch.rand(())}, [])


def test_pool_of_the_user_is_used_and_left_unchanged(out):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        states = [pool.apply(torch.get_rng_state) for _ in range(8)]
        rows = run(noise, out, pool=pool, chunksize=1)
        assert set(pids(rows)) <= {process.pid for process in pool._pool}
        assert len(rows["n"].unique()) == 40
        assert all(pool.apply(torch.get_rng_state).equal(states[0]) for _ in range(8))


@pytest.mark.parametrize("pool", [ThreadPool, ThreadPoolExecutor], ids=lambda pool: pool.__name__)
def test_thread_pools_are_refused_and_global_generator_is_unchanged(out, pool):
    calls: list[Any] = []
    state = torch.get_rng_state()
    with (
        pool(2) as threads,
        pytest.raises(TypeError, match=f"expected pool .* of processes, got {pool.__name__}"),
    ):
        run(calls.append, out, pool=threads)
    assert not calls
    assert torch.get_rng_state().equal(state)
    assert list(out.parent.iterdir()) == []


# -- the death of a worker -----------------------------------------------------------------------


def only_lock_left(out: Path) -> bool:
    return [path.name for path in out.parent.iterdir()] == [".out.lock"]


def dying(end: Callable[[], Any]) -> Callable[[TensorDict], TensorDict]:
    def dies(row: TensorDict) -> TensorDict:
        if row["x"] == 5 and os.getpid() != HERE:
            end()
        return row

    return dies


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("end", "words", "options"),
    [
        (kill, "by signal SIGKILL", {}),
        (kill, "by signal SIGKILL", {"num_workers": 1, "chunksize": 2}),
        (kill, "by signal SIGKILL", {"max_tasks_per_child": 1}),
        (kill, "by signal SIGKILL", {"max_tasks_per_child": 9}),
        (lambda: os._exit(3), "with exit code 3", {}),
    ],
)
def test_a_dead_worker_is_noticed(out, end, words, options):
    with pytest.raises(RuntimeError, match=rf"worker died .* {words}"):
        run(dying(end), out, **options)
    assert only_lock_left(out)
    assert multiprocessing.active_children() == []


@pytest.mark.timeout(60)
def test_killed_worker_of_the_user_pool_is_noticed(out):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        with pytest.raises(RuntimeError, match=r"worker died .* by signal SIGKILL"):
            run(dying(kill), out, pool=pool, chunksize=3)
        pool.terminate()
    assert only_lock_left(out)


class TwoArguments(Exception):
    """One that pickle can take apart and cannot put together."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (ValueError("on purpose"), ValueError, "^on purpose$"),
        (KeyboardInterrupt("on purpose"), KeyboardInterrupt, "on purpose"),
        (TwoArguments("on", "purpose"), RuntimeError, "TwoArguments: on$"),
        (ValueError(threading.Lock()), RuntimeError, "cannot be pickled.*ValueError: <unlocked"),
    ],
)
def test_error_contains_the_traceback_of_the_worker(out, error, raised, words):
    def fails(row: TensorDict) -> TensorDict:
        if os.getpid() != HERE:
            raise error
        return row

    with pytest.raises(raised, match=f"(?s){words}") as caught:
        run(fails, out)
    assert "in fails" in f"{caught.value}{caught.value.__cause__}"
    assert only_lock_left(out)
    assert multiprocessing.active_children() == []


@pytest.mark.timeout(60)
def test_an_error_does_not_wait_for_the_other_workers(out):
    def slow(row: TensorDict) -> TensorDict:
        if os.getpid() != HERE:
            if row["x"] == 0:
                raise ValueError("on purpose")
            time.sleep(600)
        return row

    with pytest.raises(ValueError, match="on purpose"):
        run(slow, out, chunksize=20)
    assert multiprocessing.active_children() == []


# -- the death of the parent ---------------------------------------------------------------------

PARENT = """
import os, sys, time
from pathlib import Path
import torch
from tensordict import TensorDict
from replaykit import TensorStorage
from replaykit.datasets import worker_pool
from replaykit.datasets.dataset_passes import preprocess_rows

folder, method, parent = Path(sys.argv[1]), sys.argv[2], os.getpid()

def stuck(row):
    if os.getpid() != parent:
        (folder / str(os.getpid())).touch()
        time.sleep(600)
    return row

if __name__ == "__main__":
    if method.endswith("-watched"):
        worker_pool._kill_me_with_parent = lambda: False
    storage = TensorStorage(TensorDict({"x": torch.arange(4)}, [4]))
    preprocess_rows(
        storage,
        stuck,
        dest=folder / "out",
        num_workers=2,
        chunksize=1,
        mp_start_method=method.split("-")[0],
    )
"""


INTERRUPTED = """
import multiprocessing, os, signal
from replaykit.datasets.worker_pool import WorkerPool

def work(piece):
    return piece

signal.signal(signal.SIGINT, signal.default_int_handler)
# By what runs around a fork: Python ignores what is raised there.
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
pieces = [(0, 1), (1, 2)]
try:
    with WorkerPool(work, pieces, 2, start_method="fork") as pool:
        print(list(pool.answers()))
except KeyboardInterrupt:
    print("interrupted", len(multiprocessing.active_children()))
"""


def test_an_interrupt_in_the_middle_of_a_fork_is_not_lost(run_python: Any) -> None:
    done = run_python(INTERRUPTED)
    assert (done.stdout, done.stderr) == ("interrupted 0\n", "")


def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        # One that has ended may stay in the table, if nobody here collects it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return not Path("/proc/self").exists()


@pytest.fixture
def parent_at_work(tmp_path: Path) -> Iterator[Callable[[str], tuple[Any, list[int]]]]:
    """Starts a process whose two workers, of these pids, will never be done."""
    started: list[subprocess.Popen[bytes]] = []

    def start(method: str) -> tuple[Any, list[int]]:
        command = [sys.executable, "-c", PARENT, str(tmp_path), method]
        parent = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
        started.append(parent)

        def workers() -> list[int]:
            assert parent.poll() is None, parent.stderr and parent.stderr.read()
            return [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]

        until(lambda: len(workers()) == 2, "two workers")
        return parent, workers()

    yield start
    for parent in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("fork", signal.SIGTERM),
        ("fork", signal.SIGKILL),
        ("spawn", signal.SIGKILL),
        pytest.param("forkserver", signal.SIGKILL, marks=pytest.mark.long),
        ("fork-watched", signal.SIGKILL),
        pytest.param("spawn-watched", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_no_worker_outlives_its_parent_and_the_next_call_clears_up(
    out, parent_at_work, method, number
):
    parent, workers = parent_at_work(method)
    assert len(siblings(out, "tmp")) == 1
    parent.send_signal(number)
    assert parent.wait(30) == -number
    until(lambda: not any(map(is_alive, workers)), "the end of the workers", 10)
    assert not out.exists()
    assert pids(run(with_pid, out, num_workers=0)) == [HERE] * 40
    assert siblings(out, "tmp") == []


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_an_interrupt_leaves_neither_workers_nor_files(out, parent_at_work, method):
    parent, workers = parent_at_work(method)
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == -signal.SIGINT
    assert not any(map(is_alive, workers))
    assert siblings(out, "tmp") == []
    assert not out.exists()
    assert said.count(b"Traceback") == 1  # that of the parent


def test_a_place_that_was_filled_during_the_wait_is_refused(out):
    left = private_path(out, "tmp")
    left.mkdir()
    with ThreadPoolExecutor(1) as threads:
        with target_lock(out):
            later = threads.submit(run, with_pid, out, num_workers=0)
            time.sleep(0.3)
            out.mkdir()
            (out / "mine").write_text("keep")
            assert left.exists()
        with pytest.raises(FileExistsError, match="neither"):
            later.result(30)
    assert (out / "mine").read_text() == "keep"
    assert not left.exists()


# -- pieces that the caller and workers share -----------------------------------------------------

PIECES = [(k, k + 1) for k in range(12)]


def who(piece: Piece) -> tuple[Piece, int]:
    return piece, os.getpid()


def noting(folder: Path) -> Callable[[Piece], Piece]:
    """Return a job that leaves a file for each piece that was begun."""

    def work(piece: Piece) -> Piece:
        (folder / str(piece[0])).touch()
        return piece

    return work


@pytest.mark.parametrize("count", [1, 20])
def test_caller_and_workers_share_the_pieces(count):
    found = []
    with WorkerPool(who, PIECES, count, start_method="fork") as pool:
        while (piece := pool.take()) is not None:
            found.append(who(piece))
        while (answer := pool.answer()) is not None:
            found.append(answer)
    assert sorted(piece for piece, _ in found) == PIECES
    assert len({process for _, process in found} - {os.getpid()}) <= count


def test_workers_do_not_run_far_ahead(tmp_path):
    with WorkerPool(noting(tmp_path), PIECES, 1, ahead=2, start_method="fork") as pool:
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
    pool = WorkerPool(noting(tmp_path), PIECES, 1, ahead=1, start_method="fork")
    pool._answers = Handed(pool._answers)
    with pool:
        assert [pool.answer() for _ in PIECES] == PIECES
        assert pool.answer() is None


def test_worker_without_further_pieces_exits_at_once():
    with WorkerPool(who, PIECES[:2], 2, start_method="fork") as pool:
        answers = [pool.answer()[0] for _ in range(2)]
        begun = time.monotonic()
        while multiprocessing.active_children() and time.monotonic() - begun < 30:
            time.sleep(0.01)
        assert multiprocessing.active_children() == []
    assert sorted(answers) == PIECES[:2]
