"""The files of a data set: columns and the episode table."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from replaykit.datasets.dataset_manifest import (
    Array,
    AttachedFile,
    crc32_of_file,
    joined_crc32,
)
from replaykit.filesystem import EarlySync, disk_errors, require_room, reserve_opened
from replaykit.native import crc32
from replaykit.ted import Key, format_key

# Entries of tensordict's meta.json that are not keys. A key of such a name would be lost
# silently.
_META_NAMES: Final = frozenset({"shape", "device", "_type"})
_MAX_NAME_BYTES: Final = 255
_UNSAFE: Final = (*'/<>:"|?*\\ %\x7f', *map(chr, range(32)))
_ESCAPES: Final = {ord(char): f"%{ord(char):02X}" for char in _UNSAFE}
"""Tensordict's escapes for characters that a file name may not contain."""
_ZEROS: Final = bytes(1 << 16)
_COMPARED_BYTES: Final = 1 << 20
_SYNC_BYTES: Final = 4 << 20
"""Number of written bytes after which a column is synced, so less remains for the end."""
_READ_BYTES: Final = 1 << 14
"""Bytes that are read in the time of one call. Entries closer together are read as one block."""


def torch_dtype(dtype: npt.DTypeLike) -> torch.dtype:
    """Return the torch dtype of the same name and layout as a NumPy dtype.

    Raises:
        TypeError: torch has no such dtype.

    Example:
        >>> from replaykit.datasets.column_files import torch_dtype
        >>> torch_dtype("float16"), torch_dtype(bool)
        (torch.float16, torch.bool)
    """
    found = getattr(torch, np.dtype(dtype).name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch has no dtype {np.dtype(dtype)}")
    return found


def unstorable(key: Sequence[str]) -> str | None:
    """Return the reason why a key cannot be a name on disk, or ``None``.

    Example:
        >>> from replaykit.datasets.column_files import unstorable
        >>> unstorable(("info", "rgb:left_cam")) is None, unstorable(("info", "shape"))
        (True, "the name 'shape' is reserved by tensordict's format")
    """
    for position, name in enumerate(key):
        if name in _META_NAMES or (name == "meta.json" and position + 1 < len(key)):
            return f"the name {name!r} is reserved by tensordict's format"
        if len(f"{_file_name(name)}.memmap".encode()) > _MAX_NAME_BYTES:
            return f"the name {name[:20] + '...'!r} is too long for a file"
    return None


@dataclass(frozen=True)
class ColumnSpec:
    """The key, shape and dtype of a column; ``shape`` excludes the batch dimensions."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        """Size of one entry, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class ColumnOutput:
    """A column that is written from front to back, with a running checksum.

    Nothing is buffered in memory. The file is open only while a block is written. So the count of
    columns may exceed the limit of open files of the process.
    """

    def __init__(self, path: Path | None, spec: ColumnSpec, batch: tuple[int, ...]) -> None:
        self.path = path
        self.spec = spec
        self.shape = (*batch, *spec.shape)
        self.nbytes = math.prod(self.shape) * spec.dtype.itemsize
        self.crc32 = 0
        self.early_sync: EarlySync | None = None
        self.is_new = True
        self._stop = self.nbytes
        self._written = 0

    def __getstate__(self) -> dict[str, Any]:
        # The threads of the early sync belong to this process.
        return {**self.__dict__, "early_sync": None}

    def write(
        self,
        position: int,
        entries: npt.NDArray[Any],
        *,
        verify: Sequence[int] = (),
    ) -> None:
        """Write entries at ``position``, which must be the end of the last write.

        Args:
            position: index of the first entry in the (flattened) batch.
            entries: an array ``[n, ...]`` with the item size of the column's dtype.
            verify: indices of the entries to read back and compare (rule V60).

        Raises:
            OSError: the disk is full, or an entry was not stored as written. The message names the
                file.
            ValueError: ``position`` is not the end of the last write, or the entries exceed the
                column.
        """
        size = self.spec.entry_bytes
        if position * size != self._written or self._written + entries.nbytes > self._stop:
            raise ValueError(
                f"column {format_key(self.spec.key)} of {self.nbytes} bytes continues at byte "
                f"{self._written}, got {entries.nbytes} bytes for {position * size}"
            )
        if not entries.nbytes or self.path is None:
            return
        block = np.ascontiguousarray(entries).reshape(-1).view(np.uint8).data
        self.crc32 = crc32(block, self.crc32)
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            with disk_errors(self.path, self.nbytes):
                done = 0
                while done < len(block):
                    done += os.pwrite(descriptor, block[done:], self._written + done)
            # One large read costs less than many small ones.
            if len(verify) * _READ_BYTES > len(block) and _holds(descriptor, self._written, block):
                verify = ()
            for index in verify:
                part = slice(index * size, (index + 1) * size)
                # bytes() is faster, because memoryviews are compared value by value.
                if os.pread(descriptor, size, self._written + part.start) != bytes(block[part]):
                    raise OSError(
                        errno.EIO,
                        f"entry {position + index} was not stored as it was written [V60]",
                        str(self.path),
                    )
        finally:
            os.close(descriptor)
        self._written += len(block)
        if self.early_sync is not None:
            self.early_sync.wrote(self.path, len(block))

    def skip(self, entries: int) -> None:
        """Leave the next entries zero.

        A new file already contains zeros, so the call only updates the checksum. If an earlier
        conversion may have written the entries (``is_new`` is False), the call writes zeros.
        """
        left = entries * self.spec.entry_bytes
        if self._written + left > self._stop:
            raise ValueError(f"column {format_key(self.spec.key)} has no {entries} entries left")
        if not self.is_new:
            self._clear(left)
        self._written += left
        while left:
            step = min(left, len(_ZEROS))
            self.crc32 = zlib.crc32(_ZEROS[:step], self.crc32)
            left -= step

    def _clear(self, nbytes: int) -> None:
        """Write zeros from the end of the last write."""
        if not nbytes or self.path is None:
            return
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            with disk_errors(self.path, self.nbytes):
                at, stop = self._written, self._written + nbytes
                while at < stop:
                    at += os.pwrite(descriptor, _ZEROS[: stop - at], at)
        finally:
            os.close(descriptor)

    def skip_to(self, position: int) -> None:
        """Leave entries zero up to a position that may have been written already."""
        left = position - (self._written // self.spec.entry_bytes if self.spec.entry_bytes else 0)
        if left > 0:
            self.skip(left)

    def read(self, position: int, count: int) -> npt.NDArray[np.uint8]:
        """Return written entries as bytes ``[count, entry_bytes]``."""
        size = self.spec.entry_bytes
        if self.path is None or not size:
            return np.empty((count, size), np.uint8)
        found = np.fromfile(self.path, np.uint8, count * size, offset=position * size)
        return found.reshape(count, size)

    def blocks(self, first: int, stop: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Yield written entries ``first .. stop - 1`` in blocks of 1 MiB, with their positions."""
        step = max(1, _COMPARED_BYTES // max(1, self.spec.entry_bytes))
        for start in range(first, stop, step):
            yield start, self.read(start, min(step, stop - start))

    def adopt(self, entries: npt.NDArray[Any]) -> None:
        """Count entries that the file already holds at the end of the last write."""
        self.crc32 = crc32(entries, self.crc32)
        self._written += entries.nbytes

    def finish(self) -> int:
        """Leave the remaining entries zero, and return their count."""
        self.skip(left := (self._stop - self._written) // max(1, self.spec.entry_bytes))
        return left

    def describe(self, directory: Path, facts: Mapping[str, Any]) -> Array:
        """Return the manifest's entry of the column, with paths relative to a directory."""
        file = None if self.path is None else self.path.relative_to(directory).as_posix()
        spec = self.spec
        return Array(spec.key, file, spec.dtype, self.shape, self.nbytes, self.crc32, facts)

    @property
    def is_complete(self) -> bool:
        """Return whether every entry has been written or left zero."""
        return self._written == self._stop

    def part(self, first: int, stop: int) -> ColumnOutput:
        """Return entries ``first .. stop - 1`` as a separate output.

        The part has a separate checksum, which `join` adds to the checksum of the column.
        Independent processes may write the parts, in any order.
        """
        found = copy(self)
        found.early_sync = self.early_sync  # copy() drops the threads, as pickling does
        size = self.spec.entry_bytes
        found._written = first * size
        found._stop = stop * size
        found.crc32 = 0
        return found

    def join(self, crc32: int, entries: int) -> None:
        """Add the checksum of the next part, which another output has written."""
        nbytes = entries * self.spec.entry_bytes
        self.crc32 = joined_crc32(self.crc32, crc32, nbytes)
        self._written += nbytes


def _holds(descriptor: int, position: int, block: memoryview) -> bool:
    """Return whether a file contains these bytes at a position."""
    # Small pieces stay in the CPU cache, and need no buffer as large as the block.
    piece = memoryview(bytearray(min(_COMPARED_BYTES, len(block))))
    for at in range(0, len(block), len(piece)):
        wanted = block[at : at + len(piece)]
        found = piece[: len(wanted)]
        if os.preadv(descriptor, [found], position + at) < len(wanted):
            return False
        if not np.array_equal(np.frombuffer(found, np.uint8), np.frombuffer(wanted, np.uint8)):
            return False
    return True


@contextmanager
def synced_early(columns: Mapping[Key, ColumnOutput]) -> Iterator[None]:
    """Sync long columns to disk while the block writes them."""
    with EarlySync(_SYNC_BYTES) as early_sync:
        for column in columns.values():
            column.early_sync = early_sync
        try:
            yield
        finally:
            for column in columns.values():
                column.early_sync = None


def create_columns(
    directory: Path,
    specs: Sequence[ColumnSpec],
    batch: tuple[int, ...],
    *,
    is_new: bool = True,
) -> dict[Key, ColumnOutput]:
    """Make a directory of zero columns that ``TensorDict.load_memmap`` can read.

    The function reserves the disk blocks of the files. Cost: a few system calls for each column,
    whatever its length.

    Args:
        directory: the directory of the columns.
        specs: the columns.
        batch: the batch dimensions.
        is_new: if False, files of an earlier conversion may exist. Their bytes are kept.

    Raises:
        OSError: the disk has too little room.
        ValueError: a key cannot be a name on disk, or two keys have the same file.
    """
    columns = [ColumnOutput(None, spec, batch) for spec in specs]
    total = sum(column.nbytes for column in columns)
    there = 0 if is_new else _reserved_bytes(directory)
    largest = max((column.nbytes for column in columns), default=0)
    require_room(directory, max(0, total - there), largest)
    tree: dict[str, Any] = {}
    for column in columns:
        key = column.spec.key
        why = unstorable(key)
        if why is not None:
            raise ValueError(f"column {format_key(key)} cannot be stored: {why}")
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = column
        column.is_new = is_new
    with disk_errors(directory, total):
        _make(str(directory), tree, batch, {})
    return {column.spec.key: column for column in columns}


def _reserved_bytes(directory: Path) -> int:
    """Return the bytes on disk of the column files below a directory."""
    files = (path.lstat() for path in directory.rglob("*.memmap"))
    return 512 * sum(getattr(status, "st_blocks", 0) for status in files)


def _make(
    directory: str,
    tree: Mapping[str, Any],
    batch: tuple[int, ...],
    seen: dict[tuple[int, int], ColumnOutput],
) -> None:
    """Create the files that `TensorDict.memmap_like` would create, in a quarter of its time.

    Args:
        directory: the directory of the tree.
        tree: columns or nested trees, by name.
        batch: the batch dimensions.
        seen: the columns created so far, by device and inode of their files.
    """
    os.makedirs(directory, exist_ok=True)
    said: dict[str, Any] = {}
    for name, entry in tree.items():
        path = f"{directory}/{_file_name(name)}"
        if isinstance(entry, ColumnOutput):
            if entry.nbytes:
                _create(entry, Path(f"{path}.memmap"), seen)
            said[name] = {
                "device": "cpu",
                "shape": list(entry.shape),
                "dtype": str(entry.spec.dtype),
                "is_nested": False,
            }
        else:
            _make(path, entry, batch, seen)
            said[name] = {"type": TensorDict.__name__}
    said |= {"shape": list(batch), "device": "cpu", "_type": str(TensorDict)}
    with open(f"{directory}/meta.json", "w") as file:
        file.write(json.dumps(said, separators=(",", ":")))


def _create(column: ColumnOutput, path: Path, seen: dict[tuple[int, int], ColumnOutput]) -> None:
    """Create the file of a column, and reserve its disk blocks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        status = os.fstat(descriptor)
        other = seen.setdefault((status.st_dev, status.st_ino), column)
        if other is not column:
            raise ValueError(
                f"columns {format_key(other.spec.key)} and {format_key(column.spec.key)} have the "
                f"same file name on this file system: {path}"
            )
        reserve_opened(descriptor, path, column.nbytes)
    finally:
        os.close(descriptor)
    column.path = path


def _file_name(name: str) -> str:
    """Return tensordict's file name for a key, without the suffix."""
    if name in ("", ".", ".."):
        return "%2E" * len(name) or "%"
    return name.translate(_ESCAPES)


EPISODE_DIRECTORY: Final = "episodes"
GROUP_FILE: Final = "groups.txt"
_TOGETHER: Final = 1 << 12
"""Names per write."""

EPISODE_FIELDS: Final[Mapping[str, tuple[npt.DTypeLike, str]]] = {
    "start": (np.int64, "first row"),
    "length": (np.int64, "rows"),
    "seed": (np.int64, "position of the source file"),
    "episode": (np.int64, "number in the source file"),
    "source_seed": (np.int64, "seed that the path of the source file names, or -1"),
    "success": (np.int8, "the source's record of success: 1, 0, or -1 if it has none"),
    "terminated": (np.bool_, "the last row is terminated"),
    "truncated": (np.bool_, "the last row is truncated"),
    "return": (np.float64, "sum of the rewards, NaN without rewards"),
    "digest": (np.uint8, "16 bytes of the SHA-256 of observations and actions"),
}
"""Columns of the episode table, each with its dtype and meaning.

``digest`` has the shape ``[E, 16]``, and all other columns have the shape ``[E]``.
"""


def write_episode_table(
    directory: Path, columns: Mapping[str, npt.NDArray[Any]], groups: Iterable[str]
) -> tuple[tuple[Array, ...], AttachedFile]:
    """Write the episode table below a data set's directory.

    Args:
        directory: the data set's directory.
        columns: an array ``[E, ...]`` for each of `EPISODE_FIELDS`. Tables of an older version may
            lack some of them.
        groups: the name of each episode's group. Each name is written when the iterable yields it.

    Returns:
        The manifest's entries for the columns and for the text file of the groups.
    """
    specs = [
        ColumnSpec((name,), columns[name].shape[1:], torch_dtype(dtype))
        for name, (dtype, _) in EPISODE_FIELDS.items()
        if name in columns
    ]
    home = directory / EPISODE_DIRECTORY
    files = create_columns(home, specs, (len(columns["start"]),))
    for (name,), file in files.items():
        file.write(0, columns[name].astype(EPISODE_FIELDS[name][0], copy=False))
    arrays = tuple(file.describe(directory, {}) for file in files.values())
    path = home / GROUP_FILE
    nbytes = crc32 = 0
    # The separator is a line break, because JSON strings contain no line breaks.
    lines, left = json.JSONEncoder(separators=("\n", ":")), iter(groups)
    with path.open("wb") as names:
        while some := list(islice(left, _TOGETHER)):
            text = f"{lines.encode(some)[1:-1]}\n".encode()
            nbytes, crc32 = nbytes + len(text), zlib.crc32(text, crc32)
            with disk_errors(path, nbytes):
                names.write(text)
                names.flush()
    name = path.relative_to(directory).as_posix()
    return arrays, AttachedFile(name, nbytes, crc32)


def read_groups(path: Path) -> list[str]:
    """Return the group names in the order of the episodes. Cost: O(E)."""
    return [json.loads(line) for line in path.read_text().splitlines()]


ATTACHED: Final = ".attached"
"""The suffix of attached files. No other program writes files with this suffix."""


def attach_files(directory: Path, files: Mapping[str, Path]) -> Iterator[AttachedFile]:
    """Put files into a data set, as hard links where possible, and describe them.

    Yields one entry for each file. Cost: each file is read once for its checksum. Files on another
    disk are copied.

    Raises:
        OSError: a file cannot be read, or the disk has too little room for copies.
    """
    for name, path in files.items():
        target = directory / f"{name}{ATTACHED}"
        size = link_or_copy(path, target)
        relative = target.relative_to(directory).as_posix()
        yield AttachedFile(relative, size, crc32_of_file(target))


def link_or_copy(path: Path, target: Path) -> int:
    """Link a file to a new path, or copy it if it cannot be linked; return its size in bytes.

    A link at ``path`` is followed. The folders of ``target`` are made.

    Raises:
        OSError: the file cannot be read, or the disk has too little room for a copy.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    real = os.path.realpath(path)
    size = os.stat(real).st_size
    try:
        os.link(real, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
            raise
        require_room(target.parent, size, size)
        with disk_errors(target, size):
            shutil.copyfile(real, target)
    return size
