"""Draw windows in order: batch after batch, or one episode after another."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.declared import MOST, Count, encode_state, within
from replaykit.episodes import EpisodeIndex, Found
from replaykit.errors import NoEpisodeColumns, NotEnoughData
from replaykit.keywords import whole_number
from replaykit.samplers.episode_measures import EpisodeMasses, chosen_order
from replaykit.samplers.slices import SliceSampler
from replaykit.samplers.slicing import SliceRequest
from replaykit.samplers.window_measures import Anchors, EpisodeOrder, floor_below, uniform
from replaykit.storages import Storage
from replaykit.storages.indexing import ravel

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _SequentialPlace:
    """The place at which the next batch continues; element -1 is the oldest window."""

    element: Annotated[int, within(-1)]
    include: bool
    pass_index: int


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


class _SequentialSlices(SliceSampler):
    """``SliceSampler(draw="sequential")``.

    Windows are ``stride`` rows apart, by the age of their episodes, then by time.

    In each episode, windows begin at the first row, ``stride`` rows later, and so on, while a
    window fits. If windows may extend beyond the end of an episode, padded windows count, too. The
    oldest window follows the newest window.

    Writes do not reset the position: draws skip lost rows and include new episodes. The age of an
    episode is the row id of its first row. If rows were written out of order, it is the slot of
    that row.

    Cost: a draw takes O(K log E + lanes) for K windows.
    """

    kind = "slice_sequential"
    marks_draws = True
    _declared = _SequentialPlace

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._step = None if self.stride is None else whole_number("stride", self.stride, 1)
        self._passes = 0
        self._cursor: _Cursor | None = None
        self._resets = 0
        self._home: weakref.ref[Storage] | None = None

    @property
    def pass_index(self) -> int:
        """The number of times that draws have gone through all windows; ``empty`` keeps it."""
        return self._passes

    # -- drawing ------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        with storage.lock:
            self._ran_out = False
            request, _ = self._prepare(storage, batch_size)
            found, wraps = self._next(request, storage)
            index, info = self._slicing.deliver(storage, request, request.window.cut(found))
            self._advance(found, request, storage)
            self._passes += wraps
            return index, info

    def _next(self, request: SliceRequest, storage: Storage) -> tuple[Found, int]:
        """Return the next windows, and how often the oldest window followed the newest.

        Windows occur several times if a batch has more windows than there are.
        """
        order = chosen_order(self._weighed, storage, request.episodes, request.law)
        cursor = self._resume_at(request, storage)
        parts: list[Found] = []
        missing, wraps = request.slices, 0
        while missing:
            found = self._from(request, order, storage, cursor, missing)
            parts.append(found)
            missing -= len(found.base)
            if missing:
                if cursor is None and not len(found.base):
                    raise self._off_grid(request)
                wraps += 1
                cursor = None
        return Found(*(np.concatenate(part) for part in zip(*parts, strict=True))), wraps

    def _refuse_early(self, storage: Storage, batch_size: int) -> None:
        request, _ = self._prepare(storage, batch_size)
        order = chosen_order(self._weighed, storage, request.episodes, request.law)
        if not len(self._from(request, order, storage, None, 1).base):
            raise self._off_grid(request)

    def _off_grid(self, request: SliceRequest) -> NotEnoughData:
        stride = self._step or request.window.length
        text = f"none that begins a multiple of {stride} rows after its episode does"
        return self._slicing.refuse(request, self.needs, text)

    def _advance(self, found: Found, request: SliceRequest, storage: Storage) -> None:
        """Continue after these windows at the next draw."""
        time = (found.base + found.rest)[-1:]
        element = int(request.episodes.element(time, found.lane[-1:])[0])
        age = _ages(request.episodes, storage, time, found.lane[-1:])
        mark = _mark(storage, element)
        self._cursor = _Cursor(element, False, int(found.lane[-1]), mark, int(age[0]))
        self._home = weakref.ref(storage)

    def _resume_at(self, request: SliceRequest, storage: Storage) -> _Resume | None:
        """Return the position of the cursor; None if its successor cannot be found."""
        if self._cursor is None:
            return None
        cursor = _followed(self._cursor, storage)
        stored = _mark(storage, cursor.element)
        if stored < 0 or (cursor.mark >= 0 and stored != cursor.mark):  # overwritten
            if cursor.mark < 0 or not storage.ledger.oldest_first:
                return None
            return _Resume(cursor.age, cursor.lane, cursor.include)
        time, lane = request.episodes.time_and_lane(np.array([cursor.element]))
        age = _ages(request.episodes, storage, time, lane)
        return _Resume(int(age[0]), int(lane[0]), cursor.include, time)

    def _from(
        self,
        request: SliceRequest,
        order: EpisodeOrder,
        storage: Storage,
        cursor: _Resume | None,
        count: int,
    ) -> Found:
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
            age = _ages(request.episodes, storage, heads.base, heads.lane)
            if len(live) > 1:  # the next windows come from the lanes with the oldest episodes
                live = live[np.lexsort((heads.lane, age))[: count - have]]
            each = np.minimum(until[live] - at[live], count - have)
            source = np.repeat(np.arange(len(live)), each)
            number = np.arange(len(source)) - np.repeat(np.cumsum(each) - each, each)
            number += at[live][source]
            found = order.find(number)
            if len(live) > 1:
                age = _ages(request.episodes, storage, found.base, found.lane)
                by_age = np.lexsort((found.lane, age))[: count - have]
                found = Found(*(field[by_age] for field in found))
                source = source[by_age]
            at[live] += np.bincount(source, minlength=len(live))
            windows = self._grid(request, found, None)
            parts.append(windows)
            have += len(windows.base)
        if not parts:
            nothing = np.zeros(0, np.int64)
            return Found(nothing, nothing, nothing, nothing, nothing)
        return Found(*(np.concatenate(part)[:count] for part in zip(*parts, strict=True)))

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
            age = _ages(request.episodes, storage, found.base, found.lane)
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
    ) -> Found | None:
        """Return the windows of the cursor's episode that come after the cursor."""
        before = at > order.ends[lanes] - order.per_lane[lanes]
        if cursor.time is not None or not _interleaved(request):
            before &= lanes == cursor.lane
        found = order.find(at[before] - 1)
        own = _ages(request.episodes, storage, found.base, found.lane) == cursor.age
        if not own.any():
            return None
        found = Found(*(field[own] for field in found))
        if found.rows[0] < request.window.least and not cursor.include:
            return None
        # If the cursor's row is gone, all stored rows of its episode come after it.
        after = found.base if cursor.time is None else cursor.time + (0 if cursor.include else 1)
        return self._grid(request, found, after)

    def _grid(self, request: SliceRequest, found: Found, least: Array | None) -> Found:
        """Return the windows of episodes, in order, from ``least`` on."""
        window, stride = request.window, self._step or request.window.length
        begin = request.episodes.begins(found.base, found.lane)
        lowest = found.base if least is None else np.maximum(found.base, least)
        first = lowest + (begin - lowest) % stride
        followers = window.law.add - request.law.add  # rows that must follow a window
        fits = found.base + found.rows - (1 if window.right else window.length + followers)
        number = np.maximum((fits - first) // stride + 1, 0)
        short = found.rows < window.least
        first = np.where(short, found.base, first)
        number = np.where(short, lowest == found.base, number)
        source = np.repeat(np.arange(len(number)), number)
        step = np.arange(len(source)) - np.repeat(np.cumsum(number) - number, number)
        rest = (first - found.base)[source] + step * stride
        lane, base, rows, count = (field[source] for field in found[:4])
        return Found(lane, base, rows, count, rest)

    # -- notifications ------------------------------------------------------------------------

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        self._home = weakref.ref(storage)

    def about_to_write(self) -> None:
        """Find the episode of a loaded cursor, whose row may be overwritten."""
        super().about_to_write()
        storage = self._known_storage()
        if self._cursor is not None and storage is not None:
            self._cursor = self._located(self._cursor, storage)

    def _located(self, cursor: _Cursor, storage: Storage) -> _Cursor:
        """Return the cursor with its episode, which a cursor of a load does not know yet."""
        mark = _mark(storage, cursor.element)
        if cursor.mark >= 0 or mark < 0:
            return cursor
        with contextlib.suppress(NoEpisodeColumns):
            index = self._slicing.boundaries.index(storage)
            time, lane = index.time_and_lane(np.array([cursor.element]))
            age = int(_ages(index, storage, time, lane)[0])
            return cursor._replace(lane=int(lane[0]), mark=mark, age=age)
        return cursor

    def empty(self) -> None:
        super().empty()
        self._restart()

    def _restart(self) -> None:
        """Continue with the oldest window."""
        self._cursor = None
        self._resets += 1

    def mark(self, storage: Storage) -> tuple[_Cursor | None, int, int]:
        # Later writes do not reach the token, so it names the episode.
        cursor = None if self._cursor is None else self._located(self._cursor, storage)
        return cursor, self._passes, self._resets

    def rollback(self, token: tuple[_Cursor | None, int, int], storage: Storage) -> None:
        cursor, passes, resets = token
        if resets != self._resets:
            return
        self._cursor, self._passes = cursor, passes

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        for index in drawn:
            if len(index):
                flat = ravel(index[:1], storage.lanes) if storage.ndim > 1 else index[:1]
                self._cursor = _Cursor(int(flat), True)
                return

    def add(self, index: Any) -> None:
        self.mark_update(index)

    def extend(self, index: torch.Tensor) -> None:
        self.mark_update(index)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Follow a write of rows, which may have overwritten the row of a loaded cursor."""
        cursor = self._cursor
        storage = self._known_storage()
        if cursor is None or cursor.mark >= 0 or storage is None:
            return
        slots = torch.as_tensor(index, device="cpu")
        if storage.ndim > 1 and slots.ndim:
            slots = slots[..., 0]
        if bool((slots == cursor.element // storage.lanes.numel()).any()):
            self._cursor = None
        else:
            self._cursor = cursor._replace(mark=_mark(storage, cursor.element))

    def _known_storage(self) -> Storage | None:
        """Return the storage of the last draw; a copy has made none, so its owner's storage."""
        found = None if self._home is None else self._home()
        return self.owner.storage if found is None and self.owner is not None else found

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
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
        storage = self._known_storage()
        if cursor is not None and storage is not None:
            with storage.lock:
                cursor = self._still_stored(cursor, storage)
        element, include = (-1, False) if cursor is None else (cursor.element, cursor.include)
        place = _SequentialPlace(element, include, self._passes)
        return {**super().state_dict(), **encode_state(place)}

    def _still_stored(self, cursor: _Cursor, storage: Storage) -> _Cursor | None:
        """Return a cursor whose row is stored; None if no rows are stored.

        If the given cursor's row is no longer stored, the result is at the next row in the order of
        the draws. Cost: O(episodes) then.
        """
        cursor = _followed(cursor, storage)
        if cursor.mark < 0 or _mark(storage, cursor.element) == cursor.mark:
            return cursor
        if not len(storage) or not storage.ledger.oldest_first:
            return None
        index = self._slicing.boundaries.index(storage)
        table = index.table()
        age = _ages(index, storage, table.first, table.lane)
        by_age = np.lexsort((table.lane, age))
        lane = table.lane >= cursor.lane if index.in_ring else True
        later = ((age > cursor.age) | ((age == cursor.age) & lane))[by_age]
        at = by_age[later][:1] if later.any() else by_age[-1:]
        time = table.first[at] if later.any() else table.last[at]
        return _Cursor(int(index.element(time, table.lane[at])[0]), bool(later.any()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = self._declared_state(state_dict)
        self._restart()
        self._passes = saved.pass_index
        if saved.element >= 0:
            self._cursor = _Cursor(saved.element, saved.include)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_home": None}


def _ages(index: EpisodeIndex, storage: Storage, time: Array, lane: Array) -> Array:
    """Return the age of each row's episode. Episodes are in the order of their age."""
    begin = index.begins(time, lane)
    return index.positions(begin, lane) if storage.ledger.oldest_first else begin


def _interleaved(request: SliceRequest) -> bool:
    return not request.episodes.in_ring


def _mark(storage: Storage, element: int) -> int:
    """Return the row id at a flat index; -1 if no row is stored there."""
    slot = torch.tensor([element // storage.lanes.numel()], device="cpu")
    return int(storage.ledger.positions(slot))


def _followed(cursor: _Cursor, storage: Storage) -> _Cursor:
    """Return the cursor at the slot to which a removal has moved its row.

    Cost: O(rows) if the row is no longer in its slot, and not all writes were at the cursor.
    """
    if cursor.mark < 0 or _mark(storage, cursor.element) == cursor.mark:
        return cursor
    table = storage.ledger.position_table()
    slots: Any = [] if table is None else np.flatnonzero(table.numpy() == cursor.mark)
    return cursor._replace(element=int(slots[0])) if len(slots) else cursor


@dataclass(frozen=True)
class _NextEpisode:
    """The element of the last row of the next episode; -1 for the oldest episode.

    With ``after``, the next episode is the one that comes after that row's episode.
    """

    element: Annotated[int, within(-1)]
    pass_index: Count
    after: bool = False


class _RoundRobinSlices(SliceSampler):
    """``SliceSampler(draw="round_robin")``.

    The k-th window comes from the next episode in the order of age, and after the newest episode
    from the oldest one. Episodes that were added during a pass are part of it. Lost episodes are
    skipped.

    Cost: O(K log J) for K windows of J episodes; after a write, O(J log J) once.
    """

    kind = "slice_round_robin"
    marks_draws = True
    _declared = _NextEpisode

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._passes = 0
        self._last = -1  # id of the last episode drawn
        # Element of a row of the next episode, or of the episode before it, if ``_last`` is not
        # known yet.
        self._loaded, self._after = -1, False
        self._resets = 0
        self._order: tuple[Anchors, Array, Array] | None = None
        self._home: weakref.ref[Storage] | None = None

    @property
    def pass_index(self) -> int:
        """The number of times that draws have gone through all episodes; ``empty`` keeps it."""
        return self._passes

    def _draw(self, request: SliceRequest, anchors: Anchors) -> Found:
        assert isinstance(anchors, EpisodeMasses)
        ids, number = self._ordered(anchors)
        self._resolve(request.episodes)
        start = int(np.searchsorted(ids, self._last, side="right"))
        at = start + np.arange(request.slices)
        episode = number[at % len(ids)]
        count = anchors.windows(episode, np.zeros(len(at), np.int64)).count
        rest = np.zeros(len(at), np.int64)
        if self.offset == "random":
            rest = floor_below(uniform(len(at), self.generator) * count, count)
        self._passes += int(at[-1]) // len(ids)
        self._last = int(ids[at[-1] % len(ids)])
        return anchors.windows(episode, rest)

    def _ordered(self, anchors: EpisodeMasses) -> tuple[Array, Array]:
        """Return the ids of the episodes that have a window, ascending, and their numbers."""
        if self._order is None or self._order[0] is not anchors:
            number = np.flatnonzero(anchors.chosen)
            ids = anchors.data.id[number]
            by_age = np.argsort(ids)
            self._order = anchors, ids[by_age], number[by_age]
        return self._order[1:]

    def _resolve(self, episodes: EpisodeIndex) -> None:
        """Find the id of the episode at which a loaded sampler continues."""
        if self._loaded >= 0:
            time, lane = episodes.time_and_lane(np.array([self._loaded]))
            self._last = int(episodes.ids(time, lane)[0]) - (not self._after)
            self._loaded, self._after = -1, False

    # -- notifications ------------------------------------------------------------------------

    def attach(self, storage: Storage) -> None:
        super().attach(storage)
        self._home, self._order = weakref.ref(storage), None

    def about_to_write(self) -> None:
        super().about_to_write()
        storage: Any = None if self._home is None else self._home()
        if self._loaded >= 0 and storage is not None:
            self._resolve(storage.episodes)

    def empty(self) -> None:
        super().empty()
        self._last, self._loaded, self._after = -1, -1, False
        self._resets += 1

    def mark(self, storage: Storage) -> Any:
        return (self._last, self._loaded, self._after, self._passes), self._resets

    def rollback(self, token: Any, storage: Storage) -> None:
        known, resets = token
        if resets == self._resets:
            self._last, self._loaded, self._after, self._passes = known

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        lanes = storage.lanes.numel()
        if self._loaded >= 0:
            slot, lane = divmod(self._loaded, lanes)
            now = (rows == slot).nonzero().flatten()
            self._loaded = int(now[0]) * lanes + lane if len(now) else -1

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the episode at which the next batch continues."""
        storage: Any = None if self._home is None else self._home()
        if storage is None and self.owner is not None:
            storage = self.owner.storage
        element, after = self._loaded, self._after
        if element < 0 and storage is not None and storage.initialized and len(storage):
            with storage.lock:
                data = storage.indexes.data()
                if self._last >= 0 and len(data):
                    later = np.where(data.id > self._last, data.id, MOST)
                    after = bool((later == MOST).all())
                    first = int(data.id.argmax() if after else later.argmin())
                    at = slice(first, first + 1)
                    element = int(storage.episodes.element(data.last[at], data.lane[at])[0])
        place = _NextEpisode(element, self._passes, after)
        return {**super().state_dict(), **encode_state(place)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = self._declared_state(state_dict)
        self._last, self._loaded, self._after = -1, saved.element, saved.after
        self._passes = saved.pass_index
        self._resets += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_home": None, "_order": None}
