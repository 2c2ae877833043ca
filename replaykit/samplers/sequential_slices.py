"""Draw windows in order: batch after batch, or one episode after another."""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch

from replaykit.declared import MOST, Count, encode_state, within
from replaykit.episodes import EpisodeIndex, Found
from replaykit.errors import NoEpisodeColumns, NotEnoughData
from replaykit.keywords import whole_number
from replaykit.samplers.episode_measures import EpisodeMasses, chosen_order
from replaykit.samplers.slices import SliceSampler
from replaykit.samplers.slicing import SliceRequest
from replaykit.samplers.window_measures import (
    Anchors,
    EpisodeOrder,
    floor_below,
    no_windows,
    uniform,
)
from replaykit.storages import Storage
from replaykit.storages.indexing import ravel

Array = np.ndarray[Any, Any]


class _Ordered(SliceSampler):
    """Draws that continue where the last batch ended.

    Writes do not reset the place: draws skip lost rows, and include new episodes.
    """

    marks_draws = True

    _from_row: ClassVar[Any]
    """A saved place of which a row, its element, is in the next window."""

    _oldest: ClassVar[Any]
    """The saved place of a sampler that begins with the oldest episode."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._passes = 0
        self._place: Any = None  # of the last window; None if the oldest window is next
        self._loaded: Any = None  # the place of a load, until its row is looked up
        self._resets = 0
        self._home: weakref.ref[Storage] | None = None

    @property
    def pass_index(self) -> int:
        """The number of times that draws have gone through all windows, or all episodes.

        ``empty`` keeps it.
        """
        return self._passes

    def _prepare(self, storage: Storage, batch_size: int) -> tuple[SliceRequest, Anchors]:
        request, anchors = super()._prepare(storage, batch_size)
        self._home = weakref.ref(storage)
        self._resolve(request.episodes, storage)
        return request, anchors

    def _resolve(self, episodes: EpisodeIndex, storage: Storage) -> None:
        """Look up the row of a loaded place. If it is not stored, begin with the oldest window."""
        if self._loaded is not None:
            stored = _row_id(storage, self._loaded.element) >= 0
            self._place = self._found(self._loaded, episodes, storage) if stored else None
            self._loaded = None

    @abstractmethod
    def _found(self, loaded: Any, episodes: EpisodeIndex, storage: Storage) -> Any:
        """Return the place with the episode of its stored row."""

    # -- notifications ------------------------------------------------------------------------

    def about_to_write(self) -> None:
        """Look up the row of a loaded place, since a write may overwrite it."""
        super().about_to_write()
        storage = self._known_storage()
        if storage is not None:
            self._resolve_early(storage)

    def _resolve_early(self, storage: Storage) -> None:
        with contextlib.suppress(NoEpisodeColumns):
            if self._loaded is not None:
                self._resolve(self._slicing.boundaries.index(storage), storage)

    def _known_storage(self) -> Storage | None:
        """Return the storage of the buffer; without a buffer, that of the last draw."""
        if self.owner is not None:
            return self.owner.storage
        return None if self._home is None else self._home()

    def empty(self) -> None:
        super().empty()
        self._place = self._loaded = None
        self._resets += 1

    def mark(self, storage: Storage) -> Any:
        self._resolve_early(storage)  # later writes do not reach the token
        return self._place, self._loaded, self._passes, self._resets

    def rollback(self, token: Any, storage: Storage) -> None:
        if token[-1] == self._resets:
            self._place, self._loaded, self._passes, _ = token

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        if self._loaded is not None:
            lanes = storage.lanes.numel()
            slot, lane = divmod(self._loaded.element, lanes)
            now = (rows.cpu() == slot).nonzero().flatten().tolist()
            self._loaded = replace(self._loaded, element=now[0] * lanes + lane) if now else None

    def put_back(self, drawn: list[torch.Tensor], storage: Storage) -> None:
        first = next((index[:1] for index in drawn if len(index)), None)
        if first is not None:
            element = int(ravel(first, storage.lanes) if storage.ndim > 1 else first)
            self._place = None
            self._loaded = replace(self._from_row, element=element, pass_index=self._passes)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the place at which the next batch continues."""
        place, storage = self._loaded, self._known_storage()
        if place is None and self._place is not None and storage is not None and len(storage):
            with storage.lock:
                place = self._to_save(storage)
        saved = encode_state(place or self._oldest)
        return {**super().state_dict(), **saved, "pass_index": self._passes}

    @abstractmethod
    def _to_save(self, storage: Storage) -> Any:
        """Return the place for a saved state; None for the oldest window."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = self._declared_state(state_dict)
        self._place, self._loaded = None, saved if saved.element >= 0 else None
        self._passes = saved.pass_index
        self._resets += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_home": None}


def _row_id(storage: Storage, element: int) -> int:
    """Return the row id at a flat index; -1 if no row is stored there."""
    slot = torch.tensor([element // storage.lanes.numel()], device="cpu")
    return int(storage.ledger.positions(slot))


def _episode_from(index: EpisodeIndex, least: int) -> tuple[bool, Array, Array, Array]:
    """Return first time, last time and lane of the first episode whose id is at least ``least``.

    If no such episode is stored, they are those of the episode with the largest id, and the first
    result is False. Cost: O(episodes).
    """
    table = index.table()
    ids = index.ids(table.first, table.lane)
    later = ids >= least
    at = np.where(later, ids, MOST).argmin() if later.any() else ids.argmax()
    one = slice(at, at + 1)
    return bool(later.any()), table.first[one], table.last[one], table.lane[one]


@dataclass(frozen=True)
class _SequentialPlace:
    """The first row of the last window drawn; with ``include``, of the next window.

    Element -1 stands for the oldest window.
    """

    element: Annotated[int, within(-1)]
    include: bool
    pass_index: int


class _Window(NamedTuple):
    """A place among the stored rows.

    ``element`` and ``include`` are as in a saved state. ``row_id`` is the id of the row, ``time``
    its time in the index, and ``episode`` the number of its episode in the order of draws.
    """

    element: int
    include: bool
    row_id: int
    time: int
    episode: int


class _SequentialSlices(_Ordered):
    """``SliceSampler(draw="sequential")``.

    Windows are ``stride`` rows apart, by the age of their episodes, then by time.

    In each episode, windows begin at the first row, ``stride`` rows later, and so on, while a
    window fits. If windows may extend beyond the end of an episode, padded windows count, too. The
    oldest window follows the newest window.

    The age of an episode is its id. If rows were written out of order, it is the slot of its first
    row.

    Cost: a draw takes O(K log E + lanes) for K windows.
    """

    kind = "slice_sequential"
    _declared = _SequentialPlace
    _from_row, _oldest = _SequentialPlace(0, True, 0), _SequentialPlace(-1, False, 0)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._step = None if self.stride is None else whole_number("stride", self.stride, 1)

    # -- drawing ------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        with storage.lock:
            self._ran_out = False
            request, _ = self._prepare(storage, batch_size)
            found, wraps = self._next(request, storage)
            index, info = self._slicing.deliver(storage, request, request.window.cut(found))
            time, lane = (found.base + found.rest)[-1:], found.lane[-1:]
            element = int(request.episodes.element(time, lane)[0])
            self._place = _window(element, False, request.episodes, storage, time, lane)
            self._passes += wraps
            return index, info

    def _next(self, request: SliceRequest, storage: Storage) -> tuple[Found, int]:
        """Return the next windows, and how often the oldest window followed the newest.

        Windows occur several times if a batch has more windows than there are.
        """
        order = chosen_order(self._weighed, storage, request.episodes, request.law)
        place = self._place_now(request.episodes, storage)
        parts: list[Found] = []
        missing, wraps = request.slices, 0
        while missing:
            parts.append(self._from(request, order, storage, missing, place))
            missing -= len(parts[-1].base)
            if missing:
                if place is None and not len(parts[-1].base):
                    raise self._off_grid(request)
                wraps += 1
                place = None
        return Found(*(np.concatenate(part) for part in zip(*parts, strict=True))), wraps

    def _refuse_early(self, storage: Storage, batch_size: int) -> None:
        request, _ = self._prepare(storage, batch_size)
        order = chosen_order(self._weighed, storage, request.episodes, request.law)
        if not len(self._from(request, order, storage, 1).base):
            raise self._off_grid(request)

    def _off_grid(self, request: SliceRequest) -> NotEnoughData:
        stride = self._step or request.window.length
        text = f"none that begins a multiple of {stride} rows after its episode does"
        return self._slicing.refuse(request, self.needs, text)

    def _found(self, loaded: Any, episodes: EpisodeIndex, storage: Storage) -> _Window:
        time, lane = episodes.time_and_lane(np.array([loaded.element]))
        return _window(loaded.element, loaded.include, episodes, storage, time, lane)

    def _place_now(self, episodes: EpisodeIndex, storage: Storage) -> _Window | None:
        """Return the place; None to begin with the oldest window.

        Edits may have moved the ends of the row's episode. The time is -1 if the row is lost. All
        stored rows of its episode then come after it.
        """
        stored = None if self._place is None else _stored(self._place, storage)
        if stored is not None:
            return self._found(stored, episodes, storage)
        known = self._place is not None and storage.ledger.oldest_first
        return self._place._replace(time=-1) if known else None

    def _from(
        self,
        request: SliceRequest,
        order: EpisodeOrder,
        storage: Storage,
        count: int,
        place: _Window | None = None,
    ) -> Found:
        """Return up to ``count`` windows after a place, up to the newest window."""

        def ages(found: Found) -> Array:
            return _ages(request.episodes, storage, found.base, found.lane)

        def is_next(found: Found, _: Array) -> Array:
            assert place is not None
            if request.episodes.lanes == 1 and place.time >= 0:  # the same in fewer steps
                return np.asarray(found.base + found.rows > place.time)
            return ages(found) >= place.episode

        lanes = np.nonzero(order.per_lane)[0]
        until = order.ends[lanes]
        at = until - order.per_lane[lanes] if place is None else order.first_with(lanes, is_next)
        parts, have = [no_windows()], 0
        while have < count and (at < until).any():
            live = np.nonzero(at < until)[0]
            if len(live) > 1:  # the next windows come from the lanes with the oldest episodes
                live = live[np.argsort(ages(order.find(at[live])))[: count - have]]
            each = np.minimum(until[live] - at[live], count - have)
            source = np.repeat(live, each)
            number = at[source] + np.arange(len(source)) - np.repeat(np.cumsum(each) - each, each)
            found = order.find(number)
            age = ages(found)
            by_age = np.argsort(age)[: count - have]
            at += np.bincount(source[by_age], minlength=len(at))
            found = Found(*(field[by_age] for field in found))
            parts.append(self._grid(request, found, age[by_age], place))
            have += len(parts[-1].base)
        return Found(*(np.concatenate(part)[:count] for part in zip(*parts, strict=True)))

    def _grid(
        self, request: SliceRequest, found: Found, age: Array, place: _Window | None
    ) -> Found:
        """Return the windows of episodes, in order; those of a place's episode come after it."""
        window, stride = request.window, self._step or request.window.length
        begin = request.episodes.begins(found.base, found.lane)
        lowest, begun = found.base, np.zeros(len(found.base), bool)
        if place is not None:
            own, least = age == place.episode, place.time + (not place.include)
            lowest = np.where(own, np.maximum(lowest, least), lowest)
            begun = own & (not place.include)
        first = lowest + (begin - lowest) % stride
        followers = window.law.add - request.law.add  # rows that must follow a window
        fits = found.base + found.rows - (1 if window.right else window.length + followers)
        number = np.maximum((fits - first) // stride + 1, 0)
        short = found.rows < window.least
        first = np.where(short, found.base, first)
        number = np.where(short, (lowest == found.base) & ~begun, number)
        source = np.repeat(np.arange(len(number)), number)
        step = np.arange(len(source)) - np.repeat(np.cumsum(number) - number, number)
        rest = (first - found.base)[source] + step * stride
        lane, base, rows, count = (field[source] for field in found[:4])
        return Found(lane, base, rows, count, rest)

    # -- undoing draws, and state -------------------------------------------------------------

    def _to_save(self, storage: Storage) -> _SequentialPlace | None:
        """Return a place whose row is stored: if necessary, the next row in the order of draws."""
        stored = _stored(self._place, storage)
        if stored is not None:
            return _SequentialPlace(stored.element, stored.include, 0)
        if not storage.ledger.oldest_first:
            return None
        index = self._slicing.boundaries.index(storage)
        later, first, last, lane = _episode_from(index, self._place.episode)
        return _SequentialPlace(int(index.element(first if later else last, lane)[0]), later, 0)


def _window(
    element: int, include: bool, index: EpisodeIndex, storage: Storage, time: Array, lane: Array
) -> _Window:
    episode = int(_ages(index, storage, time, lane)[0])
    return _Window(element, include, _row_id(storage, element), int(time[0]), episode)


def _ages(index: EpisodeIndex, storage: Storage, time: Array, lane: Array) -> Array:
    """Return the numbers of rows' episodes in the order of age."""
    if storage.ledger.oldest_first:
        return index.ids(time, lane)
    return index.begins(time, lane) * index.lanes + lane


def _stored(place: _Window, storage: Storage) -> _Window | None:
    """Return a place at the slot to which a removal has moved its row; None if the row is lost.

    Cost: O(rows) if the row is no longer in its slot, and not all writes were at the cursor.
    """
    if _row_id(storage, place.element) == place.row_id:
        return place
    table, lanes = storage.ledger.position_table(), storage.lanes.numel()
    slots: Any = [] if table is None else np.flatnonzero(table.numpy() == place.row_id)
    if not len(slots):
        return None
    return place._replace(element=int(slots[0]) * lanes + place.element % lanes)


@dataclass(frozen=True)
class _NextEpisode:
    """The element of the last row of the next episode; -1 for the oldest episode.

    With ``after``, the next episode is the one that comes after that row's episode.
    """

    element: Annotated[int, within(-1)]
    pass_index: Count
    after: bool = False


class _RoundRobinSlices(_Ordered):
    """``SliceSampler(draw="round_robin")``.

    The k-th window comes from the next episode in the order of age, and after the newest episode
    from the oldest one. Episodes that were added during a pass are part of it. Lost episodes are
    skipped. The place is the id of the last episode drawn.

    Cost: O(K log J) for K windows of J episodes; after a write, also O(rows written + lanes).
    """

    kind = "slice_round_robin"
    _declared = _NextEpisode
    _from_row, _oldest = _NextEpisode(0, 0), _NextEpisode(-1, 0)

    def _draw(self, request: SliceRequest, anchors: Anchors) -> Found:
        assert isinstance(anchors, EpisodeMasses)
        found, passes, self._place = anchors.in_turn(request.slices, self._place)
        if self.offset == "random":
            start = uniform(request.slices, self.generator) * found.count
            found = found._replace(rest=floor_below(start, found.count))
        self._passes += passes
        return found

    def _found(self, loaded: Any, episodes: EpisodeIndex, storage: Storage) -> int:
        time, lane = episodes.time_and_lane(np.array([loaded.element]))
        return int(episodes.ids(time, lane)[0]) - (not loaded.after)

    def _to_save(self, storage: Storage) -> _NextEpisode:
        index = self._slicing.boundaries.index(storage)
        later, _, last, lane = _episode_from(index, self._place + 1)
        return _NextEpisode(int(index.element(last, lane)[0]), 0, not later)
