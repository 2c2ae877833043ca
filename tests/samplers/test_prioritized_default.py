"""The priority of new records."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictMaxValueWriter,
)


@pytest.mark.pitfall("PR9")
@pytest.mark.pitfall("PR16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_new_records_follow_the_formula(dtype: Any, prioritized: Any, raw: Any) -> None:
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


def test_the_default_is_the_largest_ever_set(prioritized: Any, raw: Any) -> None:
    buffer = prioritized([0.25, 0.5], capacity=3)
    sampler = buffer.sampler
    assert sampler.default_priority == 1.0
    buffer.update_priority(0, 4.0)
    buffer.update_priority(0, 0.5)
    assert sampler.default_priority == 4.0
    buffer.extend(torch.arange(2))
    assert raw(buffer) == [4.0, 0.5, 4.0]
    buffer.mark_update([1])
    assert raw(buffer) == [4.0, 4.0, 4.0]
    buffer.empty()
    assert sampler.default_priority == 1.0


def test_priorities_in_the_data_count_for_the_default(raw: Any) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(3), sampler=PrioritizedSampler(alpha=0.7, beta=0.9)
    )
    rows = TensorDict({"x": torch.zeros(2), "td_error": torch.tensor([9.0, 0.5])}, [2])
    buffer.extend(rows)
    buffer.add(rows[0].set("td_error", torch.tensor(0.0)))
    assert raw(buffer) == [9.0, 0.5, 0.0]
    buffer.extend(rows[:1], update_priority=False)
    assert raw(buffer) == [9.0, 0.5, 0.0]
    assert buffer.sampler.default_priority == 9.0


@pytest.mark.pitfall("PR17")
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    capacity=st.sampled_from([1, 2, 3, 7, 8, 9]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["extend", "add", "data", "update", "mark", "empty"]),
            st.lists(st.tuples(st.integers(0, 8), st.integers(0, 40)), min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=40,
    ),
)
def test_default_within_buffer_is_maximum_of_stored_priorities(capacity: int, steps: Any) -> None:
    """PR17: after every one of up to 1000 operations."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(capacity),
        sampler=PrioritizedSampler(alpha=0.6, beta=0.4, max_priority_within_buffer=True),
    )

    def rows(count: int, priorities: list[float] | None = None) -> TensorDict:
        data = TensorDict({"x": torch.zeros(count)}, [count])
        if priorities is not None:
            data["td_error"] = torch.tensor(priorities)
        return data

    buffer.extend(rows(1))  # without a priority, so that columns with one are not stored
    for kind, pairs in steps:
        slots, values = [p[0] for p in pairs], [p[1] / 8 for p in pairs]
        if kind == "extend":
            buffer.extend(rows(len(pairs)))
        elif kind == "add":
            buffer.add(rows(1)[0])
        elif kind == "data":
            buffer.extend(rows(len(pairs), values))
        elif kind == "empty":
            buffer.empty()
        elif len(buffer):
            index = torch.tensor([slot % len(buffer) for slot in slots])
            if kind == "mark":
                buffer.mark_update(index)
            else:
                buffer.update_priority(index, torch.tensor(values))
        stored = buffer.sampler.state_dict()["_priorities"]
        assert len(stored) == len(buffer)
        assert buffer.sampler.default_priority == (stored.max().item() if len(stored) else 1.0)


def test_rows_that_a_writer_refuses_have_no_priority(raw: Any) -> None:
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
def test_rows_stored_before_the_sampler_get_default_priority(how: str, raw: Any) -> None:
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


def test_another_buffers_rows_get_the_default(prioritized: Any, raw: Any) -> None:
    buffer = prioritized([2.0, 3.0], capacity=3)
    other = ReplayBuffer(storage=buffer.storage)
    other.extend(torch.arange(2))
    assert raw(buffer) == [3.0, 3.0, 3.0]
