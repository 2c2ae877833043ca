"""Rows of which nothing was stored: they read as zero in every column (rule V28)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.columns import ColumnFile
from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.plan import PlannedLeaf
from replaykit.datasets.engine.reading import StretchReader
from replaykit.datasets.engine.stretch import Stretch
from replaykit.ted import Key

__all__ = ["check_blanks"]

Index = npt.NDArray[np.int64]

_READ_BYTES: Final = 1 << 20
"""Bytes of a column that are looked at at a time: they stay in a fast cache."""
_ROWS: Final = 1 << 15
"""Rows that are looked at at a time: their numbers take more than narrow entries."""


def check_blanks(
    stretch: Stretch,
    leaves: Sequence[PlannedLeaf],
    columns: Mapping[Key, ColumnFile],
    reader: StretchReader,
    bad: Collection[int],
) -> None:
    """Looks for rows that are zero in all columns and not in the source (rule V28).

    Args:
        stretch: whose rows they are; all of them were written.
        leaves: what the rows are made of.
        columns: the column files.
        reader: reads the source again, where rows are zero throughout.
        bad: episodes that are to be left out, by position.

    Raises:
        RuntimeError: there is such a row: a fault of this engine.

    Cost: reads back the actions, and of other columns the rows in which these are zero, from the
    narrowest on. Memory: a block of 1 MiB, or of the source where rows are zero throughout.
    """
    filled = [
        (leaf, target)
        for leaf in leaves
        if stretch.leaves.issuperset(leaf.paths)
        for target in leaf.targets
        if columns[target.key].spec.entry_bytes
    ]
    # Actions are hardly ever zero, so that mostly no other column is looked at.
    filled.sort(key=lambda pair: (pair[0].role != "action", pair[0].record_bytes))
    if not filled:
        return
    (_, narrow), rest = filled[0], filled[1:]
    stop = stretch.start + stretch.rows
    step = min(_ROWS, max(1, _READ_BYTES // columns[narrow.key].spec.entry_bytes))
    for start in range(stretch.start, stop, step):
        blank = _blank(columns[narrow.key], np.arange(start, min(start + step, stop)))
        for _, target in rest:
            if not len(blank):
                break
            blank = _blank(columns[target.key], blank)
        episodes = np.searchsorted(stretch.at.starts, blank, "right") - 1
        good = np.isin(episodes + stretch.first, list(bad), invert=True)
        if good.any():
            for leaf, target in filled:
                _check_source(stretch, leaf, target, reader, blank[good], episodes[good])


def _blank(column: ColumnFile, rows: Index) -> Index:
    """Returns those of some rows that are zero in a column."""
    found = [rows[:0]]
    for some in _together(rows, max(1, _READ_BYTES // column.spec.entry_bytes)):
        block = column.read(int(some[0]), int(some[-1] - some[0]) + 1)
        is_blank = np.logical_not(block.any(axis=1))
        found.append(some[np.asarray(is_blank)[some - some[0]]])
    return np.concatenate(found)


def _together(numbers: Index, most: int) -> Iterator[Index]:
    """Yields rising numbers in pieces that are read together, with what lies between them."""
    begin = 0
    while begin < len(numbers):
        end = int(np.searchsorted(numbers, numbers[begin] + most))
        yield numbers[begin:end]
        begin = end


def _check_source(
    stretch: Stretch,
    leaf: PlannedLeaf,
    target: Target,
    reader: StretchReader,
    rows: Index,
    episodes: Index,
) -> None:
    """Checks that the records of rows that read as zero are zero."""
    at = stretch.at
    records = at.bases[episodes] + target.offset + rows - at.starts[episodes]
    # The last row of an open episode takes what it started from.
    records = np.minimum(records, at.stops[episodes] + leaf.extra - 1)
    most = max(1, _READ_BYTES // max(1, leaf.record_bytes))
    for some in _together(records, stretch.records if not stretch.is_single else most):
        first, stop = int(some[0]), int(some[-1]) + 1
        if not stretch.is_single:
            first, stop = 0, stretch.records
        elif leaf.is_once:
            first, stop = 0, 1
        block = reader.read(leaf, first, stop)
        values = block if leaf.is_once and stretch.is_single else block[some - first]
        with np.errstate(over="ignore", invalid="ignore"):
            # What is too small for the column's dtype is zero there.
            values = values.astype(leaf.stored) if leaf.stored.kind in "fc" else values
        filled = (values != 0).reshape(len(values), -1).any(axis=1)
        if filled.any():
            which = int(np.argmax(filled))
            row = int(rows[np.searchsorted(records, some[which])])
            raise RuntimeError(
                f"{stretch.place_at(int(some[which]), leaf.path)}: nothing of this record was "
                f"stored: row {row} is zero in every column [V28]"
            )
