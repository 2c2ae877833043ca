"""Draw windows in order, each batch continuing where the last one ended."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.episodes import EPISODES, CountLaw, EpisodeIndex, Windows
from replaykit.episodes.interleaved import InterleavedIndex
from replaykit.samplers.slicing import SliceRequest
from replaykit.storages import Storage
from replaykit.storages.indexing import ravel

__all__ = ["EpisodeOrder", "Sequential"]

Array = np.ndarray[Any, Any]


class EpisodeOrder:
    """The episodes of an index that have a window under a law: lanes in order, in a lane in the
    order of time. Holds until a change of the index.

    Attributes:
        per_lane: int64 ``[lanes]``. ``ends``: their running sum. ``count``: all of them.
    """

    def __init__(self, index: EpisodeIndex, law: CountLaw) -> None:
        self.index, self.law = index, law
        self.per_lane = index.totals(law, EPISODES)
        self.ends = np.cumsum(self.per_lane)
        self.count = int(self.ends[-1]) if len(self.ends) else 0

    def find(self, number: Array) -> Windows:
        """Looks episodes up, int64 ``[K]`` in ``[0, count)``."""
        return self.index.find(self.law, EPISODES, number)

    def after(self, time: Array, lane: Array) -> Array:
        """Numbers of the first episodes of lanes whose windows begin after times, int64 ``[K]``;
        the end of the lane's numbers where there is none. O(log E) lookups of all K."""
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
        """Numbers of the episodes of stored rows, int64 ``[K]``; -1 where one has no window, or the
        row lies before its windows."""
        number = self.after(time, lane) - 1
        known = number >= self.ends[lane] - self.per_lane[lane]
        found = self.find(number[known])
        begins = self.index.begins(time[known], lane[known])
        known[known] = begins == self.index.begins(found.base, found.lane)
        return np.where(known, number, -1)


class _Cursor(NamedTuple):
    """A row at which a window began that was drawn, or (``include``) that comes next.

    ``element`` is where it lies, in ``lane`` of the index; ``mark`` its number in write order;
    ``age`` that of its episode's first row. The last three are -1 until they are looked up.
    """

    element: int
    include: bool
    lane: int = -1
    mark: int = -1
    age: int = -1


class _Place(NamedTuple):
    """Where to go on: after (``include``: at) a row of an episode of that age in a lane.

    ``time`` is that of the row; None where it is gone.
    """

    age: int
    lane: int
    include: bool
    time: Array | None = None


class Sequential:
    """Windows ``stride`` rows apart, by the age of their episodes, then by time.

    In an episode they begin at its first row, at ``stride`` after it, and so on, while a window
    fits; where windows hang over the end also those that are padded. After the newest comes the
    oldest again. The place is kept through writes: rows that are gone are skipped, episodes that
    come are visited. Positions say how old an episode is; where rows were placed out of order, the
    order in which they lie does.

    Args:
        stride: None: the length of a window.

    Raises:
        TypeError, ValueError: ``stride`` is not an int of at least 1.

    Cost of ``next``: O(K log E + lanes) for K windows.
    """

    def __init__(self, stride: int | None = None) -> None:
        if stride is not None:
            if not isinstance(stride, (int, np.integer)) or isinstance(stride, bool):
                raise TypeError(f"expected stride as an int, got {stride!r}")
            if stride < 1:
                raise ValueError(f"expected stride of at least 1, got {stride}")
        self._stride = None if stride is None else int(stride)
        self.pass_index = 0
        self._cursor: _Cursor | None = None
        # What a draw went on from, for taking it back: the latest last.
        self._undo: list[tuple[Any, _Cursor | None, int]] = []
        self._storage: Any = None
        self._wraps = 0

    # -- drawing ------------------------------------------------------------------------------

    def next(self, request: SliceRequest, storage: Storage, count: int) -> Windows | None:
        """The next ``count`` windows, going round as often as that takes; None: there is none.

        The lock is held. ``advance`` says that they were drawn.
        """
        order = EpisodeOrder(request.episodes, request.law)
        cursor = self._place(request, storage)
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
        """Whether there is a window, from whatever place."""
        order = EpisodeOrder(request.episodes, request.law)
        return bool(len(self._from(request, order, storage, None, 1).base))

    def advance(
        self, found: Windows, index: torch.Tensor, request: SliceRequest, storage: Storage
    ) -> None:
        """Takes note of windows that were drawn, and of the index that was made of them."""
        self._undo = [entry for entry in self._undo if entry[0]() is not None]
        self._undo.append((weakref.ref(index), self._cursor, self.pass_index))
        time = (found.base + found.rest)[-1:]
        element = int(request.episodes.element(time, found.lane[-1:])[0])
        age = self._ages(request, storage, time, found.lane[-1:])
        mark = _mark(storage, element)
        self._cursor = _Cursor(element, False, int(found.lane[-1]), mark, int(age[0]))
        self._storage = weakref.ref(storage)
        self.pass_index += self._wraps

    def _ages(self, request: SliceRequest, storage: Storage, time: Array, lane: Array) -> Array:
        """What orders the episodes of stored rows: where they began."""
        index = request.episodes
        begin = index.begins(time, lane)
        return index.positions(begin, lane) if storage.ledger.oldest_first else begin

    def _place(self, request: SliceRequest, storage: Storage) -> _Place | None:
        """Where the cursor is now; None where nothing tells what came after it."""
        cursor = self._cursor
        if cursor is None:
            return None
        stored = _mark(storage, cursor.element)
        if stored < 0 or (cursor.mark >= 0 and stored != cursor.mark):  # overwritten
            if cursor.mark < 0 or not storage.ledger.oldest_first:
                return None
            return _Place(cursor.age, cursor.lane, cursor.include)
        time, lane = request.episodes.place(np.array([cursor.element]))
        age = self._ages(request, storage, time, lane)
        return _Place(int(age[0]), int(lane[0]), cursor.include, time)

    def _from(
        self,
        request: SliceRequest,
        order: EpisodeOrder,
        storage: Storage,
        cursor: _Place | None,
        count: int,
    ) -> Windows:
        """Up to ``count`` windows after a cursor, without going round."""
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
            if len(live) > 1:  # only lanes with the oldest episodes can give the next ones
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
        cursor: _Place,
        at: Array,
        until: Array,
    ) -> Array:
        """Numbers of the first episodes of lanes that come after the cursor's."""
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
            # Streams that lie interleaved have numbers of their own at every draw, and no two
            # episodes of one age.
            same = (age == cursor.age) & (found.lane > cursor.lane)
            later = (age > cursor.age) | (same & (not _interleaved(request)))
            high[open_[later]] = middle[later]
            low[open_[~later]] = middle[~later] + 1

    def _own(
        self,
        request: SliceRequest,
        order: EpisodeOrder,
        storage: Storage,
        cursor: _Place,
        lanes: Array,
        at: Array,
    ) -> Windows | None:
        """The windows of the cursor's episode that come after it."""
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
        # What is stored of an episode comes after a row of it that is gone.
        after = found.base if cursor.time is None else cursor.time + (0 if cursor.include else 1)
        return self._grid(request, found, after)

    def _grid(self, request: SliceRequest, found: Windows, least: Array | None) -> Windows:
        """The windows of episodes, in order; those that begin at ``least`` or later."""
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

    # -- being told ---------------------------------------------------------------------------

    def attach(self, storage: Storage) -> None:
        """Told which storage it draws from."""
        self._storage = weakref.ref(storage)

    def restart(self) -> None:
        """The next window is the oldest."""
        self._cursor = None
        self._undo = []

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        """Told that draws will not be delivered: they come next again."""
        for index in drawn:
            for at, (known, cursor, passes) in enumerate(self._undo):
                if known() is index:
                    self._cursor, self.pass_index = cursor, passes
                    del self._undo[at:]
                    return
            if len(index):
                flat = ravel(index[:1], storage.lanes) if storage.ndim > 1 else index[:1]
                self._cursor = _Cursor(int(flat), True)
                return

    def written(self, index: Any) -> None:
        """Told that records were written; a place that was loaded may have been overwritten."""
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
        """Told that the records of slots ``rows`` now lie in slots ``0, 1, ...``."""
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
        """Returns where the next batch goes on."""
        cursor = self._cursor
        storage = None if self._storage is None else self._storage()
        if cursor is not None and storage is not None:
            cursor = _still_stored(cursor, storage)
        return {
            "element": -1 if cursor is None else cursor.element,
            "include": cursor is not None and cursor.include,
            "pass_index": self.pass_index,
        }

    @staticmethod
    def check_state(state: object) -> dict[str, Any]:
        """Returns a state; ValueError where it is none."""
        fields = state if isinstance(state, dict) else {}
        if not (
            type(fields.get("element")) is int
            and fields["element"] >= -1
            and type(fields.get("include")) is bool
            and type(fields.get("pass_index")) is int
        ):
            raise ValueError(f"expected the place of a sequential draw, got {state!r}")
        return fields

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on where the state was taken; None: at the oldest."""
        self.restart()
        self.pass_index = 0 if state is None else state["pass_index"]
        if state is not None and state["element"] >= 0:
            self._cursor = _Cursor(state["element"], state["include"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_undo": [], "_storage": None}


def _interleaved(request: SliceRequest) -> bool:
    return isinstance(request.episodes, InterleavedIndex)


def _mark(storage: Storage, element: int) -> int:
    """Number in write order of what lies there; -1 where nothing does."""
    slot = torch.tensor([element // storage.lanes.numel()], device="cpu")
    return int(storage.ledger.positions(slot))


def _still_stored(cursor: _Cursor, storage: Storage) -> _Cursor | None:
    """A cursor whose row is stored: what is oldest in its lane is what comes after one that is
    gone; None where nothing is stored."""
    if cursor.mark < 0 or _mark(storage, cursor.element) == cursor.mark:
        return cursor
    order = storage.ledger.write_order()
    if not len(order):
        return None
    lanes = storage.lanes.numel()
    return _Cursor(int(order[0]) * lanes + cursor.element % lanes, True)
