"""Files of Hub repositories: listing, download by the Hub's client, and verification."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from replaykit.datasets.sources import (
    PlannedFile,
    SourceFile,
    Sources,
    require_room_for_columns,
    sha256_of,
)
from replaykit.datasets.transfers import (
    Cancelled,
    Meter,
    Progress,
    Retry,
    Subject,
    collect,
    difference,
    fetch_all,
    is_offline,
    write_note,
)
from replaykit.declared import Count, decode_state, encode_state
from replaykit.errors import DownloadError
from replaykit.filesystem import free_bytes

_LOGIN = "log in (`hf auth login`, or set HF_TOKEN)"


@dataclass(frozen=True)
class HubSubject(Subject):
    """A request to a Hub."""

    repo_id: str
    revision: str
    endpoint: str
    path: str | None = None

    again = "call again, complete files are kept"
    cache = "HF_HUB_CACHE"
    login = f": {_LOGIN}"
    limits = ", or raise HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT"
    settings = "HF_ENDPOINT"
    # If one thread cannot connect, the client closes the session that all threads share. The other
    # threads then get these errors.
    unreachable = (AttributeError, RuntimeError)

    @property
    def repository(self) -> str:
        return f"dataset repository {self.repo_id!r} at {self.endpoint}"

    def __str__(self) -> str:
        what = f"file {self.path!r} of " if self.path is not None else "the listing of "
        return f"{what}{self.repository}, revision {self.revision}"

    def special(self, error: Exception) -> Exception | None:
        """Return the exception for an error of the client after which no attempt helps."""
        from huggingface_hub import errors as hub

        refused = self.refusal(error)
        if refused is not None:
            return refused
        if isinstance(error, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)):
            return offline_error(self)
        if isinstance(error, hub.EntryNotFoundError):
            return FileNotFoundError(
                f"there is no {self}, although it was listed: the repository has been rewritten; "
                "list it again, or ask its owner"
            )
        # An answer is not JSON, such as a web page, or lacks fields.
        if isinstance(error, (hub.FileMetadataError, ValueError, KeyError, TypeError)):
            return DownloadError(
                f"could not fetch {self}: the answer is not that of a Hub; check HF_ENDPOINT and "
                f"any proxy ({type(error).__name__}: {error})"
            )
        return None

    def refusal(self, error: Exception) -> Exception | None:
        """Return the exception for a missing repository or revision, or for refused access."""
        from huggingface_hub import errors as hub

        where = self.repository
        if isinstance(error, hub.GatedRepoError):
            return PermissionError(
                f"access to {where} is gated: accept its owner's conditions on its page, then "
                f"{_LOGIN}"
            )
        if isinstance(error, hub.RepositoryNotFoundError):
            return FileNotFoundError(
                f"there is no {where} that you may see: check the id and HF_ENDPOINT; if it is "
                f"private, {_LOGIN}"
            )
        if isinstance(error, hub.RevisionNotFoundError):
            return FileNotFoundError(
                f"there is no revision {self.revision!r} in {where}: give a branch, a tag or a "
                "commit id that exists there"
            )
        return None


def offline_error(subject: HubSubject) -> FileNotFoundError:
    """Return the error for a request that offline mode forbids."""
    return FileNotFoundError(
        f"cannot fetch {subject}: offline mode forbids every request; unset HF_HUB_OFFLINE and "
        "start again with a network, or use data that has been fetched before"
    )


_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPO_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class HubFile:
    """One file of a repository at one commit.

    Attributes:
        path: the path in the repository, with ``/`` between parts.
        size: the size in bytes.
        sha256: the SHA-256 of the content, 64 hexadecimal digits. It is known for files in LFS.
        blob_id: git's id, 40 hexadecimal digits. Without ``sha256``, ``blob_id`` identifies the
            content. With ``sha256``, it is the id of the LFS pointer, and does not identify the
            content.

    Raises:
        ValueError: the path leaves the repository, the size is negative, or a hash is malformed.

    Example:
        >>> from replaykit.datasets.hub_files import HubFile
        >>> HubFile("door/seed0/a.h5", 3, None, None).size
        3
        >>> HubFile("../a.h5", 3, None, None)
        Traceback (most recent call last):
        ...
        ValueError: path: expected a relative path like 'dir/file.h5', got '../a.h5'
    """

    path: str
    size: Count
    sha256: str | None
    blob_id: str | None

    def __post_init__(self) -> None:
        # The path comes from a server and becomes a local path, so it must stay in the cache.
        parts = self.path.split("/")
        if "\\" in self.path or "\0" in self.path or any(p in ("", ".", "..") for p in parts):
            raise ValueError(
                f"path: expected a relative path like 'dir/file.h5', got {self.path!r}"
            )
        if self.size < 0:
            raise ValueError(f"size of {self.path!r}: expected bytes >= 0, got {self.size}")
        for name, form in (("sha256", _SHA256), ("blob_id", _COMMIT)):
            value = getattr(self, name)
            if value is not None and not form.fullmatch(value):
                raise ValueError(
                    f"{name} of {self.path!r}: expected lower-case hexadecimal, got {value!r}"
                )


@dataclass(frozen=True)
class HubListing:
    """The files of a data set in a repository, pinned to one commit.

    A listing contains all information for a later fetch or check, which may be offline. A manifest
    can store its ``to_json()``. ``endpoint`` is the Hub that sent the listing. A fetch uses the
    endpoint of the environment instead.

    Raises:
        ValueError: the repository id or commit is malformed, or a path occurs twice.

    Example:
        >>> from replaykit.datasets.hub_files import HubListing
        >>> listing = HubListing("me/data", "0" * 40, "http://127.0.0.1:1", ())
        >>> HubListing.from_json(listing.to_json()) == listing
        True
    """

    repo_id: str
    commit: str
    endpoint: str
    files: tuple[HubFile, ...]

    def __post_init__(self) -> None:
        check_repo_id(self.repo_id)
        if not _COMMIT.fullmatch(self.commit):
            raise ValueError(f"commit: expected 40 hexadecimal digits, got {self.commit!r}")
        if len({file.path for file in self.files}) < len(self.files):
            paths = [file.path for file in self.files]
            twice = sorted({path for path in paths if paths.count(path) > 1})
            raise ValueError(f"files: expected every path once, got twice: {twice}")

    @property
    def nbytes(self) -> int:
        """Total size of the files, in bytes."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return the listing as JSON values for ``from_json``."""
        return encode_state(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HubListing:
        """Return the listing from the JSON values of ``to_json``.

        Raises:
            ValueError: ``data`` is not a listing. The message gives the reason.
        """
        return decode_state(cls, data, "the JSON of a Hub listing")


def check_repo_id(repo_id: str) -> None:
    """Raise ValueError unless ``repo_id`` is ``name`` or ``owner/name``."""
    if not _REPO_ID.fullmatch(repo_id) or ".." in repo_id or "--" in repo_id:
        raise ValueError(
            f"repo_id: expected 'owner/name' in letters, digits, '-._', got {repo_id!r}"
        )


def is_commit(revision: str) -> bool:
    """Return whether ``revision`` is a full commit id, not a branch or tag."""
    return _COMMIT.fullmatch(revision) is not None


_DEFAULT_ENDPOINT = "https://huggingface.co"
_DEFAULT_TIMEOUT_S = 10
_NAMED_DIRECTORIES = 10


def endpoint() -> str:
    """Return the Hub's URL from HF_ENDPOINT, which the client reads at import only."""
    return (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


def cache_root() -> Path:
    """Return the client's cache folder from HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME."""
    env = os.environ.get
    home = env("HF_HOME") or os.path.join(env("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    root = env("HF_HUB_CACHE") or env("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(root))))


def repository_folder(repo_id: str) -> Path:
    """Return the folder of a dataset repository in the client's cache."""
    return cache_root() / "--".join(["datasets", *repo_id.split("/")])


def entry(listing: HubListing, file: HubFile) -> Path:
    """Return the path of a file in the client's cache, whether it exists or not."""
    folder = repository_folder(listing.repo_id)
    return folder.joinpath("snapshots", listing.commit, *file.path.split("/"))


def missing_bytes(listing: HubListing, files: Iterable[HubFile]) -> int:
    """Return the total size of the files that are not in the cache. Equal files count once."""
    sizes = {}
    for file in files:
        path = entry(listing, file)
        if not path.is_file() or path.stat().st_size != file.size:
            sizes[file.sha256 or file.blob_id or file.path] = file.size
    return sum(sizes.values())


def list_files(
    repo_id: str,
    *,
    directory: str,
    suffix: str | tuple[str, ...],
    revision: str = "main",
    token: str | None = None,
    retry: Retry = Retry(),  # noqa: B008 - frozen
) -> HubListing:
    """Return the files below a directory of a dataset repository, at one commit.

    The revision is first resolved to a commit, so a later push to the branch has no effect. The
    directory must match whole path components: ``a/64px`` does not match ``a/64px_extra``. Files
    are sorted by path in plain string order.

    Args:
        repo_id: ``owner/name``.
        directory: the directory of the files, at any depth; ``""`` for the whole repository.
        suffix: the end of the file names, such as ``".h5"``, or all their possible ends; ``""``
            for all files.
        revision: a branch, a tag, or a full or abbreviated commit id.
        token: for repositories that are not public; by default the client's token.
        retry: the attempts and waits after failures of a server.

    Raises:
        FileNotFoundError: the repository, the revision or such a file does not exist, or offline
            mode is on.
        PermissionError: the repository is gated, or refuses access.
        DownloadError: the server cannot be reached, fails, or does not answer as a Hub does.
        ValueError: ``repo_id`` is malformed.

    Cost: one request for the commit unless a full commit id is given, and one request per 1000
    files of the repository.
    """
    check_repo_id(repo_id)
    subject = HubSubject(repo_id, revision, endpoint())
    if is_offline():
        raise offline_error(subject)
    from huggingface_hub import HfApi

    api = HfApi(endpoint=subject.endpoint, token=token)
    never = threading.Event()

    def resolve() -> str:
        timeout_s = _etag_timeout_s()
        commit = api.dataset_info(repo_id, revision=revision, timeout=timeout_s).sha
        if not isinstance(commit, str) or not is_commit(commit):
            raise ValueError(f"expected a full commit id for {revision!r}, got {commit!r}")
        return commit

    commit = revision if is_commit(revision) else retry.run(resolve, subject, never)

    def tree() -> HubListing:
        pages = partial(
            api.list_repo_tree, repo_id, recursive=True, revision=commit, repo_type="dataset"
        )
        # Directories have no size.
        entries = [entry for entry in collect(pages, retry.stall_s) if hasattr(entry, "size")]
        entries.sort(key=lambda entry: entry.path)
        return HubListing(repo_id, commit, subject.endpoint, tuple(map(_hub_file, entries)))

    listed = retry.run(tree, HubSubject(repo_id, commit, subject.endpoint), never)
    below = directory.strip("/") + "/" if directory.strip("/") else ""
    chosen = [f for f in listed.files if f.path.startswith(below) and f.path.endswith(suffix)]
    if not chosen:
        raise FileNotFoundError(_nothing_there(subject, commit, below, suffix, listed.files))
    return replace(listed, files=tuple(chosen))


def fetch(
    listing: HubListing,
    *,
    progress: bool | Callable[[Progress], object] = False,
    max_workers: int = 4,
    token: str | None = None,
    retry: Retry = Retry(),  # noqa: B008 - frozen
) -> list[Path]:
    """Return the local paths of a listing's files, after the Hub's client fetched missing files.

    Each file is verified by size and hash. Cached files need no request. Missing files are fetched
    at the listing's commit. A file that fails verification is fetched again, once. The call returns
    all files or raises an error. Complete files stay in the cache for the next call. After a broken
    connection, the client continues a file; after the end of the process, it begins it again.

    Args:
        listing: the result of `list_files`, or a listing from stored JSON.
        progress: True shows a bar on stderr. A function is called with a `Progress`, never by two
            threads at once. An error in the function ends the fetch, and is raised to the caller.
        max_workers: number of files that are fetched at once.
        token: the token for repositories that are not public; by default the client's token.
        retry: the attempts and waits after failures of a server.

    Raises:
        FileNotFoundError: the repository, the commit or a file no longer exists. Or files are
            missing in offline mode; the message names all of them.
        PermissionError: the repository is gated, or refuses access.
        DownloadError: a file could not be fetched, or failed verification.
        OSError: the disk has too little room (``ENOSPC``), or the cache cannot be written. The room
            is checked before the first request.
        ValueError: ``max_workers`` is below 1.

    Cost: every file is read once for its hash. ``max_workers`` files are read at once. Memory: the
    blocks of 10 MiB of the client per worker.
    """
    if not is_offline():
        _require_room(listing)
    fetcher = HubFetcher(listing, endpoint(), token)
    fetch_all(
        fetcher,
        {file: file.size for file in listing.files},
        title=f"Downloading {listing.repo_id}",
        cache=f"{cache_root()} for {listing.repo_id!r} at commit {listing.commit}",
        remedy=f", or fill that cache with hf download {listing.repo_id} --repo-type dataset "
        f"--revision {listing.commit}",
        progress=progress,
        max_workers=max_workers,
        retry=retry,
    )
    return [fetcher.entry(file) for file in listing.files]


@dataclass(frozen=True)
class HubFetcher:
    """Fetches the files of a listing with the Hub's client, into the client's cache."""

    listing: HubListing
    endpoint: str
    token: str | None

    def entry(self, file: HubFile) -> Path:
        """Return the path of a file in the cache, whether it exists or not."""
        return entry(self.listing, file)

    def problem(self, file: HubFile) -> str | None:
        """Return the problem of a cached file, or None if it is verified."""
        try:
            return difference(self.entry(file), file.size, file.sha256, file.blob_id)
        except FileNotFoundError:
            return "not in the cache"

    def subject(self, file: HubFile) -> HubSubject:
        """Return the request for a file."""
        return HubSubject(self.listing.repo_id, self.listing.commit, self.endpoint, file.path)

    def receive(self, file: HubFile, meter: Meter) -> str | None:
        """Fetch a file, or replace a damaged one; return the problem of its bytes, or None."""
        import huggingface_hub

        # Another process may have completed the file since the last attempt.
        is_damaged = self.entry(file).exists() and self.problem(file) is not None
        if is_damaged:  # without links, the client would keep an entry that exists
            self.entry(file).unlink(missing_ok=True)
        meter.begin(file)
        huggingface_hub.hf_hub_download(
            repo_id=self.listing.repo_id,
            filename=file.path,
            repo_type="dataset",
            revision=self.listing.commit,
            cache_dir=cache_root(),
            endpoint=self.endpoint,
            etag_timeout=_etag_timeout_s(),
            token=self.token,
            force_download=is_damaged,
            tqdm_class=_bar_class(file, meter),
        )
        return self.problem(file)


# A download that receives more than this many copies and bytes would restart forever.
_MOST_COPIES: Final = 6
_MOST_EXTRA: Final = 64 << 20


def _bar_class(file: HubFile, meter: Meter) -> type[Any]:
    """Return a progress bar class for the client that counts and shows nothing.

    Its ``update`` is the only place that can cancel a running download.
    """
    from tqdm import tqdm

    most = _MOST_COPIES * file.size + _MOST_EXTRA

    class Bar(tqdm):
        monitor_interval = 0  # no monitor thread

        def __init__(self, *args: object, total: float | None = None, **kwargs: object) -> None:
            super().__init__(disable=True, total=total)
            self.gross = 0

        def update(self, n: float | None = 1) -> bool | None:
            if meter.cancel.is_set():
                raise Cancelled
            step = int(n or 0)
            self.n += step
            self.gross += max(0, step)
            if self.gross > most:
                raise ConnectionError(
                    f"received {self.gross:,} bytes of a file of {file.size:,} and no end"
                )
            meter.add(file, step)
            return None

        def update_transfer(self, n: float) -> None:
            """Ignore the bytes on the wire, which may be fewer than the bytes of the file."""

    return Bar


def _require_room(listing: HubListing) -> None:
    """Check that the missing bytes fit on the disk, before anything is written."""
    needed, free = missing_bytes(listing, listing.files), free_bytes(cache_root())
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"not enough disk space to download {listing.repo_id!r}: {needed:,} bytes are "
            f"missing, {free:,} are free; free some space, or set HF_HUB_CACHE to a larger disk",
            str(cache_root()),
        )


def _etag_timeout_s() -> int:
    value = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return int(value) if value.isdigit() and int(value) else _DEFAULT_TIMEOUT_S


def _hub_file(entry: Any) -> HubFile:
    sha256 = None if entry.lfs is None else entry.lfs.sha256
    return HubFile(entry.path, entry.size, sha256, entry.blob_id)


def _nothing_there(
    subject: HubSubject,
    commit: str,
    below: str,
    suffix: str | tuple[str, ...],
    listed: tuple[HubFile, ...],
) -> str:
    paths = [file.path for file in listed if file.path.endswith(suffix)]
    ends = " or ".join(f"*{end}" for end in ((suffix,) if isinstance(suffix, str) else suffix))
    others = sorted({path.rpartition("/")[0] or "." for path in paths})
    shown = ", ".join(repr(path) for path in others[:_NAMED_DIRECTORIES]) or "none"
    more = ", ..." if len(others) > _NAMED_DIRECTORIES else ""
    return (
        f"no file {ends} below directory {below or '.'!r} in {subject.repository}, commit "
        f"{commit}; directories that hold such files: {shown}{more}"
    )


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
        _remember(listing, self.directory, self._ends)
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
    def _ends(self) -> tuple[str, ...]:
        suffixes = (self.suffix,) if isinstance(self.suffix, str) else self.suffix
        return (*suffixes, *self.descriptions)

    def _listing(self) -> HubListing:
        known = _recall(self.repo_id, self.directory, self._ends) if is_offline() else None
        return known or list_files(self.repo_id, directory=self.directory, suffix=self._ends)


def _origin(listing: HubListing) -> dict[str, Any]:
    return {
        "kind": "hub",
        "repository": listing.repo_id,
        "commit": listing.commit,
        "endpoint": listing.endpoint,
    }


def _memory(repo_id: str, directory: str, ends: tuple[str, ...]) -> Path:
    """Return the path of a stored listing, in the cache of the files."""
    name = hashlib.sha256(f"{directory}\0{''.join(ends)}".encode()).hexdigest()[:16]
    return repository_folder(repo_id) / "replaykit" / f"{name}.json"


def _recall(repo_id: str, directory: str, ends: tuple[str, ...]) -> HubListing | None:
    try:
        text = _memory(repo_id, directory, ends).read_text(encoding="utf-8")
        return HubListing.from_json(json.loads(text))
    except (OSError, ValueError):
        return None


def _remember(listing: HubListing, directory: str, ends: tuple[str, ...]) -> None:
    """Store a listing after all its files have been fetched."""
    with suppress(OSError):  # a cache that cannot be written is usable without the listing
        write_note(_memory(listing.repo_id, directory, ends), json.dumps(listing.to_json()))
