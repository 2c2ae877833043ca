"""The versions of stored rows, kept up as these are written and edited."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from replaykit._compat import lookup
from replaykit.checkpoint import ReadLater, ReadOnce
from replaykit.samplers.live import rising
from replaykit.samplers.version_groups import VersionGroups
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import ravel
from replaykit.structure import Path
from replaykit.ted import format_key

__all__ = ["FollowedVersions"]

Array = np.ndarray[Any, Any]

_MANY = 4
"""More elements told of than this many times those stored, and all are looked at instead."""


class FollowedVersions:
    """Groups of the rows of a storage by what stands in a column.

    Brought up to date from what the ledger says was written at the cursor, or what was told of
    (``note``) where that was elsewhere, and what the storage says was edited; only where these do
    not account for all that has happened, by a pass over the column. The storage's lock guards it.

    Args:
        path: the column, one number a row.
    """

    groups = ReadOnce[VersionGroups]()
    """As of the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups = VersionGroups()
        self._storage: weakref.ref[Storage] | None = None
        self._anew = True  # all have to be looked at
        self._counters = (0, 0, 0, 0)
        self._noted: list[Array] = []
        self._rows = 0

    def __getstate__(self) -> dict[str, Any]:
        # A copy looks at all rows first, and finds those that differ from what it knows.
        return {**self.__dict__, "_storage": None, "_anew": True, "_noted": [], "_rows": 0}

    def forget(self) -> None:
        """Nothing is known of any row."""
        self.groups, self._anew = VersionGroups(), True
        self._noted, self._rows = [], 0

    def take(self, groups: VersionGroups | ReadLater[VersionGroups]) -> None:
        """Goes on from groups that were saved with the rows."""
        self.forget()
        self.groups = groups

    def note(self, index: torch.Tensor, storage: Storage) -> None:
        """Told that rows were written."""
        flat = ravel(index, storage.lanes) if storage.ndim > 1 else index
        elements = flat.cpu().numpy().reshape(-1)
        elements = elements[elements >= 0]
        self._rows += len(elements)
        if self._rows > _MANY * max(len(storage), 1024):  # nobody draws
            self._noted, self._rows = [], 0
            self._anew = True
        else:
            self._noted.append(elements)

    def follow(self, storage: Storage) -> VersionGroups:
        """Returns the groups of what is stored now.

        Raises:
            KeyError: no such column. ValueError: not one number a row.

        Cost: O(K log K) for K rows that were written or edited, or O(N).
        """
        ledger = storage.ledger
        counters = ledger.next_position, ledger.changes, ledger.cleared, storage.edits
        known = self._storage is not None and self._storage() is storage
        if known and counters == self._counters and not self._anew:
            return self.groups
        length = ledger.length * storage.lanes.numel()
        changed = self._changed(storage) if known and not self._anew else None
        if self.groups.length > length or (known and ledger.cleared != self._counters[2]):
            self.groups, changed = VersionGroups(), None
        if changed is None:
            changed = np.arange(length)
        self.groups.set(changed, self._read(storage, changed))
        self._storage, self._anew = weakref.ref(storage), False
        self._counters, self._noted, self._rows = counters, [], 0
        return self.groups

    def _changed(self, storage: Storage) -> Array | None:
        """Elements that may have changed, distinct and rising; None: any."""
        ledger, lanes = storage.ledger, storage.lanes.numel()
        position, changes, _, edits = self._counters
        advanced = ledger.next_position - position
        if ledger.changes == changes and ledger.in_order:
            slots = (np.arange(min(advanced, ledger.slots)) - min(advanced, ledger.slots)) + (
                ledger.cursor
            )
            written = [_of_slots(slots % ledger.slots, lanes)]
        elif (
            advanced * lanes == self._rows
            and ledger.changes - changes in (0, len(self._noted))
            and self._all_since(position, storage)
        ):
            written = list(self._noted)
        else:
            return None
        edited = _edited(storage, self.path, edits)
        if edited is None:
            return None
        parts = [*written, *(_of_slots(slots, lanes) for slots in edited)]
        return rising(np.concatenate(parts)) if parts else np.zeros(0, np.int64)

    def _all_since(self, position: int, storage: Storage) -> bool:
        """Whether all that was told of was written at that position or later: anybody may tell."""
        if not self._rows:
            return True
        told = self._noted[0] if len(self._noted) == 1 else np.concatenate(self._noted)
        slots = torch.from_numpy(told // storage.lanes.numel())
        return bool((storage.ledger.positions(slots) >= position).all())

    def _read(self, storage: Storage, elements: Array) -> Array:
        """What stands in the column for some elements: int64 or float64 ``[K]``."""
        if not len(elements):
            return np.zeros(0, np.int64)
        if isinstance(storage, ColumnStorage):
            found = self._read_column(storage, elements)
        else:
            found = self._read_rows(storage, elements)
        whole = not (found.is_floating_point() or found.is_complex())
        return np.asarray(found.to(torch.int64 if whole else torch.float64).cpu().numpy())

    def _read_column(self, storage: ColumnStorage, elements: Array) -> torch.Tensor:
        leaf = storage.leaf(self.path)
        if leaf.shape.numel() != 1:
            raise ValueError(
                f"expected one version a row under {format_key(self.path)}, got {list(leaf.shape)}"
            )
        column = storage.require().column(self.path, storage.ledger.length)
        shape = (storage.ledger.length, *storage.lanes)
        cells = np.unravel_index(elements, shape)
        at = tuple(torch.from_numpy(part).to(column.device) for part in cells)
        return column[at].reshape(-1)

    def _read_rows(self, storage: Storage, elements: Array) -> torch.Tensor:
        found = []
        for slot in elements.tolist():
            value = lookup(storage.get(slot), self.path)
            if not isinstance(value, torch.Tensor):
                raise KeyError(f"no {format_key(self.path)} in row {slot}, which says its version")
            if value.numel() != 1:
                raise ValueError(
                    f"expected one version a row under {format_key(self.path)}, got "
                    f"{list(value.shape)}"
                )
            found.append(value.detach().reshape(()))
        return torch.stack(found)


def _of_slots(slots: Array, lanes: int) -> Array:
    if lanes == 1:
        return slots
    return np.asarray((slots[:, None] * lanes + np.arange(lanes)).reshape(-1))


def _edited(storage: Storage, path: Path, since: int) -> list[Array] | None:
    """Slots whose rows were edited in a column; None: it may be any."""
    if storage.edits == since:
        return []
    told = [edit for edit in storage.recent_edits if edit.number > since]
    if [edit.number for edit in told] != list(range(since + 1, storage.edits + 1)):
        return None
    slots = []
    for edit in told:
        if edit.paths is not None and path not in edit.paths:
            continue
        if edit.slots is None:
            return None
        slots.append(edit.slots)
    return slots
