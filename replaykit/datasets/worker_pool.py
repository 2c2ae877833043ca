"""Share work among processes, and notice when one dies."""

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
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import Pool, ThreadPool
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final

import torch

__all__ = [
    "GRACE",
    "POLL",
    "Job",
    "Piece",
    "Worker",
    "WorkerPool",
    "death_of",
    "end_workers",
    "heard",
    "interrupts_held_back",
    "pool_size",
    "run_in_pool",
    "run_in_processes",
    "start_worker",
]

Piece = tuple[int, int]
Job = Callable[[Piece], Any]
"""Works off a piece and returns what is to be known of it, not ``None``; can be sent to another
process, and so can what it returns."""

POLL: Final = 1.0
"""Seconds between looks for deaths that no descriptor tells of."""
GRACE: Final = 10.0
"""Seconds that a worker gets to end by itself."""
_PR_SET_PDEATHSIG: Final = 1


@dataclass(eq=False)
class Worker:
    """A process and the way to it; ``given`` is how many pieces it has had."""

    process: Any
    connection: Connection
    given: int = 0

    def give(self, piece: Piece) -> None:
        """Has it work off a piece.

        Raises:
            RuntimeError: it died.
        """
        self.given += 1
        self.tell(piece)

    def tell(self, message: Piece | None) -> None:
        """Sends a piece, or that there is none any more."""
        try:
            self.connection.send(message)
        except OSError:
            if message is not None:
                raise self.death() from None

    def has_answered(self) -> bool:
        """Whether there is something to read: an answer, or the end."""
        # In this order: a worker may answer and die in between.
        alive = self.process.is_alive()
        return self.connection.poll() or not alive

    def answer(self) -> Any:
        """Returns what the job has returned.

        Raises:
            RuntimeError: it died.

        What the job raised is raised, with its traceback there as the cause.
        """
        try:
            found, error, text = self.connection.recv()
        except (EOFError, OSError):
            raise self.death() from None
        if found is None:
            raise _restored(error, text)
        return found

    def death(self) -> RuntimeError:
        """Returns the error that says how it died."""
        self.process.join(GRACE)
        return death_of(self.process.exitcode)

    def is_gone(self) -> bool:
        """Whether it has ended; then the way to it is closed."""
        if self.process.is_alive():
            return False
        self.connection.close()
        return True


def start_worker(context: Any, job: Job, threads: int) -> Worker:
    """Starts a process that does a job; it ends with the thread that calls this."""
    ours, theirs = context.Pipe()
    # A process that is forked from this one later has a copy of `ours`, so that a worker may wait
    # in vain for its end: that is no way to notice that the parent is gone.
    direct = context.get_start_method() != "forkserver"
    process = context.Process(target=_main, args=(theirs, job, threads, os.getpid(), direct))
    with theirs:
        process.start()
    return Worker(process, ours)


def end_workers(workers: Sequence[Worker]) -> None:
    """Ends workers, whatever they are at; none is left."""
    # Killed, not asked: what a worker has done is in the files, and asked by SIGTERM it might
    # run a handler of its parent's. A worker that has ended is not touched.
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join(GRACE)
        worker.connection.close()


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Has an interrupt (SIGINT) raise what it raises at the end of the block.

    What Python itself runs around a fork swallows a KeyboardInterrupt: this process would go on as
    if nobody had asked it to end.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


def heard(crew: Sequence[Worker]) -> list[Worker]:
    """Waits for answers and deaths; some worker of the crew owes an answer."""
    while True:
        wait([part for w in crew for part in (w.connection, w.process.sentinel)], POLL)
        heard = [worker for worker in crew if worker.has_answered()]
        if heard:
            return heard


def death_of(code: int | None) -> RuntimeError:
    """Returns the error that says how a process died, by its exit code."""
    if code is not None and code < 0:
        known = {int(number): number.name for number in signal.Signals}
        how = f"by signal {known.get(-code, -code)}"
    else:
        how = f"with exit code {code}"
    return RuntimeError(
        f"a worker died before it was done, {how}; where memory ran out, use fewer workers or "
        "smaller rows"
    )


class _RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of what is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _restored(error: bytes | None, text: str) -> BaseException:
    import cloudpickle

    try:
        restored = cloudpickle.loads(error)
    except Exception:  # of a class that this process cannot make: its text is told
        restored = None
    if not isinstance(restored, BaseException):
        return RuntimeError(f"a worker raised what cannot be sent to this process:\n{text}")
    restored.__cause__ = _RemoteTraceback(text)
    return restored


# -- in a worker ---------------------------------------------------------------------------------


def _main(connection: Connection, job: Job, threads: int, parent: int, direct: bool) -> None:
    _end_with(parent, direct)
    # An interrupt goes to all processes of a terminal; it is the parent that acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(threads)
    try:
        while (piece := connection.recv()) is not None:
            connection.send(_answer(job, piece))
    except (EOFError, OSError):
        return  # nobody is there any more


def _answer(job: Job, piece: Piece) -> tuple[Any, bytes | None, str]:
    import cloudpickle

    try:
        return job(piece), None, ""
    except BaseException as error:
        text = traceback.format_exc()
        try:
            return None, cloudpickle.dumps(error), text
        except Exception:  # it cannot be pickled: its text is told
            return None, None, text


def _end_with(parent: int, direct: bool) -> None:
    """Makes this process end when its parent does, however that ends and whatever runs here.

    ``direct``: the parent has started this process itself, not through a fork server.
    """
    if direct and _kill_me_with_parent():
        if os.getppid() != parent:  # it died before the kernel was told
            os._exit(1)
        return
    threading.Thread(target=_watch, args=(parent, direct), daemon=True).start()


def _kill_me_with_parent() -> bool:
    """Has the kernel end this process together with the thread that started it (Linux)."""
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


class WorkerPool:
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

    def __enter__(self) -> WorkerPool:
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
