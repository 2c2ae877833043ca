"""Which records of a span go to which rows: runs of records in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.plan import Episode

__all__ = ["Runs"]

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Runs:
    """Run ``i`` says that rows ``rows[i] ..`` take records ``records[i] ..``, ``counts[i]`` each.

    Rows follow one another without a gap from run to run; records never go back. Rows are counted
    from the first of the table, records from the first of the span.
    """

    rows: Index
    records: Index
    counts: Index

    @classmethod
    def of(cls, episodes: Sequence[Episode], target: Target, extra: int = 0) -> Runs:
        """Returns the runs of a target over the episodes of one span; O(E).

        ``extra``: how many more records than the clock the leaf has.
        """
        if len(episodes) == 1 and not episodes[0].is_open:
            one = episodes[0]
            return cls(_one(one.start), _one(one.base + target.offset), _one(one.rows))
        table = np.array(
            [
                (e.start, e.base + target.offset, e.rows, e.base + e.records + extra, e.is_open)
                for e in episodes
            ],
            np.int64,
        ).reshape(-1, 5)
        rows, records, counts, stops, is_open = table.T
        # The last row of an open episode arrives at a state that was not recorded: what it takes
        # in its place is the one that it started from.
        over = np.maximum(0, records + counts - stops) * (is_open if target.is_after else 0)
        rows = np.stack([rows, rows + counts - over], 1).reshape(-1)
        records = np.stack([records, stops - over], 1).reshape(-1)
        counts = np.stack([counts - over, over], 1).reshape(-1)
        keep = counts > 0
        rows, records, counts = rows[keep], records[keep], counts[keep]
        starts = np.ones(len(rows), np.bool_)
        starts[1:] = records[1:] != records[:-1] + counts[:-1]
        first = np.flatnonzero(starts)
        return cls(rows[first], records[first], np.add.reduceat(counts, first))

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields row, record and count of the parts that lie in records ``start .. stop - 1``."""
        first, last = 0, len(self.rows)
        if last > 1:
            first = int(np.searchsorted(self.records + self.counts, start, "right"))
            last = int(np.searchsorted(self.records, stop, "left"))
        for i in range(first, last):
            row, record, count = int(self.rows[i]), int(self.records[i]), int(self.counts[i])
            begin, end = max(record, start), min(record + count, stop)
            if begin < end:
                yield row + begin - record, begin, end - begin


def _one(value: int) -> Index:
    return np.array([value], np.int64)
