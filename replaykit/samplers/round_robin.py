"""Draw windows of one episode after another, in the order of their age."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from replaykit.declared import Count, encode_state, within
from replaykit.episodes import EpisodeIndex, Found
from replaykit.samplers.episode_measures import EpisodeMasses
from replaykit.samplers.slices import SliceSampler
from replaykit.samplers.slicing import SliceRequest
from replaykit.samplers.window_measures import Anchors, floor_below, uniform
from replaykit.storages import Storage

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _NextEpisode:
    """The element of the last row of the next episode; -1 for the oldest episode."""

    element: Annotated[int, within(-1)]
    pass_index: Count


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
        self._loaded = -1  # element of a row of the next episode, if ``_last`` is not known yet
        self._resets = 0
        self._order: tuple[Anchors, Array, Array] | None = None
        self._home: weakref.ref[Storage] | None = None

    @property
    def pass_index(self) -> int:
        """The number of times that the draws have gone through all episodes."""
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
            self._last, self._loaded = int(episodes.ids(time, lane)[0]) - 1, -1

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
        self._last, self._loaded = -1, -1
        self._resets += 1

    def mark(self, storage: Storage) -> Any:
        return super().mark(storage), self._last, self._loaded, self._passes, self._resets

    def rollback(self, token: Any, storage: Storage) -> None:
        counted, last, loaded, passes, resets = token
        super().rollback(counted, storage)
        if resets == self._resets:
            self._last, self._loaded, self._passes = last, loaded, passes

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
        element = self._loaded
        if element < 0 and storage is not None and storage.initialized and len(storage):
            with storage.lock:
                data = storage.indexes.data()
                later = np.flatnonzero(data.id > self._last)
                if self._last >= 0 and len(later):
                    first = later[data.id[later].argmin()]
                    at = slice(first, first + 1)
                    element = int(storage.episodes.element(data.last[at], data.lane[at])[0])
        place = _NextEpisode(element, self._passes)
        return {**super().state_dict(), **encode_state(place)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = self._declared_state(state_dict)
        self._last, self._loaded, self._passes = -1, saved.element, saved.pass_index
        self._resets += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_home": None, "_order": None}
