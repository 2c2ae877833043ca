"""Publish a directory atomically, and open and verify published ones."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
import torch
from tensordict import TensorDict

from replaykit.datasets.column_files import GROUP_FILE, read_groups
from replaykit.datasets.dataset_manifest import MANIFEST_NAME, Array, Manifest, crc32_of_file
from replaykit.datasets.transfers import target_lock, target_lock_if_free
from replaykit.filesystem import (
    disk_errors,
    exchange,
    file_limit_errors,
    private_path,
    remove_tree,
    siblings,
    sync_directory,
    sync_tree,
)
from replaykit.mapping import map_private
from replaykit.ted import Key

__all__ = [
    "FORCE",
    "HELD_BACK",
    "META",
    "UNFINISHED_NAME",
    "Published",
    "check_own",
    "ensure_published",
    "hold_back",
    "open_directory",
    "open_published",
    "publish",
    "recover",
    "remove_published",
    "verify_directory",
    "verify_published",
]

META: Final = "meta.json"
HELD_BACK: Final = "meta.json.incomplete"
UNFINISHED_NAME: Final = "unfinished"
"""A file by which a directory that was not published says that its making can go on."""

_NAMES: Final = frozenset({META, HELD_BACK, UNFINISHED_NAME, MANIFEST_NAME, GROUP_FILE})
_COLUMN: Final = ".memmap"


def check_own(path: Path) -> None:
    """Looks whether all that lies at a path could be a data set's, whole or damaged.

    Args:
        path: a directory, or where nothing is.

    Raises:
        RuntimeError: there are files of somebody else; names one.

    Cost: lists the directory, and those in it.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.datasets.publishing import check_own
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     check_own(Path(folder))
        ...     _ = Path(folder, "notes.txt").write_text("mine")
        ...     try:
        ...         check_own(Path(folder))
        ...     except RuntimeError as error:
        ...         print(str(error).partition(" holds ")[2].partition(":")[0])
        notes.txt, which is no part of a data set
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise RuntimeError(
            f"{path} is no directory, and only data sets are replaced or removed; move it away, "
            "or choose another place"
        )
    for folder, folders, files in os.walk(path, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        others = [name for name in files if not (name in _NAMES or name.endswith(_COLUMN))]
        for name in (*links, *others):
            found = os.path.relpath(os.path.join(folder, name), path)
            raise RuntimeError(
                f"{path} holds {found}, which is no part of a data set: only data sets are "
                "replaced or removed; move it away, or choose another place"
            )


def _raise(error: OSError) -> None:
    raise error


FORCE: Final = 'download="force" (force=True of convert, --force of the command)'
_REMEDY: Final = f"remove it, or replace it with {FORCE}"
_RETRIES: Final = 10


@dataclass(frozen=True, eq=False)
class Published:
    """An opened data set.

    Attributes:
        path: its directory.
        manifest: what it says of itself.
        columns: key to tensor ``[*batch, ...]``; private to the process, edits never reach the
            disk.
        episodes: the episode table, a TensorDict ``[E]``, see `EPISODE_FIELDS`.
        finals: what episodes end with, ``[E, ...]``, of columns under ``next`` that are not
            stored: their other rows are those of the following row, see `following`.
    """

    path: Path
    manifest: Manifest
    columns: dict[Key, torch.Tensor]
    episodes: TensorDict
    finals: dict[Key, torch.Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many entries the first batch dimension has."""
        return self.manifest.rows

    @property
    def batch_size(self) -> torch.Size:
        """``[N]``, or ``[E, T]`` for split trajectories."""
        return torch.Size(self.manifest.batch)

    def tensordict(self) -> TensorDict:
        """Returns the columns as one TensorDict; nested ones have the batch size of the root.

        No value is copied: the tensors are those of `columns`. Those that are not stored are put
        together, which takes memory for them.
        """
        data = TensorDict({}, batch_size=self.batch_size)
        for key, value in self.columns.items():
            data.set(key, value)
        for key in self.finals:
            data.set(key, self.following(key, 0, self.rows))
        return data

    def following(self, key: Key, start: int, stop: int) -> torch.Tensor:
        """Returns rows ``start .. stop - 1`` of a column that is not stored, in fresh memory."""
        # In NumPy: torch cannot index all dtypes, such as uint16.
        root, finals = self.columns[key[1:]].numpy(), self.finals[key].numpy()
        found = np.empty((stop - start, *root.shape[1:]), root.dtype)
        inside = root[start + 1 : stop + 1]
        found[: len(inside)] = inside
        lasts = (self.episodes["start"] + self.episodes["length"] - 1).numpy()
        first, end = np.searchsorted(lasts, (start, stop))
        found[lasts[first:end] - start] = finals[first:end]
        return torch.from_numpy(found)

    def groups(self) -> list[str]:
        """Returns the name of the source group of each episode. Cost: O(E), on each call."""
        return read_groups(self.path / self.manifest.group_file["file"])


def open_directory(path: Path) -> Published:
    """Opens a published data set.

    Checks that the manifest is there, of a known version and sound, and that every file has its
    exact size. What is a link, or reached through one inside of the data set, is refused: it could
    be any file of this machine. Cost: a few system calls for each column, whatever the number of
    rows.

    Raises:
        FileNotFoundError: there is nothing at the path.
        RuntimeError: what is there is not a complete data set; names it and says what to do.
    """
    for _ in range(_RETRIES):
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except NotADirectoryError:
            raise _refusal(path, "it is not a directory") from None
        try:
            # All files are opened relative to this descriptor: a new version that is swapped in
            # meanwhile cannot lend its columns to the old manifest.
            return _open_at(directory, path)
        except _GoneError as error:
            if os.fstat(directory).st_ino == _inode(path):
                raise _refusal(path, str(error)) from None
        finally:
            os.close(directory)
    raise _refusal(path, "it is being replaced again and again")


def verify_directory(path: Path) -> None:
    """Reads a published data set whole and compares every checksum.

    Memory: one block of 1 MiB.

    Raises:
        FileNotFoundError: there is nothing at the path.
        RuntimeError: it is no data set, or files of it are damaged; names them (rule V61).
    """
    manifest = open_directory(path).manifest
    damaged = []
    for name, _, crc32 in manifest.files():
        if crc32_of_file(path / name) != crc32:
            damaged.append(name)
    if damaged:
        raise _refusal(path, f"the content of {', '.join(damaged)} is not what was written [V61]")


class _GoneError(Exception):
    """A file that the manifest names is not there, or not of its size."""


def _refusal(path: Path, why: str) -> RuntimeError:
    return RuntimeError(f"{path} is not a complete data set: {why}; {_REMEDY}")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _open_at(directory: int, path: Path) -> Published:
    try:
        descriptor = _open_plain(directory, MANIFEST_NAME)
    except FileNotFoundError:
        raise _GoneError(f"it has no {MANIFEST_NAME}") from None
    with os.fdopen(descriptor, "rb") as file:
        text = file.read()
    try:
        manifest = Manifest.parse(text)
    except ValueError as error:
        raise _refusal(path, f"its {MANIFEST_NAME} {error}") from error
    _check_folders(directory, manifest)
    columns = {array.key: _map(directory, path, array) for array in manifest.arrays}
    episodes = {array.key[0]: _map(directory, path, array) for array in manifest.episode_arrays}
    group = manifest.group_file
    os.close(_open_sized(directory, group["file"], group["nbytes"]))
    table = TensorDict(episodes, batch_size=[manifest.episodes])
    finals = {array.key: _map(directory, path, array) for array in manifest.finals}
    for key in finals:
        if key[1:] not in columns:
            raise _refusal(path, f"its {MANIFEST_NAME} is damaged ({key} repeats no column)")
    return Published(path, manifest, columns, table, finals)


def _check_folders(directory: int, manifest: Manifest) -> None:
    """Checks that no folder of the data set, and nothing that describes one, is a link."""
    names = (PurePosixPath(name) for name, _, _ in manifest.files())
    for folder in {parent for name in names for parent in name.parents}:
        for each in (folder, folder / META):
            try:
                found = os.stat(each, dir_fd=directory, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                continue  # the files in it are missing, and named
            if stat.S_ISLNK(found.st_mode):
                raise _linked(str(each))


def _linked(name: str) -> _GoneError:
    return _GoneError(f"{name} is a link, which is not followed: put there what it leads to")


def _open_plain(directory: int, file: str) -> int:
    """Opens a file that is neither a link nor a pipe; see `os.open` for what else is raised."""
    try:
        # Opening a pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(file, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise _linked(file) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _GoneError(f"{file} is no plain file")
    return descriptor


def _open_sized(directory: int, file: str, nbytes: int) -> int:
    """Opens a file of a known size for reading; the caller closes the descriptor."""
    try:
        descriptor = _open_plain(directory, file)
    except (FileNotFoundError, NotADirectoryError):
        raise _GoneError(f"{file} is missing") from None
    size = os.fstat(descriptor).st_size
    if size != nbytes:
        os.close(descriptor)
        raise _GoneError(f"{file} has {size:,} bytes, expected {nbytes:,}")
    return descriptor


def _map(directory: int, path: Path, array: Array) -> torch.Tensor:
    if array.file is None:
        return torch.zeros(array.shape, dtype=array.dtype)
    descriptor = _open_sized(directory, array.file, array.nbytes)
    try:
        memory = map_private(descriptor, array.nbytes)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        why = f"cannot map {array.nbytes:,} bytes: {error.strerror}"
        if error.errno == errno.ENOMEM:
            why += "; the limit is one of address space (`ulimit -v`) or of the number of mappings"
        raise OSError(error.errno, why, str(path / array.file)) from error
    finally:
        os.close(descriptor)
    return torch.frombuffer(memory, dtype=array.dtype).view(array.shape)


_BUILDING: Final = "tmp"
_RETIRED: Final = "old"


def open_published(path: str | Path, *, identity: Mapping[str, Any] | None = None) -> Published:
    """Opens a published data set; see `open_directory` for what is checked and what it costs.

    What dead processes left beside it is removed, unless somebody is at work there.

    Args:
        path: where the data set is.
        identity: entries that the identity in the manifest must have; ``None`` stands for one
            that must not be there.

    Raises:
        FileNotFoundError: there is nothing at the path.
        RuntimeError: what is there is not a complete data set, or the data set of another
            identity; names it and says what to do.
    """
    target = _resolve(path)
    with file_limit_errors(target):
        found = _existing(target, identity)
        if found is None:
            if not siblings(target, _RETIRED):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
            with target_lock(target):
                recover(target)
            found = open_directory(target)
            _check_identity(found, identity)
        return found


def verify_published(path: str | Path) -> None:
    """Reads a published data set whole and compares every checksum.

    Raises:
        FileNotFoundError: there is nothing at the path.
        RuntimeError: it is no data set, or files of it are damaged; names them.
    """
    target = _resolve(path)
    with file_limit_errors(target):
        verify_directory(target)


def remove_published(path: str | Path) -> None:
    """Removes the data set at the path; it is gone in one step, never half there.

    What dead or interrupted processes left beside it goes too.

    Raises:
        FileNotFoundError: there is nothing at the path.
        RuntimeError: there are files that are no part of a data set; names one.
    """
    target = _resolve(path)
    if not target.exists():
        raise FileNotFoundError(f"{target} does not exist")
    with file_limit_errors(target), target_lock(target):
        check_own(target)
        recover(target)
        doomed = private_path(target, _BUILDING)
        os.rename(target, doomed)
        sync_directory(target.parent)
        remove_tree(doomed)


def ensure_published(
    path: str | Path,
    build: Callable[[Path], Manifest | bytes],
    *,
    force: bool = False,
    identity: Mapping[str, Any] | None = None,
    is_current: Callable[[Manifest], bool] | None = None,
    prepare: Callable[[], object] | None = None,
    goes_on: bool = False,
) -> Published:
    """Opens the data set at a path, and builds it first where there is none.

    Processes and threads that ask for one path at once share one build: the others wait, then
    open its result.

    Args:
        path: where the data set is, or will be.
        build: fills the empty directory that it is given and returns the manifest, or its text.
            Whatever it raises is raised here, and nothing has changed.
        force: build even where there is a data set, or a damaged one; that is replaced in one step
            when the new one is complete, and kept if anything fails.
        identity: as for `open_published`.
        is_current: whether what is there is still what is asked for; if not, it is built anew
            as with ``force``.
        prepare: called before ``build``, when nothing has been made or removed for it yet.
        goes_on: whether ``build`` can go on where an interrupted one ended. It may then be given a
            directory with a file `UNFINISHED_NAME`, which an earlier one has made, and where it is
            interrupted while there is such a file, the directory stays for the next one.

    Raises:
        RuntimeError: without ``force``, there is something that is not a complete data set, or
            the data set of another identity; in any case, files that are no part of one.
    """
    target = _resolve(path)
    with file_limit_errors(target):
        if not force:
            found = _existing(target, identity)
            if found is not None and (is_current is None or is_current(found.manifest)):
                return found
        with target_lock(target):
            unfinished = recover(target, keeps=goes_on)
            if not force:
                found = _existing(target, identity)
                if found is not None and (is_current is None or is_current(found.manifest)):
                    recover(target)
                    return found
            check_own(target)
            if prepare is not None:
                prepare()
            return publish(target, build, unfinished=unfinished, goes_on=goes_on)


def publish(
    target: Path,
    build: Callable[[Path], Manifest | bytes],
    *,
    unfinished: Path | None = None,
    goes_on: bool = False,
) -> Published:
    """Builds beside the target, then puts the result in its place. The caller holds the lock.

    Args:
        target: where the result will be.
        build: fills a directory.
        unfinished: a directory to go on with, if there is one.
        goes_on: as for `ensure_published`.

    Returns:
        The result, opened.

    Raises:
        OSError: there is no room; names the file and what it needs.
        RuntimeError: sizes, shapes or counts of the files are not those of the manifest (rule V61).
    """
    with _private_directory(target, unfinished, goes_on) as directory:
        manifest = build(directory)
        (directory / HELD_BACK).rename(directory / META)
        sync_tree(directory)
        # From here on it is a data set, or nothing.
        (directory / UNFINISHED_NAME).unlink(missing_ok=True)
        text = manifest if isinstance(manifest, bytes) else manifest.dump()
        path = directory / MANIFEST_NAME
        with disk_errors(path, len(text)), path.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(directory)
        made = _opened(directory, target)
        _put(directory, target)
    return replace(made, path=target)


def _opened(directory: Path, target: Path) -> Published:
    """Opens what is about to appear, which checks the sizes, shapes and counts of its manifest."""
    try:
        return open_directory(directory)
    except RuntimeError as error:
        text = f"{target} was not made: what was written is not what its manifest says [V61]"
        raise RuntimeError(text) from error


def hold_back(directory: Path) -> None:
    """Hides the root description of the columns, so that a half-built table does not load."""
    (directory / META).rename(directory / HELD_BACK)


def _resolve(path: str | Path) -> Path:
    """Follows links: a data set behind a link is replaced where it lies, not the link."""
    return Path(os.path.realpath(path))


def _existing(target: Path, identity: Mapping[str, Any] | None) -> Published | None:
    try:
        found = open_directory(target)
    except FileNotFoundError:
        return None
    _check_identity(found, identity)
    if siblings(target, _RETIRED) or siblings(target, _BUILDING):
        # A replacement that was killed leaves as much as the data set takes, and there may never
        # be another one to clear it away. Whoever is alive holds the lock.
        with target_lock_if_free(target) as is_held:
            if is_held:
                recover(target)
    return found


def _check_identity(found: Published, identity: Mapping[str, Any] | None) -> None:
    for name, wanted in (identity or {}).items():
        there = found.manifest.identity.get(name)
        if there != wanted:
            raise RuntimeError(
                f"{found.path} holds a data set whose {name} is {there!r}, but {wanted!r} was "
                f"asked for; choose another place, or replace it with {FORCE}"
            )


@contextmanager
def _private_directory(
    target: Path, unfinished: Path | None, keeps_unfinished: bool
) -> Iterator[Path]:
    directory = private_path(target, _BUILDING) if unfinished is None else unfinished
    if unfinished is None:
        directory.mkdir()
    try:
        yield directory
    except BaseException as error:
        # What was interrupted can go on; what failed would fail again.
        is_interrupted = not isinstance(error, Exception)
        if not (keeps_unfinished and is_interrupted and _is_unfinished(directory)):
            remove_tree(directory)
        raise
    else:
        # After a swap the old version.
        remove_tree(directory)


def _is_unfinished(directory: Path) -> bool:
    return (directory / UNFINISHED_NAME).is_file()


def _put(directory: Path, target: Path) -> None:
    """Moves a complete directory to the target, which may hold a data set."""
    check_own(target)
    parent = target.parent
    if not os.path.lexists(target):
        os.rename(directory, target)
        sync_directory(parent)
        return
    if exchange(directory, target):
        sync_directory(parent)
        return
    # Two steps. Dying in between leaves the old version retired, and `recover` restores it.
    retired = private_path(target, _RETIRED)
    os.rename(target, retired)
    try:
        os.rename(directory, target)
    except BaseException:
        os.rename(retired, target)
        raise
    sync_directory(parent)
    remove_tree(retired)


def recover(target: Path, *, keeps: bool = False) -> Path | None:
    """Removes what dead processes left, restoring a version that was about to be replaced.

    The caller holds the lock, so nobody alive is building for this target.

    Args:
        target: where the data set is, or will be.
        keeps: leave one directory whose making can go on, if there is one, and return it.
    """
    retired = siblings(target, _RETIRED)
    if retired and not os.path.lexists(target):
        os.rename(retired.pop(), target)
        sync_directory(target.parent)
    left = siblings(target, _BUILDING)
    kept = next((path for path in left if keeps and _is_unfinished(path)), None)
    for path in (*retired, *left):
        if path != kept:
            remove_tree(path)
    return kept
