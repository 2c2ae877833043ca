"""Opening the files that a directory is said to hold."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from replaykit.errors import CheckpointError
from replaykit.filesystem import file_limit_errors

__all__ = ["open_file"]

_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")
)
"""Neither through a link, which may lead anywhere, nor waiting for a pipe."""


def open_file(file: Path, size: int | None = None) -> int:
    """Opens a regular file for reading; returns its descriptor.

    Args:
        size: how many bytes it must have; None: any.

    Raises:
        FileNotFoundError: there is none. CheckpointError: it is a link, no file, or torn.
        TooManyFilesError: the process has no descriptor left.
    """
    try:
        with file_limit_errors(file.parent):
            opened = os.open(file, _FLAGS)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK):
            raise
        raise CheckpointError(f"{file} is damaged: it is a link") from None
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{file} is damaged: it is no file")
        if size is not None and found.st_size != size:
            raise CheckpointError(f"{file} is torn: expected {size} bytes, got {found.st_size}")
    except BaseException:
        os.close(opened)
        raise
    return opened
