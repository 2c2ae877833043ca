"""Weigh whole episodes in draws of windows: by predicates, and by how often they were drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from replaykit import native
from replaykit.episodes import CountLaw, EpisodeIndex, Found, Head
from replaykit.episodes.boundaries import CONTINUES
from replaykit.errors import EmptyDistributionError
from replaykit.keywords import as_number, one_of
from replaykit.priorities import SumSegmentTree
from replaykit.samplers.window_measures import Anchors, EpisodeOrder, floor_below, ranges, uniform
from replaykit.storages import Storage
from replaykit.storages.episode_tags import EpisodeData, EpisodeTags

Array = np.ndarray[Any, Any]
Predicate = Callable[[EpisodeData], Any]

_ROOM = 1024
"""Number of episodes that can be added before the masses are made again, and a quarter more."""

_BASES = ("window", "trajectory", "lane", "transition")


class Coverage:
    """A measure that prefers windows of episodes that were rarely drawn.

    An episode j has the mass ``b_j * (1 + c_j) ** -alpha``, and its windows are equally likely.
    ``b_j`` is its mass under ``base``, and ``c_j`` counts the windows drawn from it so far. The
    counts belong to the storage, so all samplers with a ``Coverage`` over it share them. They are
    saved, and vanish with the episode. Draws that are not delivered do not count. Processes that
    share a storage count apart, and a recovered storage begins with 0.

    Args:
        alpha: strength of the preference, at least 0. With 0, only ``base`` counts.
        base: the measure without the preference; see ``SliceSampler(measure=)``.
        live: if True, each draw follows the counts. If ``False``, a draw uses the counts before
            the last change of the stored episodes.

    Cost: O(K log J) for K windows of J episodes. The first draw after a write also takes O(rows
    written + lanes), or O(J) with ``base="lane"`` or ``live=False``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import Coverage, LazyTensorStorage, ReplayBuffer, SliceSampler
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=2,
        ...                   sampler=SliceSampler(slice_len=2, measure=Coverage(alpha=50.0)))
        >>> time = torch.arange(20)
        >>> _ = rb.extend(TensorDict({"time": time, "next": {"done": time % 5 == 4}}, [20]))
        >>> sorted(int(rb.sample()["time"][0]) // 5 for _ in range(4))
        [0, 1, 2, 3]
    """

    def __init__(self, alpha: float = 1.0, base: str = "window", live: bool = True) -> None:
        self.alpha = as_number("alpha", alpha, finite=True)
        if self.alpha < 0:
            raise ValueError(f"expected alpha as a number of at least 0, got {alpha!r}")
        self.base = one_of("base", base, _BASES)
        self.live = bool(live)

    def __repr__(self) -> str:
        return f"Coverage(alpha={self.alpha:g}, base={self.base!r}, live={self.live})"


class EpisodeMasses(Anchors):
    """A measure that gives each episode a mass, and equal shares of it to its windows.

    The object is valid until the index or a tag changes, unless ``follow_episodes`` follows the
    index. Counts of draws may change. Episodes have numbers in the order of their ids, so that new
    episodes come last. Lost episodes keep their numbers, without windows.

    Args:
        tags: the values of the episodes.
        base: the mass of an episode, as a measure's name.
        where: the predicate that episodes have to satisfy; None for all episodes.
        coverage: the preference for episodes that were rarely drawn, or None.

    Attributes:
        data: the episodes when the object was made.
        tags: the values of the episodes.
        chosen: bool ``[J]``, the episodes of ``data`` that have windows and satisfy the predicate.
        age: the order of the ids of ``data``, as an index.

    Cost: O(J) to create the object; O(K log J) for a draw.
    """

    def __init__(
        self,
        index: EpisodeIndex,
        law: CountLaw,
        tags: EpisodeTags,
        base: str,
        where: Predicate | None = None,
        coverage: Coverage | None = None,
    ) -> None:
        self.index, self.law = index, law
        self.data = data = EpisodeData(index, tags)
        self.tags, self._base, self._coverage = tags, base, coverage
        # True if the mass of an episode depends on that episode alone.
        self._alone = where is None and base != "lane" and (coverage is None or coverage.live)
        used = self._used = len(data)
        room = max(used + (used // 4 + _ROOM if self._alone else 0), 1)
        self._ids = np.full(room, np.iinfo(np.int64).max)
        # Facts of an episode that a draw needs lie side by side, since each place in memory costs a
        # cache miss: lane, base, rows, windows, id, place in the columns of the tags.
        self._facts = np.zeros((room, 6), np.int64)
        self._mass = np.zeros(room)
        self._layout = -1
        self.per_lane = np.zeros(index.lanes, np.int64)
        # Number of the windows before and in each episode, once a draw needs them.
        self._upto: Array | None = None
        # Numbers of the episodes of the last draw, and their facts.
        self._drawn = self._drawn_facts = np.zeros(0, np.int64)
        self._tree = SumSegmentTree(room, dtype=torch.float64)

        # ``data`` is in the order of lanes, then of time. Placed rows may have later ids than the
        # rows after them, so that the oldest episode of a lane has not the lowest id.
        self._alone &= bool((np.diff(data.id)[np.diff(data.lane) == 0] > 0).all())
        order = self.age = np.argsort(data.id, kind="stable")
        self._ids[:used] = data.id[order]
        may = True if where is None else _mask(where, data)[order]
        columns = (data.lane, data.first, data.last, data.code, data.head)
        lane, first, last, code, head = (column[order] for column in columns)
        self._set_episodes(slice(0, used), lane, first, last, code, head, may)
        self.chosen = np.empty(used, bool)
        self.chosen[order] = self._facts[:used, 3] > 0
        if base == "lane":
            self._mass[:used] /= np.maximum(self.per_lane, 1)[self._facts[:used, 0]]
        self._look()
        self._front = self.numbers_at(self._lo, np.arange(index.lanes))
        self._read_masses()

    def _look(self) -> None:
        """Remember the bounds of the streams, for ``follow_episodes``."""
        index, lanes = self.index, np.arange(self.index.lanes)
        self._lo, self._hi = (np.full(len(lanes), bound) for bound in index.bounds(lanes))
        self._as_of = index.rebuilt, index.numbering

    def _set_episodes(
        self, at: Any, lane: Array, first: Array, last: Array, code: Array, head: Array, may: Any
    ) -> None:
        """Set the facts and masses of distinct episodes; those that ``may`` not be drawn have 0."""
        length = last + 1 - first
        reset, is_open = head == int(Head.RESET), code == CONTINUES
        windows, rows, skip = self.law.counts(length, reset, is_open)
        windows = np.where(may, windows, 0)
        self._add_windows(lane, windows - self._facts[at, 3])
        for column, values in enumerate((lane, first + skip, rows, windows, self._ids[at])):
            self._facts[at, column] = values
        mass = windows
        if self._base in ("trajectory", "transition"):
            mass = np.where(windows > 0, length if self._base == "transition" else 1, 0)
        self._mass[at] = mass

    def _add_windows(self, lane: Array, more: Array) -> None:
        """Count windows that were added or lost in lanes."""
        self.per_lane += np.bincount(lane, more, len(self.per_lane)).astype(np.int64)
        self.count, self._upto = int(self.per_lane.sum()), None

    def _read_masses(self) -> None:
        """Set all masses, with the counts of now."""
        self._tree.update_range(0, torch.from_numpy(self._weighed(slice(0, self._used))))
        if self._coverage is not None:
            self._seen = self.tags.drawn

    def _weighed(self, at: Any) -> Array:
        """Return the masses of episodes, with the counts of now."""
        mass = self._mass[at]
        if self._coverage is None:
            return mass
        ids, tags = self._ids[at], self.tags
        counts = tags.draws(ids) if self._coverage.live else tags.counted(ids, self.index)
        weight = 1.0 + counts
        native.core.power(weight, -self._coverage.alpha)  # as ``count_draw`` does
        return np.asarray(mass * weight)

    def follow(self) -> None:
        """Follow counts that changed since the last draw."""
        coverage = self._coverage
        if coverage is not None and coverage.live and self._seen != self.tags.drawn:
            self._read_masses()

    def follow_episodes(self) -> bool:
        """Follow writes and cuts. If other episodes may have changed, return False.

        Only the oldest episode of a lane, and those with rows from its newest row on, can change.
        Cost: O(rows written + lost episodes + lanes).
        """
        index = self.index
        if not self._alone or self._as_of != (index.rebuilt, index.numbering):
            return False
        self._as_of = -1, -1  # after an interrupt, the object is made again
        newest, lanes = self._hi - 1, np.arange(index.lanes)
        lo, hi = (np.full(len(lanes), bound) for bound in index.bounds(lanes))
        first = np.maximum(newest, lo)
        time, lane = ranges(np.append(lo, first), np.append(lo + 1, hi), np.tile(lanes, 2))
        begin, last, code, head = index.episodes_at(time, lane)
        ids, one = np.unique(index.ids(time, lane), return_index=True)
        at, used = self._ids.searchsorted(ids), self._used
        new = np.flatnonzero(at == used)
        self._used += len(new)
        if self._used > len(self._ids):
            return False
        at[new] += np.arange(len(new))
        self._ids[used : self._used] = ids[new]
        if (self._ids[at] != ids).any():
            return False
        lane, begin, last, code, head = (part[one] for part in (lane, begin, last, code, head))
        self._set_episodes(at, lane, np.maximum(begin, lo[lane]), last, code, head, True)
        if self._coverage is not None:
            self._facts[at, 5] = self.tags.places(ids, index)
        lost = self._lose(self.numbers_at(lo, lanes))
        changed = np.append(lost, at)
        self._tree.update(torch.from_numpy(changed), torch.from_numpy(self._weighed(changed)))
        self._look()
        return True

    def _lose(self, front: Array) -> Array:
        """Take the windows of episodes before the oldest ones of all lanes; return their numbers.

        ``front`` has the numbers of the oldest episodes, int64 ``[lanes]``.
        """
        moved = front > self._front
        if not moved.any():
            return front[:0]
        low, high = int(self._front[moved].min()), int(front[moved].max())
        facts = self._facts[low:high]
        lost = low + np.flatnonzero((facts[:, 3] > 0) & (np.arange(low, high) < front[facts[:, 0]]))
        self._add_windows(self._facts[lost, 0], -self._facts[lost, 3])
        self._facts[lost, 3], self._mass[lost], self._front = 0, 0.0, front
        return lost

    def count_draw(self) -> Array:
        """Count the last draw; return the ids of its episodes, int64 ``[K]``."""
        assert self._coverage is not None
        tags = self.tags
        if self._layout != tags.layout:
            alive = np.flatnonzero(self._facts[:, 3])
            self._facts[alive, 5] = tags.places(self._ids[alive], self.index)
            self._layout = tags.layout
            self._read_facts(self._drawn)
        known, at = self._seen == tags.drawn, self._drawn
        ids, places, view = self._drawn_facts[4], self._drawn_facts[5], self._tree.native_view
        if known and self._coverage.live and view is not None:
            view.count(at, places, tags.draws_by_place(), self._mass, -self._coverage.alpha)
            self._seen = tags.drawn = tags.drawn + 1
        else:
            tags.count_draws(places, 1)
        return ids

    # -- the measure ----------------------------------------------------------------------------

    def windows(self, episode: Array, rest: Array) -> Found:
        """Return windows of episodes, given by their numbers."""
        lane, base, rows, count = self._read_facts(episode)[:4]
        return Found(lane, base, rows, count, rest)

    def _read_facts(self, episode: Array) -> Array:
        """Return the facts of episodes that are drawn, int64 ``[6, K]``."""
        self._drawn, self._drawn_facts = episode, self._facts.take(episode, 0).T.copy()
        return self._drawn_facts

    def numbered(self, number: Array) -> Found:
        if self._upto is None:
            self._upto = np.cumsum(self._facts[:, 3])
        episode = np.searchsorted(self._upto, number, side="right")
        return self.windows(episode, number - self._upto[episode] + self._facts[episode, 3])

    def at(self, point: Array) -> Found:
        x = torch.from_numpy(point * self._tree.total)
        found, mass = self._tree.find(x)
        part = (x - self._tree.reduce(torch.zeros_like(found), found)) / mass
        lane, base, rows, count = self._read_facts(found.numpy())[:4]
        rest = floor_below(part.clamp(0.0, 1.0).numpy() * count, count)
        return Found(lane, base, rows, count, rest)

    def in_turn(self, count: int, after: int | None) -> tuple[Found, int, int]:
        """Return the first windows of episodes in the order of age, from the id ``after`` on.

        Every episode with a window must have the mass 1. The oldest episode follows the newest.

        Returns:
            The windows, how often the oldest episode followed, and the id of the last episode.
        """
        passed = 0 if after is None else self._ids.searchsorted(after, side="right")
        begin, every = int(self._tree.reduce(0, passed)), int(self._tree.total)
        turn = begin + np.arange(count)
        found, _ = self._tree.find(torch.from_numpy(turn % every + 0.5))
        windows = self.windows(found.numpy(), np.zeros(count, np.int64))
        return windows, int(turn[-1]) // every, int(self._drawn_facts[4, -1])

    def rows(
        self, count: int, length: int, generator: torch.Generator | None
    ) -> tuple[Array, Array] | None:
        """Draw windows of ``length`` rows; return their elements, and the window of each.

        The result is None if the core cannot do this in one call.
        """
        view, index = self._tree.native_view, self.index
        if view is None or not index.in_ring:
            return None
        found, rows = np.empty((7, count), np.int64), np.empty((2, count * length), np.int64)
        points = uniform(2 * count, generator)
        if not view.draw_windows(points, self._facts, found, rows, index.slots, index.lanes):
            raise EmptyDistributionError("expected an episode of positive mass")
        self._drawn, self._drawn_facts = found[0], found[1:]
        return rows[0], rows[1]

    def mass(self, found: Found) -> Array:
        episode = self.episodes_of(found)
        return self._tree[torch.from_numpy(episode)].numpy() / found.count

    def episodes_of(self, found: Found) -> Array:
        """Return the numbers of the episodes of windows."""
        number = self.numbers_at(found.base, found.lane)
        self._read_facts(number)
        return number

    def numbers_at(self, time: Array, lane: Array) -> Array:
        """Return the numbers of the episodes of stored rows."""
        return np.asarray(self._ids.searchsorted(self.index.ids(time, lane)))

    def allowed(self, time: Array, lane: Array) -> Array:
        """Return whether the episodes of stored rows have windows, bool ``[K]``."""
        return np.asarray(self._facts[self.numbers_at(time, lane), 3] > 0)


class WeighedEpisodes:
    """Keeps the masses of the stored episodes for one sampler.

    Args:
        where, base, coverage: as for ``EpisodeMasses``.
    """

    def __init__(
        self, where: Predicate | None, base: str = "window", coverage: Coverage | None = None
    ) -> None:
        self.where, self.base, self.coverage = where, base, coverage
        self._known: EpisodeMasses | None = None
        self._as_of = (0, 0)
        self._order: _ChosenOrder | None = None

    def of(self, storage: Storage, index: EpisodeIndex, law: CountLaw) -> EpisodeMasses:
        """Return the masses of now.

        With a predicate, the same object means that episodes and tags are the same.
        """
        known, version = self._known, index.version
        # A load makes another index, so these are the tags of the storage.
        fits = known is not None and known.index is index and known.law == law
        if (
            known is None
            or not fits
            or self._as_of[1] != self._tagged(known.tags)
            or (self._as_of[0] != version and not known.follow_episodes())
        ):
            known = self._known = self._new(index, law, self._tags(storage, index))
        self._as_of = version, self._tagged(known.tags)
        known.follow()
        return known

    def in_order(self, masses: EpisodeMasses) -> EpisodeOrder:
        """Return the ``chosen`` episodes of the masses of now, by lane, then by time."""
        if self._order is None or self._order.masses is not masses:
            self._order = _ChosenOrder(masses)
        return self._order

    def _tags(self, storage: Storage, index: EpisodeIndex) -> EpisodeTags:
        return episode_tags(storage, index)

    def _new(self, index: EpisodeIndex, law: CountLaw, tags: EpisodeTags) -> EpisodeMasses:
        return EpisodeMasses(index, law, tags, self.base, self.where, self.coverage)

    def knows(self, masses: EpisodeMasses | None) -> bool:
        """Return whether these are the newest masses, and no tag has changed since."""
        return (
            masses is not None
            and self._known is masses
            and self._as_of[1] == self._tagged(masses.tags)
        )

    def _tagged(self, tags: EpisodeTags) -> int:
        """Return a number that changes with the tags that the masses depend on."""
        return 0 if self.where is None else tags.number

    def forget(self) -> None:
        """Forget the masses, since the storage or its state is another one."""
        self._known = self._order = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None, "_order": None}


class _ChosenOrder(EpisodeOrder):
    """The episodes that have a window and satisfy a predicate, by lane, then by time."""

    def __init__(self, masses: EpisodeMasses) -> None:
        self.index, self.law, self.masses = masses.index, masses.law, masses
        number = np.empty(len(masses.data), np.int64)
        number[masses.age] = np.arange(len(number))
        self._number = number[masses.chosen]
        self.per_lane = np.bincount(masses.data.lane[masses.chosen], minlength=masses.index.lanes)
        self.ends = np.cumsum(self.per_lane)
        self.count = len(self._number)

    def find(self, number: Array) -> Found:
        return self.masses.windows(self._number[number], np.zeros(len(number), np.int64))


def chosen_order(
    weighed: WeighedEpisodes | None, storage: Storage, index: EpisodeIndex, law: CountLaw
) -> EpisodeOrder:
    """Return the episodes with a window, in order: all of them, or those of a predicate."""
    if weighed is None:
        return EpisodeOrder(index, law)
    return weighed.in_order(weighed.of(storage, index, law))


def weighed_episodes(
    where: Any,
    cross: Any,
    base: str = "window",
    coverage: Coverage | None = None,
    draw: str = "iid",
    recent: Any = None,
) -> WeighedEpisodes | None:
    """Return the masses of episodes for a sampler's arguments; None if windows are enough.

    Raises:
        TypeError, ValueError: an argument is invalid, or arguments exclude each other.
    """
    if where is not None and not callable(where):
        raise TypeError(f"expected where= as a function of the episodes, got {where!r}")
    given = {
        "where=": where is not None,
        "Coverage": coverage is not None,
        "draw='round_robin'": draw == "round_robin",
    }
    name = next((name for name in given if given[name]), None)
    if name is None:
        return None
    if cross:
        raise ValueError(f"{name} needs windows inside episodes, got cross=True")
    if recent is not None:
        raise ValueError(f"{name} needs a draw without recent=")
    if coverage is not None and draw in ("sequential", "round_robin"):
        raise ValueError(f"expected draw={draw!r} without a measure, got a Coverage")
    # In a round, all episodes have the same mass.
    return WeighedEpisodes(where, "trajectory" if draw == "round_robin" else base, coverage)


def _mask(where: Predicate, data: EpisodeData) -> Array:
    """Return the result of a predicate, bool ``[J]``. ValueError for anything else."""
    found = np.asarray(where(data))
    if found.dtype != bool or found.size != len(data) or found.shape[:1] != (len(data),):
        raise ValueError(
            f"expected where= to return a bool for each of {len(data)} episodes, got {found.dtype} "
            f"{list(found.shape)}"
        )
    return found.reshape(-1)


def episode_tags(storage: Storage, index: EpisodeIndex) -> EpisodeTags:
    """Return the values of a storage's episodes.

    Raises:
        ValueError: the index is not that of the storage, because the sampler has other boundaries.
    """
    indexes: Any = storage.indexes  # type: ignore[attr-defined]
    if index is not indexes.of():
        raise ValueError(
            "expected the episodes of the storage for where=, Coverage and draw='round_robin'; got "
            "end_key, end_keys, traj_key, ends or trajectories, which define others"
        )
    tags: EpisodeTags = indexes.tags
    return tags


class DrawCounter:
    """Counts draws of episodes, and takes back those that are not delivered.

    Attributes:
        number: number of draws so far.
    """

    def __init__(self) -> None:
        self.number = 0
        self._made: deque[tuple[int, Array, torch.Tensor]] = deque(maxlen=1024)

    def made(self, ids: Array, index: torch.Tensor) -> None:
        """Record a draw that was counted: the ids of its episodes, and its rows."""
        self._made.append((self.number, ids, index))
        self.number += 1

    def undo(self, since: int, storage: Storage, episodes: EpisodeIndex) -> None:
        """Take back all draws from the number ``since`` on."""
        tags = episode_tags(storage, episodes)
        while self._made and self._made[-1][0] >= since:
            tags.count_draws(tags.places(self._made.pop()[1], episodes), -1)

    def undo_rows(
        self, drawn: list[torch.Tensor], storage: Storage, episodes: EpisodeIndex
    ) -> None:
        """Take back the draws that returned these rows."""
        tags = episode_tags(storage, episodes)
        for index in drawn:
            for entry in reversed(self._made):
                if torch.equal(entry[2].cpu(), index.cpu()):
                    tags.count_draws(tags.places(entry[1], episodes), -1)
                    self._made.remove(entry)
                    break
