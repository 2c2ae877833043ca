"""One lock for each published directory, between processes and threads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replaykit.filesystem import make_directory

__all__ = ["target_lock"]

_LOGGER = logging.getLogger("replaykit")


@contextmanager
def target_lock(target: Path) -> Iterator[None]:
    """Holds the lock of a target while the block runs; waits for whoever holds it.

    The lock is a file beside the target that the kernel unlocks when its holder dies, so that a
    dead process never blocks another. The file stays: removing it would let two waiters lock two
    files of one name. One line is logged when there is a wait.
    """
    from filelock import FileLock, Timeout

    make_directory(target.parent)
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _LOGGER.warning("%s is being prepared by another process; waiting for it", target)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
