"""How an 8-ary segment tree lies in memory: the arithmetic of its levels, and its allocation.

Level 0 holds one entry per eight leaves, level ``l + 1`` one per eight entries of level ``l``; the
last level has at most eight entries. Leaves and levels are filled up with the identity to a
multiple of eight, so that a node is always eight whole entries, and with entries of eight bytes one
line of the cache. ``csrc/tree_layout.h`` says the same in C++.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import NamedTuple

import torch

__all__ = ["FAN", "Levels", "allocate", "levels_of"]

FAN = 8
_LINE = 64
_HUGE = 1 << 21
_HUGE_FROM = 1 << 21


class Levels(NamedTuple):
    """Sizes of a tree: ``leaves`` and ``entries`` with padding, ``counts`` without."""

    capacity: int
    leaves: int
    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    entries: int


def levels_of(capacity: int) -> Levels:
    """The levels of a tree of ``capacity`` leaves; allocates nothing.

    Example:
        >>> from replaykit.priorities.layout import levels_of
        >>> levels_of(1000)
        Levels(capacity=1000, leaves=1000, counts=(125, 16, 2), offsets=(0, 128, 144), entries=152)
        >>> levels_of(2**40).leaves
        1099511627776
    """
    counts: list[int] = []
    offsets: list[int] = []
    below, offset = capacity, 0
    while not counts or below > FAN:
        below = -(-below // FAN)
        counts.append(below)
        offsets.append(offset)
        offset += -(-below // FAN) * FAN
    return Levels(capacity, counts[0] * FAN, tuple(counts), tuple(offsets), offset)


@torch.inference_mode(False)  # what is made in that mode could not be changed outside
def allocate(
    levels: Levels, leaf: torch.dtype, inner: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leaves ``[levels.leaves]`` and entries ``[levels.entries]``, in one piece, on lines of 64.

    The content is open. Large trees on the CPU ask for huge pages, without which every step of a
    descent may also miss the processor's table of pages.
    """
    first = -(-levels.leaves * leaf.itemsize // _LINE) * _LINE
    size = first + levels.entries * inner.itemsize
    raw = _bytes(size, device)
    leaves = raw[: levels.leaves * leaf.itemsize].view(leaf)
    return leaves, raw[first:size].view(inner)


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    if size >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        # Pages that nobody touches take no memory: what is too much in front and behind is free.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, -(-size // _HUGE) * _HUGE + _HUGE, flags=flags)
        raw = torch.frombuffer(pages, dtype=torch.uint8)
        start = -raw.data_ptr() % _HUGE
        with contextlib.suppress(OSError):  # a system without them: slower, nothing else
            # Only those that the tree fills: what is left of the last one would be memory too.
            pages.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE * _HUGE)
        return raw[start : start + size]
    raw = torch.empty(size + _LINE, dtype=torch.uint8, device="cpu")
    start = -raw.data_ptr() % _LINE
    return raw[start : start + size]
