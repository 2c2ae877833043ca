"""Segment trees: arrays of numbers with fast sums, minima and maxima of ranges.

This table lists the same operations in other packages:

    ===========================  ==============  ==================  ================
    here                         ALF             Emote               TorchRL
    ===========================  ==============  ==================  ================
    tree[i] = value              same            same                same
    tree.reduce()                summary()       reduce(0, None)     query(0, n)
    tree.reduce(start, end)                      reduce(start, end)  query(l, r)
    sum_tree.reduce(start, end)                  sum(start, end)     query(l, r)
    sum_tree.find_prefix(value)  find_sum_bound  find_prefixsum_idx  scan_lower_bound
    min_tree.reduce(start, end)                  min(start, end)     query(l, r)
    ===========================  ==============  ==================  ================

Ranges end before ``end``, as in Python. The capacity need not be a power of two. A leaf that was
not set holds the identity of the operation. ALF fills such leaves with zero, and Emote with a
neutral element.

Example:
    >>> import torch
    >>> from replaykit.priorities import MaxSegmentTree, SumSegmentTree
    >>> weights = SumSegmentTree(5)
    >>> weights[0:5] = torch.arange(5)
    >>> weights.total, weights.reduce(1, 3), weights.find_prefix(3.5)
    (10.0, 3.0, 3)
    >>> MaxSegmentTree(5).reduce()
    -inf
"""

from __future__ import annotations

from replaykit.priorities.segment_trees import (
    MaxSegmentTree,
    MinSegmentTree,
    SegmentTree,
    SumSegmentTree,
)

__all__ = ["MaxSegmentTree", "MinSegmentTree", "SegmentTree", "SumSegmentTree"]
