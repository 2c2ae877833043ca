"""Ranges combined: any of them, one by one and many at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from replaykit import MaxSegmentTree, MinSegmentTree, SumSegmentTree
from tests.support.refusals import refuses

TREES = {
    SumSegmentTree: (sum, 0.0),
    MinSegmentTree: (min, math.inf),
    MaxSegmentTree: (max, -math.inf),
}


@pytest.mark.parametrize("tree_class", TREES)
@pytest.mark.parametrize("capacity", [1, 3, 8, 9, 17, 64, 65, 73, 513, 4096])
def test_reduce_equals_a_list(kernel: str, tree_class: Any, capacity: int) -> None:
    """For every range of a small tree and some of a large one."""
    operation, identity = TREES[tree_class]
    generator = torch.Generator().manual_seed(capacity)
    values = torch.randint(1, 1000, (capacity,), generator=generator).float()
    tree = tree_class(capacity)
    tree.load(values)
    listed = values.tolist()
    start, end = torch.triu_indices(capacity + 1, capacity + 1)
    if capacity > 100:
        start, end = torch.randint(0, capacity + 1, (2, 500), generator=generator).sort(0).values
    expected = [
        operation(listed[low:high]) if high > low else identity
        for low, high in zip(start.tolist(), end.tolist(), strict=True)
    ]
    reduced = tree.reduce(start, end)
    assert reduced.tolist() == expected
    assert reduced.dtype == (torch.float64 if tree_class is SumSegmentTree else torch.float32)
    for i in range(0, len(expected), 7):
        assert tree.reduce(int(start[i]), int(end[i])) == expected[i]
    assert tree.reduce() == operation(listed)
    to_the_end = [operation(listed[low:]) if low < capacity else identity for low in start.tolist()]
    assert tree.reduce(start).tolist() == to_the_end
    assert tree.reduce(start, torch.tensor(capacity)).tolist() == to_the_end
    from_the_begin = [operation(listed[:high]) if high else identity for high in end.tolist()]
    assert tree.reduce(0, end).tolist() == from_the_begin


@pytest.mark.parametrize("tree_class", TREES)
def test_invalid_ranges_are_refused(kernel: str, tree_class: Any) -> None:
    tree = tree_class(20)
    for start, end in ((-1, 3), (3, 21), (21, 21), (-5, -5), (2, -1)):
        message = rf"expected a range within \[0, 20\), got \[{start}, {end}\)"
        refuses(IndexError, message, tree.reduce, start, end)
        with pytest.raises(IndexError, match=message + " at position 1"):
            tree.reduce(torch.tensor([0, start]), torch.tensor([20, end]))
    refuses(ValueError, r"starts before it ends, got \[5, 4\)", tree.reduce, 5, 4)
    with pytest.raises(ValueError, match="as many starts as ends, got 3 and 2"):
        tree.reduce(torch.zeros(3).long(), torch.zeros(2).long())
    refuses(TypeError, "integers", tree.reduce, torch.zeros(3), 2)
    assert tree.reduce(torch.empty(0, dtype=torch.int64), 3).tolist() == []
