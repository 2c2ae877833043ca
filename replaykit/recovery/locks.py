"""Lock folders and files between processes, also when a holder dies."""

from __future__ import annotations

import functools
import gc
import importlib.util
import math
import os
import time
import weakref
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch

from replaykit.interrupts import Lock, allowed, check

__all__ = [
    "CommitLock",
    "Exclusive",
    "OpenFile",
    "SharedLock",
    "check_flock",
    "is_held",
    "let_go_in_children",
    "one_thread_in_children",
    "open_to_lock",
]


class OpenFile:
    """What has a file open, to hold the kernel's lock on it, and closes it when it goes."""

    _fd: int

    def let_go(self) -> None:
        """Closes the file here. A lock on it is gone when nobody has it open any more."""
        fd = self.__dict__.pop("_fd", None)
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.let_go()


def open_to_lock(path: Path, more: int = 0) -> int:
    """Returns a descriptor of a file, which no child program inherits; ``more`` are flags."""
    return os.open(path, os.O_RDWR | more | getattr(os, "O_CLOEXEC", 0), 0o600)


def is_held(path: Path) -> bool:
    """Whether somebody, this process or another, has a lock on a file.

    Raises:
        FileNotFoundError: it is not there. OSError: it cannot be told.
    """
    import fcntl

    fd = open_to_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


_held: weakref.WeakSet[OpenFile] | None = None
"""Those of this process; None until there is one."""


class Exclusive(OpenFile):
    """Holds a file's lock as long as it lives; the kernel lets go of it when the process dies.

    A forked child does not have it: it neither gives it back by going away nor holds it after
    this process has died.

    Args:
        path: the file; made if it is not there.

    Raises:
        BlockingIOError: somebody holds it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery import Exclusive
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     held = Exclusive(Path(folder) / "lock")
        ...     try:
        ...         Exclusive(Path(folder) / "lock")
        ...     except BlockingIOError:
        ...         print("held by another")
        held by another
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            if not _taken(self._fd):
                gc.collect()  # an owner that was let go may still wait for it
                if not _taken(self._fd):
                    raise BlockingIOError(f"{path} is held by somebody else")
        except BaseException:
            os.close(self.__dict__.pop("_fd"))
            raise
        let_go_in_children(self)


def let_go_in_children(held: OpenFile) -> None:
    """Has what holds a lock by an open file close it in forked children, which share that file."""
    global _held
    if _held is None:
        _held = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_let_go_of_all)
    _held.add(held)


def _let_go_of_all() -> None:
    for held in list(_held or ()):
        held.let_go()


def _taken(fd: int) -> bool:
    locks: Any
    try:
        import fcntl as locks
    except ImportError:
        import msvcrt as locks

        try:
            locks.locking(fd, locks.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    try:
        locks.flock(fd, locks.LOCK_EX | locks.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@functools.cache
def one_thread_in_children() -> None:
    """Has processes that fork off from now on begin with one thread of torch.

    The other threads of OpenMP are not there after a fork, and the first operation that is large
    enough for them would wait for them without end: of the child's own, or of this package. Workers
    of torch's DataLoader begin in the same way. A child may say otherwise.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_begin_alone)


def _begin_alone() -> None:
    torch.set_num_threads(1)


class CommitLock:
    """A re-entrant lock that settles what was done while it was held before it is let go.

    Args:
        settle: called by the thread that holds it, at its outermost release.

    Example:
        >>> from replaykit.recovery import CommitLock
        >>> lock = CommitLock(lambda: print("settled"))
        >>> with lock, lock:
        ...     print("held")
        held
        settled
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._lock = Lock()
        self._settle = settle
        self._depth = 0  # guarded by the lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Takes the lock; see ``threading.RLock``."""
        if not self._lock.acquire(blocking, timeout):
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        """Gives it back. What ``settle`` raises is raised, and it is given back all the same."""
        try:
            if self._depth == 1:
                self._settle()
        finally:
            self._depth -= 1
            self._lock.release()

    def _is_owned(self) -> bool:
        """Whether this thread holds it, as of a ``threading.RLock``."""
        return bool(self._lock._is_owned())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


_PAUSES = (20e-6, 40e-6, 80e-6, 160e-6, 320e-6, 640e-6, *[1e-3] * 50)
_PATIENT = (50e-3,) * 10
"""Seconds between looks whether it is free, before who waits is put to sleep until it is: whoever
has it keeps a processor meanwhile, and does not hand it over for a few microseconds of work. Who is
patient and takes it all the time looks rarely: of several such one goes on undisturbed for a while,
and leaves the other processors to who reads: with two of them, 0.95 of one, where looks every 10 ms
left 0.87."""

_ALL_THE_TIME = 300e-6
"""Seconds after which who has let go of it takes it again, who takes it all the time."""


def check_flock() -> None:
    """Raises RuntimeError on a system without such locks."""
    if importlib.util.find_spec("fcntl") is None:
        raise RuntimeError("processes cannot share a buffer on a system without flock")


class SharedLock(OpenFile, CommitLock):
    """A re-entrant lock of the threads of all processes that open its file.

    The kernel gives it to one process at a time, and takes it back from one that dies. It is free
    while nothing is under way: who waits for it sleeps.

    Args:
        path: the file; made if it is not there.
        enter: called by the thread that has just taken it, at its outermost level: what others
            have done is taken note of.
        settle: called at its outermost release.

    Raises:
        RuntimeError: the system has no such locks.

    Cost: two calls of the system.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery import SharedLock
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "lock"
        ...     one, other = (SharedLock(path, lambda: None, lambda: None) for _ in range(2))
        ...     with one:
        ...         other.acquire(blocking=False)
        False
    """

    def __init__(self, path: Path, enter: Callable[[], None], settle: Callable[[], None]) -> None:
        super().__init__(settle)
        check_flock()
        import fcntl

        self._enter = enter
        self._released = -math.inf
        self.apart = False
        """Whether a thread has it apart; see ``enter_apart``."""
        self._flock: Callable[[int, int], Any] = fcntl.flock
        self._take, self._try = fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB
        self._give = fcntl.LOCK_UN
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        # A forked child that had it open too would hold it after this process has died.
        let_go_in_children(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Takes the lock; see ``threading.RLock``. What ``enter`` raises leaves it free."""
        return self._acquire(blocking, timeout, _PAUSES)

    def acquire_patiently(self) -> bool:
        """The same for who can wait while others go on, if it takes it all the time itself."""
        often = time.monotonic() - self._released < _ALL_THE_TIME
        return self._acquire(True, -1, _PATIENT if often else _PAUSES)

    def _acquire(self, blocking: bool, timeout: float, pauses: tuple[float, ...]) -> bool:
        if not self._lock.acquire(blocking, timeout):
            return False
        if self._depth:
            self._depth += 1
            return True
        try:
            try:
                self._flock(self._fd, self._try)
            except BlockingIOError:
                if not self._tried(timeout if blocking else 0.0, pauses):
                    self._lock.release()
                    return False
            self._depth = 1  # what it does takes the lock as well
            self._enter()
        except BaseException:
            self._depth = 0
            self._flock(self._fd, self._give)
            self._lock.release()
            raise
        return True

    def _tried(self, timeout: float, pauses: tuple[float, ...]) -> bool:
        """Takes the file's lock; negative ``timeout``: however long that takes."""
        until = None
        for pause in pauses if timeout < 0 else chain(pauses, repeat(pauses[-1])):
            try:
                self._flock(self._fd, self._try)
                return True
            except BlockingIOError:
                if timeout >= 0:
                    now = time.monotonic()
                    until = now + timeout if until is None else until
                    if now >= until:
                        return False
                    pause = min(pause, until - now)
            # The kernel would wake all who wait, each time that somebody lets go.
            time.sleep(pause)
            check()
        with allowed:
            self._flock(self._fd, self._take)
        return True

    def release(self) -> None:
        """Gives it back. What ``settle`` raises is raised, and it is given back all the same."""
        try:
            if self._depth == 1:
                try:
                    self._settle()
                finally:
                    self._flock(self._fd, self._give)
                    self._released = time.monotonic()
        finally:
            self._depth -= 1
            self._lock.release()

    def enter_apart(self) -> bool:
        """Keeps the threads of this process out, and no other process: for who can tell afterwards
        whether one has written meanwhile. Who takes the lock inside gets no more than that.

        Returns:
            False, and nothing has changed, where this thread holds the lock already.
        """
        self._lock.acquire()
        if self._depth:
            self._lock.release()
            return False
        self._depth, self.apart = 1, True
        return True

    def leave_apart(self) -> None:
        """Ends that."""
        self._depth, self.apart = 0, False
        self._lock.release()
