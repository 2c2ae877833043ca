"""Reading what ``ChunkWriter`` wrote: tensors over mapped files, in one piece or in several."""

from __future__ import annotations

import math
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import torch

from replaykit._compat import arange, dtype_by_name

__all__ = ["RowChunks", "copied", "map_tensor"]


class RowChunks:
    """The rows of one tensor in several mapped files, read piece by piece.

    Looks enough like a tensor to be read: ``len``, ``shape``, ``dtype``, ``device``, and indexing
    by int, slice (forward) and int64 ``[K]``, which copies just those rows. A slice of rows that
    lie in one piece is a view.

    Args:
        pieces: the rows, in order.
    """

    def __init__(self, pieces: list[torch.Tensor]) -> None:
        self.pieces = pieces
        self.starts = [0]
        for piece in pieces:
            self.starts.append(self.starts[-1] + len(piece))
        self._starts = torch.tensor(self.starts, device="cpu")
        self.shape = torch.Size([self.starts[-1], *pieces[0].shape[1:]])
        self.dtype = pieces[0].dtype
        self.device = pieces[0].device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, int):
            number = bisect_right(self.starts, index) - 1
            return self.pieces[number][index - self.starts[number]]
        if isinstance(index, slice):
            return self._span(*index.indices(len(self)))
        rows = torch.empty((len(index), *self.shape[1:]), dtype=self.dtype, device="cpu")
        numbers = torch.searchsorted(self._starts, index, right=True) - 1
        for number in numbers.unique().tolist():
            here = (numbers == number).nonzero().flatten()
            start, piece = self.starts[number], self.pieces[number]
            _raw(rows)[here] = _raw(piece)[index[here] - start]
        return rows

    def each(self, view: Callable[[torch.Tensor], torch.Tensor]) -> RowChunks:
        """Returns the rows with every piece seen in another way.

        Args:
            view: gives as many rows, as views.
        """
        return RowChunks([view(piece) for piece in self.pieces])

    def border(self, row: int) -> int:
        """Returns the first row after the piece in which a row lies."""
        number = bisect_right(self.starts, row) - 1
        return self.starts[number] + len(self.pieces[number])

    def views(self, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the rows ``start..stop`` where they lie, one after the other: the number of the
        first one, and views of rows of one piece.
        """
        number = max(bisect_right(self.starts, start) - 1, 0)
        while number < len(self.pieces) and self.starts[number] < stop:
            piece, first = self.pieces[number], self.starts[number]
            low, high = max(start, first), min(stop, first + len(piece))
            if low < high:
                yield low, piece[low - first : high - first]
            number += 1

    def _span(self, start: int, stop: int, step: int) -> torch.Tensor:
        if step != 1:
            return self[arange(start, max(start, stop), step)]
        views = list(self.views(start, stop))
        if len(views) == 1:
            return views[0][1]
        rows = torch.empty((max(stop - start, 0), *self.shape[1:]), dtype=self.dtype, device="cpu")
        for first, view in views:
            rows[first - start : first - start + len(view)].copy_(view)
        return rows


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes ``[rows, ...]``, a view: indexing knows every dtype that way."""
    return tensor.unsqueeze(-1).view(torch.uint8) if tensor.numel() else tensor


def map_tensor(
    record: dict[str, Any], mappings: dict[str, mmap.mmap | None]
) -> torch.Tensor | RowChunks:
    """Returns a tensor, or its rows in chunks, over mapped files; nothing is read yet.

    Raises:
        ValueError: the record contradicts the files.
    """
    dtype, shape = dtype_by_name(record["dtype"]), record["shape"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"expected a shape, got {shape!r}")
    row_shape = shape[1:]
    row_bytes = math.prod(row_shape) * dtype.itemsize
    pieces = []
    for file, offset, rows in record["pieces"]:
        mapping = mappings[file]
        if not (type(offset) is int and type(rows) is int and offset >= 0 and rows >= 0):
            raise ValueError(f"expected an offset and a number of rows, got {offset}, {rows}")
        nbytes = rows * row_bytes
        if nbytes == 0:
            pieces.append(torch.empty([rows, *row_shape], dtype=dtype, device="cpu"))
            continue
        unit = dtype.itemsize
        if offset % unit or mapping is None or offset + nbytes > len(mapping):
            raise ValueError(f"expected {nbytes} bytes at a multiple of {unit} in {file}")
        raw = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=offset)
        pieces.append(raw.view(dtype).view([rows, *row_shape]))
    total = sum(len(piece) for piece in pieces)
    if not pieces or total != (shape[0] if shape else 1):
        raise ValueError(f"expected {shape[:1] or 1} rows, got {total}")
    if len(pieces) > 1:
        return RowChunks(pieces)
    return pieces[0] if shape else pieces[0].reshape(())


def copied(found: torch.Tensor | RowChunks) -> torch.Tensor:
    """Returns what ``map_tensor`` gave in memory of its own."""
    if not isinstance(found, RowChunks):
        return found.clone()
    rows = found[:]  # a copy of several pieces, unless all but one are empty
    return rows.clone() if any(len(piece) == len(found) for piece in found.pieces) else rows
