"""Rows moved by the core: shared by threads, and beside threads."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit.native import core
from replaykit.schema import Schema, split_leaves
from replaykit.storages.columns import Columns

WIDE = 3 * 2**20 // 4


def _wide_columns() -> Columns:
    """12 rows of 3 MiB, and a number beside each."""
    ids = torch.arange(12)
    wide = ids[:, None].int().expand(12, WIDE).contiguous()
    wide[:, ::1000] += 1
    rows = split_leaves(TensorDict({"wide": wide, "id": ids, "other": ids.float()}, [12]), 1)
    return Columns(Schema(rows.root), rows.leaves, 1)


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_wide_rows_are_the_same_with_two_threads(two_threads: None) -> None:
    columns = _wide_columns()
    assert core.has_openmp() or sys.platform != "linux"
    for index in ([0], [5, 5], [11, 0, 3, 3, 7]):
        for contiguous in (True, False):
            for columns.advise in (True, False):
                got = columns.gather(torch.tensor(index), contiguous=contiguous)
                for path, leaf in got.items():
                    assert torch.equal(leaf, columns[path][index])
    slots = torch.tensor([7, 2, 3])
    values = {path: columns[path][[0, 1, 4]].clone() for path in columns.tensors}
    columns.scatter(slots, values, slice(None))
    for path, leaf in columns.tensors.items():
        assert torch.equal(leaf[slots], values[path])
    assert columns.scatter_ring(11, 3, [v.data_ptr() for v in values.values()], 0)
    for path, leaf in columns.tensors.items():
        assert torch.equal(leaf[[11, 0, 1]], values[path])


@pytest.mark.parametrize("way", ["gather", "mapped", "scatter", "ring"])
def test_other_threads_continue_while_wide_rows_are_copied(way: str) -> None:
    """A few rows of images take milliseconds: long enough for an environment's step."""
    columns = _wide_columns()
    columns.advise = way == "mapped"
    columns.gather(torch.arange(12))
    values = {path: leaf.clone() for path, leaf in columns.tensors.items()}
    addresses, slots = [leaf.data_ptr() for leaf in values.values()], torch.arange(12)
    table = columns._native._rows
    target = {path: torch.empty_like(leaf) for path, leaf in columns.tensors.items()}
    to = [target[path].data_ptr() for path in columns._native.order]
    assert len(to) == 3
    strides = [target[path].stride(0) * target[path].itemsize for path in columns._native.order]

    def copy() -> None:
        if way == "scatter":
            columns._native._leaves.scatter(
                slots.data_ptr(), 12, addresses, columns._native.leaf_sizes, 1
            )
        elif way == "ring":
            columns._native._leaves.scatter_ring(0, 12, 0, addresses, 1)
        elif way == "mapped":
            table.gather(slots.data_ptr(), 12, 12, to, strides, 1, True)
        else:
            table.gather(slots.data_ptr(), 12, 12, to, strides, 1)

    inside, seen, stop = [False], [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            seen[0] += inside[0]
            time.sleep(0)

    other = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # no thread is made to give way: the copy has to
    try:
        other.start()
        end = time.monotonic() + 20
        while seen[0] < 100 and time.monotonic() < end:
            inside[0] = True
            copy()
            inside[0] = False
            time.sleep(0)
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        other.join()
    assert seen[0] >= 100
