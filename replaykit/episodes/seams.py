"""Rows that nothing follows although no column says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from replaykit.episodes.codes import SEVERED
from replaykit.episodes.marks import CutMarks

if TYPE_CHECKING:
    from replaykit.episodes.source import RowNumbers

__all__ = ["between", "positions_from", "seams"]

Array = np.ndarray[Any, Any]


def positions_from(ledger: RowNumbers, slot: int) -> Array | None:
    """Positions of the stored rows from a slot on, round the ring; None: each is one more than that
    of the row before."""
    table = ledger.tables()[0]
    if table is None or not ledger.length:
        return None
    return np.roll(table.numpy(), -slot)


def seams(
    marks: CutMarks,
    positions: Array | None,
    oldest: int,
    length: int,
    lanes: int,
    upcoming: int,
) -> tuple[Array, Array, bool]:
    """Finds after which of all stored rows their streams were cut, or other rows are missing.

    Args:
        marks: where somebody has cut.
        positions: of the rows in ring order, as ``positions_from`` gives them.
        oldest: the first of them.
        length: how many rows.
        upcoming: position of the next row that is written: it goes on from the last one only where
            it is one more.

    Returns:
        The numbers of the rows, int64 ``[n]``, rising; the codes of their ends uint8
        ``[n, lanes]``, 0 in lanes that go on; and whether the rows, and the next one, lie in
        the order of their positions without a gap.

    Cost: O(1) for rows in order beside the marks; else a pass over the positions.
    """
    if positions is None:
        severed = np.zeros(0, np.int64)
        numbers, codes = marks.among(oldest * lanes, (oldest + length) * lanes)
        rows = numbers // lanes - oldest
    else:
        severed = np.nonzero(np.diff(positions, append=upcoming) != 1)[0]
        numbers, codes = marks.among(
            int(positions.min()) * lanes, (int(positions.max()) + 1) * lanes
        )
        marked, of = np.unique(numbers // lanes, return_inverse=True)
        rows = _places(positions, marked)[of]
        stored = rows >= 0
        rows, numbers, codes = rows[stored], numbers[stored], codes[stored]
    more = np.unique(rows)
    at = np.searchsorted(severed, more)
    new = np.append(severed, -1)[at] != more
    after = np.insert(severed, at[new], more[new])
    ends = np.zeros((len(after), lanes), np.uint8)
    ends[np.searchsorted(after, severed)] = SEVERED
    np.maximum.at(ends, (np.searchsorted(after, rows), numbers % lanes), codes)
    return after, ends, not len(severed)


def _places(values: Array, wanted: Array) -> Array:
    """Where each of some rising values lies among others, all distinct; -1: nowhere."""
    found = np.full(len(wanted), -1, np.int64)
    if len(wanted):
        at = np.minimum(np.searchsorted(wanted, values), len(wanted) - 1)
        place = np.nonzero(wanted[at] == values)[0]
        found[at[place]] = place
    return found


def between(severed: Array, lo: Any, hi: Any, time: Array, lane: Array) -> tuple[Array, Array]:
    """First and last row of what can be read without a gap around rows, as times.

    Args:
        severed: time and lane of the rows that nothing follows, int64 ``[m, 2]``.
        lo, hi: what is stored of the lanes of the rows.
    """
    first, last = np.full_like(time, 0) + lo, np.full_like(time, 0) + hi - 1
    if len(severed):
        reach = int(np.max(hi) - np.min(lo)) + 1
        keys = np.sort(severed[:, 1] * reach + severed[:, 0] - np.min(lo))
        own = lane * reach
        after = np.searchsorted(keys, own + time - np.min(lo))
        ends = np.append(keys, np.iinfo(np.int64).max)[after] - own
        last = np.where(ends < reach, np.minimum(last, ends + np.min(lo)), last)
        starts = np.insert(keys, 0, -1)[after] - own
        first = np.where(starts >= 0, np.maximum(first, starts + np.min(lo) + 1), first)
    return first, last
