"""Draw windows by priorities of episodes, one priority for each episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.priorities import MinSegmentTree
from replaykit.samplers.episode_measures import EpisodeMasses, WeighedEpisodes
from replaykit.samplers.priority_draws import rows_of
from replaykit.samplers.priority_rules import Update, importance_weights
from replaykit.samplers.window_measures import iid, stratified, without_replacement
from replaykit.storages.episode_tags import EpisodeData, EpisodeTags
from replaykit.storages.indexing import elements_of

if TYPE_CHECKING:
    from replaykit.episodes import CountLaw, EpisodeIndex, Found
    from replaykit.samplers.episode_measures import Predicate
    from replaykit.samplers.priority_table import PriorityTable
    from replaykit.samplers.slice_arguments import Boundaries
    from replaykit.storages import Storage

Array = np.ndarray[Any, Any]


class EpisodePriorities(WeighedEpisodes):
    """Keeps one priority for each episode, in the table of the priorities of rows.

    The priority of an episode is that of its last stored row. So priorities of episodes are saved,
    recovered, shared and moved as those of rows are. An update of any row sets the priority of its
    episode. Rows that continue an episode take it over, before any use of the table.

    Args:
        where: the predicate that episodes have to satisfy; None for all episodes.
        boundaries: the ends of episodes.
        table: the raw priorities of rows.

    Cost: O(K log J) for a draw or an update of K windows of J episodes. After a write, O(J) once.
    """

    def __init__(
        self, where: Predicate | None, boundaries: Boundaries, table: PriorityTable
    ) -> None:
        super().__init__(where)
        self._boundaries = boundaries
        self.follow_table(table)

    def follow_table(self, table: PriorityTable) -> None:
        """Use this table, whose rows inherit priorities from now on."""
        self._table, table.inherit = table, self.inherit
        self.forget()

    def _tags(self, storage: Storage, index: EpisodeIndex) -> EpisodeTags:
        # Tags belong to the episodes of the storage, and only predicates read them.
        return EpisodeTags() if self.where is None else super()._tags(storage, index)

    def _new(self, index: EpisodeIndex, law: CountLaw, tags: EpisodeTags) -> PriorityMasses:
        return PriorityMasses(index, law, tags, self.where, self._table)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_table": None}

    def inherit(self, storage: Storage, slots: Array) -> None:
        """Let rows that were written continue the priority of their episode.

        Cost: a few lookups for each row. The caller holds the lock.
        """
        if not len(slots):
            return
        try:
            index = self._boundaries.index(storage)
        except (KeyError, RuntimeError):  # rows without episodes, which no draw accepts
            return
        element = elements_of(slots, storage.lanes.numel())
        time, lane = index.time_and_lane(element)
        oldest = np.maximum(index.begins(time, lane), index.bounds(lane)[0])
        later = time > oldest
        time, lane = time[later], lane[later]
        source = index.element(time - 1, lane)
        old = ~np.isin(source, element)
        self._copy(index, source[old], time[old], lane[old])

    def _copy(self, index: EpisodeIndex, source: Array, time: Array, lane: Array) -> None:
        if len(source):
            target = index.element(index.spans(time, lane)[1], lane)
            where, table = self._table.device, self._table
            raw = table.raw[torch.from_numpy(source).to(where)]
            table.set(torch.from_numpy(target).to(where), raw, table.length)

    def reduced(self, update: Update, storage: Storage) -> Update:
        """Return an update of the rows that hold the priorities of the episodes of rows.

        An episode gets the largest priority of its rows.
        """
        index = self._boundaries.index(storage)
        time, lane = index.time_and_lane(update.elements.cpu().numpy())
        last = index.element(index.spans(time, lane)[1], lane)
        holder, which = np.unique(last, return_inverse=True)
        largest = update.priorities.new_zeros(len(holder), device="cpu")
        np.maximum.at(largest.numpy(), which, update.priorities.cpu().numpy())
        return update._replace(elements=torch.from_numpy(holder), priorities=largest)

    def of_rows(self, storage: Storage) -> Array:
        """Return the priority of the episode of each stored row, ``[N]``."""
        index, raw = self._boundaries.index(storage), self._table.priorities.cpu().numpy()
        data = EpisodeData(index, EpisodeTags())
        every = np.ones(len(data), bool)
        raw[index.element(*rows_of(data, every))] = np.repeat(
            raw[index.element(data.last, data.lane)], data.length
        )
        return raw


class PriorityMasses(EpisodeMasses):
    """The measure ``P(a) = v_j / sum v * 1 / (windows of j)``; ``v`` is the weight of a priority.

    Windows of episodes with weight 0 do not count.
    """

    def __init__(
        self,
        index: EpisodeIndex,
        law: CountLaw,
        tags: EpisodeTags,
        where: Predicate | None,
        table: PriorityTable,
    ) -> None:
        self._table = table
        self._least: MinSegmentTree | None = None
        super().__init__(index, law, tags, "trajectory", where)

    def _read_masses(self) -> None:
        data, count = self.data, len(self.data)
        if self._table.has_smallest:
            self._least = MinSegmentTree(max(count, 1), dtype=torch.float64)
        self._holder = self.index.element(data.last, data.lane)
        self._set(np.arange(count))

    def follow(self) -> None:
        """Follow priorities that changed since the last draw."""
        changed = self._table.set_since(self._seen)
        if changed is None:
            self._set(np.arange(len(self.data)))
        elif changed:
            at = np.concatenate([part.cpu().numpy() for part in changed])
            number = self.numbers_at(*self.index.time_and_lane(at))
            self._set(np.unique(number[self._holder[number] == at]))

    def _set(self, number: Array) -> None:
        table, windows, at = self._table, self._facts[:, 3], torch.from_numpy(number)
        self._seen = table.log.number
        if not len(number):
            return
        holder = torch.from_numpy(self._holder[number]).to(table.device)
        value = table.values(holder).to("cpu", torch.float64).numpy()
        mass = np.where(self.chosen[number], value, 0.0)
        self._tree.update(at, torch.from_numpy(mass))
        if self._least is not None:
            alone = np.divide(mass, windows[number], np.full(len(mass), np.inf), where=mass > 0)
            self._least.update(at, torch.from_numpy(alone))
        if table.law.may_be_zero:
            self._mass[number] = mass
            self._upto = np.cumsum(np.where(self._mass > 0, windows, 0))
            self.count = int(self._upto[-1])

    def drawn(self, draw: str, count: int, generator: torch.Generator | None) -> Found:
        """Draw up to ``count`` windows."""
        if draw == "without_replacement":
            found = without_replacement(self, min(count, self.count), generator)
            self.episodes_of(found)
            return found
        return (stratified if draw == "stratified" else iid)(self, count, generator)

    def weights(self, beta: float) -> torch.Tensor:
        """Return the importance weights of the last draw, ``[K]``."""
        mass = self._tree[torch.from_numpy(self._drawn)]
        value = mass / torch.from_numpy(self._drawn_facts[3])
        smallest = value.min() if self._least is None else self._least.reduce()
        return importance_weights(value, smallest, beta, self._table.law.dtype)
