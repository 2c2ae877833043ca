"""Files of the web: received in parts that outlive a process, verified, or a clear error.

The transport is the standard library's. What it leaves open is done here: going on where a
download broke off, checksums, attempts, room on the disk, one download for several processes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Final, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from replaykit._version import __version__
from replaykit.datasets.http_cache import DownloadCache, WebFile, default_downloads
from replaykit.datasets.http_errors import Refused, WebSubject
from replaykit.datasets.hub_cache import is_offline, text_hint
from replaykit.datasets.locking import cancellable_lock
from replaykit.datasets.planning import require_room_for_columns
from replaykit.datasets.retry import Cancelled, Retry
from replaykit.datasets.transfer import Meter, Progress, metered, run_all
from replaykit.errors import DownloadError

__all__ = ["download", "fetch_files", "sizes_of"]

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
    """Returns the local paths of files of the web, each fetched once and verified.

    What has been received of a file is kept when a download breaks off, by whatever cause, and the
    next call goes on from there; a server that ignores ranges sends it anew. Files with a checksum
    are verified by it whenever they are asked for. Others are kept if they are what their name
    says, and verified from then on by the checksum that they came with.

    Args:
        urls: ``http://`` or ``https://``, with the name of a file at the end.
        checksums: SHA-256 in hexadecimal digits, by URL.
        root: folder of what is fetched; by default that of the environment's
            ``REPLAYKIT_DOWNLOADS``, or ``~/.cache/replaykit/downloads``.
        progress: True for a bar on stderr, or a function that is called with a `Progress`.
        max_workers: files fetched at once.
        retry: how long to go on with a server that fails.

    Raises:
        FileNotFoundError: a file is not there; or offline mode (``HF_HUB_OFFLINE``) and files are
            missing: all are named.
        PermissionError: the server refuses access.
        DownloadError: a file could not be fetched, or does not verify.
        OSError: the disk has too little room (before anything is written), or cannot be written.
        ValueError: a malformed URL or checksum, a checksum of no URL, or ``max_workers`` below 1.

    Cost: reads every file once for its checksum; one request for the size of a file that is
    missing, and one for its content. Memory: 256 KiB per worker.

    Example:
        >>> import tempfile
        >>> from replaykit.datasets import download
        >>> from replaykit.testing import LoopbackHub
        >>> with LoopbackHub({"me/data": {"a.bin": b"abc"}}) as hub:  # any server will do
        ...     url = f"{hub.url}/datasets/me/data/resolve/main/a.bin"
        ...     [path] = download(url, root=tempfile.mkdtemp())
        >>> path.name, path.read_bytes()
        ('a.bin', b'abc')
    """
    given = [urls] if isinstance(urls, str) else list(urls)
    sums = {} if checksums is None else dict(checksums)
    unused = sorted(sums.keys() - set(given))
    if unused:
        raise ValueError(f"checksums: expected URLs that are fetched, got {unused}")
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
    """Returns the local paths of files, in their order; see `download`.

    Either every file is returned or none is; those that are complete stay for the next call.
    ``target``: where columns will be made of them, if their room is to be looked at as well.
    """
    if max_workers < 1:
        raise ValueError(f"max_workers: expected at least 1, got {max_workers}")
    cache = DownloadCache(default_downloads() if root is None else Path(root))
    cancel = threading.Event()
    wanted = list(dict.fromkeys(files))
    sizes: list[int | None] = [file.size for file in wanted]
    if not is_offline():
        sizes = sizes_of(wanted, cache, max_workers=max_workers, retry=retry, cancel=cancel)
        sized = list(zip(wanted, sizes, strict=True))
        cache.require_room(sized)
        if target is not None:
            needed, total = sum(cache.missing_bytes(sized)), sum(size or 0 for size in sizes)
            require_room_for_columns(cache.root, needed, target, total)
    items = [_Item(file, size or 0) for file, size in zip(wanted, sizes, strict=True)]
    title = f"Downloading {items[0].file.name if len(items) == 1 else f'{len(items)} files'}"
    with metered(items, title, progress, cancel) as meter:
        work = _Fetch(cache, meter, retry, cancel)
        one = work.verify if is_offline() else work.obtain
        try:
            problems = run_all(
                [partial(one, item) for item in items], max_workers=max_workers, cancel=cancel
            )
        except BaseException:
            if meter.failure is not None:
                raise meter.failure from None
            raise
    missing = [
        f"  {item.file.url}: {problem}"
        for item, problem in zip(items, problems, strict=True)
        if problem is not None
    ]
    if missing:
        lines = "\n".join(missing)
        raise FileNotFoundError(
            f"offline mode, and {len(missing)} of {len(items)} files cannot be used from "
            f"{cache.root}:\n{lines}\nCall again with a network and without HF_HUB_OFFLINE"
        )
    return [cache.entry(file) for file in files]


def sizes_of(
    files: Sequence[WebFile],
    cache: DownloadCache,
    *,
    max_workers: int = 4,
    retry: Retry = Retry(),  # noqa: B008 - frozen
    cancel: threading.Event | None = None,
) -> list[int | None]:
    """Returns the size of each file: as given, as it is here, or as the server says.

    None where it does not say.

    Raises:
        FileNotFoundError, PermissionError, DownloadError: the server does not have or give it.
    """
    cancel = threading.Event() if cancel is None else cancel

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
    """A file with the size that is shown for it: no more than a guess unless it was given."""

    file: WebFile
    size: int

    @property
    def path(self) -> str:
        return f"{self.file.url} {self.file.sha256}"


@dataclass(frozen=True)
class _Fetch:
    """What the threads of one call share."""

    cache: DownloadCache
    meter: Meter
    retry: Retry
    cancel: threading.Event

    def verify(self, item: _Item) -> str | None:
        """Returns what is wrong with a file that is kept, or None; makes no request."""
        problem = self.cache.problem(item.file)
        if problem is None:
            self.meter.finish(item)
        return problem

    def obtain(self, item: _Item) -> str | None:
        """Brings a file into the cache and verifies it: returns None, or raises."""
        problem = self.verify(item)
        if problem is None:
            return None
        self.cache.prepare(item.file)
        subject = WebSubject(item.file.url)
        with cancellable_lock(self.cache.entry(item.file).parent / ".lock", self.cancel):
            # Whoever held the lock may have brought it meanwhile.
            problem = self.verify(item)
            for _ in range(2):
                if problem is None:
                    break
                self.cache.discard(item.file)
                self.retry.run(partial(self._receive, item), subject, self.cancel)
                problem = self.cache.accept(item.file)
        if problem is None:
            self.meter.finish(item)
            return None
        raise DownloadError(
            f"{subject} does not verify: {problem}; what was received has been removed: call "
            "again, and if it stays so, the file is another one, or a proxy on the way alters it"
        )

    def _receive(self, item: _Item) -> None:
        """Receives what is missing of a file; what has come stays, whatever happens."""
        file, size = item.file, item.file.size
        start, mark = self.cache.resumable(file)
        if size is not None and start >= size:
            if start == size > 0:
                return
            start = 0
        headers = dict(_HEADERS)
        if start:
            headers["Range"] = f"bytes={start}-"
            if mark is not None:
                headers["If-Range"] = mark
        self.meter.begin(item)
        try:
            with _opened(Request(file.url, headers=headers), self.retry.stall_s) as response:
                self._receive_body(item, response, start)
        except HTTPError as error:
            if error.code == 416 and start:
                self.cache.forget_part(file)
                raise ConnectionError("the server has no bytes where ours end") from error
            raise

    def _receive_body(self, item: _Item, response: HTTPResponse, start: int) -> None:
        file, size = item.file, item.file.size
        coding = response.headers.get("Content-Encoding", "identity")
        if coding != "identity":
            raise Refused(f"the server sends it in the coding {coding!r}, which was not asked for")
        if response.status == 206:
            if _first(response) != start:
                self.cache.forget_part(file)
                raise ConnectionError("the server sends other bytes than were asked for")
        else:
            start = 0  # it ignores ranges, or has another version
        rest = _length(response)
        total = None if rest is None else start + rest
        if size is not None and total is not None and total != size:
            hint = text_hint(response.read(48))
            raise Refused(f"the server has {total:,} bytes, expected {size:,}{hint}")
        expected = size if total is None else total
        if start == 0:
            self.cache.note_mark(
                file, response.headers.get("ETag"), response.headers.get("Last-Modified")
            )
        self.meter.add(item, start)
        position = start
        with self.cache.part(file).open("r+b" if start else "wb") as part:
            part.seek(start)
            part.truncate()
            while block := response.read1(_BLOCK):
                if self.cancel.is_set():
                    raise Cancelled
                position += len(block)
                if expected is not None and position > expected:
                    raise Refused(f"the server sends more than {expected:,} bytes")
                part.write(block)
                self.meter.add(item, len(block))
        if expected is not None and position < expected:
            raise ConnectionError(f"it ended after {position:,} of {expected:,} bytes")


@contextmanager
def _opened(request: Request, timeout_s: float) -> Iterator[HTTPResponse]:
    try:
        response = cast(HTTPResponse, urlopen(request, timeout=timeout_s or None))
    except HTTPError as error:
        error.close()  # it holds the connection
        raise
    with response:
        yield response


def _length(response: HTTPResponse) -> int | None:
    value: Any = response.headers.get("Content-Length")
    return int(value) if value is not None and value.isdigit() else None


def _first(response: HTTPResponse) -> int | None:
    match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None
