"""What a buffer draws ahead: who may go on before, and what becomes of it."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from replaykit.buffer.prefetch import Drawn, Prefetcher
from replaykit.samplers import Sampler, SampleUnit, Transition
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.transforms import Compose

__all__ = ["Ahead"]


class Ahead:
    """Draws made ahead by threads, and those kept for later, which come first.

    ``_drawn_by``: the ensembles that draw from the buffer.
    """

    _initialized: bool
    _closed: bool
    _storage: Storage
    _prefetcher: Prefetcher | None
    _pending: deque[Drawn]
    _sampler: Sampler
    _sample_unit: SampleUnit
    _chain: Compose
    _collate_fn: Callable[[Any], Any] | None
    _target: torch.device | None
    _pin_memory: bool
    _batch_size: int | None
    _drawn_by: tuple[weakref.ref[Any], ...] = ()

    if TYPE_CHECKING:

        def _locked(self, *, patient: bool = False, settled: bool = True) -> Any: ...

    def _settle_draws(self, locks: tuple[Any, ...] = ()) -> None:
        """Waits for the draws that this thread has had made ahead, which know of nothing that it
        does afterwards: of this buffer, and of ensembles that draw from it.

        Args:
            locks: of what these draws read besides; who holds one does not wait.
        """
        if not self._initialized or (self._prefetcher is None and not self._drawn_by):
            return
        locks = (*locks, self._storage.lock)
        if self._prefetcher is not None:
            self._prefetcher.settle(*locks)
        for reference in self._drawn_by:
            ensemble = reference()
            if ensemble is not None:
                ensemble._settle_draws(locks)

    def _draws_at_once(self) -> bool:
        """Whether a draw ahead and what is made of it take little longer than to hand it over."""
        storage, sampler = self._storage, self._sampler
        if "prompt" not in vars(type(sampler)) or not isinstance(storage, ColumnStorage):
            return False
        if len(self._chain) or self._collate_fn is not None or self._target is not None:
            return False
        if self._pin_memory or type(storage).read is not ColumnStorage.read:
            return False
        if type(self._sample_unit) is not Transition:
            return False
        return storage.reads_at_once(self._batch_size or 0)

    def _free_lock(self) -> Any:
        """The lock of the storage, taken; None where somebody has it."""
        lock = self._storage.lock
        return lock if lock.acquire(blocking=False) else None

    def _queue(self) -> Prefetcher | None:
        """What prepares batches in threads; a forked process, where they are not, gets others."""
        queue = self._prefetcher
        if queue is not None and queue.process != os.getpid():
            with self._locked():
                if self._prefetcher is queue:
                    self._pending.extendleft(reversed(queue.left_behind()))
                    queue = self._prefetcher = Prefetcher(queue.depth, cast(Any, self))
                return self._prefetcher
        return queue

    def _feed(self) -> None:
        """Has draws that were kept be read now, before anything is written. The lock is held."""
        if self._pending and not self._closed and (queue := self._queue()) is not None:
            queue.feed(len(self._pending))

    def _made_again(self) -> list[Drawn]:
        """Has batches made ahead be made anew, of the same draws, which it returns in order: who
        loads what is saved now has no others. The lock is held."""
        draws = self._take_prepared()
        kept = self._readable(draws)
        self._pending = deque(draws[:kept])
        self._feed()
        return draws[:kept]

    def _readable(self, draws: list[Drawn]) -> int:
        """How many of the draws can be read again; the others are given back. The lock is held."""
        return len(draws)

    def _take_prepared(self) -> list[Drawn]:
        """Gives up batches drawn ahead; returns their draws in order. The lock is held."""
        queue = self._queue()
        # A thread may still be making a batch of one: what is read anew must not be what it takes.
        drawn = [] if queue is None else [one.kept() for one in queue.clear()]
        # The queue is fed from what was kept, so what is left of that comes after it.
        drawn = [*drawn, *self._pending]
        self._pending.clear()
        return drawn
