"""Read the records of episodes in blocks, and map records to rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.places import Place, path_below
from replaykit.datasets.engine.plan import (
    EpisodeSpan,
    Plan,
    PlannedLeaf,
    SourceEpisode,
    SourceEpisodes,
)
from replaykit.errors import CorpusError
from replaykit.ted import Key

__all__ = [
    "EpisodeRows",
    "Put",
    "Runs",
    "Stretch",
    "StretchReader",
    "store_constant",
    "store_flag",
    "stretches",
]

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
    def of(cls, episodes: SourceEpisodes, first: int, stop: int) -> EpisodeRows:
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

    def __init__(self, plan: Plan, spans: Sequence[EpisodeSpan], room: int, place: Place) -> None:
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

    def episode(self, position: int) -> SourceEpisode:
        """Returns an episode, counted from the first one here, as the plan has it."""
        return self._plan.episodes[self.first + position]

    def column(self, name: str) -> npt.NDArray[Any]:
        """Returns a fact of all episodes; see `SourceEpisodes.column`."""
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
    plan: Plan, spans: Iterable[EpisodeSpan], witnesses: Sequence[PlannedLeaf], block_bytes: int,
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
        waiting: list[EpisodeSpan] = []
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


def _parts(plan: Plan, span: EpisodeSpan, records: int) -> Iterator[EpisodeSpan]:
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


Put = Callable[[Key, int, npt.NDArray[Any]], None]
"""Writes entries of a column from a row of the table on."""


def store_flag(
    stretch: Stretch, key: Key, rows: npt.NDArray[np.int64], *, is_set: bool, block: int, put: Put
) -> None:
    """Writes a flag that is one way at some rows of a stretch and the other way elsewhere.

    Args:
        rows: where it is ``is_set``.
        block: how many rows are written at a time.
    """
    stop = stretch.start + stretch.rows
    for begin in range(stretch.start, stop, block):
        end = min(begin + block, stop)
        values = np.full((end - begin, 1), not is_set)
        values[rows[(rows >= begin) & (rows < end)] - begin] = is_set
        put(key, begin, values)


def store_constant(
    stretch: Stretch,
    key: Key,
    each: npt.NDArray[Any],
    *,
    block: int,
    put: Put,
) -> None:
    """Writes what is the same in all rows of an episode.

    Args:
        each: the value of each episode.
        block: how many rows are written at a time.
    """
    starts = np.append(stretch.at.starts - stretch.start, stretch.rows)
    for begin in range(0, stretch.rows, block):
        end = min(begin + block, stretch.rows)
        first = int(np.searchsorted(starts, begin, "right")) - 1
        last = int(np.searchsorted(starts, end, "left"))
        counts = np.minimum(starts[first + 1 : last + 1], end) - np.maximum(
            starts[first:last], begin
        )
        put(key, stretch.start + begin, np.repeat(each[first:last], counts))


_KEPT_BYTES: Final = 160 << 20
"""Bytes of a stripe of chunks up to which it is decompressed once and kept while it is read."""


class StretchReader:
    """Reads the leaves of a stretch.

    Args:
        file: the file that it is in.
        stretch: the arrays.
        block_bytes: how much of one leaf is read at a time.
        give_up: told which of several spans cannot be read, by position, with the error; where
            it returns, the records of the span are zero from then on.
    """

    def __init__(
        self,
        file: H5File,
        stretch: Stretch,
        block_bytes: int,
        give_up: Callable[[int, CorpusError], None],
    ) -> None:
        self._file = file
        self._stretch = stretch
        self._block_bytes = block_bytes
        self._give_up = give_up
        self._dead: set[int] = set()

    def read(self, leaf: PlannedLeaf, start: int, stop: int) -> npt.NDArray[Any]:
        """Returns records ``start .. stop - 1`` of a leaf, decoded, parts side by side.

        Of several spans all records are read at once.

        Raises:
            CorpusError: those of a single span cannot be read in full, or not decoded.
        """
        stretch = self._stretch
        if stretch.is_single:
            return self._read(stretch.spans[0], leaf, start, stop)
        block: npt.NDArray[Any] | None = None
        offsets = stretch.offsets.tolist()
        is_plain = leaf.decoder is None and len(leaf.paths) == 1 and not leaf.is_once
        for i, span in enumerate(stretch.spans):
            records = span.records + leaf.extra
            place = slice(offsets[i], offsets[i] + records)
            into = block[place] if block is not None and is_plain else None
            part = self._tried(i, leaf, 1 if leaf.is_once else records, into)
            if part is None or part is into:
                continue
            if block is None:
                # All spans of a stretch declare the same, so that this is the dtype of all.
                block = np.zeros((stretch.records, *part.shape[1:]), part.dtype)
            block[place] = part
        if block is None:
            return np.zeros((stretch.records, *leaf.shape), leaf.dtype)
        return block

    def _tried(
        self, position: int, leaf: PlannedLeaf, stop: int, into: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any] | None:
        """Returns the first records of one of several spans; ``None`` if they cannot be read."""
        if position in self._dead:
            return None
        try:
            return self._read(self._stretch.spans[position], leaf, 0, stop, into)
        except CorpusError as error:
            self._dead.add(position)
            self._give_up(position, error)
            return None

    def _read(
        self,
        span: EpisodeSpan,
        leaf: PlannedLeaf,
        start: int,
        stop: int,
        into: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        if not leaf.is_once:
            start, stop = start + span.base, stop + span.base
        if leaf.decoder is not None:
            return leaf.decoder.read(self._file, path_below(span.group, leaf.path), start, stop)
        if len(leaf.paths) == 1:
            return self._file.read(path_below(span.group, leaf.path), start, stop, into)
        parts = [self._file.read(path_below(span.group, path), start, stop) for path in leaf.paths]
        flat = [part.reshape(stop - start, -1) for part in parts]
        return np.concatenate(flat, axis=1, dtype=leaf.dtype)

    def blocks(
        self, leaf: PlannedLeaf, loaded: Mapping[str, npt.NDArray[Any]]
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yields the records of a leaf in blocks, each with the index of its first record.

        ``loaded`` has the first records of leaves that were read already.

        HDF5 decompresses a chunk whole. A stripe of chunks that is larger than a block is read in
        blocks all the same: HDF5 keeps it meanwhile up to 160 MiB. A larger one is decompressed
        anew for every block, which takes time; a chunk of that size takes its memory in any case.
        """
        stretch, begin = self._stretch, 0
        if leaf.path in loaded:
            begin = len(loaded[leaf.path])
            yield 0, loaded[leaf.path]
            if begin == stretch.records + leaf.extra * stretch.is_single:
                return
        if not stretch.is_single:
            yield 0, self.read(leaf, 0, stretch.records)
            return
        records = stretch.records + leaf.extra
        step = records
        if leaf.is_once:
            value = self.read(leaf, 0, 1)
            step = max(1, self._block_bytes // max(1, leaf.record_bytes))
            for start in range(0, records, step):
                count = min(step, records - start)
                yield start, np.broadcast_to(value, (count, *value.shape[1:]))
            return
        if leaf.record_bytes * records <= self._block_bytes:
            yield begin, self.read(leaf, begin, records)
            return
        span = stretch.spans[0]
        paths = [path_below(span.group, path) for path in leaf.paths]
        stripes = [self._file.stripe(path) for path in paths]
        stripe = max(rows for rows, _ in stripes)
        nbytes = stripe * leaf.record_bytes
        # Whole stripes of chunks, so that none is decompressed twice.
        step = stripe * max(1, self._block_bytes // nbytes)
        piece = step if nbytes <= self._block_bytes else self._block_bytes // leaf.record_bytes
        whole = max(nbytes for _, nbytes in stripes)
        kept = whole if piece < step and whole <= _KEPT_BYTES else 0
        start = begin
        while start < records:
            # To the end of a stripe, wherever this begins.
            end = min(((start + span.base) // step + 1) * step - span.base, records)
            with self._file.keeping(paths, kept):
                while start < end:
                    stop = min(start + max(1, piece), end)
                    yield start, self.read(leaf, start, stop)
                    start = stop
