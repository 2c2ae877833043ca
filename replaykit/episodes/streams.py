"""Store episodes of interleaved streams in NumPy, with running sums of windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaykit.episodes.episode_laws import (
    CODE_BITS,
    CONTINUES,
    EPISODES,
    NOT_INIT,
    RESTORED,
    ROWS,
    SEVERED,
    SWITCHED,
    CountLaw,
    EndReason,
    EpisodeTable,
    Found,
    Head,
)
from replaykit.episodes.pools import Records, Rings, grown, spread

__all__ = ["Lanes", "StreamEpisodeRecords", "StreamEpisodes", "StreamSums"]


Array = np.ndarray[Any, Any]


class Lanes(Records):
    """One record for each stream that has stored rows."""

    lo: Array  # rows with lo <= time < hi are stored
    hi: Array
    first: Array  # episodes with first <= number < stop in the queue are stored
    stop: Array
    open: Array  # number of the open episode, or -1
    next_head: Array
    newest: Array  # row id of the newest row
    segment: Array
    knows_ids: Array

    def __init__(self) -> None:
        names = ("lo", "hi", "first", "stop", "open", "newest", "segment")
        super().__init__(
            {**dict.fromkeys(names, np.int64), "next_head": np.uint8, "knows_ids": np.bool_}
        )


class StreamEpisodeRecords(Records):
    """One record for each episode that has stored rows."""

    lane: Array
    begin: Array
    last: Array  # valid after the episode has ended
    position: Array  # row id of its first row
    code: Array
    head: Array

    def __init__(self) -> None:
        names = ("lane", "begin", "last", "position")
        super().__init__({**dict.fromkeys(names, np.int64), "code": np.uint8, "head": np.uint8})


class StreamSums:
    """The count of a law's windows, episodes or rows before each episode of a lane.

    Only differences between sums of the same lane are meaningful. The sums cover episodes that have
    ended and whose first rows are stored, because these episodes do not change. In each lane, at
    most two other episodes are counted when they are needed: the open episode, and the episode
    whose first rows were overwritten.
    """

    def __init__(self, law: CountLaw, kind: int, streams: StreamEpisodes) -> None:
        self.law, self.kind = law, kind
        self._streams = streams
        self._before = np.zeros(streams.episode.capacity, np.int64)
        self._until = np.zeros(streams.lane.capacity, np.int64)
        self._found: tuple[int, Any] = (-1, None)
        episode, every = streams.episode, streams.listed()
        mass = self._ended(episode, every) * (episode.code[every] != CONTINUES)
        sums = np.cumsum(mass)
        self._before[every] = sums - mass
        self._until[episode.lane[every]] = sums  # the last assignment to a lane counts

    # -- writing --------------------------------------------------------------------------------

    def start(self, records: Array, capacity: int) -> None:
        """Follow the start of new lanes."""
        self._until = grown(self._until, capacity)
        self._until[records] = 0

    def append(
        self,
        episode: Any,
        own: Array,
        starts: Array,
        newest: Array,
        at: Array,
        fresh: Array,
        ends: Array,
        closed: Array,
    ) -> None:
        """Follow new rows. ``StreamEpisodes.append`` computes the arguments."""
        self._before = grown(self._before, episode.capacity)
        mass = np.zeros(len(own), np.int64)
        mass[ends] = self._ended(episode, closed)
        upto = np.cumsum(mass)
        before = upto - mass
        counts = newest - starts + 1
        base = np.repeat(self._until[own[starts]] - before[starts], counts)
        self._before[fresh] = (base + before)[at]
        self._until[own[starts]] = (base + upto)[newest]

    def end(self, episode: Any, records: Array, closed: Array) -> None:
        """Follow the ends of open episodes of distinct lanes."""
        self._until[records] += self._ended(episode, closed)

    def _ended(self, episode: Any, which: Array) -> Array:
        rows = episode.last[which] - episode.begin[which] + 1
        no = np.zeros(len(which), bool)
        return self._counted(rows, episode.head[which] == int(Head.RESET), no)[0]

    def _counted(self, stored: Array, reset: Array, is_open: Array) -> tuple[Array, ...]:
        """Return the counts that are summed, and the results of ``CountLaw.counts``."""
        count, rows, skip = self.law.counts(stored, reset, is_open)
        mass = count
        if self.kind == EPISODES:
            mass = (count > 0).astype(np.int64)
        elif self.kind == ROWS:
            mass = np.where(count > 0, stored, 0)
        return mass, count, rows, skip

    def _facts(self, which: Array) -> tuple[Array, ...]:
        """Return ``_counted`` of stored episodes, and the times of their first rows."""
        streams = self._streams
        episode = streams.episode
        first = np.maximum(episode.begin[which], streams.lane.lo[episode.lane[which]])
        reset = streams.heads(which) == int(Head.RESET)
        is_open = episode.code[which] == CONTINUES
        return (*self._counted(streams.last(which) - first + 1, reset, is_open), first)

    # -- queries --------------------------------------------------------------------------------

    def _lanes(self) -> tuple[Array, ...]:
        """Return five arrays by rank. Cost: O(lanes).

        The arrays are: the sum of all lanes up to and including the lane; the sum of its first
            episode if that episode lacks rows; the sum of its whole episodes that have ended; the
            number of its first whole episode; and the sum before that episode.
        """
        streams = self._streams
        if self._found[0] == streams.version:
            return self._found[1]
        lane, episode, order = streams.lane, streams.episode, streams.order
        oldest = streams.at(order, lane.first[order])
        newest = streams.at(order, lane.stop[order] - 1)
        torn = episode.begin[oldest] < lane.lo[order]
        whole = lane.first[order] + torn
        none = whole == lane.stop[order]
        head = np.where(torn, self._facts(oldest)[0], 0)
        before = self._before[streams.at(order, np.where(none, whole - 1, whole))]
        before = np.where(none, self._until[order], before)
        ended = self._until[order] - before
        is_open = (episode.code[newest] == CONTINUES) & ~none
        tail = np.where(is_open, self._facts(newest)[0], 0)
        found = (np.cumsum(head + ended + tail), head, ended, whole, before)
        self._found = streams.version, found
        return found

    def totals(self) -> Array:
        """Return the counts of windows, episodes or rows by rank, int64 ``[lanes]``."""
        return np.diff(self._lanes()[0], prepend=0)

    def find(self, number: Array) -> Found:
        """Look up windows by number, which counts in the order of ranks, then of time."""
        streams = self._streams
        upto, head, ended, whole, before = self._lanes()
        rank = np.searchsorted(upto, number, side="right")
        rest = number - np.where(rank > 0, upto[rank - 1], 0)
        record = streams.order[rank]
        in_head = rest < head[rank]
        after = rest - head[rank]
        in_tail = after >= ended[rank]
        target = before[rank] + after
        # Search for the last whole episode with a preceding sum of at most `target`.
        low, high = whole[rank], streams.lane.stop[record]
        for _ in range(int(np.max(high - low, initial=1)).bit_length()):
            middle = low + high >> 1
            looking = high - low > 1
            middle = np.where(looking, middle, np.minimum(low, high - 1))
            few = self._before[streams.at(record, middle)] <= target
            low = np.where(looking & few, middle, low)
            high = np.where(looking & ~few, middle, high)
        low = np.where(in_head, streams.lane.first[record], low)
        low = np.where(in_tail & ~in_head, streams.lane.stop[record] - 1, low)
        which = streams.at(record, low)
        rest = np.where(in_tail, after - ended[rank], target - self._before[which])
        rest = np.where(in_head, number - np.where(rank > 0, upto[rank - 1], 0), rest)
        _, count, rows, skip, first = self._facts(which)
        return Found(rank, first + skip, rows, count, rest)

    def nbytes(self) -> int:
        """Return the size in bytes."""
        return int(self._before.nbytes + self._until.nbytes)


_NEVER = -(2**62)
_CACHED_SUMS = 8
_ROWS = 1024


class StreamEpisodes:
    """The episodes among the stored rows of interleaved streams.

    Streams may write rows in any order. Each row has the key of its stream. All streams share one
    ring of ``slots``. If the ring is full, a new row replaces the oldest row of all streams. Here a
    *lane* is the record of one stream with stored rows. A lane is dropped when the last row of its
    stream is overwritten. The *rank* of a lane is its position in the order of keys. The *time* of
    a row is its sequence number in its lane.

    Memory: each row stores its episode and time in 8 bytes. Each lane stores the slots of its rows,
    in at most 16 bytes per row. An episode takes 34 bytes, and 8 more for each law in use. A lane
    takes about 100 bytes.

    Cost: appending takes O(rows + lanes of the batch), by array operations and one dict look-up per
    lane. ``totals`` takes O(lanes). ``find`` takes O(lanes) after a write, and O(log episodes) per
    number.
    """

    def __init__(self, slots: int, keys: Any, id_bytes: int) -> None:
        """Start without rows.

        Args:
            keys: dtype of keys, int64 or bytes of a fixed length.
            id_bytes: number of bytes of the ids of a row.
        """
        small = slots < 2**31
        self.slots, self.stored, self.version = slots, 0, 0
        self.numbering = 0
        self.lane, self.episode = Lanes(), StreamEpisodeRecords()
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
        """Append new rows. Their count must not exceed the count of slots.

        Args:
            keys: keys of the rows' streams, ``[n]``.
            codes: uint8 ``[n]``, without the ends that ids cause.
            ids: uint8 ``[n, bytes]``.
            slots, positions: slots and row ids, int64 ``[n]``.
            segments: the number of the segment to which each row belongs. If consecutive rows of a
                lane are in different segments, the stream is cut between them.
            stops: uint8 ``[n]``, the code of a cut after the row, or 0.
            displaced: the subset of ``slots`` that held the oldest rows of their lanes. All other
                slots were free. None: slots are in ring order, and a full ring overwrites the
                oldest rows of all lanes.
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
        # From here on rows are sorted by lane, and in each lane by time.
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
        # If all stored rows of a stream were lost, its next row begins the stream again.
        forgotten = lane.newest[records] < position[starts] - self.slots
        if in_ring and forgotten.any():
            self._restart(records[forgotten])
        self._sever(records, starts, code, order, segments, stops)
        if ids is not None:
            self._switch(records, starts, code, ids[order])
            self._ids[records] = ids[order[newest]]
            lane.knows_ids[records] = True
        end = code & CODE_BITS
        ended = end != CONTINUES
        start = np.empty(n, bool)
        start[1:] = ended[:-1]
        start[starts] = lane.open[records] < 0
        time = spread(lane.hi[records], counts)
        at, fresh = np.flatnonzero(start), episode.new_numbers(int(np.count_nonzero(start)))
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
        episode.code[fresh] = CONTINUES
        ends = np.flatnonzero(ended)
        closed = owner[ends]
        episode.last[closed], episode.code[closed] = time[ends], end[ends]
        for sums in self._sums.values():
            sums.append(episode, own, starts, newest, at, fresh, ends, closed)
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
        # A row that was placed by hand may be newer than rows after it in ring order.
        last = np.maximum.reduceat(position, starts)
        lane.newest[records] = np.maximum(lane.newest[records], last)
        lane.open[records] = np.where(ended[newest], -1, owner[newest])
        lane.next_head[records] = np.where(end[newest] == SEVERED, int(Head.CUT), int(Head.RESET))
        self.stored += n - over
        self.version += 1
        if over:
            self._drop(_counted(gone, episode.capacity)[0], losing)

    def _records_of(self, keys: Array) -> Array:
        """Return the records of lanes by distinct, sorted keys; create missing ones."""
        names, found = keys.tolist(), self.records(keys)
        new = np.flatnonzero(found < 0)
        if not len(new):
            return found
        lane = self.lane
        fresh = found[new] = lane.new_numbers(len(new))
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
        """Return the records of lanes by keys; -1 if a stream has no stored rows."""
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
        """Set the codes of cuts in ``code``, at rows after which their lane is cut."""
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
        open_ = at[code[at] & CODE_BITS == CONTINUES]
        code[open_] |= stop[open_]

    def _switch(self, records: Array, starts: Array, code: Array, ids: Array) -> None:
        """Set the ends that ids cause in ``code``, at rows after which the ids change."""
        lane = self.lane
        other = lane.knows_ids[records] & (self._ids[records] != ids[starts]).any(-1)
        if other.any():
            self._end(records[other], SWITCHED)
        changed = (ids[1:] != ids[:-1]).any(-1)
        changed[starts[1:] - 1] = False
        code[:-1][changed & (code[:-1] & CODE_BITS == CONTINUES)] |= SWITCHED

    def _reserve(self, slots: int) -> None:
        if slots > len(self._episode_of):
            size = min(self.slots, max(slots, 2 * len(self._episode_of), _ROWS))
            self._episode_of = grown(self._episode_of, size)
            self._number_of = grown(self._number_of, size)

    def _drop(self, candidates: Array, losing: Array) -> None:
        """Drop episodes and lanes without stored rows."""
        lane, episode = self.lane, self.episode
        own = episode.lane[candidates]
        ended = (episode.code[candidates] != CONTINUES) & (episode.last[candidates] < lane.lo[own])
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
        """End the open episodes of lanes at their newest rows.

        ``lanes`` is a bool mask by rank. With the codes ``SEVERED`` and ``RESTORED``, the streams
        are also cut after these rows.
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

    def time_and_lane(self, slot: Array) -> tuple[Array, Array]:
        """Return time and record of the rows in slots."""
        record = self.episode.lane[self._episode_of[slot]]
        newest = self.lane.hi[record] - 1
        return newest - (newest - self._number_of[slot] & 0xFFFFFFFF), record

    def slot(self, time: Array, record: Array) -> Array:
        """Return the slots of stored rows. This is the inverse of ``time_and_lane``."""
        return self._rows.get(record, time)

    def owner(self, time: Array, record: Array) -> Array:
        """Return the episodes of stored rows."""
        return np.asarray(self._episode_of[self.slot(time, record)], np.int64)

    def last(self, episode: Array) -> Array:
        """Return the times of the last rows of episodes."""
        newest = self.lane.hi[self.episode.lane[episode]] - 1
        return np.where(self.episode.code[episode] == CONTINUES, newest, self.episode.last[episode])

    def heads(self, episode: Array) -> Array:
        """Return the ``Head`` of episodes."""
        evicted = self.episode.begin[episode] < self.lane.lo[self.episode.lane[episode]]
        return np.where(evicted, int(Head.EVICTED), self.episode.head[episode]).astype(np.int64)

    def severed(self) -> Array:
        """Return time and record of rows after which streams are cut, int64 ``[m, 2]``."""
        found = self._severed
        if len(found):
            self._severed = found = found[found[:, 0] >= self.lane.lo[found[:, 1]]]
        return found

    # -- all episodes ---------------------------------------------------------------------------

    def listed(self) -> Array:
        """Return all episodes, ordered by rank, then by time. Cost: O(episodes)."""
        lane, order = self.lane, self.order
        count = lane.stop[order] - lane.first[order]
        return self._list.get(np.repeat(order, count), spread(lane.first[order], count))

    def at(self, record: Array, number: Array) -> Array:
        """Return episodes by their number in the queues of lanes."""
        return self._list.get(record, number)

    def table(self) -> EpisodeTable:
        """Return all stored episodes. Cost: O(episodes)."""
        episode, one = self.episode, self.listed()
        record, begin = episode.lane[one], episode.begin[one]
        first = np.maximum(begin, self.lane.lo[record])
        code = episode.code[one].astype(np.int64)
        return EpisodeTable(self.rank[record], begin, first, self.last(one), code, self.heads(one))

    def sums(self, law: CountLaw, kind: int) -> StreamSums:
        """Return the running sums of a law. The first call costs O(episodes)."""
        key = (law, kind)
        found = self._sums.pop(key, None)
        if found is None:
            found = StreamSums(law, kind, self)
            while len(self._sums) >= _CACHED_SUMS:
                self._sums.pop(next(iter(self._sums)))
        self._sums[key] = found  # moves it to the end of the dict, as the last used entry
        return found

    def nbytes(self) -> int:
        """Return the size in bytes."""
        arrays = (self._episode_of, self._number_of, self._ids, self.keys, self.order, self.rank)
        parts: Any = (self.lane, self.episode, self._rows, self._list, *self._sums.values())
        return int(sum(a.nbytes for a in arrays) + sum(part.nbytes() for part in parts))


def _counted(numbers: Array, capacity: int) -> tuple[Array, Array]:
    """Return the distinct numbers below ``capacity``, sorted, and their counts."""
    if capacity > 8 * len(numbers):
        found, count = np.unique(numbers, return_counts=True)
        return found, count
    count = np.bincount(numbers, minlength=1)
    found = np.flatnonzero(count)
    return found, count[found]
