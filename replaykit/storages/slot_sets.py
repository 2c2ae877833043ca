"""Answer questions about sets of slots, and find the rows before and after slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from replaykit._compat import arange

__all__ = ["Neighbours", "agreed", "all_distinct", "contained", "neighbours", "rising_below"]

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
        >>> from replaykit.storages.slot_sets import agreed
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
        >>> from replaykit.storages.slot_sets import all_distinct
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
        >>> from replaykit.storages.slot_sets import contained
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
        >>> from replaykit.storages.slot_sets import rising_below
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


Picked = slice | torch.Tensor
"""Places among the elements written: a slice, or int64 ``[n]``."""


@dataclass(frozen=True)
class Neighbours:
    """Neighbours of the elements of a write.

    Attributes:
        inside: pairs of places, of elements and of their followers, that are both written.
        outside: places of elements whose follower is stored and not written, int64 ``[n]``.
        before: stored elements that are not written, and whose follower is: int64 ``[m]``.
        after_before: places of those followers.
    """

    inside: list[tuple[Picked, Picked]]
    outside: torch.Tensor
    before: torch.Tensor
    after_before: Picked


def neighbours(
    elements: torch.Tensor, cells: int, total: int, stored: int, *, at_cursor: bool
) -> Neighbours:
    """Returns the neighbours of distinct elements ``[K]``, ``K >= 1``.

    Args:
        cells: how far the follower of an element is: the number of lanes.
        total: number of elements of the ring.
        stored: how many elements, from 0 on, hold a row before the write.
        at_cursor: the last elements are the newest rows; what lies behind them is the oldest rows,
            which do not follow them, and is left alone.

    Cost: O(K) for elements that go on from each other, round the ring; else O(K log K).

    Example:
        >>> import torch
        >>> from replaykit.storages.slot_sets import neighbours
        >>> found = neighbours(torch.tensor([4, 0]), 1, 5, 5, at_cursor=True)
        >>> found.inside, found.before.tolist()
        ([(slice(0, 1, None), slice(1, 2, None))], [3])
    """
    count, device = len(elements), elements.device
    first = int(elements[0])
    # A run of some lanes that is longer may have followers at its own beginning.
    short = count <= total - cells or count == total
    if short and torch.equal(elements, ((arange(count) + first) % total).to(device)):
        return _of_run(elements, cells, total, stored, at_cursor)
    rising, order = elements.sort()
    after, before = (elements + cells) % total, (elements - cells) % total

    def places(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where numbers are among the elements, and which of them are."""
        at = torch.searchsorted(rising, numbers).clamp_(max=count - 1)
        return order[at], rising[at] == numbers

    at, written = places(after)
    inside = written.nonzero().flatten()
    outside = (~written & (after < stored)).nonzero().flatten()
    following = (~places(before)[1] & (before < stored)).nonzero().flatten()
    return Neighbours([(inside, at[inside])], outside, before[following], following)


def _of_run(
    elements: torch.Tensor, cells: int, total: int, stored: int, at_cursor: bool
) -> Neighbours:
    count, none = len(elements), elements[:0]
    inside: list[tuple[Picked, Picked]] = []
    if count > cells:
        inside.append((slice(0, count - cells), slice(cells, count)))
    if count == total:
        if not at_cursor:
            inside.append((slice(count - cells, count), slice(0, cells)))
        return Neighbours(inside, none, none, slice(0, 0))
    ends = min(count, cells)
    outside = none
    if not at_cursor:
        last = arange(count - ends, count).to(elements.device)
        outside = last[(elements[last] + cells) % total < stored]
    before = (elements[:ends] - cells) % total
    place = (before < stored).nonzero().flatten()
    return Neighbours(inside, outside, before[place], place)
