"""Elements by the version that they have: draws that look at versions, not at elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaykit.episodes.pools import Records, Rings, spread

__all__ = ["VersionGroups"]

Array = np.ndarray[Any, Any]


class VersionGroups:
    """The elements ``0..length-1``, those of one version side by side.

    Inside a group they lie in any order, which follows from what was set alone, so that two that
    were set alike give the same draws. One that leaves is replaced by the last of its group.

    Cost: O(K log K) for K elements that are set, and O(V) of V versions where one comes or goes;
    32 to 64 bytes an element.

    Example:
        >>> import numpy as np
        >>> from replaykit.samplers.version_groups import VersionGroups
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
