"""Group rows by policy version, and follow the versions of stored rows."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch

from replaykit._compat import lookup
from replaykit.checkpoint import ReadLater, ReadOnce
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import elements_of, rising
from replaykit.structure import Path
from replaykit.ted import format_key

Array = np.ndarray[Any, Any]

_NONE = np.zeros(0, np.int64)

_FIRST = 64


class _Lists:
    """Numbered lists of rows in one array.

    Each list has a piece of the array whose length is a power of two. A list that outgrows its
    piece gets a larger one. When the array is full, all lists move to a new array. At least a
    quarter of the array's entries are in use. Cost: O(1) per entry, amortised.

    Attributes:
        count: the number of entries of each list.
    """

    def __init__(self) -> None:
        self._pool = np.zeros(_FIRST, np.int64)
        self._top = 0
        self.count = self._base = self._room = self._free = _NONE

    def start(self, count: int) -> Array:
        """Return the numbers of ``count`` new, empty lists. Cost: O(lists)."""
        numbers, self._free = self._free[:count], self._free[count:]
        if len(numbers) < count:
            more = np.zeros(count - len(numbers), np.int64)
            numbers = np.concatenate([numbers, np.arange(len(more)) + len(self.count)])
            self.count = np.concatenate([self.count, more])
            self._base = np.concatenate([self._base, more])
            self._room = np.concatenate([self._room, more])
        self.count[numbers] = self._room[numbers] = 0
        return numbers

    def drop(self, numbers: Array) -> None:
        """Let later lists have the numbers of these lists."""
        self._free = np.concatenate([self._free, numbers])

    def get(self, which: Array, place: Array) -> Array:
        """Return the entries at ``place`` of the lists ``which``."""
        return self._pool[self._base[which] + place]

    def put(self, which: Array, place: Array, rows: Array) -> None:
        """Set entries of lists, after ``reserve`` made room."""
        self._pool[self._base[which] + place] = rows

    def reserve(self, which: Array, need: Array, alive: Array) -> None:
        """Make room for ``need`` entries in each of the lists ``which``.

        ``alive`` holds the numbers of all lists in use.
        """
        short = need > self._room[which]
        if not short.any():
            return
        moving, sizes = which[short], _power(need[short])
        pool, top = self._pool, self._top
        if top + sizes.sum() > len(pool):
            wanted = _power(np.maximum(self.count, 1))
            wanted[which] = _power(need)
            moving, sizes, top = alive, wanted[alive], 0
            pool = np.zeros(max(_FIRST, 2 * int(sizes.sum())), np.int64)
        count = self.count[moving]
        owner, place = np.repeat(moving, count), _spread(0, count)
        rows = self.get(owner, place)
        self._base[moving], self._room[moving] = top + np.cumsum(sizes) - sizes, sizes
        self._pool, self._top = pool, top + int(sizes.sum())
        self.put(owner, place, rows)


def _spread(start: Array | int, count: Array) -> Array:
    """Return joined runs of ``count[i]`` consecutive numbers from ``start[i]`` on."""
    ends = np.cumsum(count)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - ends + count, count)


def _power(need: Array) -> Array:
    """Return the smallest powers of two that are not below ``need``, at least 1."""
    # frexp is exact: need - 1 = m * 2**e with 0.5 <= m < 1, so that 2**e > need - 1.
    return np.int64(1) << np.frexp((need - 1).astype(np.float64))[1].astype(np.int64)


class VersionGroups:
    """The rows ``0..length-1`` (flat indices), grouped by version.

    The order inside a group depends only on the calls of ``set``. So two objects with equal calls
    give the same draws. When a row leaves a group, the last row of the group moves to its position.

    Cost: O(K log K) to set K rows. If this adds or removes one of V versions, also O(V).
    Memory: 32 to 64 bytes per row.

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
        """A counter that grows with every change of ``versions`` or ``counts``."""
        self.versions = np.zeros(0, np.int64)
        """The versions of the rows, in ascending order: ``[V]``."""
        self._ids = _NONE  # numbers of the versions' lists
        self._lists = _Lists()
        self._of = _NONE  # list of a row; -1: none
        self._place = _NONE  # position in its list
        self._numbers = _NONE  # numbers of the lists in ``versions``, as of:
        self._numbered = -1

    @property
    def counts(self) -> Array:
        """The number of rows of each version: int64 ``[V]``. Cost: O(V)."""
        return self._lists.count[self._ids]

    def members(self, which: Array, place: Array) -> Array:
        """Return the rows at positions ``place`` in the groups of versions ``which``.

        ``which`` holds positions in ``versions``.
        """
        return self._lists.get(self._ids[which], place)

    def of(self, elements: Array) -> Array:
        """Return each row's position in ``versions``. Cost: O(V) more after a change."""
        if self._numbered != self.changes:
            self._numbers = np.zeros(len(self._lists.count), np.int64)
            self._numbers[self._ids] = np.arange(len(self._ids))
            self._numbered = self.changes
        return np.asarray(self._numbers[self._of[elements]])

    def set(self, elements: Array, versions: Array) -> None:
        """Set the versions of distinct, ascending rows. ``length`` grows if needed."""
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
        gone = self.counts == 0
        if gone.any():
            self._lists.drop(self._ids[gone])
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
        group, count = self._of[elements], self._lists.count
        order = np.argsort(group, kind="stable")
        elements, group = elements[order], group[order]
        touched, leaving = np.unique(group, return_counts=True)
        after = count[touched] - leaving
        owner = np.repeat(touched, leaving)
        tail = self._lists.get(owner, _spread(after, leaving))
        self._of[elements] = -1
        stays = self._of[tail] >= 0
        moved, their = tail[stays], owner[stays]
        hole = self._place[elements] < np.repeat(after, leaving)
        holes = self._place[elements][hole]
        # Both arrays have the same number of entries for each group, in the order of the groups.
        self._lists.put(their, holes, moved)
        self._place[moved] = holes
        count[touched] = after

    def _add(self, elements: Array, versions: Array) -> None:
        order = np.argsort(versions, kind="stable")
        elements, versions = elements[order], versions[order]
        coming, number = np.unique(versions, return_counts=True)
        fresh = coming[~np.isin(coming, self.versions)]
        if len(fresh):
            ids = self._lists.start(len(fresh))
            at = np.searchsorted(self.versions, fresh)
            self.versions = np.insert(self.versions, at, fresh)
            self._ids = np.insert(self._ids, at, ids)
        count = self._lists.count
        which = self._ids[np.searchsorted(self.versions, coming)]
        need = count[which] + number
        self._lists.reserve(which, need, self._ids)
        owner, place = np.repeat(which, number), _spread(count[which], number)
        self._lists.put(owner, place, elements)
        self._of[elements], self._place[elements] = owner, place
        count[which] = need

    # -- state --------------------------------------------------------------------------------

    def state(self) -> tuple[Array, Array, Array]:
        """Return copies of the rows by version ``[N]``, the versions and counts ``[V]``."""
        counts = self.counts
        which = np.repeat(np.arange(len(counts)), counts)
        return self.members(which, _spread(0, counts)), self.versions.copy(), counts

    @classmethod
    def of_state(cls, elements: Array, versions: Array, counts: Array) -> VersionGroups:
        """Restore a ``state``. Raises ValueError if its arrays contradict each other."""
        if not (
            len(versions) == len(counts)
            and (counts > 0).all()
            and counts.sum() == len(elements)
            and (versions[1:] > versions[:-1]).all()
            and np.array_equal(np.sort(elements), np.arange(len(elements)))
        ):
            raise ValueError(
                f"expected the versions of {len(elements)} rows, each with one, got "
                f"{versions.tolist()[:8]} of {counts.tolist()[:8]} rows"
            )
        found = cls()
        found.versions = found.versions.astype(versions.dtype)
        found._reserve(len(elements))
        if len(elements):
            found._add(elements, np.repeat(versions, counts))
        return found


class VersionColumn:
    """Groups of the rows of a storage by the values of one column.

    An update reads only the rows that have changed, as the storage's log lists them. If the log
    does not list all changes, the update reads the whole column. The storage's lock guards the
    object.

    Args:
        path: the column, with one number per row.
    """

    groups = ReadOnce[VersionGroups]()
    """The groups as of the last update."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.groups = VersionGroups()
        self._storage: weakref.ref[Storage] | None = None
        self._seen = -1

    def __getstate__(self) -> dict[str, Any]:
        # A copy first reads all rows, and finds the rows that differ from its groups.
        return {**self.__dict__, "_storage": None}

    def forget(self) -> None:
        """Forget all rows."""
        self.load(VersionGroups())

    def load(self, groups: VersionGroups | ReadLater[VersionGroups]) -> None:
        """Continue from groups that were saved with the rows."""
        self.groups, self._storage = groups, None

    def follow(self, storage: Storage) -> VersionGroups:
        """Return the groups of the rows stored now.

        Raises:
            KeyError: there is no such column.
            ValueError: the column does not hold one number per row.

        Cost: O(K log K) for K rows that were written or edited, or O(N) if all rows are read.
        """
        ledger, lanes = storage.ledger, storage.lanes.numel()
        log, length, changed = ledger.log, ledger.length * lanes, None
        if self._storage is not None and self._storage() is storage:
            if self._seen == log.number:
                return self.groups
            slots = log.slots_since(self._seen, ledger.slots, (self.path,))
            if slots is not None:
                changed = rising(np.concatenate([_NONE, *slots]))
                changed = elements_of(changed, lanes)
            elif ledger.written_since((self._seen, 0))[0]:
                self.groups = VersionGroups()
        if self.groups.length > length:
            self.groups, changed = VersionGroups(), None
        if changed is None:
            changed = np.arange(length)
        self.groups.set(changed, self._read(storage, changed))
        self._storage, self._seen = weakref.ref(storage), log.number
        return self.groups

    def _read(self, storage: Storage, elements: Array) -> Array:
        """Return the column's values for some rows: int64 or float64 ``[K]``."""
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
                raise KeyError(f"expected the version of row {slot} under {format_key(self.path)}")
            if value.numel() != 1:
                raise ValueError(
                    f"expected one version a row under {format_key(self.path)}, got "
                    f"{list(value.shape)}"
                )
            found.append(value.detach().reshape(()))
        return torch.stack(found)
