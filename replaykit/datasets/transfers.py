"""Downloads in threads: retries, errors, progress, verification and locks."""

from __future__ import annotations

import email.utils
import errno
import hashlib
import os
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import ClassVar, Final, Protocol, TypeVar

from replaykit.errors import DownloadError
from replaykit.filesystem import replace_file

T = TypeVar("T")

# HTTP statuses after which another attempt may succeed.
_BUSY: Final = (408, 429, 500, 502, 503, 504)

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


class Refused(Exception):
    """An answer of a server after which another attempt would not help.

    The text gives the reason.
    """


class Subject(ABC):
    """A request to a server. Its text is used in error messages, with this advice to the user.

    Attributes:
        path: the name of the file, or None for another request.
        again: the state after a transfer that broke off, and the next step.
        cache: the environment variable of the cache.
        settings: the settings to check if the server cannot be reached.
        limits: the settings of the time limits.
        login: the way to gain access.
        unreachable: errors that a library raises if the server cannot be reached.
    """

    path: str | None
    again: ClassVar[str]
    cache: ClassVar[str]
    settings: ClassVar[str]
    limits: ClassVar[str] = ""
    login: ClassVar[str] = ""
    unreachable: ClassVar[tuple[type[Exception], ...]] = ()

    @abstractmethod
    def special(self, error: Exception) -> Exception | None:
        """Return the exception for an error that only this kind of server has, or None.

        Another attempt does not help after such an error.
        """

    def is_transient(self, error: Exception) -> bool:
        """Return whether a repeated call may succeed."""
        cause = cause_of(error)
        status = status_of(cause)
        if status is not None:
            return status in _BUSY
        # ValueError includes invalid certificates.
        kinds = (Refused, Stalled, ValueError, KeyError, TypeError)
        lasting = isinstance(cause, kinds) or is_local(cause)
        return not lasting and self.special(cause) is None

    def retry_after_s(self, error: Exception) -> float | None:
        """Return the wait of a ``Retry-After`` header, in seconds, or None.

        The header may contain a date.
        """
        cause = cause_of(error)
        headers = getattr(getattr(cause, "response", cause), "headers", None) or {}
        value = str(headers.get("Retry-After", "")).strip()
        if value.isdigit():
            return float(value)
        try:
            return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None

    def explain(self, error: Exception) -> Exception:
        """Return the exception to raise, whose message has the failure and the remedy."""
        cause = cause_of(error)
        special = self.special(cause)
        if special is not None:
            return special
        status = status_of(cause)
        if status in (401, 403):
            return PermissionError(f"access to {self} was refused (HTTP {status}){self.login}")
        if isinstance(cause, OSError) and is_local(cause):
            remedy = f"free some space, or set {self.cache} to a directory that can take it"
            if cause.errno in (errno.EMFILE, errno.ENFILE):
                remedy = "close some, or raise the limit (`ulimit -n`)"
            said = f"could not store {self}: {cause.strerror}; {remedy}"
            return OSError(cause.errno, said, cause.filename)
        return DownloadError(f"could not fetch {self}: {self._reason(error, cause)}")

    def _reason(self, error: Exception, cause: Exception) -> str:
        status = status_of(cause)
        if isinstance(cause, Refused):
            return str(cause)
        if status is not None:
            asked_s = self.retry_after_s(error)
            later = "later" if asked_s is None else f"in {asked_s:.0f} s"
            return f"the server answered HTTP {status}; try again {later}"
        said = f"{type(cause).__name__}: {str(cause).strip() or 'no details'}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not valid ({said})"
        lost = _is_kind(error, "URLError") or _is_kind(cause, "ConnectError", "ConnectionRefused")
        if lost or isinstance(cause, self.unreachable):
            return (
                f"the server cannot be reached; check the connection and {self.settings} ({said})"
            )
        if _is_kind(cause, "Timeout"):
            return f"no answer in time; check the connection{self.limits} ({said})"
        return f"the transfer broke off; {self.again} ({said})"


def cause_of(error: Exception) -> Exception:
    """Return the cause of an error that only states that a request failed."""
    cause: object = getattr(error, "reason", None)
    if _is_kind(error, "LocalEntryNotFoundError"):
        cause = error.__cause__
    return cause if isinstance(cause, Exception) else error


def status_of(error: Exception) -> int | None:
    """Return the HTTP status of the answer that an error describes, or None."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", getattr(error, "code", None))
    return status if isinstance(status, int) else None


def is_local(error: Exception) -> bool:
    """Return whether an error comes from this machine, not from the server."""
    return isinstance(error, OSError) and error.errno in _LOCAL


def _is_kind(error: Exception, *names: str) -> bool:
    # Compared by name, because the HTTP library of the Hub's client depends on its version.
    return any(name in kind.__name__ for kind in type(error).__mro__ for name in names)


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

    def run(self, call: Callable[[], T], subject: Subject, cancel: Event) -> T:
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


_NAME = "replaykit-transfer"
_GRACE_S = 1.0
_POLL_S = 0.02


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
    if max_workers < 1:
        raise ValueError(f"max_workers: expected at least 1, got {max_workers}")
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
        self._received: dict[Hashable, int] = {}
        self._done: set[Hashable] = set()
        self._lock = threading.Lock()

    def add(self, file: Hashable, nbytes: int) -> None:
        """Count received bytes of a file; a negative count takes bytes back."""
        with self._lock:
            self._received[file] = self._received.get(file, 0) + nbytes
            self._report_locked()

    def begin(self, file: Hashable) -> None:
        """Reset the count of a file's bytes to zero, for a new attempt."""
        with self._lock:
            self._received[file] = 0

    def finish(self, file: Hashable, nbytes: int) -> None:
        """Count a file of ``nbytes`` bytes as done, whether it was received or cached."""
        with self._lock:
            self._received[file] = nbytes
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


F = TypeVar("F", bound=Hashable)
F_contra = TypeVar("F_contra", bound=Hashable, contravariant=True)


class Fetcher(Protocol[F_contra]):
    """A cache of files, and the way to fetch them from one kind of server."""

    def entry(self, file: F_contra) -> Path:
        """Return the path of a file in the cache, whether it exists or not."""

    def problem(self, file: F_contra) -> str | None:
        """Return the problem of a cached file, or None if it is verified."""

    def subject(self, file: F_contra) -> Subject:
        """Return the request for a file."""

    def receive(self, file: F_contra, meter: Meter) -> str | None:
        """Make one attempt to fetch a file; return the problem of its bytes, or None."""


def fetch_all(
    fetcher: Fetcher[F],
    files: Mapping[F, int],
    *,
    title: str,
    cache: object,
    remedy: str = "",
    progress: bool | Callable[[Progress], object] = False,
    max_workers: int = 4,
    retry: Retry = Retry(),
) -> None:
    """Verify cached files, and fetch missing or damaged files in threads.

    A received file with a problem is fetched once more. In offline mode, nothing is fetched.

    Args:
        fetcher: the cache of the files, and the way to fetch them.
        files: the files, with their sizes in bytes for the progress, which may be inexact.
        title: text before the progress bar.
        cache: the cache, for error messages.
        remedy: another way to fill the cache, for the error in offline mode.
        progress: True shows a bar on stderr. A function is called with a `Progress`.
        max_workers: number of files that are fetched at once.
        retry: the attempts and waits after failures of a server.

    Raises:
        ValueError: ``max_workers`` is below 1.
        DownloadError: a file could not be fetched, or failed verification twice.
        FileNotFoundError: files are missing in offline mode. The message names all of them.

    Other errors are explained by the subject of the file. An error in the progress function is
    raised to the caller.
    """
    from tqdm import tqdm

    offline, cancel = is_offline(), Event()

    def obtain(file: F, meter: Meter) -> str | None:
        found, subject = fetcher.problem(file), fetcher.subject(file)
        for _ in range(0 if found is None or offline else 2):
            found = retry.run(partial(fetcher.receive, file, meter), subject, cancel)
            if found is None:
                break
        if found is None:
            meter.finish(file, fetcher.entry(file).stat().st_size)
        elif not offline:
            raise DownloadError(
                f"{subject} does not verify: {found}; call again: if the error persists, the file "
                "has changed, or a proxy alters it"
            )
        return found

    nbytes = sum(files.values())
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
        f"  {fetcher.subject(file).path}: {found}"
        for file, found in zip(files, problems, strict=True)
        if found is not None
    ]
    if missing:
        lines = "\n".join(missing)
        raise FileNotFoundError(
            f"offline mode, and {len(missing)} of {len(files)} files cannot be used from "
            f"{cache}:\n{lines}\nCall again with a network and without HF_HUB_OFFLINE{remedy}"
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
