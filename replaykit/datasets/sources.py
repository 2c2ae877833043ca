"""Source files and plans of downloads."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from replaykit.datasets.engine.episode_finders import natural_key
from replaykit.datasets.engine.h5_checks import check_signature
from replaykit.errors import CorpusError
from replaykit.filesystem import NoRoomError, existing, free_bytes, siblings

SUFFIXES: Final = (".h5", ".hdf5", ".hdf")
"""The suffixes by which a folder is searched for H5 files."""


@dataclass(frozen=True)
class SourceFile:
    """A local file, with its name in the corpus and its checksum.

    Attributes:
        path: the path on this machine.
        name: the path in the corpus, with ``/`` between parts. Files are ordered by name.
        size: the size in bytes.
        sha256: the SHA-256 of the content, 64 hexadecimal digits.
        is_verified: True if the content was verified against its source. A second fetch would then
            give the same bytes.
    """

    path: Path
    name: str
    size: int
    sha256: str
    is_verified: bool = False


@dataclass(frozen=True)
class Sources:
    """The files of a corpus in the order of their names, and their origin.

    Attributes:
        files: the files, sorted by name. The position of a file is the ``seed`` of its rows.
        origin: JSON values for the manifest, such as repository and commit.
        natural: True to order numbers in file names by value, so that 9 comes before 10.
    """

    files: tuple[SourceFile, ...]
    origin: Mapping[str, Any] = field(default_factory=dict)
    natural: bool = False

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        order: Callable[[str], Any] = natural_key if self.natural else str
        ordered = tuple(sorted(self.files, key=lambda file: order(file.name)))
        object.__setattr__(self, "files", ordered)
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"source files must have different names, got twice: {twice}")

    def to_json(self) -> dict[str, Any]:
        """Return the origin, and name, size and SHA-256 of each file, for a manifest."""
        files = [
            {"name": file.name, "size": file.size, "sha256": file.sha256} for file in self.files
        ]
        return {"origin": dict(self.origin), "files": files}

    @classmethod
    def local(
        cls,
        paths: Iterable[str | Path],
        *,
        natural: bool = False,
        threads: int = 1,
        checked: bool = True,
    ) -> Sources:
        """Describe local files, without writing to their directories.

        The name of a file is its path below the deepest common directory. Files that are not HDF5
        are only accepted if ``checked`` is False, for a conversion that skips and reports them.
        Cost: every file is read once for its checksum; ``threads`` files are read at once.

        Raises:
            CorpusError: a file is not HDF5.
            FileNotFoundError, PermissionError, IsADirectoryError: a file cannot be opened.
            ValueError: a file is given twice, is a pipe or a device, or has a name that is not
                UTF-8.
        """
        named = names_of(paths)
        for path, _ in named:
            require_plain(path)
            if checked:
                check_signature(path)
        each = [path for path, _ in named]
        if threads < 2 or len(each) < 2:
            digests = [sha256_of(path) for path in each]
        else:
            with ThreadPoolExecutor(threads) as pool:
                digests = list(pool.map(sha256_of, each))
        files = [
            SourceFile(path, name, path.stat().st_size, sha256)
            for (path, name), sha256 in zip(named, digests, strict=True)
        ]
        return cls(tuple(files), {"kind": "local"}, natural)

    def check(self) -> None:
        """Check that files are given, and that no size has changed (rules V02, V05).

        Raises:
            CorpusError: there is no file, or a file has another size.
            FileNotFoundError: a file does not exist.
        """
        if not self.files:
            raise CorpusError("no source file matches the data set: nothing to convert [V05]")
        for file in self.files:
            size = file.path.stat().st_size
            if size != file.size:
                check_signature(file.path)
                raise CorpusError(
                    f"{file.path}: has {size:,} bytes, expected {file.size:,}; fetch it again [V02]"
                )


def names_of(paths: Iterable[str | Path]) -> list[tuple[Path, str]]:
    """Return files with their paths below the deepest common directory.

    Raises:
        ValueError: a path is not UTF-8, so manifests and messages cannot contain it.
    """
    absolute = [Path(os.path.abspath(path)) for path in paths]
    if not absolute:
        return []
    base = Path(os.path.commonpath([path.parent for path in absolute]))
    named = [(path, path.relative_to(base).as_posix()) for path in absolute]
    for _, name in named:
        if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
            raise ValueError(f"expected names of files in UTF-8, got {os.fsencode(name)!r}")
    return named


def require_plain(path: Path) -> None:
    """Check that a path is no pipe, device or socket.

    Opening such a file may wait forever. A path that does not exist is accepted.

    Raises:
        ValueError: the path is a pipe, device or socket, or a link to one.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(
            f"{path}: expected a file, got a pipe, a device or a socket, which is not opened: "
            "remove it, or name the files one by one"
        )


def files_below(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Return the files below a folder with one of these suffixes; all files without suffixes.

    Links to files are followed, because folders of downloads often consist of links. Links to
    folders are not followed, because they may form cycles.

    Raises:
        ValueError: a path with such a suffix is a pipe, a device or a socket.
    """
    found = [each for each in folder.rglob("*") if not suffixes or each.suffix in suffixes]
    for each in found:
        require_plain(each)
    return [each for each in found if each.is_file()]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits. Memory: one block of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class PlannedFile:
    """A file in the plan of a download.

    Attributes:
        name: the path in the corpus.
        size: the size in bytes; None if the server does not send it.
        is_cached: True if the file is in the cache. It is not verified yet.
    """

    name: str
    size: int | None
    is_cached: bool


@dataclass(frozen=True)
class DownloadPlan:
    """The files, sizes and target of a data set to fetch and convert.

    Attributes:
        name: ``family:id``.
        origin: the origin of the files: repository and commit, or URLs.
        files: the files, in the order of their names.
        cache: the folder of the fetched files.
        free_bytes: free space on the disk of ``cache``.
        target: the folder of the converted data set.
        is_converted: True if ``target`` exists already, so nothing would be fetched.

    Example:
        >>> from pathlib import Path
        >>> from replaykit.datasets.sources import DownloadPlan, PlannedFile
        >>> files = (PlannedFile("a.h5", 5, True), PlannedFile("b.h5", 7, False))
        >>> plan = DownloadPlan("mine:a", {}, files, Path("."), 10, Path("a"), False)
        >>> plan.nbytes, plan.missing_bytes
        (12, 7)
    """

    name: str
    origin: Mapping[str, Any]
    files: tuple[PlannedFile, ...]
    cache: Path
    free_bytes: int
    target: Path
    is_converted: bool

    @property
    def nbytes(self) -> int:
        """Total size in bytes of the files whose sizes are known."""
        return sum(file.size or 0 for file in self.files)

    @property
    def missing_bytes(self) -> int:
        """Total size in bytes of the files to fetch whose sizes are known."""
        return sum(file.size or 0 for file in self.files if not file.is_cached)


class Remote(Protocol):
    """The remote location of a data set's files."""

    @property
    def location(self) -> str:
        """The repository or server, for display."""

    @property
    def known_bytes(self) -> int | None:
        """Total size of the files in bytes; None if a request is needed."""

    def sources(self, target: Path | None = None) -> Sources:
        """Fetch and verify the files.

        Args:
            target: the directory of the columns. The free space of its disk is checked as well.

        Raises:
            FileNotFoundError, PermissionError, DownloadError, OSError: the files cannot be
                fetched.
        """

    def listing(self) -> tuple[dict[str, Any], tuple[PlannedFile, ...], Path]:
        """Return origin, files and cache, without fetching files.

        Raises:
            FileNotFoundError, PermissionError, DownloadError: the server refuses or fails to list
                the files.
        """


def room_needed_at(target: Path, *, may_shrink: bool, force: bool = False) -> Path | None:
    """Return the directory that needs as much room as the source files, or ``None``.

    ``None`` means that the needed room is not known. This is the case if the columns may be smaller
    than the files, or may exist already. It is also the case if an interrupted conversion may have
    reserved some of the space.
    """
    is_there = target.exists() and not force
    return None if may_shrink or is_there or siblings(target, "tmp") else target


def require_room_for_columns(cache: Path, missing: int, target: Path, nbytes: int) -> None:
    """Check before a download that the columns will probably fit on the disk.

    Columns are at least as large as uncompressed files, because most observations are stored twice:
    before one step and after another. The conversion checks the exact size later.

    Args:
        cache: the folder of the fetched files.
        missing: number of bytes to fetch.
        target: the folder of the columns.
        nbytes: total size of the files, in bytes.

    Raises:
        OSError: the disk is too small (``ENOSPC``). The message has the needed and the free bytes,
            and the remedy. The error is never raised if ``missing`` is zero.
    """
    if not missing:
        return
    is_one_disk = existing(cache).stat().st_dev == existing(target).stat().st_dev
    needed, free = nbytes + missing * is_one_disk, free_bytes(target)
    if needed > free:
        fetched = f"{missing:,} bytes to download, and " if is_one_disk else ""
        raise NoRoomError(
            errno.ENOSPC,
            f"not enough disk space for {target}: {fetched}about {nbytes:,} bytes or more for the "
            f"columns that are made of the files, {free:,} bytes are free; free some space, choose "
            "another root, or fetch the files separately and pass them with source=",
            str(target),
        )
