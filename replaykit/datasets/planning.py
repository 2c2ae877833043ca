"""What fetching a data set would take, without fetching anything."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from replaykit.datasets.sources import Sources
from replaykit.filesystem import NoRoomError, siblings

__all__ = [
    "DownloadPlan",
    "PlannedFile",
    "Remote",
    "free_bytes",
    "require_room_for_columns",
    "room_needed_at",
]


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
        >>> from replaykit.datasets.planning import DownloadPlan, PlannedFile
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
