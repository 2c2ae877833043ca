"""How many windows the episodes of interleaved streams have, as running sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replaykit.episodes.codes import GOES_ON, Head
from replaykit.episodes.found import Found
from replaykit.episodes.law import EPISODES, ROWS, CountLaw
from replaykit.episodes.pools import grown

if TYPE_CHECKING:
    from replaykit.episodes.streams import StreamEpisodes

__all__ = ["StreamSums"]

Array = np.ndarray[Any, Any]


class StreamSums:
    """Windows (episodes, rows) of one law before each episode of its lane.

    Only differences inside a lane mean something. Of the episodes that have ended and begin with
    their first row the sums are kept, since these do not change; the one whose first rows are gone
    and the open one, at most two a lane, are counted when asked.
    """

    def __init__(self, law: CountLaw, kind: int, streams: StreamEpisodes) -> None:
        self.law, self.kind = law, kind
        self._streams = streams
        self._before = np.zeros(streams.episode.capacity, np.int64)
        self._until = np.zeros(streams.lane.capacity, np.int64)
        self._found: tuple[int, Any] = (-1, None)
        episode, every = streams.episode, streams.listed()
        mass = self._ended(episode, every) * (episode.code[every] != GOES_ON)
        sums = np.cumsum(mass)
        self._before[every] = sums - mass
        self._until[episode.lane[every]] = sums  # of the same lane the last one counts

    # -- writing --------------------------------------------------------------------------------

    def start(self, records: Array, capacity: int) -> None:
        """Told of new lanes."""
        self._until = grown(self._until, capacity)
        self._until[records] = 0

    def note(
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
        """Told of rows, as ``StreamEpisodes.append`` has them: which begin episodes, which end."""
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
        """Told of open episodes of distinct lanes that have ended."""
        self._until[records] += self._ended(episode, closed)

    def _ended(self, episode: Any, which: Array) -> Array:
        rows = episode.last[which] - episode.begin[which] + 1
        no = np.zeros(len(which), bool)
        return self._counted(rows, episode.head[which] == int(Head.RESET), no)[0]

    def _counted(self, stored: Array, reset: Array, is_open: Array) -> tuple[Array, ...]:
        """What episodes count for, their windows, the rows for windows, and those left out."""
        count, rows, skip = self.law.counts(stored, reset, is_open)
        mass = count
        if self.kind == EPISODES:
            mass = (count > 0).astype(np.int64)
        elif self.kind == ROWS:
            mass = np.where(count > 0, stored, 0)
        return mass, count, rows, skip

    def _facts(self, which: Array) -> tuple[Array, ...]:
        """The same of stored episodes as they are now, and the times of their first rows."""
        streams = self._streams
        episode = streams.episode
        first = np.maximum(episode.begin[which], streams.lane.lo[episode.lane[which]])
        reset = streams.heads(which) == int(Head.RESET)
        is_open = episode.code[which] == GOES_ON
        return (*self._counted(streams.last(which) - first + 1, reset, is_open), first)

    # -- asking ---------------------------------------------------------------------------------

    def _lanes(self) -> tuple[Array, ...]:
        """By rank: the sum in all lanes up to it, in its first episode if that lacks rows, in those
        that have ended; number of its first whole episode, and the sum before that. O(lanes)."""
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
        is_open = (episode.code[newest] == GOES_ON) & ~none
        tail = np.where(is_open, self._facts(newest)[0], 0)
        found = (np.cumsum(head + ended + tail), head, ended, whole, before)
        self._found = streams.version, found
        return found

    def totals(self) -> Array:
        """Windows (episodes, rows) of every lane, by rank: int64 ``[lanes]``."""
        return np.diff(self._lanes()[0], prepend=0)

    def find(self, number: Array) -> Found:
        """Looks up by number: lanes by rank, in each the order of time."""
        streams = self._streams
        upto, head, ended, whole, before = self._lanes()
        rank = np.searchsorted(upto, number, side="right")
        rest = number - np.where(rank > 0, upto[rank - 1], 0)
        record = streams.order[rank]
        in_head = rest < head[rank]
        after = rest - head[rank]
        in_tail = after >= ended[rank]
        target = before[rank] + after
        # Of the whole episodes the last one before which there are at most so many.
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
        """Bytes that they take."""
        return int(self._before.nbytes + self._until.nbytes)
