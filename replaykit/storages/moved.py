"""Positions of records before and after a load."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.storages.ledger import Ledger
from replaykit.storages.number_sets import contained

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

    Cost: O(1) where every record keeps its slot and positions follow from the counters, a pass over
    all positions where it does and they do not; else a sort of them.
    """

    def __init__(self, old: Ledger, new: Ledger, rows: torch.Tensor | None) -> None:
        self._count = new.length
        self._sorted: tuple[Array, Array] | None = None
        self._old: Array | None = None
        if rows is None and old.in_order and new.in_order:
            self.oldest = old.next_position - old.length
            self.shift = new.next_position - old.next_position
            return
        table = old.tables()[0]
        if rows is None and table is not None and not new.in_order:
            # All have moved alike.
            self._old = table.numpy()
            first = int(new.positions(torch.zeros(1, dtype=torch.int64, device="cpu")))
            self.oldest, self.shift = int(self._old.min()), first - int(self._old[0])
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
        if self._old is not None:
            there = contained(positions, self._old)
            return there, positions[there] + self.shift
        if self._sorted is None:
            there = (positions >= self.oldest) & (positions < self.oldest + self._count)
            return there, positions[there] + self.shift
        before, now = self._sorted
        at = np.minimum(np.searchsorted(before, positions), len(before) - 1)
        there = before[at] == positions
        return there, now[at[there]]
