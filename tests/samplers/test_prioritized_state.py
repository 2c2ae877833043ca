"""What is saved of priorities, and what comes back."""

from __future__ import annotations

import contextlib
import copy
import math
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
)
from tests.samplers.building import follows, law, prioritized, raw
from tests.support.refusals import refuses

NAN, INF = math.nan, math.inf
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}


def used(capacity: int = 20, rows: int = 33, **options: Any) -> ReplayBuffer:
    """A ring that has wrapped, with a priority of its own for every row."""
    buffer = prioritized(capacity=capacity, **options)
    for start in range(0, rows, 5):
        numbers = torch.arange(start, min(start + 5, rows))
        index = buffer.extend(numbers)
        buffer.update_priority(index, numbers / 4)
    buffer.sampler.beta = 0.5
    return buffer


def by_row(buffer: ReplayBuffer) -> dict[int, float]:
    return dict(zip(buffer[:].tolist(), raw(buffer), strict=True))


def same_draws(one: ReplayBuffer, two: ReplayBuffer) -> None:
    for _ in range(4):
        (rows, info), (other_rows, other_info) = one.sample(32, True), two.sample(32, True)
        assert torch.equal(rows, other_rows)
        for key in ("index", "priority_weight"):
            assert torch.equal(info[key], other_info[key])


# -- the state ------------------------------------------------------------------------------------


def test_the_state_has_these_entries() -> None:
    state = used().sampler.state_dict()
    assert set(state) == {
        "_kind",
        "_schema_version",
        "_alpha",
        "_beta",
        "_eps",
        "_max_priority",
        "_dropped_updates",
        "_priorities",
    }
    assert state["_priorities"].shape == (20,)
    assert state["_priorities"].dtype == torch.float32
    assert (state["_schema_version"], state["_max_priority"]) == (1, 8.0)


def test_state_dict_shares_no_memory_with_the_sampler() -> None:
    buffer = used()
    state = buffer.sampler.state_dict()
    before = state["_priorities"].clone()
    buffer.update_priority(torch.arange(20), 100.0)
    assert torch.equal(state["_priorities"], before)
    buffer.sampler.load_state_dict(state)
    state["_priorities"].fill_(7.0)
    assert raw(buffer) == before.tolist()
    buffer.update_priority(torch.arange(20), 100.0)
    assert state["_priorities"].tolist() == [7.0] * 20


@pytest.mark.pitfall("PR13")
@pytest.mark.parametrize("kind", ["fresh", "emptied"])
@pytest.mark.parametrize("how", ["dumps", "state_dict", *COPIES])
def test_state_can_be_saved_before_the_first_row(kind: str, how: str, tmp_path: Path) -> None:
    """PR13: saving failed before there was a first priority."""
    buffer = prioritized(capacity=5) if kind == "fresh" else used(5)
    if kind == "emptied":
        buffer.empty()
    other = used(5)
    if how == "dumps":
        buffer.dumps(tmp_path)
        other.loads(tmp_path)
    elif how == "state_dict":
        other.load_state_dict(buffer.state_dict())
    else:
        other = COPIES[how](buffer)
    assert not other.can_sample(1)
    assert other.sampler.default_priority == 1.0
    other.extend(torch.arange(3))
    buffer.extend(torch.arange(3))
    same_draws(buffer, other)


@pytest.mark.pitfall("PR13")
@pytest.mark.parametrize("capacity", [1, 16, 20, 3000])
def test_priorities_follow_their_rows_into_another_capacity(capacity: int, tmp_path: Path) -> None:
    """PR13, C7: to larger and smaller buffers."""
    buffer = used()
    other = prioritized(capacity=capacity)
    buffer.dumps(tmp_path)
    loses = pytest.warns(UserWarning, match=f"{20 - capacity} rows")
    with loses if capacity < 20 else contextlib.nullcontext():
        other.loads(tmp_path)
    kept = by_row(other)
    assert kept == {number: number / 4 for number in range(33 - min(capacity, 20), 33)}
    drawn = torch.cat([other.sampler.sample(other.storage, 500)[0] for _ in range(20)])
    assert follows(drawn, law(raw(other), 0.7))
    index = other.extend(torch.arange(100, 103))
    assert len(raw(other)) == len(other)
    assert [raw(other)[i] for i in index[-1:].tolist()] == [8.0]


def test_lanes_keep_their_priorities_in_another_capacity(tmp_path: Path) -> None:
    buffer = prioritized(storage=LazyTensorStorage(12, ndim=2))
    numbers = torch.arange(16).view(2, 8)
    buffer.update_priority(buffer.extend(numbers), numbers.float())
    buffer.dumps(tmp_path)
    for capacity in (20, 12):
        other = prioritized(storage=LazyTensorStorage(capacity, ndim=2))
        other.loads(tmp_path)
        cells = other[:].transpose(0, 1) if other[:].shape[0] == 2 else other[:]
        assert raw(other) == cells.flatten().float().tolist()


def test_priorities_follow_the_largest_rows(tmp_path: Path) -> None:
    def make(capacity: int) -> ReplayBuffer:
        return ReplayBuffer(
            storage=LazyTensorStorage(capacity),
            sampler=PrioritizedSampler(alpha=0.7, beta=0.9),
            writer=TensorDictMaxValueWriter("x"),
        )

    buffer, other = make(6), make(3)
    x = torch.tensor([3.0, 9.0, 1.0, 7.0, 8.0, 2.0])
    buffer.extend(TensorDict({"x": x, "td_error": x / 2}, [6]))
    buffer.dumps(tmp_path)
    with pytest.warns(UserWarning, match="3 rows"):
        other.loads(tmp_path)
    assert sorted(raw(other)) == [3.5, 4.0, 4.5]
    assert raw(other) == (other[:]["x"] / 2).tolist()


def test_a_sampler_saves_itself(tmp_path: Path) -> None:
    buffer = used()
    buffer.sampler.dumps(tmp_path)
    other = used(rows=20)
    other.sampler.loads(tmp_path)
    assert raw(other) == raw(buffer)
    alone = COPIES["pickle"](buffer.sampler)
    assert raw(alone) == raw(buffer)
    assert torch.equal(alone._table._sums.leaves[:20], buffer.sampler._table._sums.leaves[:20])
    doubled = prioritized([1.0] * 20, dtype=torch.float64)
    doubled.sampler.loads(tmp_path)
    assert raw(doubled) == raw(buffer)


# -- what is refused ------------------------------------------------------------------------------

BAD = {
    "_schema_version": [None, "1", 0],
    "_alpha": [-1.0, NAN, INF, None, "x", 500.0],
    "_beta": [-1.0, NAN, None],
    "_eps": [-1e-9, NAN, INF],
    "_max_priority": [0.5, NAN, INF, None, 1e300],
    "_dropped_updates": [-1, 1.5, None, 2**62 + 1],
    "_priorities": [
        None,
        [1.0] * 20,
        torch.ones(20, dtype=torch.int64),
        torch.ones(4, 5),
        torch.full((20,), -1.0),
        torch.full((20,), NAN),
        torch.full((20,), INF),
        torch.full((20,), 1e39, dtype=torch.float64),
    ],
    "_kind": [None, "random"],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_state_changes_nothing(name: str) -> None:
    buffer = used()
    before, leaves = raw(buffer), buffer.sampler._table._sums.leaves
    whole = buffer.state_dict()
    for wrong in BAD[name]:
        state = {**buffer.sampler.state_dict(), name: wrong}
        with pytest.raises(ValueError, match=r"expected|must be greater or equal"):
            buffer.sampler.load_state_dict(state)
        with pytest.raises(ValueError, match=r"expected|must be greater or equal"):
            buffer.load_state_dict({**whole, "_sampler": state})
    with pytest.raises(ValueError, match="expected"):
        buffer.load_state_dict({**whole, "_sampler": {"_kind": "prioritized"}})
    assert raw(buffer) == before
    assert torch.equal(buffer.sampler._table._sums.leaves, leaves)
    assert (buffer.sampler.alpha, buffer.sampler.beta) == (0.7, 0.5)


def test_a_newer_state_is_a_runtime_error() -> None:
    sampler = used().sampler
    with pytest.raises(RuntimeError, match="version 1 or older, got 2"):
        sampler.load_state_dict({**sampler.state_dict(), "_schema_version": 2})


def test_a_state_of_another_number_of_rows_is_refused() -> None:
    buffer = used()
    state = buffer.state_dict()
    before = raw(buffer)
    for count in (0, 19, 21):
        state["_sampler"]["_priorities"] = torch.ones(count)
        refuses(ValueError, f"expected 20 rows .* got {count}", buffer.load_state_dict, state)
    assert raw(buffer) == before


def test_states_of_other_samplers_are_refused() -> None:
    buffer = used()
    other = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement())
    other.extend(torch.arange(4))
    refuses(ValueError, "'prioritized' sampler", buffer.load_state_dict, other.state_dict())
    refuses(ValueError, "'without_replacement' sampler", other.load_state_dict, buffer.state_dict())


def test_priorities_are_not_handed_to_a_spawned_process() -> None:
    """Each process would have priorities of its own; a read-only buffer too."""
    buffer = used()
    buffer.set_writer(ImmutableDatasetWriter())
    context = multiprocessing.get_context("spawn")
    for thing in (buffer, buffer.sampler):
        refuses(RuntimeError, "spawned process", context.Process(target=len, args=(thing,)).start)
