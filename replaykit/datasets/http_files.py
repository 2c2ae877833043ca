"""Verified downloads over HTTP, which continue after an interruption."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from replaykit._version import __version__
from replaykit.datasets.engine.h5_checks import check_signature
from replaykit.datasets.sources import (
    PlannedFile,
    SourceFile,
    Sources,
    require_room_for_columns,
    sha256_of,
)
from replaykit.datasets.transfers import (
    Cancelled,
    Meter,
    Progress,
    Refused,
    Retry,
    Subject,
    cancellable_lock,
    difference,
    fetch_all,
    is_offline,
    run_all,
    status_of,
    text_hint,
    write_note,
)
from replaykit.errors import CorpusError
from replaykit.filesystem import require_room


@dataclass(frozen=True)
class WebSubject(Subject):
    """A requested URL, which is ``path``."""

    path: str

    again = "call again to continue it"
    cache = "REPLAYKIT_DOWNLOADS"
    settings = "any proxy"

    def __str__(self) -> str:
        return self.path

    def special(self, error: Exception) -> Exception | None:
        """Return the exception for a file that does not exist, or None."""
        status = status_of(error)
        if status not in (404, 410):
            return None
        return FileNotFoundError(
            f"there is no {self} (HTTP {status}): it has been moved or removed; fetch it from "
            "another server and pass it with source="
        )


_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_H5_SUFFIXES: Final = (".h5", ".hdf5", ".hdf")


@dataclass(frozen=True)
class WebFile:
    """The URL of a file, with its size and SHA-256 if they are known.

    Attributes:
        url: ``http://`` or ``https://``.
        size: the size in bytes; None if it is not known.
        sha256: the SHA-256 of the content, 64 hexadecimal digits; None if it is not known.

    Raises:
        ValueError: the URL is of another kind or has no file name, or the size or checksum is
            malformed.

    Example:
        >>> from replaykit.datasets.http_files import WebFile
        >>> WebFile("http://127.0.0.1/data/a%20b.hdf5").name
        'a b.hdf5'
    """

    url: str
    size: int | None = None
    sha256: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url: expected http:// or https:// and a host, got {self.url!r}")
        if self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name:
            raise ValueError(f"url: expected the name of a file at its end, got {self.url!r}")
        if self.size is not None and self.size < 0:
            raise ValueError(f"size of {self.url}: expected bytes >= 0, got {self.size}")
        if self.sha256 is not None and not _SHA256.fullmatch(self.sha256):
            raise ValueError(
                f"sha256 of {self.url}: expected 64 lower-case hexadecimal digits, got "
                f"{self.sha256!r}"
            )

    @property
    def name(self) -> str:
        """The last part of the URL's path."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


def default_downloads() -> Path:
    """Return the folder of web downloads: REPLAYKIT_DOWNLOADS or a default."""
    given = os.environ.get("REPLAYKIT_DOWNLOADS")
    if given:
        return Path(os.path.abspath(os.path.expanduser(given)))
    return Path.home() / ".cache" / "replaykit" / "downloads"


@dataclass(frozen=True)
class DownloadCache:
    """The cache of web files below ``root``, and their downloads.

    A download ends with an error if nothing arrives for ``stall_s`` seconds.
    """

    root: Path
    stall_s: float = 60.0

    def entry(self, file: WebFile) -> Path:
        """Return the path of a file in the cache, whether it exists or not."""
        key = hashlib.sha256(f"{file.url}\0{file.sha256 or ''}".encode()).hexdigest()
        return self.root / key[:32] / file.name

    def part(self, file: WebFile) -> Path:
        """Return the path of a file's received bytes."""
        entry = self.entry(file)
        return entry.with_name(f"{entry.name}.part")

    def problem(self, file: WebFile) -> str | None:
        """Return the problem of a cached file, or None if size and SHA-256 are right.

        If they are not given, the values that were stored after the download count.
        """
        entry = self.entry(file)
        if not entry.is_file():
            return f"not in {self.root}"
        stored = _read_json(_record_of(entry))
        sha256 = file.sha256 or stored.get("sha256")
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            return "its checksum is not known"
        return difference(entry, file.size, sha256)

    def accept(self, file: WebFile) -> str | None:
        """Move a received file into the cache, or remove it and return its problem.

        A file without a known checksum must have the format of its suffix. For example, a web page,
        LFS pointer or pickle with the name of an HDF5 file is refused. The checksum of an accepted
        file is stored.
        """
        part, entry = self.part(file), self.entry(file)
        problem = difference(part, file.size, file.sha256)
        if problem is None and file.sha256 is None:
            if entry.suffix.lower() in _H5_SUFFIXES:
                try:
                    check_signature(part)
                except CorpusError as error:
                    problem = str(error).removeprefix(f"{part}: ")
            if problem is None:
                write_note(_record_of(entry), json.dumps({"sha256": sha256_of(part)}))
        if problem is None:
            part.replace(entry)
        self.forget_part(file)
        return problem

    def forget_part(self, file: WebFile) -> None:
        """Remove the received bytes of a file."""
        part = self.part(file)
        part.unlink(missing_ok=True)
        _record_of(part).unlink(missing_ok=True)

    def resumable(self, file: WebFile) -> tuple[int, str | None]:
        """Return the number of reusable bytes, and the validator of their version.

        With a known checksum, all received bytes are reusable, because the checksum detects wrong
        bytes. Without a checksum, the server must have sent a validator (ETag or date). The next
        request compares this validator.
        """
        part = self.part(file)
        try:
            length = part.stat().st_size
        except OSError:
            return 0, None
        if file.sha256 is not None:
            return length, None
        mark = _read_json(_record_of(part)).get("mark")
        return (length, mark) if isinstance(mark, str) and mark else (0, None)

    def missing_bytes(self, files: Iterable[tuple[WebFile, int | None]]) -> list[int]:
        """Return the missing bytes of each file of known size that is not in the cache."""
        needed = []
        for file, size in files:
            if size is not None and not self.entry(file).is_file():
                needed.append(max(0, size - self.resumable(file)[0]))
        return needed

    def subject(self, file: WebFile) -> WebSubject:
        """Return the request for a file."""
        return WebSubject(file.url)

    def receive(self, file: WebFile, meter: Meter) -> str | None:
        """Make one attempt to fetch a file; return the problem of its bytes, or None."""
        entry = self.entry(file)
        entry.parent.mkdir(parents=True, exist_ok=True)
        with cancellable_lock(entry.with_name(".lock"), meter.cancel):
            # Another process may have fetched the file while it held the lock.
            if self.problem(file) is None:
                return None
            entry.unlink(missing_ok=True)
            _record_of(entry).unlink(missing_ok=True)
            start, mark = self.resumable(file)
            if not start or start != file.size:
                self._request(file, meter, start, mark)
            return self.accept(file)

    def _request(self, file: WebFile, meter: Meter, start: int, mark: str | None) -> None:
        """Receive the bytes of a file from ``start``, and keep them after an error."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        if mark is not None:
            headers["If-Range"] = mark
        meter.begin(file)
        try:
            with _opened(file, "GET", headers, self.stall_s) as response:
                self._receive_body(file, meter, response, start)
        except HTTPError as error:
            if error.code != 416 or not start:
                raise
            if error.headers.get("Content-Range") != f"bytes */{start}":  # not all bytes are there
                self.forget_part(file)
                raise ConnectionError("the server has fewer bytes than were received") from error

    def _receive_body(
        self, file: WebFile, meter: Meter, response: HTTPResponse, start: int
    ) -> None:
        coding = response.headers.get("Content-Encoding", "identity")
        if coding != "identity":
            raise Refused(f"the server sends the coding {coding!r}, which was not requested")
        if response.status != 206:
            start = 0  # the server ignores ranges, or has another version
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            self.forget_part(file)
            raise ConnectionError("the server sends other bytes than requested")
        rest = _length(response)
        total = file.size if rest is None else start + rest
        if file.size is not None and total != file.size:
            hint = text_hint(response.read(48))
            raise Refused(f"the server has {total:,} bytes, expected {file.size:,}{hint}")
        part = self.part(file)
        if start == 0:
            etag = response.headers.get("ETag")
            # Versions with equal weak validators may differ in bytes.
            is_strong = etag and not etag.startswith("W/")
            mark = etag if is_strong else response.headers.get("Last-Modified")
            write_note(_record_of(part), json.dumps({"mark": mark}))
        meter.add(file, start)
        position = start
        with part.open("r+b" if start else "wb") as content:
            content.seek(start)
            content.truncate()
            while block := response.read1(_BLOCK):
                if meter.cancel.is_set():
                    raise Cancelled
                position += len(block)
                if total is not None and position > total:
                    raise Refused(f"the server sends more than {total:,} bytes")
                content.write(block)
                meter.add(file, len(block))
        if total is not None and position < total:
            raise ConnectionError(f"it ended after {position:,} of {total:,} bytes")


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


_BLOCK: Final = 1 << 18
_HEADERS: Final = {"User-Agent": f"replaykit/{__version__}", "Accept-Encoding": "identity"}


def download(
    urls: str | Iterable[str],
    *,
    checksums: Mapping[str, str] | None = None,
    root: str | Path | None = None,
    progress: bool | Callable[[Progress], object] = False,
    max_workers: int = 4,
    retry: Retry = Retry(),  # noqa: B008 - frozen
) -> list[Path]:
    """Return the local paths of web files, after fetching missing files.

    Each file is fetched once and verified. An interrupted download keeps its received bytes, and
    the next call continues it. A server that ignores ranges sends the whole file again. Files with
    a given checksum are verified by it in every call. Other files must have the format of their
    suffix. Later calls verify these files by the checksum of the first download.

    Args:
        urls: ``http://`` or ``https://`` URLs that end with the name of a file.
        checksums: SHA-256 in hexadecimal digits, by URL.
        root: folder of the downloads; by default the environment variable
            ``REPLAYKIT_DOWNLOADS``, or ``~/.cache/replaykit/downloads``.
        progress: True shows a bar on stderr. A function is called with a `Progress`.
        max_workers: number of files that are fetched at once.
        retry: the attempts and waits after failures of a server.

    Raises:
        FileNotFoundError: a file does not exist on the server. Or files are missing in offline mode
            (``HF_HUB_OFFLINE``); the message names all of them.
        PermissionError: the server refuses access.
        DownloadError: a file could not be fetched, or failed verification.
        OSError: the disk has too little room, or cannot be written. The room is checked before the
            first write.
        ValueError: a URL or checksum is malformed, a checksum has no URL in ``urls``, or
            ``max_workers`` is below 1.

    Cost: every file is read once for its checksum. A missing file takes one request for its size
    and one for its content. Memory: 256 KiB per worker.

    Example:
        >>> from replaykit.datasets import download
        >>> [path] = download("https://example.org/steps.hdf5")  # doctest: +SKIP
    """
    given = [urls] if isinstance(urls, str) else list(urls)
    sums = {} if checksums is None else dict(checksums)
    unused = sorted(sums.keys() - set(given))
    if unused:
        raise ValueError(f"checksums: expected only URLs of the call, got also {unused}")
    files = [WebFile(url, sha256=sums.get(url)) for url in given]
    return fetch_files(files, root=root, progress=progress, max_workers=max_workers, retry=retry)


def fetch_files(
    files: Sequence[WebFile],
    *,
    root: str | Path | None = None,
    progress: bool | Callable[[Progress], object] = False,
    max_workers: int = 4,
    retry: Retry = Retry(),  # noqa: B008 - frozen
    target: Path | None = None,
) -> list[Path]:
    """Return the local paths of files, in the given order; see `download`.

    The call returns all files or raises an error. Complete files stay in the cache for the next
    call. With ``target``, the disk of the converted columns must also have enough room.
    """
    cache = DownloadCache(default_downloads() if root is None else Path(root), retry.stall_s)
    wanted = list(dict.fromkeys(files))
    sizes = sizes_of(wanted, cache, max_workers=max_workers, retry=retry)
    if not is_offline():
        needed = cache.missing_bytes(zip(wanted, sizes, strict=True))
        require_room(cache.root, sum(needed), max(needed, default=0))
        if target is not None:
            total = sum(size or 0 for size in sizes)
            require_room_for_columns(cache.root, sum(needed), target, total)
    fetch_all(
        cache,
        {file: size or 0 for file, size in zip(wanted, sizes, strict=True)},
        title=f"Downloading {wanted[0].name if len(wanted) == 1 else f'{len(wanted)} files'}",
        cache=cache.root,
        progress=progress,
        max_workers=max_workers,
        retry=retry,
    )
    return [cache.entry(file) for file in files]


def sizes_of(
    files: Sequence[WebFile],
    cache: DownloadCache,
    *,
    max_workers: int = 4,
    retry: Retry = Retry(),  # noqa: B008 - frozen
) -> list[int | None]:
    """Return the size of each file: given, cached, or from the server unless offline.

    A size is None if it is not known.

    Raises:
        FileNotFoundError: the server does not have the file.
        PermissionError: the server refuses access.
        DownloadError: the server fails.
    """
    cancel = threading.Event()

    def size(file: WebFile) -> int | None:
        entry = cache.entry(file)
        if file.size is not None or entry.is_file():
            return entry.stat().st_size if file.size is None else file.size
        ask = partial(_size, file, retry.stall_s)
        return None if is_offline() else retry.run(ask, cache.subject(file), cancel)

    return run_all([partial(size, file) for file in files], max_workers=max_workers, cancel=cancel)


def _size(file: WebFile, timeout_s: float) -> int | None:
    try:
        with _opened(file, "HEAD", {}, timeout_s) as response:
            return _length(response)
    except HTTPError as error:
        if error.code in (405, 501):  # a server that answers GET only
            return None
        raise


class _Redirects(HTTPRedirectHandler):
    """Repeats the method of a redirected request. Python before 3.13 turns HEAD into GET."""

    def redirect_request(self, req: Request, *answer: Any) -> Request | None:
        redirected = super().redirect_request(req, *answer)
        if redirected is not None:
            redirected.method = req.get_method()
        return redirected


@contextmanager
def _opened(
    file: WebFile, method: str, headers: Mapping[str, str], timeout_s: float
) -> Iterator[HTTPResponse]:
    request = Request(file.url, headers={**_HEADERS, **headers}, method=method)
    try:
        opened = build_opener(_Redirects).open(request, timeout=timeout_s or None)
    except HTTPError as error:
        error.close()  # the error holds the connection
        raise
    with opened as response:
        yield response


def _length(response: HTTPResponse) -> int | None:
    value: Any = response.headers.get("Content-Length")
    return int(value) if value is not None and value.isdigit() else None


@dataclass(frozen=True)
class WebFiles:
    """Files on web servers, named by their paths below the deepest common folder.

    Attributes:
        files: the files.
        natural: True to order numbers in file names by value, so that 9 comes before 10.
    """

    files: tuple[WebFile, ...]
    natural: bool = False

    @property
    def location(self) -> str:
        """The host names of the servers, for display."""
        return ", ".join(sorted({urlsplit(file.url).netloc for file in self.files}))

    @property
    def known_bytes(self) -> int | None:
        """Total size of the files in bytes; None unless every size was given."""
        sizes = [file.size for file in self.files]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def sources(self, target: Path | None = None) -> Sources:
        """Fetch and verify the files.

        Args:
            target: the directory of the columns, to check the free space of its disk as well.

        Raises:
            FileNotFoundError, PermissionError, DownloadError, OSError: as in `download`.
            ValueError: a file is given twice.
        """
        paths = fetch_files(self.files, progress=sys.stderr.isatty(), target=target)
        found = tuple(
            SourceFile(
                path,
                name,
                path.stat().st_size,
                file.sha256 or sha256_of(path),
                is_verified=file.sha256 is not None,
            )
            for file, path, name in zip(self.files, paths, self._names(), strict=True)
        )
        return Sources(found, self._origin(), self.natural)

    def listing(self) -> tuple[dict[str, Any], tuple[PlannedFile, ...], Path]:
        """Return origin, files and cache; request unknown sizes unless offline."""
        cache = DownloadCache(default_downloads())
        sizes = sizes_of(self.files, cache)
        files = tuple(
            PlannedFile(name, size, cache.entry(file).is_file())
            for file, name, size in zip(self.files, self._names(), sizes, strict=True)
        )
        return self._origin(), files, cache.root

    def _names(self) -> list[str]:
        split = [urlsplit(file.url) for file in self.files]
        paths = [unquote(f"{parts.netloc}{parts.path}") for parts in split]
        if not paths:
            return []
        base = posixpath.commonpath([posixpath.dirname(path) for path in paths] or [""])
        return [posixpath.relpath(path, base or ".") for path in paths]

    def _origin(self) -> dict[str, Any]:
        return {"kind": "http", "urls": [file.url for file in self.files]}
