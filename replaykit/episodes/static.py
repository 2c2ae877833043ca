"""Episodes that somebody has said, instead of finding them in columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.episodes.codes import GOES_ON, SWITCHED
from replaykit.episodes.index import EpisodeIndex
from replaykit.episodes.kernels import new_ring
from replaykit.episodes.rule import BoundaryRule

if TYPE_CHECKING:
    from replaykit.episodes.source import RowSource

__all__ = ["StaticEpisodes"]


class StaticEpisodes(EpisodeIndex):
    """The index of rows that are not written any more, of which the ends are given.

    Args:
        storage: whose rows; it has no lanes.
        ends: bool ``[N]``, True at the last rows of episodes, in the order of slots. The last slot
            goes on in the first one where the ring has wrapped.

    Cost: O(N).
    """

    def __init__(self, storage: RowSource, ends: torch.Tensor) -> None:
        columns, ledger = storage.require(), storage.ledger
        self.rule = BoundaryRule(flags=(), ids=())
        self.bound = self.rule.bind(columns.schema)
        self._storage, self._columns = storage, columns
        self.lanes, self.slots = 1, columns.slots
        start = ledger.cursor if ledger.length == self.slots and ledger.in_order else 0
        self._ring = new_ring(self.slots, 1, start=start)
        codes = np.where(ends.numpy(), SWITCHED, GOES_ON).astype(np.uint8)
        self._ring.append(np.roll(codes, -start)[:, None])
        self._noted, self._changes = ledger.next_position, ledger.changes
        self._edited, self._ordered_from, self._versions, self.rebuilt = False, 0, 0, 0

    @property
    def is_old(self) -> bool:
        """Whether rows were written since, which it knows nothing of."""
        ledger = self._storage.ledger
        return ledger.next_position != self._noted or ledger.changes != self._changes

    def edited(self) -> None:
        """Columns have no say in it."""

    def sync(self) -> None:
        """Nothing to take note of: what was given holds until the next write."""

    def note_rows(self, rows: Any) -> None:
        """As ``sync``."""
