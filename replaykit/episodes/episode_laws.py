"""Define the reasons for ends of episodes, and the number of their windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np


class EndReason(IntEnum):
    """The reason why an episode has no further row.

    ``OPEN``: the last row of the episode is the newest row of its stream, so the episode may
    continue. ``TERMINATED``: the task ended, so a target must not bootstrap. ``TRUNCATED``: a time
    limit ended the episode, so a target may bootstrap. ``CUT``: the stream was cut without a flag,
    by another trajectory id, ``cut()``, a restore or a placed row.

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
    """The kind of beginning of the stored part of an episode.

    ``RESET``: the first stored row follows a reset of the environment. ``CUT``: the stream was
    recorded only from the middle of an episode on. ``EVICTED``: the first row of the episode was
    overwritten.

    Example:
        >>> from replaykit.episodes import Head
        >>> Head.RESET.name
        'RESET'
    """

    RESET = 1
    CUT = 2
    EVICTED = 3


CONTINUES: Final = 0
SWITCHED: Final = 3
"""A cut because the next row has another trajectory id. The next episode begins with a reset."""
SEVERED: Final = 4
"""A cut by ``cut()``, or because rows are missing. The next episode begins in its middle."""
RESTORED: Final = 5
"""A cut by a restart, or before a reset. The next episode begins with a reset."""

Array = np.ndarray[Any, Any]


class Found(NamedTuple):
    """The positions of windows that were looked up by number; int64 ``[K]`` each.

    Attributes:
        lane: the lane of the window's episode.
        base: time of the first row that windows of the episode may use.
        rows: number of rows that windows of the episode may use, from ``base`` on.
        count: number of windows of the episode.
        rest: index of the window among the windows of its episode.
    """

    lane: Array
    base: Array
    rows: Array
    count: Array  # type: ignore[assignment]
    rest: Array


class EpisodeTable(NamedTuple):
    """All stored episodes, by lane and in the order of time; int64 ``[J]`` each.

    ``begin`` is the time at which the episode began, even if that row is no longer stored.
    ``first`` is the time of its first stored row. ``code`` is the code of its last row. ``head`` is
    a ``Head``.
    """

    lane: Array
    begin: Array
    first: Array
    last: Array
    code: Array
    head: Array


WINDOWS, EPISODES, ROWS = 0, 1, 2
"""Kinds of counts: windows, episodes that have a window, and stored rows of these episodes."""


@dataclass(frozen=True)
class Needs:
    """The rows around a row that the transforms of a buffer need.

    A row can be drawn only if these rows are stored.

    Attributes:
        past: number of rows before the row. A row with fewer earlier rows can be drawn if the reset
            of its episode is stored, because padding then completes its history.
        open_future: number of rows after the row while its episode is open.
        closed: True if the row's episode must have ended.
        intact: True if the row's episode must be stored from its reset on.
        future: number of rows after the row, even if its episode has ended.

    Example:
        >>> from replaykit.episodes import Needs
        >>> Needs(past=3) | Needs(past=1, closed=True)
        Needs(past=3, open_future=0, closed=True, intact=False, future=0)
    """

    past: int = 0
    open_future: int = 0
    closed: bool = False
    intact: bool = False
    future: int = 0

    def __or__(self, other: Needs) -> Needs:
        """Return the combined needs of both."""
        return Needs(
            max(self.past, other.past),
            max(self.open_future, other.open_future),
            self.closed or other.closed,
            self.intact or other.intact,
            max(self.future, other.future),
        )

    def __bool__(self) -> bool:
        return self._any

    @cached_property
    def _any(self) -> bool:
        numbers = self.past, self.open_future, self.future
        return max(numbers) > 0 or self.closed or self.intact

    @cached_property
    def single(self) -> CountLaw:
        """The `CountLaw` for draws of single rows with these needs."""
        return CountLaw.strict(1).needing(self)


NOTHING = Needs()


@dataclass(frozen=True)
class CountLaw:
    """The rule for the number of windows of an episode with n stored rows.

    The rule excludes the first ``past`` rows, unless the episode begins with its reset. It also
    excludes the last ``open_future`` rows if the episode is open. If m rows are left, the number of
    windows is:

        m >= least:     m + add, at least 0
        1 <= m < least: below

    Attributes:
        least: smallest m for the first formula.
        add: ``1 - T`` plus the number of rows by which windows of T rows may extend beyond both
            ends.
        below: number of windows of an episode with ``1 <= m < least``, 0 or 1.
        past: number of stored rows that a window needs before its first row.
        open_future: number of stored rows that a window needs after its last row while its episode
            is open.
        closed: True if only episodes that have ended have windows.
        intact: True if only episodes that are stored from their reset on have windows.

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
        """Return the law for windows of ``length`` rows inside their episode."""
        return cls(length, 1 - length)

    def count(self, rows: int, *, reset: bool = True, is_open: bool = False) -> int:
        """Return the number of windows of one episode. ``counts`` is for many episodes."""
        if (self.closed and is_open) or (self.intact and not reset):
            return 0
        rows -= 0 if reset else self.past
        rows -= self.open_future if is_open else 0
        if rows < 1:
            return 0
        return max(0, rows + self.add) if rows >= self.least else self.below

    def counts(self, stored: Array, reset: Array, is_open: Array) -> tuple[Array, Array, Array]:
        """Return the window counts of many episodes.

        Args:
            stored: number of stored rows of each episode, int64 ``[J]``.
            reset: whether the episodes begin with their reset, bool ``[J]``.
            is_open: whether the episodes are open, bool ``[J]``.

        Returns:
            For each episode, the count of windows, the count of rows that windows may use, and the
            count of excluded rows before them.
        """
        skip = np.where(reset, 0, self.past)
        rows = stored - skip
        if self.open_future:
            rows -= np.where(is_open, self.open_future, 0)
        windows = rows + self.add
        if self.least + self.add < 0:
            windows = np.maximum(windows, 0)
        count = np.where(rows >= self.least, windows, self.below)
        if self.below or self.least < 1:  # otherwise the count is already 0 if no row is left
            count[rows < 1] = 0
        if self.closed:
            count[is_open] = 0
        if self.intact:
            count[~reset] = 0
        return count, rows, skip

    def needing(self, needs: Needs) -> CountLaw:
        """Return the law that also satisfies the needs of transforms."""
        return replace(
            self,
            # A window needs these rows as if it were longer.
            least=self.least + needs.future,
            add=self.add - needs.future,
            below=0 if needs.future else self.below,
            past=needs.past,
            open_future=needs.open_future,
            closed=needs.closed,
            intact=needs.intact,
        )

    @cached_property
    def key(self) -> tuple[int, int, int, int, int, bool, bool]:
        """The law as the compiled core expects it."""
        numbers = self.least, self.add, self.below, self.past, self.open_future
        return *numbers, self.closed, self.intact
