"""What is read and written in one go: a span, or many short ones in a row as if they were one.

An episode of ten steps is no work for the machine and much for the interpreter. Short groups of
one file that declare the same leaves are therefore laid one after another, and all that follows
sees arrays of one length with many episodes, as a flat file has them. What is kept of each of them
while they are written takes memory, so that a flat file of very many is taken in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.episodes import Episode, Episodes, Span
from replaykit.datasets.engine.places import Place
from replaykit.datasets.engine.plan import Plan, PlannedLeaf

__all__ = ["EpisodeRows", "Stretch", "stretches"]

Index = npt.NDArray[np.int64]

_TOGETHER_BYTES: Final = 1 << 20
"""Bytes of the widest leaf up to which spans are taken together: they stay in a fast cache."""
_EPISODES: Final = 1 << 13
"""Episodes of a stretch: some 700 bytes of each are held while it is written."""
_PART_BYTES: Final = 64 << 20
"""Bytes of all leaves after which arrays with many episodes are cut: what is finished of them can
be kept, and the columns of a part are still in memory when they are looked at again."""


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
    def of(cls, episodes: Episodes, first: int, stop: int) -> EpisodeRows:
        """Returns those of some episodes as a plan has them."""
        names = ("base", "records", "start", "rows", "is_open")
        return cls(*(episodes.column(name)[first:stop] for name in names))

    def __len__(self) -> int:
        return len(self.bases)

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
        spans: one or a part of one, or short ones.
        offsets: where each begins.
        records: how many there are, with the room after each but a single one.
        at: where the episodes lie here.
        first, stop, start, rows, leaves: as those of a span.
    """

    def __init__(self, plan: Plan, spans: Sequence[Span], room: int, place: Place) -> None:
        first, last = spans[0], spans[-1]
        self.spans = spans
        self.first, self.stop = first.first, last.stop
        self.start = first.start
        self.rows = last.start + last.rows - first.start
        self.leaves = first.leaves
        self.place = place
        self._plan = plan
        if len(spans) == 1:
            room = 0
        lengths = np.array([span.records + room for span in spans], np.int64)
        self.offsets = np.cumsum(lengths) - lengths
        self.records = int(lengths.sum())
        at = EpisodeRows.of(plan.episodes, self.first, self.stop)
        if len(spans) > 1:
            shifts = np.repeat(self.offsets, [span.stop - span.first for span in spans])
            at = replace(at, bases=at.bases + shifts)
        elif first.base:
            at = replace(at, bases=at.bases - first.base)
        self.at = at

    def episode(self, position: int) -> Episode:
        """Returns an episode, counted from the first one here, as the plan has it."""
        return self._plan.episodes[self.first + position]

    def column(self, name: str) -> npt.NDArray[Any]:
        """Returns a fact of all episodes; see `Episodes.column`."""
        return self._plan.episodes.column(name)[self.first : self.stop]

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
        within = record - int(self.offsets[span]) + self.spans[span].base
        return self.place_of(span).at(key=key, record=within)

    def place_of_episode(self, episode: int) -> Place:
        """Returns where an episode, counted from the first of the stretch, is in the corpus."""
        found = self.episode(episode)
        at = self.place.at(group=found.group or None)
        return at if found.is_whole else at.at(record=found.base)

    def lasts(self, leaf: PlannedLeaf) -> Index:
        """Returns the last record of a leaf in each span."""
        return self.offsets + np.array([span.records for span in self.spans]) + leaf.extra - 1


def stretches(
    plan: Plan, spans: Iterable[Span], witnesses: Sequence[PlannedLeaf], block_bytes: int,
    place: Place,
) -> Iterator[Stretch]:  # fmt: skip
    """Yields the spans of one file, short ones taken together and those of many episodes in parts.

    Args:
        plan: what is to be written.
        spans: of one file, in order.
        witnesses: leaves that are looked at side by side, and so are in memory at once.
        block_bytes: how much memory they may take.
        place: the file.
    """
    room = max((leaf.extra for leaf in plan.leaves), default=0)
    widest = max((leaf.record_bytes for leaf in plan.leaves), default=1)
    width = sum(leaf.record_bytes for leaf in plan.leaves)
    together = sum(leaf.record_bytes for leaf in witnesses)
    limit = min(_TOGETHER_BYTES, block_bytes) // max(1, widest)
    limit = min(limit, block_bytes // max(1, together))
    for _, alike in groupby(spans, key=lambda span: span.form):
        waiting: list[Span] = []
        records = episodes = 0
        for span in alike:
            length, count = span.records + room, span.stop - span.first
            if waiting and (records + length > limit or episodes + count > _EPISODES):
                yield Stretch(plan, waiting, room, place)
                waiting, records, episodes = [], 0, 0
            if count > _EPISODES or (count > 1 and length * width > _PART_BYTES):
                for part in _parts(plan, span, max(1, _PART_BYTES // max(1, width))):
                    yield Stretch(plan, [part], room, place)
                continue
            waiting.append(span)
            records += length
            episodes += count
        if waiting:
            yield Stretch(plan, waiting, room, place)


def _parts(plan: Plan, span: Span, records: int) -> Iterator[Span]:
    """Cuts a span of many episodes where some begin; a chunk that is cut is decompressed twice.

    ``records``: after how many of them a part ends with the episode that it is in.
    """
    bases, starts = (plan.episodes.column(name) for name in ("base", "start"))
    stop = span.first
    while stop < span.stop:
        first = stop
        begins = bases[first + 1 : min(first + _EPISODES, span.stop)]
        stop = first + 1 + int(np.searchsorted(begins, bases[first] + records))
        is_last = stop == span.stop
        base = 0 if first == span.first else int(bases[first])
        end = span.records if is_last else int(bases[stop])
        row, end_row = int(starts[first]), span.start + span.rows
        yield replace(
            span, first=first, stop=stop, start=row, base=base, records=end - base,
            rows=(end_row if is_last else int(starts[stop])) - row,
        )  # fmt: skip
