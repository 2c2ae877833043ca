"""Where streams were severed without anything in the data that says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["CutMarks"]


class CutMarks:
    """The rows that nothing follows, by their number, each with why: ``SEVERED`` or ``RESTORED``.

    The number of a row is ``position * lanes + lane``: it outlives every move of the row. Few of
    them: one a restart and one a ``cut()``.

    Example:
        >>> import numpy as np
        >>> from replaykit.episodes import CutMarks
        >>> marks = CutMarks()
        >>> marks.add(np.array([7, 3]), 4, lowest=0)
        >>> marks.among(0, 5)[0].tolist()
        [3]
    """

    def __init__(self, numbers: Sequence[int] = (), codes: Sequence[int] = ()) -> None:
        """Starts with those of rising ``numbers``, each with its code."""
        self.numbers = np.array(numbers, np.int64)
        self.codes = np.array(codes, np.uint8)

    def add(self, numbers: np.ndarray[Any, Any], code: int, lowest: int) -> None:
        """Adds rows, and forgets those below ``lowest``, which are stored no more."""
        kept = self.numbers >= lowest
        fresh = numbers[~np.isin(numbers, self.numbers[kept])]
        numbers = np.concatenate([self.numbers[kept], fresh])
        codes = np.concatenate([self.codes[kept], np.full(len(fresh), code, np.uint8)])
        order = np.argsort(numbers, kind="stable")
        self.numbers, self.codes = numbers[order], codes[order]

    def remove(self, numbers: np.ndarray[Any, Any], code: int) -> bool:
        """Forgets those of some rows that have a code; whether there were any."""
        gone = np.isin(self.numbers, numbers) & (self.codes == code)
        self.numbers, self.codes = self.numbers[~gone], self.codes[~gone]
        return bool(gone.any())

    def among(self, low: int, high: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Numbers in ``[low, high)``, rising, and their codes."""
        start, stop = np.searchsorted(self.numbers, [low, high])
        return self.numbers[start:stop], self.codes[start:stop]

    def clear(self) -> None:
        """Forgets all."""
        self.numbers, self.codes = self.numbers[:0], self.codes[:0]
