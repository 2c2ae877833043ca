"""A file that is open as long as somebody needs a lock on it, and whether anybody does."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["OpenFile", "is_held", "open_to_lock"]


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
