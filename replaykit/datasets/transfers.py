"""Run downloads in threads, with retries, progress and locks."""

from __future__ import annotations

import email.utils
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from replaykit.filesystem import make_directory

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = [
    "BUSY",
    "Cancelled",
    "Meter",
    "Progress",
    "Received",
    "Requested",
    "Retry",
    "Stalled",
    "cancellable_lock",
    "collect",
    "is_local",
    "local_error",
    "metered",
    "progress_bar",
    "run_all",
    "seconds_to_wait",
    "target_lock",
    "target_lock_if_free",
]

T = TypeVar("T")

BUSY: Final = (408, 429, 500, 502, 503, 504)
"""Answers that another try may change."""

# Faults of this machine: trying again changes nothing, and the caller must see the number.
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
    """The fetch was given up elsewhere; its ``__cause__``, if any, says why."""


class Stalled(TimeoutError):
    """Nothing has arrived for as long as we are willing to wait."""


class Requested(Protocol):
    """What was asked of a server, and what its errors mean."""

    def is_transient(self, error: Exception) -> bool:
        """Whether the same call may succeed a little later."""

    def retry_after_s(self, error: Exception) -> float | None:
        """Returns how long the server asks us to wait, if it says."""

    def explain(self, error: Exception) -> Exception:
        """Returns the exception to raise: what failed and what to do."""


@dataclass(frozen=True)
class Retry:
    """How long to go on with a server that does not answer as it should.

    Attributes:
        attempts: calls in all; the Hub's client makes several requests in each.
        first_wait_s: wait before the second call; it doubles from then on.
        longest_wait_s: no wait is longer. A server that asks for more (``Retry-After``) gets no
            further call: the error says how long it wants us to stay away.
        stall_s: longest silence while a repository is being listed, or a file is received over
            plain HTTP.

    Raises:
        ValueError: fewer than one attempt, or a negative wait.

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
        """Returns what ``call`` returns; where it goes on failing, raises what the subject says."""
        wait_s = self.first_wait_s
        for left in reversed(range(self.attempts)):
            try:
                return call()
            except Cancelled:
                raise
            except Exception as error:
                # The Hub's client lets exceptions of its HTTP library out: no narrower type will
                # do.
                asked_s = subject.retry_after_s(error)
                pause_s = min(wait_s, self.longest_wait_s) if asked_s is None else asked_s
                if not left or pause_s > self.longest_wait_s or not subject.is_transient(error):
                    raise subject.explain(error) from error
            if cancel.wait(pause_s):
                raise Cancelled
            wait_s *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")


def seconds_to_wait(headers: Mapping[str, Any]) -> float | None:
    """Returns how long a server asks us to wait: ``Retry-After`` as seconds or as a date."""
    value = str(headers.get("Retry-After", "")).strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def is_local(error: Exception) -> bool:
    """Whether this machine failed, and not the server."""
    return isinstance(error, OSError) and error.errno in _LOCAL


def local_error(error: Exception, subject: object, where: str) -> OSError:
    """Returns the error for a file that could not be stored; ``where`` is what else to do."""
    assert isinstance(error, OSError)
    remedy = f"free some space, or {where}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "close some, or raise the limit (`ulimit -n`)"
    said = f"could not store {subject}: {error.strerror}; {remedy}"
    return OSError(error.errno, said, error.filename)


_NAME = "replaykit-transfer"
_GRACE_S = 1.0
_POLL_S = 0.02
# Bytes that a download may receive before it is taken for one that starts anew for ever.
_MOST_COPIES = 6
_MOST_EXTRA = 64 << 20


class Received(Protocol):
    """A file that is received: its name among the others, and its bytes."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Progress:
    """How far a fetch has come; bytes count when received, files when verified."""

    files_done: int
    files_total: int
    bytes_done: int
    bytes_total: int


def run_all(
    jobs: Sequence[Callable[[], T]], *, max_workers: int, cancel: threading.Event
) -> list[T]:
    """Returns the results in the order of the jobs, or raises the error of the first that failed.

    After an error no further job is begun, and those under way are finished. An interrupt sets
    ``cancel`` and is raised within a second: the threads are daemons, so that a client that sleeps
    or hangs keeps neither the caller nor the end of the process.
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
        # Not by join: where that is interrupted, the thread is taken for one that has ended.
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
    """Returns all items of an iterable that may hang: the client's listing sets no limit.

    Raises:
        Stalled: no item came for ``stall_s`` seconds.
    """
    found: list[T] = []
    errors: list[BaseException] = []
    end = threading.Event()

    def work() -> None:
        try:
            for item in items():
                found.append(item)  # noqa: PERF402 - one by one: each shows that it goes on
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
    """Counts what the threads of one fetch receive and tells it; its lock guards every count.

    ``failure`` is what the function that is told has raised: it ends the fetch.
    """

    def __init__(
        self,
        files_total: int,
        bytes_total: int,
        tell: Callable[[Progress], object] | None,
        cancel: threading.Event,
    ) -> None:
        self.failure: BaseException | None = None
        self._total = files_total, bytes_total
        self._tell = tell
        self._cancel = cancel
        self._received: dict[str, int] = {}
        self._done: set[str] = set()
        self._lock = threading.Lock()

    def add(self, file: Received, nbytes: int) -> None:
        """Counts received bytes of a file; negative where the client begins again."""
        with self._lock:
            self._received[file.path] = self._received.get(file.path, 0) + nbytes
            self._tell_locked()

    def begin(self, file: Received) -> None:
        """Forgets what an earlier attempt has received."""
        with self._lock:
            self._received[file.path] = 0

    def finish(self, file: Received) -> None:
        """Counts a file as done, whether it was received or lay in the cache."""
        with self._lock:
            self._received[file.path] = file.size
            self._done.add(file.path)
            self._tell_locked()

    def _tell_locked(self) -> None:
        """Under the lock, so that reports come one at a time and never run backwards in files."""
        if self._tell is None or self._cancel.is_set():
            return
        files_total, bytes_total = self._total
        received = min(sum(self._received.values()), bytes_total)
        try:
            self._tell(Progress(len(self._done), files_total, received, bytes_total))
        except BaseException as error:
            self.failure = error
            self._cancel.set()
            raise Cancelled from error

    def bar_class(self, file: Received) -> type[Any]:
        """Returns what the client takes for a progress bar: it counts here and shows nothing.

        Its ``update`` is the one place in which a download under way can be given up.
        """
        from tqdm import tqdm

        meter, most = self, _MOST_COPIES * file.size + _MOST_EXTRA

        class Bar(tqdm):
            monitor_interval = 0  # no thread of its own

            def __init__(self, *args: object, total: float | None = None, **kwargs: object) -> None:
                super().__init__(disable=True, total=total)
                self.gross = 0

            def update(self, n: float | None = 1) -> bool | None:
                if meter._cancel.is_set():
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
                """Bytes on the wire, which may be fewer than those of the file: not counted."""

        return Bar


@contextmanager
def metered(
    files: Sequence[Received],
    title: str,
    progress: bool | Callable[[Progress], object],
    cancel: threading.Event,
) -> Iterator[Meter]:
    """A meter that shows a bar on stderr (True), calls a function, or tells nobody (False)."""
    nbytes = sum(file.size for file in files)
    if not isinstance(progress, bool):
        yield Meter(len(files), nbytes, progress, cancel)
        return
    if not progress:
        yield Meter(len(files), nbytes, None, cancel)
        return
    from tqdm import tqdm

    with tqdm(total=nbytes, unit="B", unit_scale=True, desc=title) as bar:

        def show(state: Progress) -> None:
            bar.set_postfix_str(f"{state.files_done}/{state.files_total} files", refresh=False)
            bar.update(state.bytes_done - bar.n)

        yield Meter(len(files), nbytes, show, cancel)


@contextmanager
def progress_bar(title: str, nbytes: int, shown: bool | None) -> Iterator[Callable[[int], object]]:
    """Shows a bar for work on so many bytes; yields what is told of each step's bytes.

    Args:
        shown: whether there is a bar; ``None`` shows it on a terminal only.
    """
    from tqdm import tqdm

    disable = None if shown is None else not shown
    with tqdm(total=nbytes, desc=title, unit="B", unit_scale=True, disable=disable) as bar:
        yield bar.update


_LOGGER = logging.getLogger("replaykit")


@contextmanager
def target_lock(target: Path) -> Iterator[None]:
    """Holds the lock of a target while the block runs; waits for whoever holds it.

    The lock is a file beside the target that the kernel unlocks when its holder dies, so that a
    dead process never blocks another. The file stays: removing it would let two waiters lock two
    files of one name. One line is logged when there is a wait.
    """
    from filelock import Timeout

    make_directory(target.parent)
    lock = _lock(target)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        # Where no file can be made this fails, and says so; the lock would be tried for ever.
        os.close(os.open(lock.lock_file, os.O_RDWR | os.O_CREAT, 0o666))
        _LOGGER.warning("%s is being prepared by another process; waiting for it", target)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def target_lock_if_free(target: Path) -> Iterator[bool]:
    """Holds the lock of a target while the block runs, if nobody else does; never waits.

    Yields whether it is held. Where there may be no lock, as on a disk that may only be read, it
    is not.
    """
    from filelock import Timeout

    lock = _lock(target)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _lock(target: Path) -> BaseFileLock:
    from filelock import FileLock

    return FileLock(target.with_name(f".{target.name}.lock"))


_STEP_S: Final = 0.1


@contextmanager
def cancellable_lock(path: Path, cancel: Event) -> Iterator[None]:
    """Holds the lock of a file that is fetched; who wants the same file waits, if not cancelled.

    Raises:
        Cancelled: ``cancel`` was set before the lock was had.

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
