"""How much of a batch comes from the newest windows: sequences reference C27."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from replaykit.episodes import Needs
from replaykit.samplers.slicing import Request

__all__ = ["Recency", "checked_recent"]


class Recency(NamedTuple):
    """A share ``ratio`` of the slices of a batch from the newest ``steps`` windows of every lane.

    Example:
        >>> from replaykit.samplers.recency import checked_recent
        >>> checked_recent((0.5, 1000), "iid")
        Recency(ratio=0.5, steps=1000)
    """

    ratio: float
    steps: int

    def slices(self, request: Request, needs: Needs) -> int:
        """How many slices of a batch these are: none where plain draws see enough of them."""
        rows = request.episodes.stored_rows() / request.episodes.lanes
        if self.ratio * (rows - (request.window.length - 1) - needs.past) <= self.steps:
            return 0
        return math.ceil(round(self.ratio * request.slices, 9))


def checked_recent(recent: Any, draw: str) -> Recency | None:
    """Returns what ``recent=`` of a sampler of slices says; None: nothing.

    Raises:
        TypeError: no pair. ValueError: numbers out of range, or a draw without such a share.
    """
    if recent is None:
        return None
    if not isinstance(recent, (tuple, list)) or len(recent) != 2:
        raise TypeError(f"expected recent as (ratio, steps), got {recent!r}")
    ratio, steps = recent
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise ValueError(f"expected a ratio of recent slices in [0, 1], got {ratio!r}")
    if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)) or steps < 1:
        raise ValueError(f"expected recent steps as an int of at least 1, got {steps!r}")
    if draw not in ("iid", "stratified"):
        raise ValueError(f"recent= goes with draw='iid' or 'stratified', got {draw!r}")
    return Recency(float(ratio), int(steps))
