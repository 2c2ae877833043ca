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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tree_class", TREES)
@pytest.mark.parametrize("capacity", [1, 8, 9, 64, 65, 513, 4097, 100_003])
def test_nodes_and_reductions_are_the_same_bits(
    each_kernel: EachKernel, capacity: int, tree_class: Any, dtype: torch.dtype
) -> None:
    """Over six decades, where another order of additions shows in the last bits."""

    def make() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(capacity)
        tree = tree_class(capacity, dtype=dtype)
        tree.load((10 ** (torch.rand(capacity, generator=generator) * 6 - 3)).to(dtype))
        for count in (3, 100, 3000):
            index = torch.randint(0, capacity, (count,), generator=generator)
            tree.update(index, torch.rand(count, generator=generator) ** 9)
        start, end = torch.randint(0, capacity + 1, (2, 2000), generator=generator).sort(0).values
        start[:100], end[:600] = 0, capacity
        results = [tree._nodes.clone(), tree.leaves, tree.reduce(start, end)]
        ranges = zip(start[::40].tolist(), end[::40].tolist(), strict=True)
        each = torch.tensor([tree.reduce(*bounds) for bounds in ranges], dtype=results[2].dtype)
        assert torch.equal(each, results[2][::40])
        assert results[2][:100].tolist() == [tree.reduce()] * 100
        return results

    require_equal(each_kernel(make))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stratified", [False, True])
def test_a_million_draws_are_the_same(
    each_kernel: EachKernel, dtype: torch.dtype, stratified: bool
) -> None:
    def draw() -> Any:
        generator = torch.Generator().manual_seed(1)
        tree = SumSegmentTree(100_003, dtype=dtype)
        tree.load((10 ** (torch.rand(100_003, generator=generator) * 6 - 3)).to(dtype))
        return tree.draw(effort.cases(1_000_000), generator=generator, stratified=stratified)

    require_equal(each_kernel(draw))


def test_searches_within_a_rounding_of_a_boundary_are_the_same(each_kernel: EachKernel) -> None:
    """In one node, where every order of additions puts the boundaries elsewhere."""

    def find() -> Any:
        generator = torch.Generator().manual_seed(2)
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

    require_equal(each_kernel(find))


def test_searches_at_boundaries_deep_in_a_tree_are_the_same(each_kernel: EachKernel) -> None:
    def find() -> Any:
        generator = torch.Generator().manual_seed(2)
        tree = SumSegmentTree(5000)
        weights = torch.rand(5000, generator=generator)
        weights[torch.rand(5000, generator=generator) < 0.5] = 0
        tree.load(weights)
        sums = weights.double().cumsum(0)
        below, above = sums * (1 - 2**-53), sums * (1 + 2**-52)
        return tree.find(torch.cat([sums, below, above]))

    require_equal(each_kernel(find))


def test_kernels_draw_the_same_at_any_batch_size(each_kernel: EachKernel) -> None:
    """Around the number of searches that are in flight at once."""

    def draw() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        tree = SumSegmentTree(3000)
        tree.load(torch.rand(3000, generator=generator))
        sizes = [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257]
        return [part for size in sizes for part in tree.draw(size, generator=generator)]

    require_equal(each_kernel(draw))


def refusals(call: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, IndexError, TypeError)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_refusals_have_the_same_words(each_kernel: EachKernel) -> None:
    def refused() -> list[str]:
        tree, least = SumSegmentTree(100), MinSegmentTree(100)
        tree.fill(0.1)
        ones, index = torch.ones(9), torch.arange(9)
        bad, out = ones.clone(), index.clone()
        bad[4], out[6] = -0.1, 100
        nan = ones / 0 * 0
        starts = torch.tensor([0, 5])
        return [
            refusals(call)
            for call in (
                lambda: tree.update(index, bad),
                lambda: tree.update(index, bad.double()),
                lambda: tree.update(out, ones),
                lambda: tree.update(out, bad),
                lambda: tree[out],
                lambda: tree.update_range(3, bad),
                lambda: tree.load(torch.full((100,), -2.0)),
                lambda: least.update(index, nan),
                lambda: tree.find_prefix(bad.double()),
                lambda: tree.find_prefix(ones.double() * 20),
                lambda: tree.find(bad.double()),
                lambda: tree.reduce(starts, torch.tensor([4, 4])),
                lambda: tree.reduce(starts, torch.tensor([4, 101])),
                lambda: tree.reduce(5, 4),
                lambda: tree.reduce(-1, 4),
            )
        ]

    first, *others = each_kernel(refused)
    assert all(other == first for other in others)


# -- choosing -------------------------------------------------------------------------------------


def test_environment_variable_chooses_the_kernel(kernel: str) -> None:
    for tree_class in TREES:
        assert tree_class(3).kernel == kernel
        assert kernel in repr(tree_class(3))


def test_without_the_environment_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLAYKIT_TREE", raising=False)
    assert SumSegmentTree(3).kernel == available_kernels()[0]
    monkeypatch.setenv("REPLAYKIT_TREE", " ")
    assert SumSegmentTree(3).kernel == available_kernels()[0]


@pytest.mark.parametrize("name", ["avx1024", "native", "neon"])
def test_unknown_kernel_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("REPLAYKIT_TREE", name)
    with pytest.raises(RuntimeError, match=f"expected REPLAYKIT_TREE to name .*, got {name}"):
        SumSegmentTree(3)


def test_a_kernel_that_this_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_kernels, "available_kernels", lambda: ["portable", "torch"])
    monkeypatch.setenv("REPLAYKIT_TREE", "avx512")
    with pytest.raises(RuntimeError, match="one of portable, torch, got avx512"):
        SumSegmentTree(3)
