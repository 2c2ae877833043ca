"""The index of a storage in which the rows of several streams lie interleaved."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit.episodes.codes import EndReason
from replaykit.episodes.index import Windows
from replaykit.episodes.law import WINDOWS, CountLaw
from replaykit.episodes.stream_keys import stream_keys
from replaykit.episodes.stream_writes import StreamWrites

__all__ = ["InterleavedIndex"]

Array = np.ndarray[Any, Any]


class InterleavedIndex(StreamWrites):
    """Where episodes begin and end among rows of which a column says to which stream they belong.

    The streams that have stored rows are the lanes, in the order of their keys; a lane's number is
    good until the next write. Rows of a stream that were written one after the other have
    consecutive times, whatever lies between them. A stream of which no row is left is forgotten:
    when it comes again it begins with a reset.

    Cost: O(rows written + streams among them), without a step of Python per row; ``totals``
    O(streams), ``find`` O(K log episodes). 24 bytes a row, and what episodes and streams take.

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
        """Number of stored rows of every stream, or of those of some keys (``stream_keys``): 0
        where there is none."""
        streams = self._streams
        lane = streams.lane
        if keys is None:
            return lane.hi[streams.order] - lane.lo[streams.order]
        found, record = np.zeros(len(keys), np.int64), streams.records(keys)
        known = record >= 0
        found[known] = (lane.hi - lane.lo)[record[known]]
        return found

    def nth(self, keys: Array, number: Array) -> Array:
        """Slots of stored rows of streams by their keys, counted from the oldest, from 0."""
        record = self._streams.records(keys)
        return self._streams.slot(self._streams.lane.lo[record] + number, record)

    def oldest(self) -> int:
        """The least position of a stored row, of which there must be one. Cost: O(streams)."""
        streams = self._streams
        slots = streams.slot(streams.lane.lo[streams.order], streams.order)
        return int(self._positions(slots).min())

    def newest(self, lanes: Array | None = None) -> Array:
        """Positions of the newest rows of lanes, bool ``[lanes]``; None: of all."""
        streams = self._streams
        return streams.lane.newest[streams.order if lanes is None else streams.order[lanes]]

    def lanes_of(self, keys: Any) -> Array:
        """Bool ``[lanes]``: the lanes of some keys.

        Raises:
            IndexError: nothing of that stream is stored. TypeError: floats for whole numbers.
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
                raise IndexError(f"expected a stream of which rows are stored, got {own!r}")
            chosen[streams.rank[streams.known[key]]] = True
        return chosen

    def keys(self, lanes: Array) -> list[Any]:
        """The keys (``stream_keys``) of lanes, bool ``[lanes]``."""
        found: list[Any] = self._streams.keys[lanes].tolist()
        return found

    # -- rows -----------------------------------------------------------------------------------

    def place(self, element: Array) -> tuple[Array, Array]:
        """Time and lane of stored elements."""
        time, record = self._streams.place(element)
        return time, self._streams.rank[record]

    def element(self, time: Array, lane: Array) -> Array:
        """Elements of rows; the inverse of ``place``."""
        return self._streams.slot(time, self._streams.order[lane])

    def bounds(self, lane: Array) -> tuple[Any, Any]:
        """``lo, hi`` of lanes: stored rows are those with ``lo <= time < hi``."""
        record = self._streams.order[lane]
        return self._streams.lane.lo[record], self._streams.lane.hi[record]

    def spans(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """First stored and last row of the episodes of stored rows, as times."""
        streams, one = self._streams, self._owner(time, lane)
        first = np.maximum(streams.episode.begin[one], streams.lane.lo[streams.order[lane]])
        return first, streams.last(one)

    def episodes_at(self, time: Array, lane: Array) -> tuple[Array, Array, Array, Array]:
        """Begin and last row of the episodes of stored rows, code of the last row, ``Head``."""
        streams, one = self._streams, self._owner(time, lane)
        episode = streams.episode
        code = episode.code[one].astype(np.int64)
        return episode.begin[one], streams.last(one), code, streams.heads(one)

    def around(self, element: Array) -> Array:
        """Time, lane, begin, last, code of the last row and ``Head`` of stored elements: int64
        ``[6, K]``.

        Raises:
            IndexError: rows that are not stored.
        """
        stored = self._storage.ledger.length
        wrong = (element < 0) | (element >= stored)
        if wrong.any():
            raise IndexError(f"expected elements of stored rows, got {element[wrong][0]}")
        time, lane = self.place(element)
        return np.stack([time, lane, *self.episodes_at(time, lane)])

    def rows(self, law: CountLaw, number: Array) -> Array:
        """Elements of single rows by number: ``find`` of a law of one row, and ``element``."""
        found = self.find(law, WINDOWS, number)
        return self.element(found.base + found.rest, found.lane)

    def ended_among(self, newest: int) -> tuple[Array, Array, Array]:
        """Rows with which an episode terminated or was truncated, among the ``newest`` stored ones
        of all: time, lane and ``EndReason``, int64 ``[m]``. Cost: O(newest), or of rows written by
        stream, where these are more than were written last, O(rows)."""
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
        time, lane = self.place(slots)
        one = self._owner(time, lane)
        code = streams.episode.code[one].astype(np.int64)
        ended = (code == int(EndReason.TERMINATED)) | (code == int(EndReason.TRUNCATED))
        ended &= streams.last(one) == time
        return time[ended], lane[ended], code[ended]

    def begins(self, time: Array, lane: Array) -> Array:
        """Times at which episodes began, also where that row is stored no more."""
        return self._streams.episode.begin[self._owner(time, lane)]

    def heads(self, time: Array, lane: Array) -> Array:
        """``Head`` of the episodes of rows."""
        return self._streams.heads(self._owner(time, lane))

    def reasons(self, time: Array, lane: Array) -> Array:
        """``EndReason`` of the episodes of rows."""
        code = self._streams.episode.code[self._owner(time, lane)]
        return np.minimum(code, int(EndReason.CUT)).astype(np.int64)

    def _owner(self, time: Array, lane: Array) -> Array:
        return self._streams.owner(time, self._streams.order[lane])

    def streams(self, time: Array, lane: Array) -> tuple[Array, Array]:
        """First and last row of what can be read without a gap around rows: across episodes, not
        across the write seam, nor where rows are missing or a run was restarted."""
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
        """Positions (``Ledger``) of rows; of those stored no more only of the first of an episode.

        What was written between them is not known: for the others it is a lower bound.
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
        """Episode ids: the position of the first row; never used twice."""
        return self._streams.episode.position[self._owner(time, lane)]

    # -- windows --------------------------------------------------------------------------------

    def totals(self, law: CountLaw, kind: int) -> Array:
        """int64 ``[lanes]``: windows (episodes, rows) of every lane."""
        return self._streams.sums(law, kind).totals()

    def total(self, law: CountLaw, kind: int) -> int:
        """The sum of ``totals``."""
        return int(self.totals(law, kind).sum())

    def find(self, law: CountLaw, kind: int, number: Array) -> Windows:
        """Looks windows up by number: lanes in order, in a lane in the order of time."""
        return Windows(*self._streams.sums(law, kind).find(number))

    def slices(self, law: CountLaw, number: Array, length: int) -> tuple[Array, Array]:
        """Elements of windows of ``length`` rows by number, one window after another, and the place
        of each one's window among the numbers: ``find`` and ``element`` in one."""
        found = self.find(law, WINDOWS, number)
        time = (found.base + found.rest)[:, None] + np.arange(length)
        lane = np.repeat(found.lane, length)
        window = np.repeat(np.arange(len(number)), length)
        return self.element(time.reshape(-1), lane), window

    def runs(self, start: Array, length: int) -> Array:
        """Elements of ``length`` rows of a stream from stored elements ``[K]`` on, one run after
        another."""
        time, lane = self.place(start)
        every = (time[:, None] + np.arange(length)).reshape(-1)
        return self.element(every, np.repeat(lane, length))

    def table(self) -> Any:
        """All stored episodes; see ``found.Table``. Cost: O(episodes)."""
        return self._streams.table()

    def longest(self) -> int:
        """Rows of the longest episode. Cost: O(episodes)."""
        table = self._streams.table()
        return int((table.last - table.first).max()) + 1 if len(table.last) else 0

    @property
    def version(self) -> int:
        """A number that changes with every change of the index."""
        return self._past + self._streams.version

    @property
    def numbering(self) -> int:
        """Changes where streams come or go, and a number may mean another one than before."""
        return self._streams.numbering

    def stored_rows(self) -> int:
        """Number of stored rows, all lanes together."""
        return self._streams.stored

    def nbytes(self) -> int:
        """Bytes that the index takes."""
        return self._streams.nbytes()
