"""Atomic publication of a data set's directory; opening and verification."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tensordict import TensorDict

from replaykit.datasets.column_files import ATTACHED, GROUP_FILE, read_groups
from replaykit.datasets.dataset_manifest import MANIFEST_NAME, Array, Manifest, crc32_of_file
from replaykit.datasets.transfers import target_lock
from replaykit.filesystem import (
    disk_errors,
    exchange,
    map_private,
    private_path,
    remove_tree,
    siblings,
    sync_directory,
    sync_tree,
)
from replaykit.ted import Key

META: Final = "meta.json"
HELD_BACK: Final = "meta.json.incomplete"
UNFINISHED_NAME: Final = "unfinished"
"""The file that marks an unpublished directory whose build can continue."""

_NAMES: Final = frozenset({META, HELD_BACK, UNFINISHED_NAME, MANIFEST_NAME, GROUP_FILE})
_COLUMN: Final = ".memmap"


def check_own(path: Path) -> None:
    """Check that a path holds only files of a data set, complete or damaged.

    Args:
        path: a directory, or a path that does not exist.

    Raises:
        RuntimeError: the path holds other files. The message names one of them.

    Cost: the directory and its subdirectories are listed.

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
            f"{path} is not a directory, and only data sets are replaced or removed; move it away, "
            "or choose another path"
        )
    for folder, folders, files in os.walk(path, onerror=_raise):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        others = [
            name for name in files if not (name in _NAMES or name.endswith((_COLUMN, ATTACHED)))
        ]
        for name in (*links, *others):
            found = os.path.relpath(os.path.join(folder, name), path)
            raise RuntimeError(
                f"{path} holds {found}, which is no part of a data set: only data sets are "
                "replaced or removed; move it away, or choose another path"
            )


def _raise(error: OSError) -> None:
    raise error


FORCE: Final = 'download="force" (force=True of convert, --force of the command)'
_REMEDY: Final = f"convert source files into another path, or replace a data set with {FORCE}"
_CONVERSION: Final = ("layout", "layout_version", "policies", "rules")
"""The entries of an identity that depend on the layout and the policies, not on the source."""
_RETRIES: Final = 10


@dataclass(frozen=True, eq=False)
class Published:
    """An opened data set.

    Attributes:
        path: its directory.
        manifest: its manifest.
        columns: the stored columns by key, ``[*batch, ...]``. They are private to the process, and
            edits never reach the disk.
        episodes: the episode table, a TensorDict ``[E]``; see `EPISODE_FIELDS`.
        finals: for columns under ``next`` that are not stored, the values of the last row of each
            episode, ``[E, ...]``. All other values of these columns come from the following rows;
            see `following`.
    """

    path: Path
    manifest: Manifest
    columns: dict[Key, torch.Tensor]
    episodes: TensorDict
    finals: dict[Key, torch.Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The size of the first batch dimension."""
        return self.manifest.rows

    @property
    def batch_size(self) -> torch.Size:
        """The batch size: ``[N]``, or ``[E, T]`` for split trajectories."""
        return torch.Size(self.manifest.batch)

    def tensordict(self) -> TensorDict:
        """Return all columns as a TensorDict with nested TensorDicts of one batch size.

        Stored columns are not copied, so the result contains the tensors of `columns`. Columns that
        are not stored are built in memory.
        """
        data = nested_columns(self.columns, self.batch_size)
        for key in self.finals:
            data.set(key, self.following(key, 0, self.rows))
        return data

    def following(self, key: Key, start: int, stop: int) -> torch.Tensor:
        """Return rows ``start .. stop - 1`` of a column that is not stored, in new memory."""
        # NumPy is used because torch cannot index some dtypes, such as uint16.
        root, finals = self.columns[key[1:]].numpy(), self.finals[key].numpy()
        found = np.empty((stop - start, *root.shape[1:]), root.dtype)
        inside = root[start + 1 : stop + 1]
        found[: len(inside)] = inside
        lasts = (self.episodes["start"] + self.episodes["length"] - 1).numpy()
        first, end = np.searchsorted(lasts, (start, stop))
        found[lasts[first:end] - start] = finals[first:end]
        return torch.from_numpy(found)

    def groups(self) -> list[str]:
        """Return the name of each episode's source group. Each call costs O(E)."""
        return read_groups(self.path / self.manifest.group_file.file)


def nested_columns(columns: Mapping[Key, torch.Tensor], batch: torch.Size) -> TensorDict:
    """Return columns as a TensorDict with nested TensorDicts, without a copy."""
    data = TensorDict({}, batch_size=batch)
    for key, value in columns.items():
        data.set(key, value)
    return data


def open_directory(path: Path) -> Published:
    """Open a published data set.

    The manifest must be valid and have a known version. Every file must have its exact size. Links
    in the data set are refused, because they could point to any file of this machine. Cost: a few
    system calls for each column, whatever the number of rows.

    Raises:
        FileNotFoundError: the path does not exist.
        RuntimeError: the path is not a complete data set. The message has the remedy.
    """
    for _ in range(_RETRIES):
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except NotADirectoryError:
            raise _refusal(path, "it is not a directory") from None
        try:
            # All files are opened relative to this descriptor. So the old manifest is never
            # combined with the columns of a new version that replaces the directory.
            return _open_at(directory, path)
        except _GoneError as error:
            if os.fstat(directory).st_ino == _inode(path):
                raise _refusal(path, str(error)) from None
        finally:
            os.close(directory)
    raise _refusal(path, "it is being replaced again and again")


class _GoneError(Exception):
    """A file of the manifest is missing, or has another size."""


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
    for other in (manifest.group_file, *manifest.attached):
        os.close(_open_sized(directory, other.file, other.nbytes))
    table = TensorDict(episodes, batch_size=[manifest.episodes])
    finals = {array.key: _map(directory, path, array) for array in manifest.finals}
    for key in finals:
        if key[1:] not in columns:
            raise _refusal(path, f"its {MANIFEST_NAME} is damaged ({key} repeats no column)")
    return Published(path, manifest, columns, table, finals)


def _check_folders(directory: int, manifest: Manifest) -> None:
    """Check that no folder of the data set, and no ``meta.json``, is a link."""
    for folder in manifest.folders():
        for each in (folder, folder / META):
            try:
                found = os.stat(each, dir_fd=directory, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                continue  # missing files are reported when they are opened
            if stat.S_ISLNK(found.st_mode):
                raise _linked(str(each))


def _linked(name: str) -> _GoneError:
    return _GoneError(f"{name} is a link, which is not followed: replace it by its target")


def _open_plain(directory: int, file: str) -> int:
    """Open a plain file, but no link or pipe; see `os.open` for other errors."""
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
        raise _GoneError(f"{file} is not a plain file")
    return descriptor


def _open_sized(directory: int, file: str, nbytes: int) -> int:
    """Open a file of known size for reading. The caller closes the descriptor."""
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
_DOOMED: Final = "gone"


def open_published(path: str | Path, *, identity: Mapping[str, Any] | None = None) -> Published:
    """Open a published data set; see `open_directory` for checks and costs.

    Leftovers of dead processes next to the directory are removed, unless another process holds the
    lock.

    Args:
        path: the directory of the data set.
        identity: entries that the identity in the manifest must have. If a value is ``None``, the
            entry must be absent.

    Raises:
        FileNotFoundError: the path does not exist.
        RuntimeError: the path is not a complete data set, or is a data set of another identity. The
            message has the remedy.
    """
    target = _resolve(path)
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
    """Read all files of a published data set and compare every checksum.

    Memory: one block of 1 MiB.

    Raises:
        FileNotFoundError: the path does not exist.
        RuntimeError: the path is not a data set, or files are damaged (rule V61). The message names
            the damaged files.
    """
    target = _resolve(path)
    files = open_directory(target).manifest.files()
    damaged = [name for name, _, crc32 in files if crc32_of_file(target / name) != crc32]
    if damaged:
        why = f"the content of {', '.join(damaged)} has a wrong checksum [V61]"
        raise _refusal(target, why)


def remove_published(path: str | Path) -> None:
    """Remove the data set at a path, in one step.

    Leftovers of dead or interrupted processes next to the data set are also removed.

    Raises:
        FileNotFoundError: the path does not exist.
        RuntimeError: the path holds files that are not part of a data set. The message names one of
            them.
    """
    target = _resolve(path)
    if not target.exists():
        raise FileNotFoundError(f"{target} does not exist")
    with target_lock(target):
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
    """Open the data set at a path, after building it if there is none.

    If several processes or threads call this function for one path, one of them builds the data
    set. The others wait, and then open it.

    Args:
        path: the directory of the data set.
        build: fills the empty directory that it receives, and returns the manifest or its text. An
            error in ``build`` is raised to the caller, and the path does not change.
        force: True to build even if the path holds a complete or damaged data set. The new data set
            replaces the old one in one step when it is complete. After an error, the old data set
            stays.
        identity: as for `open_published`.
        is_current: returns whether the existing data set is up to date. If it is outdated, it is
            built again as with ``force``.
        prepare: called before ``build``, and before files are created or removed for it.
        goes_on: if True, ``build`` can continue an interrupted build. ``build`` may then receive
            the directory of an earlier call, which contains the file `UNFINISHED_NAME`. If
            ``build`` is interrupted while that file exists, the directory stays for the next call.

    Raises:
        RuntimeError: the path holds files that are not part of a data set. Or, without ``force``,
            the path holds an incomplete data set or a data set of another identity.
    """
    target = _resolve(path)

    def current() -> Published | None:
        found = None if force else _existing(target, identity)
        is_old = found is None or (is_current is not None and not is_current(found.manifest))
        return None if is_old else found

    if (found := current()) is not None:
        return found
    with target_lock(target):
        unfinished = recover(target, keeps=goes_on)
        if (found := current()) is not None:
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
    """Build a data set in a private directory, then move the directory to the target.

    Args:
        target: the directory of the result.
        build: fills a directory.
        unfinished: the directory of an interrupted build to continue; ``None`` if there is none.
        goes_on: as for `ensure_published`.

    Returns:
        The result, opened.

    Raises:
        OSError: the disk has too little room. The message names the file and the needed bytes.
        RuntimeError: sizes, shapes or counts of the files differ from the manifest (rule V61).
    """
    with _private_directory(target, unfinished, goes_on) as directory:
        manifest = build(directory)
        (directory / HELD_BACK).rename(directory / META)
        sync_tree(directory)
        # From here on, a killed process leaves no directory that can be continued.
        (directory / UNFINISHED_NAME).unlink(missing_ok=True)
        text = manifest if isinstance(manifest, bytes) else manifest.dump()
        path = directory / MANIFEST_NAME
        with disk_errors(path, len(text)), path.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(directory)
        try:  # before it is published, to check sizes, shapes and counts
            made = open_directory(directory)
        except RuntimeError as error:
            raise RuntimeError(
                f"{target} was not made: the written files do not match its manifest [V61]"
            ) from error
        _put(directory, target)
    return replace(made, path=target)


def hold_back(directory: Path) -> None:
    """Hide the root ``meta.json``, so that tensordict cannot load an incomplete table."""
    (directory / META).rename(directory / HELD_BACK)


def _resolve(path: str | Path) -> Path:
    """Return the real path, so that a data set behind a link is replaced, not the link."""
    return Path(os.path.realpath(path))


def _existing(target: Path, identity: Mapping[str, Any] | None) -> Published | None:
    try:
        found = open_directory(target)
    except FileNotFoundError:
        return None
    _check_identity(found, identity)
    if any(siblings(target, purpose) for purpose in (_RETIRED, _BUILDING, _DOOMED)):
        # A killed replacement leaves files up to the size of the data set. They are removed here,
        # because no later replacement may come. A running replacement holds the lock.
        with target_lock(target, waits=False) as is_held:
            if is_held:
                recover(target)
    return found


def _check_identity(found: Published, identity: Mapping[str, Any] | None) -> None:
    there, wanted = found.manifest.identity, identity or {}
    differing = [name for name in wanted if there.get(name) != wanted[name]]
    for name in differing:
        if name not in _CONVERSION:
            raise RuntimeError(
                f"{found.path} holds a data set whose {name} is {there.get(name)!r}, but "
                f"{wanted[name]!r} was asked for; choose another path, or replace it with {FORCE}"
            )
    if differing:
        raise RuntimeError(
            f"{found.path} was converted with another layout or other policies; pass force=True "
            f'to convert it again (download="force" of a class, --force of the command), or choose '
            f"another path; these entries differ: {', '.join(differing)}"
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
        # An interrupted build can continue. A failed build would fail again.
        is_interrupted = not isinstance(error, Exception)
        if not (keeps_unfinished and is_interrupted and _is_unfinished(directory)):
            remove_tree(directory)
        raise
    else:
        # After a swap, this directory holds the old version.
        remove_tree(directory)


def _is_unfinished(directory: Path) -> bool:
    return (directory / UNFINISHED_NAME).is_file()


def _put(directory: Path, target: Path) -> None:
    """Move a complete directory to the target, which may hold a data set."""
    check_own(target)
    replace_path(directory, target)


def replace_path(draft: Path, target: Path) -> None:
    """Move a synced file or directory to a path, which may exist, in one step, durably.

    The old version is at ``draft`` afterwards, or is removed. After a kill or a loss of power, the
    target is complete, either old or new, as soon as `restore` was called.
    """
    parent = target.parent
    if not os.path.lexists(target):
        os.rename(draft, target)
        sync_directory(parent)
        return
    if exchange(draft, target):
        sync_directory(parent)
        return
    # The replacement takes two steps. After a kill between them, `restore` brings back the old
    # version.
    retired = private_path(target, _RETIRED)
    os.rename(target, retired)
    try:
        os.rename(draft, target)
    except BaseException:
        os.rename(retired, target)
        raise
    sync_directory(parent)
    _remove_retired(retired, target)


def _remove_retired(retired: Path, target: Path) -> None:
    """Remove an old version of the target.

    The directory is renamed first. Otherwise a loss of power could leave a part of it under the
    name from which `recover` restores.
    """
    doomed = private_path(target, _DOOMED)
    os.rename(retired, doomed)
    sync_directory(target.parent)
    remove_tree(doomed)


def recover(target: Path, *, keeps: bool = False) -> Path | None:
    """Remove leftovers of dead processes, and restore a half-replaced data set.

    The caller holds the lock, so no other process is building for this target.

    Args:
        target: the directory of the data set.
        keeps: True to keep one unfinished directory that can be continued, and return it.
    """
    restore(target)
    left = siblings(target, _BUILDING)
    kept = next((path for path in left if keeps and _is_unfinished(path)), None)
    for path in left:
        if path != kept:
            remove_tree(path)
    return kept


def restore(target: Path) -> None:
    """Restore a half-replaced path, and remove old versions; no process may be replacing it."""
    retired = siblings(target, _RETIRED)
    if retired and not os.path.lexists(target):
        os.rename(retired.pop(), target)
        sync_directory(target.parent)
    for path in retired:
        _remove_retired(path, target)
    for path in siblings(target, _DOOMED):
        remove_tree(path)
