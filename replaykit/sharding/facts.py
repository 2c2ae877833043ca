"""What a shard says of itself with every reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

__all__ = ["Part", "ShardFacts", "ShardLoss", "Terms"]


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


class Part(NamedTuple):
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
