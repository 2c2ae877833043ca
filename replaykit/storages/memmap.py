"""Store rows in memory-mapped files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import torch

from replaykit.keywords import checked_keywords
from replaykit.recovery.recovery_folder import (
    RECOVERABLE,
    SHARED,
    RecoveryFolder,
    check_file,
    give_up_rows,
    is_shared,
)
from replaykit.schema import Rows, Schema
from replaykit.storages.column_reads import AnyColumns
from replaykit.storages.columns import Columns, Grow
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.ledger import Ledger
from replaykit.storages.memory import as_device, by_value, from_value
from replaykit.storages.next_rows import DedupNext, Mismatch
from replaykit.storages.recoverable import Recovery
from replaykit.storages.recoverable_files import resume
from replaykit.storages.row_files import (
    OVERFLOW,
    RowFiles,
    grow_in_files,
    remove_empty,
)
from replaykit.storages.shared_storage import read_description
from replaykit.storages.tensors import DESCRIBED, LazyTensorStorage
from replaykit.structure import Path
from replaykit.ted import unravel


class LazyMemmapStorage(LazyTensorStorage):
    """Rows in memory-mapped files, which the first write creates.

    The small leaves of all rows share one file of records. Each wide leaf, such as images, has a
    separate file. If a sample must be read from disk, the storage requests all its pages from the
    kernel at once.

    The storage reserves disk blocks for the whole files when it creates them. A disk that is too
    small thus raises an error at the start, not in the middle of a run. Rows that are not in use
    need no memory. The kernel caches as many pages as it has room for.

    Args:
        max_size: capacity in rows; for ``ndim > 1``, rows of all lanes count.
        scratch_dir: folder of the files ``records.memmap`` and ``<key>.memmap``. It is created with
            its parents, and nested keys become folders. The library never removes it. With ``None``
            the storage creates a private folder. This folder is removed when the storage object
            dies or its process exits normally. A forked child, a copy or a signal never removes it.
        device: must be ``"cpu"``.
        ndim: number of leading dimensions that count as rows. Dimension 0 is time, and the others
            are lanes.
        existsok: allow existing files in ``scratch_dir``, and reuse their space. The rows in these
            files are never visible, and can no longer be recovered.
        dedup_next, on_mismatch: as for LazyTensorStorage. The overflow rows are stored in files
            that grow, in the folder ``%beside``.
        lane_key: as for LazyTensorStorage.
        recover: let rows, ledger, episodes and the priorities of the buffer's sampler outlive the
            process. A later storage with the same ``scratch_dir`` and arguments has every committed
            row and no other row. Rows that an interrupted write had overwritten are restored. A
            write is committed when its call returns. The folder ``%recovery`` holds the files for
            recovery. Open episodes end at a restart. Only one process can have the storage open,
            but a forked process may read. In a buffer with ``shared=True`` several processes
            have it open; other processes join with ``ReplayBuffer.join``.
        auto_cleanup: whether to remove the files when this object dies. It must be True without
            ``scratch_dir``, and False with ``scratch_dir``. None selects the value that is allowed.
        durable: with ``recover``, let commits also survive a loss of power. Each commit then waits
            for the disk.

    Raises:
        ValueError: the device is not the CPU, or ``lane_key`` is given with ``ndim > 1``.
        ValueError: ``auto_cleanup`` contradicts ``scratch_dir``.
        ValueError: ``recover`` is set without ``scratch_dir``, or ``durable`` without ``recover``.
        ValueError: with ``recover``, the files were made with another ``max_size``, ``ndim``,
            ``lane_key`` or ``dedup_next``.
        CheckpointError: with ``recover``, a file is damaged, missing or of another size.
        RuntimeError: with ``recover``, another process or another storage has the files open.
        KeyError: at the first write, the data has no column ``lane_key``.
        RuntimeError: at the first write, the files exist and ``existsok`` is false.
        RuntimeError: at the first write, another storage or process recovers or shares rows in the
            files.
        OSError: at the first write, the disk has too little room.

    Example:
        >>> import os, tempfile, torch
        >>> from replaykit import LazyMemmapStorage, ReplayBuffer
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rb = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=folder))
        ...     _ = rb.extend(torch.arange(3))
        ...     os.listdir(folder), rb[:]
        (['data.memmap'], tensor([0, 1, 2]))

        A buffer that continues after its process was killed:

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

    @checked_keywords
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
        auto_cleanup: bool | None = None,
    ) -> None:
        if auto_cleanup is not None and bool(auto_cleanup) != (scratch_dir is None):
            how = (
                "leave scratch_dir out, for files that go with the storage, or auto_cleanup"
                if auto_cleanup
                else "give a scratch_dir, where files stay; files without one always go with the "
                "storage"
            )
            raise ValueError(
                "expected auto_cleanup=True without scratch_dir or auto_cleanup=False with one, "
                f"got auto_cleanup={auto_cleanup!r} and scratch_dir={scratch_dir!r}; {how}"
            )
        if recover and scratch_dir is None:
            raise ValueError("recover=True needs a scratch_dir, in which the rows stay")
        if durable and not recover:
            raise ValueError("durable=True is for rows that are recovered: it needs recover=True")
        if as_device(device).type != "cpu":
            raise ValueError(
                "Memory map device other than CPU isn't supported: expected device cpu for "
                f"memory-mapped files, got {device}; ReplayBuffer(device=) moves samples"
            )
        super().__init__(
            max_size,
            ndim=ndim,
            dedup_next=dedup_next,
            on_mismatch=on_mismatch,
            lane_key=lane_key,
        )
        self._made_in: FilePath | None = None
        # The private folder, and the process that made it.
        self._private: tuple[FilePath, int] | None = None
        self.scratch_dir = None if scratch_dir is None else FilePath(scratch_dir).expanduser()
        self.existsok = existsok
        if recover:
            assert self.scratch_dir is not None
            home = RecoveryFolder(self.scratch_dir, durable=durable)
            self.recovery = Recovery(self, home, existsok=existsok)
            resume(self.recovery)

    def _release_memory(self, columns: AnyColumns) -> None:
        with self._replacing_memory(columns):
            self._made_in = self._private = None

    def _allocate_memory(self, schema: Schema, lanes: torch.Size, rows: Rows | None) -> Columns:
        slots = self._slots_for(lanes)
        with self._folder() as folder:
            taken = sorted((folder / OVERFLOW).rglob("*.memmap")) if self.dedup_next else []
            plan = RowFiles.of(folder, schema, slots, lanes)
            if self.existsok and (taken or any(file.exists() for file in plan.files.values())):
                give_up_rows(folder)
            columns = plan.created(self.ndim, existsok=self.existsok, taken=taken)
        self._made_in = folder
        return columns

    def _memory_for(self, schema: Schema) -> dict[Path, torch.Tensor]:
        columns, folder = self.require(), self._made_in
        if folder is None:  # removed by cleanup()
            return super()._memory_for(schema)
        rows = columns.rows if isinstance(columns, DedupColumns) else columns
        stored = rows.schema.with_added(schema.root)
        plan = RowFiles.of(folder, stored, columns.slots, columns.lanes)
        return plan.added(list(schema.leaves), existsok=self.existsok)

    @property
    def checks_before_load(self) -> bool:
        return False  # files are made only for rows that were verified before

    def _grow(self, device: torch.device) -> Grow:
        assert self._made_in is not None
        return grow_in_files(self._made_in / OVERFLOW)

    @contextlib.contextmanager
    def _replacing_memory(self, columns: AnyColumns) -> Iterator[None]:
        folder, private = self._made_in, self._private
        names = []
        if folder is not None and private is None:
            rows = columns.rows if isinstance(columns, DedupColumns) else columns
            plan = RowFiles.of(folder, rows.schema, rows.slots, rows.lanes)
            names = [file.relative_to(folder) for file in plan.files.values()]
            # Without ``dedup_next``, such a folder belongs to another storage.
            if rows is not columns and (folder / OVERFLOW).exists():
                names.append(FilePath(OVERFLOW))
        with _set_aside(folder, names) if folder and names else contextlib.nullcontext():
            try:
                yield
            except BaseException:
                if self._private is not None and self._private != private:
                    _remove(*self._private)
                self._made_in, self._private = folder, private
                raise
        if private is not None:
            _remove(*private)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[FilePath]:
        if self.scratch_dir is not None:
            made = [self.scratch_dir, *self.scratch_dir.parents]
            made = [folder for folder in made if not folder.exists()]
            self.scratch_dir.mkdir(parents=True, exist_ok=True)
            try:
                yield self.scratch_dir
            except BaseException:
                remove_empty(made)
                raise
            return
        folder = FilePath(tempfile.mkdtemp(prefix="replaykit-"))
        remove = weakref.finalize(self, _remove, folder, os.getpid())
        try:
            yield folder
            self._private = folder, os.getpid()
        except BaseException:
            remove()
            raise

    def close(self) -> None:
        """Commit all changes, and let another storage open the folder of recoverable rows.

        Afterwards this storage only reads. A write of rows raises RuntimeError, and priorities and
        cuts that are set later are not saved. The rows that it reads are those of the folder, so
        they change if another storage writes. The files stay mapped until the storage dies. Without
        ``recover=True``, the call does nothing.

        Prefetch threads, a sampler or a reference cycle may keep a deleted buffer alive. So call
        ``rb.shutdown()`` and ``rb.storage.close()`` before you open the folder again.

        Raises:
            RuntimeError: the storage is shared, and its processes release the folder at their ends.
            OSError: there is no room for a commit. The storage stays open.

        Example:
            >>> import tempfile, torch
            >>> from replaykit import LazyMemmapStorage, ReplayBuffer
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     for number in range(3):
            ...         storage = LazyMemmapStorage(10, scratch_dir=folder, recover=True)
            ...         rb = ReplayBuffer(storage=storage)
            ...         _ = rb.extend(torch.zeros(2))
            ...         rb.storage.close()
            ...     len(rb)
            6
        """
        recovery = self.recovery
        if recovery is None:
            return
        with self.lock:
            if recovery.shared:
                raise RuntimeError(
                    "expected a storage of one process, got one that processes share: they release "
                    "its folder when they end"
                )
            recovery.commit()
            recovery.home.close()

    def cleanup(self) -> bool:
        """Remove the files of a private folder now, before this object dies.

        This process can still read and write the rows. The disk space is freed when the object
        dies.

        Returns:
            True if files were removed. False before the first write, after an earlier call, and in
            a forked process.

        Raises:
            RuntimeError: the files are in a ``scratch_dir``, which the library never removes.
            RuntimeError: ``dedup_next`` or other processes still need the files. No file was
                removed.

        Example:
            >>> import torch
            >>> from replaykit import LazyMemmapStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyMemmapStorage(10))
            >>> _ = rb.extend(torch.arange(3))
            >>> rb.storage.cleanup(), rb.storage.cleanup(), rb[:]
            (True, False, tensor([0, 1, 2]))
        """
        with self.lock:
            if self.scratch_dir is not None:
                raise RuntimeError(
                    f"the files in scratch_dir={str(self.scratch_dir)!r} stay: remove the folder "
                    "with shutil.rmtree() when nothing uses it any more"
                )
            if self.recovery is not None or self.dedup_next:
                reason = "other processes use" if self.recovery is not None else "dedup_next uses"
                raise RuntimeError(
                    f"{reason} the files of this storage until it dies, which removes them; do not "
                    "call cleanup()"
                )
            if self._private is None or self._private[1] != os.getpid():
                return False
            _remove(*self._private)
            self._private = self._made_in = None
            return True

    def column_file(self, key: Any) -> ColumnFile:
        """Return the file of a column, and its position in the file.

        Small columns share the file of the records, and a wide column has a separate file. The file
        has room for all slots. Only the first ``len(storage)`` slots hold rows. Do not read the
        other slots.

        Args:
            key: a stored key; a tuple if it is nested.

        Raises:
            KeyError: there is no column of that name, or it is deduplicated, so that rows refer to
                its values.
            RuntimeError: nothing was written yet, or ``cleanup`` has removed the files.

        Example:
            >>> import numpy as np
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyMemmapStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyMemmapStorage(4))
            >>> rows = {"x": torch.arange(3.0), "y": torch.arange(3)}
            >>> _ = rb.extend(TensorDict(rows, [3]))
            >>> found = rb.storage.column_file("y")
            >>> values = np.ndarray(
            ...     found.shape, np.int64, np.memmap(found.path, mode="r"),
            ...     found.offset, found.strides)
            >>> found.path.name, found.dtype, values[:3].tolist()
            ('records.memmap', torch.int64, [0, 1, 2])
        """
        with self.lock:
            self.leaf(key)
            columns, path = self.require(), unravel(key)
            tensor = columns[path]
            rows = columns.rows if isinstance(columns, DedupColumns) else columns
            folder = self._made_in if self.recovery is None else self.recovery.folder
            if folder is None:
                raise RuntimeError(
                    "expected rows in files, got rows whose files cleanup() has removed"
                )
            plan = RowFiles.of(folder, rows.schema, rows.slots, rows.lanes)
        file, offset = plan.offset_of(path)
        size = tensor.dtype.itemsize
        strides = tuple(step * size for step in tensor.stride())
        return ColumnFile(file, offset, tensor.dtype, tensor.shape, strides)

    def share(self, parts: Mapping[str, bool] | None = None) -> bool:
        if self._invited is not None or self.recovery is None:
            return super().share(parts)
        alone, folder = self.recovery, self.scratch_dir
        assert folder is not None
        if alone.shared or alone.in_use or self._listeners:
            raise ValueError(
                "expected a LazyMemmapStorage with recover=True that no buffer uses yet; make the "
                "buffer over it with shared=True"
            )
        how = {"existsok": self.existsok, "recover": True, "durable": alone.home.durable}
        self._begin_sharing(parts or {}, folder, private=False, mapped=True, **how)
        return False

    def _open_sharing(self, parts: Mapping[str, bool]) -> None:
        folder = self.scratch_dir
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._begin_sharing(
            parts,
            FilePath(tempfile.mkdtemp(prefix="replaykit-")) if folder is None else folder,
            private=folder is None,
            mapped=True,
            existsok=self.existsok,
        )

    def for_readers(self) -> Any:
        if self.recovery is not None and self.recovery.shared:
            return self  # without the lock, which another process may hold
        with self.lock:
            columns = self._columns
            folder = self._made_in if self.recovery is None else self.recovery.folder
            # Without columns, nothing is written yet, or there may be overflow rows.
            if not isinstance(columns, Columns) or folder is None:
                return super().for_readers()
            return _InFiles(
                folder,
                columns.schema,
                columns.slots,
                self.lanes,
                self.max_size,
                self.lane_key,
                by_value(self.ledger.state()),
                self.indexes.state(),
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_shared" not in state:
            # A copy has separate files in a private folder, because the other folder is in use.
            state = {**state, "scratch_dir": None, "_private": None}
        super().__setstate__(state)


_OPEN_SECONDS, _PAUSE = 5.0, 0.01
"""Most seconds, and seconds between two tries, to wait for a process that opens the folder."""


def join_storage(folder: FilePath) -> LazyTensorStorage:
    """Return a storage over rows that other processes share, or have shared with recovery.

    Args:
        folder: the folder of the files.

    Raises:
        FileNotFoundError: no processes have shared rows in the folder.
        RuntimeError: all processes have ended, and the rows are not recovered.
        RuntimeError: one process recovers the rows alone.
        CheckpointError: a file in the folder is damaged.
    """
    found = read_description(folder)
    until = time.monotonic() + _OPEN_SECONDS
    while True:
        shared = is_shared(folder / (RECOVERABLE if found["recover"] else SHARED))
        if not shared and not found["recover"]:
            raise RuntimeError(
                f"the processes that shared {folder} have ended; make the buffer with a "
                "LazyMemmapStorage(recover=True) to keep the rows"
            )
        try:
            return _join(folder, found) if shared else _recover(folder, found)
        except RuntimeError:  # another process opens the folder at the same time
            if time.monotonic() > until:
                raise
        time.sleep(_PAUSE)


def _join(folder: FilePath, found: Mapping[str, Any]) -> LazyTensorStorage:
    if not found["mapped"]:
        return LazyTensorStorage.join_folder(folder, found)
    storage = LazyMemmapStorage.join_folder(folder, found)
    storage.scratch_dir = None if found["private"] else folder
    return storage


def _recover(folder: FilePath, found: Mapping[str, Any]) -> LazyMemmapStorage:
    """Open rows that no process shares now, and share them."""
    storage = LazyMemmapStorage(
        **{name: found[name] for name in DESCRIBED},
        scratch_dir=folder,
        recover=True,
        durable=found["durable"],
        existsok=found["existsok"],
    )
    storage.share(found["parts"])
    storage._invited = found["parts"]
    return storage


class ColumnFile(NamedTuple):
    """The file of a column of a LazyMemmapStorage, and the column's position in it.

    Attributes:
        path: the file.
        offset: position of the first value in the file, in bytes.
        dtype: dtype of the values.
        shape: shape of the column, ``[slots, *lanes, *F]``.
        strides: bytes from one value to the next along each dimension.
    """

    path: FilePath
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _InFiles:
    """The files of a storage and its state, for another process that reads the rows."""

    folder: FilePath
    schema: Schema
    slots: int
    lanes: torch.Size
    max_size: int
    lane_key: Any
    ledger: dict[str, Any]
    episodes: dict[str, Any]

    def opened(self) -> LazyMemmapStorage:
        """Return a storage over the files.

        The result is valid until the storage that made the files changes or removes them.

        Raises:
            CheckpointError: a file is missing, or of another size.
        """
        plan = RowFiles.of(self.folder, self.schema, self.slots, self.lanes)
        for path, file in plan.files.items():
            check_file(file, plan.nbytes(path))
        ndim = len(self.lanes) + 1
        storage = LazyMemmapStorage(self.max_size, ndim=ndim, lane_key=self.lane_key)
        storage._columns = plan.opened(ndim)
        storage.ledger = Ledger(self.slots)
        storage.ledger.restore(from_value(self.ledger), None)
        storage._adopt(storage._columns)
        storage.indexes.restore(self.episodes, storage.ledger, None, restarted=False)
        return storage


def _remove(folder: FilePath, creator: int) -> None:
    if os.getpid() == creator:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _set_aside(folder: FilePath, names: list[FilePath]) -> Iterator[None]:
    """Move files of a folder aside, so that new ones get their names.

    Open mappings stay valid. The files are removed at the end, or moved back after an error.
    """
    aside = FilePath(tempfile.mkdtemp(prefix="%replaced-", dir=folder))
    try:
        for name in names:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, aside / name)
        yield
    except BaseException:
        for name in names:
            if (aside / name).exists():
                if (folder / name).is_dir():
                    shutil.rmtree(folder / name)
                os.replace(aside / name, folder / name)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        remove_empty({folder / inner for name in names for inner in name.parents} - {folder})
