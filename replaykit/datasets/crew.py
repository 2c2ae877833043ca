"""Pieces that this process and workers take from one heap, side by side.

The process that waits for workers has nothing to do meanwhile, and its memory and caches are warm:
one process fewer has to be started where it takes pieces itself. A thread hears the workers, so
that none is idle while the caller works.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import threading
from collections import deque
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Any

from replaykit.datasets.worker import (
    Job,
    Piece,
    Worker,
    end_workers,
    heard,
    interrupts_held_back,
    start_worker,
)

__all__ = ["Crew"]


class Crew:
    """Workers that take pieces from the front of a heap; a context manager, to be used once.

    They are started on entering, by the thread that enters, which must outlive the block. Who gets
    no piece any more is ended at once, beside the work of the others and of the caller. However
    it ends, no worker is left.

    Args:
        job: what is done with a piece.
        pieces: the heap.
        count: how many workers at most.
        ahead: how many pieces may be with workers or answered and not yet asked for, at least
            ``count``; by default any number.
    """

    def __init__(
        self, job: Job, pieces: Iterable[Piece], count: int, *, ahead: int | None = None
    ) -> None:
        self._job = job
        self._todo = deque(pieces)
        self._count = count
        self._ahead = len(self._todo) if ahead is None else max(ahead, count)
        self._given = 0
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._working: list[Worker] = []
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        # Of the heap, what was given, and who is idle.
        self._lock = threading.Lock()
        self._is_closing = False
        self._listener: threading.Thread | None = None

    def __enter__(self) -> Crew:
        context = multiprocessing.get_context()
        if context.get_start_method() == "fork":
            _give_back_free_memory()
        try:
            while self._todo and len(self._workers) < self._count:
                with interrupts_held_back():
                    worker = start_worker(context, self._job, 1)
                    self._workers.append(worker)
                self._working.append(worker)
                self._hand(worker)
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        for worker in self._workers:
            worker.process.kill()
        if self._listener is not None and self._listener.ident is not None:
            self._listener.join()
        end_workers(self._workers)

    def take(self, piece: Piece | None = None) -> Piece | None:
        """Returns the next piece, or this one, for the caller to work off; ``None`` if it is gone.

        Nobody else gets it.
        """
        with self._lock:
            if not self._todo or (piece is not None and piece not in self._todo):
                return None
            if piece is None:
                return self._todo.popleft()
            self._todo.remove(piece)
            return piece

    def answer(self, *, waits: bool = True) -> Any:
        """Returns what the job has returned of a piece that a worker took; whichever is first.

        ``None`` where no worker has a piece, or, if it must not wait, none has answered.

        Raises:
            RuntimeError: a worker died; says how.

        What the job raised in a worker is raised here, with its traceback there as the cause.
        """
        if not self._given:
            return None
        try:
            found, error = self._answers.get(block=waits)
        except Empty:
            return None
        if error is not None:
            raise error
        with self._lock:
            self._given -= 1
            if self._idle and self._todo:
                self._hand(self._idle.pop())
        return found

    def _hand(self, worker: Worker) -> None:
        """Gives a worker the next piece, or none; the caller holds the lock, or is alone.

        Who gets none any more ends, so that nobody waits later until its memory is taken apart.
        """
        if not self._todo:
            self._working.remove(worker)
            worker.process.kill()
            return
        if self._given >= self._ahead:
            self._idle.append(worker)
            return
        self._given += 1
        worker.give(self._todo.popleft())

    def _listen(self) -> None:
        """Hears the workers until they are ended."""
        try:
            while self._working and not self._is_closing:
                for worker in heard(self._working):
                    found = worker.answer()
                    # Together: who had the answer and asks again would find nothing given.
                    with self._lock:
                        self._answers.put((found, None))
                        self._hand(worker)
        except BaseException as error:  # for the caller, who asks for answers
            self._answers.put((None, error))


def _give_back_free_memory() -> None:
    """Returns the free pages of the heap to the system, a few milliseconds.

    After a fork each of them would be copied when either process takes it again, and large pages
    in small pieces; new ones only have to be zeroed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # of glibc
        trim(0)
