"""Finding slots by prefix sums, against cumulative sums."""

from __future__ import annotations

import math

import pytest
import torch

from replaykit import SumSegmentTree
from replaykit.errors import EmptyDistributionError
from tests.support.refusals import refuses

F64 = torch.float64


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "capacity", [1, 2, 7, 8, 9, 63, 64, 65, 127, 511, 512, 513, 4096, 4097, 100_003]
)
def test_integer_weights_are_found_exactly(kernel: str, capacity: int, dtype: torch.dtype) -> None:
    """All sums are exact, so every boundary and every middle has one right answer."""
    generator = torch.Generator().manual_seed(capacity)
    weights = torch.randint(0, 1025, (capacity,), generator=generator).to(dtype)
    weights[torch.rand(capacity, generator=generator) < 0.3] = 0
    weights[capacity // 2] = 3
    tree = SumSegmentTree(capacity, dtype=dtype)
    tree.load(weights)
    ends = weights.to(F64).cumsum(0)
    assert tree.total == ends[-1] == tree.reduce()
    sums = torch.cat([torch.zeros(1, dtype=F64), ends])
    if capacity > 5000:
        sums = sums[torch.randperm(len(sums), generator=generator)[:5000]]
    x = torch.cat([sums, sums + 0.5, (sums - 0.5).clamp(min=0)])
    x = x[x <= tree.total]
    found = tree.find_prefix(x)
    assert found.dtype == torch.int64
    expected = torch.searchsorted(ends, x, right=True)
    assert torch.equal(found, expected.minimum(weights.nonzero().max()))
    index, weight = tree.find(x)
    assert index.tolist() == found.tolist()
    assert (weight.dtype, weight.tolist()) == (F64, weights[index].tolist())


def test_find_prefix_returns_the_first_slot_whose_sum_exceeds(kernel: str) -> None:
    tree = SumSegmentTree(5)
    tree[0:5] = [0.0, 2.0, 0.0, 1.0, 0.0]
    assert [tree.find_prefix(x) for x in (0, 1.5, 2, 2.5, 3)] == [1, 1, 3, 3, 3]
    assert isinstance(tree.find_prefix(0.5), int)
    assert tree.find_prefix(torch.tensor([0.0, 2.0])).tolist() == [1, 3]
    assert tree.find_prefix([2.0, 0.0]).tolist() == [3, 1]
    assert tree.find_prefix(torch.tensor([2, 0], dtype=torch.int32)).tolist() == [3, 1]
    assert tree.find_prefix(torch.empty(0)).tolist() == []
    strided = torch.tensor([0.0, 9.0, 2.0, 9.0], dtype=F64)[::2]
    assert tree.find_prefix(strided).tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("capacity", [9, 70, 515, 5000])
@pytest.mark.pitfall("PR8")
def test_a_zero_weight_is_never_found(kernel: str, capacity: int, dtype: torch.dtype) -> None:
    """PR8: weights over 76 decades with zeros between them, at every boundary and next to it."""
    generator = torch.Generator().manual_seed(3)
    for density in (0.02, 0.3, 0.9):
        decades = torch.rand(capacity, dtype=F64, generator=generator) * 76 - 38
        weights = (10**decades).clamp(min=2e-38, max=3e38 / capacity).to(dtype)
        weights[torch.rand(capacity, generator=generator) > density] = 0
        weights[0 if density < 0.5 else capacity // 3] = 1.0
        tree = SumSegmentTree(capacity, dtype=dtype)
        tree.load(weights)
        sums = tree.reduce(0, torch.arange(capacity + 1))
        below = torch.nextafter(sums, torch.zeros(()).double())
        above = torch.nextafter(sums, torch.full((), math.inf).double())
        index, weight = tree.find(torch.cat([sums, below, above, torch.tensor([math.inf])]))
        assert bool((weight > 0).all())
        assert bool(((index >= 0) & (index < capacity)).all())
        assert torch.equal(weight, weights[index].double())
        last = int(weights.nonzero()[-1])
        assert tree.find_prefix(tree.total) == last == int(index[-1])


@pytest.mark.parametrize("bad", [math.nan, -1.0, -1e-300, math.inf, 3.0000001])
@pytest.mark.parametrize("position", [0, 1, 99])
def test_values_outside_the_total_are_refused(kernel: str, bad: float, position: int) -> None:
    tree = SumSegmentTree(4)
    tree[0:3] = 1.0
    x = torch.ones(100, dtype=F64)
    x[position] = bad
    message = rf"expected values in \[0, 3.0\], the total, got .* at position {position}$"
    refuses(ValueError, message, tree.find_prefix, x)
    refuses(ValueError, "expected values in", tree.find_prefix, bad)
    if not bad > 0:
        refuses(ValueError, rf"expected values of at least 0, .* {position}$", tree.find, x)
    else:
        assert int(tree.find(x)[0][position]) == 2


def test_in_a_tree_of_zeros_there_is_nothing_to_find(kernel: str) -> None:
    tree = SumSegmentTree(100)
    for call in (
        lambda: tree.find_prefix(0.0),
        lambda: tree.find_prefix(torch.zeros(3, dtype=F64)),
        lambda: tree.find(torch.zeros(3, dtype=F64)),
        lambda: tree.draw(3),
        lambda: tree.draw(3, stratified=True),
    ):
        refuses(EmptyDistributionError, "expected a positive weight to draw", call)
    assert tree.find_prefix(torch.empty(0, dtype=F64)).tolist() == []
    assert [part.tolist() for part in tree.draw(0)] == [[], []]
    tree.update(torch.tensor([77]), 1e-30)
    assert tree.draw(50)[0].unique().tolist() == [77]
    tree[77] = 0
    assert tree.total == 0
    with pytest.raises(EmptyDistributionError):
        tree.draw(1)
