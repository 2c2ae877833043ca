"""The Hub client's cache on disk: where it lies, what is in it, and whether that is right.

Layout, shared with huggingface_hub: ``<root>/datasets--<owner>--<name>/snapshots/<commit>/<path>``
is a link to ``blobs/<etag>`` beside it, or the file itself where links are not possible.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from replaykit.datasets.hub_listing import HubFile

__all__ = [
    "HubCache",
    "cache_root",
    "endpoint",
    "is_offline",
    "leave_note",
    "repository_folder",
    "text_hint",
]

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
