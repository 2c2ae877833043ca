"""A model in NumPy of a ring of `StreamEpisodes`."""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import Any

import numpy as np

from replaykit.episodes.episode_laws import (
    EPISODES,
    RESTORED,
    ROWS,
    SEVERED,
    WINDOWS,
    CountLaw,
    EpisodeTable,
    Head,
    Windows,
)

__all__ = ["NOT_INIT", "NumpyRing"]

Array = np.ndarray[Any, Any]

_FIRST = 1024

CODE_BITS, NOT_INIT = 7, 0x20
"""The bits of a code, and the bit of rows whose ``is_init`` is False."""

HEAD_SHIFT, LINK_SHIFT = 3, 5
"""The form of a link: ``target << 5 | head << 3 | code``."""


class NumpyRing:
    """The episodes among the rows ``lo <= time < hi`` of each of ``lanes`` lanes.

    The *time* of a row is its sequence number in its lane, int64. No time is used twice. The slot
    of a row is ``time % slots``. Each row has a link. The first row of an episode links to the
    newest row of the episode, and every other row links back to the first row. When the first row
    is overwritten, the data in its link move to an entry of its lane. Episodes that have ended are
    also listed in the order of their ends.

    Cost: O(rows) to append. A look-up reads two links. After a write, this class sums the window
    counts of all episodes again, in O(episodes). The compiled core updates its sums instead.
    Memory: 8 bytes per row and 32 bytes per episode.

    Example:
        >>> import numpy as np
        >>> from tests.episodes.numpy_ring import NumpyRing
        >>> ring = NumpyRing(slots=4)
        >>> ring.append(np.array([[0], [1], [0], [0], [0]], np.uint8))
        >>> ring.lo, ring.hi, ring.table().first.tolist(), ring.table().last.tolist()
        (1, 5, [1, 2], [1, 4])
    """

    def __init__(
        self,
        slots: int,
        lanes: int = 1,
        *,
        start: int = 0,
        begin: Array | None = None,
        head: Array | None = None,
    ) -> None:
        """Start without rows at time ``start``.

        Args:
            begin: int64 ``[lanes]``, the time at which the episode of a lane's first row began; -1
                if the episode begins with that row.
            head: int64 ``[lanes]``, the ``Head`` of each lane's first episode; None for
                ``Head.RESET``.
        """
        self.slots, self.lanes = slots, lanes
        self.lo = self.hi = start
        self.version = 0
        self._severed: deque[tuple[int, int]] = deque()  # (time, lane), in the order of time
        self._last_ids: Array | None = None
        self._link = np.zeros((0, lanes), np.int64)
        fresh = np.full(lanes, -1, np.int64)
        self._open = fresh.copy() if begin is None else np.asarray(begin, np.int64).copy()
        self._next_head = (
            np.full(lanes, int(Head.RESET)) if head is None else np.asarray(head, np.int64).copy()
        )
        self._open_head = np.full(lanes, int(Head.RESET))
        self._head_begin = np.where(self._open < start, self._open, -1)
        self._head_last = np.full(lanes, start - 1, np.int64)
        # Ended episodes, sorted by (last, lane). The rows are last, lane, begin and head.
        self._log = np.zeros((4, _FIRST), np.int64)
        self._logged = 0
        self._dropped = 0
        self._table: tuple[int, EpisodeTable] | None = None
        self._sums: dict[Any, tuple[int, Any]] = {}

    # -- writing ------------------------------------------------------------------------------

    def append(self, codes: Array) -> None:
        """Append the codes of new rows, uint8 ``[n, lanes]``."""
        n = len(codes)
        if not n:
            return
        hi, lanes = self.hi, np.arange(self.lanes)
        times = hi + np.arange(n, dtype=np.int64)
        end = (codes & CODE_BITS).astype(np.int64)
        ended = end != 0
        starts = np.empty(ended.shape, bool)
        starts[0] = self._open < 0
        starts[1:] = ended[:-1]
        begin = np.where(starts, times[:, None], -1)
        begin[0] = np.where(starts[0], hi, self._open)
        np.maximum.accumulate(begin, axis=0, out=begin)
        last = np.where(ended, times[:, None], hi + n - 1)
        last = np.minimum.accumulate(last[::-1], axis=0)[::-1]
        head = np.full(end.shape, int(Head.RESET))
        head[1:][end[:-1] == SEVERED] = int(Head.CUT)
        head[0] = self._next_head
        head[(codes & NOT_INIT) != 0] = int(Head.CUT)
        link = np.where(starts, last, begin) << LINK_SHIFT
        link |= np.where(starts, head, 0) << HEAD_SHIFT
        link |= end
        lo = max(self.lo, hi + n - self.slots)
        if lo > self.lo:
            self._evict(lo, begin, last)
        was_open = self._open.copy()
        self._reserve(hi + n - lo, hi)
        stored = slice(max(0, n - self.slots), None)
        self._link[times[stored] % self.slots] = link[stored]
        # If rows continue an episode, update its first row, or the entry of its lane.
        on = ~starts[0]
        kept = on & (was_open >= lo)
        if kept.any():
            at = (was_open[kept] % self.slots, lanes[kept])
            low = self._link[at] & ((1 << LINK_SHIFT) - 1)
            self._link[at] = (last[0][kept] << LINK_SHIFT) | low
        headless = on & (self._head_begin == was_open) & (self._head_begin >= 0)
        self._head_last[headless] = last[0][headless]
        row, lane = np.nonzero(ended)
        if len(row):
            began = begin[row, lane]
            inside = np.maximum(began - hi, 0)
            kinds = np.where(began < hi, self._open_head[lane], head[inside, lane])
            self._close(hi + row, lane, began, kinds, lo)
        self._open = np.where(ended[-1], -1, begin[-1])
        newest = np.maximum(begin[-1] - hi, 0)
        self._open_head = np.where(begin[-1] < hi, self._open_head, head[newest, lanes])
        self._next_head = np.where(end[-1] == SEVERED, int(Head.CUT), int(Head.RESET))
        self.lo, self.hi = lo, hi + n
        self.version += 1

    def append_severed(self, codes: Array, after: Array, ends: Array) -> None:
        """Append codes of new rows, and cut streams after the rows ``after``.

        Args:
            codes: uint8 ``[n, lanes]``, including the codes of the cuts.
            after: int64 ``[m]``, indices of rows among the new rows.
            ends: uint8 ``[m, lanes]``, the code of the cut, or 0 in lanes that are not cut.
        """
        first = self.hi
        self.append(codes)
        row, lane = np.nonzero(ends)
        self._severed.extend(zip((first + after[row]).tolist(), lane.tolist(), strict=True))

    def close(self, lanes: Array, code: int) -> None:
        """End the open episodes of lanes (bool ``[lanes]``) at their newest rows.

        With the codes ``SEVERED`` and ``RESTORED``, the streams are also cut after these rows.
        """
        if self.hi == self.lo:
            return
        if code in (SEVERED, RESTORED):
            newest = self.hi - 1
            known = set(takewhile(lambda one: one[0] == newest, reversed(self._severed)))
            severed = [(newest, lane) for lane in np.nonzero(lanes)[0].tolist()]
            self._severed.extend(one for one in severed if one not in known)
            self._forget_severed()
        self.version += 1
        lane = np.nonzero(lanes & (self._open >= 0))[0]
        if not len(lane):
            return
        self._link[(self.hi - 1) % self.slots, lane] |= code
        last = np.full(len(lane), self.hi - 1)
        self._close(last, lane, self._open[lane], self._open_head[lane], self.lo)
        self._open[lane] = -1
        self._next_head[lane] = int(Head.CUT if code == SEVERED else Head.RESET)

    def _evict(self, lo: int, begin: Array, last: Array) -> None:
        """Move an episode's data to its lane when its first row is overwritten."""
        lanes = np.arange(self.lanes)
        if lo < self.hi:
            began, ends, _, _ = self.lookup(np.full(self.lanes, lo), lanes)
        else:
            began, ends = begin[lo - self.hi], last[lo - self.hi]
        self._head_begin = np.where(began < lo, began, -1)
        self._head_last = np.where(began < lo, ends, -1)

    def _reserve(self, rows: int, hi: int) -> None:
        # Until the ring wraps for the first time, the number of used slots grows.
        need = self.slots if hi % self.slots + rows > self.slots else hi % self.slots + rows
        need = min(self.slots, max(need, rows))
        if need > len(self._link):
            grown = np.zeros((min(self.slots, max(need, 2 * len(self._link), _FIRST)), self.lanes))
            link = grown.astype(np.int64)
            link[: len(self._link)] = self._link
            self._link = link

    def _close(self, last: Array, lane: Array, begin: Array, head: Array, lo: int) -> None:
        alive = last >= lo
        last, lane, begin, head = last[alive], lane[alive], begin[alive], head[alive]
        first = self._dropped
        self._dropped = int(np.searchsorted(self._log[0, : self._logged], lo))
        self._dropped = max(self._dropped, first)
        need = self._logged + len(last)
        if need > self._log.shape[1]:
            kept = self._log[:, self._dropped : self._logged]
            log = np.zeros((4, max(_FIRST, 2 * (kept.shape[1] + len(last)))), np.int64)
            log[:, : kept.shape[1]] = kept
            self._log, self._logged, self._dropped = log, kept.shape[1], 0
            need = self._logged + len(last)
        self._log[:, self._logged : need] = last, lane, begin, head
        self._logged = need

    # -- one row --------------------------------------------------------------------------------

    def first(self) -> tuple[int, int]:
        """Return begin and head of the oldest row's episode; the ring must have one lane."""
        begin, _, _, head = self.lookup(np.array([self.lo]), np.zeros(1, np.int64))
        return int(begin[0]), int(head[0])

    def lookup(self, time: Array, lane: Array) -> tuple[Array, Array, Array, Array]:
        """Return begin, last, code of the last row, and head of stored rows' episodes.

        Raises:
            IndexError: a row is not stored.
        """
        self._check(time, lane)
        link = self._link[time % self.slots, lane]
        target = link >> LINK_SHIFT
        is_first = target >= time
        begin = np.where(is_first, time, target)
        evicted = begin < self.lo
        at_begin = self._link[np.where(evicted, time, begin) % self.slots, lane]
        last = np.where(evicted, self._head_last[lane], at_begin >> LINK_SHIFT)
        code = self._link[last % self.slots, lane] & CODE_BITS
        head = np.where(evicted, int(Head.EVICTED), (at_begin >> HEAD_SHIFT) & 3)
        return begin, last, code, head

    def _check(self, time: Array, lane: Array) -> None:
        if len(time) != len(lane):
            raise ValueError(f"expected {len(time)} entries in `lane`, got {len(lane)}")
        stored = (time >= self.lo) & (time < self.hi) & (lane >= 0) & (lane < self.lanes)
        if not stored.all():
            at = int(np.argmin(stored))
            raise IndexError(
                f"expected times in [{self.lo}, {self.hi}) of lanes in [0, {self.lanes}), "
                f"got time {time[at]} of lane {lane[at]}"
            )

    def around(self, element: Array) -> Array:
        """Return time, lane, begin, last, code, head of elements, int64 ``[6, K]``."""
        slot, lane = np.divmod(element, self.lanes)
        newest = self.hi - 1
        time = newest - (newest - slot) % self.slots
        wrong = (slot < 0) | (slot >= self.slots) | (time < self.lo)
        if wrong.any():
            raise IndexError(f"expected elements of stored rows, got {element[wrong][0]}")
        return np.stack([time, lane, *self.lookup(time, lane)])

    def codes(self, time: Array, lane: Array) -> Array:
        """Return the codes of stored rows.

        Raises:
            IndexError: a row is not stored.
        """
        self._check(time, lane)
        return self._link[time % self.slots, lane] & CODE_BITS

    @property
    def open_lanes(self) -> Array:
        """True in lanes whose newest episode may continue, bool ``[lanes]``."""
        return (self._open >= 0) & (self.hi > self.lo)

    @property
    def head_begin(self) -> Array:
        """Time at which the oldest row's episode began, int64 ``[lanes]``.

        The time is -1 in lanes in which the first row of this episode is stored.
        """
        return self._head_begin.copy()

    def append_columns(
        self, bound: Any, columns: Any, first: int, until: int, ends: Any = None
    ) -> bool:
        """Return False, because only the compiled core can append directly from columns."""
        return False

    def forget_ids(self) -> None:
        """Forget the ids of the newest row, so that the next row's ids end no episode."""
        self._last_ids = None

    def last_ids(self) -> Array | None:
        """Return the ids of the newest row, uint8 ``[lanes, bytes]``, or None."""
        return self._last_ids

    def set_last_ids(self, ids: Array) -> None:
        """Set the ids of the newest row. Only the caller compares ids of rows."""
        self._last_ids = ids.copy()

    def severed(self) -> Array:
        """Return time and lane of the rows after which streams are cut, int64 ``[m, 2]``."""
        self._forget_severed()
        return np.array(self._severed, np.int64).reshape(-1, 2)

    def _forget_severed(self) -> None:
        while self._severed and self._severed[0][0] < self.lo:
            self._severed.popleft()

    # -- all episodes ---------------------------------------------------------------------------

    def table(self) -> EpisodeTable:
        """Return all stored episodes. Cost: O(episodes)."""
        if self._table is not None and self._table[0] == self.version:
            return self._table[1]
        start = int(np.searchsorted(self._log[0, : self._logged], self.lo))
        last, lane, begin, head = self._log[:, start : self._logged]
        at = np.nonzero(self.open_lanes)[0]
        last = np.concatenate([last, np.full(len(at), self.hi - 1)])
        lane = np.concatenate([lane, at])
        begin = np.concatenate([begin, self._open[at]])
        head = np.concatenate([head, self._open_head[at]])
        order = np.argsort(lane, kind="stable")
        last, lane, begin, head = last[order], lane[order], begin[order], head[order]
        head = np.where(begin < self.lo, int(Head.EVICTED), head)
        code = self.codes(last, lane) if len(last) else last
        table = EpisodeTable(lane, begin, np.maximum(begin, self.lo), last, code, head)
        self._table = self.version, table
        return table

    def _summed(self, law: CountLaw, kind: int) -> tuple[Array, Array, Array, Array]:
        known = self._sums.get((law, kind))
        if known is not None and known[0] == self.version:
            return known[1]
        table = self.table()
        stored = table.last - table.first + 1
        count, rows, skip = law.counts(stored, table.head == int(Head.RESET), table.code == 0)
        mass = count
        if kind == EPISODES:
            mass = (count > 0).astype(np.int64)
        elif kind == ROWS:
            mass = np.where(count > 0, stored, 0)
        found = (np.cumsum(mass), count, rows, table.first + skip)
        if len(self._sums) > 16:
            self._sums.clear()
        self._sums[(law, kind)] = self.version, found
        return found

    def totals(self, law: CountLaw, kind: int) -> Array:
        """Return the counts of windows, episodes or rows of lanes, int64 ``[lanes]``."""
        sums, *_ = self._summed(law, kind)
        ends = np.searchsorted(self.table().lane, np.arange(self.lanes), side="right")
        upto = np.concatenate([[0], sums])[ends]
        return np.diff(upto, prepend=0)

    def total(self, law: CountLaw, kind: int) -> int:
        """Return the sum of ``totals``."""
        sums, *_ = self._summed(law, kind)
        return int(sums[-1]) if len(sums) else 0

    def find(self, law: CountLaw, kind: int, number: Array) -> Windows:
        """Look up windows, episodes or rows by number, int64 ``[K]``.

        Windows, episodes and rows are numbered in the order of lanes, and in each lane in the order
        of time.

        Raises:
            IndexError: a number is not below the sum of ``totals``.
        """
        sums, count, rows, base = self._summed(law, kind)
        total = int(sums[-1]) if len(sums) else 0
        wrong = (number < 0) | (number >= total)
        if wrong.any():
            got = number[np.argmax(wrong)]
            raise IndexError(f"expected numbers in [0, {total}), got {got}")
        at = np.searchsorted(sums, number, side="right")
        before = np.where(at > 0, sums[at - 1], 0)
        return Windows(self.table().lane[at], base[at], rows[at], count[at], number - before)

    def pick(self, law: CountLaw, kind: int, number: Array) -> Array:
        """Return the elements of single rows by number, found by ``find``."""
        found = self.find(law, kind, number)
        return (found.base + found.rest) % self.slots * self.lanes + found.lane

    def slices(self, law: CountLaw, number: Array, length: int) -> tuple[Array, Array]:
        """Return elements of windows of ``length`` rows by number, window after window.

        The second array has the position of each element's window in ``number``.
        """
        if not 1 <= length <= self.slots:
            raise ValueError(f"expected windows of 1 to {self.slots} rows, got {length}")
        found = self.find(law, WINDOWS, number)
        short = np.nonzero(length > found.rows - found.rest)[0]
        if len(short):
            total = int(self.totals(law, WINDOWS).sum())
            raise IndexError(
                f"expected numbers in [0, {total}) of windows of {length} rows, got "
                f"{number[short[0]]}"
            )
        first = (found.base + found.rest)[:, None]
        element = (first + np.arange(length)) % self.slots * self.lanes + found.lane[:, None]
        return element.reshape(-1), np.repeat(np.arange(len(number)), length)

    def longest(self) -> int:
        """Return the count of stored rows of the longest episode. Cost: O(episodes)."""
        table = self.table()
        return int((table.last - table.first).max()) + 1 if len(table.last) else 0

    def nbytes(self) -> int:
        """Return the size of the index in bytes."""
        return int(self._link.nbytes + self._log.nbytes)
