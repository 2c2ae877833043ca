"""Rows with those before them by the core: what plain indexing makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import native
from replaykit.schema import Schema, split_leaves
from replaykit.storages.columns import Columns
from replaykit.storages.records import plan_records
from replaykit.storages.row_kernels import Before, Frames

SLOTS = 7
LANES: dict[int, tuple[int, ...]] = {1: (), 2: (3,), 3: (2, 3)}
SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (2, 3), (0,)]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.bfloat16]


def made(leaves: dict[str, torch.Tensor], ndim: int, packed: bool = False) -> Columns:
    batch = next(iter(leaves.values())).shape[:ndim]
    rows = split_leaves(TensorDict(leaves, batch), ndim)
    schema = Schema(rows.root)
    layout = plan_records(schema) if packed else None
    if layout is None:
        return Columns(schema, rows.leaves, ndim)
    records = torch.zeros(*batch, layout.stride, dtype=torch.uint8)
    columns = Columns(schema, rows.leaves, ndim, layout=layout, records=records)
    for path, leaf in rows.leaves.items():
        columns[path].copy_(leaf)
    return columns


def frames_of(columns: Columns) -> Frames:
    assert columns.frames is not None
    return columns.frames


class Drawn:
    """Columns, elements and how many rows lie before each, and what is expected of them."""

    def __init__(self, data: Any, dtypes: list[torch.dtype]) -> None:
        self.ndim = data.draw(st.sampled_from([1, 2, 3]))
        lanes = LANES[self.ndim]
        self.cells = int(np.prod(lanes))
        self.leaves = {}
        for number in range(data.draw(st.integers(1, 3))):
            shape = data.draw(st.sampled_from(SHAPES))
            values = torch.randint(-90, 90, (SLOTS, *lanes, *shape))
            self.leaves[f"{number}"] = values.to(data.draw(st.sampled_from(dtypes)))
        self.columns = made(self.leaves, self.ndim, data.draw(st.booleans()))
        self.frames = frames_of(self.columns)
        self.paths = tuple((key,) for key in self.leaves)
        rows = data.draw(st.integers(0, 80))
        seed = np.random.default_rng(data.draw(st.integers(0, 99)))
        self.elements = seed.integers(0, SLOTS * self.cells, rows)
        self.reach = seed.integers(0, SLOTS, rows)
        time = seed.integers(SLOTS, 99, rows)
        first = time - self.reach
        # What begins below the lowest row that is stored reaches back to that one.
        lowest = int(first.min(initial=SLOTS))
        begin = np.where(first == lowest, lowest - seed.integers(0, 9, rows), first)
        self.rows = Before(self.elements, time, begin, lowest)
        self.count = data.draw(st.integers(1, 5))

    def expected(self, key: str, zero: bool) -> torch.Tensor:
        """``[B, count, *F]``, frame by frame."""
        leaf = self.leaves[key].flatten(0, self.ndim - 1)
        found = torch.zeros(len(self.elements), self.count, *leaf.shape[1:], dtype=leaf.dtype)
        for row, (element, reach) in enumerate(zip(self.elements, self.reach, strict=True)):
            for frame in range(self.count):
                age = self.count - 1 - frame
                if age > reach and zero:
                    continue
                slot, lane = divmod(int(element), self.cells)
                found[row, frame] = leaf[(slot - min(age, int(reach))) % SLOTS * self.cells + lane]
        return found


@settings(max_examples=100, deadline=None)
@given(data=st.data(), zero=st.booleans())
def test_stacked_frames_match_model(data: Any, zero: bool) -> None:
    its = Drawn(data, DTYPES)
    found = its.frames.stacks(its.paths, its.rows, its.count, zero=zero)
    assert found is not None
    assert list(found) == list(its.paths)
    for (key,), stack in found.items():
        expected = its.expected(key, zero)
        assert stack.is_contiguous()
        assert stack.dtype is expected.dtype
        assert stack.equal(expected)


def test_unsupported_columns_are_left_to_other_readers() -> None:
    leaves = {"x": torch.zeros(4, 2), "n": torch.zeros(4, dtype=torch.int64)}
    frames, one = frames_of(made(leaves, 1)), np.ones(1, np.int64)

    def stacks(paths: Any, rows: Any, count: int) -> Any:
        return frames.stacks(paths, Before(rows, rows, rows, 0), count, zero=False)

    for paths in ((("none",),), (("x",), ("none",))):
        assert stacks(paths, one, 2) is None
    many = np.ones(2**16, np.int64)  # a megabyte of frames
    assert stacks((("x",),), many, 2)["x",].shape == (2**16, 2, 2)


def newest(frames: Frames, element: int, reach: int) -> Any:
    rows = Before(*(np.array([number]) for number in (element, 9, 9 - reach)), -9)
    return frames.stacks((("x",),), rows, 2, zero=True)


def test_rows_outside_storage_raise_index_error() -> None:
    frames = frames_of(made({"x": torch.zeros(4, 2)}, 1))
    for element, reach in ((4, 0), (-1, 0), (0, 4), (0, -1)):
        with pytest.raises(IndexError):
            newest(frames, element, reach)


def test_mapped_columns_have_no_frame_reader(tmp_path: Any) -> None:
    """The kernel is told which pages of mapped files a batch needs; here it would not be."""
    rows = split_leaves(TensorDict({"x": torch.zeros(4)}, [4]), 1)
    assert Columns(Schema(rows.root), rows.leaves, 1, mapped=True).frames is None


def test_frame_reader_follows_moved_memory() -> None:
    """Whoever holds a view of a column may have its memory exchanged."""
    leaf = torch.arange(4.0)
    columns = made({"x": leaf}, 1)
    frames = frames_of(columns)
    assert newest(frames, 3, 1)[("x",)].tolist() == [[2, 3]]
    column = columns[("x",)]
    column.set_(torch.arange(4.0) * 10)  # type: ignore[call-overload]
    assert newest(frames, 3, 1)[("x",)].tolist() == [[20, 30]]


def test_core_refuses_mismatched_arguments() -> None:
    table = native.Table([0], [8], [8], 4)
    none, one = np.zeros(0, np.int64), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="an address and a stride for each of 2 fields, got 1"):
        table.frames(none, none, none, 0, 1, 2, False, [0], [8], 1)
    for lanes, count, to in ((0, 1, [0]), (1, 0, [])):
        with pytest.raises(ValueError, match="lanes and count of at least 1"):
            table.frames(none, none, none, 0, lanes, count, False, to, to, 1)
    with pytest.raises(ValueError, match="expected 0 entries in `time`, got 1"):
        table.frames(none, one, none, 0, 1, 1, False, [0], [8], 1)
    with pytest.raises(ValueError, match="expected 0 entries in `begin`, got 1"):
        table.frames(none, none, one, 0, 1, 1, False, [0], [8], 1)
    with pytest.raises(TypeError, match="`element` as an int64 array"):
        table.frames(none.astype(np.int32), none, none, 0, 1, 1, False, [0], [8], 1)
    with pytest.raises(ValueError, match="of at least 0"):
        native.core.join_rows(0, 0, -1, 0, 0, 1, 0, 0)
