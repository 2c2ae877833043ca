"""Rows on their way in, through the buffer: content, order of effects, refusals, forgetting."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorClass, TensorDict

from replaykit import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorStorage,
)
from tests.buffer.building import buffer_of, check_whole, rows, same, unchanged
from tests.support.refusals import refuses

KINDS = ["list", "lazy_stack", "tensor", "memmap"]


@pytest.mark.pitfall("WR5")
@pytest.mark.parametrize("kind", KINDS)
def test_writing_no_rows_changes_nothing(kind: str):
    """WR5, E5: an empty batch is no write, before and after the first one."""
    buffer = buffer_of(kind)
    for nothing in (rows(0), []):
        assert buffer.extend(nothing).shape == (0,)
        assert buffer.extend(nothing).dtype == torch.int64
    assert buffer.storage.shape in (None, torch.Size([0]))
    buffer.extend(rows(2))
    before = buffer.state_dict()
    buffer.extend(rows(0))
    same(before, buffer.state_dict())
    lanes = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    assert lanes.extend(TensorDict({"x": torch.zeros(2, 0)}, [2, 0])).shape == (0, 2)
    lanes.extend(TensorDict({"y": torch.zeros(3, 1)}, [3, 1]))
    assert len(lanes) == 3


@pytest.mark.pitfall("WR1")
@pytest.mark.pitfall("WR2")
@pytest.mark.pitfall("WR3")
@pytest.mark.pitfall("WR4")
@pytest.mark.parametrize("kind", ["tensor", "memmap"])
@pytest.mark.parametrize("way", ["add", "extend", "setitem", "list"])
def test_data_that_does_not_fit_is_refused_whole(kind: str, way: str):
    """WR1-WR4, D2: missing and unknown keys, dtypes and shapes are named; nothing is stored."""
    buffer = buffer_of(kind, filled=7, seed=0, sampler="without")
    buffer.sample(2)

    def write(data: TensorDict) -> None:
        if way == "add":
            buffer.add(data[0])
        elif way == "extend":
            buffer.extend(data)
        elif way == "list":
            buffer.extend([*rows(1).unbind(0), *data.unbind(0)])
        else:
            buffer[2:4] = data

    good = rows(2, 50)
    reward = ("next", "reward")
    for bad, match in [
        (good.exclude("observation"), "'observation'.*got nothing"),
        (good.clone().set("extra", torch.zeros(2)), "'extra'.*no such key"),
        (good.clone().set("id", good["id"].double()), "'id'.*int64 .*float64"),
        (good.clone().set("observation", torch.zeros(2, 1)), r"'observation'.*\[3\].*\[1\]"),
        (good.clone().set(reward, torch.zeros(2)), r"\('next', 'reward'\).*\[1\].*\[\]"),
    ]:
        unchanged(buffer, ValueError, lambda bad=bad: write(bad), match)
    write(good)


@pytest.mark.pitfall("WR16")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("locked", [False, True])
def test_the_callers_data_is_not_touched_nor_kept(kind: str, locked: bool):
    """WR16, G2: no key is added, removed or changed, and later edits do not reach the rows."""
    buffer = buffer_of(kind, 20, writer=RoundRobinWriter(track_generations=True))
    data = rows(5)
    data["next", "done"] = data["next", "done"].squeeze(-1)
    data["index"] = torch.arange(5) + 77
    data["td_error"] = torch.rand(5)
    if locked:
        data.lock_()
    before = data.clone()
    buffer.extend(data)
    buffer.add(data[0])
    buffer.extend(list(data.unbind(0)))
    buffer[0:2] = data[:2]
    if kind != "list":
        with pytest.warns(UserWarning, match="has no priorities"):
            buffer.update_priority(data)
    same(before, data)
    if not locked:
        data.zero_()
        assert check_whole(buffer[:]) == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4]
    batch = buffer.sample(4)
    assert "index" in set(batch.keys())
    assert batch["next", "done"].shape == (4, 1)
    assert int(batch["index"].max()) < 20


@pytest.mark.pitfall("PR11")
@pytest.mark.parametrize("sampler", ["random", "without"])
def test_sampler_without_priorities_ignores_priorities_in_the_data(sampler: str):
    """PR11: no warning, on 100 extends with ``td_error`` and a sampler without priorities."""
    buffer = buffer_of(max_size=50, sampler=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in range(100):
            buffer.extend(rows(3, start).set("td_error", torch.full((3,), -1.0)))
        buffer.add(rows(1)[0].set("td_error", torch.tensor(float("nan"))))
    assert buffer.write_count == 301


def test_priority_column_is_stored_only_if_the_first_write_has_it():
    """E2: later rows may carry priorities without being refused as a new key."""
    without = buffer_of()
    without.extend(rows(2))
    without.extend(rows(2, 2).set("td_error", torch.rand(2)))
    assert "td_error" not in set(without[:].keys())
    stored = buffer_of()
    stored.extend(rows(2).set("td_error", torch.tensor([1.0, 2.0])))
    assert stored["td_error"].tolist() == [1.0, 2.0]
    refuses(ValueError, "td_error", stored.extend, rows(1, 2))
    other = buffer_of(priority_key=("next", "p"))
    other.extend(rows(2))
    with_key = rows(2, 2)
    with_key["next", "p"] = torch.rand(2)
    other.extend(with_key)
    refuses(ValueError, "td_error", other.extend, rows(1).set("td_error", torch.rand(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_reserved_keys_are_not_stored(kind: str):
    """E1: a sample may be written back as it is."""
    buffer = buffer_of(kind, filled=3, writer=RoundRobinWriter(track_generations=True))
    buffer.extend(buffer.sample(2))
    assert not {"index", "index_generation"} & set(buffer[:].keys())
    assert len(buffer) == 5


def test_write_at_other_slots_leaves_the_cursor():
    buffer = buffer_of(filled=6, writer=RoundRobinWriter(track_generations=True))
    assert buffer.writer.write_at(torch.tensor([1, 6]), rows(2, 40)).tolist() == [1, 6]
    assert check_whole(buffer[:]) == [0, 40, 2, 3, 4, 5, 41]
    assert buffer.extend(rows(1, 50)).tolist() == [6]
    assert buffer.writer.generations_of(torch.arange(8)).tolist() == [0, 1, 0, 0, 0, 0, 1, -1]
    assert buffer.write_count == 9


# -- forgetting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_empty_forgets_rows_and_keeps_keys(kind: str, prefetch: int | None):
    buffer = buffer_of(
        kind,
        4,
        filled=6,
        sampler="ordered",
        batch_size=2,
        prefetch=prefetch,
        writer=RoundRobinWriter(track_generations=True),
    )
    handle = buffer.sample()
    buffer.empty(empty_write_count=False)
    assert (len(buffer), buffer.write_count) == (0, 6)
    refuses(RuntimeError, r"Cannot sample from an empty storage\.", buffer.sample)
    assert buffer.extend(rows(3, 50)).tolist() == [0, 1, 2]
    assert buffer.writer.generations_of(torch.arange(4)).tolist() == [3, 3, 2, 1]
    assert [check_whole(batch) for batch in buffer] == [[50, 51], [52]]
    assert int(handle["index_generation"].max()) < 2
    if kind in ("tensor", "memmap"):
        refuses(ValueError, "'x'", buffer.extend, TensorDict({"x": torch.zeros(2)}, [2]))
    buffer.empty()
    assert (len(buffer), buffer.write_count) == (0, 0)
    assert buffer.stats()["prefetch_queue_size"] == 0


def test_an_immutable_buffer_refuses_every_write():
    buffer = ReplayBuffer(storage=TensorStorage(rows(4)), writer=ImmutableDatasetWriter())
    for write in (
        lambda: buffer.extend(rows(1)),
        lambda: buffer.extend([]),
        lambda: buffer.add(rows(1)[0]),
        buffer.empty,
    ):
        unchanged(buffer, RuntimeError, write, "doesn't allow writing")
    assert buffer.write_count == 0
    buffer.set_("id", torch.tensor([4, 3, 2, 1]))
    assert buffer["id"].tolist() == [4, 3, 2, 1]


def test_a_writer_may_refuse_rows():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("r"))
    data = TensorDict({"r": torch.tensor([1.0, 5.0, 2.0, 3.0, 0.0])}, [5])
    assert buffer.extend(data).tolist() == [-1, 1, 2, 0, -1]
    assert buffer.add(data[4]) is None
    assert buffer.add(data[1]) == 2
    assert sorted(buffer["r"].tolist()) == [3.0, 5.0, 5.0]


# -- lanes and content -----------------------------------------------------------------------------


class Agent(TensorClass):
    """A record with a field that is no tensor."""

    x: torch.Tensor
    name: str = "none"


# -- lanes ----------------------------------------------------------------------------------------


@pytest.mark.pitfall("WR8")
@pytest.mark.pitfall("WR9")
@pytest.mark.pitfall("IF4")
@pytest.mark.pitfall("IF8")
@pytest.mark.parametrize("lanes", [(2,), (2, 3)])
@pytest.mark.parametrize("dim_extend", [None, 0])
def test_rows_with_lanes_are_stored_at_their_returned_index(
    lanes: tuple[int, ...], dim_extend: int | None
):
    """WR8, WR9, E18, E10: the index names time and lane of the element it was returned for."""
    ndim, cells = len(lanes) + 1, torch.Size(lanes).numel()
    buffer = ReplayBuffer(storage=LazyTensorStorage(cells * 4, ndim=ndim), dim_extend=dim_extend)
    written = {}
    for start, steps in [(0, 3), (3, 1), (4, 2)]:
        ids = torch.arange(start, start + steps).view(-1, *[1] * len(lanes)) * 100
        ids = ids + torch.arange(cells).view(lanes)  # time first
        if dim_extend is None:
            ids = ids.transpose(0, ndim - 1)
        data = TensorDict({"x": ids}, ids.shape)
        if start == 3:
            index = buffer.add(data.squeeze(0 if dim_extend == 0 else ndim - 1))
        else:
            index = buffer.extend(data)
        assert index.shape == (steps * cells, ndim)
        time_major = ids if dim_extend == 0 else ids.transpose(0, ndim - 1)
        for cell, value in zip(index.tolist(), time_major.reshape(-1).tolist(), strict=True):
            written[tuple(cell)] = value
    for cell, value in written.items():
        assert buffer.storage[torch.tensor([list(cell)])]["x"].item() == value
    assert (len(buffer), buffer.write_count) == (4 * cells, 6 * cells)
    batch = buffer.sample(200)
    assert batch["index"].shape == (200, ndim)
    assert [written[tuple(i)] for i in batch["index"].tolist()] == batch["x"].tolist()


# -- kinds of content -----------------------------------------------------------------------------


@pytest.mark.pitfall("WR7")
@pytest.mark.parametrize(
    "content",
    [
        TensorDict({"x": torch.arange(3)}, [3]),
        torch.arange(6).view(3, 2),
        Agent(x=torch.arange(3.0), name="a", batch_size=[3]),
        TensorDict({"x": torch.arange(12).view(3, 4)}, [3, 4]),
    ],
    ids=["tensordict", "tensor", "tensorclass", "trajectories"],
)
@pytest.mark.filterwarnings("ignore:Using `add:UserWarning")  # each row is a trajectory
@pytest.mark.parametrize("kind", ["list", "tensor", "memmap"])
def test_extend_stores_the_same_rows_as_repeated_add(kind: str, content: Any):
    """WR7: the same data through ``add`` and ``extend`` was stored differently."""
    at_once, one_by_one, listed = (buffer_of(kind) for _ in range(3))
    at_once.extend(content)
    for row in content.unbind(0):
        one_by_one.add(row)
    listed.extend(list(content.unbind(0)))
    for buffer in (one_by_one, listed):
        assert len(buffer) == 3
        for row in range(3):
            same(at_once[row], buffer[row])
    if not (kind == "list" and isinstance(content, Agent)):  # a stack lists what is no tensor
        same(at_once[:].clone(), content)


def test_objects_and_arrays_go_into_lists():
    buffer = ReplayBuffer(storage=ListStorage(10))
    array = np.arange(4.0).reshape(2, 2)
    assert buffer.extend(array).tolist() == [0, 1]
    array[:] = 9
    assert buffer[:].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    objects = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    assert objects.extend(range(3)).tolist() == [0, 1, 2]
    assert objects.extend({"a"}).tolist() == [3]
    assert objects[:] == [0, 1, 2, "a"]
