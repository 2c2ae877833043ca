"""Where the memory of columns lies, and whether that of others is part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replaykit.storages.extents import reach

__all__ = ["ColumnMemory"]


class ColumnMemory:
    """The memory behind tensors, which whoever holds a view of them may have moved.

    Args:
        tensors: all that memory is known by, each once.

    Raises:
        RuntimeError: somebody has taken memory away that rows need.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._look()

    def _look(self) -> None:
        memory = [tensor.untyped_storage() for tensor in self.tensors]
        for tensor, storage in zip(self.tensors, memory, strict=True):
            if storage.nbytes() < reach(tensor):
                raise RuntimeError(
                    f"expected {reach(tensor)} bytes of memory behind stored rows, "
                    f"got {storage.nbytes()}: it was resized from outside"
                )
        self._held = [(tensor, tensor.data_ptr()) for tensor in self.tensors]
        self._ranges = {(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in memory if s.nbytes()}
        self._from = min((start for start, _ in self._ranges), default=0)
        self._to = max((stop for _, stop in self._ranges), default=0)

    def has_moved(self) -> bool:
        """Whether it lies somewhere else than at the last look; RuntimeError as above."""
        for tensor, address in self._held:
            if tensor.data_ptr() != address:
                self._look()
                return True
        return False

    def overlap(self, addresses: Sequence[int], count: int, sizes: Sequence[int]) -> bool:
        """Whether leaves, ``count`` rows of some bytes each, may be views of it."""
        # Most rows lie elsewhere altogether, which is told at once.
        if min(addresses) >= self._to or max(addresses) + count * max(sizes) <= self._from:
            return False
        return any(
            self._touches(address, address + count * size)
            for address, size in zip(addresses, sizes, strict=True)
        )

    def holds(self, values: torch.Tensor) -> bool:
        """Whether values lie in it, or in what it is part of."""
        # Many values lie elsewhere altogether, which is ten times cheaper to tell.
        if values.data_ptr() >= self._to:
            return False
        memory = values.untyped_storage()
        return self._touches(memory.data_ptr(), memory.data_ptr() + memory.nbytes())

    def _touches(self, start: int, stop: int) -> bool:
        return any(start < end and begin < stop for begin, end in self._ranges)
