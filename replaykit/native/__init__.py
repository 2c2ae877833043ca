"""The Python interface of the compiled core.

Example:
    >>> import numpy as np
    >>> from replaykit.native import RankHeap
    >>> heap = RankHeap(2)
    >>> slots = np.empty(3, dtype=np.int64)
    >>> heap.offer(np.array([1.0, 5.0, 3.0]), slots)
    >>> slots.tolist()
    [0, 1, 0]
"""

from __future__ import annotations

import importlib
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def _load() -> Any:
    name = "replaykit.native._core"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"expected the compiled core of replaykit, which cannot be loaded: {error}. Install a "
            "wheel of replaykit for this platform, or build it with a compiler for C++17.",
            name=name,
        ) from error


core: Any = _load()
"""The compiled core."""

RankHeap: Any = core.RankHeap
"""The slots of a storage that holds only the rows of largest rank.

A new row replaces the row of the smallest rank, among equals the youngest. Ranks must not be NaN.
"""

Table: Any = core.Table
"""Gather and scatter rows by address."""

ask_for_large_pages: Any = core.ask_for_large_pages
"""Ask the kernel for large pages for fresh memory, by its address and size in bytes."""

join_pages: Any = core.join_pages
"""Join the pages of a file in memory into large ones, by address and size in bytes.

Cost: a copy of the pages.
"""

_LEAST_FOLDED = 1024


def crc32(data: Any, value: int = 0) -> int:
    """Return ``zlib.crc32(data, value)``, several times faster on most processors.

    The interpreter lock is released meanwhile.

    Args:
        data: an object with a buffer of contiguous bytes.

    Example:
        >>> import zlib
        >>> from replaykit.native import crc32
        >>> crc32(bytes(5000), 7) == zlib.crc32(bytes(5000), 7)
        True
    """
    view = memoryview(data).cast("B")
    if not core.has_fast_crc32 or len(view) < _LEAST_FOLDED:
        return zlib.crc32(view, value)
    whole = len(view) & ~15
    found: int = core.crc32(np.frombuffer(view[:whole], np.uint8), value)
    return zlib.crc32(view[whole:], found)


MOST_MOMENTS = 1 << 16
"""Most numbers of one call of ``moments``."""

Moments = tuple[int, Any, Any, float, float]
"""Count, least, largest, mean, and the sum of squared distances from the mean."""


def moments(numbers: npt.NDArray[Any]) -> Moments:
    """Return count, least, largest, mean, and sum of squared distances from the mean.

    NaNs are left out. Without any numbers, the count is 0 and the rest means nothing. The result
    has the same bits on every machine. The interpreter lock is released for long arrays.

    Args:
        numbers: ``[n]``, n at most `MOST_MOMENTS`: integers, float32 or float64.

    Example:
        >>> import numpy as np
        >>> from replaykit.native import moments
        >>> moments(np.array([1, 3, 8], np.uint8))
        (3, 1, 8, 4.0, 26.0)
    """
    found: Moments = core.moments(np.ascontiguousarray(numbers))
    return found


def power(base: npt.NDArray[np.float64], exponent: float) -> npt.NDArray[np.float64]:
    """Return ``base ** exponent`` of finite numbers of at least 0.

    0 to any power is 0, even to the power of 0. The result has the same bits on every machine.

    Example:
        >>> import numpy as np
        >>> from replaykit.native import power
        >>> power(np.array([0.0, 4.0]), -0.5).tolist()
        [0.0, 0.5]
    """
    found = np.array(base, dtype=np.float64, order="C").reshape(-1)
    core.power(found, exponent)
    return found.reshape(base.shape)


def row_stride(tensor: torch.Tensor, ndim: int) -> int | None:
    """Return the bytes between elements of a column ``[slots, *lanes, *F]``.

    ``[slots, *lanes]`` are its first ``ndim`` dimensions; elements are ordered by slot, then by
    lane. The result is None if they are not equally far apart, or if the values of an element are
    not contiguous.

    Example:
        >>> import torch
        >>> from replaykit.native import row_stride
        >>> column = torch.zeros(10, 4, 3, dtype=torch.float32)
        >>> row_stride(column, 1), row_stride(column, 2), row_stride(column[..., :2], 1)
        (48, 12, None)
    """
    shape, strides = tensor.shape, tensor.stride()
    step = 1
    for size, stride in zip(reversed(shape[ndim:]), reversed(strides[ndim:]), strict=True):
        if size > 1 and stride != step:
            return None
        step *= size
    between, reach = tensor.dtype.itemsize * step, None
    for size, stride in zip(reversed(shape[:ndim]), reversed(strides[:ndim]), strict=True):
        if size == 1:
            continue
        if reach is None:
            between = stride * tensor.dtype.itemsize
        elif stride != reach:
            return None
        reach = stride * size
    return between
