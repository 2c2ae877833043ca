"""Pools of worker processes, which report the death of a worker."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import Pool, ThreadPool
from queue import Empty, SimpleQueue
from typing import Any, Final

import torch

from replaykit.interrupts import deferred

Piece = Any
"""A description of a piece of work, which is not ``None``."""
Job = Callable[[Piece], Any]
"""A function that processes a piece and returns a result, which is not ``None``.

Function, piece and result must be picklable.
"""

POLL: Final = 1.0
"""Seconds between checks for deaths that no file descriptor signals."""
GRACE: Final = 10.0
"""Seconds that a worker has to end before it is killed."""
_PR_SET_PDEATHSIG: Final = 1


@dataclass(eq=False)
class Worker:
    """A process and the connection to it; ``given`` counts the pieces sent to it."""

    process: Any
    connection: Connection
    given: int = 0

    def give(self, piece: Piece) -> None:
        """Send the worker a piece to process.

        Raises:
            RuntimeError: the worker died.
        """
        self.given += 1
        try:
            self.connection.send(piece)
        except OSError:
            raise self.death() from None

    def has_answered(self) -> bool:
        """Return whether an answer or the end of the connection can be read."""
        # The order matters, because a worker may answer and die between the two calls.
        alive = self.process.is_alive()
        return self.connection.poll() or not alive

    def answer(self) -> Any:
        """Return the result of the job.

        Raises:
            RuntimeError: the worker died.

        An error in the job is raised to the caller, with the worker's traceback as its cause.
        """
        try:
            found, error, text = self.connection.recv()
        except (EOFError, OSError):
            raise self.death() from None
        if found is None:
            raise _restored(error, text)
        return found

    def death(self) -> RuntimeError:
        """Return the error for the death of this worker."""
        self.process.join(GRACE)
        return death_of(self.process.exitcode)


def heard(group: Sequence[Worker]) -> list[Worker]:
    """Return the workers that answered or died, after waiting for the first of them.

    At least one of the given workers must have a piece.
    """
    while True:
        wait([part for w in group for part in (w.connection, w.process.sentinel)], POLL)
        heard = [worker for worker in group if worker.has_answered()]
        if heard:
            return heard


def death_of(code: int | None) -> RuntimeError:
    """Return the error for the death of a process with this exit code."""
    if code is not None and code < 0:
        known = {int(number): number.name for number in signal.Signals}
        how = f"by signal {known.get(-code, -code)}"
    else:
        how = f"with exit code {code}"
    return RuntimeError(
        f"a worker died before it was done, {how}; if memory ran out, use fewer workers or "
        "smaller rows"
    )


class _RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of the error in this process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _restored(error: bytes | None, text: str) -> BaseException:
    import cloudpickle

    try:
        restored = cloudpickle.loads(error)
    except Exception:  # its class cannot be created here, so the traceback text replaces it
        restored = None
    if not isinstance(restored, BaseException):
        return RuntimeError(f"a worker raised an error that cannot be pickled:\n{text}")
    restored.__cause__ = _RemoteTraceback(text)
    return restored


# -- in a worker ---------------------------------------------------------------------------------


def _main(connection: Connection, job: Job, threads: int, parent: int, direct: bool) -> None:
    _end_with(parent, direct)
    # A terminal sends an interrupt to all its processes. Only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(threads)
    try:
        while True:
            connection.send(_answer(job, connection.recv()))
    except (EOFError, OSError):
        return  # the parent has ended


def _answer(job: Job, piece: Piece) -> tuple[Any, bytes | None, str]:
    import cloudpickle

    try:
        return job(piece), None, ""
    except BaseException as error:
        text = traceback.format_exc()
        try:
            return None, cloudpickle.dumps(error), text
        except Exception:  # it cannot be pickled, so the traceback text replaces it
            return None, None, text


def _end_with(parent: int, direct: bool) -> None:
    """Make this process end when its parent ends, even if the parent is killed.

    ``direct`` is True if the parent started this process without a fork server.
    """
    if direct and _kill_me_with_parent():
        if os.getppid() != parent:  # the parent died before the call of prctl
            os._exit(1)
        return
    threading.Thread(target=_watch, args=(parent, direct), daemon=True).start()


def _kill_me_with_parent() -> bool:
    """Make Linux kill this process when the thread that started it ends."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    nothing = ctypes.c_ulong(0)
    arguments = ctypes.c_ulong(signal.SIGKILL), nothing, nothing, nothing
    return libc.prctl(_PR_SET_PDEATHSIG, *arguments) == 0


def _watch(parent: int, direct: bool) -> None:
    handle = multiprocessing.parent_process()
    while handle is not None and handle.is_alive():
        if os.getppid() != parent if direct else not _exists(parent):
            break
        handle.join(POLL)
    os._exit(1)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


_PIECES_AHEAD: Final = 4


def pool_size(pool: Any) -> int | None:
    """Return the number of processes in a user's pool, or None if it is not known.

    Raises:
        TypeError: ``pool`` is not a pool of processes. Threads would share torch's global
            generator, so their order would change the results and the caller's random numbers.
    """
    if isinstance(pool, ThreadPool) or not hasattr(pool, "apply_async"):
        raise TypeError(
            f"expected pool as a multiprocessing.Pool of processes, got {type(pool).__name__}"
        )
    return len(_processes(pool)) or None


def run_in_pool(pool: Pool, job: Job, pieces: Iterable[Piece]) -> Generator[Any, None, None]:
    """Process pieces in a user's pool, and yield the results in order.

    Raises:
        RuntimeError: a process of the pool died. The pool replaces the process but loses its piece,
            so a wait for the result would never end.
    """
    todo = iter(pieces)
    ahead = _PIECES_AHEAD * (pool_size(pool) or 1)
    waiting = deque(pool.apply_async(job, (piece,)) for piece in islice(todo, ahead))
    processes: list[Any] = []
    while waiting:
        # The list keeps dead processes, because the pool forgets a process that it replaces.
        processes += [process for process in _processes(pool) if process not in processes]
        waiting[0].wait(POLL)
        if waiting[0].ready():
            yield waiting.popleft().get()
            waiting.extend(pool.apply_async(job, (piece,)) for piece in islice(todo, 1))
            continue
        for process in processes:
            if process.exitcode not in (None, 0):
                raise death_of(process.exitcode)
        processes = [process for process in processes if process.exitcode is None]


def _processes(pool: Pool) -> list[Any]:
    # The attribute is private. In pools without it, deaths are not noticed.
    return list(getattr(pool, "_pool", ()))


class WorkerPool:
    """A single-use context manager of workers that take pieces from a queue.

    The thread that enters the block starts the workers, and must outlive the block. A worker ends
    as soon as it gets no further piece. No worker remains after the block.

    Args:
        job: the function for a piece.
        pieces: the queue of pieces.
        count: the greatest number of workers.
        ahead: the greatest count of pieces under way. A piece is under way from the time a worker
            gets it until the caller takes its result. ``ahead`` is at least ``count``. By default
            there is no limit.
        threads: torch threads in each worker.
        start_method: the start method of `multiprocessing`; None for the default.
        max_tasks: count of pieces after which a new process replaces a worker.
    """

    def __init__(
        self,
        job: Job,
        pieces: Iterable[Piece],
        count: int,
        *,
        ahead: int | None = None,
        threads: int = 1,
        start_method: str | None = None,
        max_tasks: int | None = None,
    ) -> None:
        self._job = job
        self._todo = deque(pieces)
        self._count = count
        self._ahead = len(self._todo) if ahead is None else max(ahead, count)
        self._threads = threads
        self._context: Any = multiprocessing.get_context(start_method)
        self._max_tasks = max_tasks
        self._given = 0
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._working: list[Worker] = []
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        # Guards `_todo`, `_given` and `_idle`.
        self._lock = threading.Lock()
        self._is_closing = False
        self._listener: threading.Thread | None = None

    def __enter__(self) -> WorkerPool:
        if self._context.get_start_method() == "fork":
            _give_back_free_memory()
        try:
            while self._todo and len(self._workers) < self._count:
                self._hand(self._start())
            self._listener = threading.Thread(target=self._listen, daemon=True)
            self._listener.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> Worker:
        """Start a worker process, which ends when the calling thread ends."""
        # A process that is forked later has a copy of `ours`. So the end of the parent does not
        # close the pipe, and a worker must notice it in another way.
        direct = self._context.get_start_method() != "forkserver"
        # Hooks around a fork discard a KeyboardInterrupt, so an interrupt would be lost.
        with deferred:
            ours, theirs = self._context.Pipe()
            given = (theirs, self._job, self._threads, os.getpid(), direct)
            process = self._context.Process(target=_main, args=given)
            with theirs:
                process.start()
            worker = Worker(process, ours)
            self._workers.append(worker)
        self._working.append(worker)
        return worker

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        self._kill_workers()
        if self._listener is not None and self._listener.ident is not None:
            self._listener.join()
        self._kill_workers()  # the listener may have replaced some
        for worker in self._workers:
            worker.process.join(GRACE)
            worker.connection.close()

    def _kill_workers(self) -> None:
        # SIGKILL is used because SIGTERM might run a handler of the parent. Finished work is
        # already in the files. A worker that has ended is not affected.
        for worker in self._workers:
            worker.process.kill()

    def take(self, piece: Piece | None = None) -> Piece | None:
        """Return the next piece, or a given piece, for the caller to process.

        No worker gets the returned piece. The result is ``None`` if a worker has the given piece
        already, or if no piece is left.
        """
        with self._lock:
            if not self._todo or (piece is not None and piece not in self._todo):
                return None
            if piece is None:
                return self._todo.popleft()
            self._todo.remove(piece)
            return piece

    def answers(self) -> Iterator[Any]:
        """Yield the results of the workers until no worker has a piece; see `answer`."""
        while (found := self.answer()) is not None:
            yield found

    def answer(self, *, waits: bool = True) -> Any:
        """Return the first available result of the workers.

        The result is ``None`` if no worker has a piece. Without ``waits``, it is also ``None`` if
        no result is available yet.

        Raises:
            RuntimeError: a worker died. The message names the signal or exit code.

        An error in the job is raised to the caller, with the worker's traceback as its cause.
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
        """Send a worker the next piece, if there is one.

        The caller must hold the lock, or be the only thread. If there is no further piece, the
        worker is killed, so that the system soon frees its memory. If the worker has had its
        greatest count of pieces, a new one replaces it.
        """
        is_spent = self._max_tasks is not None and worker.given >= self._max_tasks
        if is_spent or not self._todo:
            self._working.remove(worker)
            worker.process.kill()
            if not self._todo:
                return
            worker = self._start()
        if self._given >= self._ahead:
            self._idle.append(worker)
            return
        self._given += 1
        worker.give(self._todo.popleft())

    def _listen(self) -> None:
        """Receive the answers of the workers until all have ended."""
        try:
            while self._working and not self._is_closing:
                for worker in heard(self._working):
                    found = worker.answer()
                    # Both steps are under one lock. Otherwise the caller could take the answer in
                    # between, and find no worker with a piece.
                    with self._lock:
                        self._answers.put((found, None))
                        self._hand(worker)
        except BaseException as error:  # answer() raises it to the caller
            self._answers.put((None, error))


def _give_back_free_memory() -> None:
    """Return the free pages of the heap to the system, in a few milliseconds.

    After a fork, the first write of either process to a free page would copy that page. Large pages
    would be copied in small pieces. New pages only have to be zeroed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # of glibc
        trim(0)
