"""Draw by priority among eligible rows, and without repetition."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit.episodes import CountLaw, EpisodeIndex
from replaykit.episodes.boundaries import CONTINUES
from replaykit.priorities import SumSegmentTree
from replaykit.samplers.episode_measures import EpisodeMasses
from replaykit.samplers.priority_table import PriorityTable
from replaykit.samplers.window_measures import ranges
from replaykit.storages.episode_tags import EpisodeData

Array = np.ndarray[Any, Any]

_NOTHING = np.empty(0, np.int64)

_MANY = 2
"""If at least one in this many rows needs a check, all rows are checked."""


class _Seen(NamedTuple):
    """The sources of the tree's last update, and its rows: int64 ``[lanes]`` each."""

    number: int
    episodes: EpisodeIndex
    rebuilt: int
    numbering: int
    law: CountLaw
    version: int
    lo: Array
    hi: Array
    chosen: EpisodeMasses | None
    until: int
    """Row id of the next row that was written."""
    truncations: int
    opened: Array
    """First stored row of the lane's open episode at that update; ``hi`` if none was open.

    Only laws that exclude open episodes use it.
    """


class EligiblePriorities:
    """A sum tree over ``v`` of the rows with which windows may start.

    The tree has 0 for all other rows. It is separate from the tree of the PriorityTable, which
    stays unchanged. Its contents depend only on the priorities and the episode index. So if the
    window length or the needs of transforms change and then change back, the probabilities are
    exactly the same as before.

    Only draws update the tree; writes and priority updates do not. An update checks four kinds of
    rows: rows written since the last update, rows that could not be starts because later rows were
    missing, rows at the oldest end, and rows whose priorities were set. It checks all rows if the
    law, index or exponent has changed. With a predicate it also checks the rows of episodes for
    which the predicate has changed.

    In interleaved streams, windows that lie in their episode with all rows depend on no oldest end.
    The update then looks at no stream without new rows. For other windows of interleaved streams,
    it checks all rows if streams were added, or if rows were removed.

    Cost: O(changed * log N) for an update, or O(N) if it checks all rows. With a predicate also
    O(J log J) for J episodes after a write.
    Memory: 6 bytes per row in float32, 10 in float64. The storage's lock guards the object.
    """

    def __init__(self) -> None:
        self._seen: _Seen | None = None
        self._sums: SumSegmentTree | None = None
        self._eligible = torch.empty(0, dtype=torch.bool, device="cpu")
        self._process = -1

    def follow(
        self,
        table: PriorityTable,
        index: EpisodeIndex,
        law: CountLaw,
        chosen: EpisodeMasses | None = None,
    ) -> SumSegmentTree:
        """Return the tree over a table's rows, updated.

        Args:
            table: the sampler's table, with a priority for each stored row.
            index: the episode index, up to date.
            law: the rule for the number of windows in an episode. Their starts are the first rows
                of the episode.
            chosen: the episodes that satisfy a predicate; None for all episodes.
        """
        seen = self._seen
        changed = None if seen is None else table.set_since(seen.number)
        by_row = index.key is not None and chosen is None and law == CountLaw.strict(law.least)
        if seen is not None and (
            changed is None
            or seen.episodes is not index
            or (seen.rebuilt, seen.law) != (index.rebuilt, law)
            or (seen.chosen is None) != (chosen is None)
            or not (by_row or seen.numbering == index.numbering)
            or not (by_row or seen.truncations == table.truncations)
        ):
            seen = None
        same = seen is not None and seen.chosen is chosen and seen.version == index.version
        if same and not changed:
            assert self._sums is not None
            return self._sums
        self._seen = None  # after an interrupt, all rows are checked again
        lane = np.arange(0 if by_row else index.lanes)
        lo, hi = (np.full(len(lane), bound) for bound in index.bounds(lane))
        rows = None
        if seen is not None and changed is not None:
            if by_row:
                rows = _set_or_new(seen, index, changed, table.length)
            else:
                rows = _stale(seen, index, lo, hi, lane)
            if rows is not None and chosen is not None and chosen is not seen.chosen is not None:
                time, of_lane = _switched(seen.chosen, chosen)
                rows = np.append(rows[0], time), np.append(rows[1], of_lane)
        sums = self._sums
        if rows is None or changed is None or sums is None:
            sums = self._derive_all(table, index, law, chosen)
        else:
            self._derive(sums, table, index, law, chosen, rows, changed)
        opened = _opened(index, lo, hi, lane) if law.closed else hi
        self._seen = _Seen(
            table.log.number,
            index,
            index.rebuilt,
            index.numbering,
            law,
            index.version,
            lo,
            hi,
            chosen,
            index.indexed_until,
            table.truncations,
            opened,
        )
        return sums

    @torch.inference_mode(False)  # tensors created in inference mode cannot be changed outside it
    def _derive_all(
        self,
        table: PriorityTable,
        index: EpisodeIndex,
        law: CountLaw,
        chosen: EpisodeMasses | None,
    ) -> SumSegmentTree:
        sums, count = self._sums, table.length
        if (
            sums is None
            or (sums.capacity, sums.dtype) != (table.capacity, table.law.dtype)
            or self._eligible.device != table.device
            or self._process != os.getpid()
        ):
            sums = SumSegmentTree(table.capacity, dtype=table.law.dtype, device=table.device)
            self._sums, self._process = sums, os.getpid()
            self._eligible = torch.empty(table.capacity, dtype=torch.bool, device=table.device)
        # Rows above the count are no longer stored.
        self._eligible.fill_(False)
        sums.clear()
        if count:
            start = index.eligible_starts(law, *index.time_and_lane(np.arange(count)))
            if chosen is not None:
                start[index.element(*rows_of(chosen.data, ~chosen.chosen))] = False
            self._eligible[:count] = torch.from_numpy(start).to(table.device)
            sums.update_range(0, table.values().where(self._eligible[:count], 0.0))
        return sums

    def _derive(
        self,
        sums: SumSegmentTree,
        table: PriorityTable,
        index: EpisodeIndex,
        law: CountLaw,
        chosen: EpisodeMasses | None,
        rows: tuple[Array, Array],
        changed: list[torch.Tensor],
    ) -> None:
        time, lane = rows
        if len(time):
            element = torch.from_numpy(index.element(time, lane)).to(table.device)
            start = index.eligible_starts(law, time, lane)
            if chosen is not None:
                start &= chosen.allowed(time, lane)
            self._eligible[element] = torch.from_numpy(start).to(table.device)
            changed = [*changed, element]
        if changed:
            at = changed[0] if len(changed) == 1 else torch.cat(changed)
            sums.update(at, table.values(at).where(self._eligible[at], 0.0))


def rows_of(data: EpisodeData, among: Array) -> tuple[Array, Array]:
    """Return times and lanes of all rows of the episodes ``among``, one after another."""
    return ranges(data.first[among], data.last[among] + 1, data.lane[among])


def _switched(before: EpisodeMasses, now: EpisodeMasses) -> tuple[Array, Array]:
    """Return times and lanes of the rows of episodes whose choice has changed."""
    _, old, new = np.intersect1d(before.data.id, now.data.id, return_indices=True)
    return rows_of(now.data, new[before.chosen[old] != now.chosen[new]])


def _stale(
    seen: _Seen, index: EpisodeIndex, lo: Array, hi: Array, lane: Array
) -> tuple[Array, Array] | None:
    """Return times and lanes of rows that may have changed as starts of windows.

    None means that these rows are many.
    """
    if seen.version == index.version:
        return _NOTHING, _NOTHING
    if len(seen.hi) != len(hi) or not (hi > lo).all():
        return None
    law = seen.law
    # The newest end: rows written since, and rows that lacked later rows.
    first = seen.hi - max(law.least, -law.add) - law.past - law.open_future
    if law.closed:  # all rows of episodes that have ended since
        stored = seen.hi > lo
        newest = np.where(stored, seen.hi - 1, lo)
        ended = index.episodes_at(newest, lane)[2] != CONTINUES
        first = np.where(stored & ended, np.minimum(first, seen.opened), first)
    first = np.maximum(first, lo)
    if len(lane) == 1 and law == CountLaw.strict(law.least):
        time = np.arange(first[0], hi[0])
        return (time, np.zeros_like(time)) if len(time) * _MANY <= hi[0] - lo[0] else None
    # The oldest end, where the first rows of an episode may have been overwritten.
    until = lo
    if law.past or law.below or law.add != 1 - law.least:
        until = np.where(lo > seen.lo, np.minimum(lo + law.past + law.least + 1, first), lo)
    if law.intact:
        begin, last, _, _ = index.episodes_at(lo, lane)
        cut_now = (begin < lo) & (begin >= seen.lo)
        until = np.where(cut_now, np.maximum(until, np.minimum(last + 1, first)), until)
    count = (hi - first) + (until - lo)
    if int(count.sum()) * _MANY > int((hi - lo).sum()):
        return None
    return ranges(np.concatenate([lo, first]), np.concatenate([until, hi]), np.tile(lane, 2))


def _set_or_new(
    seen: _Seen, index: EpisodeIndex, changed: list[torch.Tensor], count: int
) -> tuple[Array, Array] | None:
    """Return times and lanes of rows whose slots have got priorities, and of rows before new ones.

    The new rows may complete windows of the rows before them. None means that these rows are many.
    """
    if seen.version == index.version:
        return _NOTHING, _NOTHING
    element = np.unique(np.concatenate([*(part.cpu().numpy() for part in changed), _NOTHING]))
    element = element[element < count]
    time, lane = index.time_and_lane(element)
    order = np.lexsort((time, lane))
    time, lane = time[order], lane[order]
    is_new = index.row_ids(element[order]) >= seen.until
    first = np.maximum(time + 1 - seen.law.least, index.streams(time, lane)[0])
    start = np.where(is_new, first, time)
    # A new row's range has no rows of that of a new row before it.
    follows = np.append(False, (lane[1:] == lane[:-1]) & is_new[:-1])[: len(lane)]
    start[follows] = np.maximum(start, np.append(0, time[:-1] + 1)[: len(time)])[follows]
    if int((time + 1 - start).sum()) * _MANY > count:
        return None
    return ranges(start, time + 1, lane)


def _opened(index: EpisodeIndex, lo: Array, hi: Array, lane: Array) -> Array:
    if not (hi > lo).all():
        return hi
    begin, _, code, _ = index.episodes_at(hi - 1, lane)
    return np.where(code == CONTINUES, np.maximum(begin, lo), hi)


_ROUNDS = 8


def drawn_distinct(
    table: PriorityTable, sums: SumSegmentTree, count: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw up to ``count`` rows without replacement; return indices and ``v``.

    If fewer rows have weight, fewer rows are returned. Each draw is from the rows that are left.
    Independent draws without their repetitions have this distribution, but take long if little
    weight is left. In that case every row left gets a key ``e / v``, with a standard exponential
    number ``e``. The rows with the lowest keys come next, in that order. The distribution is the
    same (Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir").

    Args:
        table: the table of the priorities.
        sums: a tree over ``v`` of the rows to draw from, with a positive sum.

    Cost: O(count * log N) if the draws are a small part of the weight, else O(N).
    """
    drawn = torch.empty(0, dtype=torch.int64, device=table.device)
    value = torch.empty(0, dtype=torch.float64, device=table.device)
    few = 4 * count >= table.length
    for _ in range(0 if few else _ROUNDS):
        more, its = table.draw(count, generator, False, sums)
        drawn, value = _first_of_each(torch.cat([drawn, more]), torch.cat([value, its]))
        if len(drawn) >= count:
            return drawn[:count], value[:count]
    left = sums[: table.length].to(torch.float64)
    left[drawn] = 0.0
    rest = left.nonzero()[:, 0]
    mass = left[rest]
    device = table.device if generator is None else generator.device
    uniform = torch.rand(len(rest), dtype=torch.float64, generator=generator, device=device)
    key = -torch.log1p(-uniform.to(table.device)) / mass
    order = key.argsort(stable=True)[: count - len(drawn)]
    return torch.cat([drawn, rest[order]]), torch.cat([value, mass[order]])


def _first_of_each(drawn: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first occurrence of each flat index and its value, in order."""
    found: tuple[Any, Any] = np.unique(drawn.cpu().numpy(), return_index=True)
    first = torch.from_numpy(np.sort(found[1])).to(drawn.device)
    return drawn[first], value[first]
