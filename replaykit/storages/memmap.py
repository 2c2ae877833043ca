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
from typing import Any, NamedTuple

import torch

from replaykit.errors import CheckpointError
from replaykit.filesystem import reserve_blocks
from replaykit.recovery import CommitLock, check_file
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
from replaykit.storages.records import RecordLayout, plan_records
from replaykit.storages.recoverable import Recovery
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
        recover: rows, ledger, episodes and the priorities of the buffer's sampler outlive the
            process. A storage made with the same ``scratch_dir`` and arguments holds every record
            that was committed and no other: what a write that was cut off had overwritten is put
            back. A write is committed when the call that made it returns. Bookkeeping lies in the
            folder ``%recovery``; the episodes that were open end there, since nothing spans a
            restart. One process at a time has it open; a forked one may read.
        durable: with ``recover``: commits hold across a loss of power too, and wait for the disk.

    Raises:
        ValueError: another device, or ``lane_key`` with ``ndim > 1``; ``recover`` without a
            ``scratch_dir`` or with ``dedup_next``, ``durable`` without ``recover``; with
            ``recover`` what is there was made with another ``max_size``, ``ndim`` or ``lane_key``.
        CheckpointError: with ``recover`` a file is damaged, missing or of another size.
        RuntimeError: with ``recover`` another process, or another storage, has it open.
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

        A buffer that goes on where a process that was killed had come to:

        >>> def opened():
        ...     storage = LazyMemmapStorage(10, scratch_dir=folder, recover=True)
        ...     return ReplayBuffer(storage=storage)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rb = opened()
        ...     _ = rb.extend(torch.arange(3))
        ...     del rb
        ...     again = opened()
        ...     again[:], again.extend(torch.arange(3, 5)), again.write_count
        (tensor([0, 1, 2]), tensor([3, 4]), 5)
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
        recover: bool = False,
        durable: bool = False,
    ) -> None:
        if recover and scratch_dir is None:
            raise ValueError("recover=True needs a scratch_dir, where the rows are found again")
        if recover and dedup_next:
            raise ValueError(f"expected recover=True without dedup_next, got {dedup_next!r}")
        if durable and not recover:
            raise ValueError("durable=True is for rows that are recovered: it needs recover=True")
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
        if recover:
            assert self.scratch_dir is not None
            self.recovery = Recovery(self, self.scratch_dir, durable=durable)
            self._resume(self.scratch_dir)

    def _new_lock(self) -> Any:
        recovery = self.recovery
        return super()._new_lock() if recovery is None else CommitLock(recovery.settle)

    def _resume(self, folder: FilePath) -> None:
        """Takes over what is in a folder, if a storage of the same arguments left it there."""
        found = self.recovery.known()
        if found is None:
            return
        try:
            schema = Schema.from_json(found.get("schema"))
        except ValueError as error:
            raise CheckpointError(f"the schema of {folder} cannot be read: {error}") from None
        lanes = torch.Size(found["lanes"])
        plan = _Plan.of(folder, schema, self._slots_for(lanes), lanes)
        for path, file in plan.files.items():
            check_file(file, plan.nbytes(path))
        columns = plan.opened(self.ndim)
        with self.lock:
            self._columns, self._made_in = columns, folder
            self._adopt(columns)
            self.recovery.resume(columns, list(plan.files.values()))

    def _take_memory(self, schema: Schema, lanes: torch.Size, rows: Rows | None) -> Columns:
        slots = self._slots_for(lanes)
        if self.recovery is not None:
            return self._take_files_to_keep(schema, slots, lanes)
        with self._folder() as folder:
            taken = sorted((folder / _BESIDE).rglob("*.memmap")) if self.dedup_next else []
            columns = _in_files(
                folder, schema, slots, lanes, existsok=self.existsok, taken=taken, ndim=self.ndim
            )
        self._made_in = folder
        return columns

    def _take_files_to_keep(self, schema: Schema, slots: int, lanes: torch.Size) -> Columns:
        home = self.recovery.home
        home.check_process()
        with self._folder() as folder:
            plan = _Plan.of(folder, schema, slots, lanes)
            present = {file for file in plan.files.values() if file.exists()}
            if not home.half_made:  # from now on they are taken for its own
                _refuse_taken(present, existsok=self.existsok)
            with home.making():
                columns = _in_files(
                    folder, schema, slots, lanes, existsok=True, taken=[], ndim=self.ndim
                )
                self._made_in = folder
                self.recovery.begin(columns, list(plan.files.values()))
        return columns

    @property
    def takes_over_whole(self) -> bool:
        return False  # its files are made for rows that are known to be whole

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
    plan = _Plan.of(folder, schema, slots, lanes)
    files = plan.files
    needed = storage_bytes(schema, slots, lanes, plan.layout)
    present = {file for file in files.values() if file.exists()}
    _refuse_taken({*present, *taken}, existsok=existsok)
    _check_disk(folder, needed, present)
    inner = {file.parent for file in files.values() if not file.parent.exists()}
    inner |= {p for q in inner for p in q.parents if folder in p.parents and not p.exists()}
    try:
        return plan.opened(ndim, create=True)
    except BaseException:
        for file in files.values():
            if file not in present:
                file.unlink(missing_ok=True)
        _remove_empty(inner)
        raise


def _refuse_taken(files: set[FilePath], *, existsok: bool) -> None:
    if files and not existsok:
        raise RuntimeError(
            f"the file {min(files)} exists; give another scratch_dir, or existsok=True to use its "
            "space and lose what it holds"
        )


class _Plan(NamedTuple):
    """Which files hold the rows of a schema, by path; the records under ``_RECORDS``."""

    schema: Schema
    layout: RecordLayout | None
    files: dict[Path, FilePath]
    shapes: dict[Path, torch.Size]
    dtypes: dict[Path, torch.dtype]

    @classmethod
    def of(cls, folder: FilePath, schema: Schema, slots: int, lanes: torch.Size) -> _Plan:
        layout = plan_records(schema)
        shapes = column_shapes(schema, slots, lanes, layout)
        dtypes = {path: schema.leaves[path].dtype for path in shapes}
        names = _file_names(list(shapes))
        if layout is not None:
            shapes[_RECORDS] = torch.Size([slots, *lanes, layout.stride])
            dtypes[_RECORDS] = torch.uint8
            names[_RECORDS] = FilePath(f"{_RECORDS_NAME}.memmap")
        files = {path: folder / name for path, name in names.items()}
        return cls(schema, layout, files, shapes, dtypes)

    def nbytes(self, path: Path) -> int:
        return self.shapes[path].numel() * self.dtypes[path].itemsize

    def opened(self, ndim: int, *, create: bool = False) -> Columns:
        """Columns over the files, which are made, or are there."""
        tensors = {
            path: map_file(file, self.shapes[path], self.dtypes[path], create=create)
            for path, file in self.files.items()
        }
        records = tensors.pop(_RECORDS, None)
        return Columns(self.schema, tensors, ndim, layout=self.layout, records=records, mapped=True)


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
