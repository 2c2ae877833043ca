"""Statistics of columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.native import MOST_MOMENTS, moments

_SCALE: Final = 64
"""The exponent of ``2 ** -64``, by which numbers are scaled if a sum would overflow."""


@dataclass
class Statistics:
    """Minimum, maximum, mean, standard deviation and number of NaNs of a column.

    NaNs are counted separately, and infinities count as numbers. For complex numbers, only the NaNs
    are counted. The mean and the sum of squared distances from the mean are updated block by block.
    Therefore these values neither overflow nor lose digits if the numbers are far from zero. Only
    the last digits of the result depend on the blocks. The blocks do not depend on the number of
    workers.

    Example:
        >>> import numpy as np
        >>> from replaykit.datasets.engine.statistics import Statistics
        >>> found = Statistics()
        >>> found.add(np.array([1.0, np.nan, 3.0]))
        >>> found.to_json()
        {'min': 1.0, 'max': 3.0, 'mean': 2.0, 'std': 1.0, 'nan': 1}
    """

    count: int = 0
    nan: int = 0
    least: Any = None
    largest: Any = None
    mean: float = 0.0
    squares: float = 0.0

    def add(self, block: npt.NDArray[Any]) -> None:
        """Add the numbers of a block, in O(values) time and less than 2 MiB of memory."""
        flat = block.reshape(-1)
        for start in range(0, flat.size, MOST_MOMENTS):
            part = flat[start : start + MOST_MOMENTS]
            if part.dtype.kind == "c":
                self.nan += int(np.count_nonzero(np.isnan(part)))
            else:
                self._add(part)

    def _add(self, block: npt.NDArray[Any]) -> None:
        if block.dtype.kind == "b":
            count, mean = block.size, float(np.count_nonzero(block) / block.size)
            squares = count * mean * (1 - mean)
            self.merge(Statistics(count, 0, mean == 1.0, mean > 0.0, mean, squares))
            return
        if block.dtype == np.float16:
            block = block.astype(np.float32)
        count, *found = moments(block)
        self.nan += block.size - count
        if count:
            self.merge(Statistics(count, 0, *(found if _is_known(*found) else _scaled(block))))

    def merge(self, other: Statistics) -> None:
        """Add the statistics of the following numbers."""
        self.nan += other.nan
        if not other.count:
            return
        self.least = other.least if self.least is None else min(self.least, other.least)
        self.largest = other.largest if self.largest is None else max(self.largest, other.largest)
        total = self.count + other.count
        apart = other.mean - self.mean
        if math.isfinite(apart * other.count):
            self.mean += apart * other.count / total
        else:
            self.mean = self.mean * (self.count / total) + other.mean * (other.count / total)
        self.squares += other.squares + apart * apart * self.count * other.count / total
        self.count = total

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as JSON values, with ``None`` if a number is not finite."""
        known = self.count > 0
        return {
            "min": _finite(self.least),
            "max": _finite(self.largest),
            "mean": _finite(self.mean) if known else None,
            "std": _finite(math.sqrt(self.squares / self.count)) if known else None,
            "nan": self.nan,
        }


def _is_known(least: Any, largest: Any, mean: float, squares: float) -> bool:
    """Return whether the mean is finite, or infinite because a number is infinite."""
    return math.isfinite(mean) or not (math.isfinite(least) and math.isfinite(largest))


def _scaled(block: npt.NDArray[Any]) -> tuple[Any, Any, float, float]:
    """Return the moments of numbers whose sum exceeds the largest float."""
    _, least, largest, mean, squares = moments(np.ldexp(block, -_SCALE))
    return (
        math.ldexp(least, _SCALE),
        math.ldexp(largest, _SCALE),
        math.ldexp(mean, _SCALE),
        squares * 4.0**_SCALE,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
