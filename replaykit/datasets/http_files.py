"""Verified downloads over HTTP, which continue after an interruption."""

from __future__ import annotations

import hashlib
import json
import os
import re
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Final, cast
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from replaykit._version import __version__
from replaykit.datasets.engine.h5_checks import check_signature
from replaykit.datasets.sources import SUFFIXES, require_room_for_columns, sha256_of
from replaykit.datasets.transfers import (
    BUSY,
    Cancelled,
    Meter,
    Progress,
    Retry,
    cancellable_lock,
    difference,
    fetch_all,
    is_local,
    is_offline,
    local_error,
    run_all,
    seconds_to_wait,
    text_hint,
    write_note,
)
from replaykit.errors import CorpusError, DownloadError
from replaykit.filesystem import require_room


class Refused(Exception):
    """An answer of a server after which another attempt would not help.

    The text gives the reason.
    """


@dataclass(frozen=True)
class WebSubject:
    """A requested URL."""

    url: str

    def __str__(self) -> str:
        return self.url

    def is_transient(self, error: Exception) -> bool:
        """Return whether a repeated call may succeed."""
        if isinstance(error, HTTPError):
            return error.code in BUSY
        cause = _cause(error)
        if is_local(cause) or isinstance(cause, ssl.SSLCertVerificationError):
            return False
        return isinstance(error, (OSError, HTTPException))

    def retry_after_s(self, error: Exception) -> float | None:
        """Return the wait in seconds that the server requests, or None."""
        return seconds_to_wait(dict(error.headers)) if isinstance(error, HTTPError) else None

    def explain(self, error: Exception) -> Exception:
        """Return the exception to raise, whose message has the failure and the remedy."""
        if isinstance(error, HTTPError):
            return self._explain_status(error)
        if isinstance(error, Refused):
            return DownloadError(f"could not fetch {self}: {error}")
        cause = _cause(error)
        if is_local(cause):
            return local_error(cause, self, "set REPLAYKIT_DOWNLOADS to a directory with room")
        said = f"{type(cause).__name__}: {str(cause).strip() or 'no details'}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return DownloadError(f"could not fetch {self}: its certificate is not valid ({said})")
        if isinstance(error, URLError):
            return DownloadError(
                f"could not fetch {self}: the server cannot be reached; check the connection and "
                f"any proxy ({said})"
            )
        return DownloadError(
            f"could not fetch {self}: the transfer broke off; call again to continue it ({said})"
        )

    def _explain_status(self, error: HTTPError) -> Exception:
        if error.code in (404, 410):
            return FileNotFoundError(
                f"there is no {self} (HTTP {error.code}): it has been moved or removed; fetch it "
                "from another server and pass it with source="
            )
        if error.code in (401, 403):
            return PermissionError(f"access to {self} was refused (HTTP {error.code})")
        asked_s = self.retry_after_s(error)
        later = "later" if asked_s is None else f"in {asked_s:.0f} s"
        return DownloadError(
            f"could not fetch {self}: the server answered HTTP {error.code}; try again {later}"
        )


def _cause(error: Exception) -> Exception:
    reason = getattr(error, "reason", None) if isinstance(error, URLError) else None
    return reason if isinstance(reason, Exception) else error


_SHA256: Final = re.compile(r"[0-9a-f]{64}")


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
    """The cache of web files below ``root``."""

    root: Path

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
            if entry.suffix.lower() in SUFFIXES:
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
_RANGE: Final = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


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
    if max_workers < 1:
        raise ValueError(f"max_workers: expected at least 1, got {max_workers}")
    cache = DownloadCache(default_downloads() if root is None else Path(root))
    wanted = list(dict.fromkeys(files))
    sizes: list[int | None] = [file.size for file in wanted]
    if not is_offline():
        sizes = sizes_of(wanted, cache, max_workers=max_workers, retry=retry)
        needed = cache.missing_bytes(zip(wanted, sizes, strict=True))
        require_room(cache.root, sum(needed), max(needed, default=0))
        if target is not None:
            total = sum(size or 0 for size in sizes)
            require_room_for_columns(cache.root, sum(needed), target, total)
    items = [_Item(file, size or 0) for file, size in zip(wanted, sizes, strict=True)]
    title = f"Downloading {items[0].file.name if len(items) == 1 else f'{len(items)} files'}"
    fetch_all(
        items,
        problem=lambda item: cache.problem(item.file),
        receive=partial(_receive, cache, retry),
        name=lambda item: item.path,
        title=title,
        cache=str(cache.root),
        progress=progress,
        max_workers=max_workers,
    )
    return [cache.entry(file) for file in files]


def sizes_of(
    files: Sequence[WebFile],
    cache: DownloadCache,
    *,
    max_workers: int = 4,
    retry: Retry = Retry(),  # noqa: B008 - frozen
) -> list[int | None]:
    """Return the size of each file: given, cached, or from the server.

    A size is None if the server does not send it.

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
        return retry.run(ask, WebSubject(file.url), cancel)

    return run_all([partial(size, file) for file in files], max_workers=max_workers, cancel=cancel)


def _size(file: WebFile, timeout_s: float) -> int | None:
    try:
        with _opened(Request(file.url, headers=_HEADERS, method="HEAD"), timeout_s) as response:
            return _length(response)
    except HTTPError as error:
        if error.code in (405, 501):  # a server that answers GET only
            return None
        raise


@dataclass(frozen=True)
class _Item:
    """A file, and its size for the progress bar, which may be inexact."""

    file: WebFile
    size: int

    @property
    def path(self) -> str:
        return self.file.url


def _receive(cache: DownloadCache, retry: Retry, item: _Item, meter: Meter) -> str | None:
    """Fetch a file into the cache, and return the problem of its bytes, or None."""
    file, folder = item.file, cache.entry(item.file).parent
    folder.mkdir(parents=True, exist_ok=True)
    with cancellable_lock(folder / ".lock", meter.cancel):
        # Another process may have fetched the file while it held the lock.
        if cache.problem(file) is None:
            return None
        cache.entry(file).unlink(missing_ok=True)
        _record_of(cache.entry(file)).unlink(missing_ok=True)
        request = partial(_request, cache, item, meter, retry.stall_s)
        retry.run(request, WebSubject(file.url), meter.cancel)
        return cache.accept(file)


def _request(cache: DownloadCache, item: _Item, meter: Meter, timeout_s: float) -> None:
    """Receive the missing bytes of a file, and keep them after an error."""
    file, size = item.file, item.file.size
    start, mark = cache.resumable(file)
    if size is not None and start >= size:
        if start == size > 0:
            return
        start = 0
    headers = dict(_HEADERS)
    if start:
        headers["Range"] = f"bytes={start}-"
        if mark is not None:
            headers["If-Range"] = mark
    meter.begin(item)
    try:
        with _opened(Request(file.url, headers=headers), timeout_s) as response:
            if response.status == 206 and mark is not None and not _is_marked(response, mark):
                cache.forget_part(file)
                raise ConnectionError("the server sends bytes of another version")
            _receive_body(cache, item, meter, response, start)
    except HTTPError as error:
        if error.code == 416 and start:
            if error.headers.get("Content-Range") == f"bytes */{start}":
                return  # all bytes are there
            cache.forget_part(file)
            raise ConnectionError("the server has fewer bytes than were received") from error
        raise


def _receive_body(
    cache: DownloadCache, item: _Item, meter: Meter, response: HTTPResponse, start: int
) -> None:
    file, size = item.file, item.file.size
    if response.status not in (200, 206):
        raise Refused(f"the server answered HTTP {response.status}, expected 200 or 206")
    coding = response.headers.get("Content-Encoding", "")
    if coding.lower() not in ("", "identity"):
        raise Refused(f"the server sends the coding {coding!r}, which was not requested")
    rest = _length(response)
    if response.status == 206:
        sent = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if sent is None or int(sent[1]) != start:
            cache.forget_part(file)
            raise ConnectionError("the server sends other bytes than requested")
        if sent[2] != "*":  # the range may end before the file
            rest = int(sent[2]) - start
    else:
        start = 0  # the server ignores ranges, or has another version
    total = None if rest is None else start + rest
    if size is not None and total is not None and total != size:
        hint = text_hint(response.read(48))
        raise Refused(f"the server has {total:,} bytes, expected {size:,}{hint}")
    expected = size if total is None else total
    part = cache.part(file)
    if start == 0:
        write_note(_record_of(part), json.dumps({"mark": _validator(response)}))
    meter.add(item, start)
    position = start
    with part.open("r+b" if start else "wb") as content:
        content.seek(start)
        content.truncate()
        while block := response.read1(_BLOCK):
            if meter.cancel.is_set():
                raise Cancelled
            position += len(block)
            if expected is not None and position > expected:
                raise Refused(f"the server sends more than {expected:,} bytes")
            content.write(block)
            meter.add(item, len(block))
    if expected is not None and position < expected:
        raise ConnectionError(f"it ended after {position:,} of {expected:,} bytes")


class _Redirects(HTTPRedirectHandler):
    """Follows redirects with the method of the request; Python below 3.13 sends GET for HEAD."""

    def redirect_request(self, req: Request, *given: Any) -> Request | None:
        following = super().redirect_request(req, *given)
        if following is not None:
            following.method = req.get_method()
        return following


@contextmanager
def _opened(request: Request, timeout_s: float) -> Iterator[HTTPResponse]:
    try:
        opened = build_opener(_Redirects).open(request, timeout=timeout_s or None)
        response = cast(HTTPResponse, opened)
    except HTTPError as error:
        error.close()  # the error holds the connection
        raise
    with response:
        yield response


def _validator(response: HTTPResponse) -> str | None:
    """Return the ETag or date of a file if it is strong: equal ones stand for equal bytes."""
    etag = response.headers.get("ETag")
    if etag is not None:
        return None if etag.startswith("W/") else etag
    modified = response.headers.get("Last-Modified", "")
    then, now = parsedate(modified), parsedate(response.headers.get("Date", ""))
    # A file may change twice in the second of its date.
    return modified if then and now and now > then else None


def _is_marked(response: HTTPResponse, mark: str) -> bool:
    """Return whether a part is of the version with a validator.

    RFC 9110 requires the ETag in every answer with a part, but not the date.
    """
    now = response.headers.get("ETag" if mark.startswith('"') else "Last-Modified")
    return now == mark or (now is None and not mark.startswith('"'))


def _length(response: HTTPResponse) -> int | None:
    value: Any = response.headers.get("Content-Length")
    is_stated = value is not None and value.isdecimal() and not response.chunked
    return int(value) if is_stated else None
