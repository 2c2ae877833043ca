"""Stored rows read and replaced by index, in every form that an index has."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorClass, TensorDict

from replaykit import (
    Compose,
    LazyTensorStorage,
    ListStorage,
    NStep,
    PreviousStep,
    ReplayBuffer,
    RoundRobinWriter,
    StackFrames,
    StepCount,
    TensorStorage,
)
from tests.buffer.building import IDS, KINDS, buffer_of, check_whole, rows, same, unchanged, wrapped

INDICES = {
    "int": 3,
    "negative": -2,
    "numpy_int": np.int64(4),
    "scalar": torch.tensor(5),
    "slice": slice(2, 6),
    "open": slice(None, -3),
    "steps": slice(1, 8, 3),
    "backwards": slice(None, None, -2),
    "none": slice(4, 2),
    "list": [4, 0, -1],
    "empty": [],
    "range": range(2, 5),
    "array": np.array([1, 5]),
    "tensor": torch.tensor([6, 6, 2]),
    "mask": torch.arange(7) % 3 == 1,
    "numpy_mask": np.arange(7) % 2 == 0,
    "all": Ellipsis,
}


class Point(TensorClass):
    """Content that is no TensorDict."""

    x: torch.Tensor


def positions(index: Any, count: int) -> list[int] | int:
    """What an index selects of ``range(count)``, by NumPy."""
    return np.arange(count)[index if not isinstance(index, range) else list(index)].tolist()


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.pitfall("RD11")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INDICES)
def test_rows_are_read_and_replaced_where_every_index_says(kind: str, name: str):
    """RD11: ``rb[i] == rb[:][i]`` for every kind of index; handles and the cursor stay."""
    buffer = wrapped(kind, writer=RoundRobinWriter(track_generations=True))
    handles = buffer.writer.generations_of(torch.arange(7))
    index = INDICES[name]
    expected = positions(index, 7)
    result = buffer[index]
    if isinstance(expected, int):
        assert result.batch_size == ()
        assert check_whole(result.unsqueeze(0)) == [IDS[expected]]
    else:
        assert result.batch_size == (len(expected),)
        assert check_whole(result) == [IDS[i] for i in expected]
    assert set(result.keys()) == {"id", "observation", "pixels", "next"}
    where = [expected] if isinstance(expected, int) else expected
    buffer[index] = rows(1, 50)[0] if isinstance(expected, int) else rows(len(where), 50)
    replaced = dict(zip(where, range(50, 60), strict=False))  # the last of equal slots wins
    assert check_whole(buffer[:]) == [replaced.get(slot, IDS[slot]) for slot in range(7)]
    assert (len(buffer), buffer.write_count) == (7, 10)
    assert torch.equal(buffer.writer.generations_of(torch.arange(7)), handles)
    assert buffer.extend(rows(1, 80)).tolist() == [3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("index", "error"),
    [
        (7, IndexError),
        (-8, IndexError),
        ([0, 7], IndexError),
        (torch.tensor([-8]), IndexError),
        (torch.ones(6, dtype=torch.bool), IndexError),
        (torch.tensor([0.5]), TypeError),
        (1.5, TypeError),
        (True, TypeError),
        ("unknown", KeyError),
        (("next", "unknown"), KeyError),
        (("id", "deeper"), KeyError),
    ],
)
def test_an_index_beyond_the_stored_rows_is_refused(kind: str, index: Any, error: type):
    buffer = buffer_of(kind, 20)
    buffer.extend(rows(7))
    unchanged(buffer, error, lambda: buffer[index])


def test_empty_buffers_and_lists_refuse_other_indices():
    for kind in KINDS:
        with pytest.raises(RuntimeError, match="nothing is stored"):
            buffer_of(kind)[:]
    with pytest.raises(IndexError):
        buffer_of("list")[0]
    with pytest.raises(IndexError, match=r"one dimension for a list, got shape \[1, 2\]"):
        buffer_of("list", filled=3)[torch.tensor([[0, 1]])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_reads_a_column(kind: str):
    buffer = wrapped(kind)
    assert buffer["id"].tolist() == IDS
    assert buffer["next", "reward"].squeeze(-1).tolist() == [i * 0.5 for i in IDS]
    assert buffer["next"]["done"].shape == (7, 1)
    buffer.append_transform(lambda td: td.set("id", td["id"] + 1))
    assert buffer["id"].tolist() == [i + 1 for i in IDS]


def test_columns_of_tensorclasses_and_pytrees():
    points = ReplayBuffer(storage=TensorStorage(Point(x=torch.arange(3), batch_size=[3])))
    assert points["x"].tolist() == [0, 1, 2]
    tree = ReplayBuffer(storage=TensorStorage({"a": torch.arange(3), "b": {"c": torch.ones(3)}}))
    assert tree["a"].tolist() == [0, 1, 2]
    assert tree["b", "c"].tolist() == [1, 1, 1]
    for buffer in (points, tree):
        with pytest.raises(KeyError, match="'z'"):
            buffer["z"]


def test_a_collate_function_makes_batches_but_not_single_rows():
    buffer = ReplayBuffer(storage=ListStorage(5), collate_fn=tuple)
    buffer.extend(["a", "b", "c"])
    assert (buffer[:], buffer[[2, 0]], buffer[1:]) == (("a", "b", "c"), ("c", "a"), ("b", "c"))
    assert (buffer[1], buffer[np.int64(1)], buffer[torch.tensor(1)]) == ("b", "b", "b")


def test_slices_of_tensor_storages_are_views_without_transforms():
    buffer = buffer_of("tensor", filled=4)
    assert buffer[1:3]["id"].data_ptr() == buffer["id"][1:].data_ptr()
    buffer.append_transform(lambda td: td)
    assert buffer[1:3]["id"].data_ptr() != buffer.storage[1:3]["id"].data_ptr()


@pytest.mark.pitfall("WR13")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [2, slice(1, 4), [0, 2], ..., "id"])
def test_a_transform_that_works_in_place_does_not_edit_the_rows(kind: str, index: Any):
    """WR13, E6: reads that are views let a user's transform edit the stored rows."""

    def in_place(data: Any) -> Any:
        data.set_("id", data["id"] + 100)
        data.set_(("next", "reward"), data["next", "reward"] * 0)
        return data

    buffer = wrapped(kind, transform=in_place)
    before = buffer.state_dict()["_storage"]
    first, second = buffer[index], buffer[index]
    same(first.clone(), second.clone())
    same(before, buffer.state_dict()["_storage"])
    assert int((first if index == "id" else first["id"]).min()) >= 100


# -- lanes ----------------------------------------------------------------------------------------


@pytest.mark.pitfall("RD11")
@pytest.mark.parametrize("lanes", [(2,), (2, 3)])
@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(1, None),
        (1, 0),
        (slice(None), slice(0, 2)),
        (Ellipsis, 1),
        (0, slice(None, None, 2)),
        [1, 0],
        torch.tensor([1, 1]),
        ([0, 1], [1, 0]),
    ],
    ids=str,
)
def test_rows_with_lanes_are_indexed_in_the_layout_that_was_written(
    lanes: tuple[int, ...], index: Any
):
    """RD11: ``rb[0]`` on two dimensions raised; here everything is as on ``rb[:]``."""
    data = torch.arange(torch.Size([*lanes, 5]).numel()).view(*lanes, 5)
    buffer = ReplayBuffer(storage=LazyTensorStorage(data.numel(), ndim=len(lanes) + 1))
    buffer.extend(TensorDict({"x": data, "y": data[..., None] * 2}, data.shape))
    assert buffer[:].batch_size == data.shape
    assert torch.equal(buffer["x"], data)
    result = buffer[index]
    assert torch.equal(result["x"], data[index])
    assert torch.equal(result["y"][..., 0], data[index] * 2)
    assert result.batch_size == data[index].shape
    changed = TensorDict({"x": data[index] + 100, "y": result["y"] + 100}, result.batch_size)
    expected = data.clone()
    expected[index] += 100
    buffer[index] = changed
    assert torch.equal(buffer["x"], expected)


# A flat storage takes no tuples, and an index has no more parts than there are dimensions.
IN_EVERY_STORAGE = [
    0,
    -1,
    slice(None, None, 2),
    Ellipsis,
    [1, 0, 1],
    torch.tensor([[0, 1], [1, 1]]),
    torch.tensor(1),
    "mask",
]
WITH_LANES = [
    (0,),
    (0, 1),
    (slice(None), -1),
    (Ellipsis, slice(1, None)),
    ([1, 0], torch.tensor([0, 1])),
]
WITH_TWO_DIMENSIONS_OF_LANES = [(1, 1, 3), (0, [0, 2], slice(None, None, 3))]
AROUND = [
    *itertools.product(IN_EVERY_STORAGE, [(), (2,), (2, 3)]),
    *itertools.product(WITH_LANES, [(2,), (2, 3)]),
    *itertools.product(WITH_TWO_DIMENSIONS_OF_LANES, [(2, 3)]),
]


@pytest.mark.parametrize(("index", "lanes"), AROUND, ids=str)
def test_transforms_that_read_around_have_every_form_of_an_index(
    lanes: tuple[int, ...], index: Any
) -> None:
    """What they make of a row is the same whichever rows are asked for with it, and in a sample."""
    shape = torch.Size([*lanes, 7])
    x = torch.arange(shape.numel()).view(*shape, 1)
    done = x % 4 == 3
    after = {"x": x + 1, "reward": x.float(), "done": done}
    chain = Compose(
        NStep(2, 0.5), StackFrames("x", 2), PreviousStep([("next", "reward")]), StepCount()
    )
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(5 * max(1, torch.Size(lanes).numel()), ndim=len(shape)),
        transform=chain,
    )
    buffer.extend(TensorDict({"x": x, "next": after}, shape))
    rows = buffer[:]
    assert rows.batch_size == (*lanes, 5)
    if index == "mask":
        index = torch.rand(rows.batch_size, generator=torch.Generator().manual_seed(0)) < 0.5
    elements = torch.arange(rows.numel()).view(rows.batch_size)[index]
    found, expected = buffer[index], rows[index]
    assert found.batch_size == elements.shape
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    assert (found == expected).all()
    sample = buffer.sample(50)
    at = sample.pop("index")
    if lanes:  # time comes first in an index, and takes the place of the last lane in what is read
        at = at.clone()
        at[:, [0, buffer.dim_extend]] = at[:, [buffer.dim_extend, 0]]
        same = rows[tuple(at.unbind(-1))]
    else:
        same = rows[at]
    for key in same.keys(True, True):
        assert sample[key].equal(same[key]), key
