"""The repositories of a loopback Hub, and its simulated faults."""

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
    """Return the pointer text that git stores for ``data`` in Git LFS."""
    return lfs_pointer_of(hashlib.sha256(data).hexdigest(), len(data))


def lfs_pointer_of(sha256: str, size: int) -> bytes:
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    ).encode()


@dataclass(eq=False)
class Fault:
    """A simulated fault, and the requests that it affects.

    At most one fault affects a request: the first fault in ``LoopbackHub.faults`` that matches it
    and has ``times`` left. A fault may combine several effects, for example a replaced body that is
    slow.

    Args:
        path: shell pattern for the file's path in the repository. ``*`` also matches ``/``.
        method: ``"HEAD"``, ``"GET"``, ``"POST"``, ``"PUT"`` or ``"DELETE"``; None for all methods.
        route: name of the route; see ``ROUTES of hub_server``.
        times: number of requests that the fault affects; None for all requests.
        status: the status of an answer that replaces the file. Its body is ``body`` or a small JSON
            text.
        error_code: the Hub's ``X-Error-Code`` for ``status``.
        headers: headers to add to the answer or to replace in it. A header with the value None is
            removed.
        body: the body that replaces the content. Content-Length and ranges refer to it.
        cut_after: number of bytes of the body after which the connection is closed.
        ignore_range: answer a range request with 200 and the whole body.
        delay_s: the wait before the answer begins, in seconds.
        bytes_per_s: the highest rate at which the body is sent.
        redirect: answer with 302 to a file store on the ``"same"`` port or on the ``"other"`` port.

    Raises:
        ValueError: an argument is out of its range.
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
    """Number of requests that this fault has affected so far."""

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
        """Return whether this fault matches a request. Cost: O(length of the path)."""
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

# The Hub stores these as plain git files, named by their git blob id. All others are in LFS.
_GIT_SUFFIXES = {".md", ".txt", ".json", ".jsonl", ".yaml", ".yml", ".csv", ".py", ""}


@dataclass(frozen=True)
class Blob:
    """The content of a file, with the ids that the Hub gives it."""

    source: bytes | Path
    size: int
    sha256: str
    blob_id: str
    lfs: bool

    @property
    def etag(self) -> str:
        """The SHA-256 of an LFS file, or the git blob id of any other file."""
        return self.sha256 if self.lfs else self.blob_id

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes from ``start`` to ``stop`` in pieces of at most 1 MiB."""
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
    """A commit of a repository: its full id, and all its files by path."""

    id: str
    files: Mapping[str, Blob]


@dataclass
class Repository:
    """Commits, branches and tags of one dataset repository.

    Commits never change, and a branch or tag moves only to a complete commit. So readers in other
    threads need no lock.
    """

    id: str
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    """Uploaded contents by SHA-256, to which commits can refer."""
    private: bool = False

    def __post_init__(self) -> None:
        if not _REPO_ID.fullmatch(self.id):
            raise ValueError(f"repo_id: expected 'owner/name', got {self.id!r}")

    def commit(self, files: Mapping[str, Source | None], branch: str) -> Commit:
        """Commit ``files`` on top of ``branch``. None as content removes a file."""
        head = self.branches.get(branch)
        tree = dict(self.commits[head].files) if head is not None else {}
        for path, source in files.items():
            _check_path(path)
            if source is None:
                if tree.pop(path, None) is None:
                    raise FileNotFoundError(f"{self.id}: cannot remove {path!r}: no such file")
            else:
                tree[path] = _blob(path, source)
        # The number of commits is hashed, so equal trees have different ids. The same commits in
        # the same order have the same ids in every run.
        text = [self.id, branch, str(len(self.commits)), head or ""]
        text += [f"{path} {blob.sha256}" for path, blob in sorted(tree.items())]
        new = Commit(hashlib.sha1("\n".join(text).encode()).hexdigest(), tree)
        self.commits[new.id] = new
        self.branches[branch] = new.id
        return new

    def content(self, sha256: str) -> Source | None:
        """Return the committed or uploaded LFS content with this hash, or None."""
        for commit in self.commits.values():
            for blob in commit.files.values():
                if blob.lfs and blob.sha256 == sha256:
                    return blob.source
        return self.uploads.get(sha256)

    def resolve(self, revision: str) -> Commit | None:
        """Return the commit of a branch, a tag, or an id of at least 7 digits, or None."""
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
    """Return whether the Hub stores a file of this name in LFS."""
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
    """One received request. ``path`` is decoded and has no query."""

    method: str
    path: str
    range: str | None = None
    route: str | None = None


@dataclass
class HubState:
    """State that the threads of a hub share.

    ``lock`` guards the log, the counter and the faults. ``writing`` is held while a push changes a
    repository.
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

    def log_request(self, request: Request, file: str) -> Fault:
        """Log a request, and return the fault that affects it, after counting its use."""
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
    """A mixin of the handler with the answers to the requests of a push.

    Writes require a token. Any token is accepted.
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
