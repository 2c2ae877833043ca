"""The priority of new records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
)
from tests.samplers.building import prioritized, raw


@pytest.mark.pitfall("PR9")
@pytest.mark.pitfall("PR16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_new_records_follow_the_formula(dtype: Any) -> None:
    """PR9, PR16: the default was transformed twice, or kept in the wrong domain."""
    buffer = prioritized([3.0, 7.25], capacity=70, dtype=dtype)
    buffer.extend(torch.arange(67))
    assert raw(buffer) == [3.0] + [7.25] * 68
    leaves = buffer.sampler._table._sums[2:69]
    exact = torch.tensor(7.25 + 1e-8, dtype=torch.float64) ** 0.7
    assert len(set(leaves.tolist())) == 1
    assert leaves[0].item() == pytest.approx(
        exact.item(), rel=1e-7 if dtype is torch.float32 else 1e-15
    )
    # Given one by one or together, as a default or by hand: the same number, to the bit.
    one_by_one = prioritized([3.0], capacity=70, dtype=dtype)
    one_by_one.extend(torch.arange(68))
    for slot in range(69):
        one_by_one.update_priority(slot, 7.25)
    assert torch.equal(one_by_one.sampler._table._sums[2:69], leaves)


def test_rows_that_a_writer_refuses_have_no_priority() -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(3),
        sampler=PrioritizedSampler(alpha=1.0, beta=1.0),
        writer=TensorDictMaxValueWriter("x"),
    )
    x = torch.tensor([1.0, 5.0, 2.0, 3.0, 0.0])
    index = buffer.extend(TensorDict({"x": x, "td_error": x * 10}, [5]))
    assert -1 in index.tolist()
    assert sorted(raw(buffer)) == [20.0, 30.0, 50.0]
    assert [p * 1.0 for p in raw(buffer)] == (buffer[:]["x"] * 10).tolist()
    assert buffer.add(TensorDict({"x": torch.tensor(0.0), "td_error": torch.tensor(9.0)})) is None
    assert sorted(raw(buffer)) == [20.0, 30.0, 50.0]


@pytest.mark.pitfall("PR12")
@pytest.mark.parametrize("how", ["constructor", "set_sampler", "set_storage"])
def test_rows_stored_before_the_sampler_get_default_priority(how: str) -> None:
    """PR12: they had no priority, and could not be drawn."""
    storage = LazyTensorStorage(20)
    first = ReplayBuffer(storage=storage)
    first.extend(torch.arange(12))
    sampler = PrioritizedSampler(alpha=0.7, beta=0.9)
    if how == "constructor":
        buffer = ReplayBuffer(storage=storage, sampler=sampler)
    elif how == "set_sampler":
        buffer = first
        buffer.set_sampler(sampler)
    else:
        buffer = ReplayBuffer(storage=LazyTensorStorage(2), sampler=sampler)
        buffer.extend(torch.arange(2))
        buffer.update_priority(0, 4.0)
        buffer.set_storage(storage)
    assert raw(buffer) == [1.0] * 12
    assert set(buffer.sample(400).tolist()) == set(range(12))
    buffer.extend(torch.arange(3))
    assert raw(buffer) == [1.0] * 15
