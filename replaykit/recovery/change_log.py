"""What was changed last in tables that several processes have copies of."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaykit import native

__all__ = ["ChangeLog"]

_core = native.core()

Array = np.ndarray[Any, Any]

_BITS = 48
_EVERYTHING = (1 << _BITS) - 1


class ChangeLog:
    """A ring of the numbers of changed elements, for who comes later to look them up.

    How many were ever noted is for the caller to keep, where it changes together with all else:
    what was noted after that number counts for nothing.

    Args:
        numbers: int64 ``[C]``, the memory it lies in.

    Example:
        >>> import numpy as np
        >>> from replaykit.recovery import ChangeLog
        >>> log = ChangeLog(np.zeros(16, np.int64))
        >>> count = log.note(0, [(8, np.array([3, 5])), (1, None)])
        >>> log.since(0, count)
        {8: array([3, 5]), 1: None}
        >>> log.since(0, 100) is None
        True
    """

    def __init__(self, numbers: Array) -> None:
        self._numbers = numbers
        # Half of it may be overwritten by who dies before it counts.
        self._most = len(numbers) // 2

    def note(self, count: int, changes: list[tuple[int, Array | None]]) -> int:
        """Notes changed elements of tables, None for all of one; returns the new count.

        Args:
            count: how many were noted before.
            changes: number of the table, and its elements int64 ``[K]``.
        """
        if sum(1 if at is None else len(at) for _, at in changes) > self._most:
            changed = dict.fromkeys(table for table, at in changes if at is None or len(at))
            changes = [(table, None) for table in changed]
        for table, at in changes:
            found = np.array([_EVERYTHING]) if at is None else at
            first = count % len(self._numbers)
            until = first + len(found)
            if _core is not None:
                _core.log_elements(self._numbers, count, found, table << _BITS)
            elif until <= len(self._numbers):
                np.bitwise_or(found, table << _BITS, out=self._numbers[first:until])
            else:
                places = np.arange(first, until) % len(self._numbers)
                self._numbers[places] = found | (table << _BITS)
            count += len(found)
        return count

    def since(self, known: int, count: int) -> dict[int, Array | None] | None:
        """Which elements were changed since ``known`` were noted: by table, None for all of it.

        None: too many were, so that it may be all of every table.
        """
        if count - known > self._most:
            return None
        if known == count:
            return {}
        numbers = self._numbers[np.arange(known, count) % len(self._numbers)]
        tables, elements = numbers >> _BITS, numbers & _EVERYTHING
        found: dict[int, Array | None] = {}
        for table in dict.fromkeys(tables.tolist()):
            own = elements[tables == table]
            found[table] = None if (own == _EVERYTHING).any() else np.unique(own)
        return found
