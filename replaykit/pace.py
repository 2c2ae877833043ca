"""Keep the ratio of samples to writes within bounds: the rate limiter and waiting calls."""

from __future__ import annotations

import itertools
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
from replaykit.keywords import as_number, whole_number
from replaykit.recovery.journal import MappedFile
from replaykit.recovery.locks import (
    Seat,
    SharedLock,
)
from replaykit.recovery.recovery_folder import COUNTS

INSERT, SAMPLE = 0, 1
"""Numbers of the two sides, which wait for each other."""

_SLACK = 1e-6
"""Tolerance for rounding of sums, as a fraction of a row."""


class RateLimiter:
    """Bounds on the numbers of inserted and sampled rows, as in Reverb.

    The rules use ``diff = inserts * samples_per_insert - samples``:

    - A write of n rows waits until ``diff``, with these rows included, is at most ``max_diff``. It
      does not wait if at most ``min_size_to_sample`` rows, including these, are stored.
    - A sample of n rows waits until ``min_size_to_sample`` rows are stored, and ``diff``, with the
      sample included, is at least ``min_diff``.

    One insert is one stored row; with lanes, each lane's row counts. Rows that a writer refuses or
    a transform drops do not count. One sample is one row drawn for a delivered batch. A batch thus
    counts as ``batch_size`` samples, or as fewer if it is shorter. With ``Sequence``, the anchors
    of the windows count. Prefetched batches count when they are delivered. The number of stored
    rows is ``len(rb)``.

    A rate limiter has no counts, because each buffer counts its own rows. Several buffers may use
    the same rate limiter.

    Args:
        samples_per_insert: average number of samples of a row, above 0.
        min_size_to_sample: number of stored rows before the first sample, at least 1.
        error_buffer: the largest allowed distance of ``diff`` from ``samples_per_insert *
            min_size_to_sample``, in either direction. It is at least ``max(1,
            samples_per_insert)``. Or a pair ``(min_diff, max_diff)``.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a number is out of range, or writes and samples could wait for each other
            forever.

    A write of ``n`` rows and a sample of ``m`` rows can wait for each other forever only if ``n *
    samples_per_insert + m`` is above ``max_diff - min_diff``.

    Source: Cassirer et al. 2021, "Reverb: a framework for experience replay", section 3.4.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, RateLimiter, ReplayBuffer
        >>> limiter = RateLimiter(samples_per_insert=2, min_size_to_sample=10, error_buffer=10)
        >>> limiter.min_diff, limiter.max_diff
        (10.0, 30.0)
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100), rate_limiter=limiter, batch_size=10)
        >>> _ = rb.extend(torch.arange(15))  # diff is 30: no more inserts before a sample
        >>> rb.add(torch.tensor(15), timeout=0)
        Traceback (most recent call last):
        replaykit.errors.RateLimiterTimeout: an insert of 1 row waited 0 s for samples: ...
        >>> _ = rb.sample()
        >>> rb.add(torch.tensor(15), timeout=0)
        15
        >>> rb.stats()["inserts"], rb.stats()["samples"]
        (16, 10)
    """

    def __init__(
        self,
        samples_per_insert: float,
        min_size_to_sample: int,
        error_buffer: float | tuple[float, float],
    ) -> None:
        ratio = as_number("samples_per_insert", samples_per_insert)
        if not 0 < ratio < math.inf:
            raise ValueError(f"expected samples_per_insert above 0, got {samples_per_insert!r}")
        least = whole_number("min_size_to_sample", min_size_to_sample, 1)
        middle = ratio * least
        if isinstance(error_buffer, (tuple, list)):
            if len(error_buffer) != 2:
                raise ValueError(f"expected (min_diff, max_diff), got {error_buffer!r}")
            lowest, highest = (as_number("error_buffer", bound) for bound in error_buffer)
        else:
            error = as_number("error_buffer", error_buffer)
            lowest, highest = middle - error, middle + error
        need = 2 * max(1.0, ratio)
        if not highest - lowest >= need:
            raise ValueError(
                f"expected an error_buffer that leaves room for {need:g} (2 * max(1, "
                f"samples_per_insert)), so that neither side waits forever, got {error_buffer!r}"
            )
        if not lowest <= middle <= highest:
            raise ValueError(
                "expected samples_per_insert * min_size_to_sample between min_diff and max_diff, "
                f"got {middle:g} and {error_buffer!r}"
            )
        self._set(ratio, least, lowest, highest)

    def _set(self, ratio: float, least: int, lowest: float, highest: float) -> None:
        self.samples_per_insert, self.min_size_to_sample = ratio, least
        self.min_diff, self.max_diff = lowest, highest
        self._queue = False

    @classmethod
    def min_size(cls, min_size_to_sample: int) -> RateLimiter:
        """Return a rate limiter that makes samples wait only for the first rows.

        Example:
            >>> from replaykit import RateLimiter
            >>> RateLimiter.min_size(1000)
            RateLimiter.min_size(1000)
        """
        found = cls.__new__(cls)
        found._set(
            1.0, whole_number("min_size_to_sample", min_size_to_sample, 1), -math.inf, math.inf
        )
        return found

    @classmethod
    def queue(cls, size: int) -> RateLimiter:
        """Return a rate limiter for a queue of at most ``size`` rows, each sampled once.

        With ``consume_after_n_samples=1`` each row is delivered once, and is not overwritten
        before. A batch is drawn uniformly from the rows in the queue.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, RateLimiter, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), rate_limiter=RateLimiter.queue(4),
            ...                   consume_after_n_samples=1)
            >>> _ = rb.extend(torch.arange(4))
            >>> first = rb.sample(3)
            >>> _ = rb.extend(torch.arange(4, 7), timeout=0)
            >>> sorted(torch.cat([first, rb.sample(4)]).tolist())
            [0, 1, 2, 3, 4, 5, 6]
        """
        found = cls.__new__(cls)
        found._set(1.0, 1, 0.0, float(whole_number("size", size, 1)))
        found._queue = True
        return found

    # -- the law ------------------------------------------------------------------------------

    def may_insert(self, count: int, inserts: int, samples: int, size: int) -> bool:
        """Return whether ``count`` rows may be written after ``inserts`` and ``samples``.

        ``size`` is the number of rows that are stored now.
        """
        if size + count <= self.min_size_to_sample:
            return True
        return (inserts + count) * self.samples_per_insert - samples <= self.max_diff + _SLACK

    def may_sample(self, count: int, inserts: int, samples: int, size: int) -> bool:
        """Return whether ``count`` rows may be sampled; arguments as for ``may_insert``."""
        if size < self.min_size_to_sample:
            return False
        return inserts * self.samples_per_insert - samples - count >= self.min_diff - _SLACK

    def never(self, side: int, count: int, size: int) -> str | None:
        """Return the reason why ``count`` rows are always too many; None if they are not."""
        room = self.max_diff - self.min_diff + _SLACK
        if side == SAMPLE:
            if count <= room:
                return None
            return f"expected samples of at most {int(room)} rows at once, got {count}"
        if count * self.samples_per_insert <= room or size + count <= self.min_size_to_sample:
            return None
        most = int(room / self.samples_per_insert)
        return f"expected writes of at most {most} rows at once, got {count}"

    def counted(self, size: int) -> int:
        """Return how many of ``size`` initial rows count as inserted.

        The result is at most the count of rows that a buffer can write before its first sample.
        """
        if self.may_insert(size, 0, 0, 0):
            return size
        return max(self.min_size_to_sample, int(self.max_diff / self.samples_per_insert + _SLACK))

    def check_capacity(self, capacity: int) -> None:
        """Raise ValueError if a buffer of this capacity cannot follow this rule."""
        if self.min_size_to_sample > capacity:
            raise ValueError(
                f"expected min_size_to_sample of at most the capacity of {capacity}, got "
                f"{self.min_size_to_sample}: nothing could ever be sampled"
            )
        if self._queue and self.max_diff > capacity:
            raise ValueError(
                f"expected a queue of at most the capacity of {capacity}, got {self.max_diff:g}: "
                "rows would be overwritten before they are sampled"
            )

    # -- as a value ---------------------------------------------------------------------------

    def _values(self) -> tuple[Any, ...]:
        return self.samples_per_insert, self.min_size_to_sample, self.min_diff, self.max_diff

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RateLimiter) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        if self._queue:
            return f"RateLimiter.queue({int(self.max_diff)})"
        if self.max_diff == math.inf:
            return f"RateLimiter.min_size({self.min_size_to_sample})"
        return (
            f"RateLimiter(samples_per_insert={self.samples_per_insert:g}, "
            f"min_size_to_sample={self.min_size_to_sample}, "
            f"error_buffer=({self.min_diff:g}, {self.max_diff:g}))"
        )


def checked_timeout(timeout: object) -> float | None:
    """Return a timeout in seconds; None means no limit, as for longer ones than threads can wait.

    Raises:
        TypeError: the timeout is not a number.
        ValueError: the timeout is negative or NaN.
    """
    if timeout is None:
        return None
    seconds = as_number("timeout", timeout)
    if not seconds >= 0:
        raise ValueError(f"expected a timeout of at least 0 seconds, got {timeout!r}")
    return None if seconds > threading.TIMEOUT_MAX else seconds


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
        begun = time.monotonic()
        self._here()
        with self._changed:
            self._waiting += 1
        try:
            for looks in itertools.count():
                counts, epoch = self._here(), self._epoch
                # Before `_changed`: it may take the storage's lock, whose holder notifies.
                there = size()
                left = math.inf if timeout is None else begun + timeout - time.monotonic()
                with self._changed:
                    if self._closed:
                        raise RuntimeError("this buffer was shut down")
                    if self._epoch != epoch:
                        continue
                    if self.attempt(side, count, there):
                        return
                    self.check(side, count, there)
                    if left <= 0 or looks % _DEAD == _DEAD - 1:  # also at the end of short timeouts
                        with counts.lock:
                            if counts.forget_dead():
                                continue
                    if left <= 0:
                        raise self.late(side, count, there, timeout)
                    pause = self._pause
                    if self._folder is not None:
                        pause = _PAUSES[min(looks, len(_PAUSES) - 1)]
                    self._changed.wait(min(left, pause))
                check()
        finally:
            with self._changed:
                self._waiting -= 1
            self.waited(side, time.monotonic() - begun)

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
