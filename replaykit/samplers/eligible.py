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
    """Records in the order of lanes and time, by number; holds until the next write.

    Attributes:
        count: how many there are.
        as_of: index of episodes, its version, and needs: where these are equal, the same records.
    """

    def __init__(self, index: EpisodeIndex, law: CountLaw, needs: Needs) -> None:
        self._index, self._law, self._needs = index, law, needs
        self.count = index.total(law, WINDOWS)
        self.as_of = index, index.version, needs

    def elements(self, number: np.ndarray[Any, Any]) -> torch.Tensor:
        """Elements, int64 ``[K]``, of the records with these numbers in ``[0, count)``."""
        return torch.from_numpy(self._index.rows(self._law, number))

    def first_of(self, elements: torch.Tensor, count: int) -> np.ndarray[Any, Any]:
        """Finds the first ``count`` of some stored elements that are such records.

        Returns:
            Their places among ``elements``, int64, rising; fewer where there are no more.

        Cost: O(places looked at): nothing after the last one found is, but for twice as many.
        """
        found, at, size = [np.empty(0, np.int64)], 0, count
        while count > 0 and at < len(elements):
            some = elements[at : at + size].cpu().numpy()
            fits = self._index.eligible_starts(self._law, *self._index.place(some))
            place = at + np.nonzero(fits)[0][:count]
            found.append(place)
            count, at, size = count - len(place), at + size, 2 * size
        return np.concatenate(found)

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
