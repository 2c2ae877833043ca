"""What the hardware allows, from the constants that calibration measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.calibration import Calibration

__all__ = ["Limit", "copy_limit", "disk_limit", "gather_limit", "tree_limit"]

LEVEL_NS = 1.3
"""Arithmetic of one level of an 8-ary descent with AVX-512, at the least, in nanoseconds."""

PAGE = 4096


@dataclass(frozen=True)
class Limit:
    """Microseconds that the hardware needs at the least, and what it needs them for."""

    name: str
    us: float


def _larger(*limits: Limit) -> Limit:
    return max(limits, key=lambda limit: limit.us)


def gather_limit(
    at: Calibration, rows: int, row_bytes: int, threads: int, table_bytes: int
) -> Limit:
    """Copying random rows of a table out: waiting for one line of each, or moving the bytes."""
    waiting = Limit("latency", rows * at.line_ns(threads, table_bytes) / 1e3)
    moving = Limit("copy", rows * row_bytes / at.copy_gbs(threads) / 1e3)
    return _larger(waiting, moving)


def copy_limit(at: Calibration, rows: int, row_bytes: int) -> Limit:
    """Copying rows in, one after the other."""
    return Limit("copy", rows * row_bytes / at.copy_gbs(1) / 1e3)


def tree_limit(at: Calibration, queries: int, leaves: int) -> Limit:
    """Walking down (or up) an 8-ary tree of float32 leaves with float64 sums, on one thread.

    A level costs its arithmetic, or a line from wherever a level of its size lives.
    """
    ns = 0.0
    entries, width = leaves, 4
    while entries > 1:
        ns += max(LEVEL_NS, at.line_ns(1, entries * width))
        entries, width = math.ceil(entries / 8), 8
    return Limit("tree", queries * ns / 1e3)


def disk_limit(at: Calibration, rows: int, row_bytes: int) -> Limit | None:
    """Reading random rows from disk: as many requests at once as it takes, or the bytes."""
    if at.disk_iops is None or at.disk_gbs is None:
        return None
    # A row begins anywhere in a page.
    pages = 1 + max(0, row_bytes - 1) / PAGE
    asking = Limit("disk requests", rows * pages / at.disk_iops * 1e6)
    moving = Limit("disk rate", rows * pages * PAGE / at.disk_gbs / 1e3)
    return _larger(asking, moving)
