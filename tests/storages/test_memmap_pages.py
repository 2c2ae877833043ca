"""Rows of mapped files whose pages are not in memory: the kernel is told, and values are right."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from replaykit import LazyMemmapStorage, ReplayBuffer
from replaykit.storages.columns import Columns

SLOTS = 2000
_MADV_RANDOM, _MADV_DONTNEED = 1, 4


def _rows() -> TensorDict:
    """8 MiB of wide rows, and small ones beside them."""
    ids = torch.arange(SLOTS)
    return TensorDict(
        {
            "id": ids,
            "x": ids[:, None] * 2.0 + torch.zeros(3),
            "pixels": (ids[:, None] * 7 + torch.arange(4096)).to(torch.uint8),
        },
        [SLOTS],
    )


class Pages:
    """The pages of a storage's files: which are in memory, and all of them out of it."""

    def __init__(self, columns: Columns, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        wide = columns[("pixels",)]
        assert columns.records is not None
        self._memory = [(t.data_ptr(), t.nbytes) for t in (wide, columns.records)]
        self._files = sorted(folder.rglob("*.memmap"))
        assert len(self._files) == 2
        # No page is read because its neighbour was: how far that goes differs between machines.
        self._advise(_MADV_RANDOM)

    def _advise(self, advice: int) -> None:
        for address, nbytes in self._memory:
            status = self._libc.madvise(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice)
            )
            assert not status, os.strerror(ctypes.get_errno())

    def in_memory(self) -> float:
        found = total = 0
        for address, nbytes in self._memory:
            count = -(-nbytes // mmap.PAGESIZE)
            flags = (ctypes.c_ubyte * count)()
            status = self._libc.mincore(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.byref(flags)
            )
            assert not status, os.strerror(ctypes.get_errno())
            found, total = found + sum(flag & 1 for flag in flags), total + count
        return found / total

    def drop(self) -> None:
        """Pages can go only where they are written back and no mapping holds them."""
        for file in self._files:
            with open(file, "r+b") as opened:
                os.fsync(opened.fileno())
        self._advise(_MADV_DONTNEED)
        for file in self._files:
            with open(file, "r+b") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def columns(tmp_path: Path) -> Columns:
    storage = LazyMemmapStorage(SLOTS, scratch_dir=tmp_path)
    ReplayBuffer(storage=storage).extend(_rows())
    columns = storage.require()
    columns.journal_by = storage  # type: ignore[attr-defined]
    return columns


@pytest.fixture
def pages(columns: Columns, tmp_path: Path) -> Pages:
    """Pages that can be dropped; skips where the file system keeps them."""
    if not hasattr(os, "posix_fadvise") or not Path("/proc/self/io").exists():
        pytest.skip("this system has no call that drops pages")
    pages = Pages(columns, tmp_path)
    assert pages.in_memory() == 1.0  # just written
    pages.drop()
    if pages.in_memory() > 0.5:
        pytest.skip(f"the file system of {tmp_path} keeps its pages in memory (as tmpfs does)")
    return pages


def _check(columns: Columns, index: torch.Tensor, **how: Any) -> None:
    expected = _rows()[index]
    got = columns.read(index, SLOTS, **how)
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


def _some(count: int, seed: int) -> torch.Tensor:
    return torch.randint(SLOTS, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("advise", [True, False])
def test_only_the_rows_of_the_batch_are_read(columns: Columns, pages: Pages, advise: bool) -> None:
    columns.advise = advise
    _check(columns, torch.tensor([3, 500, 1200, 1900]))
    assert 0 < pages.in_memory() < 0.02


@pytest.mark.parametrize("threads", [1, 2])
def test_page_advice_does_not_change_values(columns: Columns, pages: Pages, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for advise in (True, False):
            columns.advise = advise
            for count in (0, 1, 3, 700):
                for contiguous in (False, True):
                    pages.drop()
                    _check(columns, _some(count, count), contiguous=contiguous)
                    _check(columns, _some(count, count), contiguous=contiguous)
    finally:
        torch.set_num_threads(before)
