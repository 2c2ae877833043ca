"""Sizes of levels, memory, and what a tree can be made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replaykit import MinSegmentTree, SumSegmentTree, native
from replaykit.priorities import SegmentTree
from replaykit.priorities.tree_kernels import levels_of
from tests.support.refusals import refuses

CAPACITIES = [1, 2, 7, 8, 9, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 100_003, 10**6]
LARGE = [2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**40 + 1, 2**60]


@pytest.mark.parametrize("capacity", [*CAPACITIES, *LARGE])
def test_every_level_covers_the_one_below(capacity: int) -> None:
    """Allocates nothing, so that no number of leaves is too large; 32 bits would not do."""
    levels = levels_of(capacity)
    assert capacity <= levels.leaves < capacity + 8
    assert levels.leaves % 8 == 0
    below, offset = capacity, 0
    for count, start in zip(levels.counts, levels.offsets, strict=True):
        assert count * 8 >= below > (count - 1) * 8
        assert start == offset
        assert start % 8 == 0
        below, offset = count, offset + (count + 7) // 8 * 8
    assert below <= 8
    assert all(count > 8 for count in levels.counts[:-1])
    assert levels.entries == offset
    assert levels.entries <= levels.leaves / 7 + 8 * len(levels.counts)


@pytest.mark.pitfall("SL4")
def test_a_power_of_two_takes_no_more_than_its_neighbour(kernel: str) -> None:
    """SL4: 5.14 bytes a leaf at any capacity."""
    tree, neighbour = SumSegmentTree(2**20), SumSegmentTree(2**20 - 1)
    assert tree.nbytes <= 1.1 * neighbour.nbytes
    assert tree.nbytes / 2**20 == pytest.approx(5.143, abs=0.01)
    held = {tensor.untyped_storage().data_ptr() for tensor in (tree._leaves, tree._nodes)}
    assert len(held) == 1  # one piece of memory for all
    assert SumSegmentTree(2**20, dtype=torch.float64).nbytes / 2**20 == pytest.approx(
        9.14, abs=0.01
    )
    assert MinSegmentTree(2**20).nbytes / 2**20 == pytest.approx(4.57, abs=0.01)


@pytest.mark.pitfall("SL4")
def test_a_tree_holds_the_memory_it_says(run_python: Any) -> None:
    """SL4: what the process grows by, no copies kept beside; within two huge pages."""
    program = """
import ctypes
import torch
from replaykit import SumSegmentTree

def resident():
    ctypes.CDLL(None).malloc_trim(0)  # what was freed and is kept for later is no tree's
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

try:
    resident()
except (OSError, AttributeError):
    raise SystemExit(0)
SumSegmentTree(100).fill(1.0)
for capacity in (2**23, 2**23 - 1):
    before = resident()
    tree = SumSegmentTree(capacity)
    tree.fill(1.0)
    tree.update(torch.arange(1000), torch.rand(1000))
    tree.draw(1000)
    grown = resident() - before
    assert grown < tree.nbytes + (6 << 20), (grown, tree.nbytes)
    del tree
    assert resident() - before < 6 << 20
"""
    run_python(program)


def test_invalid_tree_arguments_are_refused(kernel: str) -> None:
    for capacity in (0, -1):
        refuses(ValueError, f"a capacity of at least 1, got {capacity}", SumSegmentTree, capacity)
    refuses(TypeError, "expected a sum, min or max tree, got SegmentTree", SegmentTree, 4)
    with pytest.raises(TypeError):
        SumSegmentTree(2.5)  # type: ignore[arg-type]
    for dtype in (torch.float16, torch.bfloat16, torch.int64):
        refuses(NotImplementedError, f"float64, got {dtype}", SumSegmentTree, 4, dtype=dtype)
    with pytest.raises(NotImplementedError, match="a device that has float64, got mps"):
        SumSegmentTree(4, device="mps")


def test_core_refuses_invalid_tree_arguments() -> None:
    make = native.core.SegmentTree
    for arguments, message in (
        (("sum", False, "portable", 64, 64, 0), "a capacity of at least 1"),
        (("sum", False, "portable", 65, 64, 1), "aligned to 64"),
        (("sum", False, "portable", 64, 72, 1), "aligned to 64"),
        (("mean", False, "portable", 64, 64, 1), "sum, min or max, got mean"),
        (("sum", False, "sse", 64, 64, 1), "this processor runs, got sse"),
    ):
        refuses(ValueError, message, make, *arguments)
