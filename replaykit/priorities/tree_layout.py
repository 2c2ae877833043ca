"""Lay out 8-ary segment trees, and define the operations of the three kinds."""

from __future__ import annotations

import contextlib
import math
import mmap
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from replaykit._compat import as_tensor

FAN = 8
_LINE = 64
_HUGE = 1 << 21
_HUGE_FROM = 1 << 21


class Levels(NamedTuple):
    """Sizes of a tree. ``leaves`` and ``entries`` include padding; ``counts`` do not."""

    capacity: int
    leaves: int
    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    entries: int


def levels_of(capacity: int) -> Levels:
    """Return the levels of a tree of ``capacity`` leaves, without an allocation.

    Example:
        >>> from replaykit.priorities.tree_layout import levels_of
        >>> levels_of(1000)
        Levels(capacity=1000, leaves=1000, counts=(125, 16, 2), offsets=(0, 128, 144), entries=152)
        >>> levels_of(2**40).leaves
        1099511627776
    """
    counts: list[int] = []
    offsets: list[int] = []
    below, offset = capacity, 0
    while not counts or below > FAN:
        below = -(-below // FAN)
        counts.append(below)
        offsets.append(offset)
        offset += -(-below // FAN) * FAN
    return Levels(capacity, counts[0] * FAN, tuple(counts), tuple(offsets), offset)


@torch.inference_mode(False)  # tensors created in inference mode cannot be changed outside it
def allocate(
    levels: Levels, leaf: torch.dtype, inner: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate ``[levels.leaves]`` leaves and ``[levels.entries]`` entries together.

    Leaves and entries both start on a cache line of 64 bytes. Their contents are undefined. Large
    trees on the CPU request huge pages. Without huge pages, every step down the tree may also miss
    the processor's TLB.
    """
    first = -(-levels.leaves * leaf.itemsize // _LINE) * _LINE
    size = first + levels.entries * inner.itemsize
    raw = _bytes(size, device)
    leaves = raw[: levels.leaves * leaf.itemsize].view(leaf)
    return leaves, raw[first:size].view(inner)


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    if size >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        # Unused pages take no memory, so the surplus before and after the tree costs nothing.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, -(-size // _HUGE) * _HUGE + _HUGE, flags=flags)
        raw = torch.frombuffer(pages, dtype=torch.uint8)
        start = -raw.data_ptr() % _HUGE
        with contextlib.suppress(OSError):  # without huge pages the tree is only slower
            # Request only pages that the tree fills. The rest of a last huge page would take
            # memory.
            pages.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE * _HUGE)
        return raw[start : start + size]
    raw = torch.empty(size + _LINE, dtype=torch.uint8, device="cpu")
    start = -raw.data_ptr() % _LINE
    return raw[start : start + size]


@dataclass(frozen=True)
class Sum:
    """Weights and their sums. Inner entries are always float64.

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
        """Return a bool mask of the values that cannot become leaves."""
        # Negative numbers are refused, but not -0.0. The test reads the bits, because a thread that
        # flushes subnormal numbers to zero cannot compare a negative subnormal number correctly.
        integer, lowest = {
            torch.float32: (torch.int32, -(1 << 31)),
            torch.float64: (torch.int64, -(1 << 63)),
        }[value.dtype]
        bits = value.view(integer)
        negative = (bits < 0) & (bits != lowest)
        return negative | ~(value.to(self.leaf) <= self.ceiling)  # also refuses NaN

    def stored(self, value: torch.Tensor) -> torch.Tensor:
        """Return valid values in the form in which the leaves store them."""
        leaf = value.to(self.leaf)
        # A subnormal weight is positive in most threads, but zero in a thread that flushes
        # subnormal
        # numbers. A positive node must have a positive child in both. Also, -0.0 becomes 0.0.
        return torch.where(leaf < torch.finfo(self.leaf).tiny, 0.0, leaf)

    def combine(self, children: torch.Tensor) -> torch.Tensor:
        """Combine children ``[..., 8]`` into parents ``[...]``, one half plus the other."""
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
    """Numbers and their minima or maxima. Inner entries have the dtype of the leaves."""

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
        # + 0.0 changes -0.0 to 0.0. Otherwise the minimum of the two would depend on their order.
        return value.to(self.leaf) + 0.0

    def combine(self, children: torch.Tensor) -> torch.Tensor:
        return children.amin(-1) if self.name == "min" else children.amax(-1)

    def both(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.minimum(a, b) if self.name == "min" else torch.maximum(a, b)

    def expected(self) -> str:
        return "values that are numbers"


Operation: TypeAlias = Sum | Extreme
"""The computation of leaves and nodes; ``name`` is its name in the native kernel."""


def operation_of(name: str, leaf: torch.dtype, capacity: int) -> Operation:
    """Return the operation with the name ``sum``, ``min`` or ``max``."""
    return Sum(leaf, capacity) if name == "sum" else Extreme(leaf, name)


_AS_THEY_ARE = (torch.float32, torch.float64)


def as_index(index: Any, device: torch.device) -> torch.Tensor:
    """Convert slots to int64 ``[K]`` on the device. Raises TypeError for non-integers."""
    if isinstance(index, range):
        return torch.arange(index.start, index.stop, index.step, device=device)
    if not isinstance(index, torch.Tensor):
        index = as_tensor(index)
        if index.numel() == 0 and index.ndim == 1:
            index = index.to(torch.int64)  # torch converts an empty list to float32
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise TypeError(f"expected indices that are integers, got {index.dtype}")
    if index.ndim != 1:
        raise ValueError(f"expected indices of shape [K], got {list(index.shape)}")
    return index.to(device, torch.int64).contiguous()


def as_values(value: Any, count: int, device: torch.device) -> torch.Tensor | float:
    """Convert values to a number, or to float32 or float64 ``[count]`` on the device."""
    if isinstance(value, numbers.Real):
        return float(value)
    value = as_numbers(value, device)
    if value.ndim == 0:
        # On an accelerator, reading the value would wait for the device; expanding does not.
        return float(value) if device.type == "cpu" else value.expand(count).contiguous()
    if value.shape != (count,):
        raise ValueError(
            f"expected one value or values of shape [{count}], got shape {list(value.shape)}"
        )
    return value


def as_numbers(value: Any, device: torch.device) -> torch.Tensor:
    """Convert real numbers to contiguous floats without gradient, on the device.

    The result is float32 or float64.
    """
    if not isinstance(value, torch.Tensor):
        real = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        value = as_tensor(value, dtype=torch.float64 if real else None)
    if value.dtype.is_complex or value.dtype == torch.bool:
        raise TypeError(f"expected values that are real numbers, got {value.dtype}")
    value = value.detach().resolve_neg().to(device)
    if value.dtype not in _AS_THEY_ARE:
        # float32 holds all shorter floats, float64 holds integers up to 2^53.
        value = value.to(torch.float32 if value.dtype.is_floating_point else torch.float64)
    return value.contiguous()


def refuse(
    operation: Operation, capacity: int, of_index: bool, offender: Any, position: Any
) -> None:
    """Raise the error for an update with an invalid index or value."""
    where = "" if position is None else f" at position {position}"
    if of_index:
        raise IndexError(f"expected indices in [0, {capacity}), got {offender}{where}")
    raise ValueError(f"expected {operation.expected()}, got {offender}{where}")


def refuse_query(limit: float, offender: float, position: int) -> None:
    """Raise the error for a value that no prefix can match. ``limit`` may be infinite."""
    what = "values of at least 0" if math.isinf(limit) else f"values in [0, {limit}], the total"
    raise ValueError(f"expected {what}, got {offender} at position {position}")


def refuse_range(capacity: int, start: Any, end: Any, position: Any = None) -> None:
    """Raise the error for a range that is invalid or not within the tree."""
    where = "" if position is None else f" at position {position}"
    said = f"got [{start}, {end}){where}"
    if 0 <= start <= capacity and 0 <= end <= capacity:
        raise ValueError(f"expected a range that starts before it ends, {said}")
    raise IndexError(f"expected a range within [0, {capacity}), {said}")
