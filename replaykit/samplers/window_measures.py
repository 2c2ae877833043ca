"""Draw rows and windows by a measure, among those that are eligible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from replaykit.episodes import EPISODES, ROWS, WINDOWS, CountLaw, EpisodeIndex, Found, Needs
from replaykit.errors import NotEnoughData
from replaykit.storages import Storage
from replaykit.storages.column_storage import with_episodes


def index_for(storage: Storage) -> EpisodeIndex:
    """Return the storage's episode index, up to date.

    Raises:
        RuntimeError: the storage has no episode index.
    """
    need = ", which transforms that read neighbouring rows need"
    return with_episodes(storage, need).episodes


def eligible_records(storage: Storage, needs: Needs) -> Eligible:
    """Return the rows that are eligible for the transforms. Cost: O(lanes)."""
    return Eligible(index_for(storage), needs)


class Eligible:
    """Eligible rows by number, ordered by lane and time.

    The object is valid until the next write.

    Attributes:
        count: number of eligible rows.
        as_of: the episode index, its version, and the needs. Equal values mean the same rows.
    """

    def __init__(self, index: EpisodeIndex, needs: Needs) -> None:
        self._index, self._law, self._needs = index, needs.single, needs
        self.count = index.total(self._law, WINDOWS)
        self.as_of = index, index.version, needs

    def elements(self, number: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return the flat indices, int64 ``[K]``, of rows by number in ``[0, count)``."""
        return torch.from_numpy(self._index.rows(self._law, number))

    def first_of(self, elements: torch.Tensor, count: int) -> np.ndarray[Any, Any]:
        """Find the first ``count`` eligible rows among the stored rows ``elements``.

        Returns:
            Their positions in ``elements``, int64, ascending; fewer if fewer rows are eligible.

        Cost: O(rows checked). These are at most twice the rows up to the last row found.
        """
        found, at, size = [np.empty(0, np.int64)], 0, count
        while count > 0 and at < len(elements):
            some = elements[at : at + size].cpu().numpy()
            fits = self._index.eligible_starts(self._law, *self._index.time_and_lane(some))
            place = at + np.nonzero(fits)[0][:count]
            found.append(place)
            count, at, size = count - len(place), at + size, 2 * size
        return np.concatenate(found)

    def require(self) -> int:
        """Return the number of rows. Raises NotEnoughData if it is 0."""
        if not self.count:
            refuse_nothing(self._index, self._needs)
        return self.count


def refuse_nothing(index: EpisodeIndex, needs: Needs) -> None:
    """Raise NotEnoughData, with the number of rows and the needs of the transforms."""
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
    if needs.future:
        words.append(f"{needs.future} rows of its episode after it")
    if needs.closed:
        words.append("an episode that has ended")
    if needs.intact:
        words.append("an episode that is stored from its reset on")
    return ", and ".join(words)


Array = np.ndarray[Any, Any]


class EpisodeOrder:
    """The episodes of an index that have a window under a law, by lane, then by time.

    The object is valid until the index changes.

    Attributes:
        per_lane: number of these episodes in each lane, int64 ``[lanes]``.
        ends: running sum of ``per_lane``.
        count: sum of ``per_lane``.
        masses: the object that chose the episodes; None for all episodes.
    """

    masses: Any = None

    def __init__(self, index: EpisodeIndex, law: CountLaw) -> None:
        self.index, self.law = index, law
        self.per_lane = index.totals(law, EPISODES)
        self.ends = np.cumsum(self.per_lane)
        self.count = int(self.ends[-1]) if len(self.ends) else 0

    def find(self, number: Array) -> Found:
        """Return the windows of episodes by number, int64 ``[K]`` in ``[0, count)``."""
        return self.index.find(self.law, EPISODES, number)

    def first_with(self, lane: Array, holds: Callable[[Found, Array], Array]) -> Array:
        """Return the first episode of each lane for which ``holds`` is true.

        If a lane has no such episode, the result is the number after the lane's last episode. Cost:
        O(log E) array lookups, each for all K lanes.

        Args:
            holds: gets episodes, and the places of their lanes in ``lane``; returns bools. It is
                true for all episodes of a lane that come after one for which it is true.
        """
        high = self.ends[lane].copy()
        low = high - self.per_lane[lane]
        while True:
            open_ = np.nonzero(low < high)[0]
            if not len(open_):
                return low
            middle = (low[open_] + high[open_]) // 2
            later = holds(self.find(middle), open_)
            high[open_[later]] = middle[later]
            low[open_[~later]] = middle[~later] + 1

    def of(self, time: Array, lane: Array) -> Array:
        """Return the numbers of the episodes of stored rows, int64 ``[K]``.

        The number is -1 if the episode has no window, or if the row precedes its windows.
        """
        number = self.first_with(lane, lambda found, at: found.base > time[at]) - 1
        known = number >= self.ends[lane] - self.per_lane[lane]
        found = self.find(number[known])
        begins = self.index.begins(time[known], lane[known])
        known[known] = begins == self.index.begins(found.base, found.lane)
        return np.where(known, number, -1)


class Anchors:
    """The windows of an index that a law counts, with a measure on them.

    The object is valid until the index changes. Windows have numbers ``0 .. count - 1``, in the
    order of lanes, and in each lane in the order of time.

    Args:
        index: the episodes.
        law: the law of the number of their windows.
        newest: number of windows per lane to include, the newest of the lane; None for all windows.

    Attributes:
        per_lane: number of windows of every lane, int64 ``[lanes]``.
        count: sum of ``per_lane``.
        version: the version of the index.

    Cost: O(lanes) to create the object, and one search among episodes for every window. With
    ``newest``, ``PerTrajectory`` and ``PerTransition`` take O(newest * lanes).
    """

    uniform = False
    """True if all windows are equally likely."""

    def __init__(self, index: EpisodeIndex, law: CountLaw, newest: int | None = None) -> None:
        self.index, self.law, self.newest, self.version = index, law, newest, index.version
        stored = index.totals(law, WINDOWS)
        self.per_lane = stored if newest is None else np.minimum(stored, newest)
        self.count = int(self.per_lane.sum())
        self._ends = np.cumsum(self.per_lane)
        # Differences between window numbers in the index and in this object, by lane.
        self._shift = None if newest is None else np.cumsum(stored) - self._ends

    def numbered(self, number: Array) -> Found:
        """Return windows by number, int64 ``[K]`` in ``[0, count)``."""
        if self._shift is not None:
            number = number + self._shift[np.searchsorted(self._ends, number, side="right")]
        return self.index.find(self.law, WINDOWS, number)

    def at(self, point: Array) -> Found:
        """Return the windows at points float64 ``[K]`` in [0, 1) of the distribution."""
        raise NotImplementedError

    def mass(self, found: Found) -> Array:
        """Return the probabilities of windows up to a common factor, float64 ``[K]``."""
        raise NotImplementedError

    def _by_mass(self, point: Array) -> Found:
        """Do the same as ``at``, for few windows: find all windows and add their masses."""
        found = self.numbered(np.arange(self.count))
        new = np.ones(self.count, bool)
        new[1:] = (np.diff(found.lane) != 0) | (np.diff(found.base) != 0)
        episode = np.cumsum(new) - 1
        mass = self.mass(found._replace(count=np.bincount(episode)[episode]))
        upto = np.cumsum(mass)
        at = np.searchsorted(upto, point * upto[-1], side="right")
        return self.numbered(np.minimum(at, self.count - 1))


class PerWindow(Anchors):
    """All W windows are equally likely: ``P(a) = 1 / W``."""

    uniform = True

    def at(self, point: Array) -> Found:
        return self.numbered(floor_below(point * self.count, self.count))

    def mass(self, found: Found) -> Array:
        return np.ones(len(found.base))


class PerTrajectory(Anchors):
    """All J' episodes that have windows are equally likely, and so are their windows.

    ``P(a) = 1 / J' * 1 / (windows of j)`` for a window of episode j.
    """

    def at(self, point: Array) -> Found:
        if self.newest is not None:
            return self._by_mass(point)
        episodes = int(self.index.totals(self.law, EPISODES).sum())
        scaled = point * episodes
        number = floor_below(scaled, episodes)
        found = self.index.find(self.law, EPISODES, number)
        return found._replace(rest=floor_below((scaled - number) * found.count, found.count))

    def mass(self, found: Found) -> Array:
        return 1.0 / found.count


class PerTransition(Anchors):
    """Episodes have weights by their rows; their windows are equally likely.

    ``P(a) = n_j / sum n * 1 / w_j`` for a window of episode j with n_j rows and w_j windows.
    Episodes without a window are left out.
    """

    def at(self, point: Array) -> Found:
        if self.newest is not None:
            return self._by_mass(point)
        rows = int(self.index.totals(self.law, ROWS).sum())
        scaled = point * rows
        number = floor_below(scaled, rows)
        found = self.index.find(self.law, ROWS, number)
        part = (found.rest + (scaled - number)) / self._stored(found)
        return found._replace(rest=floor_below(part * found.count, found.count))

    def mass(self, found: Found) -> Array:
        return self._stored(found) / found.count

    def _stored(self, found: Found) -> Array:
        first, last = self.index.spans(found.base, found.lane)
        return np.asarray(last - first + 1)


class PerLane(Anchors):
    """All E' lanes that have windows are equally likely, and so are their windows.

    ``P(a) = 1 / E' * 1 / w_e`` for a window of lane e with w_e windows.
    """

    def __init__(self, index: EpisodeIndex, law: CountLaw, newest: int | None = None) -> None:
        super().__init__(index, law, newest)
        self.lanes = np.nonzero(self.per_lane)[0]
        """The lanes that have a window."""

    def at(self, point: Array) -> Found:
        scaled = point * len(self.lanes)
        number = floor_below(scaled, len(self.lanes))
        return self.in_lane(self.lanes[number], scaled - number)

    def in_lane(self, lane: Array, point: Array) -> Found:
        """Return windows of given lanes, int64 ``[K]``, at points in [0, 1)."""
        count = self.per_lane[lane]
        number = self._ends[lane] - count + floor_below(point * count, count)
        return self.numbered(number)

    def mass(self, found: Found) -> Array:
        return 1.0 / self.per_lane[found.lane]


MEASURES: dict[str, type[Anchors]] = {
    "window": PerWindow,
    "trajectory": PerTrajectory,
    "lane": PerLane,
    "transition": PerTransition,
}


def floor_below(value: Array, limit: Any) -> Array:
    """Round numbers in ``[0, limit]`` down to integers below ``limit``.

    The upper bound is included because rounded floats may equal ``limit``.
    """
    return np.minimum(value.astype(np.int64), limit - 1)


def ranges(start: Array, end: Array, lane: Array) -> tuple[Array, Array]:
    """Return all times of the ranges ``[start, end)``, and their lanes."""
    count = np.maximum(end - start, 0)
    before = np.cumsum(count) - count
    time = np.arange(int(count.sum())) + np.repeat(start - before, count)
    return time, np.repeat(lane, count)


_CPU = torch.device("cpu")

DRAWS = ("iid", "stratified", "without_replacement", "sequential", "round_robin")


def uniform(count: int, generator: torch.Generator | None) -> Array:
    """Draw float64 ``[count]`` from [0, 1). None uses torch's global generator."""
    if generator is not None and generator.device != _CPU:
        drawn = torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)
        return np.asarray(drawn.cpu().numpy())
    found = np.empty(count)
    torch.from_numpy(found).uniform_(generator=generator)
    return found


def integers(limit: int, count: int, generator: torch.Generator | None) -> Array:
    """Draw int64 ``[count]`` uniformly from ``[0, limit)``."""
    if generator is not None and generator.device != _CPU:
        drawn = torch.randint(limit, (count,), generator=generator, device=generator.device)
        return np.asarray(drawn.cpu().numpy())
    found = np.empty(count, np.int64)
    torch.from_numpy(found).random_(0, limit, generator=generator)
    return found


def permutation(count: int, generator: torch.Generator | None) -> Array:
    """Return ``0 .. count - 1`` in random order, int64."""
    device = "cpu" if generator is None else generator.device
    return np.asarray(torch.randperm(count, generator=generator, device=device).cpu().numpy())


def order_by_mass(mass: Array, generator: torch.Generator | None) -> Array:
    """Return the order of draws by mass without replacement, as places int64 ``[K]``.

    The keys ``e / mass``, with standard exponential numbers ``e``, have this order (Efraimidis and
    Spirakis, 2006).
    """
    return np.argsort(-np.log1p(-uniform(len(mass), generator)) / mass, kind="stable")


def iid(anchors: Anchors, count: int, generator: torch.Generator | None) -> Found:
    """Draw windows independently, with replacement."""
    if anchors.uniform:
        return anchors.numbered(integers(anchors.count, count, generator))
    return anchors.at(uniform(count, generator))


def stratified(anchors: Anchors, count: int, generator: torch.Generator | None) -> Found:
    """Draw one window in each of ``count`` parts of equal mass, in order.

    With ``PerLane``, all lanes get the same number of draws. The remaining draws go to distinct
    lanes chosen at random. The lanes alternate in the batch.
    """
    if isinstance(anchors, PerLane):
        return _stratified_lanes(anchors, count, generator)
    return anchors.at((np.arange(count) + uniform(count, generator)) / count)


def _stratified_lanes(anchors: PerLane, count: int, generator: torch.Generator | None) -> Found:
    rounds, rest = divmod(count, len(anchors.lanes))
    chosen = np.sort(permutation(len(anchors.lanes), generator)[:rest])
    # Positions of lanes in ``lanes``. The i-th of a lane's m draws is in the i-th of m parts.
    turn = np.tile(np.arange(len(anchors.lanes)), rounds)
    draws = np.full(len(anchors.lanes), rounds)
    draws[chosen] += 1
    lane = np.concatenate([turn, chosen])
    part = np.arange(count) // len(anchors.lanes)
    point = (part + uniform(count, generator)) / draws[lane]
    return anchors.in_lane(anchors.lanes[lane], point)


def without_replacement(anchors: Anchors, count: int, generator: torch.Generator | None) -> Found:
    """Draw windows without replacement; ``count`` is at most the number of windows.

    Repeated windows are dropped and replaced by further draws. This would take long after most of
    the mass is drawn. In that case the windows left follow by ``order_by_mass``. Cost: O(count), or
    O(windows) with that order.
    """
    few = 4 * count >= anchors.count
    if anchors.uniform and few:
        return anchors.numbered(permutation(anchors.count, generator)[:count])
    drawn, tries = no_windows(), 0
    while len(drawn.base) < count and not few:
        need = count - len(drawn.base)
        drawn = _joined(drawn, iid(anchors, 2 * need if tries else need, generator))
        tries += 1
        few = tries >= 8
    if len(drawn.base) < count:
        everything = anchors.numbered(np.arange(anchors.count))
        order = order_by_mass(anchors.mass(everything), generator)
        drawn = _joined(drawn, Found(*(field[order] for field in everything)))
    return Found(*(field[:count] for field in drawn))


def no_windows() -> Found:
    nothing = np.zeros(0, np.int64)
    return Found(nothing, nothing, nothing, nothing, nothing)


def _joined(drawn: Found, more: Found) -> Found:
    """Return the windows of both in order, each only at its first occurrence."""
    both = Found(*(np.concatenate(pair) for pair in zip(drawn, more, strict=True)))
    keys = np.stack([both.lane, both.base, both.rest], 1)
    first = np.sort(np.unique(keys, axis=0, return_index=True)[1])
    return Found(*(field[first] for field in both))
