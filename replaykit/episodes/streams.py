"""Episodes of streams whose rows lie interleaved in one ring, in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaykit.episodes.codes import (
    CODE_BITS,
    GOES_ON,
    NOT_INIT,
    RESTORED,
    SEVERED,
    SWITCHED,
    EndReason,
    Head,
)
from replaykit.episodes.found import Table
from replaykit.episodes.law import CountLaw
from replaykit.episodes.pools import Rings, grown, spread
from replaykit.episodes.stream_records import Episodes, Lanes
from replaykit.episodes.stream_sums import StreamSums

__all__ = ["StreamEpisodes"]

Array = np.ndarray[Any, Any]

_NEVER = -(2**62)
_KEPT_SUMS = 8
_ROWS = 1024


class StreamEpisodes:
    """Where episodes begin and end among the stored rows of streams.

    Rows arrive in any order of streams, each with its stream's key, and the ring of ``slots``
    overwrites the oldest of all. *Lane*: the record of a stream that has stored rows; it is
    forgotten with the last of them. *Rank*: its place among the keys, in order. *Time*: the number
    of a row in its lane.

    Each row knows its episode and its time, 8 bytes, and each lane the slots of its rows, at most
    16 bytes a row; an episode takes 34 bytes and 8 for each law in use, a lane about 100.

    Cost: O(rows + lanes of the batch) to append, by array operations and one look into a dict per
    lane. ``totals`` O(lanes), ``find`` O(log episodes) besides.
    """

    def __init__(self, slots: int, keys: Any, id_bytes: int) -> None:
        """Starts without rows.

        Args:
            keys: dtype of keys: int64, or bytes of some length.
            id_bytes: bytes of the ids of a row.
        """
        small = slots < 2**31
        self.slots, self.stored, self.version = slots, 0, 0
        self.numbering = 0
        self.lane, self.episode = Lanes(), Episodes()
        self.keys = np.zeros(0, keys)
        self.order = np.zeros(0, np.int64)
        self.rank = np.zeros(0, np.int64)
        self.joined: set[Any] = set()
        self.known: dict[Any, int] = {}
        self._rows = Rings(np.int32 if small else np.int64)
        self._list = Rings(np.int32 if small else np.int64)
        self._ids = np.zeros((0, id_bytes), np.uint8)
        self._episode_of = np.zeros(0, np.int32 if small else np.int64)
        self._number_of = np.zeros(0, np.uint32)
        self._severed = np.zeros((0, 2), np.int64)
        self._sums: dict[Any, StreamSums] = {}

    # -- writing ------------------------------------------------------------------------------

    def append(
        self,
        keys: Array,
        codes: Array,
        ids: Array | None,
        slots: Array,
        positions: Array,
        *,
        segments: Array | int = 0,
        stops: Array | None = None,
        displaced: Array | None = None,
    ) -> None:
        """Notes rows, at most as many as there are slots, written after the newest one.

        Args:
            keys: of their streams, ``[n]``.
            codes: uint8 ``[n]``, without the ends that ids make.
            ids: uint8 ``[n, bytes]``.
            slots, positions: int64 ``[n]``.
            segments: rows of a lane that follow each other in other segments are severed.
            stops: uint8 ``[n]``, what severs a row from the next of its lane, or 0.
            displaced: the slots among them of which the rows are gone, the oldest ones of their
                lanes; other slots are free. None: the oldest rows of all, as far as rows are in
                the way, and slots are in ring order.
        """
        n = len(keys)
        if not n:
            return
        lane, episode = self.lane, self.episode
        in_ring = displaced is None
        if displaced is None:
            displaced = slots[n - max(0, self.stored + n - self.slots) :]
        over = len(displaced)
        gone = np.asarray(self._episode_of[displaced], np.int64)
        losing, lost = _counted(episode.lane[gone], lane.capacity)
        lane.lo[losing] += lost
        # From here on rows are grouped by lane, and in each in the order of time.
        order = np.argsort(keys, kind="stable")
        sorted_ = keys[order]
        starts = np.flatnonzero(np.append(True, sorted_[1:] != sorted_[:-1]))
        counts = np.diff(starts, append=n)
        records = self._records_of(sorted_[starts])
        newest = starts + counts - 1
        own, code, slot, position = (
            np.repeat(records, counts),
            codes[order],
            slots[order],
            positions[order],
        )
        # A stream of which nothing was stored when it went on is one that was forgotten.
        forgotten = lane.newest[records] < position[starts] - self.slots
        if in_ring and forgotten.any():
            self._restart(records[forgotten])
        self._sever(records, starts, code, order, segments, stops)
        if ids is not None:
            self._switch(records, starts, code, ids[order])
            self._ids[records] = ids[order[newest]]
            lane.knows_ids[records] = True
        end = code & CODE_BITS
        ended = end != GOES_ON
        start = np.empty(n, bool)
        start[1:] = ended[:-1]
        start[starts] = lane.open[records] < 0
        time = spread(lane.hi[records], counts)
        at, fresh = np.flatnonzero(start), episode.take(int(np.count_nonzero(start)))
        head = np.full(n, int(Head.RESET), np.uint8)
        head[1:][end[:-1] == SEVERED] = int(Head.CUT)
        head[starts] = lane.next_head[records]
        head[(code & NOT_INIT) != 0] = int(Head.CUT)
        owner = np.zeros(n, np.int64)
        owner[starts], owner[at] = lane.open[records], fresh
        start[starts] = True
        known = np.flatnonzero(start)
        owner = np.repeat(owner[known], np.diff(known, append=n))
        episode.lane[fresh], episode.begin[fresh] = own[at], time[at]
        episode.position[fresh], episode.head[fresh] = position[at], head[at]
        episode.code[fresh] = GOES_ON
        ends = np.flatnonzero(ended)
        closed = owner[ends]
        episode.last[closed], episode.code[closed] = time[ends], end[ends]
        for sums in self._sums.values():
            sums.note(episode, own, starts, newest, at, fresh, ends, closed)
        begun = np.diff(np.searchsorted(at, np.append(starts, n)))
        stored = lane.hi[records] - lane.lo[records] + counts
        self._rows.reserve(records, stored, lane.lo, lane.hi, self.order)
        self._rows.put(own, time, slot)
        listed = lane.stop[records] - lane.first[records] + begun
        self._list.reserve(records, listed, lane.first, lane.stop, self.order)
        self._list.put(own[at], spread(lane.stop[records], begun), fresh)
        self._reserve(int(slot.max()) + 1)
        self._episode_of[slot], self._number_of[slot] = owner, time.astype(np.uint32)
        lane.hi[records] += counts
        lane.stop[records] += begun
        lane.newest[records] = position[newest]
        lane.open[records] = np.where(ended[newest], -1, owner[newest])
        lane.next_head[records] = np.where(end[newest] == SEVERED, int(Head.CUT), int(Head.RESET))
        self.stored += n - over
        self.version += 1
        if over:
            self._let_go(_counted(gone, episode.capacity)[0], losing)

    def _records_of(self, keys: Array) -> Array:
        """Records of the lanes of distinct keys, in order; makes those that are not there."""
        names, found = keys.tolist(), self.records(keys)
        new = np.flatnonzero(found < 0)
        if not len(new):
            return found
        lane = self.lane
        fresh = found[new] = lane.take(len(new))
        for column in (lane.lo, lane.hi, lane.first, lane.stop, lane.segment):
            column[fresh] = 0
        lane.open[fresh], lane.newest[fresh], lane.knows_ids[fresh] = -1, _NEVER, False
        lane.next_head[fresh] = int(Head.RESET)
        self._rows.start(fresh, lane.capacity)
        self._list.start(fresh, lane.capacity)
        self._ids = grown(self._ids, lane.capacity)
        for sums in self._sums.values():
            sums.start(fresh, lane.capacity)
        for number, record in zip(new.tolist(), fresh.tolist(), strict=True):
            self.known[names[number]] = record
            if names[number] in self.joined:
                self.joined.discard(names[number])
                lane.next_head[record] = int(Head.CUT)
        at = np.searchsorted(self.keys, keys[new])
        self.keys = np.insert(self.keys, at, keys[new])
        self.order = np.insert(self.order, at, fresh)
        self._number()
        return found

    def records(self, keys: Array) -> Array:
        """Records of the lanes of keys; -1 where nothing of a stream is stored."""
        known = self.known
        return np.array([known.get(key, -1) for key in keys.tolist()], np.int64)

    def _number(self) -> None:
        self.rank = grown(self.rank, self.lane.capacity)
        self.rank[self.order] = np.arange(len(self.order))
        self.numbering += 1

    def _restart(self, records: Array) -> None:
        lane = self.lane
        known = records[lane.newest[records] > _NEVER]
        self._end(known, int(EndReason.CUT))
        lane.next_head[known] = int(Head.RESET)
        lane.knows_ids[known] = False

    def _sever(
        self,
        records: Array,
        starts: Array,
        code: Array,
        order: Array,
        segments: Array | int,
        stops: Array | None,
    ) -> None:
        """Ends rows of ``code`` after which their lane is severed."""
        lane = self.lane
        if isinstance(segments, int) and stops is None:
            return
        n, stop = len(code), np.zeros(len(code), np.uint8)
        if stops is not None:
            stop = stops[order]
        part = np.broadcast_to(segments, (n,))[order]
        broken = part[1:] != part[:-1]
        broken[starts[1:] - 1] = False
        stop[:-1][broken] = np.maximum(stop[:-1][broken], SEVERED)
        before = (lane.segment[records] != part[starts]) & (lane.newest[records] > _NEVER)
        self._mark(records[before], lane.hi[records[before]] - 1)
        self._end(records[before], SEVERED)
        counts = np.diff(starts, append=n)
        lane.segment[records] = part[starts + counts - 1]
        at = np.flatnonzero(stop)
        own = np.repeat(records, counts)
        self._mark(own[at], spread(lane.hi[records], counts)[at])
        open_ = at[code[at] & CODE_BITS == GOES_ON]
        code[open_] |= stop[open_]

    def _switch(self, records: Array, starts: Array, code: Array, ids: Array) -> None:
        """Ends rows of ``code`` after which their lane has other ids."""
        lane = self.lane
        other = lane.knows_ids[records] & (self._ids[records] != ids[starts]).any(-1)
        if other.any():
            self._end(records[other], SWITCHED)
        changed = (ids[1:] != ids[:-1]).any(-1)
        changed[starts[1:] - 1] = False
        code[:-1][changed & (code[:-1] & CODE_BITS == GOES_ON)] |= SWITCHED

    def _reserve(self, slots: int) -> None:
        if slots > len(self._episode_of):
            size = min(self.slots, max(slots, 2 * len(self._episode_of), _ROWS))
            self._episode_of = grown(self._episode_of, size)
            self._number_of = grown(self._number_of, size)

    def _let_go(self, candidates: Array, losing: Array) -> None:
        """Forgets episodes and lanes without stored rows."""
        lane, episode = self.lane, self.episode
        own = episode.lane[candidates]
        ended = (episode.code[candidates] != GOES_ON) & (episode.last[candidates] < lane.lo[own])
        dead = ended | (lane.lo[own] == lane.hi[own])
        np.add.at(lane.first, own[dead], 1)
        episode.give_back(candidates[dead])
        empty = losing[lane.lo[losing] == lane.hi[losing]]
        if not len(empty):
            return
        at = self.rank[empty]
        for key in self.keys[at].tolist():
            del self.known[key]
        self._severed = self._severed[~np.isin(self._severed[:, 1], empty)]
        self.keys, self.order = np.delete(self.keys, at), np.delete(self.order, at)
        lane.give_back(empty)
        self._number()

    def close(self, lanes: Array, code: int) -> None:
        """Ends the open episodes of lanes, bool by rank, at their newest rows.

        With ``SEVERED`` and ``RESTORED`` nothing is read across that place any more.
        """
        records = self.order[lanes]
        if code in (SEVERED, RESTORED):
            self._mark(records, self.lane.hi[records] - 1)
        self._end(records, code)
        self.version += 1

    def _end(self, records: Array, code: int) -> None:
        lane, episode = self.lane, self.episode
        records = records[lane.open[records] >= 0]
        if not len(records):
            return
        closed = lane.open[records]
        episode.last[closed], episode.code[closed] = lane.hi[records] - 1, code
        lane.open[records] = -1
        lane.next_head[records] = int(Head.CUT if code == SEVERED else Head.RESET)
        for sums in self._sums.values():
            sums.end(episode, records, closed)

    def _mark(self, records: Array, time: Array) -> None:
        if len(records):
            self._severed = np.concatenate([self._severed, np.stack([time, records], 1)])

    # -- rows ---------------------------------------------------------------------------------

    def place(self, slot: Array) -> tuple[Array, Array]:
        """Time and lane of stored slots."""
        record = self.episode.lane[self._episode_of[slot]]
        newest = self.lane.hi[record] - 1
        return newest - (newest - self._number_of[slot] & 0xFFFFFFFF), record

    def slot(self, time: Array, record: Array) -> Array:
        """Slots of stored rows; the inverse of ``place``."""
        return self._rows.get(record, time)

    def owner(self, time: Array, record: Array) -> Array:
        """Episodes of stored rows."""
        return np.asarray(self._episode_of[self.slot(time, record)], np.int64)

    def last(self, episode: Array) -> Array:
        """Times of the last rows of episodes."""
        newest = self.lane.hi[self.episode.lane[episode]] - 1
        return np.where(self.episode.code[episode] == GOES_ON, newest, self.episode.last[episode])

    def heads(self, episode: Array) -> Array:
        """``Head`` of episodes."""
        evicted = self.episode.begin[episode] < self.lane.lo[self.episode.lane[episode]]
        return np.where(evicted, int(Head.EVICTED), self.episode.head[episode]).astype(np.int64)

    def severed(self) -> Array:
        """Time and lane of the rows that were severed from what follows: int64 ``[m, 2]``."""
        found = self._severed
        if len(found):
            self._severed = found = found[found[:, 0] >= self.lane.lo[found[:, 1]]]
        return found

    # -- all episodes ---------------------------------------------------------------------------

    def listed(self) -> Array:
        """Numbers of all episodes, by rank of their lanes and in the order of time. O(episodes)."""
        lane, order = self.lane, self.order
        count = lane.stop[order] - lane.first[order]
        return self._list.get(np.repeat(order, count), spread(lane.first[order], count))

    def at(self, record: Array, number: Array) -> Array:
        """Episodes by their number in the queues of lanes."""
        return self._list.get(record, number)

    def table(self) -> Table:
        """Returns all stored episodes. Cost: O(episodes)."""
        episode, one = self.episode, self.listed()
        record, begin = episode.lane[one], episode.begin[one]
        first = np.maximum(begin, self.lane.lo[record])
        code = episode.code[one].astype(np.int64)
        return Table(self.rank[record], begin, first, self.last(one), code, self.heads(one))

    def sums(self, law: CountLaw, kind: int) -> StreamSums:
        """The running sums of one law, begun at the first question. Cost then: O(episodes)."""
        key = (law, kind)
        found = self._sums.pop(key, None)
        if found is None:
            found = StreamSums(law, kind, self)
            while len(self._sums) >= _KEPT_SUMS:
                self._sums.pop(next(iter(self._sums)))
        self._sums[key] = found  # last, since it was asked for last
        return found

    def nbytes(self) -> int:
        """Bytes that all of it takes."""
        arrays = (self._episode_of, self._number_of, self._ids, self.keys, self.order, self.rank)
        parts: Any = (self.lane, self.episode, self._rows, self._list, *self._sums.values())
        return int(sum(a.nbytes for a in arrays) + sum(part.nbytes() for part in parts))


def _counted(numbers: Array, capacity: int) -> tuple[Array, Array]:
    """The distinct ones of numbers below ``capacity``, in order, and how often each occurs."""
    if capacity > 8 * len(numbers):
        found, count = np.unique(numbers, return_counts=True)
        return found, count
    count = np.bincount(numbers, minlength=1)
    found = np.flatnonzero(count)
    return found, count[found]
