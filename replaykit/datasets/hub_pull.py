"""Pulling a data set that was pushed: at one commit, verified, mapped where it lies."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from replaykit.buffer.generic import SamplerT
from replaykit.datasets.checksum import crc32_of_file
from replaykit.datasets.corpus import CorpusExperienceReplay
from replaykit.datasets.hub import HubFile, HubListing, fetch, list_files
from replaykit.datasets.hub_cache import cache_root, endpoint, is_offline, leave_note
from replaykit.datasets.hub_errors import Subject, offline_error
from replaykit.datasets.hub_listing import check_repo_id, is_commit
from replaykit.datasets.hub_push import FORMAT_TAG
from replaykit.datasets.manifest import MANIFEST_NAME, Manifest
from replaykit.datasets.publish import ensure_published, hold_back
from replaykit.datasets.retry import Retry
from replaykit.datasets.transfer import Progress
from replaykit.errors import DownloadError
from replaykit.filesystem import disk_errors, require_room

__all__ = ["pull"]

_META_NAME: Final = "meta.json"
_REVISIONS: Final = ".revisions"


def pull(
    repo_id: str,
    *,
    revision: str | None = None,
    root: str | Path | None = None,
    batch_size: int | None = None,
    token: str | None = None,
    progress: bool | Callable[[Progress], object] = False,
    retry: Retry = Retry(),  # noqa: B008 - frozen
    sampler: SamplerT | Callable[[], SamplerT] | None = None,
    **kwargs: Any,
) -> CorpusExperienceReplay[SamplerT]:
    """Opens a data set of a Hub repository, and fetches it first where it is not there.

    The revision is resolved to a commit, every file is fetched at that commit and verified against
    the Hub's hashes and the manifest's checksums, and the data set appears complete or not at all,
    bit for bit as it was pushed. It lies in ``<root>/<owner>/<name>/<commit>``: commits lie beside
    one another, and a data set that is open never changes. Files of a download that broke off are
    kept in the client's cache and not fetched again; processes that ask for one commit at once
    share one download. Offline, and with a full commit id, what is there is opened without a
    request.

    Args:
        repo_id: ``owner/name``.
        revision: branch, tag or commit id; by default ``main``.
        root: folder of the pulled data sets; ``~/.cache/replaykit/pulled``.
        batch_size: default number of rows of a sample.
        token: for repositories that are not public; by default the client's own.
        progress: True for a bar on stderr, or a function that is called with a `Progress`.
        retry: how long to go on with a server that fails.
        sampler: which rows come next; ``RandomSampler()``.
        kwargs: other arguments of `CorpusExperienceReplay`, such as ``split``.

    Raises:
        FileNotFoundError: no such repository or revision, or no data set in it; or offline mode,
            and it is not there.
        PermissionError: the repository is gated, or refuses access.
        DownloadError: the server fails, or what it has does not verify.
        OSError: there is no room.
        ValueError: a malformed ``repo_id``.

    Cost: reads every file twice, once for each checksum. The files are linked, not copied, where
    the client's cache is on the same file system.

    Example: see `push`.
    """
    check_repo_id(repo_id)
    base = Path.home() / ".cache" / "replaykit" / "pulled" if root is None else Path(root)
    folder = base.joinpath(*repo_id.split("/"))
    wanted = "main" if revision is None else revision
    options: dict[str, Any] = {"token": token, "retry": retry}
    listing, commit = None, wanted if is_commit(wanted) else None
    if is_offline():
        commit = commit or _recall(folder, wanted)
        if commit is None or not (folder / commit).exists():
            raise offline_error(Subject(repo_id, wanted, endpoint()))
    elif commit is None or not (folder / commit).exists():
        listing = list_files(repo_id, directory="", suffix="", revision=wanted, **options)
        commit = listing.commit

    def build(directory: Path) -> bytes:
        # Also where it has vanished since it was looked for: then there is no listing.
        found = listing or list_files(repo_id, directory="", suffix="", revision=commit, **options)
        return _receive(found, directory, progress, options)

    published = ensure_published(folder / commit, build)
    _remember(folder, wanted, published.path.name)
    return CorpusExperienceReplay(published.path, batch_size, sampler=sampler, **kwargs)


def _receive(
    listing: HubListing,
    directory: Path,
    progress: bool | Callable[[Progress], object],
    options: Mapping[str, Any],
) -> bytes:
    """Fills a directory with the files of a data set; returns the text of its manifest."""
    known = {file.path: file for file in listing.files}
    if MANIFEST_NAME not in known:
        raise FileNotFoundError(
            f"dataset repository {listing.repo_id!r} has no {MANIFEST_NAME} at commit "
            f"{listing.commit}: it holds no data set that was pushed by replaykit"
        )
    first = replace(listing, files=(known[MANIFEST_NAME],))
    text = fetch(first, **options)[0].read_bytes()
    try:
        manifest = Manifest.parse(text)
    except ValueError as error:
        raise DownloadError(
            f"dataset repository {listing.repo_id!r} at commit {listing.commit}: its "
            f"{MANIFEST_NAME} {error}; what this version can read, if there is any, has the tag "
            f"{FORMAT_TAG!r}"
        ) from error
    checksums = {name: (size, crc32) for name, size, crc32 in manifest.files()}
    descriptions = {name for name in known if name.rpartition("/")[2] == _META_NAME}
    missing = sorted(({*checksums, _META_NAME}) - known.keys())
    if missing:
        raise _broken(listing, f"has no {', '.join(missing)}, which its {MANIFEST_NAME} names")
    files = tuple(known[name] for name in sorted({*checksums, *descriptions}))
    for file in files:
        if file.path in checksums and file.size != checksums[file.path][0]:
            expected = checksums[file.path][0]
            raise _broken(
                listing, f"has {file.path} with {file.size:,} bytes, expected {expected:,}"
            )
    _require_room(directory, files)
    chosen = replace(listing, files=files)
    paths = fetch(chosen, progress=progress, **options)
    for file, path in zip(files, paths, strict=True):
        target = directory.joinpath(*file.path.split("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        _place(path, target, file)
        if file.path in checksums and crc32_of_file(target) != checksums[file.path][1]:
            raise _broken(listing, f"has another {file.path} than its {MANIFEST_NAME} says")
    hold_back(directory)
    return text


def _broken(listing: HubListing, what: str) -> DownloadError:
    return DownloadError(
        f"dataset repository {listing.repo_id!r} {what} (commit {listing.commit}): it was damaged "
        "after it was pushed; ask its owner to push it again"
    )


def _require_room(directory: Path, files: tuple[HubFile, ...]) -> None:
    """Checks for room where files will be copied; `fetch` does where they are received."""
    cache = cache_root()
    while not cache.exists():
        cache = cache.parent
    if cache.stat().st_dev != directory.stat().st_dev:
        sizes = [file.size for file in files]
        require_room(directory, sum(sizes), max(sizes))


def _place(path: Path, target: Path, file: HubFile) -> None:
    """Links a file of the cache to its place, or copies it where that cannot be."""
    source = os.path.realpath(path)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
            raise
        with disk_errors(target, file.size):
            shutil.copyfile(source, target)


def _recall(folder: Path, revision: str) -> str | None:
    """Returns the commit that a branch or tag was at when it was pulled last."""
    try:
        commit = _note(folder, revision).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return commit if is_commit(commit) else None


def _remember(folder: Path, revision: str, commit: str) -> None:
    if is_commit(revision) or _recall(folder, revision) == commit:
        return
    leave_note(_note(folder, revision), commit)


def _note(folder: Path, revision: str) -> Path:
    return folder / _REVISIONS / quote(revision, safe="")
