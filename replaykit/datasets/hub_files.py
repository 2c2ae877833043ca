"""Files of Hub repositories: listing, download by the Hub's client, and verification."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from replaykit.datasets.transfers import (
    BUSY,
    Meter,
    Progress,
    Retry,
    Stalled,
    collect,
    difference,
    fetch_all,
    is_local,
    is_offline,
    local_error,
    seconds_to_wait,
)
from replaykit.declared import Count, decode_state, encode_state
from replaykit.errors import DownloadError
from replaykit.filesystem import free_bytes

_LOGIN = "log in (`hf auth login`, or set HF_TOKEN)"


@dataclass(frozen=True)
class Subject:
    """A request to a Hub. Its text is used in error messages."""

    repo_id: str
    revision: str
    endpoint: str
    path: str | None = None

    @property
    def repository(self) -> str:
        return f"dataset repository {self.repo_id!r} at {self.endpoint}"

    def __str__(self) -> str:
        what = f"file {self.path!r} of " if self.path is not None else "the listing of "
        return f"{what}{self.repository}, revision {self.revision}"

    def is_transient(self, error: Exception) -> bool:
        """Return whether a repeated call may succeed."""
        from huggingface_hub import errors as hub

        error = _unwrapped(error)
        if isinstance(error, hub.HfHubHTTPError):
            return _status(error) in BUSY
        lasting = (
            Stalled,
            hub.FileMetadataError,
            hub.LocalEntryNotFoundError,
            hub.OfflineModeIsEnabled,
        )
        return not (isinstance(error, lasting) or _is_strange_answer(error) or is_local(error))

    def retry_after_s(self, error: Exception) -> float | None:
        """Return the wait in seconds that the server requests, or None."""
        response = getattr(error, "response", None)
        return seconds_to_wait(getattr(response, "headers", None) or {})

    def refusal(self, error: Exception) -> Exception | None:
        """Return the exception for an error, or None.

        The result is None if no repository or revision is missing, and access is not refused.
        """
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

    def explain(self, error: Exception) -> Exception:
        """Return the exception to raise for an error of the client."""
        from huggingface_hub import errors as hub

        error = _unwrapped(error)
        refused = self.refusal(error)
        if refused is not None:
            return refused
        status = _status(error)
        if isinstance(error, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)):
            return offline_error(self)
        if isinstance(error, hub.EntryNotFoundError):
            return FileNotFoundError(
                f"there is no {self}, although it was listed: the repository has been rewritten; "
                "list it again, or ask its owner"
            )
        if status in (401, 403):
            return PermissionError(f"access to {self} was refused (HTTP {status}): {_LOGIN}")
        if is_local(error):
            return local_error(error, self, "set HF_HUB_CACHE to a directory that can take it")
        return DownloadError(f"could not fetch {self}: {self._reason(error, status)}")

    def _reason(self, error: Exception, status: int | None) -> str:
        from huggingface_hub import errors as hub

        said = f"{type(error).__name__}: {str(error).strip() or 'no details'}"
        if status is not None:
            asked_s = self.retry_after_s(error)
            later = "later" if asked_s is None else f"in {asked_s:.0f} s"
            return f"the server answered HTTP {status}; try again {later}"
        if isinstance(error, Stalled) or _is_kind(error, "Timeout"):
            return (
                "no answer in time; check the connection, or raise HF_HUB_DOWNLOAD_TIMEOUT and "
                f"HF_HUB_ETAG_TIMEOUT ({said})"
            )
        # If one thread cannot connect, the client closes the session that all threads share. The
        # other threads then get these errors.
        collateral = isinstance(error, (AttributeError, RuntimeError))
        if collateral or _is_kind(error, "ConnectError", "ConnectionRefusedError"):
            return f"the server cannot be reached; check the connection and HF_ENDPOINT ({said})"
        if isinstance(error, hub.FileMetadataError) or _is_strange_answer(error):
            return f"the answer is not that of a Hub; check HF_ENDPOINT and any proxy ({said})"
        return f"the transfer broke off; call again, complete files are kept ({said})"


def offline_error(subject: Subject) -> FileNotFoundError:
    """Return the error for a request that offline mode forbids."""
    return FileNotFoundError(
        f"cannot fetch {subject}: offline mode forbids every request; unset HF_HUB_OFFLINE and "
        "start again with a network, or use data that has been fetched before"
    )


def _unwrapped(error: Exception) -> Exception:
    """Return the cause if an error only states that a file was not located or replaced."""
    from huggingface_hub import errors as hub

    cause, kinds = error.__cause__, (hub.LocalEntryNotFoundError, ValueError)
    if isinstance(error, kinds) and isinstance(cause, Exception):
        return cause
    return error


def _is_strange_answer(error: Exception) -> bool:
    """Return whether an answer was not JSON, such as a web page, or lacked fields."""
    return isinstance(error, (ValueError, KeyError, TypeError))


def _is_kind(error: Exception, *names: str) -> bool:
    # Compared by name, because the client's HTTP library depends on its version.
    return any(name in kind.__name__ for kind in type(error).__mro__ for name in names)


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


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

    @property
    def etag(self) -> str | None:
        """The name of the content on the Hub and in the client's cache."""
        return self.sha256 or self.blob_id


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
            sizes[file.etag or file.path] = file.size
    return sum(sizes.values())


def list_files(
    repo_id: str,
    *,
    directory: str,
    suffix: str,
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
        suffix: the end of the file names, such as ``".h5"``; ``""`` for all files.
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
    subject = Subject(repo_id, revision, endpoint())
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
        files = sorted(map(_hub_file, entries), key=lambda file: file.path)
        return HubListing(repo_id, commit, subject.endpoint, tuple(files))

    listed = retry.run(tree, Subject(repo_id, commit, subject.endpoint), never)
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
    if max_workers < 1:
        raise ValueError(f"max_workers: expected at least 1, got {max_workers}")
    hub = endpoint()
    if not is_offline():
        _require_room(listing)

    def problem(file: HubFile) -> str | None:
        try:
            return difference(entry(listing, file), file.size, file.sha256, file.blob_id)
        except FileNotFoundError:
            return "not in the cache"

    def subject(file: HubFile) -> Subject:
        return Subject(listing.repo_id, listing.commit, hub, file.path)

    def receive(file: HubFile, meter: Meter) -> str | None:
        import huggingface_hub

        is_damaged = False

        def download() -> None:
            nonlocal is_damaged
            meter.begin(file)
            # Another process may have completed the file since the last attempt. If there is no
            # entry, the content that it named may still be damaged.
            path = entry(listing, file)
            if path.exists():
                is_damaged = problem(file) is not None
            if is_damaged:  # without links, the client would keep an entry that exists
                path.unlink(missing_ok=True)
            huggingface_hub.hf_hub_download(
                repo_id=listing.repo_id,
                filename=file.path,
                repo_type="dataset",
                revision=listing.commit,
                cache_dir=cache_root(),
                endpoint=hub,
                etag_timeout=_etag_timeout_s(),
                token=token,
                force_download=is_damaged,
                tqdm_class=meter.bar_class(file),
            )

        retry.run(download, subject(file), meter.cancel)
        return problem(file)

    fetch_all(
        listing.files,
        problem=problem,
        receive=receive,
        name=subject,
        title=f"Downloading {listing.repo_id}",
        cache=f"{cache_root()} for {listing.repo_id!r} at commit {listing.commit}",
        remedy=f", or fill that cache with hf download {listing.repo_id} --repo-type dataset "
        f"--revision {listing.commit}",
        progress=progress,
        max_workers=max_workers,
    )
    return [entry(listing, file) for file in listing.files]


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
    subject: Subject, commit: str, below: str, suffix: str, listed: Iterable[HubFile]
) -> str:
    paths = [file.path for file in listed if file.path.endswith(suffix)]
    others = sorted({path.rpartition("/")[0] or "." for path in paths})
    shown = ", ".join(repr(path) for path in others[:_NAMED_DIRECTORIES]) or "none"
    more = ", ..." if len(others) > _NAMED_DIRECTORIES else ""
    return (
        f"no file *{suffix} below directory {below or '.'!r} in {subject.repository}, commit "
        f"{commit}; directories that hold such files: {shown}{more}"
    )
