"""One owner of a folder at a time."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

__all__ = ["Exclusive"]


class Exclusive:
    """Holds a file's lock as long as it lives; the kernel lets go of it when the process dies.

    A forked child, which has the same open file, neither gives it back by going away nor gets it
    by being there.

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

    def __del__(self) -> None:
        fd = self.__dict__.pop("_fd", None)
        if fd is not None:
            os.close(fd)


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
