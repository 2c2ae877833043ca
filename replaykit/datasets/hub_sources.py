"""The source files of a corpus that is hosted on a Hub."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from replaykit.datasets.hub import HubListing, fetch, list_files
from replaykit.datasets.hub_cache import is_offline
from replaykit.datasets.sources import SourceFile, Sources, sha256_of

__all__ = ["hub_sources"]


def hub_sources(repo_id: str, directory: str, *, suffix: str, memory: Path) -> Sources:
    """Lists, fetches and verifies the files below a directory of a dataset repository.

    Args:
        repo_id: ``owner/name``.
        directory: below which the files lie.
        suffix: how their names end.
        memory: file in which the listing is kept. Where the network is turned off, what it says
            is taken from the client's cache, if that is complete.

    Raises:
        FileNotFoundError, PermissionError, DownloadError, OSError, ImportError: as `list_files`
            and `fetch` do.
    """
    if is_offline() and memory.exists():
        listing = HubListing.from_json(json.loads(memory.read_text(encoding="utf-8")))
    else:
        listing = list_files(repo_id, directory=directory, suffix=suffix)
        _remember(memory, listing)
    paths = fetch(listing, progress=sys.stderr.isatty())
    files = tuple(
        SourceFile(path, file.path, file.size, file.sha256 or sha256_of(path))
        for path, file in zip(paths, listing.files, strict=True)
    )
    origin = {
        "kind": "hub",
        "repository": listing.repo_id,
        "commit": listing.commit,
        "endpoint": listing.endpoint,
    }
    return Sources(files, origin)


def _remember(memory: Path, listing: HubListing) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    draft = memory.with_name(f"{memory.name}.{os.getpid()}")
    draft.write_text(json.dumps(listing.to_json()), encoding="utf-8")
    draft.replace(memory)
