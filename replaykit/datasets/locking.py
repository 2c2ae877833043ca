"""One lock for each published directory, between processes and threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final

from replaykit.datasets.retry import Cancelled
from replaykit.filesystem import make_directory

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = ["cancellable_lock", "target_lock", "target_lock_if_free"]

_LOGGER = logging.getLogger("replaykit")


@contextmanager
def target_lock(target: Path) -> Iterator[None]:
    """Holds the lock of a target while the block runs; waits for whoever holds it.

    The lock is a file beside the target that the kernel unlocks when its holder dies, so that a
    dead process never blocks another. The file stays: removing it would let two waiters lock two
    files of one name. One line is logged when there is a wait.
    """
    from filelock import Timeout

    make_directory(target.parent)
    lock = _lock(target)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        # Where no file can be made this fails, and says so; the lock would be tried for ever.
        os.close(os.open(lock.lock_file, os.O_RDWR | os.O_CREAT, 0o666))
        _LOGGER.warning("%s is being prepared by another process; waiting for it", target)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def target_lock_if_free(target: Path) -> Iterator[bool]:
    """Holds the lock of a target while the block runs, if nobody else does; never waits.

    Yields whether it is held. Where there may be no lock, as on a disk that may only be read, it
    is not.
    """
    from filelock import Timeout

    lock = _lock(target)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _lock(target: Path) -> BaseFileLock:
    from filelock import FileLock

    return FileLock(target.with_name(f".{target.name}.lock"))


_STEP_S: Final = 0.1


@contextmanager
def cancellable_lock(path: Path, cancel: Event) -> Iterator[None]:
    """Holds the lock of a file that is fetched; who wants the same file waits, if not cancelled.

    Raises:
        Cancelled: ``cancel`` was set before the lock was had.

    Example:
        >>> import tempfile, threading
        >>> from pathlib import Path
        >>> from replaykit.datasets.locking import cancellable_lock
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with cancellable_lock(Path(folder) / "lock", threading.Event()):
        ...         print("alone")
        alone
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=_STEP_S)
            break
        except Timeout:
            if cancel.is_set():
                raise Cancelled from None
    try:
        yield
    finally:
        lock.release()
