"""How many windows an episode has: the numbers that every draw of windows goes by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["EPISODES", "NOTHING", "ROWS", "WINDOWS", "CountLaw", "Needs"]

Array = np.ndarray[Any, Any]

WINDOWS, EPISODES, ROWS = 0, 1, 2
"""What is counted: windows; episodes that have one; their stored rows."""


@dataclass(frozen=True)
class Needs:
    """What must be stored around a row for the transforms of a buffer: from them it follows which
    rows can be drawn.

    Attributes:
        past: rows of history. A row without them can be drawn where the episode's reset is stored:
            its history is then defined by padding.
        open_future: rows after it while its episode is open.
        closed: its episode has ended.
        intact: its episode is stored from its reset on.

    Example:
        >>> from replaykit.episodes import Needs
        >>> Needs(past=3) | Needs(past=1, closed=True)
        Needs(past=3, open_future=0, closed=True, intact=False)
    """

    past: int = 0
    open_future: int = 0
    closed: bool = False
    intact: bool = False

    def __or__(self, other: Needs) -> Needs:
        """What both need."""
        return Needs(
            max(self.past, other.past),
            max(self.open_future, other.open_future),
            self.closed or other.closed,
            self.intact or other.intact,
        )

    def __bool__(self) -> bool:
        return self._any

    @cached_property
    def _any(self) -> bool:
        return self.past > 0 or self.open_future > 0 or self.closed or self.intact

    @cached_property
    def single(self) -> CountLaw:
        """The law by which single rows are drawn that have around them what is needed."""
        return CountLaw.strict(1).needing(self)


NOTHING = Needs()


@dataclass(frozen=True)
class CountLaw:
    """Number of windows of an episode, from its number of stored rows n.

    The first ``past`` rows are left out unless the episode begins with its reset, and the last
    ``open_future`` ones if it is open; of the m rows that remain:

        m >= least:     m + add, or 0 where that is less
        1 <= m < least: below

    Attributes:
        least: fewest rows to which the sum applies.
        add: ``1 - T`` plus how far windows of T rows may hang over both ends.
        below: windows of an episode that is shorter: 0 or 1.
        past: rows of history that a window needs.
        open_future: rows that a window needs after it while its episode is open.
        closed: only episodes that have ended.
        intact: only episodes whose first row is stored and a reset.

    Example:
        >>> from replaykit.episodes import CountLaw
        >>> [CountLaw.strict(3).count(n) for n in (2, 3, 9)]
        [0, 1, 7]
    """

    least: int
    add: int
    below: int = 0
    past: int = 0
    open_future: int = 0
    closed: bool = False
    intact: bool = False

    @classmethod
    def strict(cls, length: int) -> CountLaw:
        """Windows of ``length`` rows that lie inside their episode."""
        return cls(length, 1 - length)

    def count(self, rows: int, *, reset: bool = True, is_open: bool = False) -> int:
        """Windows of one episode, said plainly: what ``counts`` and the core compute for all."""
        if (self.closed and is_open) or (self.intact and not reset):
            return 0
        rows -= 0 if reset else self.past
        rows -= self.open_future if is_open else 0
        if rows < 1:
            return 0
        return max(0, rows + self.add) if rows >= self.least else self.below

    def counts(self, stored: Array, reset: Array, is_open: Array) -> tuple[Array, Array, Array]:
        """``count`` of many episodes in NumPy.

        Args:
            stored: rows of each, int64 ``[J]``.
            reset, is_open: bool ``[J]``.

        Returns:
            Their windows, the rows that windows may use, and how many before these are left out.
        """
        skip = np.where(reset, 0, self.past)
        rows = stored - skip
        if self.open_future:
            rows -= np.where(is_open, self.open_future, 0)
        windows = rows + self.add
        if self.least + self.add < 0:
            windows = np.maximum(windows, 0)
        count = np.where(rows >= self.least, windows, self.below)
        if self.below or self.least < 1:  # else there are none already where no row is left
            count[rows < 1] = 0
        if self.closed:
            count[is_open] = 0
        if self.intact:
            count[~reset] = 0
        return count, rows, skip

    def needing(self, needs: Needs) -> CountLaw:
        """The law with what transforms need besides."""
        return replace(
            self,
            past=needs.past,
            open_future=needs.open_future,
            closed=needs.closed,
            intact=needs.intact,
        )

    def key(self) -> tuple[int, int, int, int, int, int, int]:
        """The numbers that the core takes."""
        return self._key

    @cached_property
    def _key(self) -> tuple[int, int, int, int, int, int, int]:
        return (
            self.least,
            self.add,
            self.below,
            self.past,
            self.open_future,
            int(self.closed),
            int(self.intact),
        )
