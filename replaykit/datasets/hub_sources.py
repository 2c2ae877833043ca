"""The source files of a corpus that is hosted on a Hub."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replaykit.datasets.hub import HubListing, fetch, list_files
from replaykit.datasets.hub_cache import (
    HubCache,
    cache_root,
    is_offline,
    leave_note,
    repository_folder,
)
from replaykit.datasets.planning import PlannedFile, require_room_for_columns
from replaykit.datasets.sources import SourceFile, Sources, sha256_of

__all__ = ["HubFiles"]


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
