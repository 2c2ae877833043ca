"""What the three trees differ in: which values they take, how eight children make a parent.

In torch, on any device, and with the very results of ``csrc/tree_operations.h``: the same order of
additions, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch

__all__ = ["Extreme", "Operation", "Sum", "operation_of"]


@dataclass(frozen=True)
class Sum:
    """Weights and their sums; inner entries are float64 whatever the leaves are.

    ``capacity`` bounds float64 leaves, so that no sum of them overflows.
    """

    leaf: torch.dtype
    capacity: int
    name: str = "sum"
    identity: float = 0.0
    inner: torch.dtype = torch.float64

    @property
    def ceiling(self) -> float:
        largest = float(torch.finfo(self.leaf).max)
        return largest / self.capacity if self.leaf == torch.float64 else largest

    def refuses(self, value: torch.Tensor) -> torch.Tensor:
        """Which values may not become leaves: bool, shaped as ``value``."""
        # Below zero, -0.0 not counted. Looks at the bits, since a thread that takes subnormal
        # numbers for zero would not see the sign of a negative one.
        integer, lowest = {
            torch.float32: (torch.int32, -(1 << 31)),
            torch.float64: (torch.int64, -(1 << 63)),
        }[value.dtype]
        bits = value.view(integer)
        negative = (bits < 0) & (bits != lowest)
        return negative | ~(value.to(self.leaf) <= self.ceiling)  # NaN is not <= either

    def stored(self, value: torch.Tensor) -> torch.Tensor:
        """Values that were not refused, as leaves."""
        leaf = value.to(self.leaf)
        # A subnormal weight is positive to one thread and zero to another (one that flushes them);
        # to neither may a node seem to be positive that has no child to enter. -0.0 goes as well.
        return torch.where(leaf < torch.finfo(self.leaf).tiny, 0.0, leaf)

    def combine(self, children: torch.Tensor) -> torch.Tensor:
        """``[..., 8]`` children to ``[...]`` parents, by halving."""
        eight = children.to(torch.float64)
        four = eight[..., :4] + eight[..., 4:]
        two = four[..., :2] + four[..., 2:]
        return two[..., 0] + two[..., 1]

    def both(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def expected(self) -> str:
        return f"weights in [0, {self.ceiling:.8g}]"


@dataclass(frozen=True)
class Extreme:
    """Numbers and their minima or maxima; inner entries have the dtype of the leaves."""

    leaf: torch.dtype
    name: str

    @property
    def inner(self) -> torch.dtype:
        return self.leaf

    @property
    def identity(self) -> float:
        return math.inf if self.name == "min" else -math.inf

    def refuses(self, value: torch.Tensor) -> torch.Tensor:
        return value.isnan()

    def stored(self, value: torch.Tensor) -> torch.Tensor:
        # + 0 makes -0.0 into 0.0: which of the two a minimum gives would depend on the order.
        return value.to(self.leaf) + 0.0

    def combine(self, children: torch.Tensor) -> torch.Tensor:
        return children.amin(-1) if self.name == "min" else children.amax(-1)

    def both(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.minimum(a, b) if self.name == "min" else torch.maximum(a, b)

    def expected(self) -> str:
        return "values that are numbers"


Operation: TypeAlias = Sum | Extreme
"""How values become leaves and leaves become nodes; ``name`` is that of the native kernel."""


def operation_of(name: str, leaf: torch.dtype, capacity: int) -> Operation:
    """The operation of that name: ``sum``, ``min`` or ``max``."""
    return Sum(leaf, capacity) if name == "sum" else Extreme(leaf, name)
