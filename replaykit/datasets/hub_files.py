"""Listing, download and verification of the files of a Hub repository."""

from __future__ import annotations

import importlib.util
import inspect
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from replaykit.datasets.hub_cache import (
    HubCache,
    HubFile,
    HubListing,
    Subject,
    cache_root,
    check_repo_id,
    endpoint,
    is_commit,
    is_offline,
    offline_error,
)
from replaykit.datasets.sources import sha256_of
from replaykit.datasets.transfers import (
    Meter,
    Progress,
    Retry,
    cancellable_lock,
    collect,
    metered,
    run_all,
)
from replaykit.errors import DownloadError

__all__ = ["HubFile", "HubListing", "HubParts", "Progress", "Retry", "fetch", "list_files"]

_LEAST: Final = 10 << 20
_NO_SUCH_RANGE: Final = 416


@dataclass(frozen=True)
class HubParts:
    """Resumable downloads from one dataset repository at one commit.

    Attributes:
        cache: the cache of the files.
        endpoint: the URL of the Hub.
        token: the token for repositories that are not public; None for the client's token.
        timeout_s: the limit of the wait for the metadata of a file.
        most: the largest size in bytes for which the Hub accepts plain HTTP.
        cancel: the event that is set when the fetch is cancelled.
    """

    cache: HubCache
    endpoint: str
    token: str | None
    timeout_s: int
    most: int
    cancel: threading.Event

    def resumes(self, file: HubFile) -> bool:
        """Return whether the download of a file can resume.

        This requires a large file and a SHA-256.
        """
        return file.sha256 is not None and _LEAST < file.size <= self.most

    def receive(
        self, file: HubFile, begin: Callable[[int], None], bar_class: type[Any]
    ) -> str | None:
        """Fetch the content of a file into the cache, or continue an interrupted fetch.

        Args:
            file: a file for which `resumes` is True.
            begin: function that is called with the count of bytes that are in the cache already.
            bar_class: the class of the progress bar, which counts the bytes that are received now.

        Returns:
            The problem of the received content. Content with a problem is removed. The result is
            None if the content is right. It is also None if the server has another file, which the
            client must fetch.

        Raises:
            Cancelled: the fetch was cancelled.
            Exception: the client raised an error. Received bytes are kept.

        Cost: one request for the location of the content, and one request for the content. The
        content is read once for its hash.
        """
        import huggingface_hub
        from huggingface_hub.utils import build_hf_headers

        blob, part = self.cache.blob(file), self.cache.part(file)
        assert blob is not None
        assert part is not None
        url = huggingface_hub.hf_hub_url(
            self.cache.repo_id,
            file.path,
            repo_type="dataset",
            revision=self.cache.commit,
            endpoint=self.endpoint,
        )
        said = huggingface_hub.get_hf_file_metadata(url, token=self.token, timeout=self.timeout_s)
        if said.etag != file.etag or said.size != file.size:
            return None
        headers = {**build_hf_headers(token=self.token), "Accept-Encoding": "identity"}
        if urlsplit(said.location).netloc != urlsplit(url).netloc:
            headers.pop("authorization", None)
        lock = self.cache.lock(file)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with cancellable_lock(lock, self.cancel):
            # Another process may have fetched the file while it held the lock.
            if blob.exists():
                return None
            self._receive(file, part, said.location, headers, begin, bar_class)
            digest = sha256_of(part)
            if part.stat().st_size == file.size and digest == file.sha256:
                part.replace(blob)
                return None
            part.unlink()
        return f"expected sha256 {file.sha256}, got {digest}"

    def _receive(
        self,
        file: HubFile,
        part: Path,
        url: str,
        headers: dict[str, str],
        begin: Callable[[int], None],
        bar_class: type[Any],
    ) -> None:
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get

        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        start = part.stat().st_size
        if start > file.size:
            start = 0
        begin(start)
        options: dict[str, Any] = {}
        if "tqdm_class" in inspect.signature(http_get).parameters:
            options["tqdm_class"] = bar_class
        with part.open("r+b") as content:
            content.truncate(start)
            content.seek(start)
            try:
                http_get(
                    url,
                    content,
                    resume_size=start,
                    headers=headers,
                    expected_size=file.size,
                    **options,
                )
            except HfHubHTTPError as error:
                if error.response.status_code != _NO_SUCH_RANGE:
                    raise
                content.truncate(0)
                raise ConnectionError("the server has fewer bytes than were received") from error


_NAMED_DIRECTORIES = 10
_MOST_BY_HTTP = 50_000_000_000
_DEFAULT_TIMEOUT_S = 10


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
        ImportError: huggingface_hub is not installed.
        ValueError: ``repo_id`` is malformed.

    Cost: one request for the commit unless a full commit id is given, and one request per 1000
    files of the repository.

    Example:
        >>> import os, tempfile
        >>> from unittest.mock import patch
        >>> from replaykit.datasets.hub_files import fetch, list_files
        >>> from replaykit.testing import LoopbackHub
        >>> files = {"door/seed0/a.h5": b"aa", "door/seed1/a.h5": b"b", "door2/a.h5": b"c"}
        >>> with LoopbackHub({"me/data": files}) as hub, tempfile.TemporaryDirectory() as cache:
        ...     with patch.dict(os.environ, hub.env(cache)):
        ...         listing = list_files("me/data", directory="door", suffix=".h5")
        ...         [file.path for file in listing.files]
        ...         [path.read_bytes() for path in fetch(listing)]
        ['door/seed0/a.h5', 'door/seed1/a.h5']
        [b'aa', b'b']
    """
    check_repo_id(repo_id)
    subject = Subject(repo_id, revision, endpoint())
    if is_offline():
        raise offline_error(subject)
    api = _client().HfApi(endpoint=subject.endpoint, token=token)
    never = threading.Event()

    def resolve() -> str:
        timeout_s = _etag_timeout_s()
        commit = api.dataset_info(repo_id, revision=revision, timeout=timeout_s).sha
        if not isinstance(commit, str) or not is_commit(commit):
            raise ValueError(f"expected a full commit id for {revision!r}, got {commit!r}")
        return commit

    commit = revision if is_commit(revision) else retry.run(resolve, subject, never)

    def tree() -> list[HubFile]:
        pages = partial(
            api.list_repo_tree, repo_id, recursive=True, revision=commit, repo_type="dataset"
        )
        # Directories have no size.
        entries = [entry for entry in collect(pages, retry.stall_s) if hasattr(entry, "size")]
        return [_hub_file(entry) for entry in entries]

    listed = retry.run(tree, Subject(repo_id, commit, subject.endpoint), never)
    below = directory.strip("/") + "/" if directory.strip("/") else ""
    chosen = [f for f in listed if f.path.startswith(below) and f.path.endswith(suffix)]
    if not chosen:
        raise FileNotFoundError(_nothing_there(subject, commit, below, suffix, listed))
    chosen.sort(key=lambda file: file.path)
    return HubListing(repo_id, commit, subject.endpoint, tuple(chosen))


def fetch(
    listing: HubListing,
    *,
    progress: bool | Callable[[Progress], object] = False,
    max_workers: int = 4,
    token: str | None = None,
    retry: Retry = Retry(),  # noqa: B008 - frozen
) -> list[Path]:
    """Return the local paths of a listing's files, after fetching missing files.

    Each file is verified by size and hash. Cached files need no request. Missing files are fetched
    at the listing's commit. A file that fails verification is removed from the cache and fetched
    again, at most twice. The call returns all files or raises an error. Complete files stay in the
    cache for the next call. An interrupted download continues if the file has more than 10 MiB;
    otherwise it begins again. Incomplete files that the client would never continue are removed.

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
        ImportError: a file is missing and huggingface_hub is not installed. Or a file is larger
            than 50 GB and ``hf_xet`` is not installed.
        ValueError: ``max_workers`` is below 1.

    Cost: every file is read once for its hash. A file above 10 MiB that this call has received is
    read twice. ``max_workers`` files are read at once. Memory: blocks of 1 MiB and the client's
    blocks of 10 MiB per worker.
    """
    if max_workers < 1:
        raise ValueError(f"max_workers: expected at least 1, got {max_workers}")
    cache = HubCache(cache_root(), listing.repo_id, listing.commit)
    offline = is_offline()
    if not offline:
        cache.remove_orphans(listing.files)
        cache.require_room(listing.files)
        _require_transport(cache, listing)
    cancel = threading.Event()
    with metered(listing.files, f"Downloading {listing.repo_id}", progress, cancel) as meter:
        work = _Fetch(listing, endpoint(), cache, meter, retry, cancel, token)
        one = work.verify if offline else work.obtain
        jobs = [partial(one, file) for file in listing.files]
        try:
            problems = run_all(jobs, max_workers=max_workers, cancel=cancel)
        except BaseException:
            if meter.failure is not None:
                raise meter.failure from None
            raise
    found = zip(listing.files, problems, strict=True)
    missing = [f"  {file.path}: {problem}" for file, problem in found if problem is not None]
    if missing:
        raise FileNotFoundError(_missing_offline(listing, cache, missing))
    return [cache.entry(file) for file in listing.files]


@dataclass(frozen=True)
class _Fetch:
    """The state that the threads of one call of `fetch` share."""

    listing: HubListing
    endpoint: str
    cache: HubCache
    meter: Meter
    retry: Retry
    cancel: threading.Event
    token: str | None

    def verify(self, file: HubFile) -> str | None:
        """Return the problem of a cached file, or None, without a request."""
        problem = self.cache.problem(file)
        if problem is None:
            self.meter.finish(file)
        return problem

    def obtain(self, file: HubFile) -> str | None:
        """Fetch a file into the cache and verify it; return None or raise an error."""
        subject = Subject(self.listing.repo_id, self.listing.commit, self.endpoint, file.path)
        problem = self.verify(file)
        for _ in range(2):
            if problem is None:
                return None
            # Only an existing entry is discarded. A missing entry may have a good blob from
            # another commit, which the client then links.
            if self.cache.entry(file).exists():
                self.cache.discard(file)
            download = partial(self._download, _client().hf_hub_download, file)
            problem = self.retry.run(partial(self._receive, file), subject, self.cancel)
            if problem is None:
                self.retry.run(download, subject, self.cancel)
                problem = self.verify(file)
        if problem is None:
            return None
        self.cache.discard(file)
        raise DownloadError(
            f"{subject} does not verify: {problem}; the damaged copy has been removed: call "
            "again; if the error persists, the server or a proxy alters the file"
        )

    def _receive(self, file: HubFile) -> str | None:
        """Receive a large file so that it can resume, and return its problem or None."""
        timeout_s = _etag_timeout_s()
        parts = HubParts(
            self.cache, self.endpoint, self.token, timeout_s, _MOST_BY_HTTP, self.cancel
        )
        blob = self.cache.blob(file)
        if not parts.resumes(file) or (blob is not None and blob.exists()):
            return None

        def begin(received: int) -> None:
            self.meter.begin(file)
            if received:
                self.meter.add(file, received)

        return parts.receive(file, begin, self.meter.bar_class(file))

    def _download(self, download: Callable[..., object], file: HubFile) -> None:
        blob = self.cache.blob(file)
        is_here = blob is not None and blob.exists()
        if not is_here:
            self.meter.begin(file)
        options: dict[str, Any] = {}
        if "tqdm_class" in inspect.signature(download).parameters:  # not in the first 1.x
            options["tqdm_class"] = self.meter.bar_class(file)
        download(
            repo_id=self.listing.repo_id,
            filename=file.path,
            repo_type="dataset",
            revision=self.listing.commit,
            cache_dir=self.cache.root,
            endpoint=self.endpoint,
            etag_timeout=_etag_timeout_s(),
            token=self.token,
            **options,
        )
        if blob is not None and is_here and not self.cache.entry(file).is_symlink():
            blob.unlink(missing_ok=True)  # the entry is a copy


def _client() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            "downloading from the Hub needs the package huggingface_hub: pip install "
            "huggingface_hub, or use files that are on this machine"
        ) from error
    return huggingface_hub


def _etag_timeout_s() -> int:
    value = os.environ.get("HF_HUB_ETAG_TIMEOUT", "")
    return int(value) if value.isdigit() and int(value) else _DEFAULT_TIMEOUT_S


def _hub_file(entry: Any) -> HubFile:
    sha256 = None if entry.lfs is None else entry.lfs.sha256
    return HubFile(entry.path, entry.size, sha256, entry.blob_id)


def _require_transport(cache: HubCache, listing: HubListing) -> None:
    """Refuse files that plain HTTP cannot fetch, which are those above 50 GB."""
    for file in listing.files:
        too_large = file.size > _MOST_BY_HTTP and not cache.entry(file).exists()
        if too_large and importlib.util.find_spec("hf_xet") is None:
            raise ImportError(
                f"{file.path!r} has {file.size:,} bytes, and files above {_MOST_BY_HTTP:,} can "
                "only be fetched with the package hf_xet: pip install hf_xet"
            )


def _nothing_there(
    subject: Subject, commit: str, below: str, suffix: str, listed: list[HubFile]
) -> str:
    paths = [file.path for file in listed if file.path.endswith(suffix)]
    others = sorted({path.rpartition("/")[0] or "." for path in paths})
    shown = ", ".join(repr(path) for path in others[:_NAMED_DIRECTORIES]) or "none"
    more = ", ..." if len(others) > _NAMED_DIRECTORIES else ""
    return (
        f"no file *{suffix} below directory {below or '.'!r} in {subject.repository}, commit "
        f"{commit}; directories that hold such files: {shown}{more}"
    )


def _missing_offline(listing: HubListing, cache: HubCache, missing: list[str]) -> str:
    lines = "\n".join(missing)
    return (
        f"offline mode, and {len(missing)} of {len(listing.files)} files of {listing.repo_id!r} "
        f"at commit {listing.commit} cannot be used from {cache.root}:\n{lines}\n"
        "Call again with a network and without HF_HUB_OFFLINE, or fill that cache with "
        f"hf download {listing.repo_id} --repo-type dataset --revision {listing.commit}"
    )
