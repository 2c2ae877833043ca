"""Define records and growing rings that are stored in columns, not as objects."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Records", "Rings", "spread"]

Array = np.ndarray[Any, Any]

_FIRST = 64


def spread(start: Array, count: Array) -> Array:
    """Return joined runs of ``count[i]`` consecutive numbers from ``start[i]`` on.

    Example:
        >>> import numpy as np
        >>> from replaykit.samplers.pools import spread
        >>> spread(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(count)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(start - ends + count, count)


class Records:
    """Numbered records with one column per field.

    The column of a field is the attribute with the field's name. New records get released numbers
    first. The fields of a new record have arbitrary values. Cost: O(1) per record, amortised.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self._free = np.zeros(0, np.int64)
        self.capacity = 0
        self.used = 0
        for name, dtype in fields.items():
            setattr(self, name, np.zeros(0, dtype))

    def new_numbers(self, count: int) -> Array:
        """Return ``count`` numbers that are not in use."""
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
        """Release distinct numbers."""
        self._free = np.concatenate([self._free, numbers])

    def nbytes(self) -> int:
        """Return the size in bytes."""
        return int(sum(getattr(self, name).nbytes for name in self._fields) + self._free.nbytes)


class Rings:
    """Queues of integers, one per record, in one array.

    The entries of a queue are numbered from ``lo`` to ``hi - 1``. Each queue has a piece of the
    array whose length is a power of two. A queue that outgrows its piece gets a larger piece. When
    the array is full, all pieces move to a new array. At least a quarter of the array's entries are
    in use. Cost: O(1) per entry, amortised.
    """

    def __init__(self, dtype: Any) -> None:
        self._pool = np.zeros(_FIRST, dtype)
        self._top = 0
        self._base = np.zeros(0, np.int64)
        self._mask = np.zeros(0, np.int64)  # length of the record's piece - 1

    def start(self, which: Array, capacity: int) -> None:
        """Start empty queues for records; record numbers are below ``capacity``."""
        self._base = grown(self._base, capacity)
        self._mask = grown(self._mask, capacity)
        self._mask[which] = -1

    def get(self, which: Array, number: Array) -> Array:
        """Return the entries ``number`` of the queues ``which``."""
        return np.asarray(self._pool[self._base[which] + (number & self._mask[which])], np.int64)

    def put(self, which: Array, number: Array, value: Array) -> None:
        """Set the entries ``number`` of the queues ``which``, after ``reserve`` made room."""
        self._pool[self._base[which] + (number & self._mask[which])] = value

    def reserve(self, which: Array, need: Array, lo: Array, hi: Array, alive: Array) -> None:
        """Make room for ``need`` entries in each of the queues ``which``.

        Args:
            lo, hi: bounds of the present entries in the queues of all records.
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
        """Return the size in bytes."""
        return int(self._pool.nbytes + self._base.nbytes + self._mask.nbytes)


def grown(column: Array, size: int) -> Array:
    """Return the column with at least ``size`` entries; new entries are 0."""
    if size <= len(column):
        return column
    found = np.zeros((size, *column.shape[1:]), column.dtype)
    found[: len(column)] = column
    return found


def _power(need: Array) -> Array:
    """Return the smallest powers of two that are not below ``need``, at least 1."""
    # frexp is exact: need - 1 = m * 2**e with 0.5 <= m < 1, so that 2**e > need - 1.
    return np.int64(1) << np.frexp((need - 1).astype(np.float64))[1].astype(np.int64)
