"""Combine the storages and writers of members, and compute their weights."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import numpy as np
import torch

from replaykit._compat import Uncompiled
from replaykit.buffer.source import UNITS, BufferHandle
from replaykit.declared import Count, Positive, decode_state, read_value, within
from replaykit.errors import NotReady
from replaykit.storages import Storage
from replaykit.transforms import Compose
from replaykit.writers import Writer

if TYPE_CHECKING:
    from replaykit.mixture.choosing import Candidates


def chosen(index: Any, count: int, what: str) -> int | list[int]:
    """Return the number of the member that an index names, or a list of numbers.

    Args:
        index: int, slice, ``...``, range, list, NumPy array or tensor. Its elements are integers
            ``[K]``, or bools, one per member. Negative integers count from the end.
        count: number of members.
        ``what``: the name of the indexed object, for errors.

    Raises:
        TypeError: the index has numbers with fractions, or is not an index.
        RuntimeError: the index has more than one dimension.
        IndexError: a member does not exist.
    """
    if index is Ellipsis:
        return list(range(count))
    if isinstance(index, slice):
        return list(range(count))[index]
    if isinstance(index, (bool, np.bool_)) or not isinstance(
        index, (int, np.integer, list, tuple, range, np.ndarray, torch.Tensor)
    ):
        raise TypeError(
            f"expected an int, slice, list or tensor of ints as the index of {what}, got {index!r}"
        )
    numbers = index.cpu() if isinstance(index, torch.Tensor) else index
    array = np.asarray(numbers)
    if array.ndim > 1:
        raise RuntimeError(
            f"expected an index of {what} of at most one dimension, got {array.ndim}"
        )
    if array.dtype == bool:
        if array.shape != (count,):
            raise IndexError(f"expected {count} bools as the index of {what}, got {len(array)}")
        return [int(number) for number in np.nonzero(array)[0]]
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"expected integers as the index of {what}, got {array.dtype}")
    if not array.ndim:
        return _member(int(array), count, what)
    return [_member(int(number), count, what) for number in array]


def _member(number: int, count: int, what: str) -> int:
    if not -count <= number < count:
        raise IndexError(f"expected a member of {what} in [{-count}, {count}), got {number}")
    return number % count


def check_parts(kind: type, parts: Sequence[Any], *also: type) -> None:
    """Raise TypeError or ValueError unless there are parts, all of these classes."""
    if not parts:
        raise ValueError(f"expected at least one {kind.__name__.lower()}, got none")
    for number, part in enumerate(parts):
        if not isinstance(part, (kind, *also)):
            raise TypeError(
                f"expected member {number} as a {kind.__name__}, got {type(part).__name__}"
            )


class MemberParts(Uncompiled):
    """Parts of several buffers, by member number. The part of a remote member is its handle."""

    def __init__(self, kind: type, parts: Sequence[Any]) -> None:
        check_parts(kind, parts, type(self), BufferHandle)
        self._parts = tuple(parts)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._parts)

    def __getitem__(self, index: Any) -> Any:
        """Return a member by number, or the parts of several members.

        If the index is a tuple, its rest indexes that member, or each of the members. For several
        members the result is then a list.
        """
        first, *rest = index if isinstance(index, tuple) else (index,)
        numbers = chosen(first, len(self), "an ensemble")
        inner = rest[0] if len(rest) == 1 else tuple(rest)
        if isinstance(numbers, int):
            return self._parts[numbers][inner] if rest else self._parts[numbers]
        if rest:
            return [self._parts[number][inner] for number in numbers]
        return self._some(numbers)

    def _some(self, numbers: list[int]) -> Any:
        return type(self)(*(self._parts[number] for number in numbers))

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._parts}"


class StorageEnsemble(MemberParts):
    """The storages of several buffers, each with the transforms of its buffer.

    It is a part of a `ReplayBufferEnsemble`, and stores no rows itself.

    Args:
        storages: the members.
        transforms: one entry per member, which is a transform, a Compose, or None.

    Raises:
        TypeError: a member is not a Storage, or there is not one transform per member.
        ValueError: there is no member.

    Example:
        >>> import torch
        >>> from replaykit import StorageEnsemble, TensorStorage
        >>> both = StorageEnsemble(
        ...     TensorStorage(torch.arange(3)), TensorStorage(torch.arange(5)),
        ...     transforms=[None, lambda x: x * 10])
        >>> len(both), len(both[1]), both.max_size
        (2, 5, 8)
    """

    def __init__(self, *storages: Any, transforms: Sequence[Any] | None = None) -> None:
        super().__init__(Storage, storages)
        given = [None] * len(storages) if transforms is None else list(transforms)
        if len(given) != len(storages):
            raise TypeError(f"expected {len(storages)} transforms, one a storage, got {len(given)}")
        self.transforms: list[Compose] = [
            one if type(one) is Compose else Compose() if one is None else Compose(one)
            for one in given
        ]

    @property
    def storages(self) -> tuple[Any, ...]:
        """The storages of the members."""
        return self._parts

    @property
    def max_size(self) -> int:
        """Capacity of all members together, in rows."""
        return sum(
            one.stats()["capacity"] if isinstance(one, BufferHandle) else one.max_size  # type: ignore[attr-defined]
            for one in self._parts
        )

    def get(self, index: Any) -> list[tuple[int, Any]]:
        """Read rows of members, through the members' transforms.

        Args:
            index: a TensorDict or mapping with the members and rows of K batches. ``buffer_ids`` is
                int64 ``[K]``, and ``index`` is ``[K, B]`` (``[K, B, ndim]``).

        Returns:
            For each batch, the number of the member and the rows.
        """
        members = torch.as_tensor(index["buffer_ids"])
        if members.ndim > 1:
            members = members.flatten(1)[:, 0]
        found = []
        for number, rows in zip(members.tolist(), index["index"], strict=True):
            member = chosen(number, len(self), "an ensemble")
            assert isinstance(member, int)
            storage, chain = self._parts[member], self.transforms[member]
            data = storage[rows] if isinstance(storage, BufferHandle) else storage.read(rows)  # type: ignore[index]
            found.append((member, chain.forward(data) if len(chain) else data))
        return found

    def _some(self, numbers: list[int]) -> StorageEnsemble:
        transforms = [self.transforms[number] for number in numbers]
        return StorageEnsemble(*(self._parts[n] for n in numbers), transforms=transforms)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Always raises RuntimeError; write to a member."""
        raise RuntimeError(
            "a StorageEnsemble stores no rows itself that it could change; use one of its members, "
            "ensemble[i]"
        )

    set = __setitem__ = clear = attach = _refuse


def check_members(state: Any, count: int) -> None:
    """Raise ValueError if a state does not have ``count`` members, by number."""
    wanted = [str(number) for number in range(count)]
    found = sorted(state, key=str) if isinstance(state, dict) else state
    if not isinstance(state, dict) or set(wanted) - set(state):
        raise ValueError(f"expected the states of members {wanted}, got {found}")


def refused(path: str) -> Any:
    """Return a method that always raises NotImplementedError, because only members do this.

    Args:
        path: the name of its class, a dot, and its name.
    """
    name = path.partition(".")[2]

    def method(self: Any, *arguments: Any, **keywords: Any) -> NoReturn:
        raise NotImplementedError(
            f"ReplayBufferEnsemble writes are disabled: {name} is for one of its members, as "
            f"ensemble[i].{name}"
        )

    method.__name__, method.__qualname__ = name, path
    method.__doc__ = "Always raises NotImplementedError."
    return method


class WriterEnsemble(MemberParts):
    """The writers of several buffers. A WriterEnsemble writes nothing itself.

    Args:
        writers: the members.

    Raises:
        TypeError: a member is not a Writer.
        ValueError: there is no member.

    Example:
        >>> from replaykit import ImmutableDatasetWriter, RoundRobinWriter, WriterEnsemble
        >>> both = WriterEnsemble(ImmutableDatasetWriter(), RoundRobinWriter())
        >>> len(both), both[1]
        (2, RoundRobinWriter(write_count=0))
        >>> both.add(1)
        Traceback (most recent call last):
        NotImplementedError: ReplayBufferEnsemble writes are disabled: add is for one of...
    """

    def __init__(self, *writers: Any) -> None:
        super().__init__(Writer, writers)

    @property
    def writers(self) -> tuple[Any, ...]:
        """The writers of the members."""
        return self._parts

    @property
    def write_count(self) -> int:
        """Number of rows that all members have written so far."""
        return sum(writer.write_count for writer in self._parts)

    add = refused("WriterEnsemble.add")
    extend = refused("WriterEnsemble.extend")
    empty = refused("WriterEnsemble.empty")


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

    def look(self, members: Candidates, rows: int) -> list[bool]:
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

    def at(self, members: Candidates, rows: int) -> Array | None:
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

    def _missing(self, members: Candidates, rows: int) -> str:
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

    def state_of(self, numbers: list[int]) -> dict[str, Any]:
        """Return the state for weights that were made with ``arguments(numbers)``."""
        since = None if self.since is None else [self.since[number] for number in numbers]
        return {**self.state_dict(), "_p": self.arguments(numbers)["p"], "_since": since}

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
