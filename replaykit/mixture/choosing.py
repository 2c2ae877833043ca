"""Choose the members that an ensemble samples from, and their shares."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit._compat import TensorDict
from replaykit.buffer import ReplayBuffer
from replaykit.buffer.source import BufferSource, Readiness
from replaykit.declared import Count, Positive, read_value, require_kind
from replaykit.errors import NotEnoughData, NotReady
from replaykit.keywords import one_of
from replaykit.mixture.member_parts import (
    MemberWeights,
    Ramp,
    StorageEnsemble,
    check_members,
    check_parts,
    chosen,
)
from replaykit.samplers import Sampler
from replaykit.samplers.window_measures import integers, uniform
from replaykit.storages import Storage
from replaykit.writers import ImmutableDatasetWriter


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


@contextlib.contextmanager
def member_named(member: int | str) -> Iterator[None]:
    """Make errors inside the context name the member."""
    try:
        yield
    except Exception as error:
        raise naming_member(error, member) from error


Array = np.ndarray[Any, Any]

COUNTS = ("multinomial", "exact")

_ROUNDING = 1e-9
"""Maximum rounding error by which a share may be below a whole number."""


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


UNREADY = ("raise", "skip")


class Choice(NamedTuple):
    """The member of each part of a batch, and the number of rows per part.

    ``possible``: the members that could have been chosen.
    """

    members: list[int]
    rows: int
    possible: frozenset[int]


class Candidates:
    """The sources among which to choose.

    Args:
        sources: the sources.
        generator: the source of randomness of their draws.
        answers: answers of remote sources, by number. Remote sources without an answer count as
            ready, because their readiness is requested during the draws.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        generator: torch.Generator | None,
        answers: Mapping[int, Readiness] | None = None,
    ) -> None:
        self._sources, self._generator, self._answers = sources, generator, answers or {}

    def size(self, member: int) -> int:
        """Return the number of rows of a member."""
        answer = self._answers.get(member)
        return int(self._sources[member].size) if answer is None else answer.size

    def stored(self, member: int, unit: str, rows: int) -> int:
        """Return how many rows, episodes or windows a member has, for parts of ``rows`` rows."""
        if unit == "rows":
            return self.size(member)
        return int(self._sources[member].stored(unit, rows))

    def ready(self, member: int, rows: int, parts: int = 1) -> bool:
        """Return whether a member can return ``rows`` rows now.

        A member whose draws use rows up needs them for each of the ``parts`` that it may get.
        """
        answer, source = self._answers.get(member), self._sources[member]
        if not source.remote and source.sampler.consumes:
            rows *= parts
        if answer is None:
            return source.remote or bool(source.ready(rows))
        return answer.ready

    def require(self, members: Iterable[int], rows: int) -> None:
        """Raise the error of the first member that cannot return ``rows`` rows."""
        for member in members:
            if not self.ready(member, rows):
                with member_named(member):
                    self._sources[member].refuse(rows, self._generator)


def is_of_rows(value: Any, rows: int) -> bool:
    """Return whether a value is a tensor with one entry per row."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == rows


class SamplerEnsemble(Sampler):
    """A sampler that chooses members for each batch. The members draw the rows.

    A batch of B rows has ``num_buffer_sampled`` parts. Each part has ``B // num_buffer_sampled``
    rows of one member.

    Args:
        samplers: the members.
        p: relative weights, one per member. With ``"size"``, a weight is the number of rows of the
            member at the draw. None means equal weights. May be set at any time, also by a
            scheduler. A function gets the number of the batch, 0, 1, ..., and returns weights.
        sample_from_all: every member has one part, in the order of the members.
        num_buffer_sampled: number of parts; by default the number of members.
        counts: with ``"multinomial"``, the default, the members of the parts are drawn
            independently, with replacement. With ``"exact"``, each member has ``num_buffer_sampled
            * p`` parts. The number is rounded down or up at random, so that the average share is
            ``p``. Parts of one member are adjacent.
        unready: the treatment of members with a positive weight that cannot return their rows now.
            ``"raise"`` raises the error of such a member, even if it would not be chosen.
            ``"skip"`` treats its weight as 0.
        ramp: changes the weights over epochs, which ``set_epoch`` numbers.
        ready: a minimum for each member, below which its weight is 0. A minimum is a number of
            rows, a pair such as ``(10, "episodes")`` or ``(100, "windows")``, or None for 1 row.
            Windows are those that the member's sampler can draw. Remote members and ensembles
            count rows only.

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
        ramp: Ramp | None = None,
        ready: Sequence[Any] | None = None,
    ) -> None:
        check_parts(Sampler, samplers)
        super().__init__()
        self._samplers = samplers
        self._sources: Sequence[Any] | None = None
        self._ended: frozenset[int] = frozenset()
        chosen_by = one_of("counts", COUNTS[0] if counts is None else counts, COUNTS)
        options = (p, counts, ramp, ready)
        if sample_from_all and (unready != "raise" or any(one is not None for one in options)):
            raise RuntimeError(
                "expected p=, counts=, unready=, ramp= or ready= for members that are chosen, or "
                "sample_from_all=True, which takes each once; got both"
            )
        self._sample_from_all = bool(sample_from_all)
        self._counts, self._unready = chosen_by, one_of("unready", unready, UNREADY)
        self._parts: int | None = None
        self.num_buffer_sampled = num_buffer_sampled
        self.weights = MemberWeights(p, len(samplers), ramp, ready)

    def follow(self, sources: Sequence[Any]) -> None:
        """Use the current samplers of these sources as the members.

        Raises:
            ValueError: a source does not count the unit of its minimum.
        """
        self._samplers, self._sources = (), sources
        if self.weights.timed and sources:
            for number, (_, unit) in enumerate(self.weights.minimums):
                if unit != "rows" and not hasattr(sources[number], "stored"):
                    raise ValueError(f"expected ready for member {number} in rows, got {unit}")
            if self.weights.since is None:
                self.weights.look(Candidates(sources, self.generator), 1)

    def alone(self) -> SamplerEnsemble:
        """Return a copy without members. ``follow`` sets them."""
        other = object.__new__(type(self))
        other.__setstate__(self.__getstate__())
        other.weights = self.weights.copy()
        other.follow(())
        return other

    # -- options --------------------------------------------------------------------------------

    @property
    def samplers(self) -> tuple[Sampler, ...]:
        """The samplers of the members."""
        if self._sources is None:
            return self._samplers
        return tuple(source.sampler for source in self._sources)

    @property
    def p(self) -> Any:
        """Weights of the members: float64 ``[members]`` with sum 1, ``"size"``, a function or None.

        None means equal weights. Only an assignment raises; nothing has changed then.

        Raises:
            ValueError: the weights are invalid.
            RuntimeError: weights are given with ``sample_from_all``.
        """
        p = self.weights.p
        return p.clone() if isinstance(p, torch.Tensor) else p

    @p.setter
    def p(self, value: Any) -> None:
        if value is not None and self._sample_from_all:
            raise RuntimeError("expected no p with sample_from_all=True, which takes each once")
        self.weights.set(value)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, which a `Ramp` counts.

        Members that are ready for the first time are ready since this epoch.

        Raises:
            ValueError: ``epoch`` is not an int of at least 0.
        """
        self.weights.epoch = read_value(Count, epoch, "epoch")
        if self.weights.timed and self._sources:
            self.weights.look(Candidates(self._sources, self.generator), 1)

    def shares(self, rows: int = 1) -> torch.Tensor:
        """Return the probability of each member at the next draw, float64 ``[members]``.

        Args:
            rows: number of rows of a part, by which minimums count windows.

        Raises:
            NotReady: no member can be drawn.
        """
        sources = self._sources if self._sources is not None else ()
        weights, _ = self._chances(rows, Candidates(sources, self.generator))
        if weights is None:
            weights = np.ones(len(self))
        return torch.from_numpy(weights / weights.sum())

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
        if value is not None:
            read_value(Positive, value, "num_buffer_sampled")
        if value is not None and self._sample_from_all and value != len(self):
            raise ValueError(
                f"expected num_buffer_sampled={len(self)} with sample_from_all=True, got {value}"
            )
        self._parts = value

    # -- drawing --------------------------------------------------------------------------------

    def choose(
        self, batch_size: int, members: Candidates, generator: torch.Generator | None
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
            members.require(range(count), rows)
            return Choice(list(range(count)), rows, frozenset(range(count)))
        weights, possible = self._chances(rows, members)
        if self._unready == "raise":
            members.require(possible, rows)
        law = exact if self._counts == "exact" else multinomial
        found = law(weights, parts, count, generator).tolist()
        return Choice(found, rows, frozenset(possible))

    def _chances(
        self, rows: int, members: Candidates
    ) -> tuple[np.ndarray[Any, Any] | None, list[int]]:
        """Return the weights of members, and the members with a weight above 0.

        The weights are float64 ``[members]``; None for equal weights.
        """
        weights = self.weights.at(members, rows)
        possible = list(range(len(self))) if weights is None else np.nonzero(weights)[0].tolist()
        if self._unready == "skip":
            most = self.num_buffer_sampled  # parts that one member may get
            ready = [member for member in possible if members.ready(member, rows, most)]
            if len(ready) < len(possible):
                left = np.zeros(len(self))
                left[ready] = 1.0 if weights is None else weights[ready]
                weights, possible = left, ready
        if weights is not None and not weights.any():
            raise NotReady("no member of the ensemble can be drawn: none has rows and a weight")
        return weights, possible

    def can_choose(self, batch_size: int, members: Candidates) -> bool:
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
        most = 1 if self._sample_from_all else parts
        return all(members.ready(member, rows, most) for member in possible)

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

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[Any, Any]]:
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
        sources = self._paired(storage)
        choice = self.choose(batch_size, Candidates(sources, self.generator), self.generator)
        parts = []
        for member in choice.members:
            with member_named(member):
                parts.append(sources[member].draw(1, choice.rows, self.generator))
        self.weights.step += self.weights.stride
        ended = {n for n, part in zip(choice.members, parts, strict=True) if part.ran_out}
        self.mark_ended(ended, choice.possible)
        draws = [[batch.draw for batch in part.batches] for part in parts]
        indices = [torch.cat([draw.index for draw in each]) for each in draws]
        if len({index.shape for index in indices}) > 1:
            raise RuntimeError(
                "expected members whose rows have indices of one shape; only a "
                "ReplayBufferEnsemble puts members with and without lanes into one batch"
            )
        ids = torch.tensor(choice.members, dtype=torch.int64, device=indices[0].device)
        every = [draw for each in draws for draw in each]
        info = {
            key: torch.stack([torch.cat([draw.info[key] for draw in each]) for each in draws])
            for key in set.intersection(*(set(draw.info) for draw in every))
            if all(is_of_rows(draw.info[key], len(draw.index)) for draw in every)
        }
        return TensorDict({"index": torch.stack(indices), "buffer_ids": ids}, [len(parts)]), info

    def _paired(self, storage: Any) -> list[BufferSource]:
        """Return buffers of the samplers and storages as sources."""
        if not isinstance(storage, StorageEnsemble):
            raise TypeError(f"expected a StorageEnsemble, got {type(storage).__name__}")
        if len(storage) != len(self):
            raise ValueError(f"expected {len(self)} storages, got {len(storage)}")
        sources = []
        for number, (sampler, one) in enumerate(zip(self.samplers, storage, strict=True)):
            if not isinstance(one, Storage):
                raise RuntimeError(
                    f"expected rows of this process in member {number}; a draw of a remote member "
                    "is only possible through its handle, ensemble[i], or with the whole ensemble"
                )
            buffer = sampler.owner
            if buffer is None or buffer._storage is not one:
                writer = ImmutableDatasetWriter()
                buffer = ReplayBuffer(storage=one, sampler=sampler, writer=writer)
            sources.append(BufferSource(buffer))
        return sources

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """Return whether ``sample`` would succeed now.

        It would succeed if every member that can be chosen is ready.
        """
        return self.can_choose(batch_size, Candidates(self._paired(storage), self.generator))

    # -- members --------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Return a member by number, or a SamplerEnsemble of several members."""
        numbers = chosen(index, len(self), "an ensemble")
        samplers = self.samplers
        if isinstance(numbers, int):
            return samplers[numbers]
        some = (samplers[number] for number in numbers)
        made = SamplerEnsemble(*some, **self.arguments(numbers))
        made.weights.load_state_dict(self.weights.state_of(numbers))
        return made

    def arguments(self, numbers: list[int]) -> dict[str, Any]:
        """Return the arguments of a SamplerEnsemble like this one, of some of the members."""
        everyone = self._sample_from_all
        return {
            **self.weights.arguments(numbers),
            "sample_from_all": everyone,
            "num_buffer_sampled": None if everyone else self._parts,
            "counts": None if everyone else self._counts,
            "unready": self._unready,
        }

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._samplers if self._sources is None else self._sources)

    # -- state ----------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        """Return the state of the choice of members, without the members' states."""
        return {
            "_kind": self.kind,
            **self.weights.state_dict(),
            "_ended": sorted(self._ended),
            "_ran_out": self._ran_out,
        }

    def check_own_state(self, state_dict: Any) -> None:
        """Check the result of ``own_state`` before it is loaded.

        Raises:
            ValueError: the state has another number of members, or another way to choose them.
        """
        super().check_state(state_dict, None)  # type: ignore[arg-type]
        self.weights.check_state(state_dict)
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
        self.weights.load_state_dict(state_dict)
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
            if isinstance(state, dict) and "_kind" in state:
                with member_named(number):
                    require_kind(state, sampler.kind, "sampler")
        for number, sampler in enumerate(self.samplers):
            sampler.load_state_dict(state_dict[str(number)])
        self.load_own_state(state_dict)

    def __repr__(self) -> str:
        return f"SamplerEnsemble(samplers={self.samplers}, p={self.p})"
