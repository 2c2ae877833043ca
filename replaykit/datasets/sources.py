"""Describe source files, and plan what a download would take."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from replaykit.datasets.engine.finding import natural_key
from replaykit.datasets.engine.h5_checks import check_signature
from replaykit.errors import CorpusError
from replaykit.filesystem import NoRoomError, siblings

__all__ = [
    "SUFFIXES",
    "DownloadPlan",
    "PlannedFile",
    "Remote",
    "SourceFile",
    "Sources",
    "free_bytes",
    "h5_below",
    "names_of",
    "require_plain",
    "require_room_for_columns",
    "room_needed_at",
    "sha256_of",
]

SUFFIXES: Final = (".h5", ".hdf5", ".hdf")
"""How the names of H5 files end that are looked for in a folder."""


@dataclass(frozen=True)
class SourceFile:
    """A file on this machine, and what is known of it.

    Attributes:
        path: where it lies.
        name: its path in the corpus, with ``/`` between parts; the order of files is by it.
        size: bytes.
        sha256: of its content, 64 hexadecimal digits.
        is_verified: the content is known to be what its source says; fetching it again would give
            the same bytes.
    """

    path: Path
    name: str
    size: int
    sha256: str
    is_verified: bool = False


@dataclass(frozen=True)
class Sources:
    """The files of a corpus in the order of their names, and where they come from.

    Attributes:
        files: sorted by name; the position of a file is the ``seed`` of its rows.
        origin: JSON values for the manifest: repository, commit, and so on.
        natural: whether numbers in the names compare as numbers.
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
            raise ValueError(f"source files must have names of their own, got twice: {twice}")

    @classmethod
    def local(
        cls,
        paths: Iterable[str | Path],
        *,
        origin: Mapping[str, Any] | None = None,
        natural: bool = False,
        threads: int = 1,
        checked: bool = True,
    ) -> Sources:
        """Describes files of this machine; nothing is ever written beside them.

        Names are the paths below the deepest directory that holds all of them. Cost: reads every
        file once, for its checksum, ``threads`` at a time. Files that are not HDF5 are only taken
        where ``checked`` is False, for a conversion that skips and reports them.

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
        return cls(tuple(files), {"kind": "local"} if origin is None else origin, natural)

    def check(self) -> None:
        """Checks that there are files and that each has the bytes it should (rules V02, V05).

        Raises:
            CorpusError: there is no file, or one has another size.
            FileNotFoundError: a file is not there.
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
    """Returns files with their paths below the deepest directory that holds all of them.

    Raises:
        ValueError: such a path is not UTF-8: manifests and messages could not have it.
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
    """Checks that a path is no pipe, device or socket: opening one may wait for ever.

    Raises:
        ValueError: it is one, or a link to one. A path that is not there is no error here.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(
            f"{path}: expected a file, got a pipe, a device or a socket, which is not opened: "
            "remove it, or name the files one by one"
        )


def h5_below(folder: Path) -> list[Path]:
    """Returns the H5 files below a folder that a user names, by their suffixes.

    Links to files are followed, since folders of downloads and of selections are made of them.
    Links to folders are not, which may lead in circles.

    Raises:
        ValueError: a path with such a suffix is a pipe, a device or a socket.
    """
    found = [each for each in folder.rglob("*") if each.suffix in SUFFIXES]
    for each in found:
        require_plain(each)
    return [each for each in found if each.is_file()]


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal digits. Memory: one block of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class PlannedFile:
    """A file of a data set.

    Attributes:
        name: its path in the corpus.
        size: bytes; None where a server does not say.
        is_cached: whether it is on this machine, not verified yet.
    """

    name: str
    size: int | None
    is_cached: bool


@dataclass(frozen=True)
class DownloadPlan:
    """What fetching and converting a data set would take.

    Attributes:
        name: ``family:id``.
        origin: where the files come from: repository and commit, or URLs.
        files: in the order of their names.
        cache: where they are kept.
        free_bytes: room on the disk of ``cache``.
        target: where the converted data set will lie.
        is_converted: whether something lies there already, so that nothing would be fetched.

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
        """Bytes of all files, as far as their sizes are known."""
        return sum(file.size or 0 for file in self.files)

    @property
    def missing_bytes(self) -> int:
        """Bytes of the files that would be fetched, as far as their sizes are known."""
        return sum(file.size or 0 for file in self.files if not file.is_cached)


class Remote(Protocol):
    """Where the files of a data set are fetched from."""

    @property
    def place(self) -> str:
        """The repository or server, for people."""

    @property
    def known_bytes(self) -> int | None:
        """Bytes of all files where that is known without a request."""

    def sources(self, target: Path | None = None) -> Sources:
        """Fetches and verifies the files.

        Args:
            target: where columns will be made of them, if their room is to be looked at as well.

        Raises:
            FileNotFoundError, PermissionError, DownloadError, OSError: they cannot be had.
        """

    def look(self) -> tuple[dict[str, Any], tuple[PlannedFile, ...], Path]:
        """Returns origin, files and cache, and fetches nothing.

        Raises:
            FileNotFoundError, PermissionError, DownloadError: the server does not say.
        """


def free_bytes(path: Path) -> int:
    """Returns the room on the disk on which a path lies, or will lie."""
    return shutil.disk_usage(_existing(path)).free


def room_needed_at(target: Path, *, may_shrink: bool, force: bool = False) -> Path | None:
    """Returns where there must be room for as much as the files of a corpus take.

    ``None`` where that is not known: the columns may be smaller, are there already, or some of
    their room has been taken by a conversion that was interrupted.
    """
    is_there = target.exists() and not force
    return None if may_shrink or is_there or siblings(target, "tmp") else target


def require_room_for_columns(cache: Path, missing: int, target: Path, nbytes: int) -> None:
    """Checks, before a download, that what is made of it will most probably fit too.

    Columns are as large as uncompressed files at least, since observations are mostly stored twice:
    before a step and after it. How large is known when the files are there, and checked then.

    Args:
        cache: where the files will lie.
        missing: how many bytes are fetched.
        target: where the columns will lie.
        nbytes: bytes of all files.

    Raises:
        OSError: ``ENOSPC``, with the numbers and what to do; only where something is fetched.
    """
    if not missing:
        return
    is_one_disk = _existing(cache).stat().st_dev == _existing(target).stat().st_dev
    needed, free = nbytes + missing * is_one_disk, free_bytes(target)
    if needed > free:
        fetched = f"{missing:,} bytes to download, and " if is_one_disk else ""
        raise NoRoomError(
            errno.ENOSPC,
            f"not enough disk space for {target}: {fetched}about {nbytes:,} bytes or more for the "
            f"columns that are made of the files, {free:,} bytes are free; free some space, choose "
            "another root, or fetch the files by themselves and give them as source=",
            str(target),
        )


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
