"""The files that a data set is made from, and how each is known to be the right one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from replaykit.datasets.engine.finding import natural_key
from replaykit.datasets.engine.signature import check_signature
from replaykit.errors import CorpusError

__all__ = [
    "SUFFIXES",
    "SourceFile",
    "Sources",
    "h5_below",
    "names_of",
    "require_plain",
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
