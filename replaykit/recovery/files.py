"""Mapped files that grow."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from replaykit.filesystem import disk_errors, reserve_blocks

__all__ = ["MappedFile"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_GRAIN = mmap.PAGESIZE


class MappedFile:
    """The bytes of a file as memory that everybody who maps it shares.

    What was stored there is in the kernel's hands: it stays if this process is killed. Against loss
    of power it takes ``sync``.

    Args:
        path: the file; made if it is not there.
        nbytes: to begin with; a longer file keeps its length.

    Raises:
        OSError: the disk has too little room, or the file cannot be opened; names the file.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery import MappedFile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = MappedFile(Path(folder) / "numbers", 16)
        ...     file.bytes[3] = 7
        ...     (Path(folder) / "numbers").read_bytes()[:5]
        b'\\x00\\x00\\x00\\x07\\x00'
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        # Not through a link: what is written here lies in its folder.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        self._fd = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            self._map(max(nbytes, os.fstat(self._fd).st_size, 1))
        except BaseException:
            os.close(self.__dict__.pop("_fd"))
            raise

    def _map(self, nbytes: int) -> None:
        nbytes = -(-nbytes // _GRAIN) * _GRAIN
        before = os.fstat(self._fd).st_size
        if before < nbytes:
            # Blocks are taken now: where there is no room a store into the mapping would kill.
            try:
                with disk_errors(self.path, nbytes):
                    os.truncate(self._fd, nbytes)
                    reserve_blocks(self._fd, nbytes)
            except BaseException:
                # A file of that size would be taken to have its blocks.
                with contextlib.suppress(OSError):
                    os.truncate(self._fd, before)
                raise
        mapping = mmap.mmap(self._fd, nbytes, access=mmap.ACCESS_WRITE)
        self.bytes: Bytes = np.frombuffer(mapping, np.uint8)

    def __len__(self) -> int:
        return len(self.bytes)

    def grow(self, nbytes: int) -> None:
        """Makes room for so many bytes, at least doubling; what is there stays.

        Raises:
            OSError: the disk has too little room; nothing has changed.
        """
        if nbytes > len(self.bytes):
            self._map(max(nbytes, 2 * len(self.bytes)))

    def follow(self) -> None:
        """Maps the file as long as it is now: another process may have had it grow."""
        nbytes = os.fstat(self._fd).st_size
        if nbytes > len(self.bytes):
            self._map(nbytes)

    def sync(self) -> None:
        """Waits until what was stored is on the disk."""
        os.fsync(self._fd)

    def __del__(self) -> None:
        fd = self.__dict__.pop("_fd", None)
        if fd is not None:
            os.close(fd)
