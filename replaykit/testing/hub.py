"""A Hub on loopback: dataset repositories served over HTTP to the real huggingface_hub client."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType

from replaykit.testing.hub_faults import Fault
from replaykit.testing.hub_repos import Repository, Source
from replaykit.testing.hub_server import HubServer
from replaykit.testing.hub_state import HubState, Request

__all__ = ["LoopbackHub"]


class LoopbackHub:
    """A threaded HTTP/1.1 server on 127.0.0.1 that answers as the Hub does for data sets.

    It answers what a client asks to read (repository, revision, tree in pages, paths-info, HEAD
    and GET of files with ETag, X-Repo-Commit, Content-Length and ranges) and to push (repository,
    branch, uploads, commit, tag; with any token), logs every request, and does wrong what
    ``faults`` says. It listens on a real port, so that other processes reach
    it too. Only the standard library is used.

    Args:
        repos: ``{"owner/name": {path: content}}``, content as bytes or as the path of a local
            file; each repository starts with one commit on ``main``.
        page_size: entries per page of a tree listing; None for one page.

    Cost: one thread per open connection; a local file is hashed when committed (it must not change
    afterwards) and streamed in pieces of 1 MiB.
    Thread safety: every method may be called from any thread while the hub serves.

    Example:
        >>> from http.client import HTTPConnection
        >>> from replaykit.testing import LoopbackHub
        >>> with LoopbackHub({"me/data": {"dir/a.bin": b"abcdef"}}) as hub:
        ...     connection = HTTPConnection("127.0.0.1", hub.port)
        ...     path = "/datasets/me/data/resolve/main/dir/a.bin"
        ...     connection.request("GET", path, headers={"Range": "bytes=2-"})
        ...     answer = connection.getresponse()
        ...     (answer.status, answer.read())
        ...     answer.headers["X-Repo-Commit"] == hub.head("me/data")
        ...     connection.close()
        (206, b'cdef')
        True
        >>> [(request.method, request.range) for request in hub.requests], hub.bytes_served
        ([('GET', 'bytes=2-')], 4)
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
        """Begins to listen, on ports that the system chooses; nothing if it listens already."""
        if not self._servers:
            self._state.closing.clear()
            self._servers = [HubServer(self._state), HubServer(self._state)]
            self._state.url, self._state.other_url = (server.url for server in self._servers)
        return self

    def close(self) -> None:
        """Closes the ports and every connection; repositories, log and counters stay readable."""
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
        """What HF_ENDPOINT must be; stays the same, and unanswered, after ``close``.

        Raises:
            RuntimeError: the hub has not been started.
        """
        if not self._state.url:
            raise RuntimeError("the hub has no address yet: use it in a with statement, or start()")
        return self._state.url

    @property
    def port(self) -> int:
        """The port of ``url``."""
        return int(self.url.rpartition(":")[2])

    def env(self, cache_dir: str | os.PathLike[str]) -> dict[str, str]:
        """Returns the environment variables that lead huggingface_hub here and nowhere else.

        The client reads most of them when it is imported: give them to a new process, or set them
        before the first import. Everything it writes goes below ``cache_dir``.

        Example:
            >>> from replaykit.testing import LoopbackHub
            >>> with LoopbackHub() as hub:
            ...     hub.env("/tmp/cache")["HF_HUB_CACHE"]
            '/tmp/cache/hub'
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
        """Adds a commit on top of ``branch``, moves the branch, and returns the full commit id.

        Files that are not named stay as they are; None as content removes a file. The repository
        is made if it is new. The same commits in the same order have the same ids in every run.

        Raises:
            ValueError: ``repo_id`` or a path is malformed; nothing is committed.
            FileNotFoundError: a local file, or a file to remove, is not there.

        Example:
            >>> from replaykit.testing import LoopbackHub
            >>> hub = LoopbackHub({"me/data": {"a.bin": b"1"}})
            >>> first = hub.head("me/data")
            >>> hub.commit("me/data", {"a.bin": b"2"}) == hub.head("me/data") != first
            True
        """
        repo = self._state.repos.get(repo_id) or Repository(repo_id)
        commit = repo.commit(files, branch)
        self._state.repos[repo_id] = repo
        return commit.id

    def tag(self, repo_id: str, name: str, commit: str) -> None:
        """Names a commit.

        Raises:
            KeyError: there is no such repository or commit.
        """
        repo = self._state.repos[repo_id]
        repo.tags[name] = repo.commits[commit].id

    def head(self, repo_id: str, branch: str = "main") -> str:
        """Returns the full id of the commit that a branch is at.

        Raises:
            KeyError: there is no such repository or branch.
        """
        return self._state.repos[repo_id].branches[branch]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Returns the content of every file of a repository at a branch, tag or commit.

        Raises:
            KeyError: there is no such repository or revision.

        Example:
            >>> from replaykit.testing import LoopbackHub
            >>> LoopbackHub({"me/data": {"a.bin": b"1"}}).files("me/data")
            {'a.bin': b'1'}
        """
        commit = self._state.repos[repo_id].resolve(revision)
        if commit is None:
            raise KeyError(revision)
        return {path: b"".join(blob.read(0, blob.size)) for path, blob in commit.files.items()}

    @property
    def faults(self) -> list[Fault]:
        """What goes wrong, in the order in which it is tried; append to it and clear it."""
        return self._state.faults

    @property
    def page_size(self) -> int | None:
        """Entries per page of a tree listing, or None; may be set at any time."""
        return self._state.page_size

    @page_size.setter
    def page_size(self, value: int | None) -> None:
        self._state.page_size = value

    @property
    def requests(self) -> list[Request]:
        """Every request so far, in order of arrival, as a new list.

        ``route`` is None where a client asked for something else than a dataset repository.
        """
        with self._state.lock:
            return list(self._state.requests)

    @property
    def bytes_served(self) -> int:
        """Bytes of files handed to the network so far, listings and messages apart."""
        with self._state.lock:
            return self._state.bytes_served

    def clear_log(self) -> None:
        """Forgets the requests and sets ``bytes_served`` to 0."""
        with self._state.lock:
            self._state.requests.clear()
            self._state.bytes_served = 0
