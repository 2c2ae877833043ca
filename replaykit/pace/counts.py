"""What has been inserted and sampled, and what is under way: of one process, or of several."""

from __future__ import annotations

import threading
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any

from replaykit.pace.seats import Seat
from replaykit.recovery import MappedFile, SharedLock

__all__ = ["Counts", "SharedCounts"]

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
