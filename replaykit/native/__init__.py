"""Functions of the compiled core, with replacements in Python.

The environment variable ``REPLAYKIT_NATIVE=0`` turns the core off. A build with
``-C cmake.define.REPLAYKIT_CORE=OFF`` omits it. Results are the same either way.

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
import os
import warnings
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from replaykit.native import fallback

__all__ = [
    "HAS_CORE",
    "WHY_NOT",
    "BinaryTree",
    "Followed",
    "Linked",
    "RankHeap",
    "Table",
    "ask_for_large_pages",
    "core",
    "crc32",
    "join_pages",
    "join_rows",
    "moments",
    "power",
]


def _load() -> tuple[Any, str | None]:
    if os.environ.get("REPLAYKIT_NATIVE", "1").strip().lower() in ("0", "false", "off", "no"):
        return None, "the environment variable REPLAYKIT_NATIVE turns it off"
    name = "replaykit.native._core"
    try:
        core = importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return None, "this installation was built without it"
        # A core that exists and does not load is a broken installation, not a choice.
        warnings.warn(
            f"the compiled core cannot be loaded, so the slower Python code is used: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, str(error)
    return core, None


_core, WHY_NOT = _load()

HAS_CORE: bool = _core is not None
"""True if the compiled core is in use; otherwise ``WHY_NOT`` gives the reason."""

if TYPE_CHECKING:
    RankHeap = fallback.RankHeap
else:
    RankHeap = fallback.RankHeap if _core is None else _core.RankHeap

join_rows: Any = None if _core is None else _core.join_rows
"""Concatenate rows of two arrays, by address; in the core only."""

Table: Any = None if _core is None else _core.Table
"""Gather and scatter rows by address; without the core, torch does the same."""

Followed: Any = None if _core is None else _core.Followed
Linked: Any = None if _core is None else _core.Linked
"""Rows that take next observations from the next row; in the core only."""


def ask_for_large_pages(address: int, nbytes: int) -> None:
    """Ask the kernel for large pages for fresh memory; do nothing without the core."""
    if _core is not None:
        _core.ask_for_large_pages(address, nbytes)


def join_pages(address: int, nbytes: int) -> None:
    """Join the pages of a file in memory into large ones; do nothing without the core.

    Cost: a copy of the pages.
    """
    if _core is not None:
        _core.join_pages(address, nbytes)


_LEAST_FOLDED = 1024


def crc32(data: Any, value: int = 0) -> int:
    """Return ``zlib.crc32(data, value)``, several times faster with the core.

    That is so on most processors. The interpreter lock is released meanwhile.

    Args:
        data: an object with a buffer of contiguous bytes.

    Example:
        >>> import zlib
        >>> from replaykit.native import crc32
        >>> crc32(bytes(5000), 7) == zlib.crc32(bytes(5000), 7)
        True
    """
    view = memoryview(data).cast("B")
    if _core is None or not _core.has_fast_crc32 or len(view) < _LEAST_FOLDED:
        return zlib.crc32(view, value)
    whole = len(view) & ~15
    found: int = _core.crc32(np.frombuffer(view[:whole], np.uint8), value)
    return zlib.crc32(view[whole:], found)


BinaryTree: Any = None if _core is None else _core.BinaryTree
"""A binary sum tree with one query at a time, for benchmarks; in the core only."""


def core() -> Any:
    """Return the compiled core or None, for packages that have a Python counterpart."""
    return _core


def moments(numbers: npt.NDArray[Any]) -> fallback.Moments:
    """Return count, least, largest, mean, and sum of squared distances from the mean.

    NaNs are left out. The result has the same bits on every machine, with and without the core.
    With the core, the interpreter lock is released for long arrays.

    Args:
        numbers: ``[n]``, n at most 65,536: integers, float32 or float64.

    Example:
        >>> import numpy as np
        >>> from replaykit.native import moments
        >>> moments(np.array([1, 3, 8], np.uint8))
        (3, 1, 8, 4.0, 26.0)
    """
    if _core is None:
        return fallback.moments(numbers)
    found: fallback.Moments = _core.moments(np.ascontiguousarray(numbers))
    return found


def power(base: npt.NDArray[np.float64], exponent: float) -> npt.NDArray[np.float64]:
    """Return ``base ** exponent`` of finite numbers of at least 0.

    0 to any power is 0. The result has the same bits on every machine, with and without the core.

    Example:
        >>> import numpy as np
        >>> from replaykit.native import power
        >>> power(np.array([0.0, 4.0]), -0.5).tolist()
        [0.0, 0.5]
    """
    if _core is None:
        return fallback.power(base, exponent)
    found = np.array(base, dtype=np.float64, order="C").reshape(-1)
    _core.power(found, exponent)
    return found.reshape(base.shape)
