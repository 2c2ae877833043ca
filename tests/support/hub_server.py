"""The HTTP server of a loopback Hub."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.support.hub_repositories import (
    Blob,
    Commit,
    Fault,
    HubState,
    PushAnswers,
    Repository,
    Request,
    Source,
)

__all__ = ["ROUTES", "HubServer", "LoopbackHub"]

_JOIN_S = 5.0
_SLOW_STEP_S = 0.02
_LONGEST_REQUEST_BODY = 1 << 30


class HubServer(ThreadingHTTPServer):
    """A listening socket of a hub. ``close`` also closes its connections."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, state: HubState) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.state = state
        self._open: dict[threading.Thread, socket.socket] = {}
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        # The connection is registered before its thread runs, so ``close`` misses none.
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        with self.state.lock:
            self._open[thread] = request
        thread.start()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.state.lock:
                del self._open[threading.current_thread()]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show errors, except those of a client that closed its connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.shutdown()
        self._thread.join(_JOIN_S)
        self.server_close()
        with self.state.lock:
            connections = dict(self._open)
        for connection in connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in connections:
            thread.join(_JOIN_S)


class _Handler(PushAnswers):
    """A handler of the Hub's routes for dataset repositories. Other routes give 404."""

    server: HubServer
    protocol_version = "HTTP/1.1"
    # Header and body are two writes. With Nagle's algorithm the second write would wait for an
    # ACK.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._dispatch()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing, because the log of a hub is ``LoopbackHub.requests``."""

    @property
    def state(self) -> HubState:
        return self.server.state

    def _dispatch(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.body = self._request_body()
        route, groups = _find_route(self.command, url.path)
        self.file = groups.get("path") or ""
        self.is_file = False
        request = Request(self.command, unquote(url.path), self.headers.get("Range"), route)
        self.fault = self.state.log_request(request, self.file)
        if self.fault.delay_s:
            self.state.closing.wait(self.fault.delay_s)
        if self.fault.status is not None:
            code = self.fault.error_code
            self._error(self.fault.status, code, f"fault: {code or self.fault.status}")
        elif route is None:
            self._error(404, "EntryNotFound", f"no such route: {self.command} {url.path}")
        else:
            self._answer(route, groups)

    def _answer(self, route: str, groups: dict[str, str]) -> None:
        found = ROUTES[route]
        # The client uploads contents without its token, as to an external file store.
        may_all = route == "lfs-put" or self._has_token()
        if found.write is not None and not may_all:
            return self._error(401, None, "Invalid username or password.")
        repo = self.state.repos.get(groups.get("repo", ""))
        if "repo" in groups and (repo is None or (repo.private and not may_all)):
            code = 404 if repo is None else 401
            return self._error(code, "RepoNotFound", f"no repository {groups['repo']!r}")
        if found.write is not None:
            return found.write(self, groups)
        assert repo is not None
        revision = groups.get("rev", "main")
        commit = repo.resolve(revision)
        if commit is None:
            return self._error(404, "RevisionNotFound", f"no revision {revision!r}")
        assert found.read is not None
        return found.read(self, repo, commit)

    # Answers by route.

    def _info(self, repo: Repository, commit: Commit) -> None:
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        self._json({"id": repo.id, "sha": commit.id, "private": repo.private, "siblings": siblings})

    def _tree(self, repo: Repository, commit: Commit) -> None:
        below = f"{self.file}/" if self.file else ""
        entries = _tree_entries(commit, below, self.query.get("recursive") == ["true"])
        if below and not entries:
            return self._error(404, "EntryNotFound", f"no directory {self.file!r}")
        headers = {}
        page = self.state.page_size
        if page is not None:
            start = int(self.query.get("cursor", ["0"])[0])
            if start + page < len(entries):
                query = f"recursive={self.query.get('recursive', ['false'])[0]}"
                where = f"{self.state.url}{urlsplit(self.path).path}?{query}&cursor={start + page}"
                headers["Link"] = f'<{where}>; rel="next"'
            entries = entries[start : start + page]
        return self._json(entries, headers)

    def _paths_info(self, repo: Repository, commit: Commit) -> None:
        asked = parse_qs(self.body.decode("latin-1")).get("paths", [])
        wanted = [path for path in asked if path in commit.files]
        self._json([_file_entry(path, commit.files[path]) for path in wanted])

    def _resolve(self, repo: Repository, commit: Commit) -> None:
        blob = commit.files.get(self.file)
        if blob is None:
            return self._error(404, "EntryNotFound", f"no file {self.file!r} in {commit.id}")
        if self.fault.redirect is not None:
            host = self.state.url if self.fault.redirect == "same" else self.state.other_url
            headers = {
                "Location": f"{host}/_store/{repo.id}/{commit.id}/{quote(self.file)}",
                "X-Repo-Commit": commit.id,
                "X-Linked-Etag": f'"{blob.etag}"',
                "X-Linked-Size": str(blob.size),
            }
            return self._send(302, headers, b"")
        return self._file(commit, blob)

    def _store(self, repo: Repository, commit: Commit) -> None:
        self._file(commit, commit.files[self.file])

    # Sending of answers.

    def _file(self, commit: Commit, blob: Blob) -> None:
        self.is_file = True
        fault = self.fault
        size = blob.size if fault.body is None else len(fault.body)
        start, stop, status = 0, size, 200
        is_other = self.headers.get("If-Range") not in (None, f'"{blob.etag}"')
        may_part = not (fault.ignore_range or is_other)
        wanted = _parse_range(self.headers.get("Range"), size) if may_part else None
        headers = {
            "ETag": f'"{blob.etag}"',
            "X-Repo-Commit": commit.id,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        if wanted is not None:
            start, stop = wanted
            if start >= stop:
                return self._error(416, None, f"nothing at {self.headers['Range']} of {size} bytes")
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        pieces = blob.read(start, stop) if fault.body is None else iter([fault.body[start:stop]])
        return self._send(status, headers, pieces, stop - start)

    def _json(self, data: Any, headers: dict[str, str] | None = None, *, status: int = 200) -> None:
        body = self.fault.body if self.fault.body is not None else json.dumps(data).encode()
        self._send(status, {"Content-Type": "application/json", **(headers or {})}, body)

    def _error(self, status: int, code: str | None, message: str) -> None:
        headers = {"Content-Type": "application/json", "X-Error-Message": quote(message, " :'/")}
        if code is not None:
            headers["X-Error-Code"] = code
        body = self.fault.body if self.fault.body is not None else b""
        self._send(status, headers, body or json.dumps({"error": message}).encode())

    def _send(
        self,
        status: int,
        headers: dict[str, str],
        body: bytes | Iterator[bytes],
        length: int | None = None,
    ) -> None:
        if isinstance(body, bytes):
            length, body = len(body), iter([body])
        merged: dict[str, str | None] = {**headers, "Content-Length": str(length)}
        merged.update(self.fault.headers)
        if merged["Content-Length"] is None:
            # Without a length, the end of the connection marks the end of the body.
            merged["Connection"] = "close"
        self.send_response(HTTPStatus(status))
        for name, value in merged.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(body)

    def _send_body(self, body: Iterable[bytes]) -> None:
        left = self.fault.cut_after
        for piece in self._slowed(body):
            part = piece if left is None else piece[:left]
            if self.is_file:
                # Bytes are counted before the write, so that every received byte is already
                # counted.
                self.state.count(len(part))
            self.wfile.write(part)
            if left is not None:
                left -= len(part)
                if left == 0:
                    self.close_connection = True
                    return

    def _slowed(self, body: Iterable[bytes]) -> Iterator[bytes]:
        rate = self.fault.bytes_per_s
        if rate is None:
            yield from body
            return
        step = max(1, int(rate * _SLOW_STEP_S))
        for piece in body:
            for at in range(0, len(piece), step):
                if self.state.closing.wait(_SLOW_STEP_S):
                    self.close_connection = True
                    return
                yield piece[at : at + step]

    def _request_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            length = int(self.headers.get("Content-Length") or 0)
            return self.rfile.read(min(length, _LONGEST_REQUEST_BODY))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers, up to an empty line
            pass
        return b"".join(pieces)


@dataclass(frozen=True)
class _Route:
    """A path and its method: ``write``, or ``read``, which gets a repository and a commit."""

    methods: frozenset[str]
    pattern: re.Pattern[str]
    read: Callable[[_Handler, Repository, Commit], None] | None = None
    write: Callable[[_Handler, dict[str, str]], None] | None = None


def _route(methods: str, pattern: str, **answer: Callable[..., None]) -> _Route:
    for name, form in (("repo", r"[^/]+/[^/]+"), ("rev", r"[^/]+"), ("oid", r"[0-9a-f]{64}")):
        pattern = pattern.replace(f"<{name}>", f"(?P<{name}>{form})")
    return _Route(frozenset(methods.split()), re.compile(pattern), **answer)


_API, _FILES, _H = "/api/datasets/<repo>", "/datasets/<repo>", _Handler

ROUTES: dict[str, _Route] = {
    "info": _route("GET", _API, read=_H._info),
    "revision": _route("GET", f"{_API}/revision/<rev>", read=_H._info),
    "tree": _route("GET", f"{_API}/tree/<rev>(?:/(?P<path>.+))?", read=_H._tree),
    "paths-info": _route("POST", f"{_API}/paths-info/<rev>", read=_H._paths_info),
    "resolve": _route("HEAD GET", f"{_FILES}/resolve/<rev>/(?P<path>.+)", read=_H._resolve),
    "store": _route("HEAD GET", "/_store/<repo>/<rev>/(?P<path>.+)", read=_H._store),
    "create": _route("POST", "/api/repos/create", write=_H._create),
    "validate-yaml": _route("POST", "/api/validate-yaml", write=_H._validate),
    "preupload": _route("POST", f"{_API}/preupload/<rev>", write=_H._preupload),
    "lfs-batch": _route(
        "POST", r"/datasets/<repo>\.git/info/lfs/objects/batch", write=_H._lfs_batch
    ),
    "lfs-put": _route("PUT", "/_lfs/<repo>/<oid>", write=_H._lfs_put),
    "lfs-verify": _route("POST", "/_lfs/<repo>/<oid>/verify", write=_H._lfs_verify),
    "commit": _route("POST", f"{_API}/commit/<rev>", write=_H._commit),
    "branch": _route("POST", f"{_API}/branch/<rev>", write=_H._branch),
    "tag": _route("POST DELETE", f"{_API}/tag/<rev>", write=_H._tag),
}


def _find_route(method: str, path: str) -> tuple[str | None, dict[str, str]]:
    # The path is matched before decoding, because an encoded slash belongs to a revision.
    for name, route in ROUTES.items():
        match = route.pattern.fullmatch(path)
        if match is not None and method in route.methods:
            groups = match.groupdict()
            return name, {key: unquote(value) for key, value in groups.items() if value}
    return None, {}


def _file_entry(path: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": blob.size, "oid": blob.blob_id}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 127}
    return entry


def _tree_entries(commit: Commit, below: str, recursive: bool) -> list[dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for path, blob in commit.files.items():
        if not path.startswith(below):
            continue
        parents = path[len(below) :].split("/")[:-1]
        for depth in range(1, len(parents) + 1 if recursive else min(2, len(parents) + 1)):
            folder = below + "/".join(parents[:depth])
            entries[folder] = {"type": "directory", "path": folder, "size": 0, "oid": commit.id}
        if recursive or not parents:
            entries[path] = _file_entry(path, blob)
    return [entries[path] for path in sorted(entries)]


def _parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return start and stop of a single byte range, or None if there is no range."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if match is None or match.group(0) == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


class LoopbackHub:
    """A threaded HTTP/1.1 server on 127.0.0.1 that answers like the Hub for data sets.

    The hub answers requests for reading: repository, revision, tree in pages, paths-info, and HEAD
    and GET of files. Answers for files have ETag, X-Repo-Commit, Content-Length and ranges. With
    any token, it also answers requests for pushing: repository, branch, uploads, commit and tag.
    The hub logs every request, and simulates the faults in ``faults``. It listens on a real port,
    so other processes can also use it. It needs only the standard library.

    Args:
        repos: ``{"owner/name": {path: content}}``. A content is bytes, or the path of a local file.
            Each repository starts with one commit on ``main``.
        page_size: number of entries per page of a tree listing. None gives a single page.

    Cost: one thread per open connection. A local file is hashed when it is committed, and must not
    change afterwards. It is sent in pieces of 1 MiB. Thread safety: any thread may call any method
    while the hub is running.
    """

    def __init__(
        self,
        repos: Mapping[str, Mapping[str, Source]] | None = None,
        *,
        page_size: int | None = None,
    ) -> None:
        if page_size is not None and page_size < 1:
            raise ValueError(f"page_size: expected at least 1 or None, got {page_size}")
        self._state = HubState(page_size=page_size)
        self._servers: list[HubServer] = []
        for repo_id, files in (repos or {}).items():
            self.commit(repo_id, files)

    def start(self) -> LoopbackHub:
        """Listen on ports that the system chooses, unless the hub has been started."""
        if not self._servers:
            self._state.closing.clear()
            self._servers = [HubServer(self._state), HubServer(self._state)]
            self._state.url, self._state.other_url = (server.url for server in self._servers)
        return self

    def close(self) -> None:
        """Close the ports and all connections, but keep the repositories and the log."""
        self._state.closing.set()
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()

    def __enter__(self) -> LoopbackHub:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The value for HF_ENDPOINT, also after ``close``.

        Raises:
            RuntimeError: the hub has not been started.
        """
        if not self._state.url:
            raise RuntimeError(
                "the hub has no address yet: use it in a with statement, or call start()"
            )
        return self._state.url

    @property
    def port(self) -> int:
        """The port of ``url``."""
        return int(self.url.rpartition(":")[2])

    def env(self, cache_dir: str | os.PathLike[str]) -> dict[str, str]:
        """Return environment variables that make huggingface_hub use only this hub.

        The client reads most of the variables when it is imported. So pass them to a new process,
        or set them before the first import. The client writes all its files below ``cache_dir``.
        """
        home = os.fspath(cache_dir)
        no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": home,
            "HF_HUB_CACHE": os.path.join(home, "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
        }

    def commit(
        self, repo_id: str, files: Mapping[str, Source | None], *, branch: str = "main"
    ) -> str:
        """Add a commit on top of ``branch``, and return its full id.

        Files that are not named do not change. None as content removes a file. A missing repository
        is created. The same commits in the same order have the same ids in every run.

        Raises:
            ValueError: ``repo_id`` or a path is malformed. Nothing is committed.
            FileNotFoundError: a local file, or a file to remove, does not exist.
        """
        repo = self._state.repos.get(repo_id) or Repository(repo_id)
        commit = repo.commit(files, branch)
        self._state.repos[repo_id] = repo
        return commit.id

    def tag(self, repo_id: str, name: str, commit: str) -> None:
        """Give a commit a tag.

        Raises:
            KeyError: there is no such repository or commit.
        """
        repo = self._state.repos[repo_id]
        repo.tags[name] = repo.commits[commit].id

    def head(self, repo_id: str, branch: str = "main") -> str:
        """Return the full id of the newest commit of a branch.

        Raises:
            KeyError: there is no such repository or branch.
        """
        return self._state.repos[repo_id].branches[branch]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Return the content of every file of a repository at a branch, tag or commit.

        Raises:
            KeyError: there is no such repository or revision.
        """
        commit = self._state.repos[repo_id].resolve(revision)
        if commit is None:
            raise KeyError(revision)
        return {path: b"".join(blob.read(0, blob.size)) for path, blob in commit.files.items()}

    @property
    def faults(self) -> list[Fault]:
        """The list of simulated faults, in the order of matching.

        Callers may append to the list or clear it.
        """
        return self._state.faults

    @property
    def page_size(self) -> int | None:
        """Number of entries per page of a tree listing, or None. It can be set at any time."""
        return self._state.page_size

    @page_size.setter
    def page_size(self, value: int | None) -> None:
        self._state.page_size = value

    @property
    def requests(self) -> list[Request]:
        """A new list of all requests so far, in order of arrival.

        ``route`` is None for requests that match no route of the hub.
        """
        with self._state.lock:
            return list(self._state.requests)

    @property
    def bytes_served(self) -> int:
        """Number of bytes of files sent so far, without listings and messages."""
        with self._state.lock:
            return self._state.bytes_served

    def clear_log(self) -> None:
        """Clear the list of requests, and set ``bytes_served`` to 0."""
        with self._state.lock:
            self._state.requests.clear()
            self._state.bytes_served = 0
