"""Pages of mapped files are dropped and come back; memory is counted once."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from benchmarks.contender import Unavailable
from benchmarks.pages import drop, forget_advice, resident_share, settle, touch
from benchmarks.stored import distinct_bytes, tensors_of_storage
from replaykit import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer


def test_dropped_pages_are_gone_and_their_values_are_not(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(1 << 20, scratch_dir=tmp_path / "scratch")
    ReplayBuffer(storage=storage).extend(torch.arange(1 << 20))
    tensors = tensors_of_storage(storage)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    settle(files)
    forget_advice(tensors)
    touch(tensors)
    assert resident_share(tensors) == 1
    try:
        drop(tensors, files)
    except Unavailable:
        assert not hasattr(os, "posix_fadvise")
    # A file system that lives in memory keeps them; the benchmark then says so and times nothing.
    assert resident_share(tensors) in (1, pytest.approx(0, abs=0.01))
    assert storage.get(slice(None)).equal(torch.arange(1 << 20))


def test_memory_that_columns_share_is_counted_once() -> None:
    base = torch.zeros(100, dtype=torch.int64)
    assert distinct_bytes([base[:10], base[50:], torch.zeros(5)]) == 820


def test_room_that_was_never_touched_takes_no_memory() -> None:
    room = mmap.mmap(-1, 1 << 24)
    tensor = torch.frombuffer(room, dtype=torch.uint8)
    assert distinct_bytes([tensor]) == 0
    tensor[:4096] = 1
    # One page, or all of a large one.
    assert 4096 <= distinct_bytes([tensor]) <= 1 << 21


def test_the_memory_of_a_storage_is_that_of_its_columns() -> None:
    storage = LazyTensorStorage(1000)
    ReplayBuffer(storage=storage).extend(torch.ones(1000, 3))
    assert 12_000 <= distinct_bytes(tensors_of_storage(storage)) <= 12_000 + 3 * 4096
    with pytest.raises(Unavailable, match="LazyTensorStorage cannot be seen"):
        tensors_of_storage(LazyTensorStorage(3))
