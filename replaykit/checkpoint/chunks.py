"""Tensors in files of raw rows: writing them with checksums, mapping them back."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from replaykit._compat import arange, dtype_by_name, dtype_name
from replaykit.leafwise import raw_bytes

__all__ = ["ChunkWriter", "RowChunks", "chunk_bytes", "map_tensor"]

_CHUNK_BYTES = 64 * 2**20
_MOST_FILES = 256
ALIGNMENT = 64
PAGE_BYTES = 16 * 2**10
"""Pages of all processors that matter are this or a part of it."""
PAGED_BYTES = 2**20
"""Tensors from this size on lie page by page; for smaller ones it would be mostly padding."""
_BLOCK_BYTES = 8 * 2**20


@dataclass
class ChunkWriter:
    """Writes tensors into ``<folder>/data-<token>-<number>.bin`` and notes what lies where.

    Small tensors share a file; large ones are cut into files of whole rows. Of a large one every
    piece lies in its file as it does in the tensor, modulo a page, so that the pieces can be mapped
    one after the other as one range of memory; where rows allow it, pieces are whole pages. Every
    file is synced when it is full, or by ``finish``.

    Attributes:
        limit: size from which on a file is full.
        files: per file its size in bytes and its crc32.
        tensors: per tensor dtype, shape and pieces ``[file, offset, rows]``.
    """

    folder: Path
    token: str
    limit: int = _CHUNK_BYTES
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    _open: BinaryIO | None = None
    _name: str = ""

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Appends a tensor. Cost: one pass over its bytes; memory for one block of rows."""
        rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
        row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else 0
        paged = len(rows) * row_bytes >= PAGED_BYTES
        pieces: list[list[Any]] = []
        start = 0
        while start < len(rows) or not pieces:
            count = len(rows) - start
            phase = start * row_bytes % PAGE_BYTES if paged else None
            offset = self._room_for(row_bytes, count * row_bytes, phase)
            if row_bytes and count * row_bytes > self.limit - offset:
                count = max(1, (self.limit - offset) // row_bytes)
                if paged:
                    count = _whole_pages(count, row_bytes)
            for block in _blocks(rows[start : start + count], row_bytes):
                self._append(block)
            pieces.append([self._name, offset, count])
            start += count
        self.tensors[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "pieces": pieces,
        }

    def _room_for(self, row_bytes: int, nbytes: int, phase: int | None) -> int:
        """Opens a file with room for a row, a small tensor whole; returns the offset in it.

        ``phase``: what the offset is modulo a page; None: any multiple of ``ALIGNMENT``.
        """
        at, unit = (0, ALIGNMENT) if phase is None else (phase, PAGE_BYTES)
        if self._open is not None:
            size = self.files[self._name]["size"]
            offset = size + (at - size) % unit
            if offset + min(nbytes, self.limit) <= self.limit or offset == 0:
                self._append(bytes(offset - size))
                return offset
            self._close()
        self._name = f"data-{self.token}-{len(self.files):05d}.bin"
        self._open = open(self.folder / self._name, "xb")  # noqa: SIM115 - closed by finish
        self.files[self._name] = {"size": 0, "crc32": 0}
        self._append(bytes(at))
        return at

    def _append(self, data: Any) -> None:
        assert self._open is not None
        record = self.files[self._name]
        self._open.write(data)
        record["crc32"] = zlib.crc32(data, record["crc32"])
        record["size"] += len(data)

    def _close(self) -> None:
        if self._open is not None:
            self._open.flush()
            os.fsync(self._open.fileno())
            self._open.close()
            self._open = None

    def finish(self) -> None:
        """Syncs and closes the last file."""
        self._close()

    def discard(self) -> None:
        """Removes every file that was written."""
        if self._open is not None:
            with contextlib.suppress(OSError):  # what is still buffered may not fit on the disk
                self._open.close()
            self._open = None
        for name in self.files:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)


def chunk_bytes(total: int) -> int:
    """Size from which on a file is full: 64 MiB, more where that would be too many files.

    A mapped file keeps a descriptor, of which a process commonly has 1024.
    """
    return max(_CHUNK_BYTES, -(-total // _MOST_FILES))


def _whole_pages(rows: int, row_bytes: int) -> int:
    """Returns the most rows, not above ``rows``, that are whole pages; ``rows`` if none are."""
    unit = PAGE_BYTES // math.gcd(row_bytes, PAGE_BYTES)
    return rows // unit * unit or rows


def _blocks(rows: torch.Tensor, row_bytes: int) -> Iterator[memoryview]:
    if not row_bytes:
        return
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        yield raw_bytes(rows[start : start + step]).numpy().data


class RowChunks:
    """The rows of one tensor in several mapped files, read piece by piece.

    Looks enough like a tensor to be read: ``len``, ``shape``, ``dtype``, ``device``, and indexing
    by int, slice (forward) and int64 ``[K]``, which copies just those rows.
    """

    def __init__(self, pieces: list[torch.Tensor]) -> None:
        self.pieces = pieces
        self.starts = [0]
        for piece in pieces:
            self.starts.append(self.starts[-1] + len(piece))
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
        for piece, start in zip(self.pieces, self.starts, strict=False):
            here = ((index >= start) & (index < start + len(piece))).nonzero().flatten()
            if len(here):
                _raw(rows)[here] = _raw(piece)[index[here] - start]
        return rows

    def _span(self, start: int, stop: int, step: int) -> torch.Tensor:
        if step != 1:
            return self[arange(start, max(start, stop), step)]
        rows = torch.empty((max(stop - start, 0), *self.shape[1:]), dtype=self.dtype, device="cpu")
        for piece, first in zip(self.pieces, self.starts, strict=False):
            low, high = max(start, first), min(stop, first + len(piece))
            if low < high:
                rows[low - start : high - start].copy_(piece[low - first : high - first])
        return rows


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes ``[rows, ...]``: indexing knows every dtype that way."""
    return tensor.reshape(len(tensor), -1).view(torch.uint8) if tensor.numel() else tensor


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
