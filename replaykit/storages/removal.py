"""Remove rows of streams, and keep the stored rows in the first slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from replaykit.episodes import EpisodeIndex
from replaykit.schema import Rows
from replaykit.storages.change_log import Removal
from replaykit.storages.taken_rows import reserve_marks
from replaykit.ted import format_key

if TYPE_CHECKING:
    from replaykit.storages.column_storage import ColumnStorage

Array = np.ndarray[Any, Any]

_NO_SLOTS = np.zeros(0, np.int64)


def check_removable(storage: Any, name: str) -> None:
    """Raise ValueError unless single rows of a storage can be removed.

    Args:
        name: the part or method that removes rows, for the message.
    """
    if getattr(storage, "lane_key", None) is None:
        raise ValueError(
            f"{name} expected a tensor or memmap storage with lane_key=, the column that "
            f"identifies streams, got {storage!r}"
        )


def stream_index(storage: ColumnStorage, name: str) -> EpisodeIndex:
    """Return the index of the streams, up to date. The caller holds the lock.

    Raises:
        RuntimeError: streams have lost other rows than their oldest ones.
    """
    if not storage.ledger.oldest_first:
        raise placed_rows(name)
    if storage.indexes.pending() or storage.indexes.loaded:
        storage._before_overwrite()
    return storage.episodes


def placed_rows(name: str) -> RuntimeError:
    """Return the error for streams that have lost other rows than their oldest ones."""
    return RuntimeError(
        f"{name} expected stored rows of which each stream has lost only its oldest ones, got "
        "rows that were placed, or written round the ring after a write by stream; call "
        "empty() of the buffer first"
    )


def remove_oldest(storage: ColumnStorage, lanes: Array, counts: Array) -> None:
    """Remove the oldest rows of distinct streams, of at least as many rows.

    Rows of the last slots move to the free slots, and keep their row ids. The caller holds the
    lock, and has called ``stream_index``.

    Args:
        lanes: the numbers of the streams, int64 ``[K]``.
        counts: the number of rows of each stream to remove, int64 ``[K]``.

    Cost: O(rows removed + streams).
    """
    if not counts.any():
        return
    Replacement(storage, storage.episodes.keys(lanes), counts).make()
    # Priorities follow now, because the log forgets removals.
    storage.notify(torch.zeros(0, dtype=torch.int64, device="cpu"))


class Replacement:
    """One change of rows: some leave, others come, and rows of the last slots fill the holes.

    An error in ``make`` leaves all rows as they were. The object has copies of the rows that move
    or leave, so that a lack of memory shows before any change.

    Args:
        storage: the storage, whose indexes have all rows.
        keys, counts: the streams whose oldest rows leave, and the number of these rows. The streams
            are distinct, and have at least as many rows.
        new: the number of rows that come. They get the lowest free slots.
        forget: whether a stream that loses all rows begins a new episode with its next row.
            Otherwise its next row continues its open episode.
        again: whether new rows do not begin where other processes would expect it: they belong to
            one of these streams, or to ``joined``. The processes then read the rows again.

    Attributes:
        slots: the slots of the new rows, ascending.
        joined: the keys of streams that begin in the middle of an episode. The caller sets them.
        removal: the removal of rows that come after the new rows; None if there is none.
    """

    def __init__(
        self,
        storage: ColumnStorage,
        keys: list[Any],
        counts: Array,
        new: int = 0,
        *,
        forget: bool = False,
        again: bool = False,
    ) -> None:
        self.keys, self.counts, self.forget = keys, counts, forget
        self.joined: Sequence[Any] = ()
        self.removal: Removal | None = None
        self._storage, self._copies = storage, cast(Any, None)
        before = storage.ledger.length
        free = storage.episodes.pool.oldest(keys, counts) if keys else _NO_SLOTS
        free.sort()
        added = new - len(free)
        if added > 0:
            last = np.arange(before, before + added)
            self.slots = np.concatenate([free, last]) if len(free) else last
        else:
            self.slots = free[:new]
        if added < 0 or again:
            self.removal = _removal(free[new:], before + max(added, 0))
        # Readers without the lock expect writes of consecutive slots only at the cursor.
        shared = storage.recovery is not None and storage.recovery.shared
        self.is_run = (
            bool(new) and not shared and int(self.slots[-1]) - int(self.slots[0]) == new - 1
        )
        columns: Any = storage.require()
        columns.check_writable()
        moves = self.removal is not None and len(self.removal.source) > 0
        if not moves and self.is_run:  # the only step that writes rows happens as a whole
            return
        source = _NO_SLOTS if self.removal is None else self.removal.source
        self._gone = free
        self._copies = columns.gather(torch.from_numpy(np.concatenate([source, free])), before)

    def make(self, rows: Rows | None = None) -> None:
        """Make the change; ``rows`` are the new rows.

        Raises:
            The errors of a write. No row has changed then.
        """
        storage, removal = self._storage, self.removal
        ledger, recovery = storage.ledger, storage.recovery
        copied = self._copies is not None
        if rows is not None and copied:  # the write changes slots that the rows may be views of
            rows = storage.apart(rows)
        slots: Any = range(0)
        if self.is_run:
            slots = range(int(self.slots[0]), int(self.slots[-1]) + 1)
        elif rows is not None:
            slots = torch.from_numpy(self.slots)
        tables, marks = ledger.reserve(slots, removal), None
        if removal is not None:
            marks = reserve_marks(storage, removal.target)
        try:
            if removal is not None and len(removal.source):
                self._write_copies(removal.target, slice(0, len(removal.source)))
            if rows is not None and self.is_run:
                storage.write_ring(slots.start, rows, 0)  # faster
            elif rows is not None:
                storage.write(slots, rows, slice(None))
            ledger.place_in_streams(slots, tables, removal)
        except BaseException:
            if copied:
                first = 0 if removal is None else len(removal.source)
                self._write_copies(self._gone, slice(first, None))
            raise
        if removal is not None and marks is not None:  # rows that were taken in a ring
            marks[removal.target] = marks[removal.source]
        if self.is_run:
            self.slots = slots
        storage.indexes.replaced(self, rows)
        if recovery is not None:
            recovery.made()

    def _write_copies(self, slots: Array, part: slice) -> None:
        storage, columns = self._storage, self._storage.require()
        if not len(slots):
            return
        if storage.recovery is not None:
            storage.recovery.journal_rows(slots)
        columns.scatter(torch.from_numpy(slots), self._copies, part)


def _removal(holes: Array, before: int) -> Removal:
    """Return the removal of the rows of ``holes``, ascending slots of ``before`` stored rows."""
    length = before - len(holes)
    target = holes[: holes.searchsorted(length)]
    last = np.ones(len(holes), bool)
    last[holes[len(target) :] - length] = False
    return Removal(last.nonzero()[0] + length, target, length)


def named_lanes(storage: ColumnStorage, index: EpisodeIndex, lane: Any) -> Array:
    """Return the numbers of streams, int64 ``[K]``; of all streams for None.

    Raises:
        IndexError: a stream has no stored rows.
        ValueError: a stream is named twice.
    """
    if lane is None:
        return np.arange(index.lanes)
    chosen = np.flatnonzero(storage.lanes_named(lane))
    given = np.atleast_1d(np.asarray(lane))
    if len(chosen) != len(given):
        key = format_key(storage.lane_key or ())
        raise ValueError(f"expected each stream of {key} once, got {given.tolist()}")
    return chosen
