"""A list of anything: what comes in, what goes out, and where it may be put."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from replaykit import LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from tests.support.refusals import refuses


@tensorclass
class Point:
    x: torch.Tensor


def test_the_capacity_is_2_to_the_63_unless_given() -> None:
    assert ListStorage().max_size == 2**63 - 1
    rb = ReplayBuffer(storage=ListStorage())
    assert rb.extend([1, 2, 3]).tolist() == [0, 1, 2]
    assert rb.storage.ledger.positions(torch.arange(4)).tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True, "3"])
def test_invalid_capacity_is_refused(capacity: Any) -> None:
    refuses(ValueError, "max_size as an int of at least 1", ListStorage, capacity)


BATCHES: dict[str, tuple[Any, list[Any]]] = {
    "list": ([1, "a", None], [1, "a", None]),
    "tuple": (("left", "right"), ["left", "right"]),
    "range": (range(2, 5), [2, 3, 4]),
    "set": ({7}, [7]),
    "array": (np.array([1.5, 2.5]), [1.5, 2.5]),
    "matrix": (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    "tensor": (torch.tensor([[1], [2]]), [[1], [2]]),
    "nothing": ([], []),
    "no tensor": (torch.zeros(0, 3), []),
}


@pytest.mark.pitfall("WR7")
@pytest.mark.pitfall("IF5")
@pytest.mark.parametrize("name", BATCHES)
def test_extend_stores_the_elements_as_add_would(name: str) -> None:
    """WR7, IF5: the elements along dimension 0 are the rows, whatever carries them."""
    batch, rows = BATCHES[name]
    together, one_by_one = ListStorage(5), ListStorage(5)
    ReplayBuffer(storage=together).extend(batch)
    for row in batch:
        ReplayBuffer(storage=one_by_one).add(row)
    for storage in (together, one_by_one):
        found = [row.tolist() if hasattr(row, "tolist") else row for row in storage]
        assert found == rows


@pytest.mark.parametrize("batch", ["text", 3, None, {"a": 1}, object()])
def test_extend_refuses_objects_without_rows_and_add_accepts_them(batch: Any) -> None:
    rb = ReplayBuffer(storage=ListStorage(5), collate_fn=list)
    refuses(TypeError, r"got \w+; add\(\) stores it as one row", rb.extend, batch)
    assert len(rb) == 0
    assert rb.write_count == 0
    assert rb.add(batch) == 0
    assert rb[0] is batch


def test_a_tuple_is_rows_for_extend_and_one_row_for_add() -> None:
    rb = ReplayBuffer(storage=ListStorage(5), collate_fn=list)
    rb.add((1, 2))
    rb.extend((3, 4))
    assert rb[:] == [(1, 2), 3, 4]


def test_tensordicts_and_tensorclasses_are_taken_row_by_row() -> None:
    rb = ReplayBuffer(storage=ListStorage(9), collate_fn=list)
    rb.extend(TensorDict({"x": torch.arange(2)}, [2]))
    rb.extend(Point(torch.arange(2), batch_size=[2]))
    assert [int(row.get("x")) for row in rb[:]] == [0, 1, 0, 1]
    assert type(rb[3]) is Point


@pytest.mark.pitfall("WR16")
def test_tensors_are_copied_and_other_objects_kept() -> None:
    tensor, array, thing = torch.zeros(2), np.zeros(2), {"a": [1]}
    storage = ListStorage(9)
    rb = ReplayBuffer(storage=storage, collate_fn=list)
    rb.extend([tensor, array, thing])
    tensor.fill_(1)
    array.fill(1)
    assert storage[0].tolist() == [0, 0]
    assert storage[1].tolist() == [0, 0]
    assert storage[2] is thing
    # A batch with a collate_fn of the user's is the user's, too.
    batch = rb.sample(30)
    for row in batch:
        if isinstance(row, torch.Tensor):
            row.fill_(5)
        elif isinstance(row, np.ndarray):
            row.fill(5)
    assert storage[0].tolist() == [0, 0]
    assert storage[1].tolist() == [0, 0]


@pytest.mark.pitfall("RD12")
def test_batches_of_tensors_tensordicts_and_numbers_are_stacked() -> None:
    """RD12: what the examples store can be sampled."""
    for rows, expected in (
        ([1, 2], torch.tensor([1, 2])),
        ([1.5, True], torch.tensor([1.5, 1.0])),
        ([np.arange(2), np.arange(2)], torch.tensor([[0, 1], [0, 1]])),
        ([np.float32(1), np.float32(2)], torch.tensor([1.0, 2.0])),
        ([torch.zeros(2), torch.ones(2)], torch.tensor([[0.0, 0.0], [1.0, 1.0]])),
    ):
        rb = ReplayBuffer(storage=ListStorage(5))
        rb.extend(rows)
        assert torch.equal(rb[:], expected)
        assert rb.sample(3).shape == (3, *expected.shape[1:])
    for row in (TensorDict({"x": torch.zeros(2)}, []), Point(torch.zeros(2), batch_size=[])):
        rb = ReplayBuffer(storage=ListStorage(5))
        rb.extend([row, row])
        assert rb.sample(3).batch_size == (3,)
        assert type(rb.sample(3)) is type(row)


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("make", [ListStorage, LazyStackStorage])
def test_dtypes_that_tensordict_cannot_copy_keep_their_bits(make: Any, fingerprint: Any) -> None:
    """``TensorDict.clone`` adds 0, which torch does not have for these."""
    for dtype in (torch.uint16, torch.uint64, torch.float8_e5m2, torch.complex32, torch.bits8):
        raw = torch.arange(8 * dtype.itemsize).to(torch.uint8)
        rows = TensorDict({"x": raw.view(dtype).view(4, 2)}, [4])
        rb = ReplayBuffer(storage=make(4), batch_size=5)
        rb.extend(rows)
        rb.load_state_dict(rb.state_dict())
        batch = rb.sample()
        expected = raw.view(4, 2, dtype.itemsize)[batch["index"]].flatten()
        assert batch["x"].dtype == dtype
        assert fingerprint(batch["x"].contiguous().view(-1).view(torch.uint8)) == fingerprint(
            expected
        )


def test_unstackable_rows_raise_error_with_advice() -> None:
    rb = ReplayBuffer(storage=ListStorage(5))
    rb.extend(["a", "b"])
    refuses(TypeError, "got str; give the buffer a collate_fn", rb.sample, 2)
    rb = ReplayBuffer(storage=ListStorage(5))
    rb.extend([torch.zeros(2), torch.zeros(3)])
    refuses(ValueError, r"cannot be stacked.*LazyStackStorage", lambda: rb[:])


def test_set_and_get() -> None:
    storage = ListStorage(4)
    storage.set(0, "a")
    storage.set([1, 2], ["b", "c"])
    storage.set(slice(1, 4), ["B", "C", "D"])
    assert list(storage) == ["a", "B", "C", "D"]
    assert storage[[3, 0]] == ["D", "a"]
    storage[1] = "x"
    storage[-1] = "y"
    storage[[0, 2]] = ["p", "q"]
    storage[torch.tensor([True, False, False, True])] = ["m", "n"]
    assert list(storage) == ["m", "x", "q", "n"]
    assert storage.ledger.cursor == 0
    assert storage.ledger.next_position == 6


@pytest.mark.pitfall("WR11")
def test_invalid_positions_are_refused(snapshot: Any) -> None:
    """WR11, E21: one past the end is the next record; anything further is a RuntimeError."""
    storage = ListStorage(4)
    rb = ReplayBuffer(storage=storage, collate_fn=list)
    rb.extend(["a", "b"])
    before = snapshot(rb)
    for position, rows, message in (
        (3, "x", "expected a position up to 2, got 3"),
        ([2, 4], ["x", "y"], "beyond the capacity"),
        (4, "x", "beyond the capacity"),
        (-1, "x", "beyond the capacity"),
        ([0, 3], ["x", "y"], "expected a position up to 2, got 3"),
    ):
        refuses(RuntimeError, message, storage.set, position, rows)
    with pytest.raises(RuntimeError, match="expected a position up to 2, got 2"):
        storage.set(2, "x", set_cursor=False)
    refuses(ValueError, "expected 1 rows for as many slots, got 2", storage.set, [0], ["x", "y"])
    refuses(TypeError, "bool mask", storage.set, torch.tensor([True, False]), ["x"])
    for index in (2, -3, [0, 2], torch.tensor([5])):
        with pytest.raises(IndexError):
            storage[index]
        with pytest.raises(IndexError):
            storage[index] = "x" if isinstance(index, int) else ["x"] * len(index)
    assert snapshot(rb) == before
    storage.set([2, 3], ["c", "d"])
    assert len(storage) == 4


def test_the_storage_is_its_own_flat_form() -> None:
    storage = ListStorage(3)
    refuses(RuntimeError, "nothing is stored yet", storage.flatten)
    storage.set(0, "a")
    assert storage.flatten() is storage
    assert storage.ndim == 1
    assert storage.shape == (1,)
    assert repr(storage) == "ListStorage(len=1, max_size=3)"


def test_empty_releases_stored_objects() -> None:
    class Thing:
        pass

    thing = Thing()
    seen = weakref.ref(thing)
    rb = ReplayBuffer(storage=ListStorage(3), collate_fn=list)
    rb.add(thing)
    del thing
    assert seen() is not None
    rb.empty()
    assert seen() is None
    assert len(rb.storage) == 0


@pytest.mark.parametrize(("capacity", "lengths"), [(20, [5, 4, 3, 2]), (9, [4, 3, 2])])
def test_no_episode_of_a_list_spans_a_load(capacity: int, lengths: list[int]) -> None:
    """A storage that indexes episodes finds the ends at which rows were loaded, and no others."""

    def make(storage: Any) -> ReplayBuffer:
        return ReplayBuffer(storage=storage)

    def rows(count: int) -> TensorDict:
        return TensorDict({"next": {"done": torch.zeros(count, 1, dtype=torch.bool)}}, [count])

    rb = make(LazyTensorStorage(20))
    for number, count in enumerate((5, 4, 3, 2)):
        rb.extend(rows(count))
        state = rb.state_dict()
        rb = make([ListStorage, LazyStackStorage, LazyTensorStorage][number % 3](capacity))
        rb.load_state_dict(state)
    final = make(LazyTensorStorage(20))
    final.load_state_dict(rb.state_dict())
    assert final.episodes.lengths.tolist() == lengths
