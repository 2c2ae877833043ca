"""Windows over episodes: which there are, which rows they have, how these are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from replaykit.episodes import CountLaw, EpisodeIndex, Windows

__all__ = ["ALIGNS", "PADS", "SHORTS", "Cut", "Layout", "Window", "WindowForm"]

Array = np.ndarray[Any, Any]

PADS = ("none", "left", "right", "both")
SHORTS = ("exclude", "whole", "law")
ALIGNS = ("left", "right")


class Cut(NamedTuple):
    """The stored rows of windows: times ``first <= time < stop`` of ``lane``, int64 ``[K]``.

    ``stop`` may be None of windows that all have their full length.
    """

    lane: Array
    first: Array
    stop: Array | None


class Layout(NamedTuple):
    """Rows of windows one after another.

    Attributes:
        element: int64 ``[B]``; at padding that of the nearest real row.
        window: int64 ``[B]``, the number of the window that a row belongs to.
        mask: bool ``[B]``, True at real rows; None where windows are never padded.
    """

    element: Array
    window: Array
    mask: Array | None


class Window:
    """Windows of ``length`` rows; the law of C25 of the sequences reference, and that of spans.

    In an episode with n rows a window begins at a virtual start s, counted from the episode's
    first row, with ``-left <= s <= n - length + right``; its rows are those of ``s .. s + length -
    1`` that the episode has. That holds for ``n >= least``; shorter episodes have ``below`` windows
    (0 or 1), which are the whole episode.

    Args:
        length: rows T of a full window.
        left, right: how far windows may hang over either end.
        least, below: see above.
        filled: windows always have T rows, padded where the episode has none.
        align: where the real rows of padded windows are: ``"left"`` or ``"right"``.

    Example:
        >>> from replaykit.samplers.windows import Window
        >>> Window(4, right=3).law.count(10)
        10
    """

    def __init__(
        self,
        length: int,
        *,
        left: int = 0,
        right: int = 0,
        least: int | None = None,
        below: int = 0,
        filled: bool = False,
        align: str = "left",
    ) -> None:
        self.length, self.left, self.right = length, left, right
        self.least = length if least is None else least
        self.below = below
        self.filled, self.align = filled, align
        self.plain = not (left or right or below)
        """Whether every window has all its rows."""
        self.whole = self.plain and not filled
        """Whether besides nothing is said of padding."""
        self.law = CountLaw(self.least, 1 - length + left + right, below)
        """How many windows an episode has."""
        self._steps = np.arange(length, dtype=np.int64)
        self._numbers = self._one_lane = self._steps[:0]

    # -- from numbers to rows -------------------------------------------------------------------

    def cut(self, found: Windows) -> Cut:
        """The rows of windows that were looked up by their numbers, or in their episodes."""
        if self.plain:
            return Cut(found.lane, found.base + found.rest, None)
        full = found.rows >= self.least
        start = found.base + np.where(full, found.rest - self.left, 0)
        stop = np.minimum(start + self.length, found.base + found.rows)
        return Cut(found.lane, np.maximum(start, found.base), stop)

    def cut_from(self, first: Array, last: Array, lane: Array) -> Cut:
        """The rows of windows that begin with rows ``first`` of episodes that end with ``last``."""
        return Cut(lane, first, np.minimum(first + self.length, last + 1))

    def lay_out(self, index: EpisodeIndex, cut: Cut) -> Layout:
        """Rows of windows one after another, in order of time inside."""
        if self.plain:
            mask = np.ones(len(cut.first) * self.length, bool) if self.filled else None
            return self._rows(index, cut, cut.first[:, None] + self._steps, mask)
        assert cut.stop is not None
        count = cut.stop - cut.first
        if self.filled:
            steps = self._steps
            if self.align == "left":
                time = np.minimum(cut.first[:, None] + steps, cut.stop[:, None] - 1)
                mask = steps < count[:, None]
            else:
                virtual = cut.stop[:, None] - self.length + steps
                time = np.maximum(virtual, cut.first[:, None])
                mask = virtual >= cut.first[:, None]
            return self._rows(index, cut, time, mask.reshape(-1))
        window = np.repeat(np.arange(len(count), dtype=np.int64), count)
        time = np.arange(len(window)) + np.repeat(cut.first - np.cumsum(count) + count, count)
        return Layout(index.element(time, np.repeat(cut.lane, count)), window, None)

    def _rows(self, index: EpisodeIndex, cut: Cut, time: Array, mask: Array | None) -> Layout:
        numbers = self.numbers(len(time))
        lane = self._one_lane if index.lanes == 1 else np.repeat(cut.lane, self.length)
        return Layout(index.element(time.reshape(-1), lane), numbers, mask)

    def numbers(self, count: int) -> Array:
        """Of ``count`` full windows one after another which window each row belongs to."""
        if len(self._numbers) != count * self.length:
            self._numbers = np.repeat(np.arange(count, dtype=np.int64), self.length)
            self._one_lane = np.zeros(count * self.length, np.int64)
        return self._numbers.copy()


@dataclass(frozen=True)
class WindowForm:
    """What windows are asked for, whatever their length.

    Attributes:
        span: how far windows may hang over the start and the end of an episode, and are then
            shorter: True: all but one row; a number of rows.
        strict: only episodes of at least the length; else shorter ones are one window.
        pad: one of ``PADS``: over which ends windows may hang and are padded; None: no such
            padding.
        short: one of ``SHORTS``: what becomes of episodes that are shorter, where ``pad`` is given.
        align: where the real rows of padded windows are.
        repeat: pad short windows without ``pad``.
    """

    span: tuple[int | bool, int | bool] = (False, False)
    strict: bool = True
    pad: str | None = None
    short: str = "exclude"
    align: str = "left"
    repeat: bool = False

    @property
    def filled(self) -> bool:
        """Whether windows always have all rows, with a mask that says which are real."""
        return self.pad is not None or self.repeat

    @property
    def skips_short(self) -> bool:
        """Whether episodes that are shorter than a window have none."""
        return self.strict if self.pad is None else self.short == "exclude"

    @property
    def full(self) -> bool:
        """Whether all windows have the same number of rows."""
        return self.filled or (self.strict and not any(self.span))

    def of(self, length: int) -> Window:
        """Windows of that length.

        Raises:
            ValueError: a span that would leave no row.
        """
        if self.pad is None:
            left, right = (_hang(span, length) for span in self.span)
            return Window(
                length,
                left=left,
                right=right,
                below=0 if self.strict else 1,
                filled=self.repeat,
                align=self.align,
            )
        # An episode of exactly the length is whole by either law; the `whole` one has it once.
        least = {"exclude": length, "whole": length + 1, "law": 1}[self.short]
        if self.pad == "none" and self.short != "exclude":
            least = length
        return Window(
            length,
            left=length - 1 if self.pad in ("left", "both") else 0,
            right=length - 1 if self.pad in ("right", "both") else 0,
            least=least,
            below=1 if self.short == "whole" else 0,
            filled=True,
            align=self.align,
        )


def _hang(span: int | bool, length: int) -> int:
    if span is True:
        return length - 1
    if span >= length:
        raise ValueError(f"expected span below the {length} rows of a slice, got {span}")
    return int(span)
