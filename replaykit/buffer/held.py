"""The lock of a buffer's storage, held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replaykit.storages import Storage

if TYPE_CHECKING:
    from replaykit.buffer.core import BufferCore

__all__ = ["Held"]


class Held:
    """The lock of a buffer's storage, also while ``set_storage`` exchanges that.

    A class, since a generator takes ten times as long as the lock itself.
    """

    __slots__ = ("_buffer", "_lock", "_patient", "_settled")

    def __init__(self, buffer: BufferCore, patient: bool, settled: bool) -> None:
        self._buffer, self._patient, self._settled = buffer, patient, settled

    def __enter__(self) -> Storage:
        buffer = self._buffer
        if self._settled and (buffer._prefetcher is not None or buffer._drawn_by):
            buffer._settle_draws()
        while True:
            storage = self._buffer._storage
            lock = self._lock = storage.lock
            if self._patient:
                lock.acquire_patiently()
            elif (ahead := self._buffer._prefetcher) is not None:
                ahead.acquire(lock)
            else:
                lock.acquire()
            try:
                if storage is self._buffer._storage:
                    return storage
            except BaseException:  # an interrupt
                lock.release()
                raise
            lock.release()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
