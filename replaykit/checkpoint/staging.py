"""Rows on their way from columns to files."""

from __future__ import annotations

import torch

from replaykit.checkpoint.changes import FrozenRows, rows_lie_apart
from replaykit.leafwise import raw_bytes

__all__ = ["Staging"]

_CACHED_ROWS = 16384
_ALIGNED = 16


class Staging:
    """Memory for rows on their way to a file, taken once.

    Args:
        limit: bytes; ``read`` takes no more at a time.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def rows(self, frozen: FrozenRows, name: str, count: int, at: int = 0) -> torch.Tensor:
        """Room for rows of a tensor, ``at`` that many bytes."""
        tensor, nbytes = frozen.tensors[name].tensor, count * frozen.row_bytes[name]
        if len(self._memory) < at + nbytes:
            self._memory = torch.empty(at + nbytes, dtype=torch.uint8, device="cpu")
        room = self._memory[at : at + nbytes]
        return room.view(tensor.dtype).view(count, *tensor.shape[1:])

    def read(
        self, frozen: FrozenRows, parts: list[tuple[str, int, int]]
    ) -> dict[tuple[str, int], memoryview]:
        """Reads the parts of tensors that lie in the same records, first and stop of each, while
        these are in the processor's cache.

        Returns:
            Their bytes by name and first row, good until the next call; nothing for tensors that
            lie alone, and where all together are more bytes than the limit.
        """
        apart = [part for part in parts if rows_lie_apart(frozen.tensors[part[0]].tensor)]
        if len(apart) < 2:
            return {}
        places, total = [], 0
        for name, first, stop in apart:
            places.append(total)
            total += -(-(stop - first) * frozen.row_bytes[name] // _ALIGNED) * _ALIGNED
        if total > self._limit:
            return {}
        self.rows(frozen, apart[-1][0], apart[-1][2] - apart[-1][1], places[-1])
        outs = [
            self.rows(frozen, name, stop - first, at)
            for (name, first, stop), at in zip(apart, places, strict=True)
        ]
        chunk = frozen.changes.chunk
        step = max(chunk, _CACHED_ROWS // chunk * chunk)
        lowest, highest = min(first for _, first, _ in apart), max(stop for *_, stop in apart)
        for start in range(lowest - lowest % step, highest, step):
            for (name, first, stop), out in zip(apart, outs, strict=True):
                low, high = max(first, start), min(stop, start + step)
                if low < high:
                    frozen.read(name, low, high, out[low - first : high - first])
        found = zip(apart, outs, strict=True)
        return {(name, first): raw_bytes(out).numpy().data for (name, first, _), out in found}
