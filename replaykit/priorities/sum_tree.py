"""The sum tree: an array of weights from which slots can be drawn in proportion to them."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch

from replaykit.errors import EmptyDistributionError
from replaykit.priorities.arguments import as_numbers, refuse_query
from replaykit.priorities.segment_tree import SegmentTree

__all__ = ["SumSegmentTree"]

_TAKEN, _EMPTY = -1, -2
_INT64, _FLOAT64 = torch.int64, torch.float64
_NOTHING = "expected a positive weight to draw, got a tree in which all are zero"


class SumSegmentTree(SegmentTree):
    """An array of weights that knows the sum of each of its ranges, and finds and draws slots.

    Weights are finite and not negative, and zero until they are set; one that is below the smallest
    normal number of ``dtype`` is stored as zero. A slot of weight zero is never found or drawn.
    Sums are float64 whatever the leaves are. See ``SegmentTree`` for what all trees do.

    Source of the search: the inverse of the cumulative distribution (proportional prioritization,
    Schaul et al., arXiv 1511.05952, appendix B.2.1), on intervals that are open on the right, so
    that a value on a boundary belongs to the next slot of positive weight.

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
        """The sum of all weights; on an accelerator this waits for it. Cost: O(1)."""
        return self._root()

    def total_tensor(self) -> torch.Tensor:
        """The sum of all weights, float64 without dimensions, on the device; waits for nothing."""
        with self._lock:
            if self._torch is not None:
                return self._torch.root_tensor()
            return torch.tensor(self._view.root(), dtype=_FLOAT64, device="cpu")

    @property
    def nonzero_count(self) -> int:
        """How many weights are positive. Counted when asked for. Cost: O(capacity)."""
        with self._lock:
            self._synchronise()
            return int(torch.count_nonzero(self._leaves))

    # -- finding ----------------------------------------------------------------------------------

    def find_prefix(self, value: Any) -> Any:
        """The smallest slot up to which the weights, its own included, sum to more than ``value``.

        Args:
            value: a number, or ``[K]`` of any real dtype, in ``[0, total]``; the total itself gives
                the last slot of positive weight.

        Returns:
            An int for a number, int64 ``[K]`` for a tensor.

        Errors: ValueError for values that are NaN, negative or above the total;
        EmptyDistributionError if all weights are zero.
        Cost: O(K log8 capacity).
        """
        if (
            self._view is not None
            and type(value) is torch.Tensor
            and value.dtype is _FLOAT64
            and value.is_cpu
            and value.dim() == 1
            and (count := value.numel()) > 1
            and value.is_contiguous()
        ):
            index = torch.empty(count, dtype=_INT64, device="cpu")
            with self._lock:
                code = self._view.find(value.data_ptr(), count, True, index.data_ptr(), 0)
            if code != _TAKEN:
                self._refuse_value(code, value, True)
            return index
        if isinstance(value, numbers.Real):
            one = torch.full((1,), float(value), dtype=_FLOAT64, device=self._device)
            return int(self._find(one, True)[0][0])
        return self._find(self._as_queries(value), True)[0]

    def find(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and weight for each value: what draws, slices and shards are made of.

        Args:
            x: float64 ``[K]``, not negative. Values from the total on, infinite ones too, give the
                last slot of positive weight.

        Returns:
            index int64 ``[K]`` and weight float64 ``[K]``.

        Errors: ValueError for NaN or negative values, EmptyDistributionError if all weights are
        zero; on an accelerator that gives index -1 and weight 0 instead.
        """
        return self._find(self._as_queries(x), False)

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
            code = self._view.find(
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
        """Slots at random, each with probability weight / total, and their weights.

        Args:
            batch_size: how many, ``B``.
            generator: where the randomness comes from, on the tree's device; torch's global one
                if None. One float64 uniform is taken a slot.
            stratified: one slot from each of ``B`` equal parts of the total, in ascending order,
                instead of ``B`` independent ones; lower variance, same expectation.

        Returns:
            index int64 ``[B]`` and weight float64 ``[B]``.

        Errors: ValueError for a negative ``batch_size``; EmptyDistributionError if all weights are
        zero, before the generator moves. On an accelerator that gives index -1 and weight 0.
        Cost: O(B log8 capacity). The same uniforms give the same slots on every kernel.
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
        # The uniforms become the weights in place. Made under the lock, so that the order of draws
        # is that in which the generator moves.
        index = torch.empty(batch_size, dtype=_INT64, device="cpu")
        with self._lock:
            if batch_size and not self._view.root() > 0:
                raise EmptyDistributionError(_NOTHING)
            weight = torch.rand(batch_size, dtype=_FLOAT64, generator=generator, device="cpu")
            self._view.draw(weight.data_ptr(), batch_size, index.data_ptr(), stratified)
        return index, weight
