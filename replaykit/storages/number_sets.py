"""Questions about many distinct numbers, answered without sorting them where they lie close
together."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch

__all__ = ["agreed", "all_distinct", "contained", "rising_below"]

Array = np.ndarray[Any, Any]
Numbers = TypeVar("Numbers", Array, torch.Tensor)

_WIDEST = 16
"""How many times as wide as there are numbers a table may be, of a byte each; else they are
sorted, which takes some ten times as long."""


def agreed(*tables: Array) -> Array:
    """Returns the first of several arrays, int64 ``[K]``, which hold the same numbers.

    Raises:
        ValueError: they do not.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.number_sets import agreed
        >>> agreed(np.array([5, 3]), np.array([5, 3]))
        array([5, 3])
    """
    if not all(np.array_equal(table, tables[0]) for table in tables[1:]):
        raise ValueError(f"expected the same for all columns, got {len(tables)} that differ")
    return tables[0]


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


def rising_below(stop: int, numbers: Numbers) -> Numbers:
    """Returns int64 ``[K]``, which rise, from 0 on at least and to below ``stop``.

    Raises:
        ValueError: they do not.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.number_sets import rising_below
        >>> rising_below(8, np.array([5, 6, 7]))
        array([5, 6, 7])
    """
    if not len(numbers):
        return numbers
    first, last = int(numbers[0]), int(numbers[-1])
    falling = int((numbers[1:] <= numbers[:-1]).sum())
    if falling or first < 0 or last >= stop:
        raise ValueError(
            f"expected rising elements of a column below {stop}, got {len(numbers)} from {first} "
            f"to {last}, of which {falling} do not rise"
        )
    return numbers


def _table(numbers: Array) -> Array | None:
    """Which numbers are there, from the lowest one on; None where they lie too far apart."""
    lowest, highest = int(numbers.min()), int(numbers.max())
    width = highest - lowest + 1
    if width > _WIDEST * len(numbers):
        return None
    table = np.zeros(width, bool)
    table[numbers - lowest if lowest else numbers] = True
    return table
