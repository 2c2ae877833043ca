"""Draws that prefer what young policies have seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replaykit._compat import as_tensor
from replaykit.checkpoint import ReadLater
from replaykit.errors import NotEnoughData
from replaykit.keywords import checked_keywords
from replaykit.samplers.policy_versions import FollowedVersions, VersionGroups
from replaykit.samplers.sampler import Sampler, as_drawn, made_of_saved, require_rows
from replaykit.samplers.window_measures import index_for, refuse_nothing, uniform
from replaykit.storages import Storage
from replaykit.ted import unravel

__all__ = ["StalenessAwareSampler"]

Array = np.ndarray[Any, Any]

_ARRAYS = {
    "_elements": (torch.int64,),
    "_versions": (torch.int64, torch.float64),
    "_counts": (torch.int64,),
}

_LARGE = 1e200
"""Weights above it are divided by the largest, so that the sum of all rows' is a number."""

_ROUNDS = 8
"""Rounds of independent draws after which all rows that are left get a key instead."""


@dataclass(frozen=True)
class _Law:
    """What draws follow from until rows, versions, or what the learner set change: ``[V]`` each.

    The learner may set its version in the middle of a draw: it is looked at once.
    """

    groups: VersionGroups
    key: tuple[int, int, int]
    stale: Array
    weights: Array
    counts: Array
    ends: Array
    """Running sums of the weights of all rows."""
    rows: int
    """How many have a weight above 0."""


class StalenessAwareSampler(Sampler):
    """Draws records by how many versions the policy that made them lies behind the learner.

    The staleness of a record is ``consumer_version`` less what it has stored under
    ``version_key``. A record is drawn with a probability proportional to
    ``staleness_weight_fn(staleness)``; those staler than ``max_staleness`` are not drawn. Batches
    of at most as many rows as can be drawn hold none twice: each is drawn from what is left by
    these weights. Larger ones are drawn independently. Samples carry ``staleness``, float32
    ``[B]``.

    Args:
        max_staleness: the largest staleness that is drawn; -1: any.
        staleness_weight_fn: from stalenesses float64 ``[V]``, those of the distinct versions that
            are stored (rising versions), to as many weights, finite and not negative; it is not
            asked again while these are the same. By default ``1 / (staleness + 1)``.
        version_key: a column of one number a row: ``[N]`` or ``[N, 1]``.

    Raises:
        TypeError: arguments of another kind. ValueError: ``max_staleness`` below -1.
        KeyError: in ``sample``: no such column. ValueError: there: weights of another shape,
            negative or not finite. RuntimeError: there: all rows are staler than ``max_staleness``,
            or have weight 0.

    Cost: nothing looks at all rows while they are written at the cursor, or patched by
    ``update_if_present`` (at most 64 times, and no more rows than there is room for, between two
    draws): O(K log K) for K rows written or patched, O(V) of V versions after a change of these or
    of ``consumer_version``, O(B log V) a draw. O(N) where a batch takes more than a quarter of the
    rows that can be drawn, or few rows hold nearly all of the weight, where transforms read the
    rows around, and at the first draw after other edits of the column, a load or ``set_storage``.
    32 to 64 bytes a row.

    Values written through views of the column (``rb.storage.column``) are not noticed.

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
    mapped_entries = tuple(_ARRAYS)

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
        self._versions = FollowedVersions(unravel(version_key))
        self._law: _Law | None = None

    @property
    def tells(self) -> tuple[Any, ...]:
        """How stale each record is."""
        return (*super().tells, "staleness")

    @property
    def consumer_version(self) -> int:
        """The version of the learner. Cost of setting it: O(1)."""
        return self._consumer_version

    @consumer_version.setter
    def consumer_version(self, value: int) -> None:
        value = _whole("consumer_version", value)
        self._settle_draws()
        self._consumer_version = value

    def increment_consumer_version(self) -> None:
        """Adds 1 to ``consumer_version``."""
        self._settle_draws()
        self._consumer_version += 1

    @property
    def max_staleness(self) -> int:
        """The largest staleness that is drawn; -1: any. ValueError where it is below."""
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, value: int) -> None:
        most = _whole("max_staleness", value)
        if most < -1:
            raise ValueError(f"expected max_staleness of at least 0, or -1, got {value!r}")
        self._max_staleness = most

    # -- drawing ------------------------------------------------------------------------------

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Draws ``batch_size`` records; returns the index, and ``staleness`` float32 ``[B]``."""
        require_rows(storage)
        with storage.lock:
            law = self._law_of(self._versions.follow(storage))
            if self.needs:
                elements = self._drawn_eligible(storage, law, batch_size)
            else:
                self._require(law)
                elements = self._drawn(law, batch_size)
            staleness = law.stale[law.groups.of(elements)]
        told = torch.from_numpy(staleness.astype(np.float32)).to(storage.device)
        return as_drawn(torch.from_numpy(elements), storage), {"staleness": told}

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
        """Cost: O(V) of V versions where something has changed."""
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
        """Draws elements, int64 ``[count]``: none twice where there are enough."""
        if count > law.rows:
            return self._independent(law, count)
        drawn = np.zeros(0, np.int64)
        if 4 * count < law.rows:
            # Independent draws of which repeated ones are dropped: each is then one of what is
            # left, by weight.
            for _ in range(_ROUNDS):
                drawn = np.concatenate([drawn, self._independent(law, count)])
                drawn = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
                if len(drawn) >= count:
                    return drawn[:count]
        elements, mass = _all_of(law)
        left = ~np.isin(elements, drawn)
        more = self._by_key(elements[left], mass[left], count - len(drawn))
        return np.concatenate([drawn, more])

    def _independent(self, law: _Law, count: int) -> Array:
        point, place = uniform(2 * count, self.generator).reshape(2, count)
        ends = law.ends
        which = np.searchsorted(ends, point * ends[-1], side="right")
        which = np.minimum(which, np.searchsorted(ends, ends[-1]))  # rounded up, or weight 0
        return law.groups.members(which, (place * law.counts[which]).astype(np.int64))

    def _by_key(self, elements: Array, mass: Array, count: int) -> Array:
        """Draws from what is left, one after another, by keys ``e / mass`` with e standard
        exponential (Efraimidis and Spirakis, 2006)."""
        key = -np.log1p(-uniform(len(elements), self.generator)) / mass
        return np.asarray(elements[np.argsort(key, kind="stable")[:count]])

    # -- where transforms read the rows around ------------------------------------------------

    def _eligible(self, storage: Storage, law: _Law) -> tuple[Array, Array]:
        """Elements with weight that have around them what transforms need, and the weights."""
        index = index_for(storage)
        elements, mass = _all_of(law)
        fits = index.eligible_starts(self.needs.single, *index.place(elements))
        return elements[fits], mass[fits]

    def _drawn_eligible(self, storage: Storage, law: _Law, count: int) -> Array:
        self._require(law)
        elements, mass = self._eligible(storage, law)
        if not len(elements):
            refuse_nothing(index_for(storage), self.needs)
        if count <= len(elements):
            return self._by_key(elements, mass, count)
        ends = np.cumsum(mass)
        at = np.searchsorted(ends, uniform(count, self.generator) * ends[-1], side="right")
        return np.asarray(elements[np.minimum(at, len(elements) - 1)])

    # -- being told ---------------------------------------------------------------------------

    def add(self, index: Any) -> None:
        self.mark_update(index)

    def extend(self, index: Any) -> None:
        self.mark_update(index)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Told that records were written; follows them at once, so that what is drawn depends on
        what was written and not on when somebody looked."""
        if storage is None and self.owner is not None:
            storage = self.owner.storage
        if storage is None:
            return  # the next draw finds out
        with storage.lock:
            self._versions.note(as_tensor(index), storage)
            # Nothing is raised for rows that are stored already; a draw says what is missing.
            with contextlib.suppress(Exception):
                self._versions.follow(storage)

    def attach(self, storage: Storage) -> None:
        """Takes the storage to draw from."""
        self._versions.forget()

    def empty(self) -> None:
        """Forgets all records, and begins again with version 0."""
        super().empty()
        self._versions.forget()
        self._consumer_version = 0

    def moved(self, rows: torch.Tensor, storage: Storage) -> None:
        self._versions.forget()

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the learner's version, the bound, and the order in which rows of a version lie
        (8 bytes a row), on which the next draws depend."""
        elements, versions, counts = self._versions.groups.state()
        return {
            **super().state_dict(),
            "consumer_version": self._consumer_version,
            "max_staleness": self._max_staleness,
            "_elements": torch.from_numpy(elements),
            "_versions": torch.from_numpy(versions),
            "_counts": torch.from_numpy(counts),
        }

    def check_state(self, state_dict: dict[str, Any], storage: Storage) -> None:
        super().check_state(state_dict, storage)
        _checked_groups(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state over; one without the order of rows gives other draws of the same law."""
        super().load_state_dict(state_dict)
        groups = _checked_groups(state_dict)
        self.consumer_version = state_dict["consumer_version"]
        self.max_staleness = state_dict["max_staleness"]
        self._versions.take(groups)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(max_staleness={self._max_staleness}, "
            f"consumer_version={self._consumer_version})"
        )


def _reciprocal(staleness: torch.Tensor) -> torch.Tensor:
    return 1.0 / (staleness + 1.0)


def _whole(name: str, value: object) -> int:
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"expected {name} as an int, got {value!r}")
    return int(value.__index__())


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
    """All elements with weight, and their weights."""
    elements, _, counts = law.groups.state()
    mass = np.repeat(law.weights, counts)
    return elements[mass > 0], mass[mass > 0]


def _checked_groups(state: dict[str, Any]) -> VersionGroups | ReadLater[VersionGroups]:
    for name in ("consumer_version", "max_staleness"):
        if type(state.get(name)) is not int or (name == "max_staleness" and state[name] < -1):
            raise ValueError(f"expected {name} as an int, got {state.get(name)!r}")
    return made_of_saved(state, _ARRAYS, VersionGroups.of_state, "versions", optional=True)
