"""Record which rows of a queue were taken, so that no row is taken twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.recovery.recovery_folder import Tables
from replaykit.storages.indexing import elements_of

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
    if not any_taken(storage):
        return np.zeros(len(elements), bool)
    return np.asarray(_table(storage)[elements] == row_ids(storage, elements) + 1)


def take_elements(storage: ColumnStorage, elements: Array) -> None:
    """Record that the rows at elements are taken. The caller holds the lock."""
    table, ids = _table(storage), row_ids(storage, elements)
    if storage.recovery is None:
        table[elements] = ids + 1
    else:
        storage.recovery.change_table(Tables.TAKEN, elements, ids + 1)


def reserve_marks(storage: ColumnStorage, elements: Array) -> Array | None:
    """Return the table for rows that will move to elements, after all steps that may fail.

    Without taken rows, return None.
    """
    if not any_taken(storage):
        return None
    table = _table(storage)
    if storage.recovery is not None:
        storage.recovery.journal_table(Tables.TAKEN, elements)
    return table


def taken_mask(storage: Any) -> torch.Tensor | None:
    """Return which stored rows were taken, bool ``[length * lanes]``; None if none was."""
    if not getattr(storage, "initialized", False) or not storage.ledger.length:
        return None
    elements = np.arange(storage.ledger.length * storage.lanes.numel())
    mask = taken(storage, elements)
    return torch.from_numpy(mask) if mask.any() else None


def any_taken(storage: ColumnStorage) -> bool:
    """Return whether rows may have been taken, because there is a table of them."""
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
