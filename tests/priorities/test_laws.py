"""Draws follow the weights: statistics with fixed seeds and thresholds from the distribution."""

from __future__ import annotations

import math

import pytest
import torch

from replaykit import SumSegmentTree
from tests.samplers.chi_square import chi_square_p
from tests.support.refusals import refuses

F64 = torch.float64
SMALLEST_P = 1e-6


def spread(count: int, decades: float, generator: torch.Generator) -> torch.Tensor:
    return 10 ** (torch.rand(count, dtype=F64, generator=generator) * decades)


def test_independent_draws_follow_the_weights(kernel: str) -> None:
    """64 weights over three decades; an error of a per cent in one of them would show."""
    generator = torch.Generator().manual_seed(12)
    weights = spread(64, 3, generator).float()
    tree = SumSegmentTree(64)
    tree.load(weights)
    draws = 1_000_000 if kernel == "torch" else 10_000_000
    counts = torch.zeros(64, dtype=torch.int64)
    for _ in range(draws // 500_000):
        index, _ = tree.draw(500_000, generator=generator)
        counts += torch.bincount(index, minlength=64)
    share = weights.double() / weights.double().sum()
    assert chi_square_p(counts.tolist(), (share * draws).tolist()) > SMALLEST_P
    wrong = share.clone()
    wrong[share.argmax()] *= 1.01
    if draws > 5_000_000:
        expected = wrong / wrong.sum() * draws
        assert chi_square_p(counts.tolist(), expected.tolist()) < SMALLEST_P


def test_ten_million_equal_slots_are_drawn_equally_often() -> None:
    """Uniforms of 24 bits would own one slot or two each, and odd slots more often than even."""
    tree = SumSegmentTree(10_000_000)
    tree.fill(1.0)
    generator = torch.Generator().manual_seed(13)
    index = torch.cat([tree.draw(500_000, generator=generator)[0] for _ in range(20)])
    for cells in (index % 2, index % 3, index * 1024 // 10_000_000):
        assert chi_square_p(torch.bincount(cells).tolist()) > SMALLEST_P


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
