"""Record which rows of a queue were taken, so that no row is taken twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.recovery.recovery_folder import Tables
from replaykit.storages.indexing import elements_of
from replaykit.storages.removal import named_lanes, stream_index

if TYPE_CHECKING:
    from replaykit.storages.column_storage import ColumnStorage

Array = np.ndarray[Any, Any]


def _table(storage: ColumnStorage) -> Array:
    """Return the row id of the row taken last from each element, plus 1; int64.

    So a new row in a slot, which has another row id, counts as not taken. The table of recoverable
    and shared rows is in their folder.
    """
    size = storage.ledger.slots * storage.lanes.numel()
    if storage.recovery is not None:
        return np.asarray(storage.recovery.home.table(Tables.TAKEN, size)[:size])
    known = storage.taken_table
    if known is None or len(known) < size:
        known = np.append(np.zeros(0, np.int64) if known is None else known, np.zeros(size, int))
        storage.taken_table = known[:size]
    return storage.taken_table


def row_ids(storage: ColumnStorage, elements: Array) -> Array:
    slots = torch.from_numpy(elements // storage.lanes.numel())
    return np.asarray(storage.ledger.positions(slots).numpy())


def taken(storage: ColumnStorage, elements: Array) -> Array:
    """Return whether the rows at elements ``[K]`` were taken, bool ``[K]``."""
    if not _in_use(storage):
        return np.zeros(len(elements), bool)
    return np.asarray(_table(storage)[elements] == row_ids(storage, elements) + 1)


def take_elements(storage: ColumnStorage, elements: Array) -> None:
    """Record that the rows at elements are taken. The caller holds the lock."""
    table, ids = _table(storage), row_ids(storage, elements)
    if storage.recovery is None:
        table[elements] = ids + 1
    else:
        storage.recovery.change_table(Tables.TAKEN, elements, ids + 1)


def taken_mask(storage: Any) -> torch.Tensor | None:
    """Return which stored rows were taken, bool ``[length * lanes]``; None if none was."""
    if not getattr(storage, "initialized", False) or not storage.ledger.length:
        return None
    elements = np.arange(storage.ledger.length * storage.lanes.numel())
    mask = taken(storage, elements)
    return torch.from_numpy(mask) if mask.any() else None


def _in_use(storage: ColumnStorage) -> bool:
    recovery = storage.recovery
    if recovery is None:
        return storage.taken_table is not None
    return bool(recovery.active and recovery.home.has_table(Tables.TAKEN))


def load_taken(storage: Any, mask: torch.Tensor | None, rows: torch.Tensor | None) -> None:
    """Record the taken rows of a save, after rows and ledger were loaded.

    Args:
        mask: a result of ``taken_mask``.
        rows: as for ``Ledger.restore``.
    """
    if mask is None:
        return
    if rows is not None:
        mask = mask[torch.from_numpy(elements_of(rows.numpy(), storage.lanes.numel()))]
    take_elements(storage, np.flatnonzero(mask.numpy()))


class StreamQueues:
    """The streams of a storage as queues, of which each has a prefix of taken rows.

    The streams are those of a ``lane_key``, the lanes of ``ndim > 1``, or all rows as one stream.
    The caller holds the lock.

    Attributes:
        sizes: the number of stored rows of each stream, int64 ``[streams]``.

    Raises:
        RuntimeError: the storage has a ``lane_key``, and rows were placed by hand.
    """

    def __init__(self, storage: ColumnStorage, name: str) -> None:
        self._storage, ledger = storage, storage.ledger
        self._index = None
        if storage.lane_key is not None and ledger.length:
            self._index = stream_index(storage, name)
            self.sizes = self._index.sizes()
            return
        lanes = 0 if storage.lane_key is not None or not ledger.length else storage.lanes.numel()
        self.sizes = np.full(lanes, ledger.length)
        self._order = None if ledger.in_order else ledger.write_order().numpy()

    @property
    def written(self) -> Array:
        """The number of rows that each stream got since it was indexed, int64 ``[streams]``."""
        if self._index is None:
            return self.sizes
        _, until = self._index.bounds(np.arange(len(self.sizes)))
        return np.asarray(until)

    def named(self, lane: Any) -> Array:
        """Return the numbers of streams, int64 ``[K]``, in the given order.

        None is for all lanes, or for the streams with rows that were not taken.

        Raises:
            IndexError: a stream has no stored rows.
            ValueError: a stream is named twice.
        """
        storage = self._storage
        if lane is None:
            every = np.arange(len(self.sizes))
            return every if self._index is None else every[self.sizes > self.taken(every)]
        keys = np.atleast_1d(np.asarray(lane))
        if storage.lane_key is None:
            storage.lanes_named(lane)
            if len(np.unique(keys)) < len(keys):
                raise ValueError(f"expected each lane once, got {keys.tolist()}")
            return keys.astype(np.int64)
        if self._index is None:
            raise IndexError(f"expected streams with stored rows, got {keys.tolist()}")
        chosen = named_lanes(storage, self._index, lane)
        return chosen[np.argsort(np.argsort(keys, kind="stable"), kind="stable")]

    def elements(self, lanes: Array, number: Array) -> Array:
        """Return the elements of rows, given streams and the rows' ages, 0 for the oldest row."""
        if self._index is not None:
            return self._index.element(self._index.bounds(lanes)[0] + number, lanes)
        ledger = self._storage.ledger
        if self._order is None:
            slot = (ledger.cursor - ledger.length + number) % ledger.slots
        else:
            slot = self._order[number]
        return np.asarray(slot * self._storage.lanes.numel() + lanes)

    def taken(self, lanes: Array) -> Array:
        """Return how many rows of streams were taken, int64 ``[K]``. Cost: O(K log rows)."""
        low, high = np.zeros(len(lanes), np.int64), self.sizes[lanes].copy()
        if not _in_use(self._storage):
            return low
        while (left := np.flatnonzero(low < high)).size:
            middle = (low[left] + high[left]) // 2
            gone = taken(self._storage, self.elements(lanes[left], middle))
            low[left[gone]], high[left[~gone]] = middle[gone] + 1, middle[~gone]
        return low
