"""One number for a row of any shard, and for how often its place was written."""

from __future__ import annotations

import torch

__all__ = ["Names"]

_INCARNATION_BITS = 40
"""A generation counts how often a slot was written: 2 ** 40 laps of a ring are out of reach."""


class Names:
    """``index = shard + num_shards * slot``: the order in which rows are dealt out in turn.

    Rows dealt out from an empty buffer on have the indices 0, 1, 2, ..., as in one big buffer.

    A generation is that of the slot, with the incarnation of the shard above it: a shard that was
    restarted writes the slots of lost rows again under the same generations, which must not pass
    for the rows that were lost.

    Example:
        >>> import torch
        >>> from replaykit.sharding.naming import Names
        >>> names = Names(3)
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
