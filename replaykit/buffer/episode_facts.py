"""What is known of episodes from when they were looked up."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit.episodes import EndReason, EpisodeIndex
from replaykit.storages.ledger import Ledger

__all__ = ["Facts", "facts_of", "positions"]

Array = np.ndarray[Any, Any]


class Facts(NamedTuple):
    """What was known of episodes when they were looked up; int64 ``[J]`` each."""

    lane: Array
    id: Array
    begin: Array  # position of the first row, stored or not
    evicted: Array  # rows before the first stored one
    first: Array  # position of the first stored row
    last: Array  # position of the last one
    length: Array
    element: Array  # where the first stored row lies
    reason: Array
    head: Array

    @classmethod
    def none(cls) -> Facts:
        """Of no episode."""
        return cls(*(np.zeros(0, np.int64) for _ in cls._fields))

    def at(self, which: Any) -> Facts:
        """Of some of the episodes: a slice, or what NumPy indexes by."""
        return Facts(*(values[which] for values in self))


def facts_of(
    by: EpisodeIndex,
    lane: Array,
    begin: Array,
    first: Array,
    last: Array,
    code: Array,
    head: Array,
) -> Facts:
    """Facts of episodes as an index tells them: see ``episodes.found.Table``."""
    began = by.positions(begin, lane)
    return Facts(
        lane,
        by.ids(first, lane),
        began,
        first - begin,
        by.positions(first, lane),
        by.positions(last, lane),
        last - first + 1,
        by.element(first, lane),
        np.minimum(code, int(EndReason.CUT)),
        head,
    )


def positions(ledger: Ledger, slots: Array) -> Array:
    """Positions of the rows in slots int64 ``[K]``."""
    return np.asarray(ledger.positions(torch.from_numpy(np.ascontiguousarray(slots))).numpy())
