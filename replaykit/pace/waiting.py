"""Count inserts and samples, and delay calls until the rate limiter admits them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, MutableSequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replaykit.declared import Count, decode_state
from replaykit.errors import RateLimiterTimeout
from replaykit.interrupts import check
from replaykit.pace.limiter import INSERT, RateLimiter
from replaykit.recovery.journal import MappedFile
from replaykit.recovery.locks import OpenFile, SharedLock, drop_in_children, is_held, open_to_lock
from replaykit.recovery.recovery_folder import COUNTS


class Seat(OpenFile):
    """A number that no other live seat of the same folder has.

    The kernel releases the number of a process that dies. A forked child does not keep its parent's
    number, and takes another number.

    Args:
        folder: the folder with one file per number.

    Raises:
        RuntimeError: all numbers are in use.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.pace.waiting import Seat
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     one, other = Seat(Path(folder)), Seat(Path(folder))
        ...     numbers, taken = (one.number, other.number), not one.empty(1)
        ...     other.drop()
        ...     free = one.empty(1)
        ...     one.drop()
        >>> numbers, taken, free
        ((0, 1), True, True)
    """

    MOST = 1 << 12

    def __init__(self, folder: Path) -> None:
        import fcntl

        self._folder = folder
        for number in range(self.MOST):
            self._fd = open_to_lock(self._file(number), os.O_CREAT)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.drop()
                continue
            self.number = number
            drop_in_children(self)
            return
        raise RuntimeError(f"expected at most {self.MOST} processes that share a buffer")

    def empty(self, number: int) -> bool:
        """Return whether no seat has that number."""
        try:
            return not is_held(self._file(number))
        except FileNotFoundError:
            return True

    def _file(self, number: int) -> Path:
        return self._folder / f"seat-{number}"


_WAITED, _PROCESSES, _BEFORE, _HEAD = 2, 4, 5, 8
"""Places of the numbers, most of them one for each side.

They are: rows done, nanoseconds waited, an upper bound of the number of processes (one number), and
rows done before the last reset. Then follow the rows under way in each process."""


class Counts:
    """Counts of completed and unfinished rows, for inserts and for samples.

    Code that reads or changes them holds ``lock`` for a few instructions.
    """

    def __init__(self) -> None:
        self.lock: Any = threading.Lock()
        self._numbers: MutableSequence[int] = [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
        self._own = _HEAD

    def done(self) -> tuple[int, int]:
        """Return the numbers of rows inserted and sampled since the last reset."""
        numbers = self._numbers
        return numbers[0], numbers[1]

    def before(self) -> tuple[int, int]:
        """Return the numbers of rows inserted and sampled before the last reset."""
        numbers = self._numbers
        return numbers[_BEFORE], numbers[_BEFORE + 1]

    def seconds(self) -> tuple[float, float]:
        """Return the seconds that calls have waited on each side."""
        return self._numbers[_WAITED] / 1e9, self._numbers[_WAITED + 1] / 1e9

    def under_way(self, side: int) -> int:
        """Return the number of rows that were admitted and are not completed."""
        return self._numbers[_HEAD + side]

    def begin(self, side: int, count: int) -> None:
        """Add unfinished rows of this process."""
        self._numbers[self._own + side] += count

    def end(self, side: int, count: int, done: int) -> None:
        """Remove ``count`` unfinished rows, and add ``done`` completed rows."""
        numbers, own = self._numbers, self._own + side
        numbers[side] += done
        numbers[own] = max(0, numbers[own] - count)

    def waited(self, side: int, seconds: float) -> None:
        """Add to the time that calls have waited."""
        self._numbers[_WAITED + side] += int(seconds * 1e9)

    def set(self, done: tuple[int, int], before: tuple[int, int]) -> None:
        """Continue from these counts."""
        numbers = self._numbers
        numbers[0], numbers[1] = done
        numbers[_BEFORE], numbers[_BEFORE + 1] = before

    def forget_dead(self) -> bool:
        """Drop unfinished rows of dead processes; return whether there were any."""
        return False

    def drop(self) -> None:
        """Close the open files."""


class SharedCounts(Counts):
    """Counts in a file, for all processes that share a buffer.

    The file has a separate entry for the unfinished rows of each process. The rows of a killed
    process, which will never complete, can therefore be dropped.

    Args:
        folder: the folder of the file and of the lock files.
    """

    def __init__(self, folder: Path) -> None:
        self.lock = SharedLock(folder / "pace.lock", _nothing, _nothing)
        self._seat = Seat(folder)
        self._own = _HEAD + 2 * self._seat.number
        self._file = MappedFile(folder / COUNTS, 8 * (_HEAD + 2 * Seat.MOST))
        numbers: Any = self._file.bytes.data.cast("q")
        self._numbers = numbers
        with self.lock:
            # The seat may be that of a process that has died.
            numbers[_PROCESSES] = max(numbers[_PROCESSES], self._seat.number + 1)
            numbers[self._own] = numbers[self._own + 1] = 0

    def under_way(self, side: int) -> int:
        numbers = self._numbers
        return sum(numbers[_HEAD + side : _HEAD + 2 * numbers[_PROCESSES] : 2])

    def forget_dead(self) -> bool:
        numbers, found = self._numbers, False
        for number in range(numbers[_PROCESSES]):
            at = _HEAD + 2 * number
            busy = at != self._own and (numbers[at] or numbers[at + 1])
            if busy and self._seat.empty(number):
                numbers[at] = numbers[at + 1] = 0
                found = True
        return found

    def drop(self) -> None:
        self._seat.drop()
        self.lock.drop()


def _nothing() -> None:
    pass


_ALONE = 0.05
"""Seconds between polls for changes without a notification.

Such a change is a write by another buffer over the same storage."""

_PAUSES = (0.0005, 0.001, 0.002, 0.005)
"""Seconds between polls for changes by other processes. The last value repeats."""

_DEAD = 20
"""The number of polls between checks for processes that have died during a call."""

_LIMITER = "the counts of a rate limiter"


@dataclass(frozen=True)
class LimiterCounts:
    """The rows inserted and sampled since the last reset and before it."""

    inserts: Count
    samples: Count
    inserts_before: Count = 0
    samples_before: Count = 0


_WORDS = (("insert", "samples"), ("sample", "inserts"))


class LimiterQueue:
    """The counts of one buffer, and the calls that wait for them.

    A call is admitted before it does any work. Until the call ends, its rows count only for calls
    of the same side, which are either writes or samples. A write depends on delivered samples only,
    and a sample on stored rows only. So the rule always holds for completed inserts and samples,
    even if calls fail. Waiting calls have no order. Any call may proceed if its rows fit.

    No lock is held during a wait. A thread that holds the lock of the storage may call all methods
    except ``admit``, whose argument ``size`` may take that lock.

    Args:
        limiter: the rate limiter.
        folder: the folder of counts that processes share; None for separate counts in this process.
        pause: seconds between polls for changes without a notification, without a folder.

    Example:
        >>> from replaykit.pace import INSERT, SAMPLE, LimiterQueue, RateLimiter
        >>> pace = LimiterQueue(RateLimiter.queue(2))
        >>> with pace.ticket(INSERT, None) as ticket:
        ...     ticket.admit(2, lambda: 0)
        ...     ticket.used(2)
        >>> pace.may(INSERT, 1, 2), pace.may(SAMPLE, 2, 2), pace.state()
        (False, True, {'inserts': 2, 'samples': 0})
    """

    def __init__(
        self, limiter: RateLimiter, folder: Path | None = None, *, pause: float = _ALONE
    ) -> None:
        self.limiter = limiter
        self._folder, self._pause = folder, pause
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._epoch = self._waiting = 0
        self._counts = Counts() if self._folder is None else SharedCounts(self._folder)

    def _here(self) -> Counts:
        """Return the counts; reset locks and seat first if this process was forked."""
        if self._process != os.getpid():
            before = self._counts
            before.drop()  # before `_start`, or it would also release the new locks
            self._start()
            if self._folder is None:
                self._counts.set(before.done(), before.before())
        return self._counts

    # -- waiting ------------------------------------------------------------------------------

    def ticket(self, side: int, timeout: float | None) -> Ticket:
        """Return the ticket of a call that may wait ``timeout`` seconds (None: no limit)."""
        return Ticket(self, side, timeout)

    def may(self, side: int, count: int, size: int) -> bool:
        """Return whether ``count`` rows would be admitted with ``size`` rows stored."""
        counts = self._here()
        with counts.lock:
            if self._allowed(counts, side, count, size):
                return True
            return counts.forget_dead() and self._allowed(counts, side, count, size)

    def _allowed(self, counts: Counts, side: int, count: int, size: int) -> bool:
        inserts, samples = counts.done()
        under_way = counts.under_way(side)
        if side == INSERT:
            return self.limiter.may_insert(count, inserts + under_way, samples, size + under_way)
        return self.limiter.may_sample(count, inserts, samples + under_way, size)

    def attempt(self, side: int, count: int, size: int) -> bool:
        """Admit ``count`` rows with ``size`` rows stored, if this needs no wait."""
        counts = self._here()
        with counts.lock:
            if not self._allowed(counts, side, count, size):
                return False
            counts.begin(side, count)
            return True

    def admit(self, side: int, count: int, size: Callable[[], int], timeout: float | None) -> None:
        """Wait until ``count`` rows may be inserted or sampled, and admit them.

        Raises:
            RateLimiterTimeout: the timeout has passed.
            ValueError: the rows are always too many.
            RuntimeError: the buffer was shut down.
        """
        if self.attempt(side, count, size()):
            return
        begun, looks = time.monotonic(), 0
        self._here()
        with self._changed:
            self._waiting += 1
        try:
            while not self._admitted(side, count, size, begun, timeout, looks):
                looks += 1
        finally:
            with self._changed:
                self._waiting -= 1
            self.waited(side, time.monotonic() - begun)

    def _admitted(
        self,
        side: int,
        count: int,
        size: Callable[[], int],
        begun: float,
        timeout: float | None,
        looks: int,
    ) -> bool:
        """Try once more, and wait for a change if the rows are not admitted yet."""
        counts, epoch = self._here(), self._epoch
        there = size()  # before `_changed`: it may take the storage's lock, whose holder notifies
        left = math.inf if timeout is None else begun + timeout - time.monotonic()
        with self._changed:
            if self._closed:
                raise RuntimeError("this buffer was shut down")
            if self._epoch != epoch:
                return False
            if self.attempt(side, count, there):
                return True
            self.check(side, count, there)
            if left <= 0 or looks % _DEAD == _DEAD - 1:  # also at the end of short timeouts
                with counts.lock:
                    if counts.forget_dead():
                        return False
            if left <= 0:
                raise self.late(side, count, there, timeout)
            pause = self._pause
            if self._folder is not None:
                pause = _PAUSES[min(looks, len(_PAUSES) - 1)]
            self._changed.wait(min(left, pause))
        check()
        return False

    def check(self, side: int, count: int, size: int) -> None:
        """Raise ValueError if ``count`` rows in one call are always too many."""
        refusal = self.limiter.never(side, count, size)
        if refusal is not None:
            raise ValueError(f"{refusal}: {self.limiter!r}")

    def late(self, side: int, count: int, size: int, timeout: float | None) -> RateLimiterTimeout:
        """Return the error of a call that has timed out, with the counts."""
        state, (what, others) = self.state(), _WORDS[side]
        rows = "1 row" if count == 1 else f"{count} rows"
        seconds = round(timeout or 0, 3)
        return RateLimiterTimeout(
            f"{'an' if side == INSERT else 'a'} {what} of {rows} waited {seconds:g} s for "
            f"{others}: {state['inserts']} inserted, {state['samples']} sampled, {size} there, "
            f"with {self.limiter!r}"
        )

    def waited(self, side: int, seconds: float) -> None:
        """Add the time that a call has waited."""
        counts = self._here()
        with counts.lock:
            counts.waited(side, seconds)

    def end(self, side: int, count: int, done: int) -> None:
        """Remove ``count`` unfinished rows; count ``done`` rows as inserted or sampled.

        The completed rows may be other rows than the unfinished rows, and no call may have waited
        for them.
        """
        counts = self._here()
        with counts.lock:
            counts.end(side, count, done)
        self._notify()

    def _notify(self) -> None:
        """Wake waiting calls to try again. Later calls use the new counts."""
        self._epoch += 1
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        """Make all waiting and later calls in this process raise RuntimeError."""
        self._here()
        with self._changed:
            self._closed = True
            self._epoch += 1
            self._changed.notify_all()

    # -- counts -------------------------------------------------------------------------------

    def start_from(self, size: int, *, counting_on: bool = False, joining: bool = False) -> None:
        """Restart the rule with ``size`` stored rows.

        Args:
            counting_on: True to keep earlier rows in ``stats``. The rule ignores them.
            joining: True to change nothing if other processes have counted rows.
        """
        counts = self._here()
        with counts.lock:
            if joining and any(counts.done()):
                return
            inserts, before = self.limiter.counted(size), (0, 0)
            if counting_on:
                done, earlier = counts.done(), counts.before()
                before = max(0, done[0] + earlier[0] - inserts), done[1] + earlier[1]
            counts.set((inserts, 0), before)
        self._notify()

    def stats(self) -> dict[str, Any]:
        """Return all counts, and the seconds that calls have waited in total."""
        counts = self._here()
        with counts.lock:
            done, before, waited = counts.done(), counts.before(), counts.seconds()
        return {
            "inserts": done[0] + before[0],
            "samples": done[1] + before[1],
            "insert_blocked_s": waited[0],
            "sample_blocked_s": waited[1],
        }

    def state(self) -> dict[str, int]:
        """Return the counts. Counts before the last reset are included only if not zero."""
        counts = self._here()
        with counts.lock:
            done, before = counts.done(), counts.before()
        state = {"inserts": done[0], "samples": done[1]}
        if any(before):
            state |= {"inserts_before": before[0], "samples_before": before[1]}
        return state

    @staticmethod
    def check_state(state: object) -> None:
        """Raise ValueError if the argument is neither a result of ``state`` nor None."""
        if state is not None:
            decode_state(LimiterCounts, state, _LIMITER)

    def load_state(self, state: Mapping[str, int] | None, size: int) -> None:
        """Continue from a checked state; with None, restart with ``size`` stored rows."""
        if state is None:
            self.start_from(size)
            return
        saved, counts = decode_state(LimiterCounts, state, _LIMITER), self._here()
        with counts.lock:
            counts.set((saved.inserts, saved.samples), (saved.inserts_before, saved.samples_before))
        self._notify()


class Ticket:
    """The right of a call to insert or sample some rows. Unused parts are given back."""

    __slots__ = ("_count", "_pace", "_side", "_timeout")

    def __init__(self, pace: LimiterQueue, side: int, timeout: float | None) -> None:
        self._pace, self._side, self._timeout = pace, side, timeout
        self._count: int | None = None

    @property
    def admitted(self) -> bool:
        """True if ``admit`` has returned."""
        return self._count is not None

    def admit(self, count: int, size: Callable[[], int]) -> None:
        """Wait for the right; see ``LimiterQueue.admit``."""
        self._pace.admit(self._side, count, size, self._timeout)
        self._count = count

    def used(self, done: int) -> None:
        """Count ``done`` rows, and give back the unused rest of the right."""
        count, self._count = self._count, 0
        self._pace.end(self._side, count or 0, done)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        if self._count:
            self.used(0)
