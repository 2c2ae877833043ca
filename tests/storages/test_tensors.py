"""Tensors as storages: wrapped or made at the first write, with and without lanes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, tensorclass

from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorStorage
from replaykit.errors import SchemaError
from tests.support.refusals import refuses


@tensorclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


WRAPPED: dict[str, Any] = {
    "tensor": torch.arange(3),
    "tensordict": TensorDict({"a": torch.arange(3), "n": {"b": torch.ones(3, 2)}}, [3]),
    "tensorclass": Point(torch.zeros(3), torch.ones(3, 2), batch_size=[3]),
    "pytree": (torch.zeros(3), {"a": torch.ones(3, 2)}),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_data_is_wrapped_without_a_copy_and_starts_full(name: str, fingerprint: Any) -> None:
    data = WRAPPED[name]
    storage = TensorStorage(data)
    assert (len(storage), storage.max_size, storage.ndim) == (3, 3, 1)
    assert storage.shape == (3,)
    assert fingerprint(storage[:]) == fingerprint(data)
    leaf = storage[:]
    while not isinstance(leaf, torch.Tensor):
        leaf = leaf[0] if isinstance(leaf, tuple) else next(iter(leaf.values()))
    original = data
    while not isinstance(original, torch.Tensor):
        original = original[0] if isinstance(original, tuple) else next(iter(original.values()))
    assert leaf.data_ptr() == original.data_ptr()


def test_the_first_write_goes_to_row_0() -> None:
    data = torch.arange(3)
    rb = ReplayBuffer(storage=TensorStorage(data))
    assert rb.write_count == 0
    assert rb.extend(torch.tensor([7, 8])).tolist() == [0, 1]
    assert data.tolist() == [7, 8, 2]
    assert rb.storage.ledger.write_order().tolist() == [2, 0, 1]
    assert rb.write_count == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"storage": None}, "got None; LazyTensorStorage starts empty"),
        ({"storage": torch.zeros(3), "max_size": 4}, "got max_size=4 for 3 rows"),
        ({"storage": (torch.zeros(3), torch.zeros(4))}, "share the first 1 dimension"),
        ({"storage": torch.zeros(3, 2), "ndim": 3}, "at least 3 batch dimension"),
        ({"storage": torch.zeros(0, 2)}, "at least one row"),
        ({"storage": torch.zeros(3), "ndim": 0}, "ndim as an int of at least 1"),
        ({"storage": TensorDict({}, [3])}, "at least one tensor"),
    ],
)
def test_invalid_data_is_refused(arguments: dict[str, Any], message: str) -> None:
    refuses(ValueError, message, TensorStorage, **arguments)


def test_max_size_may_be_repeated() -> None:
    assert TensorStorage(torch.zeros(3), 3).max_size == 3
    assert TensorStorage(torch.zeros(3, 2), max_size=3, ndim=2).max_size == 6


def test_wrapped_data_drop_reserved_keys_and_expand_flags() -> None:
    data = TensorDict({"index": torch.arange(3), "done": torch.zeros(3).bool()}, [3])
    storage = TensorStorage(data)
    assert set(storage[:].keys()) == {"done"}
    assert storage[:]["done"].shape == (3, 1)
    assert data["done"].shape == (3,)


@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("size", [0, -1, 2.5, "7", None, True])
def test_invalid_capacity_is_refused(make: Any, size: Any) -> None:
    refuses(ValueError, "max_size as an int of at least 1", make, size)


def test_storage_is_empty_before_the_first_write() -> None:
    storage = LazyTensorStorage(5, device="auto")
    assert (len(storage), storage.shape, storage.schema, storage.device) == (0, None, None, "auto")
    for read in (lambda: storage[0], lambda: storage[:], storage.flatten, storage.view_at):
        refuses(RuntimeError, "nothing is stored yet", read)
    assert not storage.contains(0)
    assert list(storage) == []
    ReplayBuffer(storage=storage).extend(torch.zeros(2))
    assert storage.device == torch.device("cpu")
    assert storage.shape == (2,)


def test_memory_beyond_the_filled_rows_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unwritten rows hold chance: fill them with NaN and look for it everywhere."""
    whole = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: whole(*a, **k).fill_(float("nan")), raising=True
    )
    storage = LazyTensorStorage(8)
    rb = ReplayBuffer(storage=storage)
    rb.extend(torch.arange(3.0))
    monkeypatch.undo()
    assert storage.require()[()].isnan().sum() == 5
    for values in (rb[:], rb.sample(50), storage.state_dict()["_storage"], storage.flatten()[:]):
        assert not values.isnan().any()
    assert len(storage.content().groups[0].columns[0]) == 3


@pytest.mark.pitfall("IF4")
@pytest.mark.parametrize(
    ("asked", "lanes", "steps", "size"),
    [
        (100, (3,), 34, 102),
        (6, (3,), 2, 6),
        (1, (4,), 1, 4),
        (25, (2, 3), 5, 30),
        (24, (2, 3), 4, 24),
    ],
)
def test_the_capacity_is_rounded_up_to_whole_steps(
    asked: int, lanes: tuple[int, ...], steps: int, size: int
) -> None:
    """IF4: fixed by the first write, and said by ``max_size``."""
    storage = LazyTensorStorage(asked, ndim=1 + len(lanes))
    rb = ReplayBuffer(storage=storage)
    assert storage.max_size == asked
    rb.add(torch.zeros(*lanes))
    assert storage.max_size == size
    assert storage.ledger.slots == steps
    rb.extend(torch.zeros(*lanes, 2 * steps))
    assert len(storage) == size
    # Dimension 0 of the data and time are exchanged: lanes (2, 3) lie as (3, 2).
    assert storage.shape == (steps, *reversed(lanes))


LAYOUTS = [
    (2, (3,), None),
    (2, (3,), 1),
    (2, (3,), 0),
    (3, (2, 3), None),
    (3, (2, 3), 1),
    (3, (2, 3), 0),
]


@pytest.mark.pitfall("WR9")
@pytest.mark.pitfall("RD11")
@pytest.mark.pitfall("IF4")
@pytest.mark.parametrize(("ndim", "lanes", "dim_extend"), LAYOUTS)
def test_each_element_lies_at_its_index(
    ndim: int, lanes: tuple[int, ...], dim_extend: int | None
) -> None:
    """WR9, IF4: ``storage[idx]`` is the element that each index was returned for; RD11."""
    time = ndim - 1 if dim_extend is None else dim_extend
    rb = ReplayBuffer(
        storage=LazyTensorStorage(5 * int(np.prod(lanes)), ndim=ndim), dim_extend=dim_extend
    )
    for written, steps in enumerate((2, 1, 4, 3, 12)):
        # The layout of written data: the lanes, with dims 0 and `time` exchanged.
        shape = [steps, *lanes]
        shape[0], shape[time] = shape[time], shape[0]
        data = torch.arange(int(np.prod(shape))).view(shape) + 1000 * written
        index = rb.extend(data)
        assert index.shape == (steps * int(np.prod(lanes)), ndim)
        # Time-major: the elements in the order of [time, *lanes].
        by_time = np.swapaxes(data.numpy(), 0, time).reshape(steps, -1)
        cells = index.view(steps, -1, ndim)
        for step in range(max(0, steps - 5), steps):
            for lane in range(by_time.shape[1]):
                cell = tuple(cells[step, lane].tolist())
                assert int(rb.storage[cell]) == by_time[step, lane]
        found = rb.storage.get(index[-5 * int(np.prod(lanes)) :])
        assert found.tolist() == by_time[-5:].flatten().tolist()
        # rb[i] indexes the layout that was written.
        everything = rb[:]
        kept = min(5, len(rb) // int(np.prod(lanes)))
        visible = [kept, *lanes]
        visible[0], visible[time] = visible[time], visible[0]
        assert list(everything.shape) == visible
        for i in (0, -1, slice(None), slice(0, 1), [0], torch.tensor([-1]), (0, 0), ...):
            assert torch.equal(rb[i], everything[i]), i
        mask = torch.arange(visible[0]) % 2 == 0
        assert torch.equal(rb[mask], everything[mask])
        cells_mask = everything % 2 == 0
        assert torch.equal(rb[cells_mask], everything[cells_mask])
    batch = rb.sample(200)
    assert batch.shape == (200,)


@pytest.mark.pitfall("RD11")
def test_rows_of_lanes_can_be_replaced_in_the_layout_that_was_written(make_lanes: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    rb.extend(make_lanes(0, 3))
    expected = rb[:].clone()
    for index, rows in (
        (0, make_lanes(50, 3)[1]),
        ((1, 2), make_lanes(70, 1)[0, 0]),
        ((slice(None), 0), make_lanes(80, 1)[:, 0]),
        (torch.tensor([[True, False, False], [False, True, False]]), make_lanes(90, 2)[0]),
    ):
        rb[index] = rows
        expected[index] = rows
        assert (rb[:] == expected).all()
    assert rb.write_count == 6
    for index, error in (((2, 0), IndexError), ((0, 3), IndexError), (slice(0, 2), None)):
        if error is not None:
            with pytest.raises(error):
                rb[index] = make_lanes(0, 1)[0, 0]
    with pytest.raises(SchemaError, match=r"rows of shape \[2, 3\], got \[2, 2\]"):
        rb[:] = make_lanes(0, 2)
    with pytest.raises(IndexError):
        rb[torch.tensor([True, False, True])] = make_lanes(0, 3)


def test_other_lanes_are_refused(make_lanes: Any, snapshot: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    rb.extend(make_lanes(0, 3))
    before = snapshot(rb)
    for write in (
        lambda: rb.extend(make_lanes(0, 3, (3,))),
        lambda: rb.add(make_lanes(0, 1, (3,))[:, 0]),
        lambda: rb.extend([make_lanes(0, 1, (4,))[:, 0]]),
        lambda: rb.storage.set([3], make_lanes(0, 1, (4,)).transpose(0, 1)),
    ):
        refuses(SchemaError, r"lanes of sizes \[2\], got \[[34]\]", write)
    assert snapshot(rb) == before


def test_lanes_iterate_element_by_element_in_time_order(make_lanes: Any) -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    rb.extend(make_lanes(0, 3))
    rows = list(rb.storage)
    assert [int(row["id"]) for row in rows] == [0, 100, 1, 101, 2, 102]
    assert rows[0].batch_size == ()


def test_coordinates_are_distinguished_from_positions() -> None:
    storage = TensorStorage(torch.arange(6).view(3, 2), ndim=2)
    assert storage[torch.tensor([[2, 1], [0, 0]])].tolist() == [5, 0]
    assert storage[torch.tensor([2, 1])].tolist() == [[4, 5], [2, 3]]
    assert storage[2, 1].item() == 5
    assert storage[torch.tensor([[[2, 1]], [[0, 0]]])].tolist() == [[5], [0]]
    for wrong in ([3, 0], [0, 2], [-1, 0], [0, -1]):
        with pytest.raises(IndexError):
            storage[torch.tensor([[0, 0], wrong])]
    three = torch.zeros(1, 3, dtype=torch.int64)
    refuses(IndexError, "expected 2 coordinates, got 3", storage.read, three)
    assert storage.contains(torch.tensor([[2, 1], [3, 0], [0, -1]])).tolist() == [
        True,
        False,
        False,
    ]
    assert storage.contains(torch.tensor([0, 2, 3])).tolist() == [True, True, False]
    assert 2 in storage
    assert 3 not in storage


def test_the_flat_form_shares_the_rows() -> None:
    storage = LazyTensorStorage(8, ndim=2)
    rb = ReplayBuffer(storage=storage)
    rb.extend(torch.arange(6.0).view(2, 3))
    flat = storage.flatten()
    assert (flat.ndim, len(flat), flat.max_size) == (1, 6, 6)
    assert flat[:].tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    flat[0] = torch.tensor(9.0)
    assert float(rb[0, 0]) == 9.0
    assert flat.flatten() is flat
    rb.empty()
    refuses(RuntimeError, "nothing is stored now", storage.flatten)


def test_flattening_non_contiguous_rows_raises_error() -> None:
    storage = TensorStorage(torch.zeros(2, 3, 4).transpose(0, 1), ndim=2)
    refuses(RuntimeError, "is not contiguous in memory", storage.flatten)


def test_trajectories_as_rows_give_indices_over_their_steps() -> None:
    rb = ReplayBuffer(storage=LazyTensorStorage(5), batch_size=6)
    rb.extend(TensorDict({"x": torch.arange(12).view(3, 4)}, [3, 4]))
    batch, info = rb.sample(return_info=True)
    assert batch.batch_size == (6, 4)
    assert batch["index"].shape == (6, 4)
    assert info["index"].shape == (6,)
    assert torch.equal(batch["index"], info["index"][:, None].expand(6, 4))
    assert torch.equal(batch["x"] // 4, batch["index"])


@pytest.mark.pitfall("WR10")
def test_capacities_above_2_to_the_31_work_at_the_end_of_their_range() -> None:
    """WR10: rows that are not written take no memory, so that two thousand million bytes do not."""
    size = 2**31 + 8
    storage = LazyTensorStorage(size)
    rb = ReplayBuffer(storage=storage, generator=torch.Generator().manual_seed(0))
    rb.extend(torch.tensor([1, 2, 3], dtype=torch.uint8))
    # As if 2^31 rows had been written: what they hold is chance and is not looked at.
    with storage.lock:
        storage.ledger.advance(2**31)
    assert rb.extend(torch.tensor([4, 5, 6, 7, 8, 9, 10], dtype=torch.uint8)).tolist() == [
        *range(2**31 + 3, 2**31 + 8), 0, 1,
    ]  # fmt: skip
    assert len(rb) == storage.max_size == size
    assert storage.ledger.cursor == 2
    assert storage[-5:].tolist() == [4, 5, 6, 7, 8]
    assert storage[[2**31 + 7, 0, 1, 2]].tolist() == [8, 9, 10, 3]
    assert storage[2**31 + 4].item() == 5
    assert storage.contains(2**31 + 7)
    assert not storage.contains(2**31 + 8)
    assert storage.ledger.generations(torch.tensor([0, 2**31 + 7])).tolist() == [1, 0]
    rb[2**31 + 6] = torch.tensor(77, dtype=torch.uint8)
    assert storage.read(torch.tensor([2**31 + 6])).tolist() == [77]
    _, info = rb.sample(64, return_info=True)
    assert int(info["index"].max()) > 2**30
