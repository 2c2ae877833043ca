"""Log the changes of rows, so that followers can catch up with them later."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from replaykit.structure import Path

Array = np.ndarray[Any, Any]


class ChangeKind(enum.Enum):
    """The kinds of changes of rows."""

    APPEND = "append"
    """New rows at the cursor."""
    PLACE = "place"
    """New rows at other slots."""
    EDIT = "edit"
    """New values of rows, which stay the same rows."""
    CLEAR = "clear"
    """No row is left."""
    CUT = "cut"
    """Streams are cut after their newest rows, or such cuts are removed."""
    MOVE = "move"
    """Any row may be at another slot, as after a load, or in a storage of another capacity."""
    REMOVE = "remove"
    """Rows are gone, and rows of the last slots have moved to their slots."""


class Removal(NamedTuple):
    """The removal of rows. The slots from ``length`` on have no row then.

    The rows of the slots ``source`` have moved to the slots ``target``, int64 ``[K]`` each.
    """

    source: Array
    target: Array
    length: int

    def follow(self, slots: Array) -> Array:
        """Return the new slots of rows that were in ``slots``, without the rows that are gone."""
        if not len(self.source):
            return slots[slots < self.length]
        at = np.minimum(np.searchsorted(self.source, slots), len(self.source) - 1)
        moved = self.source[at] == slots
        gone = ~moved & ((slots >= self.length) | np.isin(slots, self.target))
        return np.where(moved, self.target[at], slots)[~gone]


class LoggedChange(NamedTuple):
    """Consecutive changes of one kind.

    Attributes:
        slots: the changed slots, in the order of the changes and possibly repeated; None if any
            slot may have changed. The slots of an append are a range, which goes on after the last
            slot of the ring. For a removal it is a `Removal`.
        columns: the changed columns; None if any column may have changed.
    """

    kind: ChangeKind
    slots: Any
    columns: frozenset[Path] | None

    @property
    def removal(self) -> Removal | None:
        """The removal of rows; None for changes of other kinds."""
        return self.slots if isinstance(self.slots, Removal) else None

    def in_ring(self, ring: int) -> Any:
        """Return the slots, of which there are ``ring``; the last ones of an append."""
        if not isinstance(self.slots, range):
            return self.slots
        return np.arange(max(self.slots.start, self.slots.stop - ring), self.slots.stop) % ring


class _Run:
    """Consecutive changes of one kind.

    ``start`` is the number of the first of them. ``parts`` are the slots of each change, or the
    first slot of an append.
    """

    __slots__ = ("columns", "count", "kind", "parts", "start")

    def __init__(self, kind: ChangeKind, columns: frozenset[Path] | None, start: int) -> None:
        self.kind, self.columns, self.start = kind, columns, start
        self.count = 0
        self.parts: list[Any] = []

    def after(self, seen: int) -> LoggedChange:
        """Return the changes with the number ``seen`` or a later one."""
        if len(self.parts) > 1 or type(self.parts[0]) is range:
            self.parts = [np.concatenate([np.asarray(part) for part in self.parts])]
        slots, skipped = self.parts[0], max(seen - self.start, 0)
        if self.kind is ChangeKind.APPEND:
            slots = range(slots + skipped, slots + self.count)
        elif slots is not None and self.kind is not ChangeKind.REMOVE:
            slots = slots[skipped:]
        return LoggedChange(self.kind, slots, self.columns)


def _cost_of(run: _Run) -> int:
    """Return how many numbers the arrays of a run have."""
    if run.kind is ChangeKind.REMOVE:
        return 2 * len(run.parts[0].source)
    return 0 if run.kind is ChangeKind.APPEND else run.count


_SPARE = 4096
_RUN_COST = 64
_LONGEST = 1024


class ChangeLog:
    """The latest changes of rows, in order, each with a sequence number.

    A change takes a number for each slot that it names, and one number if it names none. So equal
    changes become one entry, and a follower that has seen a part of it gets the rest. A follower
    keeps the value of ``number`` at its last look. If the log has dropped changes since then, the
    follower was overtaken, and has to derive its data from the rows again.

    Attributes:
        number: the number of the next change.
        irregular: the number after the latest change that was not an append. If a follower has
            seen it, rows were only appended since.

    Args:
        rows: number of slots that the log may name, apart from the ranges of appends. If more
            slots have changed, a follower can read all rows at the same cost. The attribute may
            grow later.

    Cost: O(1) for an append, without allocation if an append came before it; otherwise a copy of
    the slots. Memory: up to 8 bytes per slot, and 32 KiB.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.change_log import ChangeLog
        >>> log = ChangeLog(10)
        >>> log.append(0, 4)
        >>> seen = log.number
        >>> log.append(4, 2)
        >>> log.edit(np.array([1]), [("x",)])
        >>> [(change.kind.value, np.array(change.slots)) for change in log.since(seen)]
        [('append', array([4, 5])), ('edit', array([1]))]
    """

    def __init__(self, rows: int) -> None:
        self.number = 0
        self.irregular = 0
        self.rows = rows
        self._runs: deque[_Run] = deque()
        self._last: _Run | None = None
        self._named = 0  # cost of the runs: `_RUN_COST` for each, and the lengths of their arrays
        self._oldest = 0  # number of the oldest change that was not dropped
        self.removed = 0
        """The number after the latest removal or clear. Slots from before may name other rows."""

    # -- recording ------------------------------------------------------------------------------

    def append(self, first: int, count: int) -> None:
        """Record rows written at the cursor, which was at slot ``first``."""
        last = self._last
        if last is None or last.kind is not ChangeKind.APPEND:
            last = self._begin(ChangeKind.APPEND, None)
            last.parts.append(first)
        last.count += count
        self.number += count

    def place(self, slots: Array | range) -> None:
        """Record new rows at ``slots``, int64 ``[K]`` or a range of step 1."""
        self._record(ChangeKind.PLACE, slots)

    def edit(self, slots: Any, columns: Collection[Path] | None = None) -> None:
        """Record new values of stored rows, before they change.

        Args:
            slots: int64 ``[K]``, or a tensor on another device that the caller does not change;
                None for any slots.
            columns: the columns that change; None for any columns.
        """
        self._record(ChangeKind.EDIT, slots, None if columns is None else frozenset(columns))

    def clear(self) -> None:
        """Record that no row is left."""
        self._record(ChangeKind.CLEAR)
        self.removed = self.number

    def cut(self) -> None:
        """Record that streams are cut, or that cuts are removed."""
        self._record(ChangeKind.CUT)

    def move(self, slots: Array | None = None) -> None:
        """Record that any row may be at another slot.

        Args:
            slots: the slots that have other rows, or no row now; None for any slots.
        """
        self._record(ChangeKind.MOVE, slots)

    def remove(self, removal: Removal, before: int) -> None:
        """Record that rows are gone, and that others have moved.

        Args:
            before: the number of rows before. If it does not change, the rows only have to be read
                again, and all slots keep their rows.
        """
        run = self._begin(ChangeKind.REMOVE, None)
        run.parts.append(removal)
        run.count = 1
        self._named += _cost_of(run)
        self.number += 1
        self.irregular = self.number
        if removal.length < before:
            self.removed = self.number

    def _record(
        self, kind: ChangeKind, slots: Any = None, columns: frozenset[Path] | None = None
    ) -> None:
        if slots is not None and not len(slots):
            return
        alone = type(slots) not in (np.ndarray, range)
        if type(slots) is np.ndarray:  # distinct slots are at most as many as rows
            slots = slots.copy() if len(slots) <= self.rows else np.unique(slots)
        last, count = self._last, 1 if slots is None else len(slots)
        if (
            alone
            or last is None
            or last.kind is not kind
            or last.columns != columns
            or type(last.parts[0]) not in (np.ndarray, range)
            or last.count + count > _LONGEST
        ):
            last = self._begin(kind, columns)
        last.parts.append(slots)
        last.count += count
        self._named += count
        self.number += count
        self.irregular = self.number

    def _begin(self, kind: ChangeKind, columns: frozenset[Path] | None) -> _Run:
        runs = self._runs
        while self._named > self.rows + _SPARE and runs:
            run = runs.popleft()
            self._named -= _RUN_COST + _cost_of(run)
            self._oldest = run.start + run.count
        self._last = run = _Run(kind, columns, self.number)
        runs.append(run)
        self._named += _RUN_COST
        return run

    # -- following ------------------------------------------------------------------------------

    def since(self, seen: int) -> list[LoggedChange] | None:
        """Return the changes with the number ``seen`` or a later one, in order.

        The result is None if the log has dropped any of them, or has not reached ``seen``.
        """
        if not self._oldest <= seen <= self.number:
            return None
        found = []
        for run in reversed(self._runs):
            if run.start + run.count <= seen:
                break
            found.append(run.after(seen))
        found.reverse()
        return found

    def rows_changed(self, seen: int) -> bool:
        """Return whether any row may have changed since ``seen``."""
        if seen == self.number:
            return False
        changes = self.since(seen)
        return changes is None or any(change.kind is not ChangeKind.CUT for change in changes)

    def slots_since(
        self,
        seen: int,
        ring: int = 0,
        paths: Collection[Path] | None = None,
        *,
        edits: bool = True,
        moves: bool = False,
    ) -> list[Any] | None:
        """Return the slots that have changed since ``seen``; None if any may have.

        Args:
            ring: number of slots of the ring, if rows are appended.
            paths: leave out the edits of other columns; None for all columns.
            edits: whether to include edits.
            moves: whether to include slots to which rows have moved, and some that have no row now.
                Otherwise rows that have moved may have changed any slots.
        """
        changes, found = self.since(seen), []
        if changes is None:
            return None
        for change in changes:
            kind, slots, columns = change
            if kind is ChangeKind.CUT or (kind is ChangeKind.EDIT and not edits):
                continue
            if paths is not None and columns is not None and columns.isdisjoint(paths):
                continue
            moved = kind in (ChangeKind.MOVE, ChangeKind.REMOVE)
            if slots is None or (moved and not moves):
                return None
            found.append(slots.target if kind is ChangeKind.REMOVE else change.in_ring(ring))
        return found

    def __getstate__(self) -> dict[str, Any]:
        # A copy has the same numbers, but its followers start over.
        return {"rows": self.rows, "number": self.number, "removed": self.removed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["rows"])  # type: ignore[misc]
        self.number = self.irregular = self._oldest = state["number"]
        self.removed = state.get("removed", 0)
