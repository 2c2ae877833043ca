"""Which records can be drawn one by one, where a buffer's transforms need what lies around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit.episodes import WINDOWS, CountLaw, EpisodeIndex, Needs
from replaykit.errors import NotEnoughData
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage

__all__ = ["SINGLE", "Eligible", "eligible_records", "index_for", "refuse_nothing"]

SINGLE = CountLaw.strict(1)


def index_for(storage: Storage) -> EpisodeIndex:
    """The storage's index of episodes, up to date.

    Raises:
        RuntimeError: a storage that does not know where episodes end.
    """
    if not isinstance(storage, ColumnStorage):
        raise RuntimeError(
            f"a {type(storage).__name__} does not know where episodes end, which transforms that "
            "read the rows around need; use a tensor or memmap storage"
        )
    return storage.episodes


def eligible_records(storage: Storage, needs: Needs) -> Eligible:
    """The records that have around them what transforms need. Cost: O(lanes)."""
    index = index_for(storage)
    return Eligible(index, needs.single, needs)


class Eligible:
    """Records in the order of lanes and time, by number; holds until the next write."""

    def __init__(self, index: EpisodeIndex, law: CountLaw, needs: Needs) -> None:
        self._index, self._law, self._needs = index, law, needs
        self.count = index.total(law, WINDOWS)

    def elements(self, number: np.ndarray[Any, Any]) -> torch.Tensor:
        """Elements, int64 ``[K]``, of the records with these numbers in ``[0, count)``."""
        return torch.from_numpy(self._index.rows(self._law, number))

    def require(self) -> int:
        """Returns their count; NotEnoughData where there is none."""
        if not self.count:
            refuse_nothing(self._index, self._needs)
        return self.count


def refuse_nothing(index: EpisodeIndex, needs: Needs) -> None:
    """Raises NotEnoughData that says what is stored and what the transforms need."""
    raise NotEnoughData(
        f"none of the {index.stored_rows()} stored rows can be drawn: the transforms need "
        f"{_words(needs)}, and the longest of the stored episodes has {index.longest()} rows"
    )


def _words(needs: Needs) -> str:
    words = []
    if needs.past:
        words.append(f"{needs.past} rows of history, or the reset of the episode")
    if needs.open_future:
        words.append(f"{needs.open_future} rows after it, or the end of the episode")
    if needs.closed:
        words.append("an episode that has ended")
    if needs.intact:
        words.append("an episode that is stored from its reset on")
    return ", and ".join(words)
