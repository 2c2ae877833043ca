"""Opening a published data set: check it, map it, read nothing.

Every column is mapped copy-on-write: a process may edit what it sees and nobody else, least of
all the disk, ever sees it. Needs neither h5py nor the network.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np
import torch
from tensordict import TensorDict

from replaykit.datasets.checksum import crc32_of_file
from replaykit.datasets.episode_table import read_groups
from replaykit.datasets.manifest import MANIFEST_NAME, Array, Manifest
from replaykit.datasets.own_files import META
from replaykit.mapping import map_private
from replaykit.ted import Key

__all__ = ["FORCE", "Published", "open_directory", "verify_directory"]

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
