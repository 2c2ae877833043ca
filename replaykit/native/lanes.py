"""Moments of numbers with the same bits everywhere; `csrc/moments.h` has the order of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MOST", "Moments", "moments"]

MOST = 1 << 16
_LANES = 16

Moments = tuple[int, Any, Any, float, float]
"""Count, least, largest, mean, and the sum of squared distances from the mean."""


def moments(numbers: npt.NDArray[Any]) -> Moments:
    """Returns the moments of numbers, step by step as the core does.

    NaNs are left out. Where there are no numbers, the count is 0 and the rest means nothing.

    Args:
        numbers: ``[n]``, n at most `MOST`: integers, float32 or float64.

    Example:
        >>> import numpy as np
        >>> from replaykit.native.lanes import moments
        >>> moments(np.array([1.0, np.nan, 3.0]))
        (2, 1.0, 3.0, 2.0, 2.0)
    """
    is_number = numbers == numbers
    known = numbers[is_number] if numbers.dtype.kind == "f" else numbers
    if not known.size:
        return 0, 0, 0, 0.0, 0.0
    # No negative zero, which one order of looks finds and another one does not.
    zero = numbers.dtype.type(0)
    least, largest = (known.min() + zero).item(), (known.max() + zero).item()
    if numbers.dtype.itemsize == 1:
        return (known.size, least, largest, *_of_bytes(known))
    with np.errstate(all="ignore"):
        mean = _sum(np.where(is_number, numbers, zero).astype(np.float64)) / known.size
        apart = numbers.astype(np.float64) - mean
        squares = _sum(np.where(is_number, apart * apart, 0.0))
    return known.size, least, largest, mean, squares


def _sum(values: npt.NDArray[np.float64]) -> float:
    whole = len(values) - len(values) % _LANES
    lanes = np.add.reduce(values[:whole].reshape(-1, _LANES), axis=0, initial=0.0)
    lanes[: len(values) - whole] += values[whole:]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes[0])


def _of_bytes(numbers: npt.NDArray[Any]) -> tuple[float, float]:
    # As whole numbers, which are exact: 255 ** 2 * MOST is less than 2 ** 32.
    wide = numbers.astype(np.int32 if numbers.dtype.kind == "i" else np.uint32)
    total = int(np.add.reduce(wide, axis=None, dtype=wide.dtype))
    squares = int(np.add.reduce(np.square(wide, out=wide), axis=None, dtype=wide.dtype))
    return total / numbers.size, (squares * numbers.size - total * total) / numbers.size
