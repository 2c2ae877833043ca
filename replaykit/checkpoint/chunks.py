"""Writing tensors into files of raw rows, with checksums."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from replaykit._compat import dtype_name
from replaykit.checkpoint.pieces import Piece
from replaykit.filesystem import disk_errors
from replaykit.leafwise import raw_bytes
from replaykit.native import crc32

__all__ = [
    "ChunkWriter",
    "chunk_bytes",
    "naming",
    "rows_of_pages",
]

_CHUNK_BYTES = 64 * 2**20
_LARGE_CHUNK_BYTES = 256 * 2**20
_MOST_FILES = 128
ALIGNMENT = 64
PAGE_BYTES = 16 * 2**10
"""Pages of all processors that matter are this or a part of it."""
PAGED_BYTES = 2**20
"""Tensors from this size on lie page by page; for smaller ones it would be mostly padding."""
_BLOCK_BYTES = 8 * 2**20


class ChunkWriter:
    """Writes rows of tensors into ``<folder>/data-<token>-<number>.bin`` and notes what lies where.

    Small tensors share a file; large ones are cut into files of whole rows. Of a large one every
    piece lies in its file as it does in the tensor, modulo a page, so that the pieces can be mapped
    one after the other as one range of memory; where rows allow it, pieces are whole pages. Nothing
    is synced.

    Args:
        folder: where the files go.
        token: what the names of the files have that no others have.
        limit: size from which on a file is full.
        wrote: told of every file how many bytes more were written to it.

    Attributes:
        files: per file its size in bytes and its crc32.
    """

    def __init__(
        self,
        folder: Path,
        token: str,
        limit: int = _CHUNK_BYTES,
        wrote: Callable[[Path, int], None] | None = None,
    ) -> None:
        self.folder, self.token, self.limit = folder, token, limit
        self.files: dict[str, dict[str, int]] = {}
        self._wrote = wrote
        self._open: BinaryIO | None = None
        self._name = ""
        self._gathered: list[np.ndarray[Any, Any]] = []
        """Two blocks: one is filled while the other one is written. The system takes large writes
        of whole pages at several times the rate of others."""
        self._waiting = 0
        """Bytes in the first one of them."""
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[tuple[int, int | None]] | None = None
        self._sums = False
        """Whether the checksum of what is being written was made here."""

    def write(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Appends a tensor; returns its record: dtype, shape, and pieces ``[file, offset, rows]``.

        Cost: one pass over its bytes; memory for one block of rows where they are no plain memory.
        """
        rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
        row_bytes = rows[:1].nbytes if len(rows) else 0
        paged = len(rows) * row_bytes >= PAGED_BYTES
        pieces = self.append(
            len(rows), row_bytes, lambda a, b: _blocks(rows[a:b], row_bytes), paged=paged
        )
        return {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "pieces": [[piece.file, piece.offset, piece.rows] for piece in pieces],
        }

    def append(
        self,
        count: int,
        row_bytes: int,
        blocks: Callable[[int, int], Iterable[memoryview]],
        first: int = 0,
        granule: int = 1,
        paged: bool = False,
    ) -> list[Piece]:
        """Appends rows; returns where they lie: at least one piece.

        Args:
            blocks: gives the bytes of the rows from one to before another, in turn.
            first: number of the first row.
            granule: rows that are not divided between two files, counted from the first one.
            paged: whether they lie in files as in the tensor, modulo a page.
        """
        pieces: list[Piece] = []
        start, stop = first, first + count
        while start < stop or not pieces:
            phase = start * row_bytes % PAGE_BYTES if paged else None
            offset = self._room_for((stop - start) * row_bytes, phase)
            taken = stop - start
            if row_bytes:
                room = (self.limit - offset) // row_bytes
                if taken > room:
                    unit = math.lcm(granule, rows_of_pages(row_bytes)) if paged else granule
                    end = (start + room) // unit * unit
                    if end <= start:  # not even one: of what must not be divided, one anyway
                        end = max((start + room) // granule * granule, start + granule)
                    taken = min(taken, end - start)
                for block in blocks(start, start + taken):
                    self._append(block)
            pieces.append(Piece(start, taken, self._name, offset))
            start += taken
        return pieces

    def _room_for(self, nbytes: int, phase: int | None) -> int:
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
            self.finish()
        self._name = f"data-{self.token}-{len(self.files):05d}.bin"
        with naming(self.folder / self._name):
            # Unbuffered: what was written is the kernel's, whatever happens to this process.
            self._open = open(self.folder / self._name, "xb", buffering=0)  # noqa: SIM115
        self.files[self._name] = {"size": 0, "crc32": 0}
        self._append(bytes(at))
        return at

    def _append(self, data: Any) -> None:
        assert self._open is not None
        record = self.files[self._name]
        view = memoryview(data).cast("B")
        record["size"] += len(view)
        while len(view):
            if not self._gathered:
                self._gathered = [np.empty(_BLOCK_BYTES, np.uint8) for _ in range(2)]
            taken = min(len(view), _BLOCK_BYTES - self._waiting)
            self._gathered[0].data[self._waiting : self._waiting + taken] = view[:taken]
            self._waiting += taken
            view = view[taken:]
            if self._waiting == _BLOCK_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Has what was gathered written, after what was before; raises what that has met."""
        waiting, self._waiting = self._waiting, 0
        block, busy = None, self._writing is not None and not self._writing.done()
        if waiting:
            block = self._gathered[0].data[:waiting]
        record = self.files[self._name]
        if not (busy and self._sums):  # its checksum may be what is waited for
            self._written()
        # Whoever has time for it makes the checksum: this thread, where it has to wait.
        self._sums = busy
        if busy and block is not None:
            record["crc32"] = crc32(block, record["crc32"])
        self._written()
        if block is not None:
            assert self._open is not None
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "replaykit-save")
            self._gathered.reverse()
            known = None if busy else record["crc32"]
            self._writing = self._thread.submit(_write_all, self._open, block, known)

    def _written(self) -> None:
        """Waits for what is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            file = self.folder / self._name
            with naming(file):
                count, found = writing.result()
            if found is not None:
                self.files[self._name]["crc32"] = found
            if self._wrote is not None:
                self._wrote(file, count)

    def finish(self) -> None:
        """Closes the file that is being written: what comes next goes into another one."""
        if self._open is not None:
            try:
                self._flush()
                self._written()
            finally:
                thread, self._thread = self._thread, None
                if thread is not None:
                    thread.shutdown()
            with naming(self.folder / self._name):
                self._open.close()
            self._open = None

    def discard(self) -> None:
        """Removes every file that was written."""
        self._waiting = 0
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.exception()
        with contextlib.suppress(OSError):
            self.finish()
        self._open = None
        for name in self.files:
            with contextlib.suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)


def _write_all(file: BinaryIO, left: memoryview, known: int | None) -> tuple[int, int | None]:
    """Returns how many bytes were written, and the crc32 of those and of what was before, if that
    is given."""
    count = len(left)
    known = known if known is None else crc32(left, known)
    while len(left):
        left = left[file.write(left) :]
    return count, known


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Has every refusal of the disk name the file."""
    try:
        with disk_errors(file, 0):
            yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise


def chunk_bytes(total: int) -> int:
    """Size from which on a file is full: an eighth of all, from 64 to 256 MiB; more where that
    would be too many files.

    Disks read long files faster than short ones. A mapped file keeps a descriptor, of which a
    process commonly has 1024.
    """
    return max(_CHUNK_BYTES, min(total // 8, _LARGE_CHUNK_BYTES), -(-total // _MOST_FILES))


def rows_of_pages(row_bytes: int) -> int:
    """Returns the fewest rows that are whole pages: a power of two."""
    return PAGE_BYTES // math.gcd(row_bytes, PAGE_BYTES)


def _blocks(rows: torch.Tensor, row_bytes: int) -> Iterator[memoryview]:
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        yield raw_bytes(rows[start : start + step]).numpy().data
