"""Which slots can be drawn, how often they were, and which are free to be written again."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LiveSlots", "rising"]

Array = np.ndarray[Any, Any]

_FIRST = 64


def rising(numbers: Array) -> Array:
    """The distinct ones of some whole numbers, rising; most often they are so already."""
    return numbers if (numbers[1:] > numbers[:-1]).all() else np.unique(numbers)


class LiveSlots:
    """Slots ``0..length-1``, each of which is live or waits in line to be written again.

    Live slots lie in one array in any order, so that a draw is a number of one; one that goes is
    replaced by the last. The line is an array too, of numbers that go on for ever: a slot holds the
    number that it has in it, so that entries of slots that were written since are known for old.

    Cost: O(K) for K slots, amortised; 28 bytes a slot, up to twice as many while there come more,
    and up to 16 for the line.

    Example:
        >>> import numpy as np
        >>> from replaykit.samplers.live import LiveSlots
        >>> slots = LiveSlots()
        >>> slots.written(np.arange(4))
        >>> slots.use(np.array([2, 0]), 1)
        >>> slots.count, slots.free(9).tolist()
        (2, [2, 0])
        >>> slots.written(np.array([2]))
        >>> slots.count, slots.free(9).tolist()
        (3, [0])
    """

    def __init__(self) -> None:
        self.length = 0
        self.count = 0
        """How many are live."""
        self._uses = np.zeros(0, np.int32)
        self._live = np.zeros(0, np.int64)
        self._place = np.zeros(0, np.int64)  # among the live ones; -1: it is not
        self._number = np.zeros(0, np.int64)  # in the line; -1: it is not
        self._line = np.zeros(_FIRST, np.int64)
        self._lo, self._hi = 0, 0  # what of the array is in line
        self._base = 0  # number of its first entry

    def at(self, places: Array) -> Array:
        """Live slots by their places in ``[0, count)``."""
        return self._live[places]

    def use(self, slots: Array, most: int) -> None:
        """Notes that distinct live slots were drawn once more, of ``most`` times."""
        self._uses[slots] += 1
        gone = slots[self._uses[slots] >= most]
        if not len(gone):
            return
        holes = self._place[gone]
        after = self.count - len(gone)
        self._place[gone] = -1
        tail = self._live[after : self.count]
        kept = tail[self._place[tail] >= 0]
        holes = holes[holes < after]
        self._live[holes], self._place[kept] = kept, holes
        self.count = after
        self._queue(gone)

    def unused(self, slots: Array, most: int) -> None:
        """Takes back that slots were drawn, which have not been written since."""
        slots = np.unique(slots[slots < self.length])
        self._uses[slots] = np.maximum(self._uses[slots] - 1, 0)
        self._enliven(slots[self._uses[slots] < most])

    def written(self, slots: Array) -> None:
        """Notes slots that hold new records: they were never drawn."""
        if not len(slots):
            return
        slots = rising(slots)
        self._reserve(int(slots[-1]) + 1)
        self._uses[slots] = 0
        self._enliven(slots)
        self._advance(len(slots))

    def _enliven(self, slots: Array) -> None:
        fresh = slots[self._place[slots] < 0]
        places = np.arange(len(fresh)) + self.count
        self._live[places], self._place[fresh] = fresh, places
        self._number[fresh] = -1
        self.count += len(fresh)

    def _reserve(self, length: int) -> None:
        if length <= self.length:
            return
        if length > len(self._uses):
            room = max(length, 2 * len(self._uses), _FIRST)
            for name, fill in (("_uses", 0), ("_live", 0), ("_place", -1), ("_number", -1)):
                old = getattr(self, name)
                new = np.full(room, fill, old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)
        skipped = np.arange(self.length, length)
        self.length = length
        self._enliven(skipped)

    def free(self, count: int) -> Array:
        """The first ``count`` slots in line, or all; they stay there."""
        until = min(self._hi, self._lo + count)
        if not self._known(self._lo, until).all():
            self._tidy()
            until = min(self._hi, self._lo + count)
        return self._line[self._lo : until].copy()

    def _known(self, lo: int, hi: int) -> Array:
        """Which entries are of slots that have not been written since: bool ``[hi - lo]``."""
        return np.asarray(self._number[self._line[lo:hi]] == np.arange(lo, hi) + self._base)

    def _queue(self, slots: Array) -> None:
        if self._hi + len(slots) > len(self._line):
            waiting = self._hi - self._lo
            room = max(len(self._line), 2 * (waiting + len(slots)))
            line = np.zeros(room, np.int64)
            line[:waiting] = self._line[self._lo : self._hi]
            self._base += self._lo
            self._line, self._lo, self._hi = line, 0, waiting
        self._line[self._hi : self._hi + len(slots)] = slots
        self._number[slots] = np.arange(len(slots)) + self._hi + self._base
        self._hi += len(slots)

    def _advance(self, count: int) -> None:
        """Lets go of entries at the front that are old; at most ``count`` have become so."""
        known = self._known(self._lo, min(self._hi, self._lo + count))
        self._lo += int(known.argmax()) if known.any() else len(known)

    def _tidy(self) -> None:
        """Leaves out of the line what has been written since."""
        line = self._line[self._lo : self._hi][self._known(self._lo, self._hi)]
        self._lo = self._hi
        self._queue(line)

    def move(self, rows: Array) -> None:
        """Told that the records of slots ``rows`` now lie in slots ``0, 1, ...``, and no others."""
        self._reserve(int(rows.max()) + 1 if len(rows) else 0)
        uses, live, line = self.state()
        now = np.full(len(uses), -1, np.int64)
        now[rows] = np.arange(len(rows))
        live, line = now[live], now[line]
        self._set(uses[rows], live[live >= 0], line[line >= 0])

    # -- state --------------------------------------------------------------------------------

    def state(self) -> tuple[Array, Array, Array]:
        """Copies of how often each slot was drawn, the live ones, and the line: int64 each."""
        self._tidy()
        return (
            self._uses[: self.length].astype(np.int64),
            self._live[: self.count].copy(),
            self._line[self._lo : self._hi].copy(),
        )

    @classmethod
    def of(cls, uses: Array, live: Array, line: Array, most: int) -> LiveSlots:
        """Returns what ``state`` told of; ValueError where that contradicts itself."""
        length, whole = len(uses), np.concatenate([live, line])
        seen = np.zeros(length, bool)
        if len(whole) == length and ((whole >= 0) & (whole < length)).all():
            seen[whole] = True
        if not (
            len(whole) == length
            and seen.all()
            and ((uses >= 0) & (uses <= most)).all()
            and (uses[live] < most).all()
            and (uses[line] == most).all()
        ):
            raise ValueError(
                f"expected each of {length} rows to be sampleable, or free after {most} draws, got "
                f"{uses.tolist()[:8]} draws, {live.tolist()[:8]} sampleable, {line.tolist()[:8]} "
                "free"
            )
        found = cls()
        found._set(uses, live, line)
        return found

    def _set(self, uses: Array, live: Array, line: Array) -> None:
        length = len(uses)
        self.length, self.count = length, len(live)
        self._uses = uses.astype(np.int32)
        self._live = np.zeros(length, np.int64)
        self._live[: len(live)] = live
        self._place = np.full(length, -1, np.int64)
        self._place[live] = np.arange(len(live))
        self._number = np.full(length, -1, np.int64)
        self._lo = self._hi
        self._queue(line)
