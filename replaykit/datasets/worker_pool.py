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
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import Pool, ThreadPool
from queue import SimpleQueue
from typing import Any, Final

import torch

from replaykit.interrupts import deferred

Job = Callable[[Any], Any]
"""A function that processes a piece of work and returns a result, which is not ``None``.

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

    def give(self, piece: Any) -> None:
        """Send the worker a piece to process.

        Raises:
            RuntimeError: the worker died.
        """
        self.given += 1
        try:
            self.connection.send(piece)
        except OSError:
            raise self.death() from None

    def answer(self) -> Any:
        """Return the result of the job, after waiting for it.

        Raises:
            RuntimeError: the worker died.

        An error in the job is raised to the caller, with the worker's traceback as its cause.
        """
        alive = True
        while not self.connection.poll():
            if not alive:  # another process may have the pipe, so that its end cannot be read
                raise self.death()
            # The order matters, because a worker may answer and die between the two calls.
            alive = self.process.is_alive()
            wait([self.connection, self.process.sentinel], POLL)
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


def start_worker(context: Any, job: Job, threads: int) -> Worker:
    """Start a worker process, which ends when the calling thread ends."""
    ours, theirs = context.Pipe()
    # A process that is forked later has a copy of `ours`. So the end of the parent does not close
    # the pipe, and a worker must notice it in another way.
    direct = context.get_start_method() != "forkserver"
    process = context.Process(target=_main, args=(theirs, job, threads, os.getpid(), direct))
    with theirs:
        process.start()
    return Worker(process, ours)


def end_workers(workers: Sequence[Worker]) -> None:
    """Kill workers, and wait until they have ended."""
    # SIGKILL is used because SIGTERM might run a handler of the parent. Finished work is already
    # in the files. A worker that has ended is not affected.
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join(GRACE)
        worker.connection.close()


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


def _answer(job: Job, piece: Any) -> tuple[Any, bytes | None, str]:
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


def run_in_pool(pool: Pool, job: Job, pieces: Iterable[Any]) -> Generator[Any, None, None]:
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
    """A single-use context manager of worker processes, each of which is driven by a thread.

    The thread that enters the block starts the workers, and must outlive the block. No worker
    remains after the block.

    Args:
        job: the function for a piece.
        count: the number of workers.
        threads: torch threads in each worker.
        start_method: the start method of `multiprocessing`; None for the default.
        max_tasks: count of pieces after which a new process replaces a worker.
    """

    def __init__(
        self,
        job: Job,
        count: int,
        *,
        threads: int = 1,
        start_method: str | None = None,
        max_tasks: int | None = None,
    ) -> None:
        self._job = job
        self._count = count
        self._threads = threads
        self._context: Any = multiprocessing.get_context(start_method)
        self._max_tasks = max_tasks
        self._workers: list[Worker] = []
        self._free: SimpleQueue[Worker] = SimpleQueue()
        self._drivers = ThreadPoolExecutor(count)
        self._is_closing = False

    def __enter__(self) -> WorkerPool:
        if self._context.get_start_method() == "fork":
            _give_back_free_memory()
        try:
            for _ in range(self._count):
                self._free.put(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        for worker in self._workers.copy():
            worker.process.kill()
        self._drivers.shutdown(cancel_futures=True)
        end_workers(self._workers)

    def submit(self, piece: Any) -> Future[Any]:
        """Return the future result of a piece. A piece that no worker has begun can be cancelled.

        The result raises RuntimeError if the worker dies. The message names the signal or exit
        code. An error in the job has the worker's traceback as its cause.
        """
        return self._drivers.submit(self._run, piece)

    def results(self, pieces: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of pieces in order of completion. Few pieces are begun in advance."""
        todo = iter(pieces)
        running = {self.submit(piece) for piece in islice(todo, _PIECES_AHEAD * self._count)}
        while running:
            done, running = futures.wait(running, return_when=futures.FIRST_COMPLETED)
            running |= {self.submit(piece) for piece in islice(todo, len(done))}
            yield from (future.result() for future in done)

    def _run(self, piece: Any) -> Any:
        worker = self._free.get()
        try:
            if worker.given == self._max_tasks:
                end_workers([worker])
                self._workers.remove(worker)
                worker = self._start()
            worker.give(piece)
            return worker.answer()
        finally:
            self._free.put(worker)

    def _start(self) -> Worker:
        # Hooks around a fork discard a KeyboardInterrupt, so an interrupt would be lost.
        with deferred:
            worker = start_worker(self._context, self._job, self._threads)
            self._workers.append(worker)
        if self._is_closing:
            worker.process.kill()
        return worker


def _give_back_free_memory() -> None:
    """Return the free pages of the heap to the system, in a few milliseconds.

    After a fork, the first write of either process to a free page would copy that page. Large pages
    would be copied in small pieces. New pages only have to be zeroed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # of glibc
        trim(0)
