"""Which files of a Hub repository belong to a data set, and how each is known to be right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["HubFile", "HubListing"]

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
        >>> from replaykit.datasets.hub_listing import HubFile
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
        >>> from replaykit.datasets.hub_listing import HubListing
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
