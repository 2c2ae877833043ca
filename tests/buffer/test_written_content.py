"""What writing stores: rows with lanes, and kinds of content."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorClass, TensorDict

from replaykit import LazyTensorStorage, ListStorage, ReplayBuffer
from tests.buffer.building import buffer_of, same


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
