"""Columns that are not in the source: flags at the ends of episodes, and where rows belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.stretch import Stretch
from replaykit.ted import Key

__all__ = ["Put", "store_constant", "store_flag"]

Put = Callable[[Key, int, npt.NDArray[Any]], None]
"""Writes entries of a column from a row of the table on."""


def store_flag(
    stretch: Stretch, key: Key, rows: npt.NDArray[np.int64], *, is_set: bool, block: int, put: Put
) -> None:
    """Writes a flag that is one way at some rows of a stretch and the other way elsewhere.

    Args:
        rows: where it is ``is_set``.
        block: how many rows are written at a time.
    """
    stop = stretch.start + stretch.rows
    for begin in range(stretch.start, stop, block):
        end = min(begin + block, stop)
        values = np.full((end - begin, 1), not is_set)
        values[rows[(rows >= begin) & (rows < end)] - begin] = is_set
        put(key, begin, values)


def store_constant(
    stretch: Stretch,
    key: Key,
    each: npt.NDArray[Any],
    *,
    block: int,
    put: Put,
) -> None:
    """Writes what is the same in all rows of an episode.

    Args:
        each: the value of each episode.
        block: how many rows are written at a time.
    """
    starts = np.append(stretch.at.starts - stretch.start, stretch.rows)
    for begin in range(0, stretch.rows, block):
        end = min(begin + block, stretch.rows)
        first = int(np.searchsorted(starts, begin, "right")) - 1
        last = int(np.searchsorted(starts, end, "left"))
        counts = np.minimum(starts[first + 1 : last + 1], end) - np.maximum(
            starts[first:last], begin
        )
        put(key, stretch.start + begin, np.repeat(each[first:last], counts))
