"""Write column files and the episode table of a data set."""

from __future__ import annotations

import errno
import json
import math
import os
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

from replaykit.datasets.dataset_manifest import Array, crc32_of_parts, joined_crc32
from replaykit.filesystem import EarlySync, disk_errors, require_room, reserve_opened
from replaykit.ted import Key, format_key

__all__ = [
    "EPISODE_DIRECTORY",
    "EPISODE_FIELDS",
    "ColumnOutput",
    "ColumnSpec",
    "create_columns",
    "read_groups",
    "synced_early",
    "torch_dtype",
    "unstorable",
    "write_episode_table",
]

# Entries of tensordict's meta.json that are no keys: a key of that name would be lost silently.
_META_NAMES: Final = frozenset({"shape", "device", "_type"})
_MAX_NAME_BYTES: Final = 255
_UNSAFE: Final = (*'/<>:"|?*\\ %\x7f', *map(chr, range(32)))
_ESCAPES: Final = {ord(char): f"%{ord(char):02X}" for char in _UNSAFE}
"""How tensordict writes what may not be part of a file's name."""
_ZEROS: Final = bytes(1 << 16)
_COMPARED_BYTES: Final = 1 << 20
_SYNC_BYTES: Final = 4 << 20
"""Bytes of a column after which it is synced: less of many columns is left for the end."""
_READ_BYTES: Final = 1 << 14
"""Bytes that are read in the time that a call takes: what is as dense is read back together."""


def torch_dtype(dtype: npt.DTypeLike) -> torch.dtype:
    """Returns the torch dtype of the same name and layout as a NumPy dtype.

    Raises:
        TypeError: torch has none.

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
    """Says why a key cannot be a name on disk; ``None`` when it can.

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
    """A column to be made: ``shape`` is of one entry, without the batch dimensions."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return math.prod(self.shape) * self.dtype.itemsize


class ColumnOutput:
    """A column that is written from front to back, with a running checksum.

    Memory: nothing is buffered. A file descriptor is held only while a block is written, so that
    a table may have more columns than a process may have open files.
    """

    def __init__(self, path: Path | None, spec: ColumnSpec, batch: tuple[int, ...]) -> None:
        self.path = path
        self.spec = spec
        self.shape = (*batch, *spec.shape)
        self.nbytes = math.prod(self.shape) * spec.dtype.itemsize
        self.crc32 = 0
        self.early_sync: EarlySync | None = None
        self.is_new = True
        self._begin = 0
        self._stop = self.nbytes
        self._written = 0

    def __getstate__(self) -> dict[str, Any]:
        # Its threads stay where they are.
        return {**self.__dict__, "early_sync": None}

    def write(
        self,
        position: int,
        entries: npt.NDArray[Any],
        *,
        verify: Sequence[int] = (),
        shared: tuple[int, int, int] | None = None,
    ) -> None:
        """Writes entries from ``position`` on, where the last write must have ended.

        Args:
            position: index of the first entry in the (flattened) batch.
            entries: ``[n, ...]``, with the bytes of the column's dtype.
            verify: which of them are read back and compared (rule V60).
            shared: first and last but one of a run of them, and the CRC-32 of its bytes, where
                that is known.

        Raises:
            OSError: there is no room, or an entry was not stored as written; names the file.
            ValueError: the position is not the next one, or the column would run over.
        """
        size = self.spec.entry_bytes
        if position * size != self._written or self._written + entries.nbytes > self._stop:
            raise ValueError(
                f"column {format_key(self.spec.key)} of {self.nbytes} bytes goes on at byte "
                f"{self._written}, got {entries.nbytes} bytes for {position * size}"
            )
        if not entries.nbytes or self.path is None:
            return
        block = np.ascontiguousarray(entries).reshape(-1).view(np.uint8).data
        if shared is not None:
            shared = (shared[0] * size, shared[1] * size, shared[2])
        self.crc32 = crc32_of_parts(block, self.crc32, shared)
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
                # Bytes with bytes: a comparison with a memoryview goes value by value.
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
        """Leaves entries zero, as new files are: they enter the checksum but are not written.

        Where an earlier conversion may have written something there (``is_new`` is False), they are
        made zero.
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
        """Writes zeros from where the last write has ended."""
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
        """Leaves entries zero up to a position; does nothing where it has been written."""
        left = position - (self._written // self.spec.entry_bytes if self.spec.entry_bytes else 0)
        if left > 0:
            self.skip(left)

    def read(self, position: int, count: int) -> npt.NDArray[np.uint8]:
        """Returns entries that were written, as bytes ``[count, entry_bytes]``."""
        size = self.spec.entry_bytes
        if self.path is None or not size:
            return np.empty((count, size), np.uint8)
        found = np.fromfile(self.path, np.uint8, count * size, offset=position * size)
        return found.reshape(count, size)

    def finish(self) -> int:
        """Leaves the rest zero; returns how many entries that were."""
        self.skip(left := (self._stop - self._written) // max(1, self.spec.entry_bytes))
        return left

    def describe(self, directory: Path, facts: Mapping[str, Any]) -> Array:
        """Returns the manifest's entry of the column, with paths relative to a directory."""
        file = None if self.path is None else self.path.relative_to(directory).as_posix()
        spec = self.spec
        return Array(spec.key, file, spec.dtype, self.shape, self.nbytes, self.crc32, facts)

    @property
    def is_complete(self) -> bool:
        """Whether every entry has been written or left zero."""
        return self._written == self._stop

    def part(self, first: int, stop: int) -> ColumnOutput:
        """Returns entries ``first .. stop - 1`` as a column that is written by itself.

        It has a checksum of its own, which `join` takes. Parts may be written in any order, and
        by processes that know nothing of each other.
        """
        found = copy(self)
        found.early_sync = self.early_sync  # which a copy, made as for another process, lacks
        size = self.spec.entry_bytes
        found._begin = found._written = first * size
        found._stop = stop * size
        found.crc32 = 0
        return found

    @property
    def reached(self) -> tuple[int, int]:
        """How many bytes of it have been written or left zero, and their CRC-32."""
        return self._written - self._begin, self.crc32

    def go_on(self, nbytes: int, crc32: int) -> None:
        """Takes its first bytes, which are there, as they were `reached`."""
        self._written, self.crc32 = self._begin + nbytes, crc32

    def join(self, crc32: int, entries: int) -> None:
        """Takes the next part, which has been written, by its checksum and its length."""
        nbytes = entries * self.spec.entry_bytes
        self.crc32 = joined_crc32(self.crc32, crc32, nbytes)
        self._written += nbytes


def _holds(descriptor: int, position: int, block: memoryview) -> bool:
    """Whether a file has these bytes at a position."""
    # In pieces that stay in a cache: as much memory as the block has would have to be made.
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
    """Has long columns made durable while they are written in the block."""
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
    """Makes a directory of zero-filled columns that ``TensorDict.load_memmap`` can read.

    The blocks of the files are reserved. Cost: a few system calls for each column, whatever its
    length.

    Args:
        directory: where they are made.
        specs: the columns.
        batch: the batch dimensions.
        is_new: whether none of them is there; otherwise they keep what was written to them.

    Raises:
        OSError: there is no room for them.
        ValueError: a key cannot be a name on disk, or two keys have one file.
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
    """Returns how many bytes of the disk the files below a directory have."""
    files = (path.lstat() for path in directory.rglob("*.memmap"))
    return 512 * sum(getattr(status, "st_blocks", 0) for status in files)


def _make(
    directory: str,
    tree: Mapping[str, Any],
    batch: tuple[int, ...],
    seen: dict[tuple[int, int], ColumnOutput],
) -> None:
    """Makes what `TensorDict.memmap_like` makes of such a tree, in a quarter of its time.

    Args:
        tree: columns by name, and such trees.
        seen: the columns made already, by the numbers of their files.
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
    """Makes the file of a column, with the blocks that it needs."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        status = os.fstat(descriptor)
        other = seen.setdefault((status.st_dev, status.st_ino), column)
        if other is not column:
            raise ValueError(
                f"columns {format_key(other.spec.key)} and {format_key(column.spec.key)} have one "
                f"file name on this file system: {path}"
            )
        reserve_opened(descriptor, path, column.nbytes)
    finally:
        os.close(descriptor)
    column.path = path


def _file_name(name: str) -> str:
    """Returns a name as tensordict has it in the file system."""
    if name in ("", ".", ".."):
        return "%2E" * len(name) or "%"
    return name.translate(_ESCAPES)


EPISODE_DIRECTORY: Final = "episodes"
GROUP_FILE: Final = "groups.txt"
_TOGETHER: Final = 1 << 12
"""Names that are written at a time."""

EPISODE_FIELDS: Final[Mapping[str, tuple[npt.DTypeLike, str]]] = {
    "start": (np.int64, "first row"),
    "length": (np.int64, "rows"),
    "seed": (np.int64, "position of the source file"),
    "episode": (np.int64, "number in the source file"),
    "source_seed": (np.int64, "seed that the path of the source file names, or -1"),
    "success": (np.int8, "whether the source says that the task was solved: 1, 0, or -1 if not"),
    "terminated": (np.bool_, "the last row is terminated"),
    "truncated": (np.bool_, "the last row is truncated"),
    "return": (np.float64, "sum of the rewards, NaN without rewards"),
    "digest": (np.uint8, "16 bytes of the SHA-256 of observations and actions"),
}
"""Columns of the table: dtype and meaning. ``digest`` is ``[E, 16]``, all others ``[E]``."""


def write_episode_table(
    directory: Path, columns: Mapping[str, npt.NDArray[Any]], groups: Iterable[str]
) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """Writes the table below a data set's directory.

    Args:
        directory: the data set's directory.
        columns: an array ``[E, ...]`` for each of `EPISODE_FIELDS`; those of an older version
            may lack some.
        groups: the group of each episode; they are written as they come.

    Returns:
        What the manifest says of its columns and of its text file.
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
    # A line break between strings, which hold none themselves once they are JSON.
    lines, left = json.JSONEncoder(separators=("\n", ":")), iter(groups)
    with path.open("wb") as names:
        while some := list(islice(left, _TOGETHER)):
            text = f"{lines.encode(some)[1:-1]}\n".encode()
            nbytes, crc32 = nbytes + len(text), zlib.crc32(text, crc32)
            with disk_errors(path, nbytes):
                names.write(text)
                names.flush()
    facts = {
        "file": path.relative_to(directory).as_posix(),
        "nbytes": nbytes,
        "crc32": f"{crc32:08x}",
    }
    return arrays, facts


def read_groups(path: Path) -> list[str]:
    """Returns the group names in the order of the episodes. Cost: O(E)."""
    return [json.loads(line) for line in path.read_text().splitlines()]
