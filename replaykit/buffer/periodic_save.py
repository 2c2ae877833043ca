"""Save a buffer in the background while it is written."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Annotated, Any

from replaykit.buffer.events import Event
from replaykit.declared import Positive, read_value, within

_LOG = logging.getLogger(__name__)

_Seconds = Annotated[float, within(0)]


class PeriodicSave:
    """Saves a buffer after a number of written rows and a number of seconds.

    A thread calls ``rb.dumps(path)``, so writers only wait while the save takes its snapshot. An
    error is logged, and the next due save tries again. ``rb.loads(path)`` reads the checkpoint.

    Args:
        buffer: the buffer.
        path: the directory of the checkpoint.
        every: number of rows that are written between the beginnings of two saves.
        min_seconds: minimum seconds between the beginnings of two saves.

    Attributes:
        count: number of finished saves.
        error: the error of the last save; None if it succeeded.

    Raises:
        ValueError: ``every`` is not an int of at least 1, or ``min_seconds`` is negative.

    Example:
        >>> import tempfile, torch
        >>> from replaykit import LazyTensorStorage, PeriodicSave, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> folder = tempfile.mkdtemp()
        >>> with PeriodicSave(rb, folder, every=10, min_seconds=0) as saves:
        ...     _ = rb.extend(torch.arange(12))
        >>> other = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> other.loads(folder)
        >>> saves.count, len(other)
        (1, 12)
    """

    def __init__(
        self,
        buffer: Any,
        path: str | os.PathLike[str],
        *,
        every: int = 100_000,
        min_seconds: float = 600.0,
    ) -> None:
        self._buffer, self.path = buffer, Path(path)
        self.every: int = read_value(Positive, every, "every")
        self.min_seconds: float = read_value(_Seconds, min_seconds, "min_seconds")
        self.count = 0
        self.error: Exception | None = None
        self._rows, self._begun = 0, time.monotonic()
        self._lock, self._closed = threading.Lock(), False
        self._thread: threading.Thread | None = None
        self._remove = buffer.on("write", self._count)

    def _count(self, event: Event) -> None:
        with self._lock:
            if self._closed:  # this call began before close()
                return
            self._rows += event.count
            now, running = time.monotonic(), self._thread is not None and self._thread.is_alive()
            if running or self._rows < self.every or now - self._begun < self.min_seconds:
                return
            self._rows, self._begun = 0, now
            self._thread = threading.Thread(target=self._save, name="replaykit-periodic-save")
            self._thread.start()

    def _save(self) -> None:
        try:
            self._buffer.dumps(self.path)
        except Exception as error:
            self.error = error
            _LOG.exception("the buffer could not be saved in %s", self.path)
        else:
            self.count, self.error = self.count + 1, None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a save that is being made; return False after ``timeout`` seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Begin no further save, and wait for one that is being made."""
        self._remove()
        with self._lock:
            self._closed = True
        self.wait()

    def __enter__(self) -> PeriodicSave:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
