"""Index the episodes of streams whose rows are interleaved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.episodes.boundaries import BoundaryRule
from replaykit.episodes.episode_laws import SEVERED, WINDOWS, CountLaw, EndReason, Head
from replaykit.episodes.index import EpisodeIndex, Windows
from replaykit.episodes.streams import StreamEpisodes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replaykit.episodes.boundaries import RowSource
    from replaykit.schema import Rows
    from replaykit.structure import Path

__all__ = ["InterleavedIndex", "StreamWrites", "cell_bytes", "key_dtype", "stream_keys"]

Array = np.ndarray[Any, Any]


def key_dtype(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return the dtype of stream keys for column values of this shape and dtype.

    It is int64 for a single integer or flag, else bytes.

    Example:
        >>> import torch
        >>> from replaykit.episodes.interleaved import key_dtype
        >>> key_dtype([1], torch.uint8), key_dtype([2], torch.float32)
        (<class 'numpy.int64'>, 'S8')
    """
    small = math.prod(shape) == 1 and not dtype.is_floating_point and not dtype.is_complex
    return np.int64 if small else f"S{max(1, cell_bytes(shape, dtype))}"


def stream_keys(values: torch.Tensor) -> Array:
    """Return a key ``[n]`` for each value of a column ``[n, *F]``.

    Keys are equal if all bits of the values are equal.

    Example:
        >>> import torch
        >>> from replaykit.episodes.interleaved import stream_keys
        >>> stream_keys(torch.tensor([[3], [1]])).tolist()
        [3, 1]
    """
    dtype = np.dtype(key_dtype(values.shape[1:], values.dtype))
    values = values.detach()
    if dtype == np.int64:
        return values.to(device="cpu", dtype=torch.int64).reshape(-1).numpy()
    own = torch.empty(values.shape, dtype=values.dtype, device="cpu").copy_(values)
    cells = own.view(-1).view(torch.uint8).numpy().reshape(len(values), -1)
    if not cells.shape[1]:
        return np.zeros(len(cells), dtype)
    return np.ascontiguousarray(cells).view(dtype).reshape(-1)


def cell_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the size of one value of a column in bytes."""
    return math.prod(shape) * dtype.itemsize


_BEHIND = 256
"""Number of written rows that may wait, so that small writes are indexed together."""

_LEAST = 16 * _BEHIND
"""Number of slots from which on rows may wait. It is at least twice the waiting rows."""

_BLOCK = 2**20
"""Number of rows that a rebuild indexes in one step."""


class StreamWrites(EpisodeIndex):
    """The part of ``InterleavedIndex`` that follows writes and saves its state.

    The data are in ``StreamEpisodes``. ``InterleavedIndex`` adds the queries.
    """

    def __init__(self, storage: RowSource, rule: BoundaryRule, *, before: int = 0) -> None:
        columns = storage.require()
        assert storage.lane_key is not None
        self.rule = rule
        self.key: Path = storage.lane_key
        self.bound = rule.bind(columns.schema)
        # The key never changes within a lane.
        self.bound.ids = tuple(path for path in self.bound.ids if path != self.key)
        self.bound.paths |= {self.key}
        self._storage, self._columns = storage, columns
        self.slots = columns.slots
        leaves = columns.schema.leaves
        ids = (leaves[path] for path in self.bound.ids)
        self._id_bytes = sum(cell_bytes(leaf.shape, leaf.dtype) for leaf in ids)
        self._streams = self._new()
        self._past = 0  # sum of the versions of earlier ``_streams``
        self.rebuilt = 0
        ledger = storage.ledger
        self._noted = ledger.next_position - before
        self._changes = ledger.changes
        self._edited = False
        self._is_ring = True
        self._placed = np.zeros(0, np.int64)  # slots of the last write, if it placed rows
        if ledger.length and (self._noted > ledger.cleared or not before):
            self._rebuild()

    def _new(self) -> StreamEpisodes:
        leaf = self._columns.schema.leaves[self.key]
        return StreamEpisodes(self.slots, key_dtype(leaf.shape, leaf.dtype), self._id_bytes)

    @property
    def lanes(self) -> int:  # type: ignore[override]
        """Number of streams that have stored rows."""
        return len(self._streams.order)

    # -- following writes -----------------------------------------------------------------------

    def edited(self) -> None:
        """Follow an edit that is about to change a column that ends episodes."""
        self.sync()
        self._edited = True

    def append(self, count: int) -> None:
        """Follow a write of ``count`` rows at the cursor; index these rows now or later."""
        behind = self._storage.ledger.next_position - self._noted
        if behind >= _BEHIND or self.slots < _LEAST or not self._noted:
            self.sync()

    def append_rows(self, rows: Rows) -> None:
        """Index the last rows written, including rows that are already overwritten."""
        ledger, count = self._storage.ledger, len(rows)
        plain = ledger.changes == self._changes and not self._edited and self._is_ring
        if not plain or ledger.next_position - self._noted != count:
            self._rebuild()
            return
        for start in range(0, count, self.slots):
            stop = min(count, start + self.slots)
            leaves = {path: rows.leaves[path][start:stop] for path in self.bound.paths}
            positions = np.arange(start, stop) + (ledger.next_position - count)
            slots = (ledger.cursor - ledger.next_position + positions) % self.slots
            self._add(leaves, slots, positions)
        self._noted = ledger.next_position

    def placed(self, rows: Rows, slots: Array, displacing: Array, turn: Array) -> None:
        """Index the last rows written, each in a slot of its stream.

        Args:
            slots: int64 ``[n]``, free slots after the stored rows, or slots of the oldest rows of
                the streams, one per stream and turn.
            displacing: bool ``[n]``, True at slots that had a row before.
            turn: int64 ``[n]``, ascending in each stream. No slot occurs twice in a turn.
        """
        ledger, count = self._storage.ledger, len(rows)
        plain = ledger.changes == self._changes and not self._edited
        if not plain or ledger.next_position - self._noted != count:
            self._rebuild()
            return
        leaves = {path: rows.leaves[path] for path in self.bound.paths}
        positions = np.arange(self._noted, self._noted + count)
        if not turn.any():
            self._add(leaves, slots, positions, displaced=slots[displacing])
        else:
            order = np.argsort(turn, kind="stable")
            for at in np.split(order, np.flatnonzero(np.diff(turn[order])) + 1):
                which = torch.from_numpy(at)
                part = {path: leaf[which] for path, leaf in leaves.items()}
                gone = slots[at[displacing[at]]]
                self._add(part, slots[at], positions[at], displaced=gone)
        self._noted, self._is_ring, self._placed = ledger.next_position, False, slots

    def close(self, lanes: Array, code: int) -> None:
        """End the open episodes of lanes, bool ``[lanes]``, with the code."""
        self.sync()
        self._streams.close(lanes, code)

    def _append_stored(self, first: int, until: int) -> None:
        ledger = self._storage.ledger
        leaves = {path: self._columns[path][first:until] for path in self.bound.paths}
        slots = np.arange(first, until)
        positions = ledger.next_position - 1 - (ledger.cursor - 1 - slots) % self.slots
        self._add(leaves, slots, positions)

    def _add(
        self, leaves: Mapping[Path, torch.Tensor], slots: Array, positions: Array, **stops: Any
    ) -> None:
        codes, ids = self.bound.codes(leaves, 1)
        self._streams.append(
            stream_keys(leaves[self.key]),
            codes[:, 0],
            None if ids is None else ids[:, 0],
            slots,
            positions,
            **stops,
        )

    def _rebuild(self) -> None:
        """Index all stored rows again, in one pass over the columns.

        If the first row of an episode was overwritten, its beginning is kept, provided that its
        rows are the same.
        """
        ledger, old, slots = self._storage.ledger, self._streams, self.slots
        length = ledger.length
        noted, new = self._noted, self._new()
        self._streams = new
        self._past += old.version + 1
        new.joined = set(old.joined)
        if ledger.cleared > 0 and ledger.cleared == self._noted:
            new.joined.update(old.keys[old.lane.open[old.order] >= 0].tolist())
        # The oldest row is in slot 0. In a full ring, it is at the cursor.
        start = ledger.cursor if length == slots else 0
        order = (np.arange(length) + start) % slots
        if ledger.by_stream:
            order = ledger.write_order().numpy()
        positions = ledger.positions(torch.from_numpy(order)).numpy() if length else order
        # If each stream loses its own oldest rows, no row is missing between two stored rows.
        jumps = (np.diff(positions) != 1) & (not ledger.by_stream)
        segments = np.concatenate([[0], np.cumsum(jumps)])
        stops = np.zeros(length, np.uint8)
        if length:
            low, high = int(positions.min()), int(positions.max()) + 1
            marks, codes = self._storage.indexes.marks.among(low, high)
            by_position = np.argsort(positions, kind="stable")
            rows = by_position[np.searchsorted(positions[by_position], marks)]
            kept = positions[rows] == marks
            stops[rows[kept]] = codes[kept]
        done = 0
        while done < length:
            # A block ends at the last slot, because its rows are read as one slice.
            until = min(length, done + _BLOCK, slots - start if done < slots - start else length)
            part, first = slice(done, until), int(order[done])
            lying: Any = slice(first, first + until - done)
            if ledger.by_stream:
                lying = torch.from_numpy(order[part])
            leaves = {path: self._columns[path][lying] for path in self.bound.paths}
            self._add(
                leaves,
                order[part],
                positions[part],
                segments=segments[part],
                stops=stops[part],
                displaced=order[:0] if ledger.by_stream else None,
            )
            done = until
        if length and not ledger.by_stream:
            # The next row continues only streams of the last segment, and none of them if rows
            # were placed in other slots. A rebuild after that row would cut the same streams.
            streams = self._streams
            last = segments[-1] + (positions[-1] + 1 != ledger.next_position)
            streams.close(streams.lane.segment[streams.order] != last, SEVERED)
        self._noted, self._changes, self._edited = ledger.next_position, ledger.changes, False
        # True if the next write uses a free slot, or the slot of the oldest row in ring order.
        self._is_ring = ledger.length == slots or ledger.cursor == length
        self._is_ring &= not ledger.by_stream
        self._restore(old, noted)
        self.rebuilt += 1

    # -- state ----------------------------------------------------------------------------------

    def _heads(self, slots: Array) -> Array:  # type: ignore[override]
        """Return the beginnings of the episodes of rows, int64 ``[m, 4]``.

        Rows that are resets are not included. The columns are the id of the row, the id of the
        first row of its episode, the number of rows between them, and ``Head``.
        """
        streams = self._streams
        time, record = streams.time_and_lane(slots)
        one = streams.owner(time, record)
        position = self._storage.ledger.positions(torch.from_numpy(slots)).numpy()
        gone = time - streams.episode.begin[one]
        head = streams.episode.head[one].astype(np.int64)
        found = np.stack([position, streams.episode.position[one], gone, head], 1)
        return found[(gone > 0) | (head != int(Head.RESET))]

    def _oldest_of(self, kept: torch.Tensor) -> Array:
        """Return the slot of the oldest row in each lane, among the rows ``kept``."""
        slots = kept.numpy()
        slots = slots[np.argsort(self._storage.ledger.positions(kept).numpy(), kind="stable")]
        _, first = np.unique(self._streams.time_and_lane(slots)[1], return_index=True)
        return np.asarray(slots[first])

    def _restore(self, old: StreamEpisodes, noted: int) -> None:
        """Copy the beginnings of lanes from old streams, or else from saved streams.

        The old streams had rows below the row id ``noted``.
        """
        streams = self._streams
        lane, episode, order = streams.lane, streams.episode, streams.order
        if not len(order):
            return
        one = streams.at(order, lane.first[order])
        slots = streams.slot(lane.lo[order], order)
        position = self._storage.ledger.positions(torch.from_numpy(slots)).numpy()
        known = np.zeros((len(order), 4), np.int64)
        saved: list[list[int]] = []
        whole, trusted = False, self._trusts_others
        if trusted or not old.stored:
            saved, whole = self._storage.indexes.saved_streams()
        loaded = np.full(len(order), whole and trusted)
        if saved:
            given = np.array(saved, np.int64)
            given = given[np.argsort(given[:, 0], kind="stable")]
            at = np.minimum(np.searchsorted(given[:, 0], position), len(given) - 1)
            listed = given[at, 0] == position
            known[listed], loaded[listed] = given[at[listed]], True
        if old.stored:
            same = np.flatnonzero((position < noted) & ~loaded)
            time, record = old.time_and_lane(slots[same])
            same, time, record = (
                part[old.keys[old.rank[record]] == streams.keys[same]]
                for part in (same, time, record)
            )
            was = old.owner(time, record)
            gone = time - old.episode.begin[was]
            known[same, 1:] = np.stack([old.episode.position[was], gone, old.episode.head[was]], 1)
        # If the first row of an episode is stored, only its head can need a correction.
        differs = (known[:, 2] > 0) | (known[:, 3] > int(Head.RESET))
        one, known = one[differs], known[differs]
        episode.begin[one] -= known[:, 2]
        episode.position[one], episode.head[one] = known[:, 1], known[:, 3]
        streams.version += 1

    def first(self) -> tuple[int, Any, Any]:
        """Return no beginnings, because ``state`` has the beginnings of all streams."""
        return -1, [], []

    def state(self, kept: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the beginnings of lanes, which cannot be derived from the rows.

        Args:
            kept: slots of the stored rows to save, int64 ``[K]``; None for all rows.
        """
        self.sync()
        lane, order = self._streams.lane, self._streams.order
        first = self._streams.slot(lane.lo[order], order) if kept is None else self._oldest_of(kept)
        streams = self._heads(first).tolist() if self.lanes else []
        return {"oldest": -1, "begin": [], "head": [], "streams": streams}


class InterleavedIndex(StreamWrites):
    """The index of episodes of interleaved streams, which a column identifies.

    The streams that have stored rows are the lanes, in the order of their keys. A lane's number is
    valid until the next write. Consecutive rows of a stream have consecutive times, even if rows of
    other streams are between them in the ring. When the last row of a stream is lost, the index
    forgets the stream. If the stream is written again, it begins with a reset.

    Cost: a write takes O(rows written + streams of these rows), without a Python step per row.
    ``totals`` takes O(streams), and ``find`` takes O(K log episodes).
    Memory: 24 bytes per row, and the memory of episodes and streams.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(8, lane_key="env"))
        >>> done = torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.bool)
        >>> rows = {"env": torch.arange(6) % 2, "next": {"done": done}}
        >>> _ = rb.extend(TensorDict(rows, [6]))
        >>> index = rb.storage.episodes
        >>> type(index).__name__, index.lanes, index.longest()
        ('InterleavedIndex', 2, 3)
    """

    def _positions(self, slots: Array) -> Array:
        return self._storage.ledger.positions(torch.from_numpy(slots)).numpy()

    def sizes(self, keys: Array | None = None) -> Array:
        """Return the count of stored rows of every stream, or of the streams ``keys``.

        ``stream_keys`` describes keys. The count is 0 for a stream without stored rows.
        """
        streams = self._streams
        lane = streams.lane
        if keys is None:
            return lane.hi[streams.order] - lane.lo[streams.order]
        found, record = np.zeros(len(keys), np.int64), streams.records(keys)
        known = record >= 0
        found[known] = (lane.hi - lane.lo)[record[known]]
        return found

    def nth(self, keys: Array, number: Array) -> Array:
        """Return slots of rows, given stream keys and the rows' indices, oldest row first."""
        record = self._streams.records(keys)
        return self._streams.slot(self._streams.lane.lo[record] + number, record)

    def oldest(self) -> int:
        """Return the lowest stored row id. Cost: O(streams).

        At least one row must be stored.
        """
        streams = self._streams
        slots = streams.slot(streams.lane.lo[streams.order], streams.order)
        return int(self._positions(slots).min())

    def newest(self, lanes: Array | None = None) -> Array:
        """Return the row ids of the newest rows of lanes.

        ``lanes`` is a mask, bool ``[lanes]``; None for all lanes.
        """
        streams = self._streams
        return streams.lane.newest[streams.order if lanes is None else streams.order[lanes]]

    def lanes_of(self, keys: Any) -> Array:
        """Return a mask of the lanes with these keys, bool ``[lanes]``.

        Raises:
            IndexError: a stream has no stored rows.
            TypeError: a key is a float, but the column has integers.
        """
        self.sync()
        streams, chosen = self._streams, np.zeros(self.lanes, bool)
        leaf = self._columns.schema.leaves[self.key]
        values = torch.as_tensor(keys, device="cpu")
        if values.is_floating_point() and not leaf.dtype.is_floating_point:
            raise TypeError(f"expected keys of streams as {leaf.dtype}, got {values.dtype}")
        cells = values.to(leaf.dtype).reshape(-1, *leaf.shape)
        for key, own in zip(stream_keys(cells).tolist(), cells.tolist(), strict=True):
            if key not in streams.known:
                raise IndexError(f"expected a stream with stored rows, got {own!r}")
            chosen[streams.rank[streams.known[key]]] = True
        return chosen

    def keys(self, lanes: Array) -> list[Any]:
        """Return the keys (``stream_keys``) of the lanes in a mask, bool ``[lanes]``."""
        found: list[Any] = self._streams.keys[lanes].tolist()
        return found

    # -- rows -----------------------------------------------------------------------------------

    def time_and_lane(self, element: Array) -> tuple[Array, Array]:
        """Return time and lane of stored elements."""
        time, record = self._streams.time_and_lane(element)
        return time, self._streams.rank[record]

    def element(self, time: Array, lane: Array) -> Array:
        """Return the elements of rows. This is the inverse of ``time_and_lane``."""
        return self._streams.slot(time, self._streams.order[lane])

    def bounds(self, lane: Array) -> tuple[Any, Any]:
        """Return ``lo, hi`` of lanes. Rows with ``lo <= time < hi`` are stored."""
        record = self._streams.order[lane]
        return self._streams.lane.lo[record], self._streams.lane.hi[record]

    def spans(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """Return the times of the first stored row and the last row of rows' episodes."""
        streams, one = self._streams, self._owner(time, lane)
        first = np.maximum(streams.episode.begin[one], streams.lane.lo[streams.order[lane]])
        return first, streams.last(one)

    def episodes_at(self, time: Array, lane: Array) -> tuple[Array, Array, Array, Array]:
        """Return begin, last, code of the last row, and ``Head`` of rows' episodes."""
        streams, one = self._streams, self._owner(time, lane)
        episode = streams.episode
        code = episode.code[one].astype(np.int64)
        return episode.begin[one], streams.last(one), code, streams.heads(one)

    def around(self, element: Array) -> Array:
        """Return the positions of stored elements in their episodes, int64 ``[6, K]``.

        The six rows of the array are time, lane, begin, last, code of the last row, and ``Head``.

        Raises:
            IndexError: a row is not stored.
        """
        stored = self._storage.ledger.length
        wrong = (element < 0) | (element >= stored)
        if wrong.any():
            raise IndexError(f"expected elements of stored rows, got {element[wrong][0]}")
        time, lane = self.time_and_lane(element)
        return np.stack([time, lane, *self.episodes_at(time, lane)])

    def rows(self, law: CountLaw, number: Array) -> Array:
        """Return the elements of single rows, given their numbers among the drawable rows."""
        found = self.find(law, WINDOWS, number)
        return self.element(found.base + found.rest, found.lane)

    def ended_among(self, newest: int) -> tuple[Array, Array, Array]:
        """Return the ends of episodes among the ``newest`` stored rows.

        An end is a row that terminated or was truncated. The result has three arrays: time, lane
        and ``EndReason``, int64 ``[m]`` each.

        Cost: O(newest). If a writer chooses slots by stream, and ``newest`` exceeds the rows of the
        last write, the cost is O(rows).
        """
        ledger, streams = self._storage.ledger, self._streams
        slots = np.arange(ledger.length)
        if newest < ledger.length and self._is_ring:
            slots = (ledger.cursor - newest + np.arange(newest)) % self.slots
        elif newest < ledger.length and ledger.by_stream:
            if newest <= len(self._placed):
                slots = np.unique(self._placed[len(self._placed) - newest :])
            slots = slots[self._positions(slots) >= ledger.next_position - newest]
        if not len(slots):
            return slots, slots, slots
        time, lane = self.time_and_lane(slots)
        one = self._owner(time, lane)
        code = streams.episode.code[one].astype(np.int64)
        ended = (code == int(EndReason.TERMINATED)) | (code == int(EndReason.TRUNCATED))
        ended &= streams.last(one) == time
        return time[ended], lane[ended], code[ended]

    def begins(self, time: Array, lane: Array) -> Array:
        """Return the times at which rows' episodes began, even before all stored rows."""
        return self._streams.episode.begin[self._owner(time, lane)]

    def heads(self, time: Array, lane: Array) -> Array:
        """Return the ``Head`` of the episodes of rows."""
        return self._streams.heads(self._owner(time, lane))

    def reasons(self, time: Array, lane: Array) -> Array:
        """Return the ``EndReason`` of the episodes of rows."""
        code = self._streams.episode.code[self._owner(time, lane)]
        return np.minimum(code, int(EndReason.CUT)).astype(np.int64)

    def _owner(self, time: Array, lane: Array) -> Array:
        return self._streams.owner(time, self._streams.order[lane])

    def streams(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """Return first and last time of the unbroken part of a stream around each row.

        An unbroken part may contain several episodes. It ends at the write seam, at missing rows
        and at restarts.
        """
        lo, hi = self.bounds(lane)
        first, last = lo.copy(), hi - 1
        severed = self._streams.severed()
        if not len(severed):
            return first, last
        record = self._streams.order[lane]
        by = np.lexsort((severed[:, 0], severed[:, 1]))
        at, own = severed[by, 0], severed[by, 1]
        begin, end = np.searchsorted(own, record), np.searchsorted(own, record, side="right")
        low = int(at.min())
        reach = max(int(at.max()), int(np.max(time, initial=0))) - low + 2
        after = np.searchsorted(own * reach + at - low, record * reach + np.maximum(time - low, 0))
        after = np.where(time < low, begin, after)
        bounded = np.append(at, 0)
        last = np.where(after < end, bounded[after], last)
        return np.where(after > begin, np.maximum(first, bounded[after - 1] + 1), first), last

    def positions(self, time: Array, lane: Array) -> Array:
        """Return the row ids of rows.

        For stored rows and for the first row of an episode, the result is exact. For other
        overwritten rows, the result is a lower bound. The count of rows of other streams between
        overwritten rows is unknown.
        """
        streams = self._streams
        lo = self.bounds(lane)[0]
        stored = np.maximum(time, lo)
        slots = torch.from_numpy(np.ascontiguousarray(self.element(stored, lane)))
        found = self._storage.ledger.positions(slots).numpy()
        one = self._owner(stored, lane)
        gone = streams.episode.position[one] + time - streams.episode.begin[one]
        return np.where(time < lo, gone, found)

    def ids(self, time: Array, lane: Array) -> Array:
        """Return unique episode ids, which are the row ids of first rows."""
        return self._streams.episode.position[self._owner(time, lane)]

    # -- windows --------------------------------------------------------------------------------

    def totals(self, law: CountLaw, kind: int) -> Array:
        """Return the number of windows, episodes or rows of every lane, int64 ``[lanes]``."""
        return self._streams.sums(law, kind).totals()

    def total(self, law: CountLaw, kind: int) -> int:
        """Return the sum of ``totals``."""
        return int(self.totals(law, kind).sum())

    def find(self, law: CountLaw, kind: int, number: Array) -> Windows:
        """Look up windows by number, which counts in the order of lanes, then of time."""
        return Windows(*self._streams.sums(law, kind).find(number))

    def slices(self, law: CountLaw, number: Array, length: int) -> tuple[Array, Array]:
        """Return elements of windows of ``length`` rows by number, window after window.

        The second array has the position of each element's window in ``number``.
        """
        found = self.find(law, WINDOWS, number)
        time = (found.base + found.rest)[:, None] + np.arange(length)
        lane = np.repeat(found.lane, length)
        window = np.repeat(np.arange(len(number)), length)
        return self.element(time.reshape(-1), lane), window

    def runs(self, start: Array, length: int) -> Array:
        """Return the elements of ``length`` rows of a stream, from each element on."""
        time, lane = self.time_and_lane(start)
        every = (time[:, None] + np.arange(length)).reshape(-1)
        return self.element(every, np.repeat(lane, length))

    def table(self) -> Any:
        """Return all stored episodes as an ``EpisodeTable``. Cost: O(episodes)."""
        return self._streams.table()

    def longest(self) -> int:
        """Return the number of stored rows of the longest episode. Cost: O(episodes)."""
        table = self._streams.table()
        return int((table.last - table.first).max()) + 1 if len(table.last) else 0

    @property
    def version(self) -> int:
        """A number that changes with every change of the index."""
        return self._past + self._streams.version

    @property
    def numbering(self) -> int:
        """A number that changes with every change of lane numbers.

        Lane numbers change when streams are added or removed.
        """
        return self._streams.numbering

    def stored_rows(self) -> int:
        """Return the number of stored rows of all lanes."""
        return self._streams.stored

    def nbytes(self) -> int:
        """Return the size of the index in bytes."""
        return self._streams.nbytes()
