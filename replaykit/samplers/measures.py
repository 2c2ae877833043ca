"""How likely every window is: the measures of sequences reference 2.3, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaykit.episodes import EPISODES, ROWS, WINDOWS, CountLaw, EpisodeIndex, Windows

__all__ = ["MEASURES", "Anchors", "PerLane", "PerTrajectory", "PerTransition", "PerWindow"]

Array = np.ndarray[Any, Any]


class Anchors:
    """The windows of an index that a law counts, with a measure on them. Holds until a change of
    the index.

    Windows have numbers ``0 .. count - 1``: lanes in order, inside a lane in the order of time.

    Args:
        index: the episodes.
        law: which windows they have.
        newest: of every lane only that many newest windows; None: all.

    Attributes:
        per_lane: int64 ``[lanes]``, windows of every lane. ``count``: all of them.

    Cost: O(lanes) to make, a search among episodes for every window looked up. With ``newest``
    the measures per trajectory and per transition take O(newest * lanes).
    """

    uniform = False
    """Whether all windows are equally likely."""

    def __init__(self, index: EpisodeIndex, law: CountLaw, newest: int | None = None) -> None:
        self.index, self.law, self.newest = index, law, newest
        stored = index.totals(law, WINDOWS)
        self.per_lane = stored if newest is None else np.minimum(stored, newest)
        self.count = int(self.per_lane.sum())
        self._ends = np.cumsum(self.per_lane)
        # From the numbers of windows here to those of the index, lane by lane.
        self._shift = None if newest is None else np.cumsum(stored) - self._ends

    def numbered(self, number: Array) -> Windows:
        """Looks windows up, int64 ``[K]`` in ``[0, count)``."""
        if self._shift is not None:
            number = number + self._shift[np.searchsorted(self._ends, number, side="right")]
        return self.index.find(self.law, WINDOWS, number)

    def at(self, point: Array) -> Windows:
        """Inverse of the distribution function: windows at points, float64 ``[K]`` of [0, 1)."""
        raise NotImplementedError

    def mass(self, found: Windows) -> Array:
        """Probability of windows up to one factor, float64 ``[K]``."""
        raise NotImplementedError

    def _by_mass(self, point: Array) -> Windows:
        """``at`` where the windows are few: all are looked up and their masses added."""
        found = self.numbered(np.arange(self.count))
        new = np.ones(self.count, bool)
        new[1:] = (np.diff(found.lane) != 0) | (np.diff(found.base) != 0)
        episode = np.cumsum(new) - 1
        mass = self.mass(found._replace(count=np.bincount(episode)[episode]))
        upto = np.cumsum(mass)
        at = np.searchsorted(upto, point * upto[-1], side="right")
        return self.numbered(np.minimum(at, self.count - 1))


class PerWindow(Anchors):
    """Every window is equally likely: ``P(a) = 1 / W``."""

    uniform = True

    def at(self, point: Array) -> Windows:
        return self.numbered(floor_below(point * self.count, self.count))

    def mass(self, found: Windows) -> Array:
        return np.ones(len(found.base))


class PerTrajectory(Anchors):
    """Every episode that has a window, then each of its windows:
    ``P(a) = 1 / J' * 1 / (windows of j)``."""

    def at(self, point: Array) -> Windows:
        if self.newest is not None:
            return self._by_mass(point)
        episodes = int(self.index.totals(self.law, EPISODES).sum())
        scaled = point * episodes
        number = floor_below(scaled, episodes)
        found = self.index.find(self.law, EPISODES, number)
        return found._replace(rest=floor_below((scaled - number) * found.count, found.count))

    def mass(self, found: Windows) -> Array:
        return 1.0 / found.count


class PerTransition(Anchors):
    """An episode by its number of stored rows, then each of its windows:
    ``P(a) = n_j / sum n * 1 / w_j``. Only episodes that have a window count."""

    def at(self, point: Array) -> Windows:
        if self.newest is not None:
            return self._by_mass(point)
        rows = int(self.index.totals(self.law, ROWS).sum())
        scaled = point * rows
        number = floor_below(scaled, rows)
        found = self.index.find(self.law, ROWS, number)
        part = (found.rest + (scaled - number)) / self._stored(found)
        return found._replace(rest=floor_below(part * found.count, found.count))

    def mass(self, found: Windows) -> Array:
        return self._stored(found) / found.count

    def _stored(self, found: Windows) -> Array:
        first, last = self.index.spans(found.base, found.lane)
        return np.asarray(last - first + 1)


class PerLane(Anchors):
    """Every lane that has a window, then each of its windows: ``P(a) = 1 / E' * 1 / w_e``."""

    def __init__(self, index: EpisodeIndex, law: CountLaw, newest: int | None = None) -> None:
        super().__init__(index, law, newest)
        self.lanes = np.nonzero(self.per_lane)[0]
        """Lanes that have a window."""

    def at(self, point: Array) -> Windows:
        scaled = point * len(self.lanes)
        number = floor_below(scaled, len(self.lanes))
        return self.in_lane(self.lanes[number], scaled - number)

    def in_lane(self, lane: Array, point: Array) -> Windows:
        """Windows of given lanes, int64 ``[K]``, at points of [0, 1)."""
        count = self.per_lane[lane]
        number = self._ends[lane] - count + floor_below(point * count, count)
        return self.numbered(number)

    def mass(self, found: Windows) -> Array:
        return 1.0 / self.per_lane[found.lane]


MEASURES: dict[str, type[Anchors]] = {
    "window": PerWindow,
    "trajectory": PerTrajectory,
    "lane": PerLane,
    "transition": PerTransition,
}


def floor_below(value: Array, limit: Any) -> Array:
    """Rounds numbers of ``[0, limit]`` down to integers below ``limit``, which rounding of floats
    may reach."""
    return np.minimum(value.astype(np.int64), limit - 1)
