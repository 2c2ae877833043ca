"""A lock that processes share, whose holder may die."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from replaykit.interrupts import allowed, check
from replaykit.recovery.commit_lock import CommitLock
from replaykit.recovery.exclusive import let_go_in_children
from replaykit.recovery.open_file import OpenFile

__all__ = ["SharedLock", "check_flock"]

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
