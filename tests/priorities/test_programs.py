"""Any sequence of operations, against plain lists."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replaykit import MaxSegmentTree, MinSegmentTree, SumSegmentTree
from replaykit.errors import EmptyDistributionError
from replaykit.priorities.tree_kernels import available_kernels

KERNELS = available_kernels()
F64 = torch.float64
IDENTITY = {SumSegmentTree: 0.0, MinSegmentTree: math.inf, MaxSegmentTree: -math.inf}
TINY, LARGE = 2.0**-126, 2.0**127

WEIGHTS = st.one_of(
    st.just(0.0),
    st.integers(0, 9).map(float),
    st.floats(TINY, LARGE, width=32),
    st.sampled_from([TINY, 3.4028234663852886e38, -0.0]),
)
NUMBERS = st.floats(allow_nan=False, width=32, allow_subnormal=False)
POSITIONS = st.integers(0, 10**6)


def steps(values: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.tuples(st.just("update"), st.lists(st.tuples(POSITIONS, values), max_size=20)),
        st.tuples(st.just("update to"), st.lists(POSITIONS, max_size=9), values),
        st.tuples(st.just("run"), POSITIONS, st.lists(values, max_size=30)),
        st.tuples(st.just("run to"), POSITIONS, st.integers(0, 40), values),
        st.tuples(st.just("fill"), values),
        st.tuples(st.just("clear")),
        st.tuples(st.just("reload")),
    )


def apply(step: Any, tree: Any, model: list[float]) -> Any:
    """One step on the tree and on the list; returns the tree to go on with."""
    name, *rest = step
    size = len(model)
    if name == "update":
        pairs = [(at % size, value) for at, value in rest[0]]
        index = torch.tensor([at for at, _ in pairs], dtype=torch.int64)
        tree.update(index, torch.tensor([value for _, value in pairs]))
        for at, value in pairs:
            model[at] = value
    elif name == "update to":
        tree.update([at % size for at in rest[0]], rest[1])
        for at in rest[0]:
            model[at % size] = rest[1]
    elif name == "run":
        start = rest[0] % size
        values = rest[1][: size - start]
        tree.update_range(start, torch.tensor(values))
        model[start : start + len(values)] = values
    elif name == "run to":
        start = rest[0] % size
        count = min(rest[1], size - start)
        tree.update_range(start, rest[2], count)
        model[start : start + count] = [rest[2]] * count
    elif name == "fill":
        tree.fill(rest[0])
        model[:] = [rest[0]] * size
    elif name == "clear":
        tree.clear()
        model[:] = [IDENTITY[type(tree)]] * size
    else:
        other = type(tree)(size, dtype=tree.dtype)
        other.load_state_dict(tree.state_dict())
        return other
    return tree


def programs(values: st.SearchStrategy[float]) -> Any:
    return given(
        st.sampled_from([1, 2, 7, 8, 9, 63, 64, 65, 66, 130, 513]),
        st.sampled_from([torch.float32, torch.float64]),
        st.lists(steps(values), max_size=8),
        st.lists(POSITIONS, min_size=2, max_size=8),
    )


@pytest.mark.acceptance("S11", "F7", "F19")
@pytest.mark.parametrize("name", KERNELS)
def test_a_sum_tree_is_a_list_of_weights(name: str, require_rebuilt: Callable[[Any], None]) -> None:
    """Nodes equal a rebuild bit for bit, sums the list's, and no slot of weight zero is found."""

    @settings(max_examples=60, deadline=None, derandomize=True)
    @programs(WEIGHTS)
    @example(65, torch.float32, [("run", 0, [LARGE] * 9), ("update", [(0, 1.0)])], [0, 64])
    def check(capacity: int, dtype: torch.dtype, program: list[Any], bounds: list[int]) -> None:
        tree, model = SumSegmentTree(capacity, dtype=dtype), [0.0] * capacity
        for step in program:
            tree = apply(step, tree, model)
            require_rebuilt(tree)
        assert tree.leaves.tolist() == model
        assert tree.nonzero_count == sum(weight > 0 for weight in model)
        assert tree.total == tree.reduce() == tree.total_tensor().item()
        assert tree.total == pytest.approx(math.fsum(model), rel=1e-12)
        low, high = sorted(bound % (capacity + 1) for bound in bounds[:2])
        assert tree.reduce(low, high) == pytest.approx(math.fsum(model[low:high]), rel=1e-12)
        if tree.total == 0:
            with pytest.raises(EmptyDistributionError):
                tree.find(torch.zeros(1, dtype=F64))
            return
        sums = tree.reduce(0, torch.arange(capacity + 1))
        x = torch.cat([sums, torch.nextafter(sums, sums * 0), sums * 1.0000001])
        index, weight = tree.find(torch.cat([x, torch.tensor([math.inf])]))
        assert weight.tolist() == [model[at] for at in index.tolist()]
        assert bool((weight > 0).all())

    with mock.patch.dict(os.environ, {"REPLAYKIT_TREE": name}):
        check()


@pytest.mark.acceptance("F22")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("tree_class", [MinSegmentTree, MaxSegmentTree])
def test_an_extreme_tree_is_a_list_of_numbers(
    name: str, tree_class: Any, require_rebuilt: Callable[[Any], None]
) -> None:
    best = min if tree_class is MinSegmentTree else max

    @settings(max_examples=40, deadline=None, derandomize=True)
    @programs(NUMBERS)
    def check(capacity: int, dtype: torch.dtype, program: list[Any], bounds: list[int]) -> None:
        tree, model = tree_class(capacity, dtype=dtype), [IDENTITY[tree_class]] * capacity
        for step in program:
            tree = apply(step, tree, model)
            require_rebuilt(tree)
        assert tree.leaves.tolist() == model
        assert tree.root == tree.reduce() == best(model)
        pairs = [
            sorted(b % (capacity + 1) for b in bounds[i : i + 2]) for i in (0, len(bounds) - 2)
        ]
        expected = [best(model[low:high], default=IDENTITY[tree_class]) for low, high in pairs]
        assert [tree.reduce(low, high) for low, high in pairs] == expected
        starts, ends = torch.tensor(pairs).T
        assert tree.reduce(starts, ends).tolist() == expected

    with mock.patch.dict(os.environ, {"REPLAYKIT_TREE": name}):
        check()
