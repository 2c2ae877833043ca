"""Positions of records before and after a load."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.storages.ledger import Ledger

__all__ = ["MovedPositions"]

Array = np.ndarray[Any, Any]


class MovedPositions:
    """From the positions that stored records had in one ledger to those they have in another.

    Args:
        old: the ledger as it was saved.
        new: the one that was restored from it.
        rows: as for ``Ledger.restore``.

    Attributes:
        oldest: the lowest old position of a record that is stored now.
        shift: what that record's position has grown by.

    Cost: O(1) where every record keeps its slot and positions follow from the counters; else a sort
    of all positions.
    """

    def __init__(self, old: Ledger, new: Ledger, rows: torch.Tensor | None) -> None:
        self._count = new.length
        self._sorted: tuple[Array, Array] | None = None
        if rows is None and old.in_order and new.in_order:
            self.oldest = old.next_position - old.length
            self.shift = new.next_position - old.next_position
            return
        kept = arange(new.length) if rows is None else rows
        before = old.positions(kept).numpy()
        now = new.positions(arange(new.length)).numpy()
        order = np.argsort(before, kind="stable")
        self._sorted = before[order], now[order]
        self.oldest = int(before[order[0]])
        self.shift = int(now[order[0]]) - self.oldest

    def find(self, positions: Array) -> tuple[Array, Array]:
        """Looks up old positions: which of them, bool ``[K]``, are stored now, and the new
        positions of those."""
        if self._sorted is None:
            there = (positions >= self.oldest) & (positions < self.oldest + self._count)
            return there, positions[there] + self.shift
        before, now = self._sorted
        at = np.minimum(np.searchsorted(before, positions), len(before) - 1)
        there = before[at] == positions
        return there, now[at[there]]
