"""Stored rows read and changed where they lie, against plain tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorClass, TensorDict

from replaykit import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorStorage,
)

KINDS = ["list", "lazy_stack", "tensor", "memmap"]
COLUMNS = ["tensor", "memmap"]
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


def wrapped(buffer_of: Any, rows: Any, kind: str, **options: Any) -> ReplayBuffer:
    """Seven rows in a ring of seven, of ids 7, 8, 9, 3, 4, 5, 6."""
    buffer = buffer_of(kind, 7, **options)
    buffer.extend(rows(10))
    return buffer


IDS = [7, 8, 9, 3, 4, 5, 6]


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.pitfall("RD11")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INDICES)
def test_indexing_reads_what_it_would_of_all_rows(
    kind: str, name: str, buffer_of: Any, rows: Any, check_whole: Any
):
    """RD11: ``rb[i] == rb[:][i]`` for every kind of index."""
    buffer = wrapped(buffer_of, rows, kind)
    index = INDICES[name]
    expected = positions(index, 7)
    if kind in ("list", "lazy_stack") and expected == []:
        pytest.skip("there is nothing to stack")
    result = buffer[index]
    if isinstance(expected, int):
        assert result.batch_size == ()
        assert check_whole(result.unsqueeze(0)) == [IDS[expected]]
    else:
        assert result.batch_size == (len(expected),)
        assert check_whole(result) == [IDS[i] for i in expected]
    assert set(result.keys()) == {"id", "observation", "pixels", "next"}


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
def test_an_index_beyond_the_stored_rows_is_refused(
    kind: str, index: Any, error: type, buffer_of: Any, rows: Any, unchanged: Any
):
    buffer = buffer_of(kind, 20)
    buffer.extend(rows(7))
    unchanged(buffer, error, lambda: buffer[index])


def test_nothing_to_read_is_an_error(buffer_of: Any):
    for kind in KINDS:
        with pytest.raises(RuntimeError, match="nothing is stored"):
            buffer_of(kind)[:]
    with pytest.raises(IndexError):
        buffer_of("list")[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [slice(2, 2), [], torch.zeros(0, dtype=torch.int64)])
def test_no_rows_are_a_batch_of_none(kind: str, index: Any, buffer_of: Any, rows: Any):
    buffer = buffer_of(kind)
    buffer.extend(rows(3))
    found = buffer[index]
    assert found.batch_size == (0,)
    assert set(found.keys(True, True)) == set(buffer[:].keys(True, True))


def test_a_list_is_not_indexed_by_a_table(buffer_of: Any, rows: Any):
    buffer = buffer_of("list")
    buffer.extend(rows(3))
    with pytest.raises(IndexError, match=r"one dimension for a list, got shape \[1, 2\]"):
        buffer[torch.tensor([[0, 1]])]


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_reads_a_column(kind: str, buffer_of: Any, rows: Any):
    buffer = wrapped(buffer_of, rows, kind)
    assert buffer["id"].tolist() == IDS
    assert buffer["next", "reward"].squeeze(-1).tolist() == [i * 0.5 for i in IDS]
    assert buffer["next"]["done"].shape == (7, 1)
    buffer.append_transform(lambda td: td.set("id", td["id"] + 1))
    assert buffer["id"].tolist() == [i + 1 for i in IDS]


def test_columns_of_tensorclasses_and_pytrees(buffer_of: Any):
    points = ReplayBuffer(storage=TensorStorage(Point(x=torch.arange(3), batch_size=[3])))
    assert points["x"].tolist() == [0, 1, 2]
    tree = ReplayBuffer(storage=TensorStorage({"a": torch.arange(3), "b": {"c": torch.ones(3)}}))
    assert tree["a"].tolist() == [0, 1, 2]
    assert tree["b", "c"].tolist() == [1, 1, 1]
    for buffer in (points, tree):
        with pytest.raises(KeyError, match="'z'"):
            buffer["z"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_in_physical_order(kind: str, buffer_of: Any, rows: Any, check_whole: Any):
    buffer = wrapped(buffer_of, rows, kind)
    assert check_whole(buffer.read_all_in_order()) == IDS
    assert check_whole(buffer.read_all_in_order(end=3)) == IDS[:3]
    assert check_whole(buffer.read_all_in_order(99)) == IDS


def test_a_collate_function_makes_batches_but_not_single_rows():
    buffer = ReplayBuffer(storage=ListStorage(5), collate_fn=tuple)
    buffer.extend(["a", "b", "c"])
    assert (buffer[:], buffer[[2, 0]], buffer[1:]) == (("a", "b", "c"), ("c", "a"), ("b", "c"))
    assert (buffer[1], buffer[np.int64(1)], buffer[torch.tensor(1)]) == ("b", "b", "b")


def test_slices_of_tensor_storages_are_views_without_transforms(buffer_of: Any):
    buffer = buffer_of("tensor", filled=4)
    assert buffer[1:3]["id"].data_ptr() == buffer["id"][1:].data_ptr()
    buffer.append_transform(lambda td: td)
    assert buffer[1:3]["id"].data_ptr() != buffer.storage[1:3]["id"].data_ptr()


@pytest.mark.pitfall("WR13")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [2, slice(1, 4), [0, 2], ..., "id"])
def test_a_transform_that_works_in_place_does_not_edit_the_rows(
    kind: str, index: Any, buffer_of: Any, rows: Any, same: Any
):
    """WR13, E6: reads that are views let a user's transform edit the stored rows."""

    def in_place(data: Any) -> Any:
        data.set_("id", data["id"] + 100)
        data.set_(("next", "reward"), data["next", "reward"] * 0)
        return data

    buffer = wrapped(buffer_of, rows, kind, transform=in_place)
    before = buffer.state_dict()["_storage"]
    first, second = buffer[index], buffer[index]
    same(first.clone(), second.clone())
    same(before, buffer.state_dict()["_storage"])
    assert int((first if index == "id" else first["id"]).min()) >= 100


# -- changing rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(set(INDICES) - {"empty", "none", "tensor"}))
def test_rows_are_replaced_where_they_lie(
    kind: str, name: str, buffer_of: Any, rows: Any, check_whole: Any
):
    buffer = wrapped(buffer_of, rows, kind, writer=RoundRobinWriter(track_generations=True))
    handles = buffer.writer.generations_of(torch.arange(7))
    index = INDICES[name]
    where = positions(index, 7)
    expected = list(IDS)
    if isinstance(where, int):
        buffer[index] = rows(1, 50)[0]
        expected[where] = 50
    else:
        buffer[index] = rows(len(where), 50)
        for number, slot in enumerate(where):
            expected[slot] = 50 + number
    assert check_whole(buffer[:]) == expected
    assert (len(buffer), buffer.write_count) == (7, 10)
    assert torch.equal(buffer.writer.generations_of(torch.arange(7)), handles)
    assert buffer.extend(rows(1, 80)).tolist() == [3]


@pytest.mark.pitfall("WR14")
@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_that_is_not_there_is_not_made(
    kind: str, buffer_of: Any, rows: Any, unchanged: Any
):
    """WR14, E7: ``rb["new"] = v`` made a column that later writes did not fill."""
    buffer = wrapped(buffer_of, rows, kind)
    value = torch.zeros(7)
    for write in (
        lambda: buffer.__setitem__("new", value),
        lambda: buffer.__setitem__(("next", "new"), value),
        lambda: buffer.set_("new", value),
        lambda: buffer.set_at_("new", value[:2], [0, 1]),
        lambda: buffer.update_({"id": torch.zeros(7, dtype=torch.int64), "new": value}),
        lambda: buffer.set_("next", value),
    ):
        unchanged(buffer, KeyError, write)


@pytest.mark.pitfall("WR3")
@pytest.mark.pitfall("WR4")
@pytest.mark.parametrize("kind", COLUMNS)
def test_edits_that_do_not_fit_change_nothing(kind: str, buffer_of: Any, rows: Any, unchanged: Any):
    """WR3, WR4, E7: no cast, no broadcast, no write beyond the stored rows."""
    buffer = buffer_of(kind, 20)
    buffer.extend(rows(7))
    good = torch.arange(7)
    observation = torch.zeros(7, 3)
    for error, write in [
        (ValueError, lambda: buffer.set_("id", good.float())),
        (ValueError, lambda: buffer.set_("id", good[:6])),
        (ValueError, lambda: buffer.set_("id", good[:1])),
        (ValueError, lambda: buffer.set_("observation", observation[:, :1])),
        (ValueError, lambda: buffer.set_at_("id", good[:3], [0, 1])),
        (ValueError, lambda: buffer.set_at_("id", good[:1], 0)),
        (ValueError, lambda: buffer.set_at_("id", torch.tensor(1.0), 0)),
        (ValueError, lambda: buffer.update_({"id": good, "observation": observation[:2]})),
        (ValueError, lambda: buffer.update_({"id": good, "next": {"reward": good}})),
        (ValueError, lambda: buffer.__setitem__(slice(0, 2), rows(3))),
        (ValueError, lambda: buffer.__setitem__(0, rows(1))),
        (ValueError, lambda: buffer.write_all(rows(3), end=2)),
        (IndexError, lambda: buffer.set_at_("id", good[:2], [0, 7])),
        (IndexError, lambda: buffer.__setitem__(7, rows(1)[0])),
        (IndexError, lambda: buffer.__setitem__([0, -8], rows(2))),
        (IndexError, lambda: buffer.write_all(rows(8))),
        (IndexError, lambda: buffer.write_all(rows(2), end=8)),
        (IndexError, lambda: buffer.write_all(rows(2), end=-1)),
    ]:
        unchanged(buffer, error, write)


def test_lists_have_no_columns_to_edit(buffer_of: Any, unchanged: Any, rows: Any):
    buffer = buffer_of("list", 20, filled=3)
    for write in (
        lambda: buffer.set_("id", torch.arange(3)),
        lambda: buffer.set_at_("id", torch.arange(1), [0]),
        lambda: buffer.update_({"id": torch.arange(3)}),
    ):
        unchanged(buffer, RuntimeError, write, "no columns")
    unchanged(buffer, IndexError, lambda: buffer.__setitem__(3, rows(1)[0]))
    unchanged(buffer, ValueError, lambda: buffer.__setitem__([0, 1], rows(1)))


def test_an_uninitialised_buffer_has_nothing_to_edit(buffer_of: Any, rows: Any, unchanged: Any):
    buffer = buffer_of("tensor")
    for write in (
        lambda: buffer.set_("id", torch.arange(0)),
        lambda: buffer.update_({"id": torch.arange(0)}),
        lambda: buffer.__setitem__(slice(None), rows(0)),
    ):
        unchanged(buffer, RuntimeError, write, "nothing is stored")


@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(["set_", "set_at_", "update_", "setitem", "column"]),
            st.lists(st.integers(-7, 6), min_size=1, max_size=4),
        ),
        max_size=8,
    )
)
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("kind", COLUMNS)
def test_any_sequence_of_edits_is_as_on_plain_tensors(
    kind: str, changes: list[Any], buffer_of: Any, rows: Any, same: Any
):
    """Rows named twice in one edit take the last value."""
    buffer = wrapped(buffer_of, rows, kind)
    model = {"id": buffer["id"].clone(), "reward": buffer["next", "reward"].clone()}
    for number, (name, where) in enumerate(changes, start=100):
        values = torch.arange(len(where)) + number * 10
        whole = torch.arange(7) + number * 10
        reward = ("next", "reward")
        if name in ("set_", "column"):
            if name == "set_":
                assert buffer.set_(reward, whole[:, None].float()) is buffer
            else:
                buffer[reward] = whole[:, None].float()
            model["reward"] = whole[:, None].float()
        elif name == "update_":
            update = {"id": whole, "next": {"reward": whole[:, None].float() / 2}}
            assert buffer.update_(update) is buffer
            model = {"id": whole, "reward": whole[:, None].float() / 2}
        elif name == "set_at_":
            assert buffer.set_at_("id", values, where) is buffer
            for slot, value in zip(where, values, strict=True):
                model["id"][slot] = value
        else:
            buffer[where] = rows(len(where), number)
            for slot in range(len(where)):
                model["id"][where[slot]] = number + slot
                model["reward"][where[slot]] = (number + slot) * 0.5
        same(buffer["id"].clone(), model["id"])
        same(buffer[reward].clone(), model["reward"])
    assert len(buffer) == 7


@pytest.mark.parametrize("index", [4, slice(1, 3), torch.tensor([5, 0]), torch.arange(7) == 2])
def test_some_rows_of_a_column_are_replaced(index: Any, buffer_of: Any, rows: Any):
    buffer = wrapped(buffer_of, rows, "tensor")
    expected = buffer["id"].clone()
    value = expected[index] + 70
    buffer.set_at_("id", value, index)
    expected[index] += 70
    assert torch.equal(buffer["id"], expected)


def test_flags_may_be_given_without_their_last_dimension(buffer_of: Any):
    buffer = buffer_of("tensor", filled=4)
    done = torch.tensor([True, False, True, False])
    assert torch.equal(buffer.set_(("next", "done"), done)["next", "done"], done[:, None])
    buffer.set_at_(("next", "done"), torch.tensor(False), 0)
    buffer.update_({"next": {"done": ~done}}, keys_to_update=["id"])
    assert buffer["next", "done"].squeeze(-1).tolist() == [False, False, True, False]


def test_columns_can_be_exchanged_with_clone(buffer_of: Any):
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(TensorDict({"a": torch.arange(4), "b": torch.arange(4) * 10}, [4]))
    buffer.update_({"a": buffer["b"], "b": buffer["a"]}, clone=True)
    assert buffer["a"].tolist() == [0, 10, 20, 30]
    assert buffer["b"].tolist() == [0, 1, 2, 3]


def test_keys_to_update_restrict_what_is_taken(buffer_of: Any, rows: Any):
    buffer = buffer_of("tensor", filled=3)
    new = rows(3, 40)
    buffer.update_(new, keys_to_update=["id", "absent", ("next", "done")])
    assert buffer["id"].tolist() == [40, 41, 42]
    assert torch.equal(buffer["next", "reward"], rows(3)["next", "reward"])
    buffer.update_(new, keys_to_update=["next"])
    assert torch.equal(buffer["next", "reward"], new["next", "reward"])
    assert torch.equal(buffer["observation"], rows(3)["observation"])
    buffer.update_({("next", "reward"): torch.ones(3, 1)}, keys_to_update=[("next", "reward")])
    assert buffer["next", "reward"].flatten().tolist() == [1.0, 1.0, 1.0]
    buffer.update_(new, keys_to_update=[])
    assert buffer["next", "reward"].flatten().tolist() == [1.0, 1.0, 1.0]
    buffer.update_(buffer[:].set("index", torch.arange(3)))


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_are_written_in_physical_order(
    kind: str, buffer_of: Any, rows: Any, check_whole: Any
):
    buffer = wrapped(buffer_of, rows, kind)
    buffer.write_all(rows(2, 20))
    assert check_whole(buffer[:]) == [20, 21, *IDS[2:]]
    buffer.write_all(rows(3, 30), end=3)
    assert check_whole(buffer[:]) == [30, 31, 32, *IDS[3:]]
    assert (len(buffer), buffer.write_count) == (7, 10)


def test_pytrees_and_objects_are_written_in_physical_order():
    tree = ReplayBuffer(storage=TensorStorage({"a": torch.arange(3), "b": (torch.zeros(3, 2),)}))
    tree.write_all({"a": torch.tensor([7, 8]), "b": (torch.ones(2, 2),)})
    assert tree["a"].tolist() == [7, 8, 2]
    objects = ReplayBuffer(storage=ListStorage(5), collate_fn=list)
    objects.extend(["a", "b", "c"])
    objects.write_all(["x", "y"])
    objects[-1] = "z"
    assert objects[:] == ["x", "y", "z"]


def test_inverse_transforms_apply_to_rows_and_not_to_columns():
    class Doubling:
        def inv(self, data: Any) -> Any:
            return data * 2

    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=Doubling())
    buffer.extend(TensorDict({"x": torch.arange(3.0)}, [3]))
    buffer[0] = TensorDict({"x": torch.tensor(5.0)}, [])
    buffer.write_all(TensorDict({"x": torch.tensor([1.0])}, [1]))
    assert buffer["x"].tolist() == [2.0, 2.0, 4.0]
    buffer.set_("x", torch.tensor([7.0, 8.0, 9.0]))
    buffer["x"] = buffer["x"] + 1
    assert buffer["x"].tolist() == [8.0, 9.0, 10.0]


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


def test_columns_with_lanes_are_edited_in_the_layout_that_was_written(unchanged: Any):
    data = torch.arange(10).view(2, 5)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2))
    buffer.extend(TensorDict({"x": data}, [2, 5]))
    buffer.set_("x", data * 3)
    assert torch.equal(buffer["x"], data * 3)
    buffer.set_at_("x", torch.tensor([7, 8]), ([0, 1], [2, 4]))
    assert (buffer["x"][0, 2], buffer["x"][1, 4]) == (7, 8)
    buffer.update_({"x": data})
    buffer.write_all(TensorDict({"x": data[:1] + 50}, [1, 5]))
    assert buffer["x"].tolist() == [[50, 51, 52, 53, 54], [5, 6, 7, 8, 9]]
    unchanged(buffer, ValueError, lambda: buffer.set_("x", data.T))
    unchanged(buffer, IndexError, lambda: buffer.__setitem__(2, buffer[0]))
    wrapped_at = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    wrapped_at.extend(TensorDict({"x": data}, [2, 5]))
    assert wrapped_at["x"].tolist() == [[3, 4, 2], [8, 9, 7]]
