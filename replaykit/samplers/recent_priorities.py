"""Priorities of those rows alone with which the newest windows start."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit.episodes import CountLaw, EpisodeIndex
from replaykit.priorities import SumSegmentTree
from replaykit.samplers.draws import uniform
from replaykit.samplers.measures import PerWindow
from replaykit.samplers.slicing import Request

__all__ = ["RecentPriorities"]

Array = np.ndarray[Any, Any]


class RecentPriorities:
    """The newest ``steps`` windows of every lane, to be drawn by the priority of their starts.

    Cost: O(steps * lanes) for a batch, and a search each after a write.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._of: tuple[EpisodeIndex, CountLaw, int] | None = None
        self._element = torch.empty(0, dtype=torch.int64, device="cpu")
        self._first = np.zeros(0, np.int64)

    def follow(self, request: Request) -> None:
        """Takes over which windows are the newest now. The lock is held."""
        index, law = request.episodes, request.law
        known = self._of
        if known and known[0] is index and known[1] is law and known[2] == index.version:
            return
        windows = PerWindow(index, law, self.steps)
        found = windows.numbered(np.arange(windows.count))
        time = found.base + found.rest
        self._element = torch.from_numpy(index.element(time, found.lane))
        # In each lane the newest windows start at a time and after it.
        self._first = np.full(index.lanes, np.iinfo(np.int64).max)
        np.minimum.at(self._first, found.lane, time)
        self._of = index, law, index.version

    def among(self, start: torch.Tensor) -> torch.Tensor:
        """Bool ``[K]``: which of some starts of windows are those of the newest."""
        assert self._of is not None
        time, lane = self._of[0].place(start.cpu().numpy())
        return torch.from_numpy(time >= self._first[lane]).to(start.device)

    def draw(
        self,
        count: int,
        sums: SumSegmentTree,
        generator: torch.Generator | None,
        stratified: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, float] | None:
        """Draws starts int64 ``[count]`` by their ``v``: they, their ``v`` in float64, and the sum
        of ``v`` over the newest windows; None where that is 0: nothing is drawn.

        Args:
            sums: a tree over ``v`` of the rows with which windows may start.
        """
        values = sums[self._element.to(sums.device)].to(device="cpu", dtype=torch.float64)
        upto = np.cumsum(values.numpy())
        if not (len(upto) and upto[-1] > 0):
            return None
        point = uniform(count, generator)
        if stratified:
            point = (np.arange(count) + point) / count
        at = np.searchsorted(upto, point * upto[-1], side="right")
        # Rounding may lead to the very end: that is the last one with weight.
        at = np.minimum(at, np.searchsorted(upto, upto[-1]))
        chosen = torch.from_numpy(at)
        return self._element[chosen], values[chosen], float(upto[-1])
