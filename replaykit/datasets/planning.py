"""What fetching a data set would take, without fetching anything."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from replaykit.datasets.sources import Sources

__all__ = ["DownloadPlan", "PlannedFile", "Remote", "free_bytes"]


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

    def sources(self) -> Sources:
        """Fetches and verifies the files.

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
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free
