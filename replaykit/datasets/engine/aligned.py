"""Whether rows hold the records that the alignment names: counted anew, not as they were written.

Rows are filled by runs of records, cut into blocks and put together again. Here the record of a
row is worked out from its episode alone, and what was stored is compared with it.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.plan import PlannedLeaf
from replaykit.datasets.engine.stretch import Stretch

__all__ = ["check_alignment"]

_COMPARED_BYTES: Final = 1 << 20
"""Bytes that are picked at a time."""


def check_alignment(
    stretch: Stretch,
    leaf: PlannedLeaf,
    target: Target,
    start: int,
    values: npt.NDArray[Any],
    row: int,
    entries: npt.NDArray[Any],
) -> None:
    """Compares the rewards of the first, a middle and the last row of every episode with their
    records (rule V24), and the state that its last row arrives at (rule V23).

    Of other leaves nothing is looked at. Cost: O(E) for each block, and the entries looked at.

    Args:
        stretch: whose rows they are.
        leaf: what the block is of.
        target: the column.
        start: the first record of the block.
        values: its records, as they are to be stored.
        row: the first row that was stored of it.
        entries: what was stored from there on.

    Raises:
        RuntimeError: a row holds another record: a fault of this engine.
    """
    at = stretch.at
    first, offset = at.bases + target.offset, at.rows - 1
    if leaf.role == "reward":
        rule, steps = "V24", np.concatenate([np.zeros_like(offset), at.rows // 2, offset])
        episodes = np.tile(np.arange(len(at)), 3)
    elif leaf.role == "observation" and target.is_after:
        rule, episodes = "V23", np.flatnonzero(~at.is_open)
        steps = offset[episodes]
    else:
        return
    records = first[episodes] + steps
    here = (records >= start) & (records < start + len(values))
    records, rows = records[here], (at.starts[episodes] + steps)[here]
    # A record behind the last one of its episode is of the next one.
    wrong = records >= at.stops[episodes[here]] + leaf.extra
    wrong |= (rows < row) | (rows >= row + len(entries))
    known = np.flatnonzero(~wrong)
    step = max(1, _COMPARED_BYTES // max(1, entries[:1].nbytes))
    for begin in range(0, len(known), step):
        some = known[begin : begin + step]
        wrong[some] = _differ(entries[rows[some] - row], values[records[some] - start])
    if wrong.any():
        record = int(records[np.argmax(wrong)])
        what = "the reward of a row" if rule == "V24" else "the state that an episode ends in"
        raise RuntimeError(
            f"{stretch.place_at(record, leaf.path)}: {what} is not that of this record, which the "
            f"alignment names; row {int(rows[np.argmax(wrong)])} holds another one [{rule}]"
        )


def _differ(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Returns which entries differ in a byte: NaN is equal to itself."""
    width = one[:1].nbytes
    if not width:
        return np.zeros(len(one), np.bool_)
    first, second = (
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, width)
        for array in (one, other)
    )
    return np.asarray((first != second).any(axis=1))
