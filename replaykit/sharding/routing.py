"""Which shard a row goes to."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from replaykit.structure import Path
from replaykit.ted import format_key, unravel

__all__ = ["ByKey", "InTurn", "Router", "stable_hash"]

Array = np.ndarray[Any, Any]

_STEP, _MIX, _LAST = (
    np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def stable_hash(keys: Array) -> Array:
    """Spreads integers ``[K]`` over uint64, the same in every process and on every machine.

    The mixer of SplitMix64 (Steele, Lea, Flood 2014): a bijection, so that different keys differ.

    Example:
        >>> import numpy as np
        >>> from replaykit.sharding.routing import stable_hash
        >>> stable_hash(np.array([0, 1])) % np.uint64(10)
        array([5, 5], dtype=uint64)
    """
    mixed = keys.astype(np.int64).view(np.uint64) + _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _LAST
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


class InTurn:
    """Deals rows out one by one to the shards that are there; thread-safe.

    With all shards there, row k of all rows written goes to shard ``k % num_shards``.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self._lock = threading.Lock()
        self.dealt = 0

    def check(self, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Any rows can be dealt out."""

    def route(self, leaves: Mapping[Path, torch.Tensor], count: int, there: Sequence[int]) -> Array:
        """Shards of ``count`` rows, int64 ``[count]``; ``there`` are those to choose from."""
        with self._lock:
            first, self.dealt = self.dealt, self.dealt + count
        number = (first + np.arange(count)) % self.num_shards
        if len(there) in (0, self.num_shards):  # with none there, rows wait for theirs
            return number
        chosen = np.asarray(there)
        gone = ~np.isin(number, chosen)
        number[gone] = chosen[(first + np.flatnonzero(gone)) % len(chosen)]
        return number


class ByKey:
    """Rows with the same value under a key go to the same shard, whichever others are there.

    Args:
        key: of an integer or bool column, ``[B]`` or ``[B, k]``.
    """

    def __init__(self, num_shards: int, key: Any) -> None:
        self.num_shards, self.key = num_shards, unravel(key)

    def check(self, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Raises KeyError where rows lack the key, TypeError where it is not of integers."""
        column = leaves.get(self.key)
        if column is None:
            raise KeyError(f"expected the shard_key {format_key(self.key)} in the rows; got none")
        if column.is_floating_point() or column.is_complex():
            raise TypeError(
                f"expected integers under the shard_key {format_key(self.key)}, got {column.dtype}"
            )

    def route(self, leaves: Mapping[Path, torch.Tensor], count: int, there: Sequence[int]) -> Array:
        """Shards of rows that were checked, int64 ``[count]``."""
        column = leaves[self.key]
        values = column.detach().cpu().reshape(count, -1).to(torch.int64).numpy()
        mixed = np.zeros(count, np.uint64)
        for place in range(values.shape[1]):
            mixed = stable_hash((mixed ^ stable_hash(values[:, place])).view(np.int64))
        return (mixed % np.uint64(self.num_shards)).astype(np.int64)


Router = InTurn | ByKey
