"""A ring of its own for each stream: its next row takes the slot of its oldest one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit.checkpoint import MappedRows
from replaykit.episodes import InterleavedIndex
from replaykit.episodes.interleaved import stream_keys
from replaykit.errors import BufferFull
from replaykit.schema import Rows
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import last_occurrences
from replaykit.structure import Branch
from replaykit.ted import format_key
from replaykit.writers.writer import Writer, ledger_of

__all__ = ["LaneWriter"]

Array = np.ndarray[Any, Any]


class _Places(NamedTuple):
    """Where rows go, int64 ``[n]`` each: their slots, whether these had a row before, and how
    often the ring of their stream has gone round in this write."""

    slots: Array
    displacing: Array
    turn: Array


class LaneWriter(Writer):
    """Keeps the newest ``length`` rows of every stream of a storage with ``lane_key``.

    A stream that has fewer rows takes a free slot, one that is full the slot of its own oldest
    row. A write may have rows of any of the streams, of each as many as there are, in the order in
    which they come; other streams stay as they are. Of more rows than ``length`` the last ones
    stay. A stream stays until ``empty``; those that have more rows already when the writer takes
    over keep as many.

    Args:
        length: rows of each stream.
        track_generations: samples then carry ``index_generation``; see RoundRobinWriter.

    Raises:
        ValueError: ``length`` is not an int of at least 1; a storage without ``lane_key``.
        BufferFull: on write, where there are more streams than fit into the capacity with
            ``length`` rows each. Nothing has changed then.
        RuntimeError: on write, records that are no TensorDicts; rows that were written to chosen
            slots, or by another writer since, of which nobody knows which ones are missing.

    Cost: O(rows written + streams), by array operations; those of a write in which a stream has
    more than ``length`` rows once for each time that it goes round. 16 bytes a slot.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LaneWriter, LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(6, lane_key="env"), writer=LaneWriter(3))
        >>> env, x = torch.tensor([0, 1, 0, 0, 0, 0]), torch.arange(6)
        >>> rb.extend(TensorDict({"env": env, "x": x}, [6]))
        tensor([0, 1, 2, 3, 0, 2])
        >>> [episode.rows()["x"].tolist() for episode in rb.episodes]
        [[3, 4, 5], [1]]
    """

    kind = "lanes"
    mapped_entries = ("_ledger", "_lanes")

    def __init__(self, length: int, *, track_generations: bool = False) -> None:
        super().__init__()
        self.length = _checked_length(length)
        self.tracks_generations = track_generations

    def register_storage(self, storage: Storage) -> None:
        """Takes the storage to write to; ValueError, where it has no ``lane_key``."""
        if not isinstance(storage, ColumnStorage) or storage.lane_key is None:
            raise ValueError(
                f"a {type(self).__name__} takes tensor or memmap storages with lane_key=, the "
                f"column that tells streams apart, got {storage!r}"
            )
        super().register_storage(storage)

    @property
    def _columns(self) -> ColumnStorage:
        storage = self.storage
        assert isinstance(storage, ColumnStorage)
        return storage

    # -- writing ------------------------------------------------------------------------------

    def write(self, rows: Any) -> torch.Tensor:
        """Stores every row in the ring of its stream; returns its slot, int64 ``[B]``."""
        storage = self._columns
        if not len(rows):
            return self._no_rows()
        index = self._index(rows)
        rows = storage.apart(rows)
        places = self._places(rows, index)
        storage.check_order(rows)
        storage.accept(rows)
        if index is None:
            _ = storage.episodes  # is there from now on, and told of what follows
        slots = torch.from_numpy(places.slots)
        last = last_occurrences(slots) if places.turn.any() else slice(None)
        storage.write_by_stream(slots[last], rows, last)
        storage.commit_by_stream(rows, slots, places.displacing, places.turn)
        self._count(len(rows))
        return slots

    def _index(self, rows: Rows) -> InterleavedIndex | None:
        """The index of what is stored; None before the first write."""
        storage = self._columns
        if not storage.initialized:
            root = rows.root
            if not isinstance(root, Branch) or root.kind not in ("tensordict", "tensorclass"):
                raise RuntimeError(
                    f"a {type(self).__name__} expects data to be a tensor collection: it takes "
                    f"TensorDicts, got {root}"
                )
            return None
        if not storage.ledger.oldest_first:
            raise RuntimeError(
                f"a {type(self).__name__} goes on where each stream has lost its oldest rows "
                "alone; these were written to slots of somebody's choice, or round the ring after "
                "they had lain by stream: empty() the buffer first"
            )
        index = storage.episodes
        assert isinstance(index, InterleavedIndex)
        return index

    def _places(self, rows: Rows, index: InterleavedIndex | None) -> _Places:
        storage = self._columns
        assert storage.lane_key is not None
        keys = stream_keys(rows.leaves[storage.lane_key])
        # Rows by stream, and in each in the order in which they come.
        order = np.argsort(keys, kind="stable")
        grouped, count = keys[order], len(keys)
        starts = np.flatnonzero(np.append(True, grouped[1:] != grouped[:-1]))
        counts = np.diff(starts, append=count)
        streams = grouped[starts]
        have = np.zeros(len(streams), np.int64) if index is None else index.sizes(streams)
        self._check_room(index, int(np.count_nonzero(have == 0)), storage.slots_for(rows))
        number = np.arange(count) - np.repeat(starts, counts)
        size = np.repeat(have, counts)
        ring = np.maximum(size, self.length)
        # Places in a stream's ring: its rows from the oldest on, and then those that are free.
        place = (number + size) % ring
        old, fresh = place < size, number < ring - size
        slots = np.empty(count, np.int64)
        if index is not None and old.any():
            slots[old] = index.nth(grouped[old], place[old])
        if fresh.any():  # free slots are given in the order in which rows come
            taken = order[fresh]
            slots[fresh] = storage.ledger.length + np.argsort(np.argsort(taken))
        again = ~old & ~fresh
        if again.any():
            slots[again] = slots[(np.repeat(starts, counts) + place - size)[again]]
        found = _Places(*(np.empty(count, part) for part in (np.int64, np.bool_, np.int64)))
        found.slots[order], found.displacing[order] = slots, ~fresh
        found.turn[order] = number // ring
        return found

    def _check_room(self, index: InterleavedIndex | None, fresh: int, slots: int) -> None:
        """Raises BufferFull where all streams, ``fresh`` new ones too, take more than all slots."""
        sizes = np.zeros(0, np.int64) if index is None else index.sizes()
        needed = int(np.maximum(sizes, self.length).sum()) + fresh * self.length
        if needed > slots:
            raise BufferFull(
                f"expected at most {slots // self.length} streams of {self.length} rows in {slots} "
                f"slots, by {format_key(self._columns.lane_key or ())}; got {len(sizes) + fresh}, "
                f"{fresh} of them new, which take {needed}"
            )

    # -- state --------------------------------------------------------------------------------

    def keeps_all(self, capacity: int, state: dict[str, Any]) -> bool:
        """Whether no slot changes hands, and no stream has more rows than ``length``, but for those
        that had in a writer of no larger ``length``."""
        longest = state.get("_longest")
        if longest is None:  # as older versions saved it
            lanes = _streams_of(state)
            longest = int(torch.bincount(lanes).max()) if len(lanes) else 0
        # Who kept more rows of a stream was not asked to let go of any.
        length = state.get("_length")
        fits = longest <= self.length or (length is not None and length <= self.length)
        return super().keeps_all(capacity, state) and fits

    def survivors(self, capacity: int, state: dict[str, Any]) -> torch.Tensor:
        """The newest ``length`` rows of every stream; where these are too many, the newest of each,
        as many as fit for all; of more streams than slots the newest rows of all."""
        order = ledger_of(state).write_order()
        lanes = _streams_of(state)[order].numpy()
        by = np.argsort(lanes, kind="stable")
        counts = np.bincount(lanes)
        newer = np.empty(len(by), np.int64)
        newer[by] = np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(by))
        low, high = 0, self.length
        while low < high:
            middle = (low + high + 1) // 2
            if int(np.minimum(counts, middle).sum()) <= capacity:
                low = middle
            else:
                high = middle - 1
        return order[torch.from_numpy(newer < low)] if low else order[-capacity:]

    def state_dict(self) -> dict[str, Any]:
        """Returns what every writer does, the number of its stream for each stored row, and the
        most rows of one stream."""
        storage = self._columns
        with storage.lock:
            length = storage.ledger.length
            lanes = np.zeros(0, np.int64)
            if length:
                lanes = storage.episodes.place(np.arange(length))[1]
            longest = int(np.bincount(lanes).max()) if length else 0
            return {
                **super().state_dict(),
                "_lanes": torch.from_numpy(lanes),
                "_longest": longest,
                "_length": self.length,
            }

    def check_state(self, state_dict: dict[str, Any]) -> None:
        super().check_state(state_dict)
        length, longest = state_dict["_ledger"]["length"], state_dict.get("_longest")
        if longest is not None and (type(longest) is not int or not 0 <= longest <= length):
            raise ValueError(f"expected '_longest' as some of {length} rows, got {longest!r}")
        if "_length" in state_dict:
            _checked_length(state_dict["_length"])
        lanes = state_dict.get("_lanes")
        if (
            not isinstance(lanes, (torch.Tensor, MappedRows))
            or lanes.dtype != torch.int64
            or lanes.shape != (length,)
        ):
            raise ValueError(f"expected the streams of {length} rows as int64, got {lanes!r}")
        if isinstance(lanes, torch.Tensor):
            _streams_of(state_dict)


def _streams_of(state: dict[str, Any]) -> torch.Tensor:
    """The number of its stream for each row of a saved state; ValueError where there is none."""
    lanes: torch.Tensor | MappedRows = state["_lanes"]
    found = lanes.spanned() if isinstance(lanes, MappedRows) else lanes
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < len(found):
        raise ValueError(f"expected the streams of {len(found)} rows, got {found!r}")
    return found


def _checked_length(length: object) -> int:
    if isinstance(length, np.integer):
        length = int(length)
    if type(length) is not int or length < 1:
        raise ValueError(f"expected length as an int of at least 1, got {length!r}")
    return length
