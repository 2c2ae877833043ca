"""Work on several threads that can be given up at once, and how far it has come."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from replaykit.datasets.retry import Cancelled, Stalled

__all__ = ["Meter", "Progress", "Received", "collect", "metered", "run_all"]

T = TypeVar("T")

_NAME = "replaykit-transfer"
_GRACE_S = 1.0
_STEP_S = 0.02
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
            time.sleep(_STEP_S)
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
