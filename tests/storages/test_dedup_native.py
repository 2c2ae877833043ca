"""Rows stored once, moved by the compiled core: what the operations of torch leave and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer, native
from tests.storages.dedup import through
from tests.support.refusals import refuses


def _with(rows: TensorDict, slots: int, *, core: bool = True, **options: Any) -> ReplayBuffer:
    """A buffer whose first rows are there, so that the next ones find the columns."""
    rb = ReplayBuffer(storage=LazyTensorStorage(slots, dedup_next=True, **options))
    rb.extend(rows)
    if not core:
        rb.storage.require().table.native = None
    return rb


def _random_rows(
    layout: dict[str, Any], filled: Callable[..., torch.Tensor], seed: int, count: int, ends: int
) -> TensorDict:
    """Rows of random bits that go on from each other, but for some."""
    generator = np.random.default_rng(seed)
    first, after = ({}, {})
    keeps = torch.from_numpy(generator.random(count) < ends / 10)
    for place, (name, (dtype, shape)) in enumerate(layout.items()):
        first[name] = filled((count, *shape), dtype, seed + place)
        after[name] = filled((count, *shape), dtype, seed + place + 99)
        # Rows that end an episode keep what they lead to: the others lead to the next one.
        for row in range(count - 1):
            if not keeps[row]:
                after[name][row] = first[name][row + 1]
    done = torch.from_numpy(generator.random((count, 1)) < 0.3)
    rows = {**first, "action": torch.arange(count), "next": {**after, "done": done}}
    return TensorDict(rows, [count])


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_core_and_torch_store_equal_rows(
    layouts: Any, filled: Any, same_rows: Any, data: st.DataObject
) -> None:
    layout, slots = data.draw(layouts), data.draw(st.integers(1, 90))
    start = _random_rows(layout, filled, 1, 1, 0)
    buffers = [_with(start, slots, core=core, on_mismatch="dense") for core in (True, False)]
    dense = ReplayBuffer(storage=LazyTensorStorage(slots))
    dense.extend(start)
    sizes = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=6))
    for turn, size in enumerate(sizes):
        rows = _random_rows(layout, filled, 7 * turn, size, data.draw(st.integers(0, 9)))
        for rb in (*buffers, dense):
            if size == 1:
                rb.add(rows[0])
            else:
                rb.extend(rows)
        a, b = (rb.storage for rb in buffers)
        assert (a.overflow_rows, a.require().nbytes()) == (b.overflow_rows, b.require().nbytes())
        index = torch.randint(0, len(dense), (50,), generator=torch.Generator().manual_seed(turn))
        for contiguous in (False, True):
            want = dense.storage.read(index, contiguous=contiguous)
            for storage in (a, b):
                assert same_rows(want, storage.read(index, contiguous=contiguous))


@pytest.mark.parametrize("core", [True, False])
def test_slots_outside_are_refused(core: bool) -> None:
    rb = _with(through([0, 1, 2]), 40, core=core)
    for slot in (-1, 2, 40, 2**40):
        refuses(IndexError, rf"\[0, 2\).*{slot}", rb.storage.read, torch.tensor([0, slot]))


@pytest.mark.parametrize("core", [True, False])
def test_core_follows_moved_memory(core: bool, transitions: Any, same_rows: Any) -> None:
    stream = transitions(4)
    start = stream.steps(6)
    once, dense = _with(start, 8, core=core), ReplayBuffer(storage=LazyTensorStorage(8))
    dense.extend(start)
    for _ in range(2):
        rows = stream.steps(3)
        for rb in (once, dense):
            rb.extend(rows)
        assert same_rows(*(rb.storage.read(torch.arange(8)) for rb in (once, dense)))
        column = once.storage.require().rows["pixels",]
        address = column.data_ptr()
        column.share_memory_()
        assert column.data_ptr() != address or column.is_shared()


def _core(**changes: Any) -> Any:
    """4 rows of a number, which the next row has too, and 2 overflow entries."""
    arguments = {
        "sizes": [8, 8],
        "follows": [-1, 0],
        "ends": [],
        "ids": [],
        "rows": 4,
        "lanes": 1,
    }
    return native.core.Observations(*{**arguments, **changes}.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": [8]},
        {"sizes": [8, -8]},
        {"sizes": [8, 4]},
        {"follows": [-1, 1]},
        {"follows": [-1, 2]},
        {"ends": [1]},
        {"ids": [2]},
        {"ids": [-1]},
        {"rows": 0},
        {"rows": 2**31 - 1},
        {"lanes": 0},
        {"lanes": 5},
    ],
    ids=str,
)
def test_descriptions_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    refuses(ValueError, "expected", _core, **changes)


def test_calls_that_do_not_fit_are_refused() -> None:
    root, own, references = np.zeros(4, np.int64), np.zeros(2, np.int64), np.zeros((4, 2), np.int32)
    core = _core()
    core.point([root.ctypes.data, own.ctypes.data], [8, 8], references.ctypes.data, 2)
    batch = np.arange(3, dtype=np.int64)
    index = np.array([0, 4], np.int64)
    rows = [batch.ctypes.data, batch.ctypes.data]
    out = [np.empty(2, np.int64).ctypes.data]
    refuses(IndexError, r"\[0, 4\), got 4", core.gather, index.ctypes.data, 2, 0, out, [8], 1)
    for to, strides, count, kind in (
        ([], [], 1, 0),
        (out, [], 1, 0),
        (out, [8], -1, 0),
        (out, [8], 1, 2),
        (out, [8], 1, 3),
    ):
        refuses(ValueError, "expected", core.gather, index.ctypes.data, count, kind, to, strides, 1)
    refuses(ValueError, "each of 2 leaves, got 1", core.compare_run, 3, -1, rows[:1], 1)
    for count, newest in ((0, 0), (1, 4), (1, -2)):
        refuses(ValueError, "at least one row", core.compare_run, count, newest, rows, 1)
    after = np.array([1, -1, -1], np.int64)
    with pytest.raises(ValueError, match="places of rows"):
        core.compare(np.array([3, 0, 1], np.int64).ctypes.data, after.ctypes.data, 3, rows, 1)
    core.forget()
    refuses(ValueError, "compared last", core.plan, batch.ctypes.data, 3, 0)
    core.compare_run(3, -1, rows, 1)
    refuses(ValueError, "compared last", core.plan, batch.ctypes.data, 2, 0)
    refuses(IndexError, "got 4", core.plan, np.array([1, 2, 4], np.int64).ctypes.data, 3, 0)
    refuses(ValueError, "stored rows", core.plan_run, 4, 3)
    core.forget()
    refuses(ValueError, "a plan", core.write, rows, 1)
    assert root.tolist() == [0, 0, 0, 0]
