"""Draw windows in order; each batch continues after the last batch."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.declared import encode_state, within
from replaykit.episodes import EPISODES, CountLaw, EpisodeIndex, Windows
from replaykit.keywords import whole_number
from replaykit.samplers.slicing import SliceRequest
from replaykit.storages import Storage
from replaykit.storages.indexing import ravel

__all__ = ["EpisodeOrder", "Sequential", "SequentialPlace"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SequentialPlace:
    """The place at which the next batch continues; element -1 is the oldest window."""

    element: Annotated[int, within(-1)]
    include: bool
    pass_index: int


class EpisodeOrder:
    """The episodes of an index that have a window under a law, by lane, then by time.

    The object is valid until the index changes.

    Attributes:
        per_lane: number of these episodes in each lane, int64 ``[lanes]``.
        ends: running sum of ``per_lane``.
        count: sum of ``per_lane``.
    """

    def __init__(self, index: EpisodeIndex, law: CountLaw) -> None:
        self.index, self.law = index, law
        self.per_lane = index.totals(law, EPISODES)
        self.ends = np.cumsum(self.per_lane)
        self.count = int(self.ends[-1]) if len(self.ends) else 0

    def find(self, number: Array) -> Windows:
        """Return the windows of episodes by number, int64 ``[K]`` in ``[0, count)``."""
        return self.index.find(self.law, EPISODES, number)

    def after(self, time: Array, lane: Array) -> Array:
        """Return the first episode of each lane whose windows begin after a time.

        If a lane has no such episode, the result is the number after the lane's last episode. Cost:
        O(log E) array lookups, each for all K lanes.
        """
        high = self.ends[lane].copy()
        low = high - self.per_lane[lane]
        while True:
            open_ = np.nonzero(low < high)[0]
            if not len(open_):
                return low
            middle = (low[open_] + high[open_]) // 2
            later = self.find(middle).base > time[open_]
            high[open_[later]] = middle[later]
            low[open_[~later]] = middle[~later] + 1

    def of(self, time: Array, lane: Array) -> Array:
        """Return the numbers of the episodes of stored rows, int64 ``[K]``.

        The number is -1 if the episode has no window, or if the row precedes its windows.
        """
        number = self.after(time, lane) - 1
        known = number >= self.ends[lane] - self.per_lane[lane]
        found = self.find(number[known])
        begins = self.index.begins(time[known], lane[known])
        known[known] = begins == self.index.begins(found.base, found.lane)
        return np.where(known, number, -1)


class _Cursor(NamedTuple):
    """The first row of the last window drawn; with ``include``, of the next window.

    ``element`` is the flat index of the row, and ``lane`` its lane in the episode index. ``mark``
    is its row id. ``age`` is the row id of its episode's first row. ``lane``, ``mark`` and ``age``
    are -1 until they are needed.
    """

    element: int
    include: bool
    lane: int = -1
    mark: int = -1
    age: int = -1


class _Resume(NamedTuple):
    """The position at which draws continue: after a row; with ``include``, at the row.

    ``age`` and ``lane`` describe the row's episode. ``time`` is the time of the row; None if the
    row is no longer stored.
    """

    age: int
    lane: int
    include: bool
    time: Array | None = None


class Sequential:
    """Windows ``stride`` rows apart, by the age of their episodes, then by time.

    In each episode, windows begin at the first row, ``stride`` rows later, and so on, while a
    window fits. If windows may extend beyond the end of an episode, padded windows count, too. The
    oldest window follows the newest window.

    Writes do not reset the position: draws skip lost rows and include new episodes. The age of an
    episode is the row id of its first row. If rows were written out of order, it is the slot of
    that row.

    Args:
        stride: distance between windows; None for the length of a window.

    Raises:
        TypeError: ``stride`` is not an int.
        ValueError: ``stride`` is below 1.

    Cost: ``next`` takes O(K log E + lanes) for K windows.
    """

    def __init__(self, stride: int | None = None) -> None:
        self._stride = None if stride is None else whole_number("stride", stride, 1)
        self.pass_index = 0
        self._cursor: _Cursor | None = None
        self._resets = 0
        self._storage: Any = None
        self._wraps = 0

    # -- drawing ------------------------------------------------------------------------------

    def next(self, request: SliceRequest, storage: Storage, count: int) -> Windows | None:
        """Return the next ``count`` windows; None if there is no window.

        Windows occur several times if ``count`` exceeds their number. The caller holds the lock,
        and calls ``advance`` with the windows that it draws.
        """
        order = EpisodeOrder(request.episodes, request.law)
        cursor = self._resume_at(request, storage)
        parts: list[Windows] = []
        missing, self._wraps = count, 0
        while missing:
            found = self._from(request, order, storage, cursor, missing)
            parts.append(found)
            missing -= len(found.base)
            if missing:
                if cursor is None and not len(found.base):
                    return None
                self._wraps += 1
                cursor = None
        return Windows(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def any(self, request: SliceRequest, storage: Storage) -> bool:
        """Return whether at least one window exists."""
        order = EpisodeOrder(request.episodes, request.law)
        return bool(len(self._from(request, order, storage, None, 1).base))

    def advance(self, found: Windows, request: SliceRequest, storage: Storage) -> None:
        """Continue after these windows at the next draw."""
        time = (found.base + found.rest)[-1:]
        element = int(request.episodes.element(time, found.lane[-1:])[0])
        age = self._ages(request, storage, time, found.lane[-1:])
        mark = _mark(storage, element)
        self._cursor = _Cursor(element, False, int(found.lane[-1]), mark, int(age[0]))
        self._storage = weakref.ref(storage)
        self.pass_index += self._wraps

    def _ages(self, request: SliceRequest, storage: Storage, time: Array, lane: Array) -> Array:
        """Return the age of each row's episode. Episodes are in the order of their age."""
        index = request.episodes
        begin = index.begins(time, lane)
        return index.positions(begin, lane) if storage.ledger.oldest_first else begin

    def _resume_at(self, request: SliceRequest, storage: Storage) -> _Resume | None:
        """Return the position of the cursor; None if its successor cannot be found."""
        cursor = self._cursor
        if cursor is None:
            return None
        stored = _mark(storage, cursor.element)
        if stored < 0 or (cursor.mark >= 0 and stored != cursor.mark):  # overwritten
            if cursor.mark < 0 or not storage.ledger.oldest_first:
                return None
            return _Resume(cursor.age, cursor.lane, cursor.include)
        time, lane = request.episodes.time_and_lane(np.array([cursor.element]))
        age = self._ages(request, storage, time, lane)
        return _Resume(int(age[0]), int(lane[0]), cursor.include, time)

    def _from(
        self,
        request: SliceRequest,
        order: EpisodeOrder,
        storage: Storage,
        cursor: _Resume | None,
        count: int,
    ) -> Windows:
        """Return up to ``count`` windows after a cursor, up to the newest window."""
        lanes = np.nonzero(order.per_lane)[0]
        until = order.ends[lanes]
        at = until - order.per_lane[lanes]
        own = None
        if cursor is not None:
            at = self._after(request, order, storage, cursor, at, until)
            own = self._own(request, order, storage, cursor, lanes, at)
        parts = [] if own is None else [own]
        have = 0 if own is None else len(own.base)
        while have < count and (at < until).any():
            live = np.nonzero(at < until)[0]
            heads = order.find(at[live])
            age = self._ages(request, storage, heads.base, heads.lane)
            if len(live) > 1:  # the next windows come from the lanes with the oldest episodes
                live = live[np.lexsort((heads.lane, age))[: count - have]]
            each = np.minimum(until[live] - at[live], count - have)
            source = np.repeat(np.arange(len(live)), each)
            number = np.arange(len(source)) - np.repeat(np.cumsum(each) - each, each)
            number += at[live][source]
            found = order.find(number)
            if len(live) > 1:
                age = self._ages(request, storage, found.base, found.lane)
                by_age = np.lexsort((found.lane, age))[: count - have]
                found = Windows(*(field[by_age] for field in found))
                source = source[by_age]
            at[live] += np.bincount(source, minlength=len(live))
            windows = self._grid(request, found, None)
            parts.append(windows)
            have += len(windows.base)
        if not parts:
            nothing = np.zeros(0, np.int64)
            return Windows(nothing, nothing, nothing, nothing, nothing)
        return Windows(*(np.concatenate(part)[:count] for part in zip(*parts, strict=True)))

    def _after(
        self,
        request: SliceRequest,
        order: EpisodeOrder,
        storage: Storage,
        cursor: _Resume,
        at: Array,
        until: Array,
    ) -> Array:
        """Return the first episode of each lane that comes after the cursor's episode."""
        if cursor.time is not None and request.episodes.lanes == 1 and len(at):
            return order.after(cursor.time, np.zeros(1, np.int64))
        low, high = at.copy(), until.copy()
        while True:
            open_ = np.nonzero(low < high)[0]
            if not len(open_):
                return low
            middle = (low[open_] + high[open_]) // 2
            found = order.find(middle)
            age = self._ages(request, storage, found.base, found.lane)
            # Interleaved streams get other lane numbers at every draw. Their episodes all have
            # different ages.
            same = (age == cursor.age) & (found.lane > cursor.lane)
            later = (age > cursor.age) | (same & (not _interleaved(request)))
            high[open_[later]] = middle[later]
            low[open_[~later]] = middle[~later] + 1

    def _own(
        self,
        request: SliceRequest,
        order: EpisodeOrder,
        storage: Storage,
        cursor: _Resume,
        lanes: Array,
        at: Array,
    ) -> Windows | None:
        """Return the windows of the cursor's episode that come after the cursor."""
        before = at > order.ends[lanes] - order.per_lane[lanes]
        if cursor.time is not None or not _interleaved(request):
            before &= lanes == cursor.lane
        found = order.find(at[before] - 1)
        own = self._ages(request, storage, found.base, found.lane) == cursor.age
        if not own.any():
            return None
        found = Windows(*(field[own] for field in found))
        if found.rows[0] < request.window.least and not cursor.include:
            return None
        # If the cursor's row is gone, all stored rows of its episode come after it.
        after = found.base if cursor.time is None else cursor.time + (0 if cursor.include else 1)
        return self._grid(request, found, after)

    def _grid(self, request: SliceRequest, found: Windows, least: Array | None) -> Windows:
        """Return the windows of episodes, in order, from ``least`` on."""
        window, stride = request.window, self._stride or request.window.length
        begin = request.episodes.begins(found.base, found.lane)
        lowest = found.base if least is None else np.maximum(found.base, least)
        first = lowest + (begin - lowest) % stride
        fits = found.base + found.rows - (1 if window.right else window.length)
        number = np.maximum((fits - first) // stride + 1, 0)
        short = found.rows < window.least
        first = np.where(short, found.base, first)
        number = np.where(short, lowest == found.base, number)
        source = np.repeat(np.arange(len(number)), number)
        step = np.arange(len(source)) - np.repeat(np.cumsum(number) - number, number)
        rest = (first - found.base)[source] + step * stride
        lane, base, rows, count = (field[source] for field in found[:4])
        return Windows(lane, base, rows, count, rest)

    # -- notifications ------------------------------------------------------------------------

    def attach(self, storage: Storage) -> None:
        """Attach to the storage of the draws."""
        self._storage = weakref.ref(storage)

    def restart(self) -> None:
        """Continue with the oldest window."""
        self._cursor = None
        self._resets += 1

    def mark(self, storage: Storage) -> tuple[_Cursor | None, int, int]:
        """Return the position, for ``rollback``."""
        cursor = self._cursor
        if cursor is not None and cursor.mark < 0:
            # Later writes do not reach the token, so it names the row.
            cursor = cursor._replace(mark=_mark(storage, cursor.element))
        return cursor, self.pass_index, self._resets

    def rollback(self, token: tuple[_Cursor | None, int, int], storage: Storage) -> None:
        """Continue at the position of a ``mark``."""
        cursor, passes, resets = token
        if resets != self._resets:
            return
        if cursor is not None and cursor.lane < 0:  # of a load, so its episode is not known
            kept = _mark(storage, cursor.element) == cursor.mark
            cursor = cursor if kept else None
        self._cursor, self.pass_index = cursor, passes

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        """Continue with the windows of the first of these draws."""
        for index in drawn:
            if len(index):
                flat = ravel(index[:1], storage.lanes) if storage.ndim > 1 else index[:1]
                self._cursor = _Cursor(int(flat), True)
                return

    def written(self, index: Any) -> None:
        """Follow a write of rows, which may have overwritten the row of a loaded cursor."""
        cursor = self._cursor
        storage = None if self._storage is None else self._storage()
        if cursor is None or cursor.mark >= 0 or storage is None:
            return
        slots = torch.as_tensor(index, device="cpu")
        if storage.ndim > 1 and slots.ndim:
            slots = slots[..., 0]
        if bool((slots == cursor.element // storage.lanes.numel()).any()):
            self._cursor = None
        else:
            self._cursor = cursor._replace(mark=_mark(storage, cursor.element))

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        """Follow a move of the rows from slots ``rows`` to slots ``0, 1, ...``."""
        cursor = self._cursor
        if cursor is None:
            return
        slot, lane = divmod(cursor.element, storage.lanes.numel())
        now = arange(len(rows))[rows.cpu() == slot]
        if not len(now):
            self._cursor = None
            return
        self._cursor = _Cursor(int(now[0]) * storage.lanes.numel() + lane, cursor.include)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position at which the next batch continues."""
        cursor = self._cursor
        storage = None if self._storage is None else self._storage()
        if cursor is not None and storage is not None:
            cursor = _still_stored(cursor, storage)
        return encode_state(
            SequentialPlace(
                -1 if cursor is None else cursor.element,
                cursor is not None and cursor.include,
                self.pass_index,
            )
        )

    def load_state(self, saved: SequentialPlace) -> None:
        """Continue at a saved place."""
        self.restart()
        self.pass_index = saved.pass_index
        if saved.element >= 0:
            self._cursor = _Cursor(saved.element, saved.include)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_storage": None}


def _interleaved(request: SliceRequest) -> bool:
    return not request.episodes.in_ring


def _mark(storage: Storage, element: int) -> int:
    """Return the row id at a flat index; -1 if no row is stored there."""
    slot = torch.tensor([element // storage.lanes.numel()], device="cpu")
    return int(storage.ledger.positions(slot))


def _still_stored(cursor: _Cursor, storage: Storage) -> _Cursor | None:
    """Return a cursor whose row is stored; None if no rows are stored.

    If the given cursor's row is no longer stored, the result is a cursor at the oldest row of its
    lane.
    """
    if cursor.mark < 0 or _mark(storage, cursor.element) == cursor.mark:
        return cursor
    order = storage.ledger.write_order()
    if not len(order):
        return None
    lanes = storage.lanes.numel()
    return _Cursor(int(order[0]) * lanes + cursor.element % lanes, True)
