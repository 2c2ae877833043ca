"""Store rows in one file for all small leaves, and one file for each wide leaf."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import shutil
import unicodedata
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit.filesystem import map_common, reserve_blocks
from replaykit.native import join_pages
from replaykit.recovery.recovery_folder import who_uses
from replaykit.schema import Schema
from replaykit.storages.columns import Columns, Grow
from replaykit.storages.memory import carried, column_shapes, format_bytes
from replaykit.storages.records import RecordLayout, plan_records
from replaykit.structure import Path

Array = np.ndarray[Any, Any]

_RECORDS: Path = (object(),)
"""The path of the records among the paths of leaves. No key can equal it."""

_RECORDS_NAME = "records"

OVERFLOW = "%beside"
"""Folder of the overflow entries of ``dedup_next``. Folders of earlier releases have this name.

No file of a key has this name, because ``%`` in keys is escaped.
"""


def refuse_taken(
    folder: FilePath, files: set[FilePath], *, existsok: bool, own: FilePath | None = None
) -> None:
    """Raise RuntimeError if there are files that the caller may not overwrite.

    Args:
        files: existing files.
        own: the folder with the caller's own files for recovery.
    """
    if files and not existsok:
        if (user := who_uses(folder, own)) is not None:
            raise RuntimeError(f"{folder} is in use by {user}; give another scratch_dir")
        raise RuntimeError(
            f"the file {min(files)} exists; give another scratch_dir, or existsok=True to use its "
            "space and lose its content"
        )


class RowFiles(NamedTuple):
    """The files of the rows of a schema, by path; ``_RECORDS`` is the records' key."""

    folder: FilePath
    schema: Schema
    layout: RecordLayout | None
    files: dict[Path, FilePath]
    shapes: dict[Path, torch.Size]
    dtypes: dict[Path, torch.dtype]

    @classmethod
    def of(cls, folder: FilePath, schema: Schema, slots: int, lanes: torch.Size) -> RowFiles:
        layout = plan_records(schema)
        shapes = column_shapes(schema, slots, lanes, layout)
        dtypes = {path: schema.leaves[path].dtype for path in shapes}
        # Added columns come last, so that the file names of the first columns do not change.
        names = _file_names(sorted(shapes, key=lambda path: schema.leaves[path].added))
        if layout is not None:
            shapes[_RECORDS] = torch.Size([slots, *lanes, layout.stride])
            dtypes[_RECORDS] = torch.uint8
            names[_RECORDS] = FilePath(f"{_RECORDS_NAME}.memmap")
        files = {path: folder / name for path, name in names.items()}
        return cls(folder, schema, layout, files, shapes, dtypes)

    def offset_of(self, path: Path) -> tuple[FilePath, int]:
        """Return the file of a leaf, and the offset of its first value in bytes."""
        if path in self.files:
            return self.files[path], 0
        assert self.layout is not None
        return self.files[_RECORDS], self.layout.offsets[path]

    def nbytes(self, path: Path) -> int:
        return self.shapes[path].numel() * self.dtypes[path].itemsize

    def created(
        self, ndim: int, *, existsok: bool, taken: Iterable[FilePath] = (), mapped: bool = True
    ) -> Columns:
        """Create the files, and return columns over them; see ``make``."""
        tensors = self.make(self.files, existsok=existsok, taken=taken, mapped=mapped)
        return self.columns(tensors, ndim, mapped=mapped)

    def added(self, paths: list[Path], *, existsok: bool) -> dict[Path, torch.Tensor]:
        """Return zeros over new files of some paths; see ``make``."""
        present = [path for path in paths if self.files[path].exists()]
        tensors = self.make(paths, existsok=existsok)
        for path in present:
            carried(tensors[path]).zero_()
        return tensors

    def make(
        self,
        paths: Iterable[Path],
        *,
        existsok: bool,
        taken: Iterable[FilePath] = (),
        mapped: bool = True,
    ) -> dict[Path, torch.Tensor]:
        """Make the files of some paths, and map them; if it fails, remove the new files.

        With ``existsok``, existing files are reused with their content. Otherwise existing files,
        or files in ``taken``, raise RuntimeError. ``mapped`` is True if the files are on a disk,
        and False if they are in memory.
        """
        folder = self.folder
        files = {path: self.files[path] for path in paths}
        present = {file for file in files.values() if file.exists()}
        refuse_taken(folder, {*present, *taken}, existsok=existsok)
        _check_disk(folder, sum(map(self.nbytes, files)), present)
        inner = {file.parent for file in files.values() if not file.parent.exists()}
        inner |= {p for q in inner for p in q.parents if folder in p.parents and not p.exists()}
        try:
            return {
                path: map_file(
                    file, self.shapes[path], self.dtypes[path], create=True, in_memory=not mapped
                )
                for path, file in files.items()
            }
        except BaseException:
            for file in files.values():
                if file not in present:
                    file.unlink(missing_ok=True)
            remove_empty(inner)
            raise

    def opened(self, ndim: int, *, mapped: bool = True) -> Columns:
        """Return columns over the files.

        ``mapped`` is True if the files are on a disk, and False if they are in memory.
        """
        tensors = {
            path: map_file(file, self.shapes[path], self.dtypes[path], in_memory=not mapped)
            for path, file in self.files.items()
        }
        return self.columns(tensors, ndim, mapped=mapped)

    def columns(self, tensors: dict[Path, torch.Tensor], ndim: int, *, mapped: bool) -> Columns:
        """Return columns over tensors by the paths of the files."""
        records = tensors.pop(_RECORDS, None)
        return Columns(
            self.schema, tensors, ndim, layout=self.layout, records=records, mapped=mapped
        )


def grow_in_files(folder: FilePath, *, mapped: bool = True) -> Grow:
    """Return a function that extends the files of a table and maps them again.

    No value is copied. ``mapped`` is False if the files are in memory.
    """

    def grow(schema: Schema, entries: int, table: Columns | None) -> Columns:
        folder.mkdir(exist_ok=True)
        plan = RowFiles.of(folder, schema, entries, torch.Size())
        return plan.created(1, existsok=True, mapped=mapped)

    return grow


@torch.inference_mode(False)  # tensors made in that mode cannot be changed outside of it
def map_file(
    file: FilePath,
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    create: bool = False,
    private: bool = False,
    in_memory: bool = False,
) -> torch.Tensor:
    """Return a tensor over a memory-mapped file of raw values.

    Args:
        file: the file.
        create: True to make the file, or resize an existing one, and reserve its blocks. False to
            map an existing file as it is.
        private: whether to map copy-on-write, so that changes stay in this process.
        in_memory: True if the file is in memory. With ``create``, such a file uses large pages if
            the system has them.

    Raises:
        OSError: the disk has too little room, or the file cannot be opened; the error names it.
        ValueError: the file is shorter than the shape needs.

    Cost: no value is read. With ``create`` and ``in_memory`` the file is copied once. The mapping
    lives as long as the tensor.
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
        if in_memory and not private:
            mapping = map_common(opened.fileno(), nbytes)
        else:
            mapping = mmap.mmap(opened.fileno(), nbytes, access=access)
    found = torch.frombuffer(mapping, dtype=torch.uint8)
    if in_memory and create:
        join_pages(found.data_ptr(), nbytes)
    return found.view(dtype).view(shape)


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
    # The blocks of existing files are reused.
    taken = sum(file.stat().st_blocks * 512 for file in present)
    free = shutil.disk_usage(folder).free + taken
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the rows need {format_bytes(needed)}, {format_bytes(free)} are free; "
            "use a smaller max_size or a scratch_dir on a larger disk",
            str(folder),
        )


def rows_as_bytes(columns: Columns) -> dict[Path | None, Array]:
    """Return views of the memory of columns, uint8 ``[slots, bytes]`` each.

    The keys are the paths of leaves in separate columns, and None for the records.
    """
    packed = {} if columns.layout is None else columns.layout.offsets
    alone: dict[Path | None, torch.Tensor] = {}
    if columns.records is not None:
        alone[None] = columns.records
    alone |= {path: tensor for path, tensor in columns.tensors.items() if path not in packed}
    return {
        path: tensor.reshape(-1).view(torch.uint8).reshape(columns.slots, -1).numpy()
        for path, tensor in alone.items()
        if tensor.numel()
    }


def _file_names(paths: list[Path]) -> dict[Path, FilePath]:
    names: dict[Path, FilePath] = {}
    taken = {_RECORDS_NAME}
    for path in paths:
        parts = [_escaped(str(part)) for part in path or ("data",)]
        # On some file systems, names that differ only in case or Unicode form are the same.
        if _folded(parts) in taken:
            parts[-1] = f"{parts[-1]}%{hashlib.sha256(repr(path).encode()).hexdigest()[:32]}"
        taken.add(_folded(parts))
        names[path] = FilePath(*parts[:-1], parts[-1] + ".memmap")
    return names


def _folded(parts: list[str]) -> str:
    return unicodedata.normalize("NFC", "/".join(parts)).casefold()


def _escaped(part: str) -> str:
    """Return a key as the name of a file or folder, percent-encoded if needed.

    A hash shortens long names. Folders cannot collide with files, because ``.memmap`` at the end of
    a key is also encoded.
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
        # File systems limit names in bytes, not in characters.
        start = safe.encode()[:100].decode(errors="ignore")
        safe = f"{start}%{hashlib.sha256(part.encode()).hexdigest()[:32]}"
    return safe or "%"


def remove_empty(folders: Iterable[FilePath]) -> None:
    """Remove those of the folders that are empty, inner folders first."""
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
