"""Threads, retries, progress, verification and locks for downloads."""

from __future__ import annotations

import email.utils
import errno
import hashlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Final, Protocol, TypeVar

from replaykit.errors import DownloadError
from replaykit.filesystem import make_directory, replace_file

T = TypeVar("T")

BUSY: Final = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which another attempt may succeed."""

# Errors of this machine. Another attempt would not help, and the caller needs the errno.
_LOCAL: Final = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EMFILE,
    errno.ENAMETOOLONG,
    errno.ENFILE,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


class Cancelled(Exception):
    """Another thread cancelled the fetch; ``__cause__`` is the reason, if there is one."""


class Stalled(TimeoutError):
    """No data has arrived within the time limit."""


class Requested(Protocol):
    """A request to a server, with methods that explain its errors."""

    def is_transient(self, error: Exception) -> bool:
        """Return whether a repeated call may succeed."""

    def retry_after_s(self, error: Exception) -> float | None:
        """Return the wait in seconds that the server requests, or None."""

    def explain(self, error: Exception) -> Exception:
        """Return the exception to raise, whose message has the failure and the remedy."""


@dataclass(frozen=True)
class Retry:
    """The attempts and waits after failures of a server.

    Attributes:
        attempts: total number of calls. The Hub's client makes several requests in each call.
        first_wait_s: the wait before the second call, in seconds. It doubles before each later
            call.
        longest_wait_s: the longest wait, in seconds. If a server requests a longer wait
            (``Retry-After``), no further call is made. The error message then has the requested
            wait.
        stall_s: the longest time without data, in seconds, while a repository is listed or a file
            is received over plain HTTP.

    Raises:
        ValueError: ``attempts`` is below 1, or a wait is negative.

    Example:
        >>> from replaykit.datasets.transfers import Retry
        >>> Retry(attempts=1).attempts
        1
    """

    attempts: int = 4
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts: expected at least 1, got {self.attempts}")
        if min(self.first_wait_s, self.longest_wait_s, self.stall_s) < 0:
            raise ValueError(f"expected waits >= 0, got {self}")

    def run(self, call: Callable[[], T], subject: Requested, cancel: Event) -> T:
        """Return the result of ``call``, or raise the explained error after all attempts."""
        wait_s = self.first_wait_s
        for left in reversed(range(self.attempts)):
            try:
                return call()
            except Cancelled:
                raise
            except Exception as error:
                # The Hub's client also raises exceptions of its HTTP library, so no narrower type
                # is enough.
                asked_s = subject.retry_after_s(error)
                pause_s = min(wait_s, self.longest_wait_s) if asked_s is None else asked_s
                if not left or pause_s > self.longest_wait_s or not subject.is_transient(error):
                    raise subject.explain(error) from error
            if cancel.wait(pause_s):
                raise Cancelled
            wait_s *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")


def seconds_to_wait(headers: Mapping[str, Any]) -> float | None:
    """Return the wait of a ``Retry-After`` header, in seconds, or None.

    The header may contain a date.
    """
    value = str(headers.get("Retry-After", "")).strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def is_local(error: Exception) -> bool:
    """Return whether an error comes from this machine, not from the server."""
    return isinstance(error, OSError) and error.errno in _LOCAL


def local_error(error: Exception, subject: object, where: str) -> OSError:
    """Return the error for a file that could not be stored. ``where`` is the remedy."""
    assert isinstance(error, OSError)
    remedy = f"free some space, or {where}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "close some, or raise the limit (`ulimit -n`)"
    said = f"could not store {subject}: {error.strerror}; {remedy}"
    return OSError(error.errno, said, error.filename)


_NAME = "replaykit-transfer"
_GRACE_S = 1.0
_POLL_S = 0.02
# A download that receives more than this many copies and bytes would restart forever.
_MOST_COPIES = 6
_MOST_EXTRA = 64 << 20


class Received(Protocol):
    """A hashable file to receive, with a name and a size."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Progress:
    """The progress of a fetch, with received bytes and verified files."""

    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int


def run_all(
    jobs: Sequence[Callable[[], T]], *, max_workers: int, cancel: threading.Event
) -> list[T]:
    """Run jobs in threads; return their results in order, or raise the first error.

    After an error, no further job begins, and running jobs finish. An interrupt sets ``cancel``,
    and is raised within a second. The threads are daemons. So a job that sleeps or hangs blocks
    neither the caller nor the exit of the process.
    """
    waiting = deque(enumerate(jobs))
    ended = threading.Semaphore(0)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while not errors and not cancel.is_set():
            try:
                position, job = waiting.popleft()
            except IndexError:
                break
            try:
                results[position] = job()
            except BaseException as error:
                errors[position] = error
        ended.release()

    count = min(max_workers, len(jobs))
    threads = [
        threading.Thread(target=work, name=f"{_NAME}-fetch-{number}", daemon=True)
        for number in range(count)
    ]
    try:
        for thread in threads:
            thread.start()
        # join() is not used, because after an interrupt it would treat the thread as ended.
        for _ in threads:
            ended.acquire()
    except BaseException:
        cancel.set()
        deadline = time.monotonic() + _GRACE_S
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        raise
    if errors:
        raise errors[min(errors)]
    return [results[position] for position in range(len(jobs))]


def collect(items: Callable[[], Iterable[T]], stall_s: float) -> list[T]:
    """Return all items of an iterable that may hang, such as the client's listing.

    Raises:
        Stalled: no item came for ``stall_s`` seconds.
    """
    found: list[T] = []
    errors: list[BaseException] = []
    end = threading.Event()

    def work() -> None:
        try:
            for item in items():
                found.append(item)  # noqa: PERF402 - one by one, so that each item shows progress
        except BaseException as error:
            errors.append(error)
        finally:
            end.set()

    threading.Thread(target=work, name=f"{_NAME}-list", daemon=True).start()
    before = -1
    while not end.is_set() and len(found) > before:
        before = len(found)
        end.wait(stall_s)
    if not end.is_set():
        raise Stalled(f"nothing arrived for {stall_s:g} s")
    if errors:
        raise errors[0]
    return found


class Meter:
    """The counts of received files and bytes of one fetch, guarded by one lock.

    ``failure`` is the error that the progress function has raised. It ends the fetch. ``cancel`` is
    set when the fetch ends early.
    """

    def __init__(
        self,
        files_total: int,
        bytes_total: int,
        notify: Callable[[Progress], object] | None,
        cancel: threading.Event,
    ) -> None:
        self.failure: BaseException | None = None
        self.cancel = cancel
        self._total = files_total, bytes_total
        self._notify = notify
        self._received: dict[Received, int] = {}
        self._done: set[Received] = set()
        self._lock = threading.Lock()

    def add(self, file: Received, nbytes: int) -> None:
        """Count received bytes of a file; a negative count takes bytes back."""
        with self._lock:
            self._received[file] = self._received.get(file, 0) + nbytes
            self._report_locked()

    def begin(self, file: Received) -> None:
        """Reset the count of a file's bytes to zero, for a new attempt."""
        with self._lock:
            self._received[file] = 0

    def finish(self, file: Received) -> None:
        """Count a file as done, whether it was received or cached."""
        with self._lock:
            self._received[file] = file.size
            self._done.add(file)
            self._report_locked()

    def _report_locked(self) -> None:
        """Report under the lock, so that reports are in order and never overlap."""
        if self._notify is None or self.cancel.is_set():
            return
        files_total, bytes_total = self._total
        received = min(sum(self._received.values()), bytes_total)
        try:
            self._notify(Progress(len(self._done), files_total, received, bytes_total))
        except BaseException as error:
            self.failure = error
            self.cancel.set()
            raise Cancelled from error

    def bar_class(self, file: Received) -> type[Any]:
        """Return a progress bar class for the client that counts and shows nothing.

        Its ``update`` is the only place that can cancel a running download.
        """
        from tqdm import tqdm

        meter, most = self, _MOST_COPIES * file.size + _MOST_EXTRA

        class Bar(tqdm):
            monitor_interval = 0  # no monitor thread

            def __init__(self, *args: object, total: float | None = None, **kwargs: object) -> None:
                super().__init__(disable=True, total=total)
                self.gross = 0

            def update(self, n: float | None = 1) -> bool | None:
                if meter.cancel.is_set():
                    raise Cancelled
                step = int(n or 0)
                self.n += step
                self.gross += max(0, step)
                if self.gross > most:
                    raise ConnectionError(
                        f"received {self.gross:,} bytes of a file of {file.size:,} and no end"
                    )
                meter.add(file, step)
                return None

            def update_transfer(self, n: float) -> None:
                """Ignore the bytes on the wire, which may be fewer than the bytes of the file."""

        return Bar


F = TypeVar("F", bound=Received)


def fetch_all(
    files: Sequence[F],
    *,
    problem: Callable[[F], str | None],
    receive: Callable[[F, Meter], str | None],
    name: Callable[[F], object],
    title: str,
    cache: str,
    remedy: str = "",
    progress: bool | Callable[[Progress], object] = False,
    max_workers: int = 4,
) -> None:
    """Verify cached files, and fetch missing or damaged files in threads.

    A received file with a problem is fetched once more. In offline mode, nothing is fetched.

    Args:
        files: the files.
        problem: returns the problem of a cached file, or None.
        receive: fetches a file, and returns the problem of the received bytes, or None.
        name: returns the text for a file in the error of a failed verification.
        title: text before the progress bar.
        cache: the cache, for error messages.
        remedy: text after the remedy of the error in offline mode.
        progress: True shows a bar on stderr. A function is called with a `Progress`.
        max_workers: number of files that are fetched at once.

    Raises:
        DownloadError: a file failed verification twice.
        FileNotFoundError: files are missing in offline mode. The message names all of them.

    An error in ``receive`` or in the progress function is raised to the caller.
    """
    from tqdm import tqdm

    offline, cancel = is_offline(), Event()

    def obtain(file: F, meter: Meter) -> str | None:
        found = problem(file)
        for _ in range(0 if found is None or offline else 2):
            found = receive(file, meter)
            if found is None:
                break
        if found is None:
            meter.finish(file)
        elif not offline:
            raise DownloadError(
                f"{name(file)} does not verify: {found}; call again: if the error persists, the "
                "file has changed, or a proxy alters it"
            )
        return found

    nbytes = sum(file.size for file in files)
    shown = progress is True
    with tqdm(total=nbytes, unit="B", unit_scale=True, desc=title, disable=not shown) as bar:

        def show(state: Progress) -> None:
            bar.set_postfix_str(f"{state.files_done}/{state.files_total} files", refresh=False)
            bar.update(state.bytes_done - bar.n)

        notify = progress if callable(progress) else show if shown else None
        meter = Meter(len(files), nbytes, notify, cancel)
        jobs = [partial(obtain, file, meter) for file in files]
        try:
            problems = run_all(jobs, max_workers=max_workers, cancel=cancel)
        except BaseException:
            if meter.failure is not None:
                raise meter.failure from None
            raise
    missing = [
        f"  {file.path}: {found}"
        for file, found in zip(files, problems, strict=True)
        if found is not None
    ]
    if missing:
        lines = "\n".join(missing)
        raise FileNotFoundError(
            f"offline mode, and {len(missing)} of {len(files)} files cannot be used from {cache}:\n"
            f"{lines}\nCall again with a network and without HF_HUB_OFFLINE{remedy}"
        )


@contextmanager
def progress_bar(title: str, nbytes: int, shown: bool | None) -> Iterator[Callable[[int], object]]:
    """Show a bar for ``nbytes`` bytes, and yield the function that adds bytes to it.

    Args:
        title: the text before the bar.
        nbytes: the total number of bytes.
        shown: whether to show the bar. ``None`` shows it on a terminal only.
    """
    from tqdm import tqdm

    disable = None if shown is None else not shown
    with tqdm(total=nbytes, desc=title, unit="B", unit_scale=True, disable=disable) as bar:
        yield bar.update


_LOGGER = logging.getLogger("replaykit")


@contextmanager
def target_lock(target: Path, *, waits: bool = True) -> Iterator[bool]:
    """Hold the lock of a target while the block runs, and yield True.

    The lock is a file next to the target. The kernel unlocks it when its holder dies, so a dead
    process never blocks another process. The lock file is never removed. Otherwise, two waiting
    processes could lock two different files of the same name. If the function has to wait, it logs
    one line.

    Args:
        target: the path to lock.
        waits: if False, the function does not wait. It yields False if another process holds the
            lock, or if no lock file can be created, as on a read-only disk.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        if waits:
            make_directory(target.parent)
        lock.acquire(timeout=0)
    except (Timeout, OSError) as error:
        if not waits:
            yield False
            return
        if not isinstance(error, Timeout):
            raise
        # Fail if the lock file cannot be created. acquire() would try forever.
        os.close(os.open(lock.lock_file, os.O_RDWR | os.O_CREAT, 0o666))
        _LOGGER.warning("%s is being prepared by another process; waiting for it", target)
        lock.acquire()
    try:
        yield True
    finally:
        lock.release()


_STEP_S: Final = 0.1


@contextmanager
def cancellable_lock(path: Path, cancel: Event) -> Iterator[None]:
    """Wait for the lock of a file to fetch, and hold it while the block runs.

    The wait ends if ``cancel`` is set.

    Raises:
        Cancelled: ``cancel`` was set before the lock was free.

    Example:
        >>> import tempfile, threading
        >>> from pathlib import Path
        >>> from replaykit.datasets.transfers import cancellable_lock
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with cancellable_lock(Path(folder) / "lock", threading.Event()):
        ...         print("alone")
        alone
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=_STEP_S)
            break
        except Timeout:
            if cancel.is_set():
                raise Cancelled from None
    try:
        yield
    finally:
        lock.release()


_BLOCK: Final = 1 << 20
_SNIFFED: Final = 48


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE or the older TRANSFORMERS_OFFLINE is set."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def difference(
    path: Path, size: int | None, sha256: str | None, blob_id: str | None = None
) -> str | None:
    """Return how a file differs from its known size and hash, or None.

    Args:
        path: the file.
        size: its size in bytes, if it is known.
        sha256: its SHA-256, if it is known.
        blob_id: git's id of its content, which is compared if the SHA-256 is not known.

    Cost: reads the file once. Memory: one block of 1 MiB.
    """
    kind, wanted = ("sha256", sha256) if sha256 else ("git blob id", blob_id)
    with path.open("rb") as content:
        found = os.fstat(content.fileno()).st_size
        start = content.read(_SNIFFED)
        if size is not None and found != size:
            return f"expected {size:,} bytes, got {found:,}{text_hint(start)}"
        if wanted is None:
            return None
        digest = hashlib.sha256(start) if sha256 else hashlib.sha1(b"blob %d\0" % found + start)
        while block := content.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() == wanted:
        return None
    return f"expected {kind} {wanted}, got {digest.hexdigest()}{text_hint(start)}"


def text_hint(start: bytes) -> str:
    """Return a hint with the first line of a file if it is text, such as a web page."""
    line = start[:_SNIFFED].split(b"\n")[0].strip()
    if not line or not line.isascii() or not line.decode("ascii").isprintable():
        return ""
    return f" (it begins with the text {line.decode('ascii')!r})"


def write_note(path: Path, text: str) -> None:
    """Write a text next to cached files, completely or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text, durable=False)
