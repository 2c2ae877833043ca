"""A process that works off pieces: how it is told, heard, and noticed to have died.

`multiprocessing.Pool` waits for ever for the piece of a worker that was killed.
`ProcessPoolExecutor` notices, but replaces no worker before Python 3.11 and forked ones never.
With either, workers outlive a parent that is killed; these end with it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Final

import torch

__all__ = [
    "GRACE",
    "POLL",
    "Job",
    "Piece",
    "Worker",
    "death_of",
    "end_workers",
    "heard",
    "interrupts_held_back",
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
