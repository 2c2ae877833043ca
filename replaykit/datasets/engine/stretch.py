"""What is read and written in one go: a span, or many short ones in a row as if they were one.

An episode of ten steps is no work for the machine and much for the interpreter. Short groups of
one file that declare the same leaves are therefore laid one after another, and all that follows
sees arrays of one length with many episodes, as a flat file has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.places import Place
from replaykit.datasets.engine.plan import Episode, Plan, PlannedLeaf, Span

__all__ = ["EpisodeRows", "Stretch", "stretches"]

Index = npt.NDArray[np.int64]

_TOGETHER_BYTES: Final = 1 << 20
"""Bytes of the widest leaf up to which spans are taken together: they stay in a fast cache."""


@dataclass(frozen=True)
class EpisodeRows:
    """Where episodes lie, an array for each fact; records are counted as their stretch has them.

    Attributes:
        bases: the first record.
        records: how many records of the clock.
        starts: the first row of the table.
        rows: how many rows.
        is_open: whether the state after the last row was not recorded.
    """

    bases: Index
    records: Index
    starts: Index
    rows: Index
    is_open: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, episodes: Sequence[Episode]) -> EpisodeRows:
        """Returns those of episodes as a plan has them."""
        # Not a tuple for each: so many new objects have Python look for cycles among all others.
        return cls(
            np.array([episode.base for episode in episodes], np.int64),
            np.array([episode.records for episode in episodes], np.int64),
            np.array([episode.start for episode in episodes], np.int64),
            np.array([episode.rows for episode in episodes], np.int64),
            np.array([episode.is_open for episode in episodes], np.bool_),
        )

    @cached_property
    def stops(self) -> Index:
        """The record after the last one of the clock."""
        return self.bases + self.records

    @cached_property
    def finals(self) -> Index:
        """The last row."""
        return self.starts + self.rows - 1

    def at_record(self, record: int) -> int:
        """Returns the episode that a record belongs to."""
        return min(int(np.searchsorted(self.stops, record, "right")), len(self.stops) - 1)

    def at_row(self, row: int) -> int:
        """Returns the episode that a row belongs to."""
        return int(np.searchsorted(self.starts, row, "right")) - 1


class Stretch:
    """Spans of one file in a row whose leaves are the same.

    Where there are several, each begins ``room`` records after the end of the clock of the one
    before: its longer leaves have place there, which the others leave zero.

    Attributes:
        spans: one, or short ones.
        offsets: where each begins.
        records: how many there are, with the room after each but a single one.
        episodes: those of the plan.
        at: where they lie here.
        first, stop, start, rows, leaves: as those of a span.
    """

    def __init__(self, plan: Plan, spans: Sequence[Span], room: int, place: Place) -> None:
        first, last = spans[0], spans[-1]
        self.spans = spans
        self.first, self.stop = first.first, last.stop
        self.start = first.start
        self.rows = last.start + last.rows - first.start
        self.leaves = first.leaves
        self.episodes: Sequence[Episode] = plan.episodes[self.first : self.stop]
        self.place = place
        if len(spans) == 1:
            room = 0
        lengths = np.array([span.records + room for span in spans], np.int64)
        self.offsets = np.cumsum(lengths) - lengths
        self.records = int(lengths.sum())
        at = EpisodeRows.of(self.episodes)
        if len(spans) > 1:
            shifts = np.repeat(self.offsets, [span.stop - span.first for span in spans])
            at = EpisodeRows(at.bases + shifts, at.records, at.starts, at.rows, at.is_open)
        self.at = at

    @property
    def is_single(self) -> bool:
        """Whether the records are those of one span."""
        return len(self.spans) == 1

    def place_of(self, span: int) -> Place:
        """Returns where a span is in the corpus."""
        return self.place.at(group=self.spans[span].group or None)

    def place_at(self, record: int, key: str) -> Place:
        """Returns where a record of a leaf is in the corpus."""
        span = int(np.searchsorted(self.offsets, record, "right")) - 1
        return self.place_of(span).at(key=key, record=record - int(self.offsets[span]))

    def place_of_episode(self, episode: int) -> Place:
        """Returns where an episode, counted from the first of the stretch, is in the corpus."""
        found = self.episodes[episode]
        at = self.place.at(group=found.group or None)
        return at if found.is_whole else at.at(record=found.base)

    def lasts(self, leaf: PlannedLeaf) -> Index:
        """Returns the last record of a leaf in each span."""
        return self.offsets + np.array([span.records for span in self.spans]) + leaf.extra - 1


def stretches(
    plan: Plan, spans: Sequence[Span], witnesses: Sequence[PlannedLeaf], block_bytes: int,
    place: Place,
) -> Iterator[Stretch]:  # fmt: skip
    """Yields the spans of one file, short ones taken together.

    Args:
        plan: what is to be written.
        spans: of one file, in order.
        witnesses: leaves that are looked at side by side, and so are in memory at once.
        block_bytes: how much memory they may take.
        place: the file.
    """
    room = max((leaf.extra for leaf in plan.leaves), default=0)
    widest = max((leaf.record_bytes for leaf in plan.leaves), default=1)
    together = sum(leaf.record_bytes for leaf in witnesses)
    limit = min(_TOGETHER_BYTES, block_bytes) // max(1, widest)
    limit = min(limit, block_bytes // max(1, together))
    for _, alike in groupby(spans, key=lambda span: span.form):
        waiting: list[Span] = []
        records = 0
        for span in alike:
            length = span.records + room
            if waiting and records + length > limit:
                yield Stretch(plan, waiting, room, place)
                waiting, records = [], 0
            waiting.append(span)
            records += length
        yield Stretch(plan, waiting, room, place)
