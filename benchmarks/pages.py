"""Pages of mapped files: out of the page cache, into it, and which of them are there."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.contender import Unavailable

__all__ = [
    "drop",
    "forget_advice",
    "read_singly",
    "resident_bytes",
    "resident_share",
    "settle",
    "touch",
]

_MADV_NORMAL = 0
_MADV_RANDOM = 1
_MADV_DONTNEED = 4
_SIZE = mmap.PAGESIZE


def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    for name in ("madvise", "mincore"):
        if not hasattr(library, name):
            raise Unavailable(f"this system has no {name}: pages cannot be dropped or looked at")
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The pages of a tensor's memory: first address, bytes. A mapping begins at a page."""
    memory = tensor.untyped_storage()
    first = memory.data_ptr() // _SIZE * _SIZE
    return first, memory.data_ptr() + memory.nbytes() - first


def _advise(tensor: torch.Tensor, advice: int) -> None:
    first, nbytes = _range(tensor)
    if _libc().madvise(first, nbytes, advice):
        raise Unavailable(f"madvise failed: {os.strerror(ctypes.get_errno())}")


def forget_advice(tensors: Sequence[torch.Tensor]) -> None:
    """Makes the kernel read ahead as it does for anyone who said nothing."""
    for tensor in tensors:
        _advise(tensor, _MADV_NORMAL)


def read_singly(tensors: Sequence[torch.Tensor]) -> None:
    """Makes the kernel read the pages that are touched and no others, one after another."""
    for tensor in tensors:
        _advise(tensor, _MADV_RANDOM)


def settle(files: Sequence[Path]) -> None:
    """Writes what is dirty to disk: only clean pages can be dropped."""
    for file in files:
        with open(file, "r+b") as opened:
            os.fsync(opened.fileno())


def drop(tensors: Sequence[torch.Tensor], files: Sequence[Path]) -> None:
    """Takes pages of shared mappings out of this process, then out of the page cache.

    Nothing is lost: the mapping is of a file, and `settle` was called after the last write.
    """
    if not hasattr(os, "posix_fadvise"):
        raise Unavailable("this system cannot drop pages from the cache (no posix_fadvise)")
    for tensor in tensors:
        _advise(tensor, _MADV_DONTNEED)
    for file in files:
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def touch(tensors: Sequence[torch.Tensor]) -> None:
    """Reads every page."""
    for tensor in tensors:
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        memory[::_SIZE].sum()


def resident_share(tensors: Sequence[torch.Tensor]) -> float:
    """Returns how much of the memory is there, in 0 .. 1; of a file: lies in the page cache."""
    pages = sum(-(-_range(tensor)[1] // _SIZE) for tensor in tensors)
    return sum(map(_resident_pages, tensors)) / pages if pages else 0.0


def resident_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's memory that are there.

    Address space that nobody touched takes none; a large page takes all of it.
    """
    return min(tensor.untyped_storage().nbytes(), _resident_pages(tensor) * _SIZE)


def _resident_pages(tensor: torch.Tensor) -> int:
    first, nbytes = _range(tensor)
    count = -(-nbytes // _SIZE)
    if not count:
        return 0
    flags = (ctypes.c_ubyte * count)()
    if _libc().mincore(first, nbytes, flags):
        raise Unavailable(f"mincore failed: {os.strerror(ctypes.get_errno())}")
    return int((torch.frombuffer(flags, dtype=torch.uint8) & 1).sum())
