"""Lay out segment trees in memory, and change and search them, compiled or in torch."""

from __future__ import annotations

import contextlib
import math
import mmap
import numbers
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from replaykit import native
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
        >>> from replaykit.priorities.tree_kernels import levels_of
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


_VARIABLE = "REPLAYKIT_TREE"


def available_kernels() -> list[str]:
    """Return the names of the kernels that this CPU can run, fastest first.

    Example:
        >>> from replaykit.priorities.tree_kernels import available_kernels
        >>> available_kernels()[-1]
        'torch'
    """
    return [*native.core.tree_kernels(), "torch"]


def chosen_kernel(device: torch.device) -> str:
    """Return the name of the kernel for a tree on a device.

    The environment variable ``REPLAYKIT_TREE`` (``avx512``, ``portable`` or ``torch``) overrides
    the choice for the CPU. The function raises RuntimeError if the variable names a kernel that
    this machine cannot use.
    """
    if device.type != "cpu":
        return "torch"
    there = available_kernels()
    wanted = os.environ.get(_VARIABLE, "").strip().lower()
    if not wanted:
        return there[0]
    if wanted not in there:
        raise RuntimeError(
            f"expected {_VARIABLE} to name a kernel that this machine can use, one of "
            f"{', '.join(there)}, got {wanted}"
        )
    return wanted


_LAST = math.nextafter(1.0, 0.0)
_INDEX, _VALUE, _QUERY, _RANGE = 1, 2, 3, 4


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Return numbers as int64 with the same bits. An index stays unchanged."""
    return value.to(torch.float64).view(torch.int64)


def _number(bits: int) -> float:
    number: float = struct.unpack("d", struct.pack("q", bits))[0]
    return number


class TorchKernel:
    """The operations of a tree in torch.

    Leaves are ``[levels.leaves]``, entries ``[levels.entries]``.
    """

    name = "torch"

    def __init__(
        self, operation: Operation, levels: Levels, leaves: torch.Tensor, nodes: torch.Tensor
    ) -> None:
        self._operation = operation
        self._capacity = levels.capacity
        # Children of the nodes, from the leaves upwards, `[count, 8]` each.
        self._children = [leaves.view(-1, FAN)]
        self._entries = []
        for count, offset in zip(levels.counts, levels.offsets, strict=True):
            padded = -(-count // FAN) * FAN
            self._entries.append(nodes[offset : offset + padded])
            self._children.append(self._entries[-1].view(-1, FAN))
        self._leaves = leaves
        self._counts = (levels.capacity, *levels.counts)
        self._deferred = leaves.device.type != "cpu"
        # Kind of error, position, value and a second number of the first refused entry.
        self._refused = torch.zeros(4, dtype=torch.int64, device=leaves.device)

    # -- refusing ---------------------------------------------------------------------------------

    def synchronise(self) -> None:
        """Raise the deferred error of an earlier call on an accelerator, only once."""
        if self._deferred:
            refusal = self._refused.tolist()
            if refusal[0]:
                self._refused.zero_()
                self._raise(*refusal)

    def _raise(self, kind: int, position: int, first: int, second: int) -> None:
        if kind == _INDEX:
            refuse(self._operation, self._capacity, True, first, position)
        elif kind == _VALUE:
            refuse(self._operation, self._capacity, False, _number(first), position)
        elif kind == _QUERY:
            refuse_query(_number(second), _number(first), position)
        else:
            refuse_range(self._capacity, first, second, position)

    def _refuse(
        self, bad: torch.Tensor, kind: torch.Tensor | int, first: torch.Tensor, second: Any = None
    ) -> torch.Tensor | None:
        """Raise an error for the first bad entry; on an accelerator, record it for later.

        Returns:
            On an accelerator, a tensor that is True if an entry is bad. On the CPU, None.
        """
        any_bad = bad.any()
        if not self._deferred and not bool(any_bad):
            return None
        size = bad.numel()
        if size == 0:
            return None
        order = torch.arange(size, device=bad.device)
        position = torch.where(bad, order, size).amin().clamp(max=size - 1).reshape(1)
        kinds = torch.full_like(order, kind) if isinstance(kind, int) else kind
        columns = (kinds, order, first, order if second is None else second)
        refusal = torch.cat([column.index_select(0, position) for column in columns])
        if not self._deferred:
            self._raise(*refusal.tolist())
        # Write in place, so that a captured graph writes to the tensor that `synchronise` reads.
        first_one = any_bad & (self._refused[0] == 0)
        self._refused.copy_(torch.where(first_one, refusal, self._refused))
        return any_bad

    # -- writing ----------------------------------------------------------------------------------

    def update(self, index: torch.Tensor, value: torch.Tensor | float) -> None:
        """Set all given leaves, or none; of equal indices, the last value counts."""
        if index.numel() == 0:
            return
        if not isinstance(value, torch.Tensor):
            value = torch.full(index.shape, value, dtype=torch.float64, device=index.device)
        wrong = (index < 0) | (index >= self._capacity)
        bad = wrong | self._operation.refuses(value)
        kind = torch.where(wrong, _INDEX, _VALUE)
        refused = self._refuse(bad, kind, torch.where(wrong, index, _bits(value)))
        if refused is not None:
            index = index.clamp(0, self._capacity - 1)
        # A scatter writes equal indices in undefined order. After these steps, all entries of an
        # index have the value of its last entry, so the order does not matter.
        index, order = torch.sort(index, stable=True)
        last = torch.searchsorted(index, index, right=True) - 1
        leaf = self._operation.stored(value).index_select(0, order.index_select(0, last))
        if refused is not None:
            leaf = torch.where(refused, self._leaves.index_select(0, index), leaf)
        self._leaves.index_copy_(0, index, leaf)
        self._refresh(index)

    def update_run(self, start: int, value: torch.Tensor | float, count: int) -> None:
        """Set the leaves ``start .. start + count - 1``, or none."""
        if count == 0:
            return
        if not isinstance(value, torch.Tensor):
            value = torch.full((count,), value, dtype=torch.float64, device=self._leaves.device)
        refused = self._refuse(self._operation.refuses(value), _VALUE, _bits(value))
        run = self._leaves[start : start + count]
        leaf = self._operation.stored(value)
        run.copy_(leaf if refused is None else torch.where(refused, run, leaf))
        first, last = start, start + count - 1
        for children, entries in zip(self._children, self._entries, strict=False):
            first, last = first // FAN, last // FAN
            entries[first : last + 1] = self._operation.combine(children[first : last + 1])

    def _refresh(self, index: torch.Tensor) -> None:
        counts = self._counts[1:]
        for children, entries, count in zip(self._children, self._entries, counts, strict=False):
            index = index // FAN
            if count <= index.numel():
                entries[:count] = self._operation.combine(children[:count])
            else:
                touched = self._operation.combine(children.index_select(0, index))
                entries.index_copy_(0, index, touched)

    def rebuild(self) -> None:
        """Compute all nodes from their stored children."""
        for children, entries, count in zip(
            self._children, self._entries, self._counts[1:], strict=False
        ):
            entries[:count] = self._operation.combine(children[:count])

    # -- reading ----------------------------------------------------------------------------------

    def gather(self, index: torch.Tensor) -> torch.Tensor:
        """Return the leaves at ``index``. An accelerator clamps bad indices to the tree."""
        bad = (index < 0) | (index >= self._capacity)
        if self._refuse(bad, _INDEX, index) is not None:
            index = index.clamp(0, self._capacity - 1)
        return self._leaves.index_select(0, index)

    def root_tensor(self) -> torch.Tensor:
        """Return the combination of all leaves, as a tensor without dimensions."""
        return self._operation.combine(self._children[-1][0])

    def root(self) -> float:
        """Return the combination of all leaves."""
        self.synchronise()
        return float(self.root_tensor())

    def reduce(self, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        """Combine leaves ``start .. end - 1`` of each range in the native kernel's order."""
        capacity, operation = self._capacity, self._operation
        bad = (start < 0) | (start > end) | (end > capacity)
        if self._refuse(bad, _RANGE, start, end) is not None:
            start, end = torch.where(bad, 0, start), torch.where(bad, 0, end)
        result = torch.full_like(start, operation.identity, dtype=operation.inner)
        top = len(self._children) - 1
        for level, (children, count) in enumerate(zip(self._children, self._counts, strict=True)):
            end = torch.where((end == count) & (start < end), len(children) * FAN, end)
            left, right = start // FAN, end // FAN
            done = (left == right) | (level == top)
            # The left node contributes its leaves up to the end of the range or of the node. The
            # next level handles a whole node.
            stop = torch.where(done, end - left * FAN, torch.where(start % FAN != 0, FAN, 0))
            result = operation.both(result, self._part(children, left, start - left * FAN, stop))
            if level == top:
                break
            stop = torch.where(done, 0, end % FAN)
            result = operation.both(result, self._part(children, right, stop * 0, stop))
            start = torch.where(done, 0, (start + FAN - 1) // FAN)
            end = torch.where(done, 0, right)
        return result

    def _part(
        self, children: torch.Tensor, node: torch.Tensor, first: torch.Tensor, stop: torch.Tensor
    ) -> torch.Tensor:
        lane = torch.arange(FAN, device=children.device)
        kept = (lane >= first.unsqueeze(1)) & (lane < stop.unsqueeze(1))
        eight = children.index_select(0, node.clamp(max=len(children) - 1))
        return self._operation.combine(torch.where(kept, eight, self._operation.identity))

    def find(self, x: torch.Tensor, limited: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return slot and weight of each value; on the CPU, None if all weights are 0."""
        total = self.root_tensor()
        if not self._deferred and not bool(total > 0):
            return None
        bad = ~(x >= 0) | (x > total) if limited else ~(x >= 0)
        limit = (total if limited else torch.full_like(total, math.inf)).expand(x.shape)
        if self._refuse(bad, _QUERY, _bits(x), _bits(limit)) is not None:
            x = torch.where(bad, 0.0, x)
        return self._descend(x, total)

    def draw(
        self, batch_size: int, generator: torch.Generator | None, stratified: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Draw slots; return slots and weights. On the CPU, None if all weights are 0."""
        total = self.root_tensor()
        if not self._deferred and not bool(total > 0):
            return None
        device = total.device
        u = torch.rand(batch_size, dtype=torch.float64, device=device, generator=generator)
        if stratified:
            # Divide by a tensor, because an accelerator would multiply by the inverse of a number.
            strata = torch.full_like(u, batch_size)
            u = (torch.arange(batch_size, dtype=torch.float64, device=device) + u) / strata
        return self._descend(u.clamp(max=_LAST) * total, total)

    def _descend(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
        # The additions of the total and of the prefixes have different orders, so that rounding may
        # differ. An infinite value descends to the last positive child at every level.
        x = torch.where(x >= total, math.inf, x)
        rank = torch.arange(1, FAN + 1, device=x.device)
        eight = before = chosen = at.unsqueeze(1)
        for children in reversed(self._children):
            eight = children.index_select(0, at)
            before = torch.zeros(len(at), FAN + 1, dtype=torch.float64, device=x.device)
            p = before[:, 1:]
            p.copy_(eight)
            # Compute prefix sums of eight numbers in three steps, in the kernels' order of
            # additions.
            p[:, 1::2].add_(p[:, 0::2])
            halves = p.unflatten(1, (2, 4))
            halves[:, :, 2:].add_(halves[:, :, 1:2])
            p[:, 4:].add_(p[:, 3:4])
            allowed = (before[:, :FAN] <= x.unsqueeze(1)).logical_and_(eight > 0)
            # If no child is allowed, use the first. This happens only in a tree of zeros.
            chosen = (allowed * rank).amax(1, keepdim=True).sub_(1).clamp_(min=0)
            x = x - before.gather(1, chosen).squeeze(1)
            at = (at * FAN).add_(chosen.squeeze(1))
        weight = eight.gather(1, chosen).squeeze(1).to(torch.float64)
        if self._deferred:
            empty = ~(total > 0)
            at, weight = torch.where(empty, -1, at), torch.where(empty, 0.0, weight)
        return at, weight
