"""Define the messages, facts and errors between clients and shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import is_tensorclass

from replaykit._compat import is_tensordict
from replaykit.remote.wire_format import Message, pack, unpack
from replaykit.structure import Node, build, flatten

__all__ = [
    "BarrierBusy",
    "GlobalIndex",
    "Losses",
    "ShardDied",
    "ShardFacts",
    "ShardLoss",
    "ShardLossWarning",
    "ShardPart",
    "ShardSilent",
    "Terms",
    "decoded",
    "encoded",
]


class ShardDied(ConnectionError):
    """A shard does not answer any more."""

    def __init__(self, shard: int, incarnation: int) -> None:
        super().__init__(f"shard {shard} (incarnation {incarnation}) has died")
        self.shard, self.incarnation = shard, incarnation

    def __reduce__(self) -> tuple[type[ShardDied], tuple[int, int]]:
        return ShardDied, (self.shard, self.incarnation)


class ShardSilent(TimeoutError):
    """A shard has not answered in time; it may still do what it was asked for."""


class BarrierBusy(RuntimeError):
    """Somebody else saves or loads all shards at this moment."""


class ShardLossWarning(UserWarning):
    """Rows were lost with a shard that died; the text is that of a ``ShardLoss``."""


class Terms(NamedTuple):
    """What masses depend on beside the rows: the rows of a window, and the exponent.

    0 and None where draws have no windows, or no priorities.
    """

    length: int = 0
    alpha: float | None = None


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """The state of a shard at one instant.

    Attributes:
        rows: stored rows.
        written: rows written since the shard was first made, restarts included.
        capacity: how many rows fit.
        terms: what the mass belongs to; None where it was not measured.
        mass: what draws of one big buffer would spend on the shard, up to one factor: rows,
            windows, episodes, or the sum of ``v``. An int where it is a count.
        smallest: the smallest positive ``v`` of a stored row; infinite without priorities.
        most: the largest raw priority ever set, which new rows get; at least 1.
        version: grows with every change of the shard.
        loads: how often other rows have taken the place of all that there were; what was loaded
            counts as written.
    """

    rows: int
    written: int
    capacity: int
    terms: Terms | None
    mass: float
    smallest: float
    most: float
    version: int
    loads: int = 0


@dataclass(frozen=True, slots=True)
class ShardLoss:
    """What was lost with a shard that died.

    Attributes:
        shard: its number. ``incarnation``: how often it had been restarted before.
        first, stop: the lost rows by number, in the order in which that shard was written:
            those of ``[first, stop)`` were acknowledged to a writer and are gone.
        rows: how many of them would be stored now.
        restored: rows that came back from the shard's checkpoint; 0 without one.

    Example:
        >>> from replaykit.sharding import ShardLoss
        >>> str(ShardLoss(shard=2, incarnation=0, first=90, stop=100, rows=10, restored=90))
        'shard 2 died and came back with 90 rows; its 10 rows 90..99 are lost'
    """

    shard: int
    incarnation: int
    first: int
    stop: int
    rows: int
    restored: int

    def __str__(self) -> str:
        if not self.rows:
            return f"shard {self.shard} died and came back with {self.restored} rows; none is lost"
        return (
            f"shard {self.shard} died and came back with {self.restored} rows; its {self.rows} "
            f"rows {self.first}..{self.stop - 1} are lost"
        )


class ShardPart(NamedTuple):
    """A shard's share of a batch.

    Attributes:
        data: rows in their container, and what is known of them in ``info``; None: none was drawn.
        values: ``v`` of each draw, float64; None without priorities.
        facts: of the instant of the draw.
    """

    data: Any
    info: dict[Any, Any]
    values: torch.Tensor | None
    facts: ShardFacts


class Losses:
    """Counts rows that were acknowledged to somebody and did not come back. Not thread-safe.

    A client tells what it has been acknowledged when it notices a death; others may have been
    acknowledged more, and tell that when they notice it. So a loss may grow until every client
    that wrote has been told.
    """

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], tuple[int, int]] = {}
        self._back: dict[tuple[int, int], ShardFacts] = {}

    def died(self, shard: int, incarnation: int, written: int, rows: int) -> None:
        """A client says that this incarnation has died after so many rows at least, of which
        ``rows`` were stored."""
        name = (shard, incarnation)
        self._told[name] = max(self._told.get(name, (0, 0)), (written, rows))

    def came_back(self, shard: int, incarnation: int, facts: ShardFacts) -> None:
        """The successor of this incarnation is there, with what its checkpoint had."""
        self._back[shard, incarnation] = facts

    def newest(self, shard: int) -> ShardLoss:
        """What was lost when a shard came back last; it has."""
        return self.of(shard, max(lost for number, lost in self._back if number == shard))

    def of(self, shard: int, incarnation: int) -> ShardLoss:
        """What was lost with an incarnation whose successor is there."""
        facts = self._back[shard, incarnation]
        first = facts.written
        written, rows = self._told.get((shard, incarnation), (0, 0))
        stop = max(first, written)
        lost = min(stop - first, rows)
        return ShardLoss(shard, incarnation, stop - lost, stop, lost, facts.rows)

    def all(self) -> list[ShardLoss]:
        """All losses, in the order in which the shards came back."""
        return [self.of(*name) for name in self._back]


_INCARNATION_BITS = 40
"""A generation counts how often a slot was written: 2 ** 40 laps of a ring are out of reach."""


class GlobalIndex:
    """``index = shard + num_shards * slot``: the order in which rows are dealt out in turn.

    Rows dealt out from an empty buffer on have the indices 0, 1, 2, ..., as in one big buffer.

    A generation is that of the slot, with the incarnation of the shard above it: a shard that was
    restarted writes the slots of lost rows again under the same generations, which must not pass
    for the rows that were lost.

    Example:
        >>> import torch
        >>> from replaykit.sharding.protocol import GlobalIndex
        >>> names = GlobalIndex(3)
        >>> index = names.join(1, torch.tensor([0, 1, -1]))
        >>> index, names.shards(index), names.slots(index)
        (tensor([ 1,  4, -1]), tensor([ 1,  1, -1]), tensor([ 0,  1, -1]))
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards

    def join(self, shard: int, slots: torch.Tensor) -> torch.Tensor:
        """Indices of slots ``[K]`` of a shard; -1 stays."""
        return torch.where(slots >= 0, slots * self.num_shards + shard, -1)

    def shards(self, index: torch.Tensor) -> torch.Tensor:
        """The shard of indices ``[K]``; -1 of an index that is negative."""
        return torch.where(index >= 0, index % self.num_shards, -1)

    def slots(self, index: torch.Tensor) -> torch.Tensor:
        """The slot of indices ``[K]`` in their shards; -1 of an index that is negative."""
        found = torch.div(index, self.num_shards, rounding_mode="floor")
        return torch.where(index >= 0, found, -1)

    @staticmethod
    def stamped(generation: torch.Tensor, incarnation: int) -> torch.Tensor:
        """Generations as users see them; -1 stays."""
        if not incarnation:
            return generation
        return torch.where(
            generation >= 0, generation + (incarnation << _INCARNATION_BITS), generation
        )

    @staticmethod
    def unstamped(generation: torch.Tensor, incarnation: int) -> torch.Tensor:
        """The way back; -1, which no stored row has, for those of other incarnations."""
        same = (generation >> _INCARNATION_BITS) == incarnation
        return torch.where(same, generation - (incarnation << _INCARNATION_BITS), -1)


class _Container(NamedTuple):
    """A TensorDict or tensorclass, taken apart: pickle takes ten times as long."""

    root: Node
    leaves: dict[Any, torch.Tensor]
    batch: tuple[int, ...]


def encoded(value: Any) -> Message:
    """Returns the message of arguments or an answer; their tensors are not copied into it.

    Raises:
        TypeError: a TensorDict with something other than tensors in it; names the key.

    Example:
        >>> import torch
        >>> from replaykit.sharding.protocol import decoded, encoded
        >>> decoded(encoded({"x": torch.arange(3), "n": 1}))
        {'x': tensor([0, 1, 2]), 'n': 1}
    """
    return pack(_apart(value))


def decoded(message: Message, *, own: bool = False) -> Any:
    """The way back.

    Args:
        own: tensors get memory of their own. Otherwise they lie in that of the message, which
            nobody may write to, and which the arguments of a call do not outlive.
    """
    return _together(unpack(message, own=own))


def _apart(value: Any) -> Any:
    if is_tensordict(value) or is_tensorclass(value):
        return _Container(*flatten(value, value.batch_dims), tuple(value.batch_size))
    return _inside(value, _apart)


def _together(value: Any) -> Any:
    if isinstance(value, _Container):
        device = torch.device("cpu")
        return build(value.root, value.leaves, torch.Size(value.batch), device)
    return _inside(value, _together)


def _inside(value: Any, function: Any) -> Any:
    if type(value) is dict:
        return {key: function(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(function(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(function(item) for item in value))
    return value
