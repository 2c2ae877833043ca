"""What is found of episodes and windows: the forms in which every index answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Found", "Table"]

Array = np.ndarray[Any, Any]


class Found(NamedTuple):
    """Where windows lie that were looked up by their number; int64 ``[K]`` each.

    Attributes:
        lane: the lane of the episode.
        base: time of the first row that windows of the episode may use.
        rows: how many such rows there are from it on.
        count: how many windows the episode has.
        rest: the number of this one among them.
    """

    lane: Array
    base: Array
    rows: Array
    count: Array  # type: ignore[assignment]
    rest: Array


class Table(NamedTuple):
    """All stored episodes, by lane and in the order of time; int64 ``[J]`` each.

    ``begin`` may lie before what is stored; ``first`` is the first stored row. ``code`` is that of
    the last row, ``head`` a ``Head``.
    """

    lane: Array
    begin: Array
    first: Array
    last: Array
    code: Array
    head: Array
