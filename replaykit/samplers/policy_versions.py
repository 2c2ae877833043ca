"""Group rows by policy version, and follow the versions of stored rows."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from replaykit._compat import lookup
from replaykit.checkpoint import ReadLater, ReadOnce
from replaykit.episodes.pools import Records, Rings, spread
from replaykit.samplers.consuming import rising
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import ravel
from replaykit.structure import Path
from replaykit.ted import format_key

__all__ = ["FollowedVersions", "VersionGroups"]

Array = np.ndarray[Any, Any]


class VersionGroups:
    """The elements ``0..length-1``, those of one version side by side.

    Inside a group they lie in any order, which follows from what was set alone, so that two that
    were set alike give the same draws. One that leaves is replaced by the last of its group.

    Cost: O(K log K) for K elements that are set, and O(V) of V versions where one comes or goes;
    32 to 64 bytes an element.

    Example:
        >>> import numpy as np
        >>> from replaykit.samplers.policy_versions import VersionGroups
        >>> groups = VersionGroups()
        >>> groups.set(np.arange(5), np.array([7, 7, 8, 8, 8]))
        >>> groups.set(np.array([0]), np.array([8]))
        >>> groups.versions.tolist(), groups.counts.tolist()
        ([7, 8], [1, 4])
        >>> groups.members(np.array([0, 1, 1]), np.array([0, 0, 3])).tolist()
        [1, 2, 0]
    """

    def __init__(self) -> None:
        self.length = 0
        self.changes = 0
        """Grows with whatever changes versions or counts."""
        self.versions = np.zeros(0, np.int64)
        """Those that some element has, rising: ``[V]``."""
        self._ids = np.zeros(0, np.int64)  # numbers of their groups
        self._group: Any = Records({"count": np.int64})
        self._rings = Rings(np.int64)
        self._of = np.zeros(0, np.int64)  # group of an element; -1: none
        self._place = np.zeros(0, np.int64)  # in its group
        self._numbers = np.zeros(0, np.int64)  # of groups in ``versions``, as of these changes:
        self._numbered = -1

    @property
    def counts(self) -> Array:
        """How many elements have each version: int64 ``[V]``. Cost: O(V)."""
        return np.asarray(self._group.count[self._ids])

    def members(self, which: Array, place: Array) -> Array:
        """Elements: of the versions with these numbers in ``versions``, in these places."""
        return self._rings.get(self._ids[which], place)

    def of(self, elements: Array) -> Array:
        """Numbers in ``versions`` of the versions of elements. Cost: O(V) after changes."""
        if self._numbered != self.changes:
            self._numbers = np.zeros(self._group.capacity, np.int64)
            self._numbers[self._ids] = np.arange(len(self._ids))
            self._numbered = self.changes
        return np.asarray(self._numbers[self._of[elements]])

    def set(self, elements: Array, versions: Array) -> None:
        """Gives elements, distinct and rising, their versions; ``length`` follows."""
        if not len(elements):
            return
        if not len(self.versions):
            self.versions = self.versions.astype(versions.dtype)
        self._reserve(int(elements[-1]) + 1)
        old = self._of[elements]
        known = old >= 0
        same = np.zeros(len(elements), bool)
        if known.any():
            at = np.minimum(np.searchsorted(self.versions, versions), len(self.versions) - 1)
            same = known & (self.versions[at] == versions) & (self._ids[at] == old)
        if same.all():
            return
        self.changes += 1
        elements, versions, known = elements[~same], versions[~same], known[~same]
        self._remove(elements[known])
        self._add(elements, versions)
        gone = self._group.count[self._ids] == 0
        if gone.any():
            self._group.give_back(self._ids[gone])
            self.versions, self._ids = self.versions[~gone], self._ids[~gone]

    def _reserve(self, length: int) -> None:
        if length > len(self._of):
            room = max(length, 2 * len(self._of), 64)
            for name in ("_of", "_place"):
                old = getattr(self, name)
                new = np.full(room, -1, np.int64)
                new[: len(old)] = old
                setattr(self, name, new)
        self.length = max(self.length, length)

    def _remove(self, elements: Array) -> None:
        if not len(elements):
            return
        group, count = self._of[elements], self._group.count
        order = np.argsort(group, kind="stable")
        elements, group = elements[order], group[order]
        touched, leaving = np.unique(group, return_counts=True)
        after = count[touched] - leaving
        owner = np.repeat(touched, leaving)
        tail = self._rings.get(owner, spread(after, leaving))
        self._of[elements] = -1
        stays = self._of[tail] >= 0
        moved, their = tail[stays], owner[stays]
        hole = self._place[elements] < np.repeat(after, leaving)
        holes = self._place[elements][hole]
        # As many in each group, and both by group.
        self._rings.put(their, holes, moved)
        self._place[moved] = holes
        count[touched] = after

    def _add(self, elements: Array, versions: Array) -> None:
        order = np.argsort(versions, kind="stable")
        elements, versions = elements[order], versions[order]
        coming, number = np.unique(versions, return_counts=True)
        fresh = coming[~np.isin(coming, self.versions)]
        if len(fresh):
            ids = self._group.take(len(fresh))
            self._group.count[ids] = 0
            self._rings.start(ids, self._group.capacity)
            at = np.searchsorted(self.versions, fresh)
            self.versions = np.insert(self.versions, at, fresh)
            self._ids = np.insert(self._ids, at, ids)
        count = self._group.count
        which = self._ids[np.searchsorted(self.versions, coming)]
        need = count[which] + number
        self._rings.reserve(which, need, np.zeros_like(count), count, self._ids)
        owner, place = np.repeat(which, number), spread(count[which], number)
        self._rings.put(owner, place, elements)
        self._of[elements], self._place[elements] = owner, place
        count[which] = need

    # -- state --------------------------------------------------------------------------------

    def state(self) -> tuple[Array, Array, Array]:
        """Copies of elements by version and place ``[N]``, versions and counts ``[V]``."""
        counts = self.counts
        which = np.repeat(np.arange(len(counts)), counts)
        places = spread(np.zeros_like(counts), counts)
        return self.members(which, places), self.versions.copy(), counts

    @classmethod
    def of_state(cls, elements: Array, versions: Array, counts: Array) -> VersionGroups:
        """Returns what ``state`` told of; ValueError where that contradicts itself."""
        if not (
            len(versions) == len(counts)
            and (counts > 0).all()
            and counts.sum() == len(elements)
            and (versions[1:] > versions[:-1]).all()
            and np.array_equal(np.sort(elements), np.arange(len(elements)))
        ):
            raise ValueError(
                f"expected the versions of {len(elements)} elements, each with one, got "
                f"{versions.tolist()[:8]} of {counts.tolist()[:8]} elements"
            )
        found = cls()
        found.versions = found.versions.astype(versions.dtype)
        found._reserve(len(elements))
        if len(elements):
            found._add(elements, np.repeat(versions, counts))
        return found


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
