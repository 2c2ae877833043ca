"""Define the messages, facts and errors between clients and shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class ShardDied(ConnectionError):
    """Raised when a shard has died."""

    def __init__(self, shard: int, incarnation: int) -> None:
        super().__init__(f"shard {shard} (incarnation {incarnation}) has died")
        self.shard, self.incarnation = shard, incarnation

    def __reduce__(self) -> tuple[type[ShardDied], tuple[int, int]]:
        return ShardDied, (self.shard, self.incarnation)


class ShardSilent(TimeoutError):
    """Raised when a shard has not answered in time.

    The shard may still carry out the request.
    """


class BarrierBusy(RuntimeError):
    """Raised when another client is saving or loading all shards."""


class ShardLossWarning(UserWarning):
    """Warns that rows were lost with a shard that died.

    The text is ``str`` of a `ShardLoss`.
    """


class Terms(NamedTuple):
    """The sampling settings that determine the mass of given rows.

    Attributes:
        length: number of rows in a window, or 0 if the sampler does not draw windows.
        alpha: exponent of priorities, or None without priorities.
    """

    length: int = 0
    alpha: float | None = None


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """The state of a shard at one instant.

    Here ``v`` is the value of a row's priority after the exponent ``alpha``, as in the samplers.

    Attributes:
        rows: number of stored rows.
        written: number of rows written since the first incarnation of the shard was made.
        capacity: maximum number of rows.
        terms: the terms of the mass, or None if the mass was not measured.
        mass: the weight with which a draw chooses this shard. The mass is an int count of rows,
            windows or episodes, or the float sum of ``v``.
        smallest: the smallest positive ``v`` of a stored row. It is infinite without priorities.
        most: the largest raw priority ever set, at least 1. It is the default priority of new rows.
        version: a number that grows with every change of the shard.
        loads: number of loads that replaced all rows. Loaded rows count as written.
        shard, incarnation: the numbers of the shard and of its incarnation.
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
    shard: int = 0
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class ShardLoss:
    """The loss of rows with a shard that died.

    Attributes:
        shard: the number of the shard.
        incarnation: the number of times that the shard had been restarted before.
        first, stop: the row ids of the lost rows are in the range ``[first, stop)``. Row ids count
            in the write order of the shard. The shard had acknowledged these rows to the clients
            that wrote them.
        rows: number of lost rows that would still be stored if the shard had not died.
        restored: number of rows restored from the shard's checkpoint, or 0 without a checkpoint.

    Example:
        >>> from replaykit import ShardLoss
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
        data: the drawn rows in their container, or None if no row was drawn.
        info: information about the drawn rows.
        values: ``v`` of each draw, float64, or None without priorities.
        facts: the facts of the shard at the draw.
    """

    data: Any
    info: dict[Any, Any]
    values: torch.Tensor | None
    facts: ShardFacts


class Losses:
    """The acknowledged rows that were lost with shards. Not thread-safe.

    Only the clients know which rows a dead shard has acknowledged. A client reports the newest
    facts of a shard when it notices the death of the shard, and when the client ends. Therefore a
    loss may grow until every client that wrote rows has noticed the death or ended.
    """

    def __init__(self) -> None:
        self._reported: dict[tuple[int, int], ShardFacts] = {}
        self._back: dict[tuple[int, int], ShardFacts] = {}

    def report(self, facts: ShardFacts) -> None:
        """Record facts that an incarnation has sent to a client, before or after its death."""
        name = (facts.shard, facts.incarnation)
        known = self._reported.get(name)
        if known is None or facts.version > known.version:
            self._reported[name] = facts

    def came_back(self, shard: int, incarnation: int, facts: ShardFacts) -> None:
        """Record the facts of an incarnation's successor right after the restart."""
        self._back[shard, incarnation] = facts

    def newest(self, shard: int) -> ShardLoss:
        """Return the loss at the last restart of a shard that has been restarted."""
        return self.of(shard, max(lost for number, lost in self._back if number == shard))

    def of(self, shard: int, incarnation: int) -> ShardLoss:
        """Return the loss caused by the death of an incarnation with a successor."""
        facts = self._back[shard, incarnation]
        first = facts.written
        last = self._reported.get((shard, incarnation))
        stop = first if last is None else max(first, last.written)
        lost = 0 if last is None else min(stop - first, last.rows)
        return ShardLoss(shard, incarnation, stop - lost, stop, lost, facts.rows)

    def all(self) -> list[ShardLoss]:
        """Return all losses in the order of the restarts."""
        return [self.of(*name) for name in self._back]


_INCARNATION_BITS = 40
"""The number of low bits that hold the generation of the slot.

The incarnation is in the bits above. No ring makes 2 ** 40 laps.
"""


class GlobalIndex:
    """The conversion between indices and slots in shards.

    The index of a row is ``shard + num_shards * slot``. If rows go to the shards in turn, an
    empty buffer stores its first rows under 0, 1, 2, ..., as a single buffer does.

    The generation of an index combines the generation of the slot with the incarnation of the
    shard, in the bits above. A restarted shard writes the slots of lost rows again, and their
    generations in these slots repeat. The incarnation distinguishes the new rows from the lost
    rows.

    Example:
        >>> import torch
        >>> from replaykit.distributed.protocol import GlobalIndex
        >>> names = GlobalIndex(3)
        >>> index = names.join(1, torch.tensor([0, 1, -1]))
        >>> index, names.shards(index), names.slots(index)
        (tensor([ 1,  4, -1]), tensor([ 1,  1, -1]), tensor([ 0,  1, -1]))
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards

    def join(self, shard: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the indices of slots ``[K]`` of a shard, with -1 for negative slots."""
        return torch.where(slots >= 0, slots * self.num_shards + shard, -1)

    def shards(self, index: torch.Tensor) -> torch.Tensor:
        """Return the shards of indices ``[K]``, with -1 for negative indices."""
        return torch.where(index >= 0, index % self.num_shards, -1)

    def slots(self, index: torch.Tensor) -> torch.Tensor:
        """Return the slots of indices ``[K]`` in shards, with -1 for negative indices."""
        found = torch.div(index, self.num_shards, rounding_mode="floor")
        return torch.where(index >= 0, found, -1)

    @staticmethod
    def stamped(generation: torch.Tensor, incarnation: int) -> torch.Tensor:
        """Return the public generations, which contain the incarnation; -1 stays."""
        if not incarnation:
            return generation
        return torch.where(
            generation >= 0, generation + (incarnation << _INCARNATION_BITS), generation
        )

    @staticmethod
    def unstamped(generation: torch.Tensor, incarnation: int) -> torch.Tensor:
        """Return the generations of slots; the inverse of ``stamped``.

        Generations with another incarnation become -1, which no stored row has.
        """
        same = (generation >> _INCARNATION_BITS) == incarnation
        return torch.where(same, generation - (incarnation << _INCARNATION_BITS), -1)
