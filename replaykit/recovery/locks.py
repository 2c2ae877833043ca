"""Locks between processes that end with their holder, and the registry of processes."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import time
import uuid
import weakref
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replaykit import native
from replaykit.interrupts import allowed, check


class OpenFile:
    """An object that holds a kernel lock on an open file as long as it lives."""

    _fd: int

    def drop(self) -> None:
        """Close the file in this process.

        The kernel releases the lock when no process has the file open any more.
        """
        fd = self.__dict__.pop("_fd", None)
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.drop()


def open_to_lock(path: Path, more: int = 0) -> int:
    """Open a file, with the additional flags ``more``; return its descriptor.

    Programs that this process starts do not inherit the descriptor.
    """
    return os.open(path, os.O_RDWR | more | getattr(os, "O_CLOEXEC", 0), 0o600)


def is_held(path: Path) -> bool:
    """Return whether this or another process has a lock on a file.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the system cannot check the lock.
    """
    fd = open_to_lock(path)
    try:
        return not _taken(fd)
    finally:
        os.close(fd)


_held: weakref.WeakSet[OpenFile] | None = None
"""The locks to drop in forked children; None until there is a lock."""


class Exclusive(OpenFile):
    """An exclusive lock on a file, held as long as the object lives.

    The kernel releases the lock when the process dies. A forked child does not hold the lock. The
    exit of the child does not release the lock. The lock ends with this process, even if the child
    lives.

    Args:
        path: the file, which is made if it does not exist.

    Raises:
        BlockingIOError: another object or process holds the lock.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.locks import Exclusive
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     held = Exclusive(Path(folder) / "lock")
        ...     try:
        ...         Exclusive(Path(folder) / "lock")
        ...     except BlockingIOError:
        ...         print("held by another")
        held by another
    """

    def __init__(self, path: Path) -> None:
        while not self._lock(path):  # another process removed the file before it was locked
            self.drop()
        drop_in_children(self)

    def _lock(self, path: Path) -> bool:
        """Lock the file, and return whether the path still names it."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            if not _taken(self._fd):
                gc.collect()  # an unreferenced owner of the lock may not have been collected yet
                if not _taken(self._fd):
                    raise BlockingIOError(f"{path} is locked by another holder")
            return os.path.samestat(os.fstat(self._fd), os.stat(path))
        except FileNotFoundError:
            return False
        except BaseException:
            self.drop()
            raise


def drop_in_children(held: OpenFile) -> None:
    """Close the file of a lock in forked children, which would share the lock."""
    global _held
    if _held is None:
        _held = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_drop_all)
    _held.add(held)


def _drop_all() -> None:
    for held in list(_held or ()):
        held.drop()


def _taken(fd: int) -> bool:
    """Lock an open file, and return whether that was possible."""
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
    """Let processes that are forked from now on begin with one thread of torch.

    The other threads of OpenMP do not exist after a fork. The child's first operation that is large
    enough for several threads, even an operation of this package, would wait for them forever.
    Workers of torch's DataLoader also begin with one thread. A child may set another number of
    threads.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


_CoreLock: Any = native.core.CommitLock


class CommitLock(_CoreLock):
    """A re-entrant lock that commits the changes made under it before its release.

    Args:
        commit: function that the thread with the lock calls before its outermost release.

    Example:
        >>> from replaykit.recovery.locks import CommitLock
        >>> lock = CommitLock(lambda: print("committed"))
        >>> with lock, lock:
        ...     print("held")
        held
        committed
    """

    def __init__(self, commit: Callable[[], None]) -> None:
        super().__init__(shared=False)
        self._commit = commit


_PAUSES = (20e-6, 40e-6, 80e-6, 160e-6, 320e-6, 640e-6, *[1e-3] * 50)
_PATIENT = (50e-3,) * 10
"""Seconds between tries to take the lock, before a thread sleeps until it is free.

During a pause the holder keeps its processor. So the lock does not change hands after every few
microseconds of work. A patient process that takes the lock all the time tries rarely. One of
several such processes then runs undisturbed for a while, and readers can use the other processors.
With two processors, readers get 0.95 of a processor. With a try every 10 ms they get 0.87.
"""

_ALL_THE_TIME = 300e-6
"""Most seconds from release to acquire if a process takes the lock all the time."""


def check_flock() -> None:
    """Raise RuntimeError on a system without ``flock``."""
    if importlib.util.find_spec("fcntl") is None:
        raise RuntimeError("processes cannot share a buffer on a system without flock")


class SharedLock(OpenFile, _CoreLock):
    """A re-entrant lock for the threads of all processes that open its file.

    Only one process can hold the lock, and the kernel releases it if that process dies. The lock is
    free while no operation is in progress. A waiting thread sleeps.

    Args:
        path: the file, which is made if it does not exist.
        enter: function that a thread calls at its outermost acquire, to follow the changes of other
            processes. If it raises an error, the lock is released.
        commit: function that a thread calls at its outermost release. The lock is released even if
            it raises an error.

    A ``patient`` acquire tries rarely if this process has released the lock recently. It is for
    threads that can wait while other threads work.

    A thread between ``enter_apart`` and ``leave_apart`` excludes only threads of this process. It
    must be able to check afterwards whether another process has written meanwhile.
    ``enter_apart`` returns False, and changes nothing, if the thread already holds the lock.

    Raises:
        RuntimeError: the system has no ``flock``.

    Cost: two system calls.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.locks import SharedLock
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "lock"
        ...     one, other = (SharedLock(path, lambda: None, lambda: None) for _ in range(2))
        ...     with one:
        ...         other.acquire(blocking=False)
        False
    """

    def __init__(self, path: Path, enter: Callable[[], None], commit: Callable[[], None]) -> None:
        _CoreLock.__init__(self, shared=True)
        check_flock()
        import fcntl

        self._enter, self._commit = enter, commit
        self._flock: Callable[[int, int], Any] = fcntl.flock
        self._take, self._try = fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB
        self._fd = open_to_lock(path, os.O_CREAT)
        # If a forked child kept the file open, it would hold the lock after this process has died.
        drop_in_children(self)

    def _wait(self, timeout: float, patient: bool) -> bool:
        """Take the lock of the file, and return whether it was possible.

        A negative ``timeout`` waits without limit.
        """
        often = patient and self.idle < _ALL_THE_TIME
        pauses, until = _PATIENT if often else _PAUSES, None
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
            # If these tries were blocking calls, the kernel would wake all waiting threads at each
            # release.
            time.sleep(pause)
            check()
        with allowed:
            self._flock(self._fd, self._take)
        return True


class Seat(OpenFile):
    """A number that no other live seat of the same folder has.

    The kernel releases the number of a process that dies. A forked child does not keep its parent's
    number, and takes another number.

    Args:
        folder: the folder with one file per number.

    Raises:
        RuntimeError: all numbers are in use.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.pace import Seat
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     one, other = Seat(Path(folder)), Seat(Path(folder))
        ...     numbers, taken = (one.number, other.number), not one.empty(1)
        ...     other.drop()
        ...     free = one.empty(1)
        ...     one.drop()
        >>> numbers, taken, free
        ((0, 1), True, True)
    """

    MOST = 1 << 12

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for number in range(self.MOST):
            self._fd = open_to_lock(self._file(number), os.O_CREAT)
            if _taken(self._fd):
                self.number = number
                drop_in_children(self)
                return
            self.drop()
        raise RuntimeError(f"expected at most {self.MOST} processes that share a buffer")

    def empty(self, number: int) -> bool:
        """Return whether no seat has that number."""
        try:
            return not is_held(self._file(number))
        except FileNotFoundError:
            return True

    def _file(self, number: int) -> Path:
        return self._folder / f"seat-{number}"


class ProcessRegistry(OpenFile):
    """The entry of this process among the processes that use a folder.

    The entry is a lock, which the kernel releases when the process dies. A forked child inherits
    the open file, and counts as a user until it calls ``drop``. So files that the child will open
    later outlive its parent.

    Args:
        path: the file that all users lock. It is made if it does not exist.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.locks import ProcessRegistry
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     member = ProcessRegistry(Path(folder) / "members")
        ...     unused = ProcessRegistry.is_unused(Path(folder) / "members")
        ...     member.drop()
        ...     unused, ProcessRegistry.is_unused(Path(folder) / "members")
        (False, True)
    """

    def __init__(self, path: Path) -> None:
        import fcntl

        self._fd = open_to_lock(path, os.O_CREAT)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    @staticmethod
    def is_unused(path: Path) -> bool:
        """Return whether the file exists and no process uses its folder."""
        try:
            return not is_held(path)
        except OSError:
            return False


_PREFIX = "views-"


class GivenViews(OpenFile):
    """The entry of this process in the record of processes with views of rows.

    The entry is a locked file. The kernel releases the lock when the process dies. A forked child
    has the same views. It inherits the file, and so also holds the lock.

    Args:
        folder: the folder of all entries.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.locks import GivenViews
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     one, other = GivenViews(Path(folder)), GivenViews(Path(folder))
        ...     one.hold()
        ...     held = other.of_others(), one.of_others()
        ...     one.drop()
        ...     held, other.of_others()
        ((True, False), False)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def hold(self) -> None:
        """Record that a caller in this process will get a view.

        Raises:
            OSError: the file cannot be made.
        """
        import fcntl

        while self._path is None:
            path = self._folder / f"{_PREFIX}{uuid.uuid4().hex}"
            self._fd = open_to_lock(path, os.O_CREAT | os.O_EXCL)
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            if path.exists():  # another process may have removed it before it was locked
                self._path = path
            else:
                super().drop()

    def drop(self) -> None:
        """Record that this process has no views left, and has marked their rows."""
        super().drop()
        path = self.__dict__.get("_path")
        self._path = None
        with contextlib.suppress(OSError):
            if path is not None and not is_held(path):  # a forked child may hold it
                path.unlink()

    def __del__(self) -> None:
        # Writes to the views are not marked. If a process finds the file unlocked, it marks all
        # rows.
        super().drop()

    def of_others(self) -> bool:
        """Return whether another process has views, or had views when it died.

        This removes the files of dead processes. Cost: a listing of the folder.
        """
        found = False
        own = None if self._path is None else self._path.name
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(_PREFIX)]
        for name in names:
            if name == own:
                continue
            found, path = True, self._folder / name
            with contextlib.suppress(FileNotFoundError):
                fd = open_to_lock(path)
                try:
                    if _taken(fd):
                        path.unlink()
                finally:
                    os.close(fd)
        return found


Array = np.ndarray[Any, Any]

_BITS = 48
_EVERYTHING = (1 << _BITS) - 1


class ElementLog:
    """A ring that lists which elements changed, for processes that follow later.

    The caller commits the count of all logged numbers with its other state. Logged numbers after
    that count are ignored.

    Args:
        numbers: int64 ``[C]``, the memory of the ring.

    Attributes:
        core: the ring in the compiled core, with the counts of all logged and of all committed
            numbers, which the caller sets.

    Example:
        >>> import numpy as np
        >>> from replaykit.recovery.locks import ElementLog
        >>> log = ElementLog(np.zeros(16, np.int64))
        >>> log.append([(8, np.array([3, 5])), (1, None)])
        >>> log.since(0, log.core.count)
        {8: array([3, 5]), 1: None}
        >>> log.since(0, 100) is None
        True
    """

    def __init__(self, numbers: Array) -> None:
        self._numbers, self.core = numbers, native.core.ElementLog(numbers)
        self._most = len(numbers) // 2

    def append(self, changes: list[tuple[int, Array | None]]) -> None:
        """Log changed elements of tables.

        Args:
            changes: pairs of a table's number and its changed elements, int64 ``[K]``; None for all
                elements.
        """
        core = self.core
        if not core.has_room(sum(1 if at is None else len(at) for _, at in changes)):
            tables = [table for table, at in changes if at is None or len(at)]
            tables += self.since(core.committed, core.count) or ()
            changes, core.count = [(table, None) for table in dict.fromkeys(tables)], core.committed
        for table, at in changes:
            core.append(table, np.array([_EVERYTHING]) if at is None else at)

    def since(self, known: int, count: int) -> dict[int, Array | None] | None:
        """Return the elements that have changed since the count was ``known``, by table.

        Returns:
            For each table its changed elements, or None for all elements. If there were too many
            changes, the whole result is None. Then all elements of all tables may have changed.
        """
        if count - known > self._most:
            return None
        if known == count:
            return {}
        numbers = self._numbers[np.arange(known, count) % len(self._numbers)]
        tables, elements = numbers >> _BITS, numbers & _EVERYTHING
        found: dict[int, Array | None] = {}
        for table in dict.fromkeys(tables.tolist()):
            own = elements[tables == table]
            found[table] = None if (own == _EVERYTHING).any() else np.unique(own)
        return found
