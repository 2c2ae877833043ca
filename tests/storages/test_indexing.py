"""What users index with, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from replaykit import ListStorage
from replaykit.storages.indexing import (
    as_cells,
    as_index,
    as_slots,
    indexed_shape,
    ravel,
    unravel_index,
)
from tests.support.refusals import refuses

INDICES: dict[str, Any] = {
    "int": 2,
    "last": -1,
    "numpy int": np.int64(3),
    "0-d tensor": torch.tensor(-2),
    "slice": slice(1, 4),
    "open slice": slice(None),
    "slice beyond the end": slice(3, 99),
    "negative slice": slice(-3, -1),
    "steps": slice(0, 5, 2),
    "backwards": slice(None, None, -1),
    "backwards in steps": slice(4, 0, -3),
    "backwards to nothing": slice(0, 4, -1),
    "empty slice": slice(3, 3),
    "ellipsis": ...,
    "list": [4, 0, 0, -1],
    "empty list": [],
    "list of tensors": [torch.tensor(1), torch.tensor(-1)],
    "range": range(1, 5, 2),
    "array": np.array([1, -5], dtype=np.int32),
    "tensor": torch.tensor([3, 3, -2]),
    "short tensor": torch.tensor([1, 2], dtype=torch.uint8),
    "matrix": torch.tensor([[0, 1, 2], [4, -1, -5]]),
    "list of lists": [[0, 1], [2, 3]],
    "mask": torch.tensor([True, False, True, False, True]),
    "list mask": [False, False, True, False, False],
    "array mask": np.array([True] * 5),
    "mask of nothing": torch.zeros(5, dtype=torch.bool),
}


def _for_numpy(index: Any) -> Any:
    if isinstance(index, torch.Tensor):
        index = index.numpy()
        index = index.astype(np.int64) if index.dtype == np.uint8 else index
    if isinstance(index, list):
        return np.array(index, dtype=np.int64 if not index else None)
    return list(index) if isinstance(index, range) else index


@pytest.mark.pitfall("RD11")
def test_rows_are_selected_as_numpy_would(storage_kind: Any, make_rows: Any) -> None:
    """RD11: storage and buffer agree, for every storage."""
    rb = storage_kind.buffer(6)
    rb.extend(make_rows(10, 5))
    for name, index in INDICES.items():
        expected = np.arange(10, 15)[_for_numpy(index)]
        if not storage_kind.columns and (expected.ndim > 1 or not expected.size):
            continue  # batches of objects are lists: no matrix, and no key to read from no row
        rows = rb.storage[index]
        ids = torch.stack([row["id"] for row in rows]) if isinstance(rows, list) else rows["id"]
        assert np.array_equal(ids.cpu().numpy(), expected), name
        assert np.array_equal(rb[index]["id"].cpu().numpy(), expected), name


def test_selections_from_a_list_may_be_empty() -> None:
    storage = ListStorage(5)
    storage.set([0, 1, 2], [7, 8, 9])
    assert storage[3:] == []
    assert storage[[]] == []
    assert storage[torch.zeros(3, dtype=torch.bool)] == []


OUTSIDE: list[Any] = [
    5,
    -6,
    2**40,
    [0, 5],
    [-6],
    torch.tensor([4, 5]),
    torch.tensor(-6),
    np.array([99]),
    [[0], [5]],
    torch.tensor([True, False]),
    torch.ones(6, dtype=torch.bool),
    [True] * 4,
    torch.ones(5, 1, dtype=torch.bool),
]


def test_index_outside_stored_rows_raises_index_error(
    storage_kind: Any, make_rows: Any, snapshot: Any
) -> None:
    rb = storage_kind.buffer(6)
    rb.extend(make_rows(10, 5))
    before = snapshot(rb)
    for index in OUTSIDE:
        count = np.asarray(index).size
        rows = make_rows(0, count)[0] if np.asarray(index).ndim == 0 else make_rows(0, count)
        for target in (rb.storage, rb):
            with pytest.raises(IndexError):
                target[index]
            with pytest.raises(IndexError):
                target[index] = rows
    mask = torch.ones(6, dtype=torch.bool)
    refuses(IndexError, r"a mask of shape \[5\], got \[6\]", rb.__getitem__, mask)
    assert snapshot(rb) == before


def test_invalid_index_raises_type_error(storage_kind: Any, make_rows: Any) -> None:
    rb = storage_kind.buffer(6)
    rb.extend(make_rows(10, 5))
    for index in (True, 1.5, None, object(), torch.tensor([0.5]), [0.5], "x", (1,)):
        with pytest.raises(TypeError, match="expected an"):
            rb.storage[index]


def test_a_step_of_zero_is_refused() -> None:
    refuses(ValueError, "step cannot be zero", as_index, slice(0, 3, 0), 5)


def test_ints_and_slices_are_views_and_everything_else_is_a_copy(
    column_kind: Any, make_rows: Any
) -> None:
    """4.1, 7.4: without transforms, slices of tensor storages are views."""
    rb = column_kind.buffer(6)
    rb.extend(make_rows(0, 5))
    column = rb.storage.column("id")
    for index, seen in (
        (3, True),
        (slice(1, 4), True),
        (slice(0, 5, 2), True),
        (..., True),
        (slice(None, None, -1), False),
        ([3], False),
        (torch.tensor([3]), False),
        (torch.arange(5) == 3, False),
    ):
        for rows in (rb[index], rb.storage[index]):
            before = column.clone()
            rows["id"] += 100
            assert (not torch.equal(column, before)) == seen, index
            column.copy_(before)


def test_huge_slice_costs_only_selected_rows() -> None:
    """A slice that runs backwards takes no memory for the rows that it skips."""
    index = as_index(slice(2**40, None, -(2**39)), 2**41)
    assert isinstance(index, torch.Tensor)
    assert index.tolist() == [2**40, 2**39, 0]


@pytest.mark.parametrize(
    ("cursor", "slots"),
    [
        (3, [3]),
        (np.int32(3), [3]),
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 3), [0, 3, 6]),
        (range(5, 2, -1), [5, 4, 3]),
        ([0, 6], [0, 6]),
        ((2, 1), [2, 1]),
        (torch.tensor([4, 4]), [4, 4]),
        (torch.tensor(5), [5]),
        (np.array([1]), [1]),
        ([], []),
    ],
)
def test_slots_of_a_low_level_write(cursor: Any, slots: list[int]) -> None:
    found = as_slots(cursor, 7)
    assert found.dtype == torch.int64
    assert found.tolist() == slots


def test_slots_outside_the_storage_are_refused() -> None:
    for cursor in (7, -1, [0, 7], torch.tensor([-1]), range(6, 9)):
        refuses(IndexError, r"expected rows in \[0, 7\), got", as_slots, cursor, 7)
    # The values of a mask would be taken for the slots 0 and 1.
    for mask in (True, torch.tensor([True, False]), [False], 1.5, "a", None):
        refuses(TypeError, "expected", as_slots, mask, 7)


@pytest.mark.pitfall("WR11")
def test_set_makes_records_and_leaves_no_hole(
    column_kind: Any, make_rows: Any, snapshot: Any
) -> None:
    """WR11, E21, 4.1: length is the highest slot + 1, the last one written is the newest."""
    rb = column_kind.buffer(6)
    storage = rb.storage
    storage.set(0, make_rows(0, 1)[0])
    for number in range(10):
        storage.set([0], make_rows(number, 1))
    assert len(storage) == 1
    storage.set(slice(1, 4), make_rows(1, 3))
    storage.set([2, 4, 1], make_rows(20, 3))
    assert storage[:]["id"].tolist() == [9, 22, 20, 3, 21]
    assert storage.ledger.cursor == 2  # after slot 1, the last one written
    order = storage.ledger.write_order().tolist()
    assert order == [0, 3, 2, 4, 1]
    before = snapshot(rb)
    for cursor, count in (([0, 6], 2), (6, None), (-1, None), (slice(4, 99), 3)):
        rows = make_rows(0, 1)[0] if count is None else make_rows(0, count)
        with pytest.raises((IndexError, ValueError)):
            storage.set(cursor, rows)
    storage.set([], make_rows(0, 0))
    assert snapshot(rb) == before
    rb.empty()
    for cursor in ([1], [0, 2], 3):
        rows = make_rows(0, 1)[0] if isinstance(cursor, int) else make_rows(0, len(cursor))
        refuses(RuntimeError, "expected no gap after the 0 stored rows", storage.set, cursor, rows)
    assert len(storage) == 0


def test_set_without_the_cursor_replaces_and_adds_nothing(
    column_kind: Any, make_rows: Any, snapshot: Any
) -> None:
    rb = column_kind.buffer(6)
    rb.extend(make_rows(0, 3))
    handles = rb.storage.ledger.state()
    rb.storage.set([2, 0, 2], make_rows(10, 3), set_cursor=False)
    assert rb[:]["id"].tolist() == [11, 1, 12]
    assert {k: str(v) for k, v in rb.storage.ledger.state().items()} == {
        k: str(v) for k, v in handles.items()
    }
    before = snapshot(rb)
    with pytest.raises(IndexError, match=r"\[0, 3\), got 3"):
        rb.storage.set([0, 3], make_rows(10, 2), set_cursor=False)
    with pytest.raises(ValueError, match="expected 2 rows for as many slots, got 3"):
        rb.storage.set([0, 1], make_rows(10, 3))
    assert snapshot(rb) == before


CELLS: list[Any] = [
    1,
    -1,
    slice(1, 3),
    ...,
    (1, 2),
    (slice(None), 0),
    (..., -1),
    [0, 2],
    ([0, 2], [1, 1]),
    (torch.tensor([0, 3]), slice(0, 2)),
    torch.tensor([[0, 1], [2, 3]]),
    torch.tensor([2, 0], dtype=torch.uint8),
    torch.tensor([True, False, True, False]),
    np.array([True, False, True, False]),
    torch.arange(12).view(4, 3) % 5 == 0,
    (slice(1, None), torch.tensor([True, False, True])),
    (torch.tensor([True, False, True, False]), 0),
    (..., torch.tensor([True, True, False])),
    (),
]


@pytest.mark.parametrize("index", CELLS, ids=repr)
def test_cells_are_selected_as_numpy_would(index: Any) -> None:
    array = np.arange(12).reshape(4, 3)
    parts = index if isinstance(index, tuple) else (index,)
    expected = array[tuple(_for_numpy(part) for part in parts)]
    cells, shape = as_cells(index, torch.Size([4, 3]))
    found = torch.from_numpy(array)[cells]
    assert shape == expected.shape
    assert np.array_equal(found.numpy(), expected)
    assert indexed_shape(torch.Size([4, 3]), cells) == expected.shape


@pytest.mark.parametrize(
    "index",
    [
        4,
        -5,
        (0, 3),
        (0, 0, 0),
        [4],
        torch.tensor([0, 4]),
        torch.tensor([True, False, True]),
        torch.ones(4, 2, dtype=torch.bool),
        (slice(None), [3]),
    ],
    ids=repr,
)
def test_cells_outside_are_index_errors(index: Any) -> None:
    with pytest.raises(IndexError):
        as_cells(index, torch.Size([4, 3]))


def test_shapes_are_found_without_memory_for_the_rows() -> None:
    huge = torch.Size([2**40, 2**10])
    assert indexed_shape(huge, slice(0, 2**39)) == (2**39, 2**10)
    assert indexed_shape(huge, (torch.tensor([2**39]), 5)) == (1,)


def test_contains_recognises_stored_rows(storage_kind: Any, make_rows: Any) -> None:
    rb = storage_kind.buffer(6)
    rb.extend(make_rows(0, 4))
    storage = rb.storage
    assert [i for i in range(-6, 7) if i in storage] == [-4, -3, -2, -1, 0, 1, 2, 3]
    assert storage.contains(torch.tensor([0, 3, 4, -1, 2**40])).tolist() == [1, 1, 0, 0, 0]
    for item in ("a", 1.0, True, None, torch.tensor([0.5]), torch.tensor([True]), [1]):
        refuses(TypeError, "an int or an integer tensor", storage.contains, item)


def test_iterating_yields_the_stored_rows_in_physical_order(
    storage_kind: Any, make_rows: Any
) -> None:
    rb = storage_kind.buffer(4)
    rb.extend(make_rows(0, 6))
    assert [int(row["id"]) for row in rb.storage] == [4, 5, 2, 3]


@pytest.mark.parametrize("lanes", [(), (3,), (2, 3)])
def test_coordinates_and_numbers_are_each_others_inverse(lanes: tuple[int, ...]) -> None:
    shape = (4, *lanes)
    flat = torch.arange(int(np.prod(shape))).flip(0)
    cells = unravel_index(flat, torch.Size(lanes))
    assert cells.tolist() == np.stack(np.unravel_index(flat.numpy(), shape), -1).tolist()
    assert torch.equal(ravel(cells, torch.Size(lanes)), flat)
