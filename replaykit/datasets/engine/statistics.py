"""Statistics of columns, kept while they are written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.native import moments
from replaykit.native.lanes import MOST

__all__ = ["Statistics"]

_SCALE: Final = 64
"""Numbers are taken ``2 ** -64`` times as large where their sum would overflow."""


@dataclass
class Statistics:
    """Smallest, largest, mean and standard deviation of all numbers of a column, and its NaNs.

    NaNs count apart; infinities are numbers here. Of complex numbers only the NaNs are counted.
    The mean is kept with the sum of squared
    distances from it, block by block, so that neither overflows nor loses digits where the values
    are far from zero. The result depends on the blocks in its last digits only, and blocks do not
    depend on the number of workers.

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
        """Adds the numbers of a block; O(values), in less than 2 MiB of memory."""
        flat = block.reshape(-1)
        for start in range(0, flat.size, MOST):
            part = flat[start : start + MOST]
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
        """Adds what another one has seen after this one."""
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
        """Returns JSON values; ``None`` where there is no finite number."""
        known = self.count > 0
        return {
            "min": _finite(self.least),
            "max": _finite(self.largest),
            "mean": _finite(self.mean) if known else None,
            "std": _finite(math.sqrt(self.squares / self.count)) if known else None,
            "nan": self.nan,
        }


def _is_known(least: Any, largest: Any, mean: float, squares: float) -> bool:
    """Whether the mean is a number, or cannot be, since infinities are among the numbers."""
    return math.isfinite(mean) or not (math.isfinite(least) and math.isfinite(largest))


def _scaled(block: npt.NDArray[Any]) -> tuple[Any, Any, float, float]:
    """Returns the moments of numbers whose sum is beyond the largest float."""
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
