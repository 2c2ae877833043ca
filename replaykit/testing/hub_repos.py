"""Dataset repositories as a loopback Hub keeps them: commits of content-addressed files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from replaykit.testing.hub_faults import lfs_pointer_of

__all__ = ["Blob", "Commit", "Repository", "Source", "is_lfs"]

Source = bytes | str | os.PathLike[str]
"""The content of a file: bytes, or the path of a local file that holds them."""

_CHUNK = 1 << 20
_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SHORTEST_COMMIT = 7

# The Hub keeps these as plain git files, named by their git blob id, everything else in LFS.
_GIT_SUFFIXES = {".md", ".txt", ".json", ".jsonl", ".yaml", ".yml", ".csv", ".py", ""}


@dataclass(frozen=True)
class Blob:
    """One content, with the names that the Hub gives it."""

    source: bytes | Path
    size: int
    sha256: str
    blob_id: str
    lfs: bool

    @property
    def etag(self) -> str:
        """The SHA-256 of an LFS file, the git blob id of any other."""
        return self.sha256 if self.lfs else self.blob_id

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yields the bytes from ``start`` to ``stop`` in pieces; never holds a whole local file."""
        if isinstance(self.source, bytes):
            view = memoryview(self.source)
            for at in range(start, stop, _CHUNK):
                yield bytes(view[at : min(at + _CHUNK, stop)])
            return
        with self.source.open("rb") as file:
            file.seek(start)
            left = stop - start
            while left > 0 and (piece := file.read(min(_CHUNK, left))):
                left -= len(piece)
                yield piece


@dataclass(frozen=True)
class Commit:
    """One state of a repository: its full id and every file of it by path."""

    id: str
    files: Mapping[str, Blob]


@dataclass
class Repository:
    """Commits, branches and tags of one dataset repository.

    Commits never change, and a name moves to a commit that is already complete: readers on other
    threads need no lock.
    """

    id: str
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    """Contents by SHA-256 that were sent and may be named by a commit."""
    private: bool = False

    def __post_init__(self) -> None:
        if not _REPO_ID.fullmatch(self.id):
            raise ValueError(f"repo_id: expected 'owner/name', got {self.id!r}")

    def commit(self, files: Mapping[str, Source | None], branch: str) -> Commit:
        """Puts ``files`` on top of ``branch`` and moves it; None in place of content removes."""
        head = self.branches.get(branch)
        tree = dict(self.commits[head].files) if head is not None else {}
        for path, source in files.items():
            _check_path(path)
            if source is None:
                if tree.pop(path, None) is None:
                    raise FileNotFoundError(f"{self.id}: cannot remove {path!r}, it is not there")
            else:
                tree[path] = _blob(path, source)
        # The position keeps ids of equal trees apart; the same commits in the same order have
        # the same ids in every run.
        text = [self.id, branch, str(len(self.commits)), head or ""]
        text += [f"{path} {blob.sha256}" for path, blob in sorted(tree.items())]
        new = Commit(hashlib.sha1("\n".join(text).encode()).hexdigest(), tree)
        self.commits[new.id] = new
        self.branches[branch] = new.id
        return new

    def content(self, sha256: str) -> Source | None:
        """Returns a content that some commit has or that was uploaded; None where there is none."""
        for commit in self.commits.values():
            for blob in commit.files.values():
                if blob.lfs and blob.sha256 == sha256:
                    return blob.source
        return self.uploads.get(sha256)

    def resolve(self, revision: str) -> Commit | None:
        """Returns the commit behind a branch, tag, full id or the first 7 or more digits of one."""
        known = self.branches.get(revision) or self.tags.get(revision)
        if known is not None:
            return self.commits[known]
        if len(revision) < _SHORTEST_COMMIT:
            return None
        found = [commit for id_, commit in self.commits.items() if id_.startswith(revision)]
        return found[0] if len(found) == 1 else None


def _check_path(path: str) -> None:
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"path: expected a relative path like 'dir/file.h5', got {path!r}")


def is_lfs(path: str) -> bool:
    """Whether the Hub keeps a file of this name in LFS."""
    return PurePosixPath(path).suffix.lower() not in _GIT_SUFFIXES


def _blob(path: str, source: Source) -> Blob:
    kept = source if isinstance(source, bytes) else Path(source)
    size = len(kept) if isinstance(kept, bytes) else kept.stat().st_size
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size)
    for piece in Blob(kept, size, "", "", False).read(0, size):
        sha256.update(piece)
        git.update(piece)
    lfs = is_lfs(path)
    if lfs:
        pointer = lfs_pointer_of(sha256.hexdigest(), size)
        git = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer)
    return Blob(kept, size, sha256.hexdigest(), git.hexdigest(), lfs)
