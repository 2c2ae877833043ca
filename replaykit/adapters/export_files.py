"""Drafts of exports: written next to their target, read back, and published in one step."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from replaykit.adapters.exported_episodes import Array, ExportSource
from replaykit.datasets.publishing import replace_path, restore
from replaykit.filesystem import (
    disk_errors,
    make_directory,
    private_path,
    remove_tree,
    siblings,
    sync_tree,
)
from replaykit.interrupts import check, deferred, sealed
from replaykit.recovery.locks import Exclusive

_EXPORT: Final = "export"


class Draft:
    """The hidden file or folder that an export writes.

    Attributes:
        path: its path, which does not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[dict[str, object]] = []

    def wrote(self, values: Mapping[str, Array]) -> None:
        """Note the values of the next episode, by the names that the target gives them."""
        self._written.append({name: _digest(value) for name, value in values.items()})

    def check(self, read: Callable[[int], Mapping[str, Array]]) -> None:
        """Read all episodes of the draft, and compare them with the written values.

        Args:
            read: returns the values of an episode by the same names, as a reader of the target's
                format finds them.

        Raises:
            RuntimeError: a value differs. The message names it and its episode.

        Cost: one pass over the files. Memory: one episode, and one checksum for each value.
        """
        for number, written in enumerate(self._written):
            found = read(number)
            for name, digest in written.items():
                if name not in found or _digest(found[name]) != digest:
                    raise RuntimeError(
                        f"{self.path.name} was not made: {name!r} of episode {number} differs from "
                        "the data after it was written; the disk or the library that wrote it is "
                        "at fault"
                    )


def _digest(values: Array) -> object:
    return values.dtype.str, values.shape, zlib.crc32(np.ascontiguousarray(values).data)


@contextmanager
def export_to(
    source: ExportSource, path: str | os.PathLike[str], marker: str, *, overwrite: bool
) -> Iterator[Draft]:
    """Yield a draft on the target's file system; publish it in one step, durably, at the end.

    The folder of the draft has a lock. So a later export can remove the drafts of exports that were
    killed, and leaves those of other running exports. If the path is a link, the file or folder
    that it points to is replaced.

    Args:
        source: the exported data.
        path: the target, a file or folder.
        marker: a file in the target that shows a former export; empty if the target is a file.
        overwrite: whether to replace a former export.

    Raises:
        FileExistsError: the target exists, and ``overwrite`` is False or it is no export.
        ValueError: the target is a folder of the data, in it, or around it.
        OSError: a file cannot be written. The message names it, or the target.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    for each in source.folders:
        check_apart(target, each)
    try:
        with disk_errors(target, source.nbytes):
            _prepare(target)
            _check_target(target, marker, overwrite)
            with _locked_folder(target) as folder:
                draft = Draft(folder / target.name)
                yield draft
                sync_tree(folder)
                _check_target(target, marker, overwrite)  # another process may have made it
                replace_path(draft.path, target)
    except OSError as error:
        name = error.filename
        if error.errno is not None and (name is None or f".{_EXPORT}-" in os.fsdecode(name)):
            error.filename = str(target)  # not the name of a hidden file
        raise


def _prepare(target: Path) -> None:
    """Make the parent folder, and remove the drafts of killed exports there."""
    make_directory(target.parent)
    running = False
    for other in siblings(target, _EXPORT):
        with suppress(OSError):  # that export has just ended
            try:
                lock = Exclusive(other / "lock")
            except BlockingIOError:
                running = True
            else:
                remove_tree(other)
                lock.drop()
    if not running:
        restore(target)


@contextmanager
def _locked_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden folder with a locked file, which is removed at the end."""
    folder = private_path(target, _EXPORT)
    lock = None
    try:
        while lock is None:
            folder.mkdir()
            try:
                lock = Exclusive(folder / "lock")
            except (FileNotFoundError, BlockingIOError):  # another export is removing the folder
                folder = private_path(target, _EXPORT)
        yield folder
    finally:
        if lock is not None:
            lock.drop()
        remove_tree(folder)


def check_apart(target: Path, folder: Path) -> None:
    """Raise ValueError if a target is a folder of the data, in it, or around it."""
    target, folder = (Path(os.path.realpath(each)) for each in (target, folder))
    if target.is_relative_to(folder) or folder.is_relative_to(target):
        raise ValueError(
            f"expected a target outside of the folder {folder} of the data, and not around it, "
            f"got {target}; choose another path"
        )


def _check_target(target: Path, marker: str, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists; pass overwrite=True to replace it")
    if not (target / marker).is_file():
        raise FileExistsError(f"{target} exists and is not a former export; remove it first")


class _UnfailingFile(io.FileIO):
    """A file that keeps the error of the first failed write, and later writes in memory.

    Reads also see these writes, because HDF5 cannot close a file that lost its metadata.
    """

    error: OSError | None = None

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self._kept: list[tuple[int, bytes]] = []  # writes after the error, with their positions
        self._size = 0  # of the file and these writes

    def write(self, data: Any) -> int:
        content, start = memoryview(data).cast("B"), self.tell()
        rest = content
        try:
            while self.error is None and len(rest):
                rest = rest[super().write(rest) :]
        except OSError as error:
            self._fail(error)
        if self.error is not None:
            self._kept.append((start, bytes(content)))
            self._size = max(self._size, super().seek(start + len(content)))
        return len(content)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        try:
            if self.error is None:
                return super().truncate(size)
        except OSError as error:
            self._fail(error)
        self._size = size
        return size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if self.error is not None and whence == os.SEEK_END:
            return super().seek(self._size + offset)
        return super().seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        view, start = memoryview(buffer).cast("B"), self.tell()
        count = super().readinto(view) or 0
        if self.error is None:
            return count
        view[count:] = bytes(len(view) - count)
        for at, content in self._kept:
            low, high = max(at, start), min(at + len(content), start + len(view))
            if low < high:
                view[low - start : high - start] = content[low - at : high - at]
        return len(view)

    def _fail(self, error: OSError) -> None:
        self.error, self._size = error, os.fstat(self.fileno()).st_size


@contextmanager
def new_h5_file(path: Path) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield a new HDF5 file, and a function that raises errors of its writes, or after Ctrl-C.

    If a write fails, as on a full disk, HDF5 later ends the process with a segmentation fault. So
    it gets a file whose writes never fail. Signals wait for the function, also repeated ones. A
    handler that raises during a write would make it fail, too.
    """
    import h5py

    with deferred, sealed, _UnfailingFile(path, "w+") as output:

        def check_writes() -> None:
            check()
            if output.error is not None:
                raise output.error

        with h5py.File(output, "w", track_order=True) as file:
            yield file, check_writes
        check_writes()
