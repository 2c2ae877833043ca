"""Episodes that have a window by their number, and the way back from a row to that number."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaykit.episodes import EPISODES, CountLaw, EpisodeIndex, Windows

__all__ = ["EpisodeOrder"]

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
