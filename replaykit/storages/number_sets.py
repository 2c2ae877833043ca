"""Questions about many distinct numbers that lie close together, answered without sorting them."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["all_distinct", "contained"]

Array = np.ndarray[Any, Any]

_WIDEST = 16
"""How many times as wide as there are numbers a table may be, of a byte each; else they are
sorted, which takes some ten times as long."""


def all_distinct(numbers: Array) -> bool:
    """Whether no number is there twice: int64 ``[K]``; O(K) where they lie close together.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.number_sets import all_distinct
        >>> all_distinct(np.array([7, 5, 6])), all_distinct(np.array([7, 5, 7]))
        (True, False)
    """
    if not len(numbers):
        return True
    table = _table(numbers)
    if table is None:
        return len(np.unique(numbers)) == len(numbers)
    return int(np.count_nonzero(table)) == len(numbers)


def contained(asked: Array, numbers: Array) -> Array:
    """Which of the numbers asked for are there: bool, of the shape of ``asked``.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.number_sets import contained
        >>> contained(np.array([4, 5, 9]), np.array([7, 5, 6])).tolist()
        [False, True, False]
    """
    if not (asked.size and len(numbers)):
        return np.zeros(asked.shape, bool)
    table = _table(numbers)
    if table is None:
        return np.isin(asked, numbers)
    lowest = numbers.min()
    inside = (asked >= lowest) & (asked < lowest + len(table))
    return np.asarray(inside & table[np.where(inside, asked - lowest, 0)])


def _table(numbers: Array) -> Array | None:
    """Which numbers are there, from the lowest one on; None where they lie too far apart."""
    lowest, highest = int(numbers.min()), int(numbers.max())
    width = highest - lowest + 1
    if width > _WIDEST * len(numbers):
        return None
    table = np.zeros(width, bool)
    table[numbers - lowest if lowest else numbers] = True
    return table
