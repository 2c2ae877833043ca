"""Choose the members that an ensemble samples from, and in what share."""

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
    """Samplers with a storage each, as members of a choice."""

    def __init__(self, samplers: Sequence[Sampler], storage: Storage) -> None:
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"expected a StorageEnsemble, got {type(storage).__name__}")
        if len(storage) != len(samplers):
            raise ValueError(f"expected {len(samplers)} storages, got {len(storage)}")
        self.samplers, self.storages = samplers, storage.storages

    def size(self, member: int) -> int:
        """Rows that a member holds."""
        return rows_in(self.storages[member])

    def ready(self, member: int, rows: int) -> bool:
        """Whether a member can give that many rows now."""
        sampler, storage = self.samplers[member], self.storages[member]
        if sampler.consumes:
            return sampler.left(storage) >= rows  # what it gives less of fills no part
        return sampler.can_sample(storage, rows)

    def refuse(self, member: int, rows: int) -> NoReturn:
        """Raises the error of a member that cannot."""
        self.draw(member, rows)  # raises why
        raise NotEnoughData(f"member {member}: expected {rows} rows, and it cannot give them now")

    def draw(self, member: int, rows: int) -> tuple[torch.Tensor, dict[Any, Any]]:
        """Has a member's sampler draw; its errors name the member."""
        try:
            index, info = self.samplers[member].sample(self.storages[member], rows)
        except Exception as error:
            raise naming_member(error, member) from error
        return torch.stack(index, -1) if isinstance(index, tuple) else index, info


def naming_member(error: Exception, member: int | str) -> Exception:
    """An error of the same class that says which member raised it, or itself where it cannot."""
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
    """Returns the draws of members part by part, in the order in which these were chosen.

    Args:
        members: the member of each part.
        rows: of a part.
        drawn: draws by member, index and info; together they have the rows of its parts.
    """
    lanes = {draws[0][0].shape[1:] for draws in drawn.values()}
    if len(lanes) > 1:
        raise RuntimeError(
            "expected members whose rows have indices of one shape; with lanes and without they go "
            "into one batch of a ReplayBufferEnsemble only"
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
        told = {key: torch.cat([info[key] for _, info in draws]) for key in shared}
        parts = [*index.split(rows)]
        tolds: dict[Any, Any] = {key: value.split(rows) for key, value in told.items()}
        pieces[member] = [
            (part, {key: value[i] for key, value in tolds.items()}) for i, part in enumerate(parts)
        ]
    turn = {member: iter(parts) for member, parts in pieces.items()}
    laid = [next(turn[member]) for member in members]
    index = torch.stack([part for part, _ in laid])
    ids = torch.tensor(members, dtype=torch.int64, device=index.device)
    info = {key: torch.stack([told[key] for _, told in laid]) for key in shared}
    return TensorDict({"index": index, "buffer_ids": ids}, [len(laid)]), info


def _of_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows


T = TypeVar("T")


def requests(sampler: Sampler, unit: SampleUnit | None, times: int, rows: int) -> list[int]:
    """Returns how many rows to ask a member for, one entry a draw.

    All at once where it draws single rows, whatever their number. What draws windows, or is one's
    own, is asked for the rows of one part of the batch at a time: the length of windows may depend
    on it.
    """
    entry = entry_of(type(sampler))
    single = entry is not None and entry.single_rows and (unit is None or type(unit) is Transition)
    if single and not getattr(sampler, "drop_last", False):
        return [times * rows]
    return [rows] * times


def filled(
    wanted: int, draw: Callable[[int], tuple[T, int, bool]], sampler: Sampler | None
) -> list[T]:
    """Returns draws that have the wanted number of rows together.

    A draw may be short where it ends a pass over the member; the next pass then gives the rest.

    Args:
        draw: draws that many rows; returns the draw, how many it has, whether it ended a pass.
        sampler: of the member, where it is one.

    Raises:
        ValueError: a draw that is short for another reason, or whose rest is no whole slices.
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
                "num_slices= the rest is no whole slices; use slice_len="
            )
        if left < 0:
            raise ValueError(f"expected {wanted} rows, got {wanted - left}")
    return draws


def _by_number(sampler: Sampler | None) -> bool:
    slicing = getattr(sampler, "_slicing", None)
    return slicing is not None and slicing.size.num_slices is not None


Array = np.ndarray[Any, Any]

SIZE = "size"
"""Weights by the number of rows that the members hold at each draw."""

COUNTS = ("multinomial", "exact")

_ROUNDING = 1e-9
"""What a share of a batch may differ from a whole number and still be one: 0.8 * 5 is not 4."""


def checked_weights(p: Any, count: int) -> torch.Tensor | str | None:
    """Returns weights float64 ``[count]`` with sum 1, ``"size"``, or None for equal ones.

    Args:
        p: relative weights, one a member; "size"; or None.

    Raises:
        ValueError: negative, NaN or infinite ones, nothing but zeros, or not one a member.
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
    weights = weights / largest  # a sum of the largest numbers there are is infinite
    return weights / weights.sum()


def multinomial(weights: Array | None, draws: int, count: int, generator: Any) -> Array:
    """Draws members independently: int64 ``[draws]``; one of weight 0 is never among them.

    Args:
        weights: not negative, with a sum above 0; None: equal ones.
        count: number of members.
    """
    if weights is None:
        return integers(count, draws, generator)
    return _at(weights, uniform(draws, generator))


def exact(weights: Array | None, draws: int, count: int, generator: Any) -> Array:
    """Draws each member ``draws * weight / sum`` times, rounded down or up: int64 ``[draws]``.

    What is left after rounding down goes to members at points that lie at equal distances on the
    rests, from one uniform number (systematic sampling), so that each comes up as often, on
    average, as its weight says. Nothing is drawn where nothing is left. The numbers rise.
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
    """The members at points of [0, 1) of the sum of weights."""
    ends = np.cumsum(weights)
    # The last with a weight ends at the sum, whatever the product is rounded to.
    last = int(np.nonzero(weights)[0][-1])
    return np.minimum(np.searchsorted(ends, points * ends[-1], side="right"), last)


def require_any(weights: Array) -> None:
    """Raises NotEnoughData where no member has a weight."""
    if not weights.any():
        raise NotEnoughData("no member of the ensemble can be drawn: none has a row, or weight")


UNREADY = ("raise", "skip")


class Choice(NamedTuple):
    """Of which members the parts of a batch are, and how many rows a part has.

    ``possible``: the members that could have been chosen.
    """

    members: list[int]
    rows: int
    possible: frozenset[int]


class Members(Protocol):
    """What a choice depends on."""

    def size(self, member: int) -> int:
        """Rows that a member holds."""

    def ready(self, member: int, rows: int) -> bool:
        """Whether a member can give that many rows now."""

    def refuse(self, member: int, rows: int) -> NoReturn:
        """Raises the error of a member that cannot."""


class SamplerEnsemble(Sampler):
    """Chooses members of an ensemble for each batch; its samplers draw the rows.

    A batch of B rows has ``num_buffer_sampled`` parts of ``B // num_buffer_sampled`` rows, each of
    one member.

    Args:
        samplers: the members.
        p: relative weights, one a member; ``"size"``: by the number of rows that each holds at the
            draw; None: equal ones. May be set at any time, also by a scheduler.
        sample_from_all: every member has one part, in their order.
        num_buffer_sampled: number of parts; by default that of the members.
        counts: ``"multinomial"``, the default: the members of the parts are drawn independently,
            with replacement. ``"exact"``: each member has ``num_buffer_sampled * p`` parts,
            rounded down or up so that it comes up as often as ``p`` says; parts of one member lie
            side by side.
        unready: what becomes of a member that can be chosen and cannot give its rows: ``"raise"``
            its error, whoever would be chosen; ``"skip"``: it is as if its weight were 0.

    Raises:
        TypeError: a member that is no Sampler. ValueError: no member; weights that are negative,
            NaN, infinite, all 0, or not one a member; another value of an option.
        RuntimeError: ``p``, ``counts`` or ``unready="skip"`` together with ``sample_from_all``.

    Cost: a few Python steps a member that is chosen, and what its sampler takes.

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

    def follow(self, buffers: Sequence[Any]) -> None:
        """Has the members be what these buffers work with at any time."""
        self._buffers = tuple(buffers)

    # -- what it is made with -------------------------------------------------------------------

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        """The members."""
        if self._buffers is None:
            return self._samplers
        return tuple(buffer.sampler for buffer in self._buffers)

    @property
    def p(self) -> Any:
        """Weights of the members, float64 ``[members]`` with sum 1; ``"size"``; None: equal ones.

        Raises:
            ValueError: weights that cannot be. RuntimeError: with ``sample_from_all``. Both when it
                is set; nothing has changed then.
        """
        return self._p.clone() if isinstance(self._p, torch.Tensor) else self._p

    @p.setter
    def p(self, value: Any) -> None:
        if value is not None and self._sample_from_all:
            raise RuntimeError("expected no p with sample_from_all=True, which takes each once")
        self._p = checked_weights(value, len(self))

    @property
    def sample_from_all(self) -> bool:
        """Whether every member has one part of each batch."""
        return self._sample_from_all

    @property
    def counts(self) -> str:
        """The law by which weights become numbers of parts."""
        return self._counts

    @property
    def unready(self) -> str:
        """What becomes of a member that cannot give its rows."""
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
        """Chooses the member of each part of a batch.

        Raises:
            ValueError: a batch size that the number of parts does not divide. NotEnoughData: no
                member can be chosen. The error of a member that cannot give its rows.
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
        """Weights float64 ``[members]``, None for equal ones, and who has one above 0."""
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
        """Whether ``choose`` would succeed, and the members then give their rows."""
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

    def note_ended(self, ended: set[int], possible: frozenset[int]) -> bool:
        """Takes note of members whose pass has ended; returns whether that ends one of the
        ensemble: every member that can be chosen has ended one since the last."""
        self._ended |= ended
        self._ran_out = bool(ended) and self._ended >= possible
        if self._ran_out:
            self._ended = frozenset()
        return self._ran_out

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Chooses members and has their samplers draw.

        Returns:
            A TensorDict with ``buffer_ids``, int64 ``[K]`` for K parts, and ``index`` ``[K, B]``
            (``[K, B, ndim]``), which ``StorageEnsemble.get`` takes; and what all members of the
            batch tell of their rows, ``[K, B, ...]``.

        Raises:
            TypeError: the storage is no StorageEnsemble. ValueError: it has another number of
                members, or as ``choose`` does. RuntimeError: members with lanes and without in one
                batch.
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
        self.note_ended(ended, choice.possible)
        return laid_out(choice.members, choice.rows, drawn)

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Whether ``sample`` would succeed now: every member that can be chosen is ready."""
        return self.can_choose(batch_size, SamplerPairs(self.samplers, storage))

    # -- members --------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """The member of that number, or a SamplerEnsemble of several with their weights."""
        numbers = chosen(index, len(self), "an ensemble")
        samplers = self.samplers
        if isinstance(numbers, int):
            return samplers[numbers]
        return self.of(numbers, [samplers[number] for number in numbers])

    def of(self, numbers: list[int], samplers: Sequence[Sampler]) -> SamplerEnsemble:
        """One like this, of some of the members; ValueError where none of them has a weight."""
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
        """Number of members."""
        return len(self._samplers if self._buffers is None else self._buffers)

    def empty(self) -> None:
        """Told that all records are gone: so are the members'."""
        super().empty()
        self._ended = frozenset()
        for sampler in self.samplers:
            sampler.empty()

    def alone(self) -> SamplerEnsemble:
        """One like this without members, which ``follow`` then gives it."""
        other = copy.copy(self)
        other._samplers, other._buffers = (), ()
        return other

    # -- state ----------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """Returns what the next choice depends on, the members apart."""
        return {
            "_kind": self.kind,
            "_p": self.p,
            "_ended": sorted(self._ended),
            "_ran_out": self._ran_out,
        }

    def check_own_state(self, state_dict: Any) -> None:
        """Raises ValueError where it is not the state of as many members, chosen in this way."""
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
        """Takes over a checked state without those of the members."""
        self._p = checked_weights(state_dict["_p"], len(self))
        self._ended, self._ran_out = frozenset(state_dict["_ended"]), state_dict["_ran_out"]

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next draw depends on, generators apart: weights, and each member's."""
        states = [sampler.state_dict() for sampler in self.samplers]
        return {**self.own_state(), **{str(i): state for i, state in enumerate(states)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state over; ValueError where it is not one of as many members of these kinds."""
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
