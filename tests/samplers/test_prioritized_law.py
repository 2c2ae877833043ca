"""How often each record is drawn. Seeds are fixed; thresholds follow from the distribution."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
)
from replaykit.samplers.priority_rules import PriorityLaw
from replaykit.samplers.priority_table import PriorityTable
from tests.samplers.building import follows, law, prioritized, raw


def draws(buffer: ReplayBuffer, count: int, batch: int = 500) -> torch.Tensor:
    """Elements drawn, as numbers in physical order."""
    drawn = []
    for _ in range(count // batch):
        index, _ = buffer.sampler.sample(buffer.storage, batch)
        if index.ndim == 2:
            index = index[:, 0] * buffer.storage.lanes.numel() + index[:, 1]
        drawn.append(index)
    return torch.cat(drawn)


@pytest.mark.pitfall("PR4")
@pytest.mark.parametrize("capacity", [1, 3, 63, 64, 65])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.7])
def test_records_are_drawn_by_their_priorities(capacity: int, alpha: float) -> None:
    """PR4: for capacities at and beside powers of two."""
    p = torch.rand(capacity, generator=torch.Generator().manual_seed(capacity)) * 3 + 0.05
    buffer = prioritized(p, alpha=alpha)
    assert follows(draws(buffer, 20_000), law(p, alpha))


@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage])
@pytest.mark.parametrize("rows", [7, 12, 17])
def test_partly_filled_full_and_wrapped_storages_follow_the_law(storage: Any, rows: int) -> None:
    """Records not stored never take part, and those that took their slots do."""
    buffer = prioritized(storage=storage(12))
    for start in range(0, rows, 4):
        numbers = torch.arange(start, min(start + 4, rows))
        index = buffer.extend(TensorDict({"x": numbers}, numbers.shape))
        buffer.update_priority(index, torch.arange(1.0, len(index) + 1) + start / 4)
    assert follows(draws(buffer, 20_000), law(raw(buffer), 0.7))
    buffer.empty()
    buffer.extend(TensorDict({"x": torch.arange(3)}, [3]))
    assert follows(draws(buffer, 6_000), law([1, 1, 1], 0.7))


def test_lanes_draw_records_by_priority() -> None:
    buffer = prioritized(storage=LazyTensorStorage(20, ndim=2))
    index = buffer.extend(torch.arange(15).view(3, 5))
    buffer.update_priority(index, torch.arange(15.0) + 0.5)
    assert follows(draws(buffer, 20_000), law(raw(buffer), 0.7))
    buffer.extend(torch.arange(9).view(3, 3))
    assert len(raw(buffer)) == 21  # seven slots: the capacity is rounded up to whole steps
    assert follows(draws(buffer, 20_000), law(raw(buffer), 0.7))


@pytest.mark.pitfall("PR20")
@pytest.mark.parametrize("capacity", [1, 3, 64, 100])
@pytest.mark.parametrize("batch", [1, 7, 256])
def test_stratified_draws_are_those_of_their_strata(capacity: int, batch: int) -> None:
    """PR20: each comes up floor or ceil of its share, give or take its two edges."""
    p = torch.rand(capacity, generator=torch.Generator().manual_seed(1)) + 0.01
    buffer = prioritized(p, stratified=True)
    share = law(raw(buffer), 0.7) * batch
    for _ in range(20):
        index, _ = buffer.sampler.sample(buffer.storage, batch)
        assert bool((index[1:] >= index[:-1]).all())
        counts = torch.bincount(index, minlength=capacity)
        assert bool((counts - share).abs().max() < 2)


@pytest.mark.pitfall("PR20")
def test_stratified_draws_keep_the_law() -> None:
    """PR20: one draw from one stratum is a free draw; over many batches all have the same law."""
    p = torch.arange(1.0, 11.0)
    buffer = prioritized(p, stratified=True)
    assert follows(draws(buffer, 20_000, batch=1), law(p, 0.7))
    counts = torch.bincount(draws(buffer, 40_000, batch=40), minlength=10)
    assert torch.allclose(counts / 40_000, law(p, 0.7).float(), atol=2e-3)


@pytest.mark.pitfall("PR8")
def test_a_million_records_over_eight_decades() -> None:
    """PR8: sums in float32 drew rows of weight zero, and the wrong share of the small ones."""
    count, generator = 1_000_000, torch.Generator().manual_seed(0)
    p = 10 ** (torch.rand(count, generator=generator) * 8 - 6)
    p[::3] = 0
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(count),
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0, eps=0.0, stratified=True),
        generator=generator,
    )
    buffer.extend(torch.zeros(count, dtype=torch.uint8))
    buffer.update_priority(torch.arange(count), p)
    drawn = draws(buffer, 2_000_000, batch=100_000)
    assert bool((p[drawn] > 0).all())
    decade = p.clamp(min=1e-30).log10().floor().clamp(-7, 1).long() + 7
    share = torch.zeros(9, dtype=torch.float64).index_add_(0, decade, law(p, 1.0, 0.0))
    got = torch.bincount(decade[drawn], minlength=9) / len(drawn)
    # Stratified: less than a free draw's deviation, of which this is four.
    assert bool(((got - share).abs() <= 4 * (share / len(drawn)).sqrt() + 1e-12).all())


@pytest.mark.pitfall("PR14")
@pytest.mark.parametrize("norm", ["global", "batch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_changing_alpha_and_back_restores_weights(norm: str, dtype: Any) -> None:
    """PR14, E17: an alpha of 0 lost the priorities; now leaf by leaf the same, to the bit."""
    p = torch.rand(77, generator=torch.Generator().manual_seed(0)) * 5
    p[:5] = 0
    buffer = prioritized(p, capacity=100, weight_norm=norm, dtype=dtype)
    for slot in range(20):  # one by one: the law must not depend on how they came
        buffer.update_priority(slot, float(p[slot]))
    before = buffer.sampler._table._sums.leaves
    state, generator = raw(buffer), buffer.sampler.generator.get_state()
    expected = buffer.sampler.sample(buffer.storage, 200)
    buffer.sampler.alpha = 0.0
    assert follows(draws(buffer, 10_000), law(p, 0.0))
    buffer.sampler.alpha = 2.5
    assert follows(draws(buffer, 10_000), law(p, 2.5))
    buffer.sampler.alpha = 0.7
    assert torch.equal(buffer.sampler._table._sums.leaves, before)
    assert raw(buffer) == state
    buffer.sampler.generator.set_state(generator)
    index, info = buffer.sampler.sample(buffer.storage, 200)
    assert torch.equal(index, expected[0])
    assert torch.equal(info["priority_weight"], expected[1]["priority_weight"])


def test_draws_from_given_random_numbers_equal_own_draws() -> None:
    """What a generator of another device goes through."""
    law = PriorityLaw(0.7, 1e-8, torch.float32)
    table = PriorityTable(law, torch.device("cpu"), smallest=False, within_buffer=False)
    table.load(law, torch.rand(1000, generator=torch.Generator().manual_seed(0)), 1.0)
    for stratified in (False, True):
        index, value = table.draw(512, torch.Generator().manual_seed(3), stratified)
        uniform = torch.rand(512, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        found, other = table.find(uniform, stratified)
        assert torch.equal(index, found)
        assert torch.equal(value, other)
    last, _ = table.find(torch.ones(4, dtype=torch.float64), False)
    assert last.tolist() == [999] * 4


def test_the_smallest_value_of_a_device_is_that_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    law = PriorityLaw(1.0, 0.0, torch.float32)
    table = PriorityTable(law, torch.device("cpu"), smallest=True, within_buffer=False)
    table.load(law, torch.tensor([0.0, 3.0, 2.0]), 3.0)
    assert table.smallest() == 2.0
    monkeypatch.setattr(table, "device", torch.device("cpu", 0))
    assert float(table.smallest()) == 2.0


_PROGRAM = """
import json, sys, torch
from replaykit import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
out = []
for options in json.loads(sys.argv[1]):
    rb = ReplayBuffer(storage=LazyTensorStorage(300), batch_size=64,
                      sampler=PrioritizedSampler(alpha=0.6, beta=0.4, **options),
                      generator=torch.Generator().manual_seed(0))
    p = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * 3
    for step in range(8):
        rb.extend(torch.arange(70))
        drawn, info = rb.sample(return_info=True)
        rb.update_priority(info["index"], p[drawn + 10 * step])
        out.append([info["index"].tolist(), info["priority_weight"].tolist()])
    rb.sampler.alpha = 1.1
    out.append(rb.sample(return_info=True)[1]["index"].tolist())
print(json.dumps(out))
"""


@pytest.mark.programs
@pytest.mark.pitfall("PR1")
def test_core_and_torch_draw_the_same_batches(run_python: Any) -> None:
    """PR1: where torch keeps the tree, as on other devices, draws are the same, to the bit."""
    options = json.dumps(
        [{}, {"stratified": True}, {"weight_norm": "batch"}, {"max_priority_within_buffer": True}]
    )
    environment = {key: value for key, value in os.environ.items() if "REPLAYKIT" not in key}
    by_core, by_torch = (
        run_python(_PROGRAM, options, env={**environment, **tree}).stdout
        for tree in ({}, {"REPLAYKIT_TREE": "torch"})
    )
    assert by_core == by_torch
    assert len(json.loads(by_torch)) == 36
