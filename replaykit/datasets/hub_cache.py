"""Descriptions of Hub repositories, their errors, and the cache of the Hub client."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replaykit.datasets.transfers import BUSY, Stalled, is_local, local_error, seconds_to_wait
from replaykit.declared import Count, decode_state, encode_state
from replaykit.errors import DownloadError

__all__ = [
    "HubCache",
    "HubFile",
    "HubListing",
    "Subject",
    "cache_root",
    "endpoint",
    "is_offline",
    "offline_error",
    "refusal",
    "repository_folder",
    "text_hint",
    "write_marker",
]

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
        return _is_transient(error)

    def retry_after_s(self, error: Exception) -> float | None:
        """Return the wait in seconds that the server requests, or None."""
        return _retry_after_s(error)

    def explain(self, error: Exception) -> Exception:
        """Return the exception to raise for an error of the client."""
        return _explain(error, self)


def _is_transient(error: Exception) -> bool:
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


def refusal(error: Exception, subject: Subject) -> Exception | None:
    """Return the exception for an error, or None.

    The result is None if no repository or revision is missing, and access is not refused.
    """
    from huggingface_hub import errors as hub

    where = subject.repository
    if isinstance(error, hub.GatedRepoError):
        return PermissionError(
            f"access to {where} is gated: accept its owner's conditions on its page, then {_LOGIN}"
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        return FileNotFoundError(
            f"there is no {where} that you may see: check the id and HF_ENDPOINT; if it is "
            f"private, {_LOGIN}"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return FileNotFoundError(
            f"there is no revision {subject.revision!r} in {where}: give a branch, a tag or a "
            "commit id that exists there"
        )
    return None


def _explain(error: Exception, subject: Subject) -> Exception:
    from huggingface_hub import errors as hub

    error = _unwrapped(error)
    refused = refusal(error, subject)
    if refused is not None:
        return refused
    status = _status(error)
    if isinstance(error, (hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError)):
        return offline_error(subject)
    if isinstance(error, hub.EntryNotFoundError):
        return FileNotFoundError(
            f"there is no {subject}, although it was listed: the repository has been rewritten; "
            "list it again, or ask its owner"
        )
    if status in (401, 403):
        return PermissionError(f"access to {subject} was refused (HTTP {status}): {_LOGIN}")
    if is_local(error):
        return local_error(error, subject, "set HF_HUB_CACHE to a directory that can take it")
    return DownloadError(f"could not fetch {subject}: {_reason(error, status)}")


def offline_error(subject: Subject) -> FileNotFoundError:
    """Return the error for a request that offline mode forbids."""
    return FileNotFoundError(
        f"cannot fetch {subject}: offline mode forbids every request; unset HF_HUB_OFFLINE and "
        "start again with a network, or use data that has been fetched before"
    )


def _reason(error: Exception, status: int | None) -> str:
    from huggingface_hub import errors as hub

    said = f"{type(error).__name__}: {str(error).strip() or 'no details'}"
    if status is not None:
        asked_s = _retry_after_s(error)
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


def _unwrapped(error: Exception) -> Exception:
    """Return the cause if an error only states that a file cannot be located."""
    from huggingface_hub import errors as hub

    cause = error.__cause__
    if isinstance(error, hub.LocalEntryNotFoundError) and isinstance(cause, Exception):
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


def _retry_after_s(error: Exception) -> float | None:
    response = getattr(error, "response", None)
    return seconds_to_wait(getattr(response, "headers", None) or {})


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
        >>> from replaykit.datasets.hub_cache import HubFile
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
        >>> from replaykit.datasets.hub_cache import HubListing
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
_BLOCK = 1 << 20
_ORPHAN = re.compile(r"([0-9a-f]+)\.[0-9a-f]{8}\.incomplete")
_SNIFFED = 48


def endpoint() -> str:
    """Return the Hub's URL from HF_ENDPOINT, which the client reads at import only."""
    return (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE or the older TRANSFORMERS_OFFLINE is set."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def cache_root() -> Path:
    """Return the client's cache folder from HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME."""
    env = os.environ.get
    home = env("HF_HOME") or os.path.join(env("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    root = env("HF_HUB_CACHE") or env("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(root))))


def write_marker(path: Path, text: str) -> None:
    """Write a text for later offline calls, completely or not at all.

    Errors are ignored, because a read-only cache is usable without the text.
    """
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def repository_folder(repo_id: str) -> str:
    """Return the name of a dataset repository's folder in the cache."""
    return "--".join(["datasets", *repo_id.split("/")])


@dataclass(frozen=True)
class HubCache:
    """The cached files of one dataset repository at one commit."""

    root: Path
    repo_id: str
    commit: str

    @property
    def _folder(self) -> str:
        return repository_folder(self.repo_id)

    def entry(self, file: HubFile) -> Path:
        """Return the path of a file in the cache, whether it exists or not."""
        return self.root.joinpath(self._folder, "snapshots", self.commit, *file.path.split("/"))

    def blob(self, file: HubFile) -> Path | None:
        """Return the path of a file's content, or None without a hash.

        All commits share the stored content.
        """
        return self.root / self._folder / "blobs" / file.etag if file.etag else None

    def part(self, file: HubFile) -> Path | None:
        """Return the path of a large file's received bytes; None without a hash."""
        blob = self.blob(file)
        return None if blob is None else blob.with_name(f"{blob.name}.incomplete")

    def lock(self, file: HubFile) -> Path:
        """Return the lock file that the client holds while it fetches a file's content."""
        return self.root / ".locks" / self._folder / f"{file.etag}.lock"

    def problem(self, file: HubFile) -> str | None:
        """Return the problem of a cached file, or None if size and hash are right.

        Cost: reads the file once. Memory: one block of 1 MiB.
        """
        path = self.entry(file)
        digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size)
        try:
            with path.open("rb") as content:
                size = os.fstat(content.fileno()).st_size
                if size != file.size:
                    return f"expected {file.size:,} bytes, got {size:,}" + text_hint(
                        content.read(_SNIFFED)
                    )
                start = content.read(_SNIFFED)
                content.seek(0)
                while block := content.read(_BLOCK):
                    digest.update(block)
        except FileNotFoundError:
            return "not in the cache"
        kind = "sha256" if file.sha256 else "git blob id"
        if file.etag is not None and digest.hexdigest() != file.etag:
            return f"expected {kind} {file.etag}, got {digest.hexdigest()}" + text_hint(start)
        return None

    def discard(self, file: HubFile) -> None:
        """Remove a file's entry and its content, so that the client fetches it again.

        The client trusts every file with the right name. Therefore it would return a damaged file
        forever. The method follows links, but removes nothing outside the cache.
        """
        for start in (self.entry(file), self.blob(file)):
            if start is not None:
                for path in list(self._chain(start)):
                    path.unlink(missing_ok=True)

    def _chain(self, path: Path) -> Iterator[Path]:
        """Yield a path and the targets of its links, up to the first outside the cache."""
        root = self.root.resolve()
        while os.path.lexists(path):
            path = path.parent.resolve() / path.name
            if root not in path.parents:
                return
            yield path
            if not path.is_symlink():
                return
            path = path.parent / os.readlink(path)

    def missing_bytes(self, files: Iterable[HubFile]) -> int:
        """Return the number of bytes that a fetch has to write.

        Files with equal content count once. Received parts of files are assumed to be right.
        """
        sizes: dict[str, int] = {}
        for file in files:
            blob = self.blob(file)
            held = any(_size(path) == file.size for path in (self.entry(file), blob) if path)
            if not held:
                part = self.part(file)
                there = 0 if part is None else _size(part) or 0
                sizes[file.etag or file.path] = max(0, file.size - there)
        return sum(sizes.values())

    def require_room(self, files: Iterable[HubFile]) -> None:
        """Check that the missing bytes fit on the disk, before anything is written.

        Raises:
            OSError: the disk has too little room (``ENOSPC``). The message has the needed and the
                free bytes, and the remedy.
        """
        needed = self.missing_bytes(files)
        existing = self.root
        while not existing.exists():
            existing = existing.parent
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"not enough disk space to download {self.repo_id!r}: {needed:,} bytes are "
                f"missing, {free:,} are free; free some space, or set HF_HUB_CACHE to a larger "
                "disk",
                str(self.root),
            )

    def remove_orphans(self, files: Iterable[HubFile]) -> None:
        """Remove the files that killed downloads of these files have left.

        The client writes to ``<etag>.<8 digits>.incomplete``. A killed client leaves this file
        behind, and no client continues it. During a download the client holds a lock per etag. So a
        file whose lock is free belongs to a killed download. If the file system does not support
        locks, nothing is removed. Files without the digits are kept, because `HubParts` and older
        clients continue them.
        """
        blobs = self.root / self._folder / "blobs"
        left: dict[str, list[Path]] = {}
        for path in blobs.glob("*.incomplete"):
            if match := _ORPHAN.fullmatch(path.name):
                left.setdefault(match[1], []).append(path)
        for etag in left.keys() & {file.etag for file in files}:
            lock = self.root / ".locks" / self._folder / f"{etag}.lock"
            # Errors are ignored, because the cache may be read-only, or a download may just have
            # ended.
            with suppress(OSError), _sole_holder(lock) as is_free:
                if is_free:
                    for path in left[etag]:
                        path.unlink(missing_ok=True)


@contextmanager
def _sole_holder(path: Path) -> Iterator[bool]:
    """Try to lock a file, and yield whether this process is its only holder.

    The result is False on a file system without locks.
    """
    try:
        import fcntl
    except ImportError:  # not POSIX
        yield False
        return
    exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
    with path.open("ab") as lock, path.open("ab") as probe:
        try:
            fcntl.flock(lock, exclusive)
        except OSError:
            yield False
            return
        # If locks work, two descriptors of one file exclude each other, even within a process.
        try:
            fcntl.flock(probe, exclusive)
        except OSError:
            # A lock file that was removed or replaced in the meantime protects nothing.
            yield os.path.samestat(os.fstat(lock.fileno()), path.stat())
        else:
            yield False


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def text_hint(start: bytes) -> str:
    """Return a hint with the first line of a file if it is text, such as a web page."""
    line = start[:_SNIFFED].split(b"\n")[0].strip()
    if not line or not line.isascii() or not line.decode("ascii").isprintable():
        return ""
    return f" (it begins with the text {line.decode('ascii')!r})"
