"""Which kernel serves a tree, and that it makes no difference to the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from replaykit import MaxSegmentTree, MinSegmentTree, SumSegmentTree
from replaykit.priorities import tree_kernels
from replaykit.priorities.tree_kernels import available_kernels
from tests import effort
from tests.support.refusals import refuses

TREES = [SumSegmentTree, MinSegmentTree, MaxSegmentTree]
DTYPES = [torch.float32, torch.float64]
F64 = torch.float64

EachKernel = Callable[[Callable[[], Any]], list[Any]]


def require_equal(results: list[Any]) -> None:
    """All the same, bit for bit."""
    first, *others = results
    for other in others:
        for one, another in zip(first, other, strict=True):
            assert one.dtype == another.dtype
            assert one.numpy().tobytes() == another.numpy().tobytes()


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tree_class", TREES)
@pytest.mark.parametrize("capacity", [1, 8, 9, 65, 513, 4097, 100_003])
def test_nodes_and_reductions_are_the_same_bits(
    each_kernel: EachKernel,
    require_rebuilt: Callable[[Any], None],
    capacity: int,
    tree_class: Any,
    dtype: torch.dtype,
) -> None:
    """Over six decades, where another order of additions shows in the last bits."""

    def make() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(capacity)
        tree = tree_class(capacity, dtype=dtype)
        leaves = (10 ** (torch.rand(capacity, generator=generator) * 6 - 3)).to(dtype)
        tree.load(leaves)
        model = leaves.numpy().copy()
        for count in (3, 100, 3000):
            index = torch.randint(0, capacity, (count,), generator=generator)
            value = (torch.rand(count, generator=generator) ** 9).clamp(min=1e-30)
            tree.update(index, value)
            model[index.numpy()] = value.numpy()  # of equal indices, the last one counts
            require_rebuilt(tree)
        assert tree.leaves.tolist() == model.tolist()
        start, end = torch.randint(0, capacity + 1, (2, 2000), generator=generator).sort(0).values
        start[:100], end[:600] = 0, capacity
        results = [tree._nodes.clone(), tree.leaves, tree.reduce(start, end)]
        ranges = zip(start[::40].tolist(), end[::40].tolist(), strict=True)
        each = torch.tensor([tree.reduce(*bounds) for bounds in ranges], dtype=results[2].dtype)
        assert torch.equal(each, results[2][::40])
        assert results[2][:100].tolist() == [tree.reduce()] * 100
        return results

    require_equal(each_kernel(make))


@pytest.mark.parametrize(("dtype", "stratified"), [(torch.float32, False), (torch.float64, True)])
def test_a_million_draws_are_the_same(
    each_kernel: EachKernel, dtype: torch.dtype, stratified: bool
) -> None:
    def draw() -> Any:
        generator = torch.Generator().manual_seed(1)
        tree = SumSegmentTree(100_003, dtype=dtype)
        tree.load((10 ** (torch.rand(100_003, generator=generator) * 6 - 3)).to(dtype))
        return tree.draw(effort.cases(1_000_000), generator=generator, stratified=stratified)

    require_equal(each_kernel(draw))


def within_a_rounding_of_a_boundary(generator: torch.Generator) -> Any:
    """In one node, where every order of additions puts the boundaries elsewhere."""
    results = []
    for _ in range(200):
        weights = torch.rand(8, generator=generator, dtype=F64)
        weights[torch.rand(8, generator=generator) < 0.1] = 0
        tree = SumSegmentTree(8, dtype=F64)
        tree.load(weights)
        sums = [weights.cumsum(0), weights.sum() - weights.flip(0).cumsum(0).flip(0)]
        near = [total + steps * 2**-53 for total in sums for steps in range(-4, 5)]
        results += tree.find(torch.cat(near).clamp(min=0))
    return results


def at_boundaries_deep_in_a_tree(generator: torch.Generator) -> Any:
    tree = SumSegmentTree(5000)
    weights = torch.rand(5000, generator=generator)
    weights[torch.rand(5000, generator=generator) < 0.5] = 0
    tree.load(weights)
    sums = weights.double().cumsum(0)
    return tree.find(torch.cat([sums, sums * (1 - 2**-53), sums * (1 + 2**-52)]))


def in_batches_of_any_size(generator: torch.Generator) -> Any:
    """Around the number of searches that are in flight at once."""
    tree = SumSegmentTree(3000)
    tree.load(torch.rand(3000, generator=generator))
    sizes = [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257]
    return [part for size in sizes for part in tree.draw(size, generator=generator)]


@pytest.mark.parametrize(
    "search",
    [within_a_rounding_of_a_boundary, at_boundaries_deep_in_a_tree, in_batches_of_any_size],
)
def test_searches_are_the_same(each_kernel: EachKernel, search: Callable[..., Any]) -> None:
    require_equal(each_kernel(lambda: search(torch.Generator().manual_seed(2))))


def test_environment_variable_chooses_the_kernel(kernel: str) -> None:
    for tree_class in TREES:
        assert tree_class(3).kernel == kernel
        assert kernel in repr(tree_class(3))


def test_without_the_environment_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLAYKIT_TREE", raising=False)
    assert SumSegmentTree(3).kernel == available_kernels()[0]
    monkeypatch.setenv("REPLAYKIT_TREE", " ")
    assert SumSegmentTree(3).kernel == available_kernels()[0]


def test_kernels_that_are_unknown_or_not_for_this_processor_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_kernels, "available_kernels", lambda: ["portable", "torch"])
    for name in ("avx512", "avx1024", "native", "neon"):
        monkeypatch.setenv("REPLAYKIT_TREE", name)
        words = f"expected REPLAYKIT_TREE to name .*one of portable, torch, got {name}"
        refuses(RuntimeError, words, SumSegmentTree, 3)
