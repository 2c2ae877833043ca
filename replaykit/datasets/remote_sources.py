"""Source files of a corpus on a web server or on a Hub."""

from __future__ import annotations

import hashlib
import json
import posixpath
import sys
from contextlib import suppress
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
from replaykit.datasets.hub_files import (
    HubListing,
    cache_root,
    fetch,
    list_files,
    missing_bytes,
    repository_folder,
)
from replaykit.datasets.sources import (
    PlannedFile,
    SourceFile,
    Sources,
    require_room_for_columns,
    sha256_of,
)
from replaykit.datasets.transfers import is_offline, write_note


@dataclass(frozen=True)
class WebFiles:
    """Files on web servers, named by their paths below the deepest common folder.

    Attributes:
        files: the files.
        natural: True to order numbers in file names by value, so that 9 comes before 10.
    """

    files: tuple[WebFile, ...]
    natural: bool = False

    @property
    def location(self) -> str:
        """The host names of the servers, for display."""
        return ", ".join(sorted({urlsplit(file.url).netloc for file in self.files}))

    @property
    def known_bytes(self) -> int | None:
        """Total size of the files in bytes; None unless every size was given."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def sources(self, target: Path | None = None) -> Sources:
        """Fetch and verify the files.

        Args:
            target: the directory of the columns, to check the free space of its disk as well.

        Raises:
            FileNotFoundError, PermissionError, DownloadError, OSError: as in `download`.
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

    def listing(self) -> tuple[dict[str, Any], tuple[PlannedFile, ...], Path]:
        """Return origin, files and cache; request unknown sizes unless offline."""
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
        directory: the directory of the files.
        suffix: the end of the file names, or all their possible ends.
        descriptions: the ends of the names of further files, which describe the files and are
            fetched with them.
        natural: True to order numbers in file names by value, so that 9 comes before 10.
    """

    repo_id: str
    directory: str
    suffix: str | tuple[str, ...]
    descriptions: tuple[str, ...] = ()
    natural: bool = False

    @classmethod
    def of_id(cls, dataset_id: str, suffix: str | tuple[str, ...]) -> HubFiles:
        """Return the files of the repository that an id ``owner/name`` names.

        Raises:
            FileNotFoundError: the id has another form.
        """
        if len(dataset_id.split("/")) != 2:
            raise FileNotFoundError(
                f"{dataset_id!r} names no repository: expected owner/name, or local files with "
                "source="
            )
        return cls(dataset_id, "", suffix, natural=True)

    @property
    def location(self) -> str:
        """The repository, for display."""
        return f"the Hub, {self.repo_id}"

    @property
    def known_bytes(self) -> int | None:
        """None, because only a request to the repository gives the sizes."""
        return None

    def sources(self, target: Path | None = None) -> Sources:
        """List, fetch and verify the files.

        After the fetch, the listing is stored in the client's cache. In offline mode, the last
        stored listing names the files.

        Args:
            target: the directory of the columns. The free space of its disk is checked as well.

        Raises:
            FileNotFoundError, PermissionError, DownloadError, OSError, ImportError: as in
                `list_files` and `fetch`.
        """
        listing = self._listing()
        if target is not None and not is_offline():
            missing = missing_bytes(listing, listing.files)
            require_room_for_columns(cache_root(), missing, target, listing.nbytes)
        paths = fetch(listing, progress=sys.stderr.isatty())
        _remember(listing, self.directory, self._kind)
        files = tuple(
            SourceFile(path, file.path, file.size, file.sha256 or sha256_of(path), is_verified=True)
            for path, file in zip(paths, listing.files, strict=True)
            if file.path.endswith(self.suffix)
        )
        return Sources(files, _origin(listing), self.natural)

    def listing(self) -> tuple[dict[str, Any], tuple[PlannedFile, ...], Path]:
        """Return origin, files and cache from one listing, without fetching files."""
        listing = self._listing()
        files = tuple(
            PlannedFile(file.path, file.size, not missing_bytes(listing, [file]))
            for file in listing.files
        )
        return _origin(listing), files, cache_root()

    @property
    def _kind(self) -> str:
        return "".join((*self._suffixes, *self.descriptions))

    @property
    def _suffixes(self) -> tuple[str, ...]:
        return (self.suffix,) if isinstance(self.suffix, str) else self.suffix

    def _listing(self) -> HubListing:
        known = _recall(self.repo_id, self.directory, self._kind) if is_offline() else None
        if known is not None:
            return known
        ends = (*self._suffixes, *self.descriptions)
        suffix = ends[0] if len(ends) == 1 else ""
        listing = list_files(self.repo_id, directory=self.directory, suffix=suffix)
        wanted = [f for f in listing.files if f.path.endswith(ends)]
        return replace(listing, files=tuple(wanted))


def _origin(listing: HubListing) -> dict[str, Any]:
    return {
        "kind": "hub",
        "repository": listing.repo_id,
        "commit": listing.commit,
        "endpoint": listing.endpoint,
    }


def _memory(repo_id: str, directory: str, suffix: str) -> Path:
    """Return the path of a stored listing, in the cache of the files."""
    name = hashlib.sha256(f"{directory}\0{suffix}".encode()).hexdigest()[:16]
    return repository_folder(repo_id) / "replaykit" / f"{name}.json"


def _recall(repo_id: str, directory: str, suffix: str) -> HubListing | None:
    try:
        text = _memory(repo_id, directory, suffix).read_text(encoding="utf-8")
        return HubListing.from_json(json.loads(text))
    except (OSError, ValueError):
        return None


def _remember(listing: HubListing, directory: str, suffix: str) -> None:
    """Store a listing after all its files have been fetched."""
    with suppress(OSError):  # a cache that cannot be written is usable without the listing
        write_note(_memory(listing.repo_id, directory, suffix), json.dumps(listing.to_json()))
