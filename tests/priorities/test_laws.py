"""Draws follow the weights: statistics with fixed seeds and thresholds from the distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from replaykit import SumSegmentTree
from tests.support.refusals import refuses

F64 = torch.float64
SMALLEST_P = 1e-6
ChiSquare = Callable[[torch.Tensor, torch.Tensor], float]


def counts_of(
    tree: Any, draws: int, cells: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """How often each cell was drawn; ``cells`` maps slots to cells."""
    counts = torch.zeros(int(cells.max()) + 1, dtype=torch.int64)
    for _ in range(draws // 500_000):
        index, _ = tree.draw(500_000, generator=generator)
        counts += torch.bincount(cells[index], minlength=len(counts))
    return counts


def spread(count: int, decades: float, generator: torch.Generator) -> torch.Tensor:
    return 10 ** (torch.rand(count, dtype=F64, generator=generator) * decades)


def test_chi_square_statistic_equals_known_values(chi_square_p: ChiSquare) -> None:
    """Against exact values: chi-square with 9 degrees exceeds 16.919 once in 20 times."""
    expected = torch.full((10,), 100.0)
    counts = expected.clone()
    counts[0] += math.sqrt(16.919 * 50)
    counts[1] -= math.sqrt(16.919 * 50)
    assert chi_square_p(counts, expected) == pytest.approx(0.05, rel=0.02)
    assert chi_square_p(expected, expected) > 0.999


def test_independent_draws_follow_the_weights(kernel: str, chi_square_p: ChiSquare) -> None:
    """64 weights over three decades; an error of a per cent in one of them would show."""
    generator = torch.Generator().manual_seed(12)
    weights = spread(64, 3, generator).float()
    tree = SumSegmentTree(64)
    tree.load(weights)
    draws = 1_000_000 if kernel == "torch" else 10_000_000
    counts = counts_of(tree, draws, torch.arange(64), generator)
    share = weights.double() / weights.double().sum()
    assert chi_square_p(counts, share * draws) > SMALLEST_P
    heaviest = int(share.argmax())
    wrong = share.clone()
    wrong[heaviest] *= 1.01
    if draws > 5_000_000:
        assert chi_square_p(counts, wrong / wrong.sum() * draws) < SMALLEST_P


def test_draws_follow_the_weights_after_many_updates(kernel: str, chi_square_p: ChiSquare) -> None:
    """Sums that were adjusted by differences would have drifted: 22 decades came and went."""
    generator = torch.Generator().manual_seed(16)
    capacity = 4096
    tree = SumSegmentTree(capacity)
    for _ in range(20 if kernel == "torch" else 200):
        index = torch.randint(0, capacity, (2048,), generator=generator)
        tree.update(index, spread(2048, 22, generator))
        tree.update(index, torch.rand(2048, generator=generator))
    weights = torch.rand(capacity, generator=generator)
    tree.update(torch.randperm(capacity, generator=generator), torch.rand(capacity))
    tree.update(torch.arange(capacity), weights)
    draws = 500_000
    counts = counts_of(tree, draws, torch.arange(capacity) // 8, generator)
    share = weights.double().reshape(-1, 8).sum(1) / weights.double().sum()
    assert chi_square_p(counts, share * draws) > SMALLEST_P


@pytest.mark.pitfall("PR8")
def test_draws_follow_a_million_weights_over_eight_decades(
    kernel: str, chi_square_p: ChiSquare
) -> None:
    """PR8: zeros between them are never drawn; each decade is drawn as often as it weighs."""
    generator = torch.Generator().manual_seed(8)
    capacity = 1_000_000
    decades = torch.rand(capacity, dtype=F64, generator=generator) * 8
    weights = (10**decades).float()
    zero = torch.rand(capacity, generator=generator) < 0.5
    weights[zero] = 0
    tree = SumSegmentTree(capacity)
    tree.load(weights)
    cells = torch.where(zero, 8, decades.floor().long())
    draws = 500_000
    counts = counts_of(tree, draws, cells, generator)
    assert int(counts[8]) == 0
    share = torch.zeros(9, dtype=F64).index_add_(0, cells, weights.double())
    assert chi_square_p(counts[:8], (share / share.sum() * draws)[:8]) > SMALLEST_P


def test_ten_million_equal_slots_are_drawn_equally_often(
    with_kernel: Callable[[str], Any], chi_square_p: ChiSquare
) -> None:
    """Uniforms of 24 bits would own one slot or two each, and odd slots more often than even."""
    tree = SumSegmentTree(10_000_000)
    tree.fill(1.0)
    generator = torch.Generator().manual_seed(13)
    index = torch.cat([tree.draw(500_000, generator=generator)[0] for _ in range(20)])
    for cells in (index % 2, index % 3, index * 1024 // 10_000_000):
        counts = torch.bincount(cells)
        assert chi_square_p(counts, torch.full(counts.shape, len(index) / len(counts))) > SMALLEST_P


def test_strata_bound_every_batch(kernel: str) -> None:
    """The b-th draw lies over [b, b + 1) / B of the total, so counts hardly vary at all."""
    generator = torch.Generator().manual_seed(14)
    weights = spread(100, 2, generator).float()
    weights[::7] = 0
    tree = SumSegmentTree(100)
    tree.load(weights)
    batch = 256
    share = weights.double() / tree.total
    least, most = (batch * share).floor() - 1, (batch * share).ceil() + 1
    sums = torch.cat([torch.zeros(1, dtype=F64), weights.double().cumsum(0)])
    strata = torch.arange(batch + 1, dtype=F64) * tree.total / batch
    slack = tree.total * 1e-12
    for _ in range(200):
        index, weight = tree.draw(batch, generator=generator, stratified=True)
        counts = torch.bincount(index, minlength=100).double()
        assert bool((counts >= least).all())
        assert bool((counts <= most).all())
        assert bool((index.diff() >= 0).all())
        assert bool((sums[index] <= strata[1:] + slack).all())
        assert bool((sums[index + 1] >= strata[:-1] - slack).all())
        assert torch.equal(weight, weights[index].double())


def test_stratified_counts_have_the_expected_means(kernel: str) -> None:
    """A z-test of each slot's count, with the exact variance of each stratum's share in it."""
    generator = torch.Generator().manual_seed(15)
    weights = spread(40, 2, generator).float()
    tree = SumSegmentTree(40)
    tree.load(weights)
    batch, batches = 64, 2000
    counts = torch.zeros(40, dtype=F64)
    for _ in range(batches):
        index = tree.draw(batch, generator=generator, stratified=True)[0]
        counts += torch.bincount(index, minlength=40)
    sums = torch.cat([torch.zeros(1, dtype=F64), weights.double().cumsum(0)]) / tree.total * batch
    strata = torch.arange(batch, dtype=F64)
    low = torch.maximum(sums[:-1, None], strata)
    high = torch.minimum(sums[1:, None], strata + 1)
    inside = (high - low).clamp(min=0)  # the chance that stratum b draws slot i
    variance = (inside * (1 - inside)).sum(1) * batches
    z = (counts - inside.sum(1) * batches) / variance.sqrt().clamp(min=1e-9)
    assert float(z[variance > 1e-6].abs().max()) < 5.5


def test_the_last_stratum_never_leaves_the_tree(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(255 + (1 - 2^-53)) / 256 is 1 in float64: the largest uniform there is, everywhere."""
    tree = SumSegmentTree(9)
    tree[0:8] = 1.0
    largest = math.nextafter(1.0, 0.0)
    monkeypatch.setattr(torch, "rand", lambda size, **_: torch.full((size,), largest, dtype=F64))
    for stratified in (False, True):
        index, weight = tree.draw(256, stratified=stratified)
        assert int(index[-1]) == 7
        assert set(weight.tolist()) == {1.0}


@pytest.mark.pitfall("PR5")
def test_draws_come_from_torchs_generators_only(kernel: str) -> None:
    """PR5: one seed, one sequence; without a generator the global one, and none of NumPy's."""
    import random

    import numpy as np

    tree = SumSegmentTree(1000)
    tree.fill(1.0)
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    state = torch.get_rng_state()
    one, other = (tree.draw(64, generator=torch.Generator().manual_seed(3))[0] for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    assert torch.equal(tree.draw(64)[0], one)
    assert not torch.equal(tree.draw(64)[0], one)
    torch.set_rng_state(state)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


def test_a_refused_draw_leaves_the_generator_alone(kernel: str) -> None:
    tree, generator = SumSegmentTree(10), torch.Generator().manual_seed(3)
    state = generator.get_state()
    refuses(ValueError, "expected a positive weight", tree.draw, 5, generator=generator)
    tree.fill(1)
    with pytest.raises(ValueError, match="expected a batch size of at least 0, got -1"):
        tree.draw(-1, generator=generator)
    assert torch.equal(generator.get_state(), state)
