"""Describe Hub repositories, their errors, and the cache of the Hub client."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from replaykit.datasets.transfers import BUSY, Stalled, is_local, local_error, seconds_to_wait
from replaykit.errors import DownloadError

__all__ = [
    "HubCache",
    "HubFile",
    "HubListing",
    "Subject",
    "cache_root",
    "endpoint",
    "is_offline",
    "leave_note",
    "offline_error",
    "refusal",
    "repository_folder",
    "text_hint",
]

_LOGIN = "log in (`hf auth login`, or set HF_TOKEN)"


@dataclass(frozen=True)
class Subject:
    """What was asked for: the words that every message needs."""

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
        """Whether the same call may succeed a little later."""
        return _is_transient(error)

    def retry_after_s(self, error: Exception) -> float | None:
        """Returns how long the server asks us to wait, if it says."""
        return _retry_after_s(error)

    def explain(self, error: Exception) -> Exception:
        """Returns the exception to raise for what the client raised."""
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
    """Returns what to raise where the Hub refuses: no such thing, or no access; else None."""
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
            f"there is no {subject}, though it was listed: the repository has been rewritten; "
            "list it again, or ask its owner"
        )
    if status in (401, 403):
        return PermissionError(f"access to {subject} was refused (HTTP {status}): {_LOGIN}")
    if is_local(error):
        return local_error(error, subject, "set HF_HUB_CACHE to a directory that can take it")
    return DownloadError(f"could not fetch {subject}: {_reason(error, status)}")


def offline_error(subject: Subject) -> FileNotFoundError:
    """Returns the error for a request that offline mode forbids."""
    return FileNotFoundError(
        f"cannot fetch {subject}: offline mode forbids every request; unset HF_HUB_OFFLINE and "
        "start anew with a network, or use data that has been fetched before"
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
    # Where one thread finds nobody there, the client closes its session under all others: these
    # are what they get.
    collateral = isinstance(error, (AttributeError, RuntimeError))
    if collateral or _is_kind(error, "ConnectError", "ConnectionRefusedError"):
        return f"the server cannot be reached; check the connection and HF_ENDPOINT ({said})"
    if isinstance(error, hub.FileMetadataError) or _is_strange_answer(error):
        return f"the answer is not that of a Hub; check HF_ENDPOINT and any proxy ({said})"
    return f"the transfer broke off; call again, complete files are kept ({said})"


def _unwrapped(error: Exception) -> Exception:
    """Returns why the client could not locate a file: it says no more than that it could not."""
    from huggingface_hub import errors as hub

    cause = error.__cause__
    if isinstance(error, hub.LocalEntryNotFoundError) and isinstance(cause, Exception):
        return cause
    return error


def _is_strange_answer(error: Exception) -> bool:
    """Whether the answer could not be read: a web page where JSON was due, missing fields."""
    return isinstance(error, (ValueError, KeyError, TypeError))


def _is_kind(error: Exception, *names: str) -> bool:
    # By name: which HTTP library the client stands on depends on its version.
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
        path: where it lies in the repository, with ``/`` between parts.
        size: bytes.
        sha256: of its content, 64 hexadecimal digits; known for files that the Hub keeps in LFS.
        blob_id: git's id, 40 hexadecimal digits. Without ``sha256`` it is the id of the content,
            with it that of the LFS pointer, which says nothing of the content.

    Raises:
        ValueError: a path that leaves the repository, a negative size or a malformed hash.

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
    size: int
    sha256: str | None
    blob_id: str | None

    def __post_init__(self) -> None:
        # The path comes from a server and names a file of ours: nothing above the cache.
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
        """The name under which the Hub and the client's cache keep the content."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True)
class HubListing:
    """The files of a data set in a repository, pinned to one commit.

    Everything needed to fetch and to check the files, also later and without a network: put
    ``to_json()`` into a manifest. ``endpoint`` records where the listing was made; a fetch goes
    to the endpoint that the environment names then.

    Raises:
        ValueError: a malformed repository id or commit, or a path that occurs twice.

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
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers that ``from_json`` takes back."""
        return {
            "repo_id": self.repo_id,
            "commit": self.commit,
            "endpoint": self.endpoint,
            "files": [asdict(file) for file in self.files],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HubListing:
        """Returns the listing that ``to_json`` was called on.

        Raises:
            ValueError: ``data`` is something else; the message says what is wrong with it.
        """
        try:
            files = tuple(HubFile(**file) for file in data["files"])
            return cls(data["repo_id"], data["commit"], data["endpoint"], files)
        except (KeyError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise ValueError(f"expected the JSON of a Hub listing, got {problem}") from error


def check_repo_id(repo_id: str) -> None:
    """Raises ValueError where ``repo_id`` is not ``name`` or ``owner/name``."""
    if not _REPO_ID.fullmatch(repo_id) or ".." in repo_id or "--" in repo_id:
        raise ValueError(
            f"repo_id: expected 'owner/name' in letters, digits, '-._', got {repo_id!r}"
        )


def is_commit(revision: str) -> bool:
    """Whether ``revision`` is a full commit id, which no push can move."""
    return _COMMIT.fullmatch(revision) is not None


_DEFAULT_ENDPOINT = "https://huggingface.co"
_BLOCK = 1 << 20
_ORPHAN = re.compile(r"([0-9a-f]+)\.[0-9a-f]{8}\.incomplete")
_SNIFFED = 48


def endpoint() -> str:
    """Returns the Hub's base URL as HF_ENDPOINT says now; the client reads it at import only."""
    return (os.environ.get("HF_ENDPOINT") or _DEFAULT_ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE, or its older name TRANSFORMERS_OFFLINE, forbids requests now."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def cache_root() -> Path:
    """Returns the client's cache as HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME say now."""
    env = os.environ.get
    home = env("HF_HOME") or os.path.join(env("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    root = env("HF_HUB_CACHE") or env("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.abspath(os.path.expandvars(os.path.expanduser(root))))


def leave_note(path: Path, text: str) -> None:
    """Writes a text that later calls without a network go by: whole, or not at all.

    Where that is not possible there is none: a cache that may only be read has the files, and that
    is what was asked for.
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
    """Returns the name of a dataset repository's folder in the cache."""
    return "--".join(["datasets", *repo_id.split("/")])


@dataclass(frozen=True)
class HubCache:
    """What the cache at ``root`` holds of one dataset repository at one commit."""

    root: Path
    repo_id: str
    commit: str

    @property
    def _folder(self) -> str:
        return repository_folder(self.repo_id)

    def entry(self, file: HubFile) -> Path:
        """Returns the path under which a file is, or would be, found; opening it gives the data."""
        return self.root.joinpath(self._folder, "snapshots", self.commit, *file.path.split("/"))

    def blob(self, file: HubFile) -> Path | None:
        """Returns the path of a file's content, shared by all commits; None without a hash."""
        return self.root / self._folder / "blobs" / file.etag if file.etag else None

    def part(self, file: HubFile) -> Path | None:
        """Returns where a large file is received; None without a hash."""
        blob = self.blob(file)
        return None if blob is None else blob.with_name(f"{blob.name}.incomplete")

    def lock(self, file: HubFile) -> Path:
        """Returns the file that the client locks while it brings the content of a file."""
        return self.root / ".locks" / self._folder / f"{file.etag}.lock"

    def problem(self, file: HubFile) -> str | None:
        """Returns what is wrong with the cached file, or None where size and hash are right.

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
        """Removes a file's entry and its content, so that the client fetches it anew.

        The client trusts whatever lies under the right name: without this a damaged file would
        be served for ever. Follows links, but removes nothing outside the cache.
        """
        for start in (self.entry(file), self.blob(file)):
            if start is not None:
                for path in list(self._chain(start)):
                    path.unlink(missing_ok=True)

    def _chain(self, path: Path) -> Iterator[Path]:
        """Yields a path and what its links lead to, as long as that is inside the cache."""
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
        """Returns how many bytes a fetch has to write; equal contents count once.

        What has been received of a file is taken for right.
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
        """Checks that what is missing fits on the disk, before anything is written.

        Raises:
            OSError: ``ENOSPC``, with the numbers and what to do.
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
        """Removes what killed downloads of these files have left behind.

        The client writes to ``<etag>.<8 digits>.incomplete``, never continues such a file, and
        leaves it behind for ever when it is killed. While it downloads it holds a lock per etag;
        a file whose lock is free therefore belongs to no living download. Where the file system
        does not keep locks, that cannot be known, and nothing is removed. Parts without the
        digits are continued: by `HubParts`, and by older clients.
        """
        blobs = self.root / self._folder / "blobs"
        left: dict[str, list[Path]] = {}
        for path in blobs.glob("*.incomplete"):
            if match := _ORPHAN.fullmatch(path.name):
                left.setdefault(match[1], []).append(path)
        for etag in left.keys() & {file.etag for file in files}:
            lock = self.root / ".locks" / self._folder / f"{etag}.lock"
            # A cache that may only be read, or a download that ends at this moment: leave it.
            with suppress(OSError), _sole_holder(lock) as is_free:
                if is_free:
                    for path in left[etag]:
                        path.unlink(missing_ok=True)


@contextmanager
def _sole_holder(path: Path) -> Iterator[bool]:
    """Whether this is now the only holder of a lock file, on a file system that keeps locks."""
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
        # Two open files exclude each other even within a process; if not, locks are not kept.
        try:
            fcntl.flock(probe, exclusive)
        except OSError:
            # A lock file that has been removed or replaced since guards nothing.
            yield os.path.samestat(os.fstat(lock.fileno()), path.stat())
        else:
            yield False


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def text_hint(start: bytes) -> str:
    """Returns how a file begins if that is text: a web page or an LFS pointer explains itself."""
    line = start[:_SNIFFED].split(b"\n")[0].strip()
    if not line or not line.isascii() or not line.decode("ascii").isprintable():
        return ""
    return f" (it begins with the text {line.decode('ascii')!r})"
