"""Count inserts and samples, and let calls wait until the rate limiter admits them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, MutableSequence
from pathlib import Path
from typing import Any

from replaykit.errors import RateLimiterTimeout
from replaykit.interrupts import check
from replaykit.pace.limiter import INSERT, RateLimiter
from replaykit.recovery import (
    MappedFile,
    OpenFile,
    SharedLock,
    is_held,
    let_go_in_children,
    open_to_lock,
)

__all__ = ["Counts", "Pace", "Seat", "SharedCounts", "Ticket"]


class Seat(OpenFile):
    """A number that nobody else has as long as it lives; the kernel takes back that of a process
    that dies.

    A forked child has it not, and takes another one.

    Args:
        folder: where there is a file for each number.

    Raises:
        RuntimeError: all numbers are taken.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.pace.limiter_state import Seat
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     one, other = Seat(Path(folder)), Seat(Path(folder))
        ...     numbers, taken = (one.number, other.number), not one.empty(1)
        ...     other.let_go()
        ...     free = one.empty(1)
        ...     one.let_go()
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
                self.let_go()
                continue
            self.number = number
            let_go_in_children(self)
            return
        raise RuntimeError(f"expected at most {self.MOST} processes that share a buffer")

    def empty(self, number: int) -> bool:
        """Whether nobody has that number."""
        try:
            return not is_held(self._file(number))
        except FileNotFoundError:
            return True

    def _file(self, number: int) -> Path:
        return self._folder / f"seat-{number}"


_WAITED, _PROCESSES, _BEFORE, _HEAD = 2, 4, 5, 8
"""Places of numbers: done on each side; nanoseconds waited on each side; how many processes there
may be; done on each side before the law began anew; then what is under way in each of the
processes, on each side."""


class Counts:
    """Numbers of rows on each of the two sides: done, and under way.

    Whoever reads or changes them holds ``lock``, for a few instructions.
    """

    def __init__(self) -> None:
        self.lock: Any = threading.Lock()
        self._numbers: MutableSequence[int] = [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
        self._own = _HEAD

    def done(self) -> tuple[int, int]:
        """Rows inserted, and rows sampled, since the law began."""
        numbers = self._numbers
        return numbers[0], numbers[1]

    def before(self) -> tuple[int, int]:
        """The same before that."""
        numbers = self._numbers
        return numbers[_BEFORE], numbers[_BEFORE + 1]

    def seconds(self) -> tuple[float, float]:
        """How long calls have waited on each side."""
        return self._numbers[_WAITED] / 1e9, self._numbers[_WAITED + 1] / 1e9

    def under_way(self, side: int) -> int:
        """Rows that were admitted and are not done."""
        return self._numbers[_HEAD + side]

    def begin(self, side: int, count: int) -> None:
        """Notes rows that are under way in this process."""
        self._numbers[self._own + side] += count

    def end(self, side: int, count: int, done: int) -> None:
        """Notes that they are not any more, and how many were done."""
        numbers, own = self._numbers, self._own + side
        numbers[side] += done
        numbers[own] = max(0, numbers[own] - count)

    def waited(self, side: int, seconds: float) -> None:
        """Adds to the time that calls have waited."""
        self._numbers[_WAITED + side] += int(seconds * 1e9)

    def set(self, done: tuple[int, int], before: tuple[int, int]) -> None:
        """Goes on from these counts."""
        numbers = self._numbers
        numbers[0], numbers[1] = done
        numbers[_BEFORE], numbers[_BEFORE + 1] = before

    def forget_dead(self) -> bool:
        """Forgets what is under way in processes that have died; whether there was something."""
        return False

    def let_go(self) -> None:
        """Closes what is open."""


class SharedCounts(Counts):
    """The same in a file, for all processes that have a buffer.

    Each has a place of its own for what is under way in it, so that the rows of one that was killed
    can be told from those that will come to an end.

    Args:
        folder: where the file lies, and those of the locks.
    """

    def __init__(self, folder: Path) -> None:
        self.lock = SharedLock(folder / "pace.lock", _nothing, _nothing)
        self._seat = Seat(folder)
        self._own = _HEAD + 2 * self._seat.number
        self._file = MappedFile(folder / "pace.bin", 8 * (_HEAD + 2 * Seat.MOST))
        numbers: Any = self._file.bytes.data.cast("q")
        self._numbers = numbers
        with self.lock:
            # A seat is a dead process's before it is this one's.
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

    def let_go(self) -> None:
        self._seat.let_go()
        self.lock.let_go()


def _nothing() -> None:
    pass


_ALONE = 0.05
"""Seconds between looks whether something has changed that nobody told of: rows that another buffer
over the same storage has written."""

_PAUSES = (0.0005, 0.001, 0.002, 0.005)
"""The same where other processes count too, which tell nobody; the last one again and again."""

_DEAD = 20
"""After how many looks it is asked whether processes have died in the middle of a call."""

_DONE, _SAVED_BEFORE = _COUNTS = (("inserts", "samples"), ("inserts_before", "samples_before"))
"""The counts of a state: since the law began, and before."""

_WORDS = (("insert", "samples"), ("sample", "inserts"))


class Pace:
    """The counts of one buffer, and who waits on them.

    A call is admitted before it does anything, and until it has ended its rows count against its
    own side only: a write looks at the samples that were delivered, a sample at the rows that are
    stored. So the law holds of what was done at every instant, also where calls fail. Nobody is
    served in order: of those that wait, the one whose rows fit goes on.

    No lock is held while waiting. Whoever holds the lock of the storage may call everything but
    ``admit``; what is given as ``size`` may take it.

    Args:
        limiter: the law.
        folder: where processes that share the buffer count together; None: this one alone.

    Example:
        >>> from replaykit.pace import INSERT, SAMPLE, Pace, RateLimiter
        >>> pace = Pace(RateLimiter.queue(2))
        >>> with pace.ticket(INSERT, None) as ticket:
        ...     ticket.admit(2, lambda: 0)
        ...     ticket.used(2)
        >>> pace.may(INSERT, 1, 2), pace.may(SAMPLE, 2, 2), pace.state()
        (False, True, {'inserts': 2, 'samples': 0})
    """

    def __init__(self, limiter: RateLimiter, folder: Path | None = None) -> None:
        self.limiter = limiter
        self._folder = folder
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._epoch = self._waiting = 0
        self._counts = Counts() if self._folder is None else SharedCounts(self._folder)

    def _here(self) -> Counts:
        """The counts, in a forked process too: threads of the parent are not here."""
        if self._process != os.getpid():
            before = self._counts
            before.let_go()  # first: it would take what is locked anew along
            self._start()
            if self._folder is None:
                self._counts.set(before.done(), before.before())
        return self._counts

    # -- going on -----------------------------------------------------------------------------

    def ticket(self, side: int, timeout: float | None) -> Ticket:
        """What a call holds that may wait for ``timeout`` seconds; None: without end."""
        return Ticket(self, side, timeout)

    def may(self, side: int, count: int, size: int) -> bool:
        """Whether ``count`` rows would be admitted now, where ``size`` rows are there."""
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
        """Admits ``count`` rows at once, where ``size`` rows are there, or not at all."""
        counts = self._here()
        with counts.lock:
            if not self._allowed(counts, side, count, size):
                return False
            counts.begin(side, count)
            return True

    def admit(self, side: int, count: int, size: Callable[[], int], timeout: float | None) -> None:
        """Waits until ``count`` rows may be inserted or sampled; they are under way from then on.

        Raises:
            RateLimiterTimeout: they may not yet. ValueError: they never will.
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
        """Looks once more, and waits for a change where it is still too early."""
        counts, epoch = self._here(), self._epoch
        there = size()  # may take the lock of the storage, whose holder may be telling us something
        left = math.inf if timeout is None else begun + timeout - time.monotonic()
        with self._changed:
            if self._closed:
                raise RuntimeError("this buffer was shut down")
            if self._epoch != epoch:
                return False
            if self.attempt(side, count, there):
                return True
            self.check(side, count, there)
            if left <= 0 or looks % _DEAD == _DEAD - 1:  # who never waits long asks too
                with counts.lock:
                    if counts.forget_dead():
                        return False
            if left <= 0:
                raise self.late(side, count, there, timeout)
            pause = _ALONE
            if self._folder is not None:
                pause = _PAUSES[min(looks, len(_PAUSES) - 1)]
            self._changed.wait(min(left, pause))
        check()
        return False

    def check(self, side: int, count: int, size: int) -> None:
        """Raises ValueError where ``count`` rows at once will always be too many."""
        refusal = self.limiter.never(side, count, size)
        if refusal is not None:
            raise ValueError(f"{refusal}: {self.limiter!r}")

    def late(self, side: int, count: int, size: int, timeout: float | None) -> RateLimiterTimeout:
        """What a call raises that has waited for so long; says for what, and the counts."""
        state, (what, others) = self.state(), _WORDS[side]
        rows = "1 row" if count == 1 else f"{count} rows"
        seconds = round(timeout or 0, 3)
        return RateLimiterTimeout(
            f"{'an' if side == INSERT else 'a'} {what} of {rows} waited {seconds:g} s for "
            f"{others}: {state['inserts']} inserted, {state['samples']} sampled, {size} there, "
            f"with {self.limiter!r}"
        )

    def waited(self, side: int, seconds: float) -> None:
        """Notes how long a call has waited."""
        counts = self._here()
        with counts.lock:
            counts.waited(side, seconds)

    def end(self, side: int, count: int, done: int) -> None:
        """Notes that ``count`` rows that were under way are not any more, ``done`` of them (or
        others, that nobody waited for) inserted or sampled."""
        counts = self._here()
        with counts.lock:
            counts.end(side, count, done)
        self._tell()

    def _tell(self) -> None:
        """Has those who wait look again. Who begins to wait after this finds what has changed."""
        self._epoch += 1
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        """Has those who wait in this process raise RuntimeError, and who comes later too."""
        self._here()
        with self._changed:
            self._closed = True
            self._epoch += 1
            self._changed.notify_all()

    # -- counts -------------------------------------------------------------------------------

    def start_from(self, size: int, *, counting_on: bool = False) -> None:
        """Begins anew with ``size`` rows that are there.

        Args:
            counting_on: what was done until now stays in ``stats``, and is no matter to the law.
        """
        counts = self._here()
        with counts.lock:
            inserts, before = self.limiter.counted(size), (0, 0)
            if counting_on:
                done, earlier = counts.done(), counts.before()
                before = max(0, done[0] + earlier[0] - inserts), done[1] + earlier[1]
            counts.set((inserts, 0), before)
        self._tell()

    def stats(self) -> dict[str, Any]:
        """Returns counts, and seconds that calls have waited, all of them together."""
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
        """Returns the counts; those from before the law began anew, where there are any."""
        counts = self._here()
        with counts.lock:
            done, before = counts.done(), counts.before()
        state = dict(zip(_DONE, done, strict=True))
        return {**state, **dict(zip(_SAVED_BEFORE, before, strict=True))} if any(before) else state

    @staticmethod
    def check_state(state: object) -> None:
        """Raises ValueError where it is nothing that ``state`` can have given."""
        if state is None:
            return
        if not isinstance(state, Mapping):
            raise ValueError(f"expected the counts of a rate limiter, got {state!r}")
        for name in (*_DONE, *(name for name in _SAVED_BEFORE if name in state)):
            value = state.get(name)
            if type(value) is not int or not 0 <= value < 2**62:
                raise ValueError(f"expected a count for {name!r} of a rate limiter, got {value!r}")

    def load_state(self, state: Mapping[str, int] | None, size: int) -> None:
        """Goes on from a checked state; None: from ``size`` rows that are there."""
        if state is None:
            self.start_from(size)
            return
        counts = self._here()
        with counts.lock:
            done, before = ((state.get(a, 0), state.get(b, 0)) for a, b in _COUNTS)
            counts.set(done, before)
        self._tell()


class Ticket:
    """The right of a call to insert or sample some rows; what is not used is given back."""

    __slots__ = ("_count", "_pace", "_side", "_timeout")

    def __init__(self, pace: Pace, side: int, timeout: float | None) -> None:
        self._pace, self._side, self._timeout = pace, side, timeout
        self._count: int | None = None

    @property
    def admitted(self) -> bool:
        """Whether ``admit`` has let it go on."""
        return self._count is not None

    def admit(self, count: int, size: Callable[[], int]) -> None:
        """Waits for the right; see ``Pace.admit``."""
        self._pace.admit(self._side, count, size, self._timeout)
        self._count = count

    def used(self, done: int) -> None:
        """Notes what was done, and gives the right back."""
        count, self._count = self._count, 0
        self._pace.end(self._side, count or 0, done)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        if self._count:
            self.used(0)
