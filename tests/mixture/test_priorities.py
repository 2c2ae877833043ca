"""Priorities reach the rows that they were computed for, whichever member these are of."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Sequence,
)
from tests.mixture.members import by_priority, holding, make_ensemble, make_member, rows_of
from tests.support.refusals import refuses


def priorities(member: Any) -> list[float]:
    """Raw priorities of a member's rows, by slot."""
    table = member.sampler.state_dict()["_priorities"]
    return [float(value) for value in torch.as_tensor(table)[: len(member)]]


def has_no_effect() -> Any:
    return pytest.warns(UserWarning, match="the update has no effect")


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_random_priority_updates_equal_a_dictionary_model(data: st.DataObject) -> None:
    """Any rows of any members, in any batch shape: a dictionary of the last priority of each."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    plain = data.draw(st.integers(0, len(sizes)))  # one without priorities, or none
    samplers = [RandomSampler if i == plain else by_priority for i in range(len(sizes))]
    ensemble = make_ensemble(sizes, samplers)
    model = {(m, r): 1.0 for m, size in enumerate(sizes) for r in range(size) if m != plain}
    for _ in range(3):
        count = data.draw(st.sampled_from([0, 1, 2, 4, 6]))
        members = [data.draw(st.integers(0, len(sizes) - 1)) for _ in range(count)]
        rows = [data.draw(st.integers(0, sizes[member] - 1)) for member in members]
        values = [data.draw(st.floats(0, 100, width=32)) for _ in range(count)]
        shape = data.draw(st.sampled_from([(count,), (count, 1), (1, count)]))
        index = {
            "index": torch.tensor(rows, dtype=torch.int64).view(shape),
            "buffer_ids": torch.tensor(members, dtype=torch.int64).view(shape),
        }
        if data.draw(st.booleans()):
            warns = len(sizes) == 1 and not plain
            silent = has_no_effect() if warns else contextlib.nullcontext()
            with silent:
                ensemble.update_priority(index, torch.tensor(values).view(shape))
        else:
            batch = TensorDict(
                {"index": TensorDict(index, shape), "td_error": torch.tensor(values).view(shape)},
                shape,
            )
            ensemble.update_tensordict_priority(batch)
        for member, row, value in zip(members, rows, values, strict=True):
            if member != plain:
                model[member, row] = value
    for member, size in enumerate(sizes):
        if member != plain:
            found = priorities(ensemble[member])
            assert found == [model[member, row] for row in range(size)]


def test_rows_that_were_written_since_are_left_alone() -> None:
    small = holding(rows_of(1, 5), LazyTensorStorage(5), sampler=by_priority())
    ensemble = ReplayBufferEnsemble(make_member(0, 5), small, sample_from_all=True)
    batch = ensemble.sample(20)
    small.extend(rows_of(1, 2, start=5))  # slots 0 and 1 hold other rows now
    batch["td_error"] = torch.full((2, 10), 7.0)
    ensemble.update_tensordict_priority(batch)
    drawn = set(batch["index", "index"][1].tolist())
    assert priorities(small)[:2] == [1.0, 1.0]
    assert priorities(small)[2:] == [7.0 if row in drawn else 1.0 for row in range(2, 5)]
    ensemble.update_priority(
        batch["index"], torch.full((2, 10), 9.0), generation=batch["index_generation"]
    )
    assert priorities(small)[:2] == [1.0, 1.0]
    ensemble.update_priority(batch["index"], 9.0)
    assert priorities(small)[:2] == [9.0 if row in drawn else 1.0 for row in range(2)]


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_bad_priority_of_one_member_changes_none(value: float) -> None:
    ensemble = make_ensemble([5, 5], [by_priority] * 2, sample_from_all=True)
    batch = ensemble.sample(8)
    batch["td_error"] = torch.full((2, 4), 3.0)
    batch["td_error"][1, 2] = value
    refuses(ValueError, "member 1", ensemble.update_tensordict_priority, batch)
    refuses(ValueError, "member 1", ensemble.update_priority, batch["index"], batch["td_error"])
    assert priorities(ensemble[0]) == priorities(ensemble[1]) == [1.0] * 5


def test_priorities_of_absent_rows_and_members_are_refused() -> None:
    ensemble = make_ensemble([5, 5], [by_priority] * 2)
    good = {"index": torch.tensor([0, 1]), "buffer_ids": torch.tensor([0, 1])}
    for name, wrong in (("index", 5), ("index", -2), ("buffer_ids", 2), ("buffer_ids", -1)):
        index = {key: value.clone() for key, value in good.items()}
        index[name][1] = wrong
        with pytest.raises(IndexError):
            ensemble.update_priority(index, 5.0)
    assert priorities(ensemble[0]) == priorities(ensemble[1]) == [1.0] * 5
    ensemble.update_priority({**good, "index": torch.tensor([2, -1])}, 5.0)  # -1: was not stored
    assert priorities(ensemble[0]) == [1, 1, 5, 1, 1]
    with pytest.raises(KeyError, match="index and buffer_ids"):
        ensemble.update_priority({"index": torch.tensor([0])}, 5.0)
    refuses(ValueError, "one a row", ensemble.update_priority, good, torch.ones(3))
    for bare in ([0, 1], torch.tensor([0, 1])):  # of which member?
        refuses(TypeError, "with index and buffer_ids", ensemble.update_priority, bare, 5.0)
    batch = ensemble.sample(4)
    with pytest.raises(KeyError, match="'td_error' in the data for member"):
        ensemble.update_tensordict_priority(batch)
    with pytest.raises(KeyError, match="'index'"):
        ensemble.update_tensordict_priority(TensorDict({"td_error": torch.ones(2)}, [2]))


def test_priority_key_is_set_by_each_member_or_by_the_ensemble() -> None:
    members = [
        make_member(0, 5, sampler=by_priority(), priority_key="a"),
        make_member(1, 5, sampler=by_priority(), priority_key=("b", "c")),
    ]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    batch = ensemble.sample(20)
    batch["a"] = torch.full((2, 10), 2.0)
    refuses(KeyError, "member 1", ensemble.update_tensordict_priority, batch)
    assert set(priorities(members[0])) == {1.0}
    batch["b", "c"] = torch.full((2, 10, 1), 3.0)
    ensemble.update_tensordict_priority(batch)
    assert (max(priorities(members[0])), max(priorities(members[1]))) == (2.0, 3.0)
    one = ReplayBufferEnsemble(*members, sample_from_all=True, priority_key="loss")
    one.update_tensordict_priority(batch.set("loss", torch.full((2, 10), 8.0)))
    assert (max(priorities(members[0])), max(priorities(members[1]))) == (8.0, 8.0)


def test_priority_updates_without_priorities_have_no_effect() -> None:
    ensemble = make_ensemble([5, 5])
    batch = ensemble.sample(4)
    ensemble.update_tensordict_priority(batch)
    with has_no_effect():
        ensemble.update_priority(batch)
    with has_no_effect():
        ensemble.update_priority(batch["index"], 3.0)


def test_priorities_of_rows_of_nested_ensembles_are_refused() -> None:
    inner = make_ensemble([4, 4], [by_priority] * 2, seed=None, sample_from_all=True)
    first = make_member(5, 4, sampler=by_priority())
    outer = ReplayBufferEnsemble(first, inner, sample_from_all=True)
    batch = outer.sample(16)
    batch["td_error"] = batch["id"].float() + 2
    for update in (outer.update_tensordict_priority, outer.update_priority):
        refuses(TypeError, "rows of member 1, an ensemble.* give its members", update, batch)
    assert all(priorities(member) == [1.0] * 4 for member in (first, inner[0], inner[1]))
    outer.update_tensordict_priority(batch[0])
    assert max(priorities(first)) > 5000


def test_priorities_reach_members_with_lanes() -> None:
    rows = torch.stack([rows_of(1, 10), rows_of(1, 10, start=100)])
    lanes = holding(rows, LazyTensorStorage(60, ndim=2), sampler=by_priority())
    plain = make_member(0, 10, sampler=by_priority())
    ensemble = ReplayBufferEnsemble(plain, lanes, sample_from_all=True)
    batch = ensemble.sample(40)
    batch["td_error"] = batch["id"].float() + 2
    ensemble.update_tensordict_priority(batch)
    drawn = set(batch["id"].flatten().tolist())
    assert priorities(plain) == [i + 2.0 if i in drawn else 1.0 for i in range(10)]
    table = torch.as_tensor(lanes.sampler.state_dict()["_priorities"])[:20]
    ids = [1000 + 100 * lane + time for time in range(10) for lane in range(2)]
    assert table.tolist() == [i + 2.0 if i in drawn else 1.0 for i in ids]


@pytest.mark.parametrize("unit", ["sequence", "slice", "padded"])
def test_priorities_reach_windows_and_rows_in_one_batch(unit: str) -> None:
    """Priorities of rows that only fill a window up do not count, whatever they are."""
    kind: Any = PrioritizedSampler if unit == "sequence" else PrioritizedSliceSampler
    every: dict[str, dict[str, Any]] = {
        "sequence": {},
        "slice": {"slice_len": 2, "unit": "slice"},
        "padded": {"slice_len": 8, "strict_length": False, "pad_output": True},
    }
    # Twice as many rows come of what is asked for in sequences of two.
    doubled: dict[str, Any] = {"sample_unit": Sequence(length=2)} if unit == "sequence" else {}

    def member() -> ReplayBuffer:
        sampler = kind(alpha=1.0, beta=1.0, eps=0.0, **every[unit])
        return make_member(1, 10, sampler=sampler, **doubled)

    windows, alone = member(), member()
    rows = make_member(0, 10, sampler=by_priority(), **doubled)
    ensemble = ReplayBufferEnsemble(rows, windows, sample_from_all=True)
    batch = ensemble.sample(16)
    assert batch.shape == (2, 16 if doubled else 8)
    error = batch["id"].float() + 2
    for mask in ("validity_mask", ("collector", "mask")):
        if mask in batch.keys(True):
            error[~batch[mask]] = math.nan
    ensemble.update_tensordict_priority(batch.set("td_error", error))
    own = batch[1].clone()
    own["index"] = batch["index", "index"][1]
    alone.update_tensordict_priority(own)
    assert priorities(alone) == priorities(windows)
    assert max(priorities(windows)) > 1000


def test_rows_that_are_trajectories_have_one_priority_each() -> None:
    rows = TensorDict({"x": torch.arange(4)[:, None].expand(4, 3)}, [4, 3])
    members = [holding(rows, sampler=by_priority()) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True)
    batch = ensemble.sample(16)
    batch["td_error"] = batch["x"] + torch.tensor([5.0, 9.0, 7.0])
    ensemble.update_tensordict_priority(batch)
    for number, rb in enumerate(members):
        drawn = set(batch["index", "index"][number, :, 0].tolist())
        assert priorities(rb) == [row + 9.0 if row in drawn else 1.0 for row in range(4)]
