"""Draw rows of recent policies with a higher probability."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from replaykit.checkpoint import ReadLater
from replaykit.declared import vector, within
from replaykit.errors import NotEnoughData
from replaykit.keywords import checked_keywords, whole_number
from replaykit.samplers.policy_versions import VersionColumn, VersionGroups
from replaykit.samplers.sampler import Int64s, Sampler, as_drawn, made_of_saved, require_rows
from replaykit.samplers.window_measures import index_for, order_by_mass, refuse_nothing, uniform
from replaykit.storages import Storage
from replaykit.ted import unravel

Array = np.ndarray[Any, Any]

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class _VersionState:
    """The learner's version, the largest staleness, and the rows by version."""

    consumer_version: int
    max_staleness: Annotated[int, within(-1)]
    _elements: Int64s = _NONE
    _versions: Annotated[Any, vector(torch.int64, torch.float64)] = _NONE
    _counts: Int64s = _NONE

    def __post_init__(self) -> None:
        self.groups()

    def groups(self) -> VersionGroups | ReadLater[VersionGroups]:
        """Return the rows by version. Raises ValueError if the vectors contradict each other."""
        vectors = (self._elements, self._versions, self._counts)
        return made_of_saved(VersionGroups.of_state, "versions", *vectors)


_LARGE = 1e200
"""If a weight exceeds this limit, all are divided by the largest, to keep their sum finite."""

_ROUNDS = 8
"""Number of rounds of independent draws. After that, all remaining rows get a key instead."""


@dataclass(frozen=True)
class _Law:
    """The weights of versions, ``[V]``, until rows, versions or parameters change.

    ``key`` holds the parameters. They are read only once, because the learner may set them during a
    draw.
    """

    groups: VersionGroups
    key: tuple[int, int, int]
    stale: Array
    weights: Array
    counts: Array
    ends: Array
    """Running sums of the weights of all rows."""
    rows: int
    """Number of rows with a weight above 0."""


class StalenessAwareSampler(Sampler):
    """Draws rows by the number of versions between their policy and the learner.

    The staleness of a row is ``consumer_version`` minus the row's value under ``version_key``. The
    probability of a row is proportional to ``staleness_weight_fn(staleness)``. Rows staler than
    ``max_staleness`` are not drawn. Samples carry ``staleness``, float32 ``[B]``.

    If enough rows can be drawn, no row occurs twice in a batch. Each draw is then from the rows
    that are left, by the same weights. If a batch has more rows than can be drawn, its rows are
    drawn independently.

    The sampler does not notice values that are written through views of the column
    (``rb.storage.column``).

    Args:
        max_staleness: the largest staleness that is drawn; -1: no limit.
        staleness_weight_fn: function that maps stalenesses to weights. Its argument is float64
            ``[V]``, one staleness per stored version, in ascending order of versions. It returns as
            many weights, finite and not negative. The sampler calls it only after the stalenesses
            change. By default ``1 / (staleness + 1)``.
        version_key: key of a column with one number per row, ``[N]`` or ``[N, 1]``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``max_staleness`` is below -1; or, in ``sample``, weights have the wrong shape,
            are negative or are not finite.
        KeyError: in ``sample``, there is no such column.
        RuntimeError: in ``sample``, all rows are staler than ``max_staleness``, or have weight 0.

    Cost: a draw takes O(B log V) for V versions. After a change of the versions or of
    ``consumer_version`` it also takes O(V). The first draw after K rows were appended, or patched
    by ``update_if_present``, also takes O(K log K). Between two draws, this holds for at most 64
    patches, which together have no more rows than the capacity.
    A draw takes O(N) in three cases: a batch has more than a quarter of the rows that can be drawn,
    few rows have nearly all of the weight, or transforms read neighbouring rows. The first draw
    also takes O(N) after other edits of the column, a load or ``set_storage``.
    Memory: 32 to 64 bytes per row.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, StalenessAwareSampler
        >>> sampler = StalenessAwareSampler(max_staleness=1)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler)
        >>> _ = rb.extend(TensorDict({"policy_version": torch.arange(4)}, [4]))
        >>> sampler.consumer_version = 3
        >>> batch = rb.sample(2)
        >>> batch["policy_version"].sort().values, batch["staleness"].sort().values
        (tensor([2, 3]), tensor([0., 1.]))
    """

    kind = "staleness"
    reads_rows = True
    marks_draws = False
    _declared = _VersionState
    mapped_entries = ("_elements", "_versions", "_counts")

    @checked_keywords
    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        version_key: Any = "policy_version",
        *,
        replacement: bool = True,
    ) -> None:
        super().__init__(replacement=replacement)
        if staleness_weight_fn is not None and not callable(staleness_weight_fn):
            raise TypeError(f"expected a callable weight function, got {staleness_weight_fn!r}")
        self.max_staleness = max_staleness
        self.version_key = version_key
        self._weight_fn = _reciprocal if staleness_weight_fn is None else staleness_weight_fn
        self._consumer_version = 0
        self._versions = VersionColumn(unravel(version_key))
        self._law: _Law | None = None

    @property
    def info_keys(self) -> tuple[Any, ...]:
        """The info keys of all samplers, and ``staleness``."""
        return (*super().info_keys, "staleness")

    @property
    def consumer_version(self) -> int:
        """The version of the learner. Setting it costs O(1)."""
        return self._consumer_version

    @consumer_version.setter
    def consumer_version(self, value: int) -> None:
        value = whole_number("consumer_version", value)
        self._consumer_version = value

    def increment_consumer_version(self) -> None:
        """Add 1 to ``consumer_version``."""
        self._consumer_version += 1

    @property
    def max_staleness(self) -> int:
        """The largest staleness that is drawn; -1: no limit.

        Setting a value below -1 raises ValueError.
        """
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, value: int) -> None:
        most = whole_number("max_staleness", value)
        if most < -1:
            raise ValueError(f"expected max_staleness of at least 0, or -1, got {value!r}")
        self._max_staleness = most

    # -- drawing ------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draw ``batch_size`` rows; return the index, and ``staleness`` float32 ``[B]``."""
        require_rows(storage)
        with storage.lock:
            law = self._law_of(self._versions.follow(storage))
            if self.needs:
                elements = self._drawn_eligible(storage, law, batch_size)
            else:
                self._require(law)
                elements = self._drawn(law, batch_size)
            staleness = law.stale[law.groups.of(elements)]
        reported = torch.from_numpy(staleness.astype(np.float32)).to(storage.device)
        return as_drawn(torch.from_numpy(elements), storage), {"staleness": reported}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        if not len(storage):
            return False
        try:
            with storage.lock:
                law = self._law_of(self._versions.follow(storage))
                self._require(law)
                return not self.needs or bool(len(self._eligible(storage, law)[0]))
        except (KeyError, ValueError, RuntimeError):
            return False

    def _law_of(self, groups: VersionGroups) -> _Law:
        """Return the law for these groups. Cost: O(V) for V versions after a change."""
        key = groups.changes, self._consumer_version, self._max_staleness
        law = self._law
        if law is not None and law.groups is groups and law.key == key:
            return law
        _, version, most = key
        stale = np.asarray(version - groups.versions, np.float64)
        given = self._weight_fn(torch.from_numpy(stale.copy()))
        weights = _checked_weights(given, len(stale))
        if most >= 0:
            weights = np.where(stale <= most, weights, 0.0)
        if weights.max(initial=0.0) > _LARGE:
            weights = weights / weights.max()
        counts = groups.counts
        ends, rows = np.cumsum(weights * counts), int(counts[weights > 0].sum())
        self._law = law = _Law(groups, key, stale, weights, counts, ends, rows)
        return law

    def _require(self, law: _Law) -> None:
        if law.ends[-1] > 0:
            return
        _, version, most = law.key
        if most >= 0 and law.stale.min() > most:
            raise NotEnoughData(
                f"all {law.groups.length} rows are staler than max_staleness={most} with "
                f"consumer_version={version}; the youngest has version {law.groups.versions[-1]}"
            )
        raise NotEnoughData(
            f"the weight of all {law.groups.length} rows is 0 with max_staleness={most} and "
            f"consumer_version={version}"
        )

    def _drawn(self, law: _Law, count: int) -> Array:
        """Draw flat indices, int64 ``[count]``, without repetition if rows suffice."""
        if count > law.rows:
            return self._independent(law, count)
        drawn = np.zeros(0, np.int64)
        if 4 * count < law.rows:
            # Independent draws without their repetitions: each is a draw by weight from the rows
            # that are left.
            for _ in range(_ROUNDS):
                drawn = np.concatenate([drawn, self._independent(law, count)])
                drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
                if len(drawn) >= count:
                    return drawn[:count]
        elements, mass = _all_of(law)
        left = ~np.isin(elements, drawn)
        order = order_by_mass(mass[left], self.generator)[: count - len(drawn)]
        return np.concatenate([drawn, elements[left][order]])

    def _independent(self, law: _Law, count: int) -> Array:
        point, place = uniform(2 * count, self.generator).reshape(2, count)
        ends = law.ends
        which = np.searchsorted(ends, point * ends[-1], side="right")
        which = np.minimum(which, np.searchsorted(ends, ends[-1]))  # rounding, or last weights 0
        return law.groups.members(which, (place * law.counts[which]).astype(np.int64))

    # -- transforms that read neighbouring rows -----------------------------------------------

    def _eligible(self, storage: Storage, law: _Law) -> tuple[Array, Array]:
        """Return the eligible rows with weight, and their weights."""
        index = index_for(storage)
        elements, mass = _all_of(law)
        fits = index.eligible_starts(self.needs.single, *index.time_and_lane(elements))
        return elements[fits], mass[fits]

    def _drawn_eligible(self, storage: Storage, law: _Law, count: int) -> Array:
        self._require(law)
        elements, mass = self._eligible(storage, law)
        if not len(elements):
            refuse_nothing(index_for(storage), self.needs)
        if count <= len(elements):
            return np.asarray(elements[order_by_mass(mass, self.generator)[:count]])
        ends = np.cumsum(mass)
        at = np.searchsorted(ends, uniform(count, self.generator) * ends[-1], side="right")
        return np.asarray(elements[np.minimum(at, len(elements) - 1)])

    # -- notifications ------------------------------------------------------------------------

    def add(self, index: Any) -> None:
        self.mark_update(index)

    def extend(self, index: Any) -> None:
        self.mark_update(index)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Follow a write of rows immediately.

        So draws depend only on the order of writes, not on the time of updates.
        """
        if storage is None and self.owner is not None:
            storage = self.owner.storage
        if storage is None:
            return  # the next draw reads the rows from the storage
        # The rows are stored, so this method must not raise. The next draw reports errors.
        with storage.lock, contextlib.suppress(Exception):
            self._versions.follow(storage)

    def attach(self, storage: Storage) -> None:
        """Attach the sampler to its storage."""
        self._versions.forget()

    def empty(self) -> None:
        """Forget all rows, and reset ``consumer_version`` to 0."""
        super().empty()
        self._versions.forget()
        self._consumer_version = 0

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        self._versions.forget()

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the learner's version, the largest staleness, and the rows by version.

        The next draws depend on the order of these rows, which takes 8 bytes per row.
        """
        elements, versions, counts = self._versions.groups.state()
        return {
            **super().state_dict(),
            "consumer_version": self._consumer_version,
            "max_staleness": self._max_staleness,
            "_elements": torch.from_numpy(elements),
            "_versions": torch.from_numpy(versions),
            "_counts": torch.from_numpy(counts),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        If the state lacks the order of rows, later draws differ, but have the same distribution.
        """
        saved = self._declared_state(state_dict)
        groups = saved.groups()
        self.consumer_version = saved.consumer_version
        self.max_staleness = saved.max_staleness
        self._versions.load(groups)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(max_staleness={self._max_staleness}, "
            f"consumer_version={self._consumer_version})"
        )


def _reciprocal(staleness: torch.Tensor) -> torch.Tensor:
    return 1.0 / (staleness + 1.0)


def _checked_weights(given: Any, count: int) -> Array:
    shape = list(given.shape) if isinstance(given, torch.Tensor) else type(given).__name__
    if shape != [count]:
        raise ValueError(f"expected staleness_weight_fn to return weights [{count}], got {shape}")
    weights = np.asarray(given.detach().cpu().to(torch.float64).numpy())
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise ValueError(
            "expected staleness_weight_fn to return finite weights that are not negative, got "
            f"{weights.tolist()[:8]}; versions above consumer_version have negative staleness"
        )
    return weights


def _all_of(law: _Law) -> tuple[Array, Array]:
    """Return all rows with weight, as flat indices, and their weights."""
    elements, _, counts = law.groups.state()
    mass = np.repeat(law.weights, counts)
    return elements[mass > 0], mass[mass > 0]
