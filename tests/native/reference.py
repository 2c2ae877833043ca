"""The results of the compiled core, computed in Python and NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MOST", "Moments", "moments", "power"]


MOST = 1 << 16
_LANES = 16

Moments = tuple[int, Any, Any, float, float]
"""Count, least, largest, mean, and the sum of squared distances from the mean."""


def moments(numbers: npt.NDArray[Any]) -> Moments:
    """Return the moments of numbers, by the same steps as the core.

    NaNs are left out. Without any numbers, the count is 0 and the rest means nothing.

    Args:
        numbers: ``[n]``, n at most `MOST`: integers, float32 or float64.

    Example:
        >>> import numpy as np
        >>> from tests.native.reference import moments
        >>> moments(np.array([1.0, np.nan, 3.0]))
        (2, 1.0, 3.0, 2.0, 2.0)
    """
    is_number = numbers == numbers
    known = numbers[is_number] if numbers.dtype.kind == "f" else numbers
    if not known.size:
        return 0, 0, 0, 0.0, 0.0
    # Turns -0.0 into 0.0: which of the two is found depends on the order of comparisons.
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
    # Integer sums are exact: 255 ** 2 * MOST is less than 2 ** 32.
    wide = numbers.astype(np.int32 if numbers.dtype.kind == "i" else np.uint32)
    total = int(np.add.reduce(wide, axis=None, dtype=wide.dtype))
    squares = int(np.add.reduce(np.square(wide, out=wide), axis=None, dtype=wide.dtype))
    return total / numbers.size, (squares * numbers.size - total * total) / numbers.size


_SQRT_HALF = 0.70710678118654757
_INV_LN2 = 1.4426950408889634
_LN2 = 0.69314718055994529
_SPLIT = 134217729.0
_MOST_EXPONENT = 2000.0


def power(base: npt.NDArray[np.float64], exponent: float) -> npt.NDArray[np.float64]:
    """Return ``base ** exponent`` of finite numbers of at least 0.

    The steps are those of the core. 0 to any power is 0, even to the power of 0.

    Example:
        >>> import numpy as np
        >>> from tests.native.reference import power
        >>> power(np.array([0.0, 1.0, 9.0]), 0.5).tolist()
        [0.0, 1.0, 3.0]
    """
    if exponent == 1.0:
        return base.copy()
    if exponent == 0.0:
        return np.sign(base)
    y = min(max(exponent, -1e280), 1e280)
    c = _SPLIT * y
    upper = c - (c - y)
    lower = y - upper
    positive = base > 0
    m, exponents = np.frexp(np.where(positive, base, 1.0))
    e = exponents.astype(np.float64)
    low = m < _SQRT_HALF
    m = np.where(low, m * 2.0, m)
    e = np.where(low, e - 1.0, e)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    q = np.full_like(z, 1.0 / 23.0)
    for odd in range(21, 1, -2):
        q = q * z + 1.0 / odd
    log2m = (s + s * (q * z)) * 2.0 * _INV_LN2
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rest = lower * e + y * log2m
        k = np.rint(np.clip(upper * e + rest, -_MOST_EXPONENT, _MOST_EXPONENT))
        r = np.clip((upper * e - k) + rest, -0.75, 0.75)
        t = r * _LN2
        p = np.full_like(t, 1.0 / math.factorial(14))
        for count in range(13, -1, -1):
            p = p * t + 1.0 / math.factorial(count)
        whole = k.astype(np.int32)
        half = whole >> 1
        found = p * np.ldexp(1.0, half) * np.ldexp(1.0, whole - half)
    return np.where(positive, found, 0.0)
