"""Compute the weights of an ensemble's members, which may change with steps and epochs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np
import torch

from replaykit.buffer.source import UNITS
from replaykit.declared import Count, Positive, decode_state, read_value, within
from replaykit.errors import NotReady

Array = np.ndarray[Any, Any]

SIZE = "size"
"""The value of ``p`` for weights equal to the members' numbers of rows at each draw."""

_NEVER, _FROM_START = -2, -1
"""Values of ``since`` for a member that was never ready, or ready from the start."""

_SUM = 1e-6
"""Maximum distance from 1 of the sum of weights that a ramp changes."""


def checked_weights(p: Any, count: int) -> torch.Tensor | str | None:
    """Return weights float64 ``[count]`` with sum 1, ``"size"``, or None.

    None means equal weights.

    Args:
        p: relative weights, one per member; "size"; or None.

    Raises:
        ValueError: weights are negative, NaN, infinite or all 0, or there is not one per member.
    """
    if p is None:
        return None
    if isinstance(p, str):
        if p != SIZE:
            raise ValueError(
                f"expected p as one weight a member, {SIZE!r}, a function or None, got {p!r}"
            )
        return p
    weights = torch.as_tensor(p, dtype=torch.float64, device="cpu").detach()
    if weights.shape != (count,):
        raise ValueError(
            f"expected p as {count} weights, one a member, got shape {list(weights.shape)}"
        )
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError(f"expected weights that are finite and not negative, got {p}")
    largest = weights.max()
    if not largest > 0:
        raise ValueError(f"expected a weight above 0, got {p}")
    weights = weights / largest  # the sum of very large weights would be infinite
    return weights / weights.sum()


@dataclass(frozen=True)
class Ramp:
    """Moves the weight of a member linearly to its final value, over epochs.

    The weight of a member with the final weight w is ``start + (w - start) / epochs * (e - r + 1)``
    in epoch e, between ``start`` and w. Here r is the epoch since which the member is ready. Before
    that epoch the weight is 0. Each draw divides the weights by their sum.

    Args:
        epochs: number of epochs after which a member has its final weight, at least 1.
        start: the weight before the first of these epochs, one number for all members or one per
            member. With None it is 0, but members that are ready from the start have their final
            weights at once.

    Raises:
        ValueError: ``epochs`` is not an int of at least 1, or ``start`` is negative or infinite.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, Ramp, ReplayBuffer, ReplayBufferEnsemble
        >>> offline, online = (ReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(2))
        >>> _ = offline.extend(torch.zeros(9))
        >>> mixture = ReplayBufferEnsemble(offline, online, p=[0.8, 0.2], ramp=Ramp(epochs=5))
        >>> _ = online.extend(torch.ones(9))
        >>> for epoch in (3, 4, 7):
        ...     mixture.set_epoch(epoch)
        ...     print(round(mixture.sampler.shares()[1].item(), 3))
        0.048
        0.091
        0.2
    """

    epochs: int
    start: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        read_value(Positive, self.epochs, "epochs")
        if self.start is not None:
            weight = Annotated[float, within(0)]
            read_value(weight if np.ndim(self.start) == 0 else list[weight], self.start, "start")

    def at(self, final: Array, since: Array, epoch: int) -> Array:
        """Return the weights of members in an epoch, float64 ``[members]``.

        Args:
            final: the final weights, float64 ``[members]``.
            since: the epoch since which each member is ready; -1 for the start.
        """
        start = np.where(since == _FROM_START, final, 0.0) if self.start is None else self.start
        start = np.broadcast_to(np.asarray(start, np.float64), final.shape)
        ages = epoch - np.maximum(since, 0) + 1
        weights = start + (final - start) / self.epochs * ages
        return np.clip(weights, np.minimum(start, final), np.maximum(start, final))


class Members(Protocol):
    """The members of an ensemble, as far as their weights depend on them."""

    def size(self, member: int) -> int:
        """Return the number of rows of a member."""

    def stored(self, member: int, unit: str, rows: int) -> int:
        """Return how many rows, episodes or windows a member has."""


@dataclass(frozen=True)
class _State:
    """The saved state. Its entries have defaults, because earlier releases did not save them."""

    PREFIX = "_"

    step: Count = 0
    epoch: Count = 0
    since: list[Annotated[int, within(_NEVER)]] | None = None
    scheduled: bool = False


class MemberWeights:
    """The weights of members at each draw, and the numbers that these depend on.

    Attributes:
        p: float64 ``[members]`` with sum 1, ``"size"``, a function of the step, or None.
        step: number of the next batch.
        stride: difference between the numbers of two batches. A loader with W workers has the
            stride W in each worker.
        epoch: number of the epoch.
        since: the epoch since which each member is ready; None before the first look.
    """

    def __init__(
        self,
        p: Any,
        count: int,
        ramp: Ramp | None = None,
        ready: Sequence[Any] | None = None,
    ) -> None:
        self.count = count
        if not isinstance(ramp, (Ramp, type(None))):
            raise TypeError(f"expected ramp as a Ramp or None, got {type(ramp).__name__}")
        if ramp is not None and np.ndim(ramp.start or 0) and len(ramp.start) != count:  # type: ignore[arg-type]
            raise ValueError(f"expected {count} start weights, one a member, got {ramp.start}")
        given = np.ndim(p) == 1 and len(p) == count
        if ramp is not None and given and abs(float(np.sum(np.asarray(p))) - 1) > _SUM:
            raise ValueError(f"expected weights with the sum 1 together with ramp=, got {p}")
        self.ramp, self.ready = ramp, _checked_minimums(ready, count)
        self.step, self.stride, self.epoch = 0, 1, 0
        self.since: list[int] | None = None
        self.p: Any = None
        self.set(p)

    def set(self, p: Any) -> None:
        """Replace ``p``; raise ValueError if it is invalid."""
        self.p = p if callable(p) else checked_weights(p, self.count)

    def copy(self) -> MemberWeights:
        """Return weights that change separately."""
        other = copy.copy(self)
        other.since = None if self.since is None else list(self.since)
        return other

    @property
    def timed(self) -> bool:
        """True if the weights depend on the epoch or on minimums of the members."""
        return self.ramp is not None or self.ready is not None

    @property
    def needs_sizes(self) -> bool:
        """True if the weights depend on the members' numbers of rows."""
        return self.timed or (isinstance(self.p, str) and self.p == SIZE)

    def look(self, members: Members, rows: int) -> list[bool]:
        """Return which members have their minimums, and remember since which epoch.

        Args:
            rows: number of rows of a part.
        """
        if self.since is None:
            first, since = _FROM_START, [_NEVER] * self.count
        else:
            first, since = self.epoch, self.since
        ready = [
            members.stored(number, unit, rows) >= least
            for number, (least, unit) in enumerate(self.minimums)
        ]
        pairs = zip(ready, since, strict=True)
        self.since = [first if now and at == _NEVER else at for now, at in pairs]
        return ready

    @property
    def minimums(self) -> list[tuple[int, str]]:
        """The least count and its unit, for each member."""
        return self.ready or [(1, "rows")] * self.count

    def at(self, members: Members, rows: int) -> Array | None:
        """Return the weights of the next draw, float64 ``[members]``; None if all are equal.

        Raises:
            ValueError: ``p`` is a function, and its result is invalid.
            NotReady: no member with a weight has its minimum.
        """
        p = self.p
        if callable(p):
            p = checked_weights(p(self.step), self.count)
        weights: Array | None = None
        if isinstance(p, torch.Tensor):
            weights = p.numpy()
        elif p == SIZE:
            weights = np.array([members.size(i) for i in range(self.count)], np.float64)
        if not self.timed:
            return weights
        ready = self.look(members, rows)
        final = np.ones(self.count) if weights is None else weights
        final = now = final / max(final.sum(), 1e-300)
        if self.ramp is not None:
            now = self.ramp.at(final, np.array(self.since), self.epoch)
        now = np.where(ready, now, 0.0)
        if not now.any():
            raise NotReady(f"no member of the ensemble is ready: {self._missing(members, rows)}")
        return now

    def _missing(self, members: Members, rows: int) -> str:
        return ", ".join(
            f"member {number} has {members.stored(number, unit, rows)} of {least} {unit}"
            for number, (least, unit) in enumerate(self.minimums)
        )

    def arguments(self, numbers: list[int]) -> dict[str, Any]:
        """Return the arguments for weights like these, of some of the members."""
        p, ramp, ready = self.p, self.ramp, self.ready
        if isinstance(p, torch.Tensor):
            p = p[numbers] if ramp is None else p[numbers] / p[numbers].sum()
            p = p.tolist()
        elif callable(p) and numbers != list(range(self.count)):
            p = functools.partial(_some, p, numbers, self.count)
        if ramp is not None and np.ndim(ramp.start or 0):
            ramp = Ramp(ramp.epochs, [ramp.start[number] for number in numbers])  # type: ignore[index]
        some = None if ready is None else [ready[number] for number in numbers]
        return {"p": p, "ramp": ramp, "ready": some}

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the numbers that they depend on. A function is not saved."""
        p = self.p.clone() if isinstance(self.p, torch.Tensor) else self.p
        return {
            "_p": None if callable(p) else p,
            "_scheduled": callable(p),
            "_step": self.step,
            "_epoch": self.epoch,
            "_since": self.since,
        }

    def check_state(self, state: Any) -> _State:
        """Return a saved state; raise ValueError if it is not that of such weights."""
        found = decode_state(_State, state, "the state of an ensemble's weights")
        if found.since is not None and len(found.since) != self.count:
            raise ValueError(f"expected since for {self.count} members, got {found.since}")
        if found.scheduled and not callable(self.p):
            raise ValueError(f"expected the state of weights, got that of a function, for {self.p}")
        if not found.scheduled:
            checked_weights(state.get("_p"), self.count)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of ``state_dict``. A function stays, because it was not saved."""
        found = self.check_state(state)
        if not callable(self.p):
            self.set(state["_p"])
        self.step, self.epoch = found.step, found.epoch
        self.since = None if found.since is None else list(found.since)


def _some(p: Callable[[int], Any], numbers: list[int], count: int, step: int) -> Any:
    """Return the weights of some members at a step."""
    weights = checked_weights(p(step), count)
    return weights[numbers] if isinstance(weights, torch.Tensor) else weights


def _checked_minimums(ready: Any, count: int) -> list[tuple[int, str]] | None:
    """Return a least count with its unit for each member; None if none are given.

    Raises:
        ValueError: there is not one minimum per member, or a minimum is invalid.
    """
    if ready is None:
        return None
    if not isinstance(ready, (list, tuple)) or len(ready) != count:
        raise ValueError(f"expected ready as a list of {count} minimums, one a member, got {ready}")
    found = []
    for number, one in enumerate(ready):
        least, unit = one if isinstance(one, (list, tuple)) and len(one) == 2 else (one, "rows")
        least = 1 if least is None else least
        if unit not in UNITS or type(least) is not int or least < 1:
            raise ValueError(
                f"expected ready for member {number} as None, a number of rows, or a number of at "
                f"least 1 with one of the units {UNITS}, got {one!r}"
            )
        found.append((least, unit))
    return found
