"""Trees of minima and maxima."""

from __future__ import annotations

from replaykit.priorities.segment_tree import SegmentTree

__all__ = ["MaxSegmentTree", "MinSegmentTree"]


class MinSegmentTree(SegmentTree):
    """An array that knows the minimum of each of its ranges.

    A leaf is +inf until it is set. It takes every number, infinite ones too; ValueError for NaN.
    See ``SegmentTree`` for what all trees do.

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
        """The minimum of all leaves; on an accelerator this waits for it. Cost: O(1)."""
        return self._root()


class MaxSegmentTree(SegmentTree):
    """An array that knows the maximum of each of its ranges.

    A leaf is -inf until it is set. It takes every number, infinite ones too; ValueError for NaN.
    See ``SegmentTree`` for what all trees do.

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
        """The maximum of all leaves; on an accelerator this waits for it. Cost: O(1)."""
        return self._root()
