"""Priorities on their way back from learners."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    LazyStackStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from tests.buffer.building import PrioritisedSampler, buffer_of, priorities, prioritised, unchanged


@pytest.fixture
def filled() -> Callable[..., ReplayBuffer]:
    """``filled(count=6, **options)``: a buffer whose sampler has been told nothing yet."""

    def make(count: int = 6, **options: Any) -> ReplayBuffer:
        buffer = prioritised(**options)
        buffer.extend(TensorDict({"x": torch.arange(count)}, [count]))
        buffer.sampler.told.clear()
        return buffer

    return make


@pytest.mark.pitfall("PR6")
def test_samples_carry_generations_and_stale_updates_are_dropped(filled: Any):
    """PR6, D3, E4: priorities written back to a slot that was overwritten went to the new row."""
    buffer = filled(10)
    batch = buffer.sample(30)
    assert batch["index_generation"].tolist() == [0] * 30
    assert batch["priority_weight"].shape == (30,)
    buffer.extend(TensorDict({"x": torch.arange(4)}, [4]))
    batch["td_error"] = torch.full((30,), 9.0)
    buffer.update_tensordict_priority(batch)
    seen = set(batch["index"].tolist())
    assert priorities(buffer) == {
        slot: 9.0 if slot in seen and slot > 3 else 1.0 for slot in range(10)
    }
    info = buffer.sample(4, return_info=True)[1]
    buffer.extend(TensorDict({"x": torch.arange(10)}, [10]))
    buffer.update_priority(info["index"], torch.ones(4) * 5, generation=info["index_generation"])
    assert set(priorities(buffer).values()) == {1.0}
    buffer.update_priority(info["index"], torch.ones(4) * 5)  # whatever is there now
    assert {priorities(buffer)[i] for i in info["index"].tolist()} == {5.0}


@pytest.mark.parametrize("how", ["update_priority", "update_tensordict_priority"])
def test_learners_give_priorities_back_with_the_sample(how: str, filled: Any):
    buffer = filled(priority_key=("next", "p"))
    batch = buffer.sample(3)
    batch["next", "p"] = torch.tensor([[[2.0, 3.0]], [[2.0, 3.0]], [[2.0, 3.0]]])
    getattr(buffer, how)(batch)
    for slot in batch["index"].tolist():
        assert priorities(buffer)[slot] == 3.0
    assert buffer.sampler.told == ["update_priority"]


@pytest.mark.pitfall("PR15")
def test_a_missing_priority_key_is_an_error(filled: Any):
    """PR15, E11: it reset the rows to the default priority."""
    buffer = filled()
    batch = buffer.sample(3)
    unchanged(buffer, KeyError, lambda: buffer.update_tensordict_priority(batch), "td_error")
    batch = batch.set("td_error", torch.ones(3)).exclude("index")
    unchanged(buffer, KeyError, lambda: buffer.update_priority(batch), "index")
    assert buffer.sampler.told == []


@pytest.mark.pitfall("PR2")
@pytest.mark.parametrize("wrong", [float("nan"), -0.5, float("inf")])
def test_a_bad_priority_in_a_sample_is_refused(wrong: float, filled: Any):
    """PR2: nothing has changed."""
    buffer = filled()
    batch = buffer.sample(3).set("td_error", torch.tensor([1.0, 1.0, wrong]))
    unchanged(buffer, ValueError, lambda: buffer.update_tensordict_priority(batch), "finite")
    assert set(priorities(buffer).values()) == {1.0}


@pytest.mark.parametrize("stack_dim", [None, 0, 1])
def test_samples_of_trajectories_give_one_priority_each(stack_dim: int | None):
    """What is known of a trajectory is repeated over its steps; its priority is reduced."""
    storage = (
        LazyTensorStorage(5) if stack_dim is None else LazyStackStorage(5, stack_dim=stack_dim)
    )
    buffer = ReplayBuffer(storage=storage, sampler=PrioritisedSampler())
    buffer.extend(TensorDict({"x": torch.arange(12).view(4, 3)}, [4, 3]))
    batch, info = buffer.sample(20, return_info=True)
    batch["td_error"] = batch["x"] + 1.0
    buffer.update_tensordict_priority(batch)
    seen = set(info["index"].tolist())
    assert priorities(buffer) == {
        slot: 3.0 * slot + 3 if slot in seen else 1.0 for slot in range(4)
    }


def test_a_single_row_can_be_given_back(filled: Any):
    buffer = filled()
    batch = buffer.sample(3).set("td_error", torch.tensor([4.0, 5.0, 6.0]))
    buffer.update_tensordict_priority(batch[2])
    assert priorities(buffer)[int(batch["index"][2])] == 6.0


@pytest.mark.parametrize("lanes", [(2,), (2, 3)])
@pytest.mark.parametrize("shape", ["written", "flat", "column"])
def test_priorities_may_have_the_layout_of_the_written_data(lanes: Any, shape: str):
    ndim = len(lanes) + 1
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=ndim), sampler=PrioritisedSampler())
    content = torch.arange(torch.Size([*lanes, 4]).numel()).view(*lanes, 4)
    index = buffer.extend(TensorDict({"x": content}, content.shape))
    time_major = content.transpose(0, ndim - 1).reshape(-1).double()
    buffer.update_priority(
        index,
        {
            "written": content.double(),
            "flat": time_major,
            "column": time_major[:, None],
        }[shape],
    )
    for cell, value in priorities(buffer).items():
        assert buffer.storage[torch.tensor([list(cell)])]["x"].item() == value


def test_a_single_slot_can_be_given_a_priority(filled: Any):
    buffer = filled()
    buffer.update_priority(3, 8.0)
    buffer.update_priority(torch.tensor([4]), torch.tensor([[9.0]]))
    buffer.mark_update(torch.tensor([0]))
    assert [priorities(buffer)[slot] for slot in (0, 3, 4)] == [1.0, 8.0, 9.0]


@pytest.mark.pitfall("PR11")
def test_without_priorities_updates_warn_or_do_nothing():
    """PR11: a learner that always gives priorities back needs no special case."""
    buffer = buffer_of(filled=5)
    with pytest.warns(UserWarning, match="RandomSampler has no priorities"):
        buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    with pytest.warns(UserWarning, match="RandomSampler has no priorities"):
        buffer.update_priority(buffer.sample(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer.update_tensordict_priority(buffer.sample(2))
        buffer.mark_update(torch.tensor([0]))


def test_update_with_a_dict_batch_names_the_right_call() -> None:
    rb = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(10), batch_size=4
    )
    rb.extend({"x": torch.arange(5.0)})
    batch = {**rb.sample(), "td_error": torch.ones(4)}
    with pytest.raises(TypeError, match=r"expected a TensorDict.*transition.*return_info"):
        rb.update_tensordict_priority(batch)
    _, info = rb.sample(return_info=True)
    rb.update_priority(info["index"], torch.ones(4))
