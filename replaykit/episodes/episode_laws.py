"""Define why episodes end, and how many windows they have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = [
    "CODE_BITS",
    "EPISODES",
    "GOES_ON",
    "HEAD_SHIFT",
    "LINK_SHIFT",
    "NOTHING",
    "NOT_INIT",
    "RESTORED",
    "ROWS",
    "SEVERED",
    "SWITCHED",
    "TERMINATED",
    "TRUNCATED",
    "WINDOWS",
    "CountLaw",
    "EndReason",
    "EpisodeTable",
    "Found",
    "Head",
    "Needs",
]


class EndReason(IntEnum):
    """Why an episode has no further row.

    ``OPEN``: its newest row is the newest of its stream, which may go on. ``TERMINATED``: the task
    ended; nothing to bootstrap from. ``TRUNCATED``: a time limit; bootstrap. ``CUT``: the stored
    stream was severed without a flag: another trajectory id, ``cut()``, a restore, a row placed by
    hand.

    Example:
        >>> from replaykit.episodes import EndReason
        >>> EndReason(1).name, int(EndReason.CUT)
        ('TERMINATED', 3)
    """

    OPEN = 0
    TERMINATED = 1
    TRUNCATED = 2
    CUT = 3


class Head(IntEnum):
    """How the stored part of an episode begins.

    ``RESET``: with the environment's reset. ``CUT``: in the middle, since the stream was joined
    there. ``EVICTED``: its first row was overwritten.

    Example:
        >>> from replaykit.episodes import Head
        >>> Head.RESET.name
        'RESET'
    """

    RESET = 1
    CUT = 2
    EVICTED = 3


GOES_ON: Final = 0
TERMINATED: Final = 1
TRUNCATED: Final = 2
SWITCHED: Final = 3
"""Cut since the next row has another trajectory id; what follows begins with a reset."""
SEVERED: Final = 4
"""Cut by hand, or since rows are missing; what follows begins in the middle."""
RESTORED: Final = 5
"""Cut by a restart; what follows begins with a reset."""

CODE_BITS: Final = 7
NOT_INIT: Final = 0x20
"""Of a row whose stored ``is_init`` is False: if an episode begins with it, it was joined there."""

HEAD_SHIFT: Final = 3
LINK_SHIFT: Final = 5
"""A link is ``target << 5 | head << 3 | code``; see ``ring``."""


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


class EpisodeTable(NamedTuple):
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
