"""One owner of a folder at a time."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

from replaykit.recovery.open_file import OpenFile

__all__ = ["Exclusive", "let_go_in_children"]


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
