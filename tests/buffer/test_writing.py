"""Rows on their way in, through the buffer: content, order of effects, refusals, forgetting."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorClass, TensorDict

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
)
from tests.buffer.building import KINDS, buffer_of, rows, same
from tests.support.refusals import refuses


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


# -- lanes and content -----------------------------------------------------------------------------


class Agent(TensorClass):
    """A record with a field that is no tensor."""

    x: torch.Tensor
    name: str = "none"


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
