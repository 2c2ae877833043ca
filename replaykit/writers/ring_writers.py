"""Write rows into one ring or into a ring per stream, or refuse to write into a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import numpy as np
import torch

from replaykit.checkpoint import MappedRows
from replaykit.declared import Count, Positive, read_value, vector
from replaykit.episodes import EpisodeIndex
from replaykit.episodes.streams import stream_keys
from replaykit.errors import BufferFull
from replaykit.keywords import checked_keywords
from replaykit.schema import Rows
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import as_slots, check_no_hole
from replaykit.storages.removal import check_removable, placed_rows
from replaykit.ted import format_key
from replaykit.writers.writer import (
    Writer,
    WriterState,
    check_tensordicts,
    full_index,
    ledger_of,
)


class RoundRobinWriter(Writer):
    """A writer that appends rows in a ring and replaces the oldest rows.

    Writing a batch longer than the capacity gives the same result as writing its rows one by one.
    Cursor, length, row ids and generations change together, after the rows are copied.

    Args:
        track_generations: whether samples carry ``index_generation``, int64 ``[B]``. The generation
            is the count of earlier writes to the slot. Index and generation together identify one
            row for ever.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter())
        >>> rb.extend(torch.arange(10)), rb[:], rb.write_count
        (tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1]), tensor([8, 9, 6, 7]), 10)
    """

    kind = "round_robin"

    @checked_keywords
    def __init__(self, *, track_generations: bool = False, compilable: bool = False) -> None:
        super().__init__()
        self.tracks_generations = track_generations

    def write(self, rows: Any) -> torch.Tensor:
        """Store rows at the cursor; return their slots, int64 ``[B]`` (``[B, ndim]``)."""
        count, storage = len(rows), self.storage if self._storage is None else self._storage
        if not count:
            return self._no_rows()
        storage.check_order(rows)
        storage.accept(rows)
        ledger = storage.ledger
        slots = ledger.next_slots(count)
        skipped = count - ledger.slots if count > ledger.slots else 0
        storage.write_ring(ledger.cursor, rows, skipped)
        storage.commit(rows)
        if storage.ndim > 1:
            self._count(count)
            return full_index(slots, storage)
        self._write_count += count
        return slots

    def write_reusing(self, rows: Any, free: torch.Tensor) -> torch.Tensor:
        """Store new rows in free slots first, and the remaining rows at the cursor.

        The caller must hold the lock of the storage.

        Args:
            free: distinct slots below the length, int64 ``[K]``, whose rows may be replaced. There
                are at most as many of these slots as new rows.

        Returns:
            The slot of each row, int64 ``[B]``.

        Cost: the same as ``write``, but O(capacity) for the first call. After the first call, row
        ids and generations take 16 bytes of memory per slot.
        """
        count, storage = len(rows), self.storage
        if not len(free):
            return self.write(rows)
        storage.accept(rows)
        slots = torch.cat([free, storage.ledger.next_slots(count - len(free))])
        storage.place(slots, rows, move_cursor=count > len(free))
        self._count(count)
        return slots

    def write_at(self, index: Any, data: Any) -> torch.Tensor:
        """Store new rows at given slots of dimension 0; the cursor does not move.

        Args:
            index: an int for one row, or int64 ``[B]`` for a batch.

        Returns:
            The slots, int64 ``[B]`` (``[B * prod(lanes), ndim]`` with lanes).

        Raises:
            IndexError: a slot is outside the capacity.
            RuntimeError: a slot below the given slots would stay without a row.
            ValueError: the counts of rows and slots differ.
            SchemaError: the rows do not fit the schema.
        """
        storage = self.storage
        rows = self.prepare(data, single=isinstance(index, int))
        if not len(rows):
            return self._no_rows()
        with storage.lock:
            slots = as_slots(index, storage.slots_for(rows))
            if len(slots) != len(rows):
                raise ValueError(f"expected {len(slots)} rows for as many slots, got {len(rows)}")
            check_no_hole(slots, storage.ledger.length)
            storage.accept(rows)
            storage.place(slots, rows, move_cursor=False)
            self._count(len(rows))
            index = full_index(slots, storage)
            storage.notify(index)
        return index


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A RoundRobinWriter under the name that TensorDict code uses.

    Example:
        >>> from replaykit import RoundRobinWriter, TensorDictRoundRobinWriter
        >>> issubclass(TensorDictRoundRobinWriter, RoundRobinWriter)
        True
    """


class ImmutableDatasetWriter(Writer):
    """A writer that refuses every write. Stored rows can still be edited in place.

    Example:
        >>> import torch
        >>> from replaykit import ImmutableDatasetWriter, ReplayBuffer, TensorStorage
        >>> rb = ReplayBuffer(storage=TensorStorage(torch.arange(3)),
        ...                   writer=ImmutableDatasetWriter())
        >>> rb.add(torch.tensor(3))
        Traceback (most recent call last):
        RuntimeError: This dataset doesn't allow writing.
    """

    kind = "immutable"

    def __init__(self, *, compilable: bool = False) -> None:
        super().__init__()

    def write(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("This dataset doesn't allow writing.")

    add = extend = write_at = empty = prepare = write


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _LaneState(WriterState):
    """The state of the writer, with the stream of each row."""

    lanes: Annotated[Any, vector(torch.int64)]
    longest: Count | None = None
    length: Positive = 1

    def __post_init__(self) -> None:
        rows = self.ledger.length
        if (self.longest or 0) > rows or len(self.lanes) != rows:
            raise ValueError(
                f"expected the streams of {rows} rows, and the longest of them, got "
                f"{len(self.lanes)} and {self.longest}"
            )
        if isinstance(self.lanes, torch.Tensor):
            _check_streams(self.lanes)


class LaneWriter(Writer):
    """A writer that keeps the newest ``length`` rows of every stream.

    The storage must have a ``lane_key``. A new row takes a free slot until its stream has
    ``length`` rows. After that, it replaces the oldest row of its stream. A write may have any
    number of rows of any streams, in any order. Other streams do not change. If a write has more
    than ``length`` rows of a stream, only the last ``length`` rows are kept. The rows of a stream
    stay stored until ``empty``.

    A stream may already have more than ``length`` rows when the writer starts to write to the
    storage. Such a stream keeps its count of rows.

    Args:
        length: number of rows of each stream.
        lanes: the streams, named by their values of the lane key, if they are known in advance;
            ``drain`` then waits for all of them. None: any streams.
        track_generations: whether samples carry ``index_generation``; see RoundRobinWriter.

    Raises:
        IndexError: on write, a row is of a stream that ``lanes`` does not name.
        ValueError: ``length`` is not an int of at least 1, or the storage has no ``lane_key``.
        BufferFull: on write, all streams with ``length`` rows each would exceed the capacity.
            Nothing has changed.
        RuntimeError: on write, rows are not TensorDicts; or rows were written to chosen slots or by
            another writer, so that the missing rows of a stream are unknown.

    Cost: O(rows written + streams), in array operations. If a ring wraps during a write, these
    operations run once per wrap. Memory: 16 bytes per slot.

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
    _declared = _LaneState
    mapped_entries = ("_ledger", "_lanes")

    def __init__(
        self,
        length: int,
        lanes: Sequence[int] | None = None,
        *,
        track_generations: bool = False,
    ) -> None:
        super().__init__()
        self.lanes = None if lanes is None else np.unique(np.asarray(lanes, np.int64))
        if lanes is not None and len(self.lanes) != len(lanes):  # type: ignore[arg-type]
            raise ValueError(f"expected distinct lanes, got {list(lanes)}")
        given: Any = length
        number = int(given) if isinstance(given, np.integer) else given
        self.length: int = read_value(Positive, number, "length")
        self.tracks_generations = track_generations

    def register_storage(self, storage: Storage) -> None:
        """Set the storage to write to. Raises ValueError if it has no ``lane_key``."""
        check_removable(storage, f"a {type(self).__name__}")
        super().register_storage(storage)

    @property
    def _columns(self) -> ColumnStorage:
        storage = self.storage
        assert isinstance(storage, ColumnStorage)
        return storage

    # -- writing ------------------------------------------------------------------------------

    def write(self, rows: Any) -> torch.Tensor:
        """Store every row in the ring of its stream; return its slot, int64 ``[B]``."""
        storage = self._columns
        if not len(rows):
            return self._no_rows()
        index = self._index(rows)
        rows = storage.apart(rows)
        targets, distinct = self._targets(rows, index)
        storage.check_order(rows)
        storage.accept(rows)
        if index is None:
            _ = storage.episodes  # create the index, so that it follows this write
        slots = torch.from_numpy(targets)
        storage.place_by_stream(slots, rows, distinct=distinct)
        self._count(len(rows))
        return slots

    def _index(self, rows: Rows) -> EpisodeIndex | None:
        """Return the index of the stored rows; None before the first write."""
        storage = self._columns
        if not storage.initialized:
            check_tensordicts(rows, self)
            return None
        if not storage.ledger.oldest_first:
            raise placed_rows(f"a {type(self).__name__}")
        return storage.episodes

    def _targets(self, rows: Rows, index: EpisodeIndex | None) -> tuple[Array, bool]:
        """Return the slots of rows ``[n]``, and whether they are distinct."""
        storage = self._columns
        assert storage.lane_key is not None
        keys = stream_keys(rows.leaves[storage.lane_key])
        # Group the rows by stream. Each group is in the order of the write.
        order = np.argsort(keys, kind="stable")
        grouped, count = keys[order], len(keys)
        starts = np.flatnonzero(np.append(True, grouped[1:] != grouped[:-1]))
        counts = np.diff(starts, append=count)
        streams = grouped[starts]
        if self.lanes is not None and not np.isin(streams, self.lanes).all():
            raise IndexError(
                f"expected streams {self.lanes.tolist()} by {format_key(storage.lane_key)}, got "
                f"{streams[~np.isin(streams, self.lanes)].tolist()}"
            )
        have = np.zeros(len(streams), np.int64) if index is None else index.sizes(streams)
        self._check_room(index, int(np.count_nonzero(have == 0)), storage.slots_for(rows))
        number = np.arange(count) - np.repeat(starts, counts)
        size = np.repeat(have, counts)
        ring = np.maximum(size, self.length)
        # Positions in a stream's ring: first the stored rows, oldest first, then free positions.
        place = (number + size) % ring
        old, fresh = place < size, number < ring - size
        slots = np.empty(count, np.int64)
        if index is not None and old.any():
            lane = index.pool.ranks(grouped[old])
            slots[old] = index.element(index.bounds(lane)[0] + place[old], lane)
        if fresh.any():  # rows take free slots in the order of the write
            taken = order[fresh]
            slots[fresh] = storage.ledger.length + np.argsort(np.argsort(taken))
        again = ~old & ~fresh
        if again.any():
            slots[again] = slots[(np.repeat(starts, counts) + place - size)[again]]
        found = np.empty(count, np.int64)
        found[order] = slots
        return found, bool((number < ring).all())

    def _check_room(self, index: EpisodeIndex | None, fresh: int, slots: int) -> None:
        """Raise BufferFull if all streams, including ``fresh`` new streams, do not fit."""
        sizes = np.zeros(0, np.int64) if index is None else index.sizes()
        needed = int(np.maximum(sizes, self.length).sum()) + fresh * self.length
        if needed > slots:
            raise BufferFull(
                f"expected at most {slots // self.length} streams of {self.length} rows in {slots} "
                f"slots, by {format_key(self._columns.lane_key or ())}; got {len(sizes) + fresh}, "
                f"{fresh} of them new, which take {needed}"
            )

    def kept_rows(self, slots: int) -> torch.Tensor | None:
        if self._columns.initialized:
            self._check_room(self._columns.episodes, 0, slots)
        return super().kept_rows(slots)

    # -- state --------------------------------------------------------------------------------

    def keeps_all(self, capacity: int, state: dict[str, Any]) -> bool:
        """Return whether all rows of a saved state can stay in their slots.

        A stream may have more than this writer's ``length`` rows only if the saved writer's
        ``length`` was not larger.
        """
        longest = state.get("_longest")
        if longest is None:  # saved by an older version
            lanes = streams_of(state)
            longest = int(torch.bincount(lanes).max()) if len(lanes) else 0
        # A saved writer of no larger length kept the additional rows, and so does this writer.
        length = state.get("_length")
        fits = longest <= self.length or (length is not None and length <= self.length)
        return super().keeps_all(capacity, state) and fits

    def survivors(self, capacity: int, state: dict[str, Any]) -> torch.Tensor:
        """Return the slots of the newest ``length`` rows of every stream.

        If the count of these rows exceeds ``capacity``, return fewer rows per stream, as many as
        fit. If even one row per stream does not fit, return the newest rows of all streams.
        """
        order = ledger_of(state).write_order()
        lanes = streams_of(state)[order].numpy()
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
        """Return the writer's state, each row's stream, and the longest stream's length."""
        storage = self._columns
        with storage.lock:
            lanes = stream_numbers(storage)
            longest = int(np.bincount(lanes).max()) if len(lanes) else 0
            return {
                **super().state_dict(),
                "_lanes": torch.from_numpy(lanes),
                "_longest": longest,
                "_length": self.length,
            }


def stream_numbers(storage: ColumnStorage) -> Array:
    """Return the number of the stream of each stored row, int64 ``[length]``."""
    length = storage.ledger.length
    if not length:
        return np.zeros(0, np.int64)
    return storage.episodes.time_and_lane(np.arange(length))[1]


def streams_of(state: dict[str, Any]) -> torch.Tensor:
    """Return the stream of each row of a saved state. ValueError if one is invalid."""
    lanes: torch.Tensor | MappedRows = state["_lanes"]
    found = lanes.spanned() if isinstance(lanes, MappedRows) else lanes
    _check_streams(found)
    return found


def _check_streams(lanes: torch.Tensor) -> None:
    if len(lanes) and not 0 <= int(lanes.min()) <= int(lanes.max()) < len(lanes):
        raise ValueError(f"expected the streams of {len(lanes)} rows, got {lanes!r}")
