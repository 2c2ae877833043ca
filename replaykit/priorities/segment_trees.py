"""Define segment trees of sums, minima and maxima."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import threading
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from replaykit import native
from replaykit._compat import Uncompiled, as_tensor
from replaykit.errors import EmptyDistributionError
from replaykit.keywords import checked_keywords
from replaykit.priorities.tree_kernels import (
    Extreme,
    Operation,
    Sum,
    TorchKernel,
    allocate,
    as_index,
    as_numbers,
    as_values,
    chosen_kernel,
    levels_of,
    refuse,
    refuse_query,
    refuse_range,
)

_TAKEN = -1
_INT64, _FLOAT32, _FLOAT64 = torch.int64, torch.float32, torch.float64


def _source(value: torch.Tensor | float) -> tuple[int, bool, float]:
    """Return new leaves for the core: an address, whether it has doubles, or one number."""
    if isinstance(value, float):
        return 0, False, value
    return value.data_ptr(), value.dtype is _FLOAT64, 0.0


class SegmentTree(Uncompiled):
    """Base class of sum, min and max trees; it cannot be instantiated.

    A tree is an array of ``capacity`` leaves, below nodes of eight children each. Until a leaf is
    set, it has the identity value of the operation (0, +inf or -inf). A node is always computed
    from its stored children, in a fixed order. It is never updated by adding a difference.
    Therefore the nodes depend only on the leaves, and are bit for bit the same on every kernel.

    Args:
        capacity: number of leaves, at least 1. It need not be a power of two.
        dtype: dtype of the leaves, ``torch.float32`` or ``torch.float64``.
        device: device of the tree and of all tensors that it returns.

    Raises:
        ValueError: the capacity is below 1.
        NotImplementedError: ``dtype`` is another dtype, or the device has no float64.
        RuntimeError: ``REPLAYKIT_TREE`` names a kernel that cannot be used.

    Every call on a tree takes its lock, so threads may share a tree. The update of a batch is
    atomic for other threads. An update that is refused changes nothing. On an accelerator, only
    ``leaves``, ``state_dict`` and calls that return a Python number wait for the device. If the
    device refuses an update, the next call that waits raises the error.

    Memory: 5.14 bytes per leaf for float32 sums and 9.14 for float64 sums; 4.57 and 9.14 bytes for
    minima and maxima.
    """

    _operation_name: ClassVar[str] = ""

    @torch.inference_mode(False)  # tensors created in inference mode cannot be changed outside it
    @checked_keywords
    def __init__(
        self,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if not self._operation_name:
            raise TypeError(f"expected a sum, min or max tree, got {type(self).__name__}")
        capacity = operator.index(capacity)
        if capacity < 1:
            raise ValueError(f"expected a capacity of at least 1, got {capacity}")
        if dtype not in (_FLOAT32, _FLOAT64):
            raise NotImplementedError(f"expected leaves of float32 or float64, got {dtype}")
        device = torch.device(device)
        if device.type == "mps":
            raise NotImplementedError("expected a device that has float64, got mps")
        name = self._operation_name
        operation = Sum(dtype, capacity) if name == "sum" else Extreme(dtype, name)
        self._operation: Operation = operation
        self._levels = levels_of(capacity)
        self._kernel_name = chosen_kernel(device)
        leaves, nodes = allocate(self._levels, dtype, operation.inner, device)
        leaves.fill_(operation.identity)
        nodes.fill_(operation.identity)
        self._leaves, self._nodes = leaves[:capacity], nodes
        self._device = leaves.device
        self._capacity = capacity
        self._lock = threading.Lock()
        # Exactly one of these two is set: a view in the compiled core, or the torch kernel.
        # The core's view of the tree, for calls that combine operations; None for a tree in torch.
        # Its caller must ensure that no other thread uses the tree at the same time.
        self.native_view: Any = None
        self._torch: TorchKernel | None = None
        if self._kernel_name == "torch":
            self._torch = TorchKernel(operation, self._levels, leaves, nodes)
        else:
            addresses = leaves.data_ptr(), nodes.data_ptr()
            self.native_view = native.core.SegmentTree(
                name, dtype is _FLOAT64, self._kernel_name, *addresses, capacity
            )

    # -- properties -------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of leaves."""
        return self._capacity

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the leaves."""
        return self._leaves.dtype

    @property
    def device(self) -> torch.device:
        """The device of the tree and of all tensors that it returns."""
        return self._device

    @property
    def kernel(self) -> str:
        """The kernel's name: ``avx512``, ``portable`` or ``torch``. Results are the same."""
        return self._kernel_name

    @property
    def nbytes(self) -> int:
        """Memory of leaves and nodes in bytes, including padding."""
        levels = self._levels
        return levels.leaves * self.dtype.itemsize + levels.entries * self._nodes.itemsize

    def __len__(self) -> int:
        return self._capacity

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(capacity={self._capacity}, dtype={self.dtype}, "
            f"device={str(self._device)!r}, kernel={self._kernel_name!r})"
        )

    # -- writing ----------------------------------------------------------------------------------

    def update(self, index: Any, value: Any) -> None:
        """Set leaves and combine the nodes above them.

        Args:
            index: int64 ``[K]``; other integers, lists and ranges are converted. If an index occurs
                several times, the last value counts.
            value: one number, or ``[K]`` of any real dtype, cast to the dtype of the leaves.

        Raises:
            IndexError: an index is outside ``[0, capacity)``.
            ValueError: the tree does not accept a value.

        Both messages name the first bad entry. After an error nothing has changed.

        Cost: O(K log8 capacity), without allocation.

        Example:
            >>> import torch
            >>> from replaykit.priorities import SumSegmentTree
            >>> tree = SumSegmentTree(4)
            >>> tree.update(torch.tensor([1, 3, 1]), torch.tensor([5.0, 2.0, 1.0]))
            >>> tree.leaves
            tensor([0., 1., 0., 2.])
        """
        # Most calls pass two tensors that need no conversion. A few attributes show this. A tensor
        # of one entry may be stored with the opposite sign (a view of a conjugate).
        if not (
            self.native_view is not None
            and type(index) is torch.Tensor
            and type(value) is torch.Tensor
            and index.dtype is _INT64
            and (value.dtype is _FLOAT32 or value.dtype is _FLOAT64)
            and index.is_cpu
            and value.is_cpu
            and index.dim() == 1
            and value.dim() == 1
            and index.numel() == value.numel() > 1
            and index.is_contiguous()
            and value.is_contiguous()
        ):
            index = as_index(index, self._device)
            value = as_values(value, len(index), self._device)
        with self._lock:
            if self._torch is not None:
                self._torch.update(index, value)
                return
            at, count = index.data_ptr(), index.shape[0]
            code = self.native_view.update(at, *_source(value), count)
        if code != _TAKEN:
            self._refuse(code, index, value)

    def update_range(self, start: int, value: Any, count: int | None = None) -> None:
        """Set the leaves ``start .. start + count - 1``.

        Args:
            start: the first leaf.
            value: ``[count]`` of any real dtype, or one number together with ``count``.
            count: number of leaves; None for the number of values.

        Raises:
            IndexError, ValueError: as ``update`` does.
            ValueError: ``count`` differs from the number of values.

        Cost: O(count). Each node above the changed leaves is computed once.

        Example:
            >>> from replaykit.priorities import SumSegmentTree
            >>> tree = SumSegmentTree(4)
            >>> tree.update_range(1, 2.0, 3)
            >>> tree.leaves
            tensor([0., 2., 2., 2.])
        """
        start = operator.index(start)
        if count is None:
            try:
                count = len(value)
            except TypeError:
                raise ValueError("expected a count with one value for a range, got None") from None
        count = operator.index(count)
        values = as_values(value, max(count, 0), self._device)
        if start < 0 or count < 0 or start + count > self._capacity:
            refuse_range(self._capacity, start, start + count)
        with self._lock:
            if self._torch is not None:
                self._torch.update_run(start, values, count)
                return
            code = self.native_view.update_run(start, *_source(values), count)
        if code != _TAKEN:
            self._refuse(code, None, values)

    def _refuse(self, code: int, index: torch.Tensor | None, value: torch.Tensor | float) -> None:
        """Raise the error for an error code of the compiled kernel."""
        position, of_value = divmod(code, 2)
        if index is not None and not of_value:
            refuse(self._operation, self._capacity, True, int(index[position]), position)
        if isinstance(value, float):
            refuse(self._operation, self._capacity, False, value, None)
        else:
            refuse(self._operation, self._capacity, False, float(value[position]), position)

    def fill(self, value: float) -> None:
        """Set every leaf to the value. Cost: O(capacity)."""
        self.update_range(0, value, self._capacity)

    def clear(self) -> None:
        """Set every leaf to the identity, as in a new tree. Cost: O(capacity)."""
        self.fill(self._operation.identity)

    def rebuild(self) -> None:
        """Compute all nodes from the leaves again.

        This call changes nodes only if other code has written to the memory directly. Cost:
        O(capacity), about 0.3 ms for a million leaves.
        """
        with self._lock:
            (self._torch or self.native_view).rebuild()

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            index = range(*index.indices(self._capacity))
            if index.step == 1:
                self.update_range(index.start, value, max(len(index), 0))
                return
        elif not isinstance(index, torch.Tensor) or index.ndim == 0:
            with contextlib.suppress(TypeError):  # several indices
                index = [operator.index(index)]
        self.update(index, value)

    # -- reading ----------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            rows = range(*index.indices(self._capacity))
            with self._lock:
                if rows.step == 1:
                    return self._leaves[rows.start : max(rows.stop, rows.start)].clone()
                return self._leaves.index_select(0, as_index(rows, self._device))
        if not isinstance(index, torch.Tensor) or index.ndim == 0:
            with contextlib.suppress(TypeError):  # several indices
                index = operator.index(index)
        if isinstance(index, int):
            if not 0 <= index < self._capacity:
                refuse(self._operation, self._capacity, True, index, None)
            with self._lock:
                self._synchronise()
                return float(self._leaves[index])
        index = as_index(index, self._device)
        with self._lock:
            if self._torch is not None:
                return self._torch.gather(index)
            wrong = (index < 0) | (index >= self._capacity)
            if bool(wrong.any()):
                position = int(wrong.nonzero()[0])
                refuse(self._operation, self._capacity, True, int(index[position]), position)
            return self._leaves.index_select(0, index)

    def _synchronise(self) -> None:
        if self._torch is not None:
            self._torch.synchronise()

    @property
    def leaves(self) -> torch.Tensor:
        """A copy of all leaves, ``[capacity]``."""
        with self._lock:
            self._synchronise()
            return self._leaves.clone()

    def reduce(self, start: Any = 0, end: Any = None) -> Any:
        """Combine the leaves of ``[start, end)``. An empty range gives the identity.

        Args:
            start, end: two ints, two tensors int64 ``[K]``, or an int and a tensor. ``end=None``
                means ``capacity``.

        Returns:
            A float for ints. For tensors, ``[K]`` in float64 from a sum tree, else in the leaves'
            dtype.

        Raises:
            IndexError: a range is not within the tree.
            ValueError: a range ends before it starts.

        Cost: O(log8 capacity) per range, O(1) for the whole tree. The order of additions depends
        only on the range and the capacity.

        Example:
            >>> import torch
            >>> from replaykit.priorities import MinSegmentTree
            >>> tree = MinSegmentTree(4)
            >>> tree[0:4] = torch.tensor([3.0, 1.0, 2.0, 5.0])
            >>> tree.reduce(), tree.reduce(2), tree.reduce(2, 2)
            (1.0, 2.0, inf)
            >>> tree.reduce(torch.tensor([0, 2]), torch.tensor([1, 4]))
            tensor([3., 2.])
        """
        if end is None:
            end = self._capacity
        if isinstance(start, torch.Tensor) or isinstance(end, torch.Tensor):
            return self._reduce_each(start, end)
        start, end = operator.index(start), operator.index(end)
        if not 0 <= start <= end <= self._capacity:
            refuse_range(self._capacity, start, end)
        with self._lock:
            if self.native_view is not None:
                if end - start == self._capacity:
                    return self.native_view.root()
                return self.native_view.reduce_one(start, end)
            assert self._torch is not None
            self._torch.synchronise()
            bounds = torch.tensor([[start], [end]], device=self._device)
            return float(self._torch.reduce(bounds[0], bounds[1]))

    def _reduce_each(self, start: Any, end: Any) -> torch.Tensor:
        bounds = [as_tensor(bound) for bound in (start, end)]
        count = max(bound.numel() for bound in bounds if bound.ndim)
        start, end = (
            as_index(bound if bound.ndim else bound.expand(count), self._device) for bound in bounds
        )
        if len(start) != len(end):
            raise ValueError(f"expected as many starts as ends, got {len(start)} and {len(end)}")
        with self._lock:
            if self._torch is not None:
                return self._torch.reduce(start, end)
            out = torch.empty(count, dtype=torch.float64, device="cpu")
            code = self.native_view.reduce(start.data_ptr(), end.data_ptr(), count, out.data_ptr())
        if code != _TAKEN:
            refuse_range(self._capacity, int(start[code]), int(end[code]), code)
        return out.to(self._operation.inner)

    def _root(self) -> float:
        with self._lock:
            return float((self._torch or self.native_view).root())

    # -- saving -----------------------------------------------------------------------------------

    def load(self, leaves: torch.Tensor) -> None:
        """Replace all leaves. After an error nothing has changed. Cost: O(capacity).

        Args:
            leaves: ``[capacity]``, of the tree's dtype, on any device.

        Raises:
            TypeError: the leaves have another dtype.
            ValueError: the leaves have another length, or the tree does not accept a value.
        """
        if not isinstance(leaves, torch.Tensor) or leaves.dtype != self.dtype:
            got = getattr(leaves, "dtype", type(leaves).__name__)
            raise TypeError(f"expected leaves of {self.dtype}, got {got}")
        if leaves.shape != (self._capacity,):
            raise ValueError(
                f"expected leaves of shape [{self._capacity}], got {list(leaves.shape)}"
            )
        with self._lock:
            self._synchronise()  # an earlier call may have left an error
        self.update_range(0, leaves)
        with self._lock:
            self._synchronise()

    def state_dict(self) -> dict[str, Any]:
        """Return the leaves, which determine the nodes bit for bit."""
        return {"leaves": self.leaves}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the leaves of a ``state_dict``.

        Raises:
            KeyError: the state has no leaves.
            TypeError, ValueError: as ``load`` does.
        """
        if "leaves" not in state:
            raise KeyError(f"expected the key 'leaves', got {sorted(state)}")
        self.load(state["leaves"])

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity": self._capacity, "device": str(self._device), "leaves": self.leaves}

    def __setstate__(self, state: dict[str, Any]) -> None:
        leaves = state["leaves"]
        SegmentTree.__init__(self, state["capacity"], dtype=leaves.dtype, device=state["device"])
        self.load(leaves)


class MinSegmentTree(SegmentTree):
    """An array with fast minima of its ranges.

    A leaf is +inf until it is set. The tree accepts all numbers, including infinity. NaN raises a
    ValueError. ``SegmentTree`` describes the properties of all trees.

    Example:
        >>> import torch
        >>> from replaykit.priorities import MinSegmentTree
        >>> tree = MinSegmentTree(100)
        >>> tree.root
        inf
        >>> tree[[3, 7]] = torch.tensor([2.0, -1.0])
        >>> tree.root, tree.reduce(0, 7)
        (-1.0, 2.0)
    """

    _operation_name = "min"

    @property
    def root(self) -> float:
        """The minimum of all leaves. Access waits for an accelerator. Cost: O(1)."""
        return self._root()


class MaxSegmentTree(SegmentTree):
    """An array with fast maxima of its ranges.

    A leaf is -inf until it is set. The tree accepts all numbers, including infinity. NaN raises a
    ValueError. ``SegmentTree`` describes the properties of all trees.

    Example:
        >>> from replaykit.priorities import MaxSegmentTree
        >>> tree = MaxSegmentTree(3)
        >>> tree[0:2] = 4.0
        >>> tree.root, tree.reduce(2, 3)
        (4.0, -inf)
    """

    _operation_name = "max"

    @property
    def root(self) -> float:
        """The maximum of all leaves. Access waits for an accelerator. Cost: O(1)."""
        return self._root()


_EMPTY = -2
_NOTHING = "expected a positive weight to draw, got a tree whose weights are all zero"


class SumSegmentTree(SegmentTree):
    """An array of weights with fast sums of ranges and fast draws of slots.

    Weights are finite and not negative. A weight is zero until it is set. A weight below the
    smallest normal number of ``dtype`` is stored as zero. A slot of weight zero is never found or
    drawn. Sums are always float64. ``SegmentTree`` describes the properties of all trees.

    Draws invert the cumulative distribution of the weights (proportional prioritization, Schaul et
    al., arXiv 1511.05952, appendix B.2.1). The interval of a slot excludes its right end, so a
    value on a boundary belongs to the next slot of positive weight.

    Example:
        >>> import torch
        >>> from replaykit import SumSegmentTree
        >>> tree = SumSegmentTree(1000)
        >>> tree[[1, 2, 900]] = torch.tensor([1.0, 2.0, 5.0])
        >>> tree.total, tree.reduce(0, 3)
        (8.0, 3.0)
        >>> tree.find_prefix(torch.tensor([0.0, 0.5, 1.0, 3.0, 8.0]))
        tensor([  1,   1,   2, 900, 900])
        >>> index, weight = tree.draw(4, generator=torch.Generator().manual_seed(0))
        >>> bool((weight == tree[index]).all())
        True
    """

    _operation_name = "sum"

    @property
    def total(self) -> float:
        """The sum of all weights. Access waits for an accelerator. Cost: O(1)."""
        return self._root()

    def total_tensor(self) -> torch.Tensor:
        """Return the sum of all weights, float64 ``[]`` on the device, without waiting."""
        with self._lock:
            if self._torch is not None:
                return self._torch.root_tensor()
            return torch.tensor(self.native_view.root(), dtype=_FLOAT64, device="cpu")

    @property
    def nonzero_count(self) -> int:
        """The number of positive weights, counted on each access. Cost: O(capacity)."""
        with self._lock:
            self._synchronise()
            return int(torch.count_nonzero(self._leaves))

    # -- finding ----------------------------------------------------------------------------------

    def find_prefix(self, value: Any) -> Any:
        """Return the smallest slot whose inclusive prefix sum exceeds ``value``.

        Args:
            value: a number, or ``[K]`` of any real dtype, in ``[0, total]``. The total itself
                gives the last slot of positive weight.

        Returns:
            An int for a number, int64 ``[K]`` for a tensor.

        Raises:
            ValueError: a value is NaN, negative or above the total.
            EmptyDistributionError: all weights are zero.

        Cost: O(K log8 capacity).
        """
        if (
            self.native_view is not None
            and type(value) is torch.Tensor
            and value.dtype is _FLOAT64
            and value.is_cpu
            and value.dim() == 1
            and (count := value.numel()) > 1
            and value.is_contiguous()
        ):
            index = torch.empty(count, dtype=_INT64, device="cpu")
            with self._lock:
                code = self.native_view.find(value.data_ptr(), count, True, index.data_ptr(), 0)
            if code != _TAKEN:
                self._refuse_value(code, value, True)
            return index
        if isinstance(value, numbers.Real):
            one = torch.full((1,), float(value), dtype=_FLOAT64, device=self._device)
            return int(self._find(one, True)[0][0])
        return self._find(self._as_queries(value), True)[0]

    def find(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slot and weight for each value. Draws, slices and shards use this method.

        Args:
            x: float64 ``[K]``, not negative. A value at or above the total, including infinity,
                gives the last slot of positive weight.

        Returns:
            index int64 ``[K]`` and weight float64 ``[K]``.

        Raises:
            ValueError: a value is NaN or negative.
            EmptyDistributionError: all weights are zero. On an accelerator, the result is index -1
                and weight 0 instead.
        """
        plain = x.dtype is _FLOAT64 and x.is_cpu and x.ndim == 1 and x.is_contiguous()
        if not plain or self._torch is not None or x.numel() < 2:  # see ``update``
            x = self._as_queries(x)
        return self._find(x, False)

    def _as_queries(self, value: Any) -> torch.Tensor:
        queries = as_numbers(value, self._device)
        if queries.ndim != 1:
            raise ValueError(f"expected values of shape [K], got {list(queries.shape)}")
        return queries.to(_FLOAT64)

    def _find(self, x: torch.Tensor, limited: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if self._torch is not None:
            with self._lock:
                found = self._torch.find(x, limited)
            if found is None:
                if x.numel():
                    raise EmptyDistributionError(_NOTHING)
                found = x.to(_INT64), x
            return found
        count = x.numel()
        index, weight = (
            torch.empty(count, dtype=_INT64, device="cpu"),
            torch.empty(count, dtype=_FLOAT64, device="cpu"),
        )
        with self._lock:
            code = self.native_view.find(
                x.data_ptr(), count, limited, index.data_ptr(), weight.data_ptr()
            )
        if code != _TAKEN:
            self._refuse_value(code, x, limited)
        return index, weight

    def _refuse_value(self, code: int, x: torch.Tensor, limited: bool) -> None:
        if code == _EMPTY:
            raise EmptyDistributionError(_NOTHING)
        refuse_query(self.total if limited else math.inf, float(x[code]), code)

    # -- drawing ----------------------------------------------------------------------------------

    def draw(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        stratified: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw slots with probability weight / total; return slots and their weights.

        Args:
            batch_size: number of slots, ``B``.
            generator: source of randomness, on the tree's device; None for torch's global
                generator. Each slot uses one uniform float64 number.
            stratified: if True, draw one slot from each of ``B`` equal parts of the total, in
                ascending order, instead of ``B`` independent slots. The variance is lower, and the
                expectation is the same.

        Returns:
            index int64 ``[B]`` and weight float64 ``[B]``.

        Raises:
            ValueError: ``batch_size`` is negative.
            EmptyDistributionError: all weights are zero. The state of the generator is then
                unchanged. On an accelerator, the result is index -1 and weight 0 instead.

        Cost: O(B log8 capacity). The same uniform numbers give the same slots on every kernel.
        """
        if batch_size < 0:
            raise ValueError(f"expected a batch size of at least 0, got {batch_size}")
        if self._torch is not None:
            with self._lock:
                drawn = self._torch.draw(batch_size, generator, stratified)
            if drawn is None:
                if batch_size:
                    raise EmptyDistributionError(_NOTHING)
                none = torch.empty(0, dtype=_FLOAT64, device=self._device)
                drawn = none.to(_INT64), none
            return drawn
        # Weights replace the uniform numbers in place. These are created under the lock, so that
        # draws happen in the order in which the generator advances.
        index = torch.empty(batch_size, dtype=_INT64, device="cpu")
        with self._lock:
            if batch_size and not self.native_view.root() > 0:
                raise EmptyDistributionError(_NOTHING)
            weight = torch.rand(batch_size, dtype=_FLOAT64, generator=generator, device="cpu")
            self.native_view.draw(weight.data_ptr(), batch_size, index.data_ptr(), stratified)
        return index, weight
