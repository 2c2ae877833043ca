"""Priorities on their way to a sampler, from written data and back from learners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorClass, TensorDict

from replaykit import (
    LazyStackStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
)
from tests.buffer.building import (
    PrioritisedSampler,
    priorities,
    prioritised,
    rows,
    unchanged,
)


class Step(TensorClass):
    """A tensorclass that carries a priority."""

    x: torch.Tensor
    td_error: torch.Tensor


def data(*td_errors: float, key: Any = "td_error") -> TensorDict:
    content = TensorDict({"x": torch.arange(len(td_errors))}, [len(td_errors)])
    content[key] = torch.tensor(td_errors)
    return content


# -- from written data ----------------------------------------------------------------------------


@pytest.mark.pitfall("IF3")
@pytest.mark.pitfall("PR9")
@pytest.mark.parametrize("kind", ["tensor", "list", "lazy_stack"])
def test_written_rows_get_their_given_priorities(kind: str):
    """PR9, IF3, E3: each row's priority is set once, from ``extend``, ``add`` and lists."""
    buffer = prioritised(kind)
    buffer.extend(data(1.0, 2.0, 3.0))
    buffer.add(data(4.0)[0])
    buffer.extend(list(data(5.0, 6.0).unbind(0)))
    assert priorities(buffer) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 4: 5.0, 5: 6.0}
    assert set(buffer.sampler.set_times.values()) == {1}
    if kind == "list":
        buffer.extend(tuple(data(7.0, 8.0).unbind(0)))
        assert (priorities(buffer)[6], priorities(buffer)[7]) == (7.0, 8.0)


@pytest.mark.pitfall("PR9")
def test_rows_without_priorities_get_the_default():
    """PR9: also where the caller asks to ignore what the data carries."""
    buffer = prioritised()
    buffer.extend(data(3.0, 4.0).exclude("td_error"))
    buffer.extend(data(5.0), update_priority=False)
    buffer.extend(data(6.0), update_priority=True)
    buffer.extend([])
    assert priorities(buffer) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 6.0}
    assert set(buffer.sampler.set_times.values()) == {1}
    partly = list(data(7.0, 8.0).unbind(0))
    del partly[0]["td_error"]
    listed = prioritised("list")
    listed.extend(partly)
    assert priorities(listed) == {0: 1.0, 1: 1.0}


def test_the_key_of_priorities_can_be_nested():
    buffer = prioritised(priority_key=("next", "p"))
    buffer.extend(data(3.0, 4.0, key=("next", "p")).set("td_error", torch.tensor([8.0, 9.0])))
    assert priorities(buffer) == {0: 3.0, 1: 4.0}


def test_priorities_of_whole_trajectories_are_reduced():
    buffer = prioritised()
    buffer.extend(TensorDict({"td_error": torch.tensor([[1.0, 5.0], [2.0, 3.0]])}, [2, 2]))
    assert priorities(buffer) == {0: 5.0, 1: 3.0}
    ragged = prioritised("lazy_stack")
    ragged.extend(
        [TensorDict({"td_error": torch.arange(1.0, n)}, []) for n in (3, 5)],
    )
    assert priorities(ragged) == {0: 2.0, 1: 4.0}


def test_tensorclasses_carry_priorities_too():
    buffer = prioritised()
    buffer.extend(Step(x=torch.zeros(2), td_error=torch.tensor([2.0, 3.0]), batch_size=[2]))
    assert priorities(buffer) == {0: 2.0, 1: 3.0}


@pytest.mark.parametrize("dim_extend", [None, 0])
@pytest.mark.parametrize("how", ["extend", "add", "list"])
def test_every_cell_of_rows_with_lanes_has_a_separate_priority(how: str, dim_extend: Any):
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=PrioritisedSampler(), dim_extend=dim_extend
    )
    errors = torch.arange(6.0).view(2, 3)  # two lanes, three steps
    layout = errors if dim_extend is None else errors.T
    content = TensorDict({"td_error": layout}, layout.shape)
    steps = [content[:, t] if dim_extend is None else content[t] for t in range(3)]
    if how == "extend":
        buffer.extend(content)
    elif how == "list":
        buffer.extend(steps)
    else:
        for step in steps:
            buffer.add(step)
    assert priorities(buffer) == {
        (t, lane): float(errors[lane, t]) for t in range(3) for lane in range(2)
    }


@pytest.mark.pitfall("PR10")
@pytest.mark.pitfall("PR2")
@pytest.mark.parametrize("how", ["extend", "add", "list"])
@pytest.mark.parametrize("kind", ["tensor", "list"])
@pytest.mark.parametrize("wrong", [float("nan"), -1.0, float("inf"), float("-inf")])
def test_a_bad_priority_is_found_before_anything_is_stored(how: str, kind: str, wrong: float):
    """PR10, PR2: rows, counters and priorities are as before, wherever the bad value is."""
    buffer = prioritised(kind)
    buffer.extend(data(1.0, 2.0))
    for position in range(3):
        errors = [1.0, 2.0, 3.0]
        errors[position] = wrong
        bad = data(*errors)

        def write(bad: TensorDict = bad, position: int = position) -> None:
            if how == "add":
                buffer.add(bad[position])
            else:
                buffer.extend(bad if how == "extend" else list(bad.unbind(0)))

        unchanged(buffer, ValueError, write, "finite and not negative under 'td_error'")
        assert priorities(buffer) == {0: 1.0, 1: 2.0}
    buffer.extend(data(wrong), update_priority=False)
    assert len(buffer) == 3


@pytest.mark.pitfall("PR10")
def test_priorities_of_the_wrong_shape_are_found_before_anything_is_stored():
    """PR10: none per row, or none per cell."""
    empty = prioritised()
    empty.extend(data(1.0))
    unchanged(
        empty,
        ValueError,
        lambda: empty.extend(TensorDict({"x": torch.zeros(2), "td_error": torch.ones(2, 0)}, [2])),
    )
    lanes = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), sampler=PrioritisedSampler())
    lanes.extend(TensorDict({"td_error": torch.ones(2, 3)}, [2, 3]))
    bad = TensorDict({"td_error": torch.ones(2, 3)}, [2, 3])
    bad["td_error"][1, 2] = -1
    unchanged(lanes, ValueError, lambda: lanes.extend(bad))


# -- with other components ------------------------------------------------------------------------


@pytest.mark.pitfall("PR12")
def test_new_sampler_gives_stored_rows_the_default_priority():
    """PR12: over a filled storage, by constructor, ``set_sampler`` and ``set_storage``."""
    storage = LazyTensorStorage(10)
    ReplayBuffer(storage=storage).extend(rows(4))
    built = ReplayBuffer(storage=storage, sampler=PrioritisedSampler())
    changed = ReplayBuffer(storage=storage)
    changed.set_sampler(PrioritisedSampler())
    moved = prioritised()
    moved.extend(data(5.0, 6.0, 7.0, 8.0, 9.0))
    moved.set_storage(storage)
    for buffer in (built, changed, moved):
        assert priorities(buffer) == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}
        assert buffer.sample(2)["id"].shape == (2,)


@pytest.mark.pitfall("WR15")
def test_rows_written_by_another_buffer_get_the_default():
    """WR15, 7.10: every buffer over a storage knows of all rows."""
    storage = LazyTensorStorage(10)
    one, two = (ReplayBuffer(storage=storage, sampler=PrioritisedSampler()) for _ in range(2))
    one.extend(rows(2).set("td_error", torch.tensor([5.0, 6.0])))
    two.extend(rows(1, 2).set("td_error", torch.tensor([7.0])))
    assert priorities(one) == {0: 5.0, 1: 6.0, 2: 1.0}
    assert priorities(two) == {0: 1.0, 1: 1.0, 2: 7.0}
    two.writer.write_at(torch.tensor([0]), rows(1).set("td_error", torch.zeros(1)))
    assert priorities(one) == {0: 1.0, 1: 6.0, 2: 1.0}


# -- from learners ---------------------------------------------------------------------------------


@pytest.fixture
def filled() -> Callable[..., ReplayBuffer]:
    """``filled(count=6, **options)``: a buffer whose sampler has been told nothing yet."""

    def make(count: int = 6, **options: Any) -> ReplayBuffer:
        buffer = prioritised(**options)
        buffer.extend(TensorDict({"x": torch.arange(count)}, [count]))
        buffer.sampler.calls.clear()
        return buffer

    return make


@pytest.mark.parametrize("how", ["update_priority", "update_tensordict_priority"])
def test_learners_give_priorities_back_with_the_sample(how: str, filled: Any):
    buffer = filled(priority_key=("next", "p"))
    batch = buffer.sample(3)
    batch["next", "p"] = torch.tensor([[[2.0, 3.0]], [[2.0, 3.0]], [[2.0, 3.0]]])
    getattr(buffer, how)(batch)
    for slot in batch["index"].tolist():
        assert priorities(buffer)[slot] == 3.0
    assert buffer.sampler.calls == ["update_priority"]


@pytest.mark.pitfall("PR15")
def test_a_missing_priority_key_is_an_error(filled: Any):
    """PR15, E11: it reset the rows to the default priority."""
    buffer = filled()
    batch = buffer.sample(3)
    unchanged(buffer, KeyError, lambda: buffer.update_tensordict_priority(batch), "td_error")
    batch = batch.set("td_error", torch.ones(3)).exclude("index")
    unchanged(buffer, KeyError, lambda: buffer.update_priority(batch), "index")
    assert buffer.sampler.calls == []


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
