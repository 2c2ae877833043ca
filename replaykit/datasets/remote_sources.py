"""List the source files of a corpus on a web server or on a Hub."""

from __future__ import annotations

import hashlib
import json
import posixpath
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from replaykit.datasets.http_files import (
    DownloadCache,
    WebFile,
    default_downloads,
    fetch_files,
    sizes_of,
)
from replaykit.datasets.hub_cache import (
    HubCache,
    cache_root,
    is_offline,
    leave_note,
    repository_folder,
)
from replaykit.datasets.hub_files import HubListing, fetch, list_files
from replaykit.datasets.sources import (
    PlannedFile,
    SourceFile,
    Sources,
    require_room_for_columns,
    sha256_of,
)

__all__ = ["HubFiles", "WebFiles"]


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


@dataclass(frozen=True)
class HubFiles:
    """The files below a directory of a dataset repository.

    Attributes:
        repo_id: ``owner/name``.
        directory: below which the files lie.
        suffix: how their names end.
        beside: how the names of files end that describe them, and are fetched with them.
        natural: whether numbers in the names compare as numbers.
    """

    repo_id: str
    directory: str
    suffix: str
    beside: tuple[str, ...] = ()
    natural: bool = False

    @property
    def place(self) -> str:
        """The repository, for people."""
        return f"the Hub, {self.repo_id}"

    @property
    def known_bytes(self) -> int | None:
        """None: a repository must be asked."""
        return None

    def sources(self, target: Path | None = None) -> Sources:
        """Lists, fetches and verifies the files.

        Once all of them are there, the listing is kept beside them in the client's cache. Where
        the network is turned off, the files are those of the last listing that was kept.

        Args:
            target: where columns will be made of them, if their room is to be looked at as well.

        Raises:
            FileNotFoundError, PermissionError, DownloadError, OSError, ImportError: as
                `list_files` and `fetch` do.
        """
        listing = self._listing()
        if target is not None and not is_offline():
            cache = HubCache(cache_root(), listing.repo_id, listing.commit)
            missing, total = cache.missing_bytes(listing.files), sum(f.size for f in listing.files)
            require_room_for_columns(cache.root, missing, target, total)
        paths = fetch(listing, progress=sys.stderr.isatty())
        _remember(listing, self.directory, self._kind)
        files = tuple(
            SourceFile(path, file.path, file.size, file.sha256 or sha256_of(path), is_verified=True)
            for path, file in zip(paths, listing.files, strict=True)
            if file.path.endswith(self.suffix)
        )
        return Sources(files, _origin(listing), self.natural)

    def look(self) -> tuple[dict[str, Any], tuple[PlannedFile, ...], Path]:
        """Returns origin, files and cache; one listing, and no file is fetched."""
        listing = self._listing()
        cache = HubCache(cache_root(), listing.repo_id, listing.commit)
        files = tuple(
            PlannedFile(file.path, file.size, not cache.missing_bytes([file]))
            for file in listing.files
        )
        return _origin(listing), files, cache.root

    @property
    def _kind(self) -> str:
        return "".join((self.suffix, *self.beside))

    def _listing(self) -> HubListing:
        known = _recall(self.repo_id, self.directory, self._kind) if is_offline() else None
        if known is not None:
            return known
        suffix = "" if self.beside else self.suffix
        listing = list_files(self.repo_id, directory=self.directory, suffix=suffix)
        wanted = [f for f in listing.files if f.path.endswith((self.suffix, *self.beside))]
        return replace(listing, files=tuple(wanted))


def _origin(listing: HubListing) -> dict[str, Any]:
    return {
        "kind": "hub",
        "repository": listing.repo_id,
        "commit": listing.commit,
        "endpoint": listing.endpoint,
    }


def _memory(repo_id: str, directory: str, suffix: str) -> Path:
    """Returns where a listing is kept: with the files, whichever root they are converted to."""
    name = hashlib.sha256(f"{directory}\0{suffix}".encode()).hexdigest()[:16]
    return cache_root() / repository_folder(repo_id) / "replaykit" / f"{name}.json"


def _recall(repo_id: str, directory: str, suffix: str) -> HubListing | None:
    try:
        text = _memory(repo_id, directory, suffix).read_text(encoding="utf-8")
        return HubListing.from_json(json.loads(text))
    except (OSError, ValueError):
        return None


def _remember(listing: HubListing, directory: str, suffix: str) -> None:
    """Keeps a listing of which every file is in the cache; one that is not stays as it was."""
    leave_note(_memory(listing.repo_id, directory, suffix), json.dumps(listing.to_json()))
