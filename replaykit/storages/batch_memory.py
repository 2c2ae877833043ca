"""Make large batches in memory that earlier batches no longer use."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch

REUSED_FROM = 2**20
"""Bytes of a tensor from which on its memory is reused. The search for a block takes as long as
copying 100 KiB, while new memory may cost five times as much as the copy into it."""

_REUSED_TO = 2**27
"""Bytes of the largest tensor whose memory is reused. Larger ones are rarely batches, and too large
to be kept without a use."""

_LATELY = 64
"""Number of the last tensors whose size and memory are known. A search looks at all of them at
worst."""

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
"""Returns the number of tensors, and other owners in C++, of a tensor storage."""

_call: Any = partial.__call__

_CPU = torch.device("cpu")
"""Passed to each allocation, because torch would use the caller's default device."""


class BatchMemory:
    """Blocks of memory for tensors, each in use as long as a tensor or a view owns it.

    A block is an ordinary tensor storage of torch, so its tensors support the same operations as
    others. This object shares the ownership of the last blocks. A block is idle if nothing else
    owns it. When this object dies, torch frees the idle blocks, and each other block with its last
    tensor.

    Only sizes that recur among the last 64 tensors get blocks, and only blocks of the last 64
    tensors are known. A new block causes the release of idle blocks, until they take at most as
    many bytes as the known blocks in use. So all known blocks take at most twice the bytes that
    were in use at the last allocation.

    Several threads may use the object, and so may forked processes. There is no lock. A thread
    removes a block from the known blocks before it uses the block, and only one thread can.

    Attributes:
        allocations: number of tensors of at least a megabyte that got new memory.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by the number of the last tensor over each
        self._sizes: dict[int, int] = {}  # for each size, the number of the last tensor
        self._numbers = itertools.count()
        self.allocations = 0

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, on the CPU."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = None
        if REUSED_FROM <= nbytes <= _REUSED_TO and _counts_owners():
            number = next(self._numbers)
            if self._recurs(nbytes, number):
                block = self._idle(nbytes, number) or self._allocate(nbytes)
        if block is None:
            self.allocations += nbytes >= REUSED_FROM
            return torch.empty(shape, dtype=dtype, device=_CPU)
        tensor = block.tensor(shape, dtype)
        self._blocks[number] = block  # with its tensor, the block is not idle
        return tensor

    def _recurs(self, nbytes: int, number: int) -> bool:
        """Return whether one of the last tensors had this size, and record the size."""
        last = self._sizes.pop(nbytes, -_LATELY)
        self._sizes[nbytes] = number
        if len(self._sizes) > _LATELY:
            self._sizes = dict(list(self._sizes.items())[1:])
        return last > number - _LATELY

    def new_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor with the shape and device of a tensor."""
        if tensor.is_cpu:
            return self.new(tensor.shape, dtype)
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)

    def __reduce__(self) -> tuple[type[BatchMemory], tuple[()]]:
        """Copy the object, also into another process, without its blocks."""
        return BatchMemory, ()

    def clear(self) -> None:
        """Free the idle blocks, and leave the others to their tensors."""
        self._blocks.clear()

    def _idle(self, nbytes: int, number: int) -> _Block | None:
        """Return an idle block of this size, which is no longer known; None without one.

        The search starts with the block that was used last, which is most likely in the caches.
        """
        known = list(self._blocks.items())
        for last, block in reversed(known):
            if (
                block.nbytes == nbytes
                and block.is_idle()
                and self._blocks.pop(last, None) is not None
            ):
                break
        else:
            block = None
        for last, _ in known:
            if last > number - _LATELY:
                break
            self._blocks.pop(last, None)
        return block

    def _allocate(self, nbytes: int) -> _Block:
        used, idle = nbytes, []
        for last, block in list(self._blocks.items()):
            if block.is_lost():
                self._blocks.pop(last, None)
            elif block.is_idle():
                idle.append((last, block.nbytes))
            else:
                used += block.nbytes
        spare = sum(size for _, size in idle)
        for last, size in idle:
            if spare <= used:
                break
            self._blocks.pop(last, None)
            spare -= size
        self.allocations += 1
        return _Block(nbytes)


class _Block:
    """A tensor storage of torch, and a way to find out whether others own it too."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=_CPU).untyped_storage()
        self._counts = (
            partial(sys.getrefcount, self._memory),
            partial(_use_count, self._memory._cdata),
        )
        self._alone = self._owners()

    def _owners(self) -> tuple[int, ...]:
        """Return the number of owners in Python, and of owners in C++.

        An owner in Python may turn into one in C++, or the reverse, but only with the interpreter
        lock. Both counts are read in one call, which keeps the lock.
        """
        return tuple(map(_call, self._counts))

    def is_idle(self) -> bool:
        """Return whether the block may be used for a new tensor."""
        return self._owners() == self._alone and not self.is_lost()

    def is_lost(self) -> bool:
        """Return whether the block cannot be used again.

        Other processes may map shared memory. After a conversion to NumPy, torch would refuse to
        resize new tensors in the block.
        """
        memory = self._memory
        return memory.nbytes() != self.nbytes or not memory.resizable() or memory.is_shared()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor over the block."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        empty = torch.empty(0, dtype=dtype, device=_CPU)
        return empty.set_(self._memory, 0, tuple(shape), tuple(reversed(strides)))


@cache
def _counts_owners() -> bool:
    """Return whether this version of torch counts all owners of a tensor storage."""
    if _use_count is None:
        return False
    block = _Block(8)
    tensor = block.tensor((1,), torch.int64)
    seen = [block.is_idle()]
    view = tensor[:]
    del tensor
    seen.append(block.is_idle())
    memory = view.untyped_storage()
    del view
    seen.append(block.is_idle())
    del memory
    return seen == [False, False, False] and block.is_idle()
