"""Which records of a stretch go to which rows: runs of records in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.stretch import EpisodeRows

__all__ = ["Runs"]

Index = npt.NDArray[np.int64]

_SHORT_BYTES: Final = 4096
"""Bytes of a run up to which picking records one by one costs less than copying runs."""
_TOGETHER: Final = 1 << 16
"""Records that are picked together."""


@dataclass(frozen=True)
class Runs:
    """Run ``i`` says that rows ``rows[i] ..`` take records ``records[i] ..``, ``counts[i]`` each.

    Rows follow one another without a gap from run to run; records never go back. Rows are counted
    from the first of the table, records from the first of the stretch.
    """

    rows: Index
    records: Index
    counts: Index

    @classmethod
    def of(cls, episodes: EpisodeRows, target: Target, extra: int = 0) -> Runs:
        """Returns the runs of a target over episodes in a row; O(E).

        ``extra``: how many more records than the clock the leaf has.
        """
        rows, counts = episodes.starts, episodes.rows
        records, stops = episodes.bases + target.offset, episodes.stops + extra
        # The last row of an open episode arrives at a state that was not recorded: what it takes
        # in its place is the one that it started from.
        over = np.maximum(0, records + counts - stops) * (episodes.is_open & target.is_after)
        rows = np.stack([rows, rows + counts - over], 1).reshape(-1)
        records = np.stack([records, stops - over], 1).reshape(-1)
        counts = np.stack([counts - over, over], 1).reshape(-1)
        keep = counts > 0
        rows, records, counts = rows[keep], records[keep], counts[keep]
        starts = np.ones(len(rows), np.bool_)
        starts[1:] = records[1:] != records[:-1] + counts[:-1]
        first = np.flatnonzero(starts)
        return cls(rows[first], records[first], np.add.reduceat(counts, first))

    def __len__(self) -> int:
        return len(self.rows)

    def within(self, start: int, stop: int) -> Runs:
        """Returns the parts that lie in records ``start .. stop - 1``."""
        ends = self.records + self.counts
        first = int(np.searchsorted(ends, start, "right"))
        last = int(np.searchsorted(self.records, stop, "left"))
        begins = np.maximum(self.records[first:last], start)
        ends = np.minimum(ends[first:last], stop)
        rows = self.rows[first:last] + begins - self.records[first:last]
        # None is empty, since those that end at the start or begin at the stop are not among them.
        return Runs(rows, begins, ends - begins)

    def take(self, block: npt.NDArray[Any], start: int) -> npt.NDArray[Any]:
        """Returns the records of all runs, in the order of rows, from a block that has them.

        One run is a view of the block. ``start``: the first record of the block.
        """
        if len(self) == 1:
            begin, count = int(self.records[0]) - start, int(self.counts[0])
            return block[begin : begin + count]
        total = int(self.counts.sum())
        if total * block[:1].nbytes > _SHORT_BYTES * len(self):
            parts = zip((self.records - start).tolist(), self.counts.tolist(), strict=True)
            return np.concatenate([block[begin : begin + count] for begin, count in parts])
        found = np.empty((total, *block.shape[1:]), block.dtype)
        ends = np.cumsum(self.counts)
        # The numbers of all records at once may take more memory than the records.
        pieces = np.searchsorted(ends, np.arange(_TOGETHER, total + _TOGETHER, _TOGETHER))
        first = 0
        for last in np.minimum(pieces + 1, len(self)).tolist():
            if last > first:
                counts = self.counts[first:last]
                stops = ends[first:last]
                begin = int(stops[0] - counts[0])
                shifts = self.records[first:last] - start - (stops - counts)
                index = np.arange(begin, int(stops[-1])) + np.repeat(shifts, counts)
                np.take(block, index, axis=0, out=found[begin : int(stops[-1])], mode="clip")
                first = last
        return found

    def mark(self, marks: npt.NDArray[np.bool_], start: int) -> None:
        """Sets the marks of all records of the runs; the first mark is that of ``start``."""
        begins = (self.records - start).tolist()
        for begin, count in zip(begins, self.counts.tolist(), strict=True):
            marks[begin : begin + count] = True
