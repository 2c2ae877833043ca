"""Columns and rows changed where they lie, against plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ListStorage, ReplayBuffer, TensorStorage
from tests.buffer.building import IDS, KINDS, buffer_of, check_whole, rows, same, unchanged, wrapped

# -- changing rows --------------------------------------------------------------------------------


def test_buffers_without_columns_or_rows_have_nothing_to_edit():
    buffer = buffer_of("list", 20, filled=3)
    for write in (
        lambda b: b.set_("id", torch.arange(3)),
        lambda b: b.set_at_("id", torch.arange(1), [0]),
        lambda b: b.update_({"id": torch.arange(3)}),
    ):
        unchanged(buffer, RuntimeError, lambda w=write: w(buffer), "no columns")
    unchanged(buffer, IndexError, lambda: buffer.__setitem__(3, rows(1)[0]))
    unchanged(buffer, ValueError, lambda: buffer.__setitem__([0, 1], rows(1)))
    empty = buffer_of("tensor")
    for write in (
        lambda b: b.set_("id", torch.arange(0)),
        lambda b: b.update_({"id": torch.arange(0)}),
        lambda b: b.__setitem__(slice(None), rows(0)),
    ):
        unchanged(empty, RuntimeError, lambda w=write: w(empty), "nothing is stored")


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
@pytest.mark.parametrize("kind", ["tensor", "memmap"])
def test_edits_in_any_sequence_equal_edits_of_plain_tensors(kind: str, changes: list[Any]):
    """Rows named twice in one edit take the last value."""
    buffer = wrapped(kind)
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
def test_some_rows_of_a_column_are_replaced(index: Any):
    buffer = wrapped("tensor")
    expected = buffer["id"].clone()
    value = expected[index] + 70
    buffer.set_at_("id", value, index)
    expected[index] += 70
    assert torch.equal(buffer["id"], expected)


def test_flags_may_be_given_without_their_last_dimension():
    buffer = buffer_of("tensor", filled=4)
    done = torch.tensor([True, False, True, False])
    assert torch.equal(buffer.set_(("next", "done"), done)["next", "done"], done[:, None])
    buffer.set_at_(("next", "done"), torch.tensor(False), 0)
    buffer.update_({"next": {"done": ~done}}, keys_to_update=["id"])
    assert buffer["next", "done"].squeeze(-1).tolist() == [False, False, True, False]


def test_columns_can_be_exchanged_and_chosen():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(TensorDict({"a": torch.arange(4), "b": torch.arange(4) * 10}, [4]))
    buffer.update_({"a": buffer["b"], "b": buffer["a"]}, clone=True)
    assert buffer["a"].tolist() == [0, 10, 20, 30]
    assert buffer["b"].tolist() == [0, 1, 2, 3]
    buffer = buffer_of("tensor", filled=3)
    new = rows(3, 40)
    buffer.update_(new, keys_to_update=["id", "absent", ("next", "done")])
    assert buffer["id"].tolist() == [40, 41, 42]
    assert torch.equal(buffer["next", "reward"], rows(3)["next", "reward"])
    buffer.update_(new, keys_to_update=["next"])
    assert torch.equal(buffer["next", "reward"], new["next", "reward"])
    assert torch.equal(buffer["observation"], rows(3)["observation"])
    buffer.update_({("next", "reward"): torch.ones(3, 1)}, keys_to_update=[("next", "reward")])
    buffer.update_(new, keys_to_update=[])
    assert buffer["next", "reward"].flatten().tolist() == [1.0, 1.0, 1.0]
    buffer.update_(buffer[:].set("index", torch.arange(3)))


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_are_read_and_written_in_physical_order(kind: str):
    buffer = wrapped(kind)
    assert check_whole(buffer.read_all_in_order()) == IDS
    assert check_whole(buffer.read_all_in_order(end=3)) == IDS[:3]
    assert check_whole(buffer.read_all_in_order(99)) == IDS
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


def test_columns_with_lanes_are_edited_in_the_layout_that_was_written():
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
