"""A file that is open as long as somebody needs a lock on it."""

from __future__ import annotations

import os

__all__ = ["OpenFile"]


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
