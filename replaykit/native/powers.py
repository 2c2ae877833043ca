"""Powers with the same bits everywhere; see ``csrc/power.h`` for the method and its error."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["power"]

_SQRT_HALF = 0.70710678118654757
_INV_LN2 = 1.4426950408889634
_LN2 = 0.69314718055994529
_SPLIT = 134217729.0
_MOST_EXPONENT = 2000.0


def power(base: npt.NDArray[np.float64], exponent: float) -> npt.NDArray[np.float64]:
    """Returns ``base ** exponent`` of finite numbers of at least 0, step by step as the core does.

    0 to any power is 0, also to that of 0.

    Example:
        >>> import numpy as np
        >>> from replaykit.native.powers import power
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
