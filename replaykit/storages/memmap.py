"""Records in memory-mapped files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import shutil
import tempfile
import unicodedata
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path as FilePath
from typing import Any

import torch

from replaykit.filesystem import reserve_blocks
from replaykit.schema import Rows, Schema
from replaykit.storages.allocation import (
    as_device,
    column_shapes,
    format_bytes,
    storage_bytes,
)
from replaykit.storages.beside import Grow
from replaykit.storages.columns import Columns
from replaykit.storages.pairs import DedupNext, Mismatch
from replaykit.storages.records import plan_records
from replaykit.storages.tensors import LazyTensorStorage
from replaykit.structure import Path

__all__ = ["LazyMemmapStorage", "map_file"]


_RECORDS: Path = (object(),)
"""In the place of a leaf's path: the records, which no key can name."""

_RECORDS_NAME = "records"

_BESIDE = "%beside"
"""The folder of what lies beside the rows: no key has that name, which would be escaped."""


class LazyMemmapStorage(LazyTensorStorage):
    """Rows in memory-mapped files, made at the first write.

    The small leaves of a row lie side by side in one file, each wide leaf (images) in one of its
    own. A sample that has to come from disk tells the kernel all of its pages at once.

    The blocks of the files are reserved at once, so that a disk that is too small is found then
    and not in the middle of a run. Rows that are not in use cost no memory: the kernel keeps in
    its page cache what it has room for.

    Args:
        max_size: capacity in rows (elements, for ``ndim > 1``).
        scratch_dir: folder of the files, made with its parents: ``records.memmap`` and
            ``<key>.memmap``, nested keys in folders. It is never removed by the library.
            ``None``: a private folder that goes when this object dies or its process exits
            normally, never by a forked child, by a copy or by a signal.
        device: cpu.
        ndim: number of leading dimensions that count as rows: time, then lanes.
        existsok: whether files that lie in ``scratch_dir`` may be taken as space. What they held
            is never visible.
        dedup_next, on_mismatch: as for LazyTensorStorage. Rows kept beside lie in files that grow,
            in the folder ``%beside``.
        lane_key: as for LazyTensorStorage.

    Raises:
        ValueError: another device, or ``lane_key`` with ``ndim > 1``.
        KeyError: at the first write, where the data has no column ``lane_key``.
        RuntimeError: at the first write, where the files exist and ``existsok`` is false.
        OSError: at the first write, where the disk has too little room.

    Example:
        >>> import os, tempfile, torch
        >>> from replaykit import LazyMemmapStorage, ReplayBuffer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder))
        ...     _ = rb.extend(torch.arange(3))
        ...     os.listdir(folder), rb[:]
        (['data.memmap'], tensor([0, 1, 2]))
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        device: Any = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        dedup_next: DedupNext = False,
        on_mismatch: Mismatch = "error",
        compilable: bool = False,
        lane_key: Any = None,
    ) -> None:
        if as_device(device).type != "cpu":
            raise ValueError(f"expected device cpu for memory-mapped files, got {device}")
        super().__init__(
            max_size,
            ndim=ndim,
            dedup_next=dedup_next,
            on_mismatch=on_mismatch,
            lane_key=lane_key,
        )
        self._made_in: FilePath | None = None
        self.scratch_dir = None if scratch_dir is None else FilePath(scratch_dir).expanduser()
        self.existsok = existsok

    def _take_memory(self, schema: Schema, lanes: torch.Size, rows: Rows | None) -> Columns:
        slots = self._slots_for(lanes)
        with self._folder() as folder:
            taken = sorted((folder / _BESIDE).rglob("*.memmap")) if self.dedup_next else []
            columns = _in_files(
                folder, schema, slots, lanes, existsok=self.existsok, taken=taken, ndim=self.ndim
            )
        self._made_in = folder
        return columns

    def _grow(self, device: torch.device) -> Grow:
        assert self._made_in is not None
        return _grow_in_files(self._made_in / _BESIDE)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[FilePath]:
        if self.scratch_dir is not None:
            made = [self.scratch_dir, *self.scratch_dir.parents]
            made = [folder for folder in made if not folder.exists()]
            self.scratch_dir.mkdir(parents=True, exist_ok=True)
            try:
                yield self.scratch_dir
            except BaseException:
                _remove_empty(made)
                raise
            return
        folder = FilePath(tempfile.mkdtemp(prefix="replaykit-"))
        remove = weakref.finalize(self, _remove, folder, os.getpid())
        try:
            yield folder
        except BaseException:
            remove()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has files of its own: in a private folder, since the other one is taken.
        super().__setstate__({**state, "scratch_dir": None})


def _in_files(
    folder: FilePath,
    schema: Schema,
    slots: int,
    lanes: torch.Size,
    *,
    existsok: bool,
    taken: list[FilePath],
    ndim: int,
) -> Columns:
    """Returns columns over files in a folder: all of them are made, or none is.

    Files that are there are used again with ``existsok``, with what they hold, and else refused, as
    are the ``taken`` ones.
    """
    layout = plan_records(schema)
    shapes = column_shapes(schema, slots, lanes, layout)
    dtypes = {path: schema.leaves[path].dtype for path in shapes}
    names = _file_names(list(shapes))
    if layout is not None:
        shapes[_RECORDS] = torch.Size([slots, *lanes, layout.stride])
        dtypes[_RECORDS] = torch.uint8
        names[_RECORDS] = FilePath(f"{_RECORDS_NAME}.memmap")
    needed = storage_bytes(schema, slots, lanes, layout)
    files = {path: folder / name for path, name in names.items()}
    present = {file for file in files.values() if file.exists()}
    if (present or taken) and not existsok:
        raise RuntimeError(
            f"the file {min([*present, *taken])} exists; give another scratch_dir, or "
            "existsok=True to use its space and lose what it holds"
        )
    _check_disk(folder, needed, present)
    tensors = {}
    inner = {file.parent for file in files.values() if not file.parent.exists()}
    inner |= {p for q in inner for p in q.parents if folder in p.parents and not p.exists()}
    try:
        for path, file in files.items():
            tensors[path] = map_file(file, shapes[path], dtypes[path], create=True)
    except BaseException:
        for file in files.values():
            if file not in present:
                file.unlink(missing_ok=True)
        _remove_empty(inner)
        raise
    records = tensors.pop(_RECORDS, None)
    return Columns(schema, tensors, ndim, layout=layout, records=records, mapped=True)


def _grow_in_files(folder: FilePath) -> Grow:
    """Returns what extends the files of a table in a folder and maps them anew: no value moves."""

    def grow(schema: Schema, entries: int, table: Columns | None) -> Columns:
        folder.mkdir(exist_ok=True)
        return _in_files(folder, schema, entries, torch.Size(), existsok=True, taken=[], ndim=1)

    return grow


@torch.inference_mode(False)  # what is made in that mode could not be changed outside
def map_file(
    file: FilePath,
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    create: bool = False,
    private: bool = False,
) -> torch.Tensor:
    """Returns a tensor over a memory-mapped file of raw values.

    Args:
        file: the file; with ``create`` it is made, or cut and extended to size, and its blocks
            are reserved.
        private: changes stay in this process (copy-on-write) and never reach the file.

    Raises:
        OSError: the disk has too little room, or the file cannot be opened; names the file.
        ValueError: the file is shorter than the shape needs.

    Cost: no value is read. The mapping lives as long as the tensor.
    """
    nbytes = shape.numel() * dtype.itemsize
    if create:
        _reserve(file, nbytes)
    elif file.stat().st_size < nbytes:
        raise ValueError(f"expected {nbytes} bytes in {file}, got {file.stat().st_size}")
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_WRITE
    with open(file, "rb" if private else "r+b") as opened:
        mapping = mmap.mmap(opened.fileno(), nbytes, access=access)
    return torch.frombuffer(mapping, dtype=torch.uint8).view(dtype).view(shape)


def _reserve(file: FilePath, nbytes: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a+b") as opened:
        try:
            opened.truncate(nbytes)
            reserve_blocks(opened.fileno(), nbytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot reserve {format_bytes(nbytes)} ({error.strerror}); "
                "use a smaller max_size or a scratch_dir on a larger disk",
                str(file),
            ) from None


def _check_disk(folder: FilePath, needed: int, present: set[FilePath]) -> None:
    # The blocks of files that are there already are used again.
    taken = sum(file.stat().st_blocks * 512 for file in present)
    free = shutil.disk_usage(folder).free + taken
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the rows need {format_bytes(needed)}, {format_bytes(free)} are free; "
            "use a smaller max_size or a scratch_dir on a larger disk",
            str(folder),
        )


def _file_names(paths: list[Path]) -> dict[Path, FilePath]:
    names: dict[Path, FilePath] = {}
    taken = {_RECORDS_NAME}
    for path in paths:
        parts = [_escaped(str(part)) for part in path or ("data",)]
        # Two keys that differ only in case or in Unicode form are one name on some file systems.
        if _folded(parts) in taken:
            parts[-1] = f"{parts[-1]}%{hashlib.sha256(repr(path).encode()).hexdigest()[:32]}"
        taken.add(_folded(parts))
        names[path] = FilePath(*parts[:-1], parts[-1] + ".memmap")
    return names


def _folded(parts: list[str]) -> str:
    return unicodedata.normalize("NFC", "/".join(parts)).casefold()


def _escaped(part: str) -> str:
    """A key as the name of a file or folder: percent-encoded where needed, shortened by a hash.

    Folders cannot collide with files, since ``.memmap`` at the end of a key is encoded as well.
    """
    safe = "".join(
        c
        if c.isalnum() or c in "-_=+,@() :" or (c == "." and i)
        else "".join(f"%{byte:02X}" for byte in c.encode())
        for i, c in enumerate(part)
    )
    if safe.endswith(".memmap"):
        safe = safe[: -len(".memmap")] + "%2Ememmap"
    if len(safe.encode()) > 200:
        # Names are limited in bytes, not in characters.
        start = safe.encode()[:100].decode(errors="ignore")
        safe = f"{start}%{hashlib.sha256(part.encode()).hexdigest()[:32]}"
    return safe or "%"


def _remove_empty(folders: Iterable[FilePath]) -> None:
    """Removes those of the folders that hold nothing, the inner ones first."""
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _remove(folder: FilePath, creator: int) -> None:
    if os.getpid() == creator:
        shutil.rmtree(folder, ignore_errors=True)
