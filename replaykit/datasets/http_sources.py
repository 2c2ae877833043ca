"""The source files of a corpus that lies on a web server."""

from __future__ import annotations

import posixpath
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from replaykit.datasets.http_cache import DownloadCache, WebFile, default_downloads
from replaykit.datasets.http_fetch import fetch_files, sizes_of
from replaykit.datasets.hub_cache import is_offline
from replaykit.datasets.planning import PlannedFile
from replaykit.datasets.sources import SourceFile, Sources, sha256_of

__all__ = ["WebFiles"]


@dataclass(frozen=True)
class WebFiles:
    """Files of the web; their names are the paths below the deepest folder that holds all of them.

    Attributes:
        files: the files.
        natural: whether numbers in the names compare as numbers.
    """

    files: tuple[WebFile, ...]
    natural: bool = False

    @property
    def place(self) -> str:
        """The servers, for people."""
        return ", ".join(sorted({urlsplit(file.url).netloc for file in self.files}))

    @property
    def known_bytes(self) -> int | None:
        """Bytes of all files, where every size was given."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def sources(self, target: Path | None = None) -> Sources:
        """Fetches and verifies the files.

        Args:
            target: where columns will be made of them, if their room is to be looked at as well.

        Raises:
            FileNotFoundError, PermissionError, DownloadError, OSError: as `download` does.
            ValueError: a file is given twice.
        """
        paths = fetch_files(self.files, progress=sys.stderr.isatty(), target=target)
        found = tuple(
            SourceFile(
                path,
                name,
                path.stat().st_size,
                file.sha256 or sha256_of(path),
                is_verified=file.sha256 is not None,
            )
            for file, path, name in zip(self.files, paths, self._names(), strict=True)
        )
        return Sources(found, self._origin(), self.natural)

    def look(self) -> tuple[dict[str, Any], tuple[PlannedFile, ...], Path]:
        """Returns origin, files and cache; asks for sizes that are not known, unless offline."""
        cache = DownloadCache(default_downloads())
        sizes = [file.size for file in self.files] if is_offline() else sizes_of(self.files, cache)
        files = tuple(
            PlannedFile(name, size, cache.entry(file).is_file())
            for file, name, size in zip(self.files, self._names(), sizes, strict=True)
        )
        return self._origin(), files, cache.root

    def _names(self) -> list[str]:
        split = [urlsplit(file.url) for file in self.files]
        paths = [unquote(f"{parts.netloc}{parts.path}") for parts in split]
        if not paths:
            return []
        base = posixpath.commonpath([posixpath.dirname(path) for path in paths] or [""])
        return [posixpath.relpath(path, base or ".") for path in paths]

    def _origin(self) -> dict[str, Any]:
        return {"kind": "http", "urls": [file.url for file in self.files]}
