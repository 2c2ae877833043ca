"""Rows that nothing follows although no column says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.episodes.codes import SEVERED
from replaykit.episodes.marks import CutMarks

if TYPE_CHECKING:
    from replaykit.storages.ledger import Ledger

__all__ = ["between", "positions_from", "seams"]

Array = np.ndarray[Any, Any]


def positions_from(ledger: Ledger, slot: int) -> Array | None:
    """Positions of the stored rows from a slot on, round the ring; None: each is one more than that
    of the row before."""
    if ledger.in_order or not ledger.length:
        return None
    order = (np.arange(ledger.length) + slot) % ledger.slots
    return ledger.positions(torch.from_numpy(order)).numpy()


def seams(
    marks: CutMarks, positions: Array | None, oldest: int, length: int, lanes: int
) -> tuple[dict[int, Array], bool]:
    """Finds after which of all stored rows their streams were cut, or other rows are missing.

    Args:
        marks: where somebody has cut.
        positions: of the rows in ring order, as ``positions_from`` gives them.
        oldest: the first of them.
        length: how many rows.

    Returns:
        The codes of ends uint8 ``[lanes]``, 0 in lanes that go on, by the number of the row; and
        whether the rows lie in the order of their positions without a gap.
    """
    stops: dict[int, Array] = {}
    if positions is None:
        in_order = True
        numbers, codes = marks.among(oldest * lanes, (oldest + length) * lanes)
        rows = numbers // lanes - oldest
    else:
        severed = np.nonzero(np.diff(positions) != 1)[0]
        in_order = not len(severed)
        numbers, codes = marks.among(
            int(positions.min()) * lanes, (int(positions.max()) + 1) * lanes
        )
        by_position = np.argsort(positions, kind="stable")
        at = np.searchsorted(positions[by_position], numbers // lanes)
        rows = by_position[at]
        stored = positions[rows] == numbers // lanes
        rows, numbers, codes = rows[stored], numbers[stored], codes[stored]
        stops = {int(row): np.full(lanes, SEVERED, np.uint8) for row in severed}
    for row, number, code in zip(rows.tolist(), numbers.tolist(), codes.tolist(), strict=True):
        stop = stops.setdefault(row, np.zeros(lanes, np.uint8))
        stop[number % lanes] = max(code, stop[number % lanes])
    return stops, in_order


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
