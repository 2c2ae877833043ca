"""Remove rows of streams, and keep the stored rows in the first slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.storages.change_log import Removal
from replaykit.storages.columns import Columns
from replaykit.ted import format_key

if TYPE_CHECKING:
    from replaykit.episodes import EpisodeIndex
    from replaykit.storages.column_storage import ColumnStorage

__all__ = [
    "Moves",
    "check_removable",
    "named_lanes",
    "oldest_slots",
    "remove_oldest",
    "stream_index",
]

Array = np.ndarray[Any, Any]


def check_removable(storage: Any, name: str) -> None:
    """Raise ValueError unless single rows of a storage can be removed.

    Args:
        name: the part or method that removes rows, for the message.
    """
    options = [
        text
        for text, given in (
            ("dedup_next=", bool(getattr(storage, "dedup_next", False))),
            ("recover=True or shared=True", storage.recovery is not None),
        )
        if given
    ]
    if getattr(storage, "lane_key", None) is None:
        raise ValueError(
            f"{name} expected a tensor or memmap storage with lane_key=, the column that "
            f"identifies streams, got {storage!r}"
        )
    if options:
        raise ValueError(f"{name} expected a storage without {options[0]}, got {storage!r}")


def stream_index(storage: ColumnStorage, name: str) -> EpisodeIndex:
    """Return the index of the streams, up to date. The caller holds the lock.

    Raises:
        RuntimeError: streams have lost other rows than their oldest ones.
    """
    if not storage.ledger.oldest_first:
        raise RuntimeError(
            f"{name} expected stored rows of which each stream has lost only its oldest ones, got "
            "rows that were placed, or written round the ring after a write by stream; call "
            "empty() of the buffer first"
        )
    if storage.indexes.pending() or storage.indexes.loaded:
        storage._before_overwrite()
    return storage.episodes


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
    index = storage.episodes
    slots = np.sort(oldest_slots(index, lanes, counts))
    moves = Moves(storage, slots)
    try:
        storage.indexes.drop_oldest(index.keys(lanes), counts)
        moves.make()
    except BaseException:
        storage.ledger.changes += 1  # so that the indexes read the rows again
        raise
    # Priorities follow now, because the log forgets removals.
    storage.notify(torch.zeros(0, dtype=torch.int64, device="cpu"))


def oldest_slots(index: EpisodeIndex, lanes: Array, counts: Array) -> Array:
    """Return the slots of the oldest rows of lanes, stream after stream; int64 ``[K]`` each."""
    each = np.repeat(np.arange(len(lanes)), counts)
    number = np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)
    lane = lanes[each]
    return index.element(index.bounds(lane)[0] + number, lane)


class Moves:
    """The moves of the rows of the last slots to slots whose rows are removed.

    The object has copies of the moving rows, so that a lack of memory shows before any change.

    Args:
        holes: the slots whose rows are removed and not replaced, int64 ``[K]``, ascending.
    """

    def __init__(self, storage: ColumnStorage, holes: Array) -> None:
        before, columns = storage.ledger.length, storage.require()
        length = before - len(holes)
        target = holes[: np.searchsorted(holes, length)]
        last = np.ones(len(holes), bool)
        last[holes[len(target) :] - length] = False
        source = np.flatnonzero(last) + length
        self._storage, self._removal = storage, Removal(source, target, length)
        if len(source):
            assert isinstance(columns, Columns)
            columns.check_writable()
            self._columns = columns
            self._leaves = columns.gather(torch.from_numpy(source), before)

    def make(self) -> None:
        """Move the rows. The indexes have dropped those that are removed."""
        storage, (source, target, _) = self._storage, self._removal
        if len(source):
            self._columns.scatter(torch.from_numpy(target), self._leaves, arange(len(source)))
        storage.ledger.compact(self._removal)
        storage.indexes.removed(source, target)


def named_lanes(storage: ColumnStorage, index: EpisodeIndex, lane: Any) -> Array:
    """Return the numbers of streams, int64 ``[K]``; of all streams for None.

    Raises:
        IndexError: a stream has no stored rows.
        ValueError: a stream is named twice.
    """
    if lane is None:
        return np.arange(index.lanes)
    chosen = np.flatnonzero(index.lanes_of(lane))
    given = np.atleast_1d(np.asarray(lane))
    if len(chosen) != len(given):
        key = format_key(storage.lane_key or ())
        raise ValueError(f"expected each stream of {key} once, got {given.tolist()}")
    return chosen
