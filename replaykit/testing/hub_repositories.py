"""Keep the repositories of a loopback Hub, and the faults it is to show."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = [
    "Blob",
    "Commit",
    "Fault",
    "HubState",
    "PushAnswers",
    "Repository",
    "Request",
    "Source",
    "is_lfs",
    "lfs_pointer",
]

_REDIRECTS = (None, "same", "other")


def lfs_pointer(data: bytes) -> bytes:
    """Returns the text that git stores in place of ``data`` when Git LFS keeps the data.

    Example:
        >>> from replaykit.testing import lfs_pointer
        >>> lfs_pointer(b"abc").splitlines()[0]
        b'version https://git-lfs.github.com/spec/v1'
    """
    return lfs_pointer_of(hashlib.sha256(data).hexdigest(), len(data))


def lfs_pointer_of(sha256: str, size: int) -> bytes:
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    ).encode()


@dataclass(eq=False)
class Fault:
    """One thing that goes wrong, with the requests it goes wrong for.

    A request meets at most one fault: the first in ``LoopbackHub.faults`` that matches it and has
    ``times`` left. A fault may combine several effects, for example a replaced body that is slow.

    Args:
        path: shell pattern for the file's path in the repository (``*`` also matches ``/``).
        method: ``"HEAD"``, ``"GET"``, ``"POST"``, ``"PUT"`` or ``"DELETE"``; None for all.
        route: name of the route, see ``replaykit.testing.hub_server.ROUTES``.
        times: how many requests meet it; None for all.
        status: answer with this status and a small JSON body (or ``body``) in place of the file.
        error_code: the Hub's ``X-Error-Code`` for ``status``.
        headers: added to the answer or replaced in it; a header given as None is left out.
        body: sent in place of the content, with a Content-Length that fits it. Ranges are of it.
        cut_after: close the connection after so many bytes of the body.
        ignore_range: answer a range request with 200 and the whole body.
        delay_s: wait before the answer begins.
        bytes_per_s: send the body no faster.
        redirect: answer with 302 to a store on the ``"same"`` port or on the ``"other"`` one.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> from replaykit.testing import Fault
        >>> fault = Fault(path="*.h5", status=503, times=1)
        >>> fault.matches("resolve", "GET", "dir/a.h5"), fault.matches("tree", "GET", "")
        (True, False)
    """

    path: str = "*"
    method: str | None = None
    route: str = "resolve"
    times: int | None = None
    status: int | None = None
    error_code: str | None = None
    headers: Mapping[str, str | None] = field(default_factory=dict)
    body: bytes | None = None
    cut_after: int | None = None
    ignore_range: bool = False
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    redirect: str | None = None
    used: int = field(default=0, init=False)
    """How many requests have met this fault so far."""

    def __post_init__(self) -> None:
        if self.redirect not in _REDIRECTS:
            raise ValueError(f"redirect: expected one of {_REDIRECTS}, got {self.redirect!r}")
        if self.status is not None and not 400 <= self.status <= 599:
            raise ValueError(f"status: expected an error, 400 to 599, got {self.status}")
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: expected a positive number, got {self.bytes_per_s}")
        for name in ("times", "cut_after", "delay_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}: expected a number >= 0, got {value}")

    def matches(self, route: str, method: str, path: str) -> bool:
        """Whether a request meets this fault; cost O(length of the path)."""
        return (
            (self.times is None or self.used < self.times)
            and route == self.route
            and self.method in (None, method)
            and fnmatchcase(path, self.path)
        )


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


_NO_FAULT = Fault()


@dataclass(frozen=True)
class Request:
    """One request as it arrived: ``path`` is decoded and without its query."""

    method: str
    path: str
    range: str | None = None
    route: str | None = None


@dataclass
class HubState:
    """What the threads of a hub share.

    ``lock`` guards the log, the counter and the faults; ``writing`` is held while a push changes
    a repository.
    """

    repos: dict[str, Repository] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    bytes_served: int = 0
    page_size: int | None = None
    url: str = ""
    other_url: str = ""
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def note(self, request: Request, file: str) -> Fault:
        """Logs a request and returns the fault it meets, counted as used."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if request.route and fault.matches(request.route, request.method, file):
                    fault.used += 1
                    return fault
        return _NO_FAULT

    def count(self, nbytes: int) -> None:
        with self.lock:
            self.bytes_served += nbytes


class PushAnswers(BaseHTTPRequestHandler):
    """What a client asks of a Hub to push; mixed into the handler, which sends the answers.

    Whoever writes must show a token; which one does not matter.
    """

    body: bytes

    @property
    def state(self) -> HubState:
        raise NotImplementedError

    def _json(self, data: Any, headers: dict[str, str] | None = None, *, status: int = 200) -> None:
        raise NotImplementedError

    def _error(self, status: int, code: str | None, message: str) -> None:
        raise NotImplementedError

    def _has_token(self) -> bool:
        return bool(self.headers.get("Authorization", "").removeprefix("Bearer").strip())

    def _create(self, groups: dict[str, str]) -> None:
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or 'me'}/{asked['name']}"
        with self.state.writing:
            is_new = repo_id not in self.state.repos
            if is_new:
                private = bool(asked.get("private") or asked.get("visibility") == "private")
                repo = Repository(repo_id, private=private)
                repo.commit({".gitattributes": b"*.memmap filter=lfs\n"}, "main")
                self.state.repos[repo_id] = repo
        answer = {"url": f"{self.state.url}/datasets/{repo_id}", "name": repo_id, "id": repo_id}
        if not is_new:
            answer["error"] = "You already created this dataset repo"
        self._json(answer, status=200 if is_new else 409)

    def _validate(self, groups: dict[str, str]) -> None:
        text = json.loads(self.body)["content"]
        errors = [] if text.startswith("---\n") else [{"message": "the card has no YAML block"}]
        self._json({"errors": errors, "warnings": []})

    def _preupload(self, groups: dict[str, str]) -> None:
        repo = self.state.repos[groups["repo"]]
        head = repo.branches.get(groups["rev"])
        if head is None:
            return self._error(404, "RevisionNotFound", f"no branch {groups['rev']!r}")
        there = repo.commits[head].files
        answer = []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            entry = {"path": path, "shouldIgnore": False}
            entry["uploadMode"] = "lfs" if is_lfs(path) else "regular"
            if path in there:
                entry["oid"] = there[path].etag
            answer.append(entry)
        return self._json({"files": answer})

    def _lfs_batch(self, groups: dict[str, str]) -> None:
        repo = self.state.repos[groups["repo"]]
        objects = []
        for asked in json.loads(self.body)["objects"]:
            entry = {"oid": asked["oid"], "size": asked["size"]}
            if repo.content(asked["oid"]) is None:
                where = f"{self.state.url}/_lfs/{repo.id}/{asked['oid']}"
                entry["actions"] = {
                    "upload": {"href": where},
                    "verify": {"href": f"{where}/verify"},
                }
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def _lfs_put(self, groups: dict[str, str]) -> None:
        oid = groups["oid"]
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self._error(400, None, f"the content is not {oid}")
        self.state.repos[groups["repo"]].uploads[oid] = self.body
        return self._json({})

    def _lfs_verify(self, groups: dict[str, str]) -> None:
        asked = json.loads(self.body)
        held = self.state.repos[groups["repo"]].uploads.get(groups["oid"])
        if held is None or len(held) != asked["size"]:
            return self._error(404, None, f"{groups['oid']} has not been uploaded whole")
        return self._json({})

    def _commit(self, groups: dict[str, str]) -> None:
        repo, branch = self.state.repos[groups["repo"]], groups["rev"]
        if branch not in repo.branches:
            return self._error(404, "RevisionNotFound", f"no branch {branch!r}")
        changes: dict[str, Source | None] = {}
        parent = None
        for line in self.body.decode().splitlines():
            entry = json.loads(line)
            kind, value = entry["key"], entry["value"]
            if kind == "header":
                parent = value.get("parentCommit")
            elif kind == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                content = repo.content(value["oid"])
                if content is None:
                    return self._error(400, None, f"{value['path']} has not been uploaded")
                changes[value["path"]] = content
            elif kind == "deletedFile":
                changes[value["path"]] = None
            else:
                return self._error(400, None, f"no operation {kind!r}")
        with self.state.writing:
            if parent not in (None, repo.branches[branch]):
                return self._error(412, None, "A commit has happened since.")
            try:
                commit = repo.commit(changes, branch)
            except FileNotFoundError as error:
                return self._error(404, "EntryNotFound", str(error))
        url = f"{self.state.url}/datasets/{repo.id}/commit/{commit.id}"
        return self._json({"success": True, "commitUrl": url, "commitOid": commit.id})

    def _branch(self, groups: dict[str, str]) -> None:
        repo, name = self.state.repos[groups["repo"]], groups["rev"]
        start = repo.resolve(json.loads(self.body or b"{}").get("startingPoint") or "main")
        with self.state.writing:
            if name in repo.branches:
                return self._error(409, None, f"Reference already exists: {name}")
            if start is None:
                return self._error(404, "RevisionNotFound", "no such starting point")
            repo.branches[name] = start.id
        return self._json({})

    def _tag(self, groups: dict[str, str]) -> None:
        repo, commit = self.state.repos[groups["repo"]], None
        with self.state.writing:
            if self.command == "DELETE":
                if repo.tags.pop(groups["rev"], None) is None:
                    return self._error(404, "RevisionNotFound", f"no tag {groups['rev']!r}")
                return self._json({})
            name = json.loads(self.body)["tag"]
            commit = repo.resolve(groups["rev"])
            if name in repo.tags:
                return self._error(409, None, f"Tag already exists: {name}")
            if commit is None:
                return self._error(404, "RevisionNotFound", f"no revision {groups['rev']!r}")
            repo.tags[name] = commit.id
        return self._json({})
