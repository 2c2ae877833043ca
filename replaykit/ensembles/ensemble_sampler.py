"""Choose the members that an ensemble samples from, and their shares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
import torch

from replaykit._compat import TensorDict
from replaykit.ensembles.ensemble_storage import StorageEnsemble, check_members, chosen, rows_in
from replaykit.errors import NotEnoughData
from replaykit.registry import entry_of
from replaykit.samplers import Sampler, SampleUnit, Transition
from replaykit.samplers.window_measures import integers, uniform
from replaykit.storages import Storage

__all__ = [
    "COUNTS",
    "SIZE",
    "Choice",
    "Members",
    "SamplerEnsemble",
    "SamplerPairs",
    "checked_weights",
    "exact",
    "filled",
    "laid_out",
    "multinomial",
    "naming_member",
    "requests",
]


class SamplerPairs:
    """Samplers and their storages as the members among which to choose."""

    def __init__(self, samplers: Sequence[Sampler], storage: Storage) -> None:
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"expected a StorageEnsemble, got {type(storage).__name__}")
        if len(storage) != len(samplers):
            raise ValueError(f"expected {len(samplers)} storages, got {len(storage)}")
        self.samplers, self.storages = samplers, storage.storages

    def size(self, member: int) -> int:
        """Return the number of rows of a member."""
        return rows_in(self.storages[member])

    def ready(self, member: int, rows: int) -> bool:
        """Return whether a member can return ``rows`` rows now."""
        sampler, storage = self.samplers[member], self.storages[member]
        if sampler.consumes:
            return sampler.left(storage) >= rows  # fewer rows would not fill a part
        return sampler.can_sample(storage, rows)

    def refuse(self, member: int, rows: int) -> NoReturn:
        """Raise the error of a member that cannot return its rows."""
        self.draw(member, rows)  # raises the member's error
        raise NotEnoughData(f"member {member}: expected {rows} rows, but it cannot return them now")

    def draw(self, member: int, rows: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Draw with the sampler of a member; its errors name the member."""
        try:
            index, info = self.samplers[member].sample(self.storages[member], rows)
        except Exception as error:
            raise naming_member(error, member) from error
        return torch.stack(index, -1) if isinstance(index, tuple) else index, info


def naming_member(error: Exception, member: int | str) -> Exception:
    """Return an error of the same class that names the member.

    If the class does not allow this, the function returns the error itself.
    """
    text = error.args[0] if error.args else ""
    if len(error.args) > 1 or not isinstance(text, str):
        return error
    name = f"member {member}" if isinstance(member, int) else member
    try:
        return type(error)(f"{name}: {text}")
    except Exception:
        return error


def laid_out(
    members: Sequence[int],
    rows: int,
    drawn: dict[int, list[tuple[torch.Tensor, dict[Any, Any]]]],
) -> tuple[Any, dict[Any, Any]]:
    """Return the draws of members part by part, in the order of the choice.

    Args:
        members: the member of each part.
        rows: number of rows per part.
        drawn: draws by member, each an index and its info. Together a member's draws have the rows
            of its parts.
    """
    lanes = {draws[0][0].shape[1:] for draws in drawn.values()}
    if len(lanes) > 1:
        raise RuntimeError(
            "expected members whose rows have indices of one shape; only a ReplayBufferEnsemble "
            "puts members with and without lanes into one batch"
        )
    shared = set.intersection(*(set(info) for draws in drawn.values() for _, info in draws))
    shared = {
        key
        for key in shared
        if all(_of_rows(info[key], len(index)) for draws in drawn.values() for index, info in draws)
    }
    pieces: dict[int, list[Any]] = {}
    for member, draws in drawn.items():
        index = torch.cat([index for index, _ in draws])
        infos = {key: torch.cat([info[key] for _, info in draws]) for key in shared}
        parts = [*index.split(rows)]
        by_part: dict[Any, Any] = {key: value.split(rows) for key, value in infos.items()}
        pieces[member] = [
            (part, {key: value[i] for key, value in by_part.items()})
            for i, part in enumerate(parts)
        ]
    turn = {member: iter(parts) for member, parts in pieces.items()}
    laid = [next(turn[member]) for member in members]
    index = torch.stack([part for part, _ in laid])
    ids = torch.tensor(members, dtype=torch.int64, device=index.device)
    info = {key: torch.stack([each[key] for _, each in laid]) for key in shared}
    return TensorDict({"index": index, "buffer_ids": ids}, [len(laid)]), info


def _of_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows


T = TypeVar("T")


def requests(sampler: Sampler, unit: SampleUnit | None, times: int, rows: int) -> list[int]:
    """Return the number of rows to request from a member in each draw.

    A sampler that draws any number of single rows draws all rows in one draw. A sampler of windows,
    or a custom sampler, makes one draw per part, because its windows may depend on the count of
    requested rows.
    """
    entry = entry_of(type(sampler))
    single = entry is not None and entry.single_rows and (unit is None or type(unit) is Transition)
    if single and not getattr(sampler, "drop_last", False):
        return [times * rows]
    return [rows] * times


def filled(
    wanted: int, draw: Callable[[int], tuple[T, int, bool]], sampler: Sampler | None
) -> list[T]:
    """Return draws that together have the wanted number of rows.

    A draw may be short if it ends a pass over the member. The next pass then provides the rest.

    Args:
        draw: a function that draws a number of rows. It returns the draw, its number of rows, and
            whether it ended a pass.
        sampler: the sampler of the member; None for an ensemble.

    Raises:
        ValueError: a draw is short for another reason, or the missing rows are not a whole number
            of slices.
    """
    draws: list[T] = []
    left = wanted
    while left:
        drawn, rows, ended = draw(left)
        draws.append(drawn)
        left -= rows
        if left > 0 and not (ended and rows):
            raise ValueError(
                f"expected {wanted} rows, got {wanted - left}: windows of different lengths do not "
                "fill a part of a batch; use strict ones, or pad_output=True"
            )
        if left > 0 and _by_number(sampler):
            raise ValueError(
                f"expected {wanted} rows, got {wanted - left} at the end of a pass, and with "
                "num_slices= the rest is not a whole number of slices; use slice_len="
            )
        if left < 0:
            raise ValueError(f"expected {wanted} rows, got {wanted - left}")
    return draws


def _by_number(sampler: Sampler | None) -> bool:
    slicing = getattr(sampler, "_slicing", None)
    return slicing is not None and slicing.size.num_slices is not None


Array = np.ndarray[Any, Any]

SIZE = "size"
"""The value of ``p`` for weights equal to the members' numbers of rows at each draw."""

COUNTS = ("multinomial", "exact")

_ROUNDING = 1e-9
"""Maximum rounding error by which a share may be below a whole number."""


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
            raise ValueError(f"expected p as one weight a member, {SIZE!r} or None, got {p!r}")
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


def multinomial(weights: Array | None, draws: int, count: int, generator: Any) -> Array:
    """Draw members independently, int64 ``[draws]``; never a member of weight 0.

    Args:
        weights: not negative, with a sum above 0; None for equal weights.
        count: number of members.
    """
    if weights is None:
        return integers(count, draws, generator)
    return _at(weights, uniform(draws, generator))


def exact(weights: Array | None, draws: int, count: int, generator: Any) -> Array:
    """Draw each member ``draws * weight / sum`` times, rounded down or up.

    Rounding down leaves some draws over, which systematic sampling distributes. This method places
    points at equal distances on the cumulative sum of the remainders, from one uniform random
    offset. The member at each point gets one of the remaining draws. On average, each member is
    thus drawn in proportion to its weight. Without remaining draws, no random number is used.

    Returns:
        Numbers of members in ascending order, int64 ``[draws]``.
    """
    share = np.full(count, 1.0 / count) if weights is None else weights / weights.sum()
    quota = share * draws
    times = np.floor(quota + _ROUNDING).astype(np.int64)
    left = draws - int(times.sum())
    if left > 0:
        rest = np.maximum(quota - times, 0.0)
        points = (np.arange(left) + uniform(1, generator)) / left
        np.add.at(times, _at(rest, points), 1)
    return np.repeat(np.arange(count), times)


def _at(weights: Array, points: Array) -> Array:
    """Return the members at points in [0, 1), as fractions of the sum of weights."""
    ends = np.cumsum(weights)
    # A product may be rounded up to the sum. So the result is at most the last member with a
    # weight.
    last = int(np.nonzero(weights)[0][-1])
    return np.minimum(np.searchsorted(ends, points * ends[-1], side="right"), last)


def require_any(weights: Array) -> None:
    """Raise NotEnoughData if no member has a positive weight."""
    if not weights.any():
        raise NotEnoughData("no member of the ensemble can be drawn: none has rows and a weight")


UNREADY = ("raise", "skip")


class Choice(NamedTuple):
    """The member of each part of a batch, and the number of rows per part.

    ``possible``: the members that could have been chosen.
    """

    members: list[int]
    rows: int
    possible: frozenset[int]


class Members(Protocol):
    """The members among which to choose, with the data that the choice needs."""

    def size(self, member: int) -> int:
        """Return the number of rows of a member."""

    def ready(self, member: int, rows: int) -> bool:
        """Return whether a member can return ``rows`` rows now."""

    def refuse(self, member: int, rows: int) -> NoReturn:
        """Raise the error of a member that cannot return its rows."""


class SamplerEnsemble(Sampler):
    """A sampler that chooses members for each batch. The members draw the rows.

    A batch of B rows has ``num_buffer_sampled`` parts. Each part has ``B // num_buffer_sampled``
    rows of one member.

    Args:
        samplers: the members.
        p: relative weights, one per member. With ``"size"``, a weight is the number of rows of the
            member at the draw. None means equal weights. May be set at any time, also by a
            scheduler.
        sample_from_all: every member has one part, in the order of the members.
        num_buffer_sampled: number of parts; by default the number of members.
        counts: with ``"multinomial"``, the default, the members of the parts are drawn
            independently, with replacement. With ``"exact"``, each member has ``num_buffer_sampled
            * p`` parts. The number is rounded down or up at random, so that the average share is
            ``p``. Parts of one member are adjacent.
        unready: the treatment of members with a positive weight that cannot return their rows now.
            ``"raise"`` raises the error of such a member, even if it would not be chosen.
            ``"skip"`` treats its weight as 0.

    Raises:
        TypeError: a member is not a Sampler.
        ValueError: there is no member, or an option has an invalid value. Also if weights are
            negative, NaN, infinite or all 0, or if there is not one per member.
        RuntimeError: ``p``, ``counts`` or ``unready="skip"`` together with ``sample_from_all``.

    Cost: a few Python steps for each chosen member, and the cost of its sampler.

    Example:
        >>> import torch
        >>> from replaykit import (LazyTensorStorage, RandomSampler, ReplayBuffer,
        ...                        SamplerEnsemble, StorageEnsemble, TensorStorage)
        >>> storages = StorageEnsemble(TensorStorage(torch.arange(5)),
        ...                            TensorStorage(torch.arange(50)))
        >>> sampler = SamplerEnsemble(RandomSampler(), RandomSampler(), p=[3, 1],
        ...                           num_buffer_sampled=4, counts="exact")
        >>> index, _ = sampler.sample(storages, 8)
        >>> index["buffer_ids"], index["index"].shape
        (tensor([0, 0, 0, 1]), torch.Size([4, 2]))
    """

    kind = "ensemble"

    def __init__(
        self,
        *samplers: Sampler,
        p: Any = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        counts: str | None = None,
        unready: str = "raise",
    ) -> None:
        if not samplers:
            raise ValueError("expected at least one sampler, got none")
        for number, sampler in enumerate(samplers):
            if not isinstance(sampler, Sampler):
                raise TypeError(
                    f"expected member {number} as a Sampler, got {type(sampler).__name__}"
                )
        super().__init__()
        self._samplers = samplers
        self._buffers: tuple[Any, ...] | None = None
        self._ended: frozenset[int] = frozenset()
        for name, value, known in (
            ("counts", counts, (None, *COUNTS)),
            ("unready", unready, UNREADY),
        ):
            if value not in known:
                raise ValueError(f"expected {name} as one of {known}, got {value!r}")
        if sample_from_all and (p is not None or counts is not None or unready != "raise"):
            raise RuntimeError(
                "expected p=, counts= or unready= for members that are chosen, or "
                "sample_from_all=True, which takes each once; got both"
            )
        self._sample_from_all = bool(sample_from_all)
        self._counts, self._unready = counts or COUNTS[0], unready
        self._parts: int | None = None
        self.num_buffer_sampled = num_buffer_sampled
        self._p = checked_weights(p, len(samplers))

    def attach_members(self, buffers: Sequence[Any]) -> None:
        """Use the current samplers of these buffers as the members."""
        self._buffers = tuple(buffers)

    # -- options --------------------------------------------------------------------------------

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        """The samplers of the members."""
        if self._buffers is None:
            return self._samplers
        return tuple(buffer.sampler for buffer in self._buffers)

    @property
    def p(self) -> Any:
        """Weights of the members, float64 ``[members]`` with sum 1, ``"size"`` or None.

        None means equal weights. Only an assignment raises; nothing has changed then.

        Raises:
            ValueError: the weights are invalid.
            RuntimeError: weights are given with ``sample_from_all``.
        """
        return self._p.clone() if isinstance(self._p, torch.Tensor) else self._p

    @p.setter
    def p(self, value: Any) -> None:
        if value is not None and self._sample_from_all:
            raise RuntimeError("expected no p with sample_from_all=True, which takes each once")
        self._p = checked_weights(value, len(self))

    @property
    def sample_from_all(self) -> bool:
        """True if every member has one part of each batch."""
        return self._sample_from_all

    @property
    def counts(self) -> str:
        """The law that turns weights into numbers of parts."""
        return self._counts

    @property
    def unready(self) -> str:
        """The treatment of members that cannot return their rows."""
        return self._unready

    @property
    def num_buffer_sampled(self) -> int:
        """Number of parts of a batch."""
        return len(self) if self._parts is None else self._parts

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"expected num_buffer_sampled as an int of at least 1, got {value!r}")
        if value is not None and self._sample_from_all and value != len(self):
            raise ValueError(
                f"expected num_buffer_sampled={len(self)} with sample_from_all=True, got {value}"
            )
        self._parts = value

    # -- drawing --------------------------------------------------------------------------------

    def choose(
        self, batch_size: int, members: Members, generator: torch.Generator | None
    ) -> Choice:
        """Choose the member of each part of a batch.

        Raises:
            ValueError: the number of parts does not divide the batch size.
            NotEnoughData: no member can be chosen.
            The error of a member that cannot return its rows.
        """
        parts, count = self.num_buffer_sampled, len(self)
        if batch_size % parts:
            raise ValueError(
                f"The batch size must be divisible by num_buffer_sampled={parts}, got {batch_size}"
            )
        rows = batch_size // parts
        if self._sample_from_all:
            self._require(list(range(count)), rows, members)
            return Choice(list(range(count)), rows, frozenset(range(count)))
        weights, possible = self._chances(rows, members)
        if self._unready == "raise":
            self._require(possible, rows, members)
        law = exact if self._counts == "exact" else multinomial
        found = law(weights, parts, count, generator).tolist()
        return Choice(found, rows, frozenset(possible))

    def _chances(
        self, rows: int, members: Members
    ) -> tuple[np.ndarray[Any, Any] | None, list[int]]:
        """Return the weights of members, and the members with a weight above 0.

        The weights are float64 ``[members]``; None for equal weights.
        """
        weights: np.ndarray[Any, Any] | None = None
        if isinstance(self._p, torch.Tensor):
            weights = self._p.numpy()
        elif self._p == SIZE:
            weights = np.array([members.size(i) for i in range(len(self))], np.float64)
        possible = list(range(len(self))) if weights is None else np.nonzero(weights)[0].tolist()
        if self._unready == "skip":
            ready = [member for member in possible if members.ready(member, rows)]
            if len(ready) < len(possible):
                left = np.zeros(len(self))
                left[ready] = 1.0 if weights is None else weights[ready]
                weights, possible = left, ready
        if weights is not None:
            require_any(weights)
        return weights, possible

    def _require(self, possible: Sequence[int], rows: int, members: Members) -> None:
        for member in possible:
            if not members.ready(member, rows):
                members.refuse(member, rows)

    def can_choose(self, batch_size: int, members: Members) -> bool:
        """Return whether ``choose`` would succeed and the members could then draw."""
        parts = self.num_buffer_sampled
        if batch_size % parts:
            return False
        rows = batch_size // parts
        try:
            possible = list(range(len(self)))
            if not self._sample_from_all:
                _, possible = self._chances(rows, members)
        except NotEnoughData:
            return False
        return all(members.ready(member, rows) for member in possible)

    def mark_ended(self, ended: set[int], possible: frozenset[int]) -> bool:
        """Record members whose pass has ended; return whether the ensemble's pass ends.

        It ends when every member that can be chosen has ended a pass since the ensemble's last pass
        ended.
        """
        self._ended |= ended
        self._ran_out = bool(ended) and self._ended >= possible
        if self._ran_out:
            self._ended = frozenset()
        return self._ran_out

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Choose members and draw rows with their samplers.

        Returns:
            Two results. The first is a TensorDict for ``StorageEnsemble.get``. It has
            ``buffer_ids``, int64 ``[K]`` for K parts, and ``index`` ``[K, B]`` (``[K, B, ndim]``).
            The second is the info that all members of the batch have in common, ``[K, B, ...]``.

        Raises:
            TypeError: the storage is not a StorageEnsemble.
            ValueError: the storage has another number of members; also as for ``choose``.
            RuntimeError: a batch has members with and without lanes.
        """
        members = SamplerPairs(self.samplers, storage)
        choice = self.choose(batch_size, members, self.generator)
        drawn: dict[int, list[tuple[torch.Tensor, dict[Any, Any]]]] = {}
        ended = set()
        for member in sorted(set(choice.members)):
            sampler, times = members.samplers[member], choice.members.count(member)
            if self.generator is not None:
                sampler.generator = self.generator

            def draw(rows: int, member: int = member) -> tuple[Any, int, bool]:
                index, info = members.draw(member, rows)
                return (index, info), len(index), members.samplers[member].ran_out

            found = []
            for rows in requests(sampler, None, times, choice.rows):
                for index, info in filled(rows, draw, sampler):
                    found.append((index, info))
                    if sampler.ran_out:
                        ended.add(member)
            drawn[member] = found
        self.mark_ended(ended, choice.possible)
        return laid_out(choice.members, choice.rows, drawn)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether ``sample`` would succeed now.

        It would succeed if every member that can be chosen is ready.
        """
        return self.can_choose(batch_size, SamplerPairs(self.samplers, storage))

    # -- members --------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Return a member by number, or a SamplerEnsemble of several members."""
        numbers = chosen(index, len(self), "an ensemble")
        samplers = self.samplers
        if isinstance(numbers, int):
            return samplers[numbers]
        return self.of(numbers, [samplers[number] for number in numbers])

    def of(self, numbers: list[int], samplers: Sequence[Sampler]) -> SamplerEnsemble:
        """Return an ensemble of some of the members, with their weights.

        Raises:
            ValueError: none of these members has a positive weight.
        """
        p = self._p[numbers] if isinstance(self._p, torch.Tensor) else self._p
        return SamplerEnsemble(
            *samplers,
            p=p,
            sample_from_all=self._sample_from_all,
            num_buffer_sampled=None if self._sample_from_all else self._parts,
            counts=None if self._sample_from_all else self._counts,
            unready=self._unready,
        )

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._samplers if self._buffers is None else self._buffers)

    def empty(self) -> None:
        """Follow the removal of all rows, also in the members."""
        super().empty()
        self._ended = frozenset()
        for sampler in self.samplers:
            sampler.empty()

    def alone(self) -> SamplerEnsemble:
        """Return a copy without members. ``attach_members`` then sets them."""
        other = copy.copy(self)
        other._samplers, other._buffers = (), ()
        return other

    # -- state ----------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """Return the state of the choice of members, without the members' states."""
        return {
            "_kind": self.kind,
            "_p": self.p,
            "_ended": sorted(self._ended),
            "_ran_out": self._ran_out,
        }

    def check_own_state(self, state_dict: Any) -> None:
        """Check the result of ``own_state`` before it is loaded.

        Raises:
            ValueError: the state has another number of members, or another way to choose them.
        """
        super().check_state(state_dict, None)  # type: ignore[arg-type]
        checked_weights(state_dict.get("_p"), len(self))
        if state_dict.get("_p") is not None and self._sample_from_all:
            raise ValueError("expected the state of members that are all sampled, got weights")
        ended, ran_out = state_dict.get("_ended"), state_dict.get("_ran_out")
        known = range(len(self))
        if not isinstance(ended, list) or any(i not in known for i in ended):
            raise ValueError(f"expected members of {len(self)} that ended a pass, got {ended!r}")
        if type(ran_out) is not bool:
            raise ValueError(f"expected ran_out as a bool, got {ran_out!r}")

    def load_own_state(self, state_dict: dict[str, Any]) -> None:
        """Load a checked result of ``own_state``."""
        self._p = checked_weights(state_dict["_p"], len(self))
        self._ended, self._ran_out = frozenset(state_dict["_ended"]), state_dict["_ran_out"]

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the members' states, without generators."""
        states = [sampler.state_dict() for sampler in self.samplers]
        return {**self.own_state(), **{str(i): state for i, state in enumerate(states)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict``.

        Raises:
            ValueError: the state has another number of members, or members of other kinds.
        """
        check_members(state_dict, len(self))
        self.check_own_state(state_dict)
        for number, sampler in enumerate(self.samplers):
            state = state_dict[str(number)]
            if isinstance(state, dict) and "_kind" in state and state["_kind"] != sampler.kind:
                raise ValueError(
                    f"member {number}: expected the state of a {sampler.kind!r} sampler, got "
                    f"{state['_kind']!r}"
                )
        for number, sampler in enumerate(self.samplers):
            sampler.load_state_dict(state_dict[str(number)])
        self.load_own_state(state_dict)

    def __repr__(self) -> str:
        return f"SamplerEnsemble(samplers={self.samplers}, p={self.p})"
