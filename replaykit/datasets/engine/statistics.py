"""Statistics of columns, kept while they are written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replaykit.native import moments
from replaykit.native.lanes import MOST

__all__ = ["Statistics"]


@dataclass
class Statistics:
    """Smallest, largest, mean and standard deviation of all numbers of a column, and its NaNs.

    NaNs count apart; infinities are numbers here. The mean is kept with the sum of squared
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
        if block.dtype.kind == "c":
            return
        flat = block.reshape(-1)
        for start in range(0, flat.size, MOST):
            self._add(flat[start : start + MOST])

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
            self.merge(Statistics(count, 0, *found))

    def merge(self, other: Statistics) -> None:
        """Adds what another one has seen after this one."""
        self.nan += other.nan
        if not other.count:
            return
        self.least = other.least if self.least is None else min(self.least, other.least)
        self.largest = other.largest if self.largest is None else max(self.largest, other.largest)
        total = self.count + other.count
        apart = other.mean - self.mean
        self.mean += apart * other.count / total
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


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
