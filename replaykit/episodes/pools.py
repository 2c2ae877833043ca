"""Records that come and go, and rings that grow, as columns: no object each."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Records", "Rings", "spread"]

Array = np.ndarray[Any, Any]

_FIRST = 64


def spread(start: Array, count: Array) -> Array:
    """Returns ``start[i], start[i] + 1, ...``, ``count[i]`` numbers each, one after the other.

    Example:
        >>> import numpy as np
        >>> from replaykit.episodes.pools import spread
        >>> spread(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(count)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - ends + count, count)


class Records:
    """Numbered records with a column for each of their fields, an attribute of that name.

    Numbers that were given back are used again; what stands in the fields of a number that was
    just taken is arbitrary. Cost: O(1) a record, amortised.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self._free = np.zeros(0, np.int64)
        self.capacity = 0
        self.used = 0
        for name, dtype in fields.items():
            setattr(self, name, np.zeros(0, dtype))

    def take(self, count: int) -> Array:
        """Returns ``count`` numbers that nobody has."""
        again = min(count, len(self._free))
        found, self._free = self._free[len(self._free) - again :], self._free[: -again or None]
        if again == count:
            return found
        first, self.used = self.used, self.used + count - again
        if self.used > self.capacity:
            self.capacity = max(self.used, 2 * self.capacity, _FIRST)
            for name in self._fields:
                setattr(self, name, grown(getattr(self, name), self.capacity))
        return np.concatenate([found, np.arange(first, self.used)])

    def give_back(self, numbers: Array) -> None:
        """Takes numbers back, each once."""
        self._free = np.concatenate([self._free, numbers])

    def nbytes(self) -> int:
        """Bytes that they take."""
        return int(sum(getattr(self, name).nbytes for name in self._fields) + self._free.nbytes)


class Rings:
    """Queues of whole numbers, one for each of some records, in one array.

    What a queue holds is addressed by a count that goes on for ever: entries ``lo <= i < hi``. Each
    has a piece of the array as long as a power of two. A queue that outgrows its piece gets another
    one; when the array is full all pieces are laid out anew. At most four entries of the array for
    each one in use, and O(1) an entry, amortised.
    """

    def __init__(self, dtype: Any) -> None:
        self._pool = np.zeros(_FIRST, dtype)
        self._top = 0
        self._base = np.zeros(0, np.int64)
        self._mask = np.zeros(0, np.int64)  # length of the piece - 1

    def start(self, which: Array, capacity: int) -> None:
        """Begins empty queues for records, of which there may be ``capacity``."""
        self._base = grown(self._base, capacity)
        self._mask = grown(self._mask, capacity)
        self._mask[which] = -1

    def get(self, which: Array, number: Array) -> Array:
        """Returns entries."""
        return np.asarray(self._pool[self._base[which] + (number & self._mask[which])], np.int64)

    def put(self, which: Array, number: Array, value: Array) -> None:
        """Sets entries for which there is room."""
        self._pool[self._base[which] + (number & self._mask[which])] = value

    def reserve(self, which: Array, need: Array, lo: Array, hi: Array, alive: Array) -> None:
        """Makes room for ``need`` entries in each of some queues.

        Args:
            lo, hi: which entries there are now, of all records by their number.
            alive: the numbers of all records in use.
        """
        short = need > self._mask[which] + 1
        if not short.any():
            return
        size = _power(need)
        total = int(size[short].sum())
        if self._top + total > len(self._pool):
            self._lay_out(which, size, lo, hi, alive)
            return
        which, size = which[short], size[short]
        count = hi[which] - lo[which]
        owner, number = np.repeat(which, count), spread(lo[which], count)
        kept = self.get(owner, number)
        self._base[which] = self._top + np.cumsum(size) - size
        self._mask[which] = size - 1
        self._top += total
        self.put(owner, number, kept)

    def _lay_out(self, which: Array, size: Array, lo: Array, hi: Array, alive: Array) -> None:
        count = hi[alive] - lo[alive]
        owner, number = np.repeat(alive, count), spread(lo[alive], count)
        kept = self._pool[self._base[owner] + (number & self._mask[owner])]
        wanted = np.zeros(len(self._base), np.int64)
        wanted[alive] = _power(np.maximum(count, 1))
        wanted[which] = np.maximum(size, wanted[which])
        sizes = wanted[alive]
        self._top = int(sizes.sum())
        self._pool = np.zeros(max(_FIRST, 2 * self._top), self._pool.dtype)
        self._base[alive] = np.cumsum(sizes) - sizes
        self._mask[alive] = sizes - 1
        self.put(owner, number, kept)

    def nbytes(self) -> int:
        """Bytes that they take."""
        return int(self._pool.nbytes + self._base.nbytes + self._mask.nbytes)


def grown(column: Array, size: int) -> Array:
    """Returns the column with at least ``size`` entries, new ones 0."""
    if size <= len(column):
        return column
    found = np.zeros((size, *column.shape[1:]), column.dtype)
    found[: len(column)] = column
    return found


def _power(need: Array) -> Array:
    """The least powers of two that are not below some numbers of at least 1."""
    # frexp is exact: need - 1 = m * 2**e with 0.5 <= m < 1, so that 2**e > need - 1.
    return np.int64(1) << np.frexp((need - 1).astype(np.float64))[1].astype(np.int64)
