"""The files in which the rows of a storage lie, one a leaf or one for all small ones."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import shutil
import unicodedata
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import NamedTuple

import torch

from replaykit.filesystem import reserve_blocks
from replaykit.mapping import map_common
from replaykit.native import join_pages
from replaykit.recovery import who_uses
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.memory import column_shapes, format_bytes, storage_bytes
from replaykit.storages.overflow_table import Grow
from replaykit.storages.records import RecordLayout, plan_records
from replaykit.storages.tensor_bytes import carried
from replaykit.structure import Path

__all__ = [
    "RowFiles",
    "added_in_files",
    "columns_in_files",
    "grow_in_files",
    "map_file",
    "refuse_taken",
    "remove_empty",
]

_RECORDS: Path = (object(),)
"""In the place of a leaf's path: the records, which no key can name."""

_RECORDS_NAME = "records"


def columns_in_files(
    folder: FilePath,
    schema: Schema,
    slots: int,
    lanes: torch.Size,
    *,
    existsok: bool,
    taken: list[FilePath],
    ndim: int,
    mapped: bool = True,
) -> Columns:
    """Returns columns over files in a folder: all of them are made, or none is.

    Files that are there are used again with ``existsok``, with what they hold, and else refused, as
    are the ``taken`` ones.
    """
    plan = RowFiles.of(folder, schema, slots, lanes)
    files = plan.files
    needed = storage_bytes(schema, slots, lanes, plan.layout)
    present = {file for file in files.values() if file.exists()}
    refuse_taken(folder, {*present, *taken}, existsok=existsok)
    _check_disk(folder, needed, present)
    inner = {file.parent for file in files.values() if not file.parent.exists()}
    inner |= {p for q in inner for p in q.parents if folder in p.parents and not p.exists()}
    try:
        return plan.opened(ndim, create=True, mapped=mapped)
    except BaseException:
        for file in files.values():
            if file not in present:
                file.unlink(missing_ok=True)
        remove_empty(inner)
        raise


def added_in_files(
    folder: FilePath,
    schema: Schema,
    paths: list[Path],
    slots: int,
    lanes: torch.Size,
    *,
    existsok: bool,
) -> dict[Path, torch.Tensor]:
    """Returns zeros over files of their own for columns that are added: all of them, or none.

    Args:
        schema: of all leaves that lie in the folder, the added ones among them.
        paths: those for which there are no files yet.
        existsok: whether files of these names may be taken.
    """
    plan = RowFiles.of(folder, schema, slots, lanes)
    files = {path: plan.files[path] for path in paths}
    present = {file for file in files.values() if file.exists()}
    refuse_taken(folder, present, existsok=existsok)
    _check_disk(folder, sum(plan.nbytes(path) for path in paths), present)
    inner = {file.parent for file in files.values() if not file.parent.exists()}
    try:
        tensors = {
            path: map_file(file, plan.shapes[path], plan.dtypes[path], create=True)
            for path, file in files.items()
        }
        for path in paths:
            if files[path] in present:
                carried(tensors[path]).zero_()
    except BaseException:
        for file in files.values():
            if file not in present:
                file.unlink(missing_ok=True)
        remove_empty(inner)
        raise
    return tensors


def refuse_taken(
    folder: FilePath, files: set[FilePath], *, existsok: bool, own: FilePath | None = None
) -> None:
    """Raises RuntimeError where files are there that may not be taken.

    Args:
        own: the folder of bookkeeping that is the caller's.
    """
    if files and not existsok:
        if (user := who_uses(folder, own)) is not None:
            raise RuntimeError(f"{folder} is in use by {user}; give another scratch_dir")
        raise RuntimeError(
            f"the file {min(files)} exists; give another scratch_dir, or existsok=True to use its "
            "space and lose what it holds"
        )


class RowFiles(NamedTuple):
    """Which files hold the rows of a schema, by path; the records under ``_RECORDS``."""

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
        # Columns that were added have taken no name that was there.
        names = _file_names(sorted(shapes, key=lambda path: schema.leaves[path].added))
        if layout is not None:
            shapes[_RECORDS] = torch.Size([slots, *lanes, layout.stride])
            dtypes[_RECORDS] = torch.uint8
            names[_RECORDS] = FilePath(f"{_RECORDS_NAME}.memmap")
        files = {path: folder / name for path, name in names.items()}
        return cls(schema, layout, files, shapes, dtypes)

    def place_of(self, path: Path) -> tuple[FilePath, int]:
        """Returns the file of a leaf, and the byte of its first value there."""
        if path in self.files:
            return self.files[path], 0
        assert self.layout is not None
        return self.files[_RECORDS], self.layout.offsets[path]

    def nbytes(self, path: Path) -> int:
        return self.shapes[path].numel() * self.dtypes[path].itemsize

    def opened(self, ndim: int, *, create: bool = False, mapped: bool = True) -> Columns:
        """Columns over the files, which are made, or are there; ``mapped``: they are on a disk."""
        tensors = {
            path: map_file(
                file, self.shapes[path], self.dtypes[path], create=create, in_memory=not mapped
            )
            for path, file in self.files.items()
        }
        records = tensors.pop(_RECORDS, None)
        return Columns(
            self.schema, tensors, ndim, layout=self.layout, records=records, mapped=mapped
        )


def grow_in_files(folder: FilePath) -> Grow:
    """Returns what extends the files of a table in a folder and maps them anew: no value moves."""

    def grow(schema: Schema, entries: int, table: Columns | None) -> Columns:
        folder.mkdir(exist_ok=True)
        return columns_in_files(
            folder, schema, entries, torch.Size(), existsok=True, taken=[], ndim=1
        )

    return grow


@torch.inference_mode(False)  # what is made in that mode could not be changed outside
def map_file(
    file: FilePath,
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    create: bool = False,
    private: bool = False,
    in_memory: bool = False,
) -> torch.Tensor:
    """Returns a tensor over a memory-mapped file of raw values.

    Args:
        file: the file; with ``create`` it is made, or cut and extended to size, and its blocks
            are reserved.
        private: changes stay in this process (copy-on-write) and never reach the file.
        in_memory: the file lies in memory; then, with ``create``, in large pages where it can.

    Raises:
        OSError: the disk has too little room, or the file cannot be opened; names the file.
        ValueError: the file is shorter than the shape needs.

    Cost: no value is read; with ``create`` and ``in_memory`` the file is copied once. The mapping
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


def remove_empty(folders: Iterable[FilePath]) -> None:
    """Removes those of the folders that hold nothing, the inner ones first."""
    for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
