"""Write tensors into checksummed files of rows, and reuse files of a checkpoint."""

from __future__ import annotations

import contextlib
import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from replaykit._compat import dtype_name
from replaykit.checkpoint.checkpoint_format import read_base
from replaykit.checkpoint.dirty_chunks import FrozenRows, RowsAtSave, runs
from replaykit.filesystem import disk_errors
from replaykit.native import crc32
from replaykit.structure import raw_bytes

_MOST_FILES = 128
_SLACK_BYTES = 2**20


@dataclass(frozen=True)
class RowExtent:
    """A piece of a tensor in a file: ``rows`` rows from row ``first`` on."""

    first: int
    rows: int
    file: str
    offset: int


class Pieces:
    """The pieces of one tensor in row order; each row is in at most one of them.

    Args:
        row_bytes: bytes of a row.
    """

    def __init__(self, row_bytes: int, pieces: Iterable[RowExtent] = ()) -> None:
        self.row_bytes = row_bytes
        self.pieces = sorted(pieces, key=lambda piece: piece.first)

    @classmethod
    def of_record(cls, pieces: Sequence[Sequence[Any]], row_bytes: int) -> Pieces:
        """Read the pieces of a manifest, ``[file, offset, rows]`` in row order."""
        found, first = [], 0
        for file, offset, rows in pieces:
            found.append(RowExtent(first, rows, file, offset))
            first += rows
        return cls(row_bytes, found)

    def to_record(self) -> list[list[Any]]:
        """Return the pieces for a manifest; join pieces that are adjacent in a file."""
        joined: list[list[Any]] = []
        for piece in self.pieces:
            last = joined[-1] if joined else None
            if (
                last
                and last[0] == piece.file
                and last[1] + last[2] * self.row_bytes == (piece.offset)
            ):
                last[2] += piece.rows
            else:
                joined.append([piece.file, piece.offset, piece.rows])
        return joined

    def spans(self, chosen: Iterable[tuple[int, int]]) -> Pieces:
        """Return the pieces that cover the rows ``first..stop`` of each span."""
        starts = [piece.first for piece in self.pieces]
        found = []
        for first, stop in chosen:
            number = bisect_right(starts, first) - 1
            while number < len(starts) and self.pieces[number].first < stop:
                piece = self.pieces[number]
                low, high = max(first, piece.first), min(stop, piece.first + piece.rows)
                offset = piece.offset + (low - piece.first) * self.row_bytes
                found.append(RowExtent(low, high - low, piece.file, offset))
                number += 1
        return Pieces(self.row_bytes, found)

    def nbytes(self) -> dict[str, int]:
        """Return the number of bytes that the rows take in each file."""
        total: dict[str, int] = {}
        for piece in self.pieces:
            total[piece.file] = total.get(piece.file, 0) + piece.rows * self.row_bytes
        return total


def files_to_leave(live: Mapping[str, int], sizes: Mapping[str, int]) -> set[str]:
    """Return the files whose rows a save should rewrite.

    A checkpoint then takes at most 1.5 times the bytes of its rows, and few files. The chosen files
    hold mostly unused rows, or are the smallest. All saves together thus write at most a few times
    the changed bytes.

    Args:
        live: for each file, the bytes that the save could reuse.
        sizes: the size of each file in bytes.

    Example:
        >>> from replaykit.checkpoint.chunks import files_to_leave
        >>> sizes = {"a": 100 << 20, "b": 100 << 20}
        >>> files_to_leave({"a": 99 << 20, "b": 10 << 20}, sizes)
        {'b'}
    """
    left = dict(live)
    size, used = sum(sizes[name] for name in left), sum(left.values())
    for name in sorted(live, key=lambda name: live[name] / max(sizes[name], 1)):
        if size <= 1.5 * used + _SLACK_BYTES:
            break
        size, used = size - sizes[name], used - left.pop(name)
    if len(left) > _MOST_FILES:
        smallest = sorted(left, key=lambda name: left[name])
        for name in smallest[: len(left) - _MOST_FILES // 2]:
            del left[name]
    return set(live) - set(left)


@dataclass(frozen=True)
class Base:
    """The checkpoint in a directory before a save.

    Attributes:
        folder: the directory.
        manifest: the manifest of the checkpoint; None if there is no readable one.
    """

    folder: Path = Path()
    manifest: dict[str, Any] | None = None

    @classmethod
    def of(cls, folder: Path) -> Base:
        """Read the manifest of a directory.

        Raises:
            CheckpointError: the manifest is not the manifest of a checkpoint.
        """
        return cls(folder, read_base(folder))

    @property
    def save(self) -> str | None:
        """The name of the save that wrote the checkpoint."""
        return None if self.manifest is None else self.manifest["save"]


class Again:
    """The chunks of frozen rows that a save reuses from a checkpoint.

    The constructor passes all other chunks to ``want`` of the frozen rows.

    Attributes:
        base: the checkpoint with the reused chunks.
        pieces: the reused pieces, by the id of the frozen rows and by tensor.
        nbytes: bytes of the rows that are not reused.
    """

    def __init__(self, frozen_rows: Iterable[FrozenRows], base: Base) -> None:
        self.base = base
        self.pieces: dict[int, dict[str, Pieces]] = {}
        self.nbytes = 0
        frozen_rows, manifest = list(frozen_rows), base.manifest
        sizes = {} if manifest is None else _sizes(base.folder, manifest)
        live: dict[str, int] = {}
        for frozen in frozen_rows:
            rows = None if manifest is None else frozen.saved(manifest)
            again = self.pieces[id(frozen)] = {
                name: _unchanged(frozen, name, rows, sizes) for name in frozen.names
            }
            for pieces in again.values():
                for file, nbytes in pieces.nbytes().items():
                    live[file] = live.get(file, 0) + nbytes
        left = files_to_leave(live, sizes)
        for frozen in frozen_rows:
            wanted, size = {}, frozen.changes.chunk
            for name, pieces in self.pieces[id(frozen)].items():
                pieces.pieces = [piece for piece in pieces.pieces if piece.file not in left]
                wanted[name] = np.full(frozen.chunks, frozen.row_bytes[name] > 0)
                for piece in pieces.pieces:
                    stop = -(-(piece.first + piece.rows) // size)
                    wanted[name][piece.first // size : stop] = False
                self.nbytes += int(wanted[name].sum()) * size * frozen.row_bytes[name]
            frozen.want(wanted)


def _sizes(folder: Path, base: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the files of a checkpoint that exist and are whole."""
    found = {}
    for name, record in base["files"].items():
        with contextlib.suppress(OSError):
            if os.lstat(folder / name).st_size == record["size"]:
                found[name] = record["size"]
    return found


def _unchanged(
    frozen: FrozenRows, name: str, saved: RowsAtSave | None, sizes: Mapping[str, int]
) -> Pieces:
    """Return the pieces of chunks that have not changed since a save and still exist."""
    row_bytes, tensor = frozen.row_bytes[name], frozen.tensors[name].tensor
    record = None if saved is None else saved.records.get(frozen.tensors[name].key)
    if (
        saved is None
        or record is None
        or record["dtype"] != dtype_name(tensor.dtype)
        or record["shape"][1:] != list(tensor.shape[1:])
        or not row_bytes
    ):
        return Pieces(row_bytes)
    size, rows, before = frozen.changes.chunk, frozen.rows, record["shape"][0]
    same = frozen.versions[name] <= saved.at
    # A last chunk that is not full is unchanged only if all of its rows were saved.
    same[min(rows, before) // size :] = False
    if before >= rows and rows % size and frozen.versions[name][-1] <= saved.at:
        same[-1] = True
    spans = [(first * size, min(stop * size, rows)) for first, stop in runs(same)]
    old = Pieces.of_record(record["pieces"], row_bytes).spans(spans)
    # Files end at the borders of chunks, so a missing file removes whole chunks.
    old.pieces = [piece for piece in old.pieces if piece.file in sizes]
    return old


_CHUNK_BYTES = 64 * 2**20
_LARGE_CHUNK_BYTES = 256 * 2**20
ALIGNMENT = 64
PAGE_BYTES = 16 * 2**10
"""Alignment in bytes, a multiple of the page size of all supported processors."""
PAGED_BYTES = 2**20
"""Least bytes of a tensor that is aligned to pages, to limit the padding."""
_BLOCK_BYTES = 8 * 2**20


class ChunkWriter:
    """A writer of tensors into files ``<folder>/data-<token>-<number>.bin``.

    Small tensors share a file. Large tensors are cut into files of whole rows. A piece of a large
    tensor has the same offset in its file as in the tensor, modulo a page. The pieces can thus be
    mapped one after the other into one range of memory. Pieces are whole pages if the row size
    permits it. The writer syncs no file.

    Args:
        folder: the directory for the files.
        token: the part of the file names that is unique to this save.
        limit: the size in bytes at which a file is full.
        wrote: function that is called after each write, with the file and the number of written
            bytes.

    Attributes:
        files: for each file, its size in bytes and its crc32.
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
        """Two blocks. One block is filled while the other is written.

        Large writes of whole pages are several times as fast as other writes.
        """
        self._waiting = 0
        """Number of gathered bytes in the first block."""
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[tuple[int, int | None]] | None = None
        self._sums = False
        """True if the caller's thread has computed the checksum of the block in progress."""

    def write(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Append a tensor; return its dtype, shape and pieces ``[file, offset, rows]``.

        Cost: one pass over the bytes. If the tensor is not plain memory, it also takes memory for
        one block of rows.
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
    ) -> list[RowExtent]:
        """Append rows; return their pieces, of which there is at least one.

        Args:
            blocks: function that returns the bytes of the rows ``start..stop``, in order.
            first: position of the first row in the tensor.
            granule: rows between two successive multiples of this number stay in one file.
            paged: whether offsets in files equal the offsets in the tensor, modulo a page.
        """
        pieces: list[RowExtent] = []
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
                    if end <= start:  # no whole unit fits, so take at least one granule
                        end = max((start + room) // granule * granule, start + granule)
                    taken = min(taken, end - start)
                for block in blocks(start, start + taken):
                    self._append(block)
            pieces.append(RowExtent(start, taken, self._name, offset))
            start += taken
        return pieces

    def _room_for(self, nbytes: int, phase: int | None) -> int:
        """Return an offset with room for ``nbytes``; begin a new file if necessary.

        Args:
            phase: the offset modulo a page; None for any multiple of ``ALIGNMENT``.
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
            # The file is unbuffered, so the kernel has all written bytes even if this process dies.
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
        """Start to write the gathered bytes; raise the error of the previous write."""
        waiting, self._waiting = self._waiting, 0
        block, busy = None, self._writing is not None and not self._writing.done()
        if waiting:
            block = self._gathered[0].data[:waiting]
        record = self.files[self._name]
        if not (busy and self._sums):  # the write's result may contain the checksum so far
            self._written()
        # This thread computes the checksum if it would otherwise wait. If not, the writing thread
        # does.
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
        """Wait for the write in progress."""
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
        """Close the current file; the next rows go into a new file."""
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
        """Remove all files that were written."""
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
    """Write all bytes; return their number and the crc32 of the file so far.

    Args:
        known: the crc32 of the file before these bytes; None to compute no crc32.
    """
    count = len(left)
    known = known if known is None else crc32(left, known)
    while len(left):
        left = left[file.write(left) :]
    return count, known


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Add the name of the file to every OSError."""
    try:
        with disk_errors(file, 0):
            yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(file)) from error
        raise


def chunk_bytes(total: int) -> int:
    """Return the size in bytes at which a file is full.

    The result is an eighth of all bytes, but at least 64 MiB and at most 256 MiB. It is larger if
    there would be too many files otherwise. Disks read long files faster than short files. A mapped
    file keeps a descriptor open, and a process commonly has at most 1024 descriptors.
    """
    return max(_CHUNK_BYTES, min(total // 8, _LARGE_CHUNK_BYTES), -(-total // _MOST_FILES))


def rows_of_pages(row_bytes: int) -> int:
    """Return the smallest number of rows that fill whole pages, a power of two."""
    return PAGE_BYTES // math.gcd(row_bytes, PAGE_BYTES)


def _blocks(rows: torch.Tensor, row_bytes: int) -> Iterator[memoryview]:
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        yield raw_bytes(rows[start : start + step]).numpy().data
