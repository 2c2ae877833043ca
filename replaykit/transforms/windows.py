"""Windows of a batch: which rows follow each other in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from replaykit.transforms.history import Surroundings

__all__ = ["last_real", "nearest_real", "rows_ahead"]

Array = np.ndarray[Any, Any]


def rows_ahead(around: Surroundings, ended: Array | None = None) -> Array:
    """How many rows of the same window and episode follow each row in the batch, int64 ``[B]``.

    Padding has none, and ends what is before it.

    Args:
        ended: bool ``[B]``, rows after which nothing of theirs follows; besides those at which
            episodes end.

    Raises:
        ValueError: rows of a window and an episode that lie side by side in the batch and do not
            follow each other in time.
    """
    count = len(around)
    if count < 2:
        return np.zeros(count, np.int64)
    same = (
        (around.window[1:] == around.window[:-1])
        & (around.lane[1:] == around.lane[:-1])
        & (around.begin[1:] == around.begin[:-1])
    )
    if around.mask is not None:
        same &= around.mask[1:] & around.mask[:-1]
    if (same & (around.time[1:] != around.time[:-1] + 1)).any():
        raise ValueError(
            "expected windows of rows that follow each other, got windows with gaps between rows"
        )
    if ended is not None:
        same &= ~ended[:-1]
    # The end of the run that a row belongs to: the nearest row not followed by one of the same.
    stop = np.where(np.append(same, False), count, np.arange(count))
    return np.minimum.accumulate(stop[::-1])[::-1] - np.arange(count)


def nearest_real(around: Surroundings) -> Array:
    """Places in the batch, int64 ``[B]``: of real rows their own, of padding that of the real row
    before it in its window, else of the first one after it, else its own."""
    own = np.arange(len(around))
    if around.mask is None or around.mask.all():
        return own
    real, count = around.mask, len(own)
    before = np.maximum.accumulate(np.where(real, own, -1))
    after = np.minimum.accumulate(np.where(real, own, count)[::-1])[::-1]
    after = np.minimum(after, count - 1)
    in_front = (before >= 0) & (around.window[before] == around.window)
    behind = real[after] & (around.window[after] == around.window)
    return np.where(in_front, before, np.where(behind, after, own))


def last_real(around: Surroundings) -> Array:
    """Places in the batch, int64 ``[B]``, of the last real row of each row's window; the row
    itself in a window without any."""
    count = len(around)
    own = np.arange(count)
    if not count:
        return own
    ends = np.append(around.window[1:] != around.window[:-1], True)
    stop = np.minimum.accumulate(np.where(ends, own, count)[::-1])[::-1]
    if around.mask is None:
        return stop
    found = np.maximum.accumulate(np.where(around.mask, own, -1))[stop]
    inside = (found >= 0) & (around.window[found] == around.window)
    return np.where(inside, found, own)
