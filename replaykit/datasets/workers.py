"""Pieces worked off by several processes: new ones, or those of a user's pool.

Workers are those of `worker`. A pool of the user's is only watched for deaths, which it hides.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Generator, Iterable
from itertools import islice
from multiprocessing.pool import Pool, ThreadPool
from typing import Any, Final

from replaykit.datasets.worker import (
    GRACE,
    POLL,
    Job,
    Piece,
    Worker,
    death_of,
    end_workers,
    heard,
    interrupts_held_back,
    start_worker,
)

__all__ = ["pool_size", "run_in_pool", "run_in_processes"]

_PIECES_AHEAD: Final = 4


def run_in_processes(
    job: Job,
    pieces: Iterable[Piece],
    count: int,
    *,
    threads: int,
    start_method: str | None,
    max_tasks: int | None,
) -> Generator[Any, None, None]:
    """Works off pieces in ``count`` new processes; yields what ``job`` returns as it comes.

    All workers are started from the thread that iterates; that thread must outlive the iteration
    or close it. However it ends, no worker is left.

    Args:
        threads: torch threads in each worker.
        max_tasks: pieces after which a worker is replaced.

    Raises:
        RuntimeError: a worker died; says how.

    What ``job`` raises is raised here, with the traceback of the worker as its cause.
    """
    context = multiprocessing.get_context(start_method)
    todo = iter(pieces)
    crew: list[Worker] = []
    leaving: list[Worker] = []

    def start() -> Worker:
        with interrupts_held_back():
            worker = start_worker(context, job, threads)
            crew.append(worker)
        return worker

    def dismiss(worker: Worker) -> None:
        worker.tell(None)
        crew.remove(worker)
        leaving[:] = [other for other in leaving if not other.is_gone()] + [worker]

    try:
        for piece in islice(todo, count):
            start().give(piece)
        while crew:
            for worker in heard(crew):
                yield worker.answer()
                piece_or_none = next(todo, None)
                spent = worker.given == max_tasks
                if spent or piece_or_none is None:
                    dismiss(worker)
                if piece_or_none is not None:
                    (start() if spent else worker).give(piece_or_none)
        for worker in leaving:
            worker.process.join(GRACE)
    finally:
        end_workers((*crew, *leaving))


def pool_size(pool: Any) -> int | None:
    """Returns how many processes a pool of the user's has, None where it does not tell.

    Raises:
        TypeError: it is no pool of processes. Threads share one state of torch's generator:
            results would depend on who comes first, and what the caller draws would change.
    """
    if isinstance(pool, ThreadPool) or not hasattr(pool, "apply_async"):
        raise TypeError(
            f"expected pool as a multiprocessing.Pool of processes, got {type(pool).__name__}"
        )
    return len(_processes(pool)) or None


def run_in_pool(pool: Pool, job: Job, pieces: Iterable[Piece]) -> Generator[Any, None, None]:
    """Works off pieces in a pool of the user's; yields what ``job`` returns, in order.

    Raises:
        RuntimeError: a process of the pool died. The pool itself replaces it, and would let its
            piece be waited for for ever.
    """
    todo = iter(pieces)
    ahead = _PIECES_AHEAD * (pool_size(pool) or 1)
    waiting = deque(pool.apply_async(job, (piece,)) for piece in islice(todo, ahead))
    crew: list[Any] = []
    while waiting:
        # Kept from before a death: the pool forgets the process that it replaces.
        crew += [process for process in _processes(pool) if process not in crew]
        waiting[0].wait(POLL)
        if waiting[0].ready():
            yield waiting.popleft().get()
            waiting.extend(pool.apply_async(job, (piece,)) for piece in islice(todo, 1))
            continue
        for process in crew:
            if process.exitcode not in (None, 0):
                raise death_of(process.exitcode)
        crew = [process for process in crew if process.exitcode is None]


def _processes(pool: Pool) -> list[Any]:
    # Not public. Without it (pools of other makers) deaths are not noticed.
    return list(getattr(pool, "_pool", ()))
