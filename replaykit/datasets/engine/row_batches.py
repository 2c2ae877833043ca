"""Reading of records in blocks, and the mapping of records to rows."""

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
from replaykit.datasets.engine.locations import Location, path_below
from replaykit.datasets.engine.plan import (
    EpisodeSpan,
    H5Plan,
    PlannedLeaf,
    SourceEpisode,
    SourceEpisodes,
)
from replaykit.errors import CorpusError
from replaykit.ted import Key

Index = npt.NDArray[np.int64]

_TOGETHER_BYTES: Final = 1 << 20
"""Greatest number of bytes of the widest leaf in batched spans. They fit a fast cache."""
_EPISODES: Final = 1 << 13
"""Most episodes of a stretch. Each takes about 700 bytes while it is written."""
_PART_BYTES: Final = 64 << 20
"""Number of bytes of all leaves after which arrays with many episodes are cut.

The columns of a part are still in memory when they are checked.
"""


@dataclass(frozen=True)
class EpisodeRows:
    """The records and rows of episodes. Records are counted within their stretch.

    Attributes:
        bases: the first record of each episode.
        records: number of records of the clock.
        starts: the first row in the table.
        rows: number of rows.
        is_open: True if the state after the last row was not recorded.
    """

    bases: Index
    records: Index
    starts: Index
    rows: Index
    is_open: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, episodes: SourceEpisodes, first: int, stop: int) -> EpisodeRows:
        """Return the records and rows of episodes ``first .. stop - 1`` of a plan."""
        names = ("base", "records", "start", "rows", "is_open")
        columns = (episodes.column(name)[first:stop] for name in names)
        return cls(*map(np.ascontiguousarray, columns))

    def __len__(self) -> int:
        return len(self.bases)

    @cached_property
    def stops(self) -> Index:
        """For each episode, the record after its last record of the clock."""
        return self.bases + self.records

    @cached_property
    def finals(self) -> Index:
        """The last row of each episode."""
        return self.starts + self.rows - 1

    def at_record(self, record: int) -> int:
        """Return the episode that contains a record."""
        return min(int(np.searchsorted(self.stops, record, "right")), len(self.stops) - 1)

    def at_row(self, row: int) -> int:
        """Return the episode that contains a row."""
        return int(np.searchsorted(self.starts, row, "right")) - 1


class Stretch:
    """Consecutive spans of one file that have the same leaves.

    Each further span begins ``room`` records after the end of the preceding span's clock. Leaves
    that are longer than the clock use this room. In other leaves the records of this room are zero.

    Attributes:
        spans: one span, a part of a span, or several short spans.
        offsets: the first record of each span in the stretch.
        records: number of records. With several spans, it includes the room after each span.
        at: the records and rows of the episodes.
        first, stop, start, rows, leaves: as in `EpisodeSpan`.
        all_rows: the rows in the table.
    """

    def __init__(
        self, plan: H5Plan, spans: Sequence[EpisodeSpan], room: int, location: Location
    ) -> None:
        first, last = spans[0], spans[-1]
        self.spans = spans
        self.first, self.stop = first.first, last.stop
        self.start = first.start
        self.rows = last.start + last.rows - first.start
        self.all_rows = range(self.start, self.start + self.rows)
        self.leaves = first.leaves
        self.location = location
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
        """Return an episode of the plan by its position in the stretch."""
        return self._plan.episodes[self.first + position]

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of all episodes; see `SourceEpisodes.column`."""
        return self._plan.episodes.column(name)[self.first : self.stop]

    @property
    def is_single(self) -> bool:
        """True if all records belong to one span."""
        return len(self.spans) == 1

    def location_of(self, span: int) -> Location:
        """Return the location of a span in the corpus."""
        return self.location.at(group=self.spans[span].group or None)

    def location_at(self, record: int, key: str) -> Location:
        """Return the location of a record of a leaf in the corpus."""
        span = int(np.searchsorted(self.offsets, record, "right")) - 1
        within = record - int(self.offsets[span]) + self.spans[span].base
        return self.location_of(span).at(key=key, record=within)

    def location_of_episode(self, episode: int) -> Location:
        """Return the location of an episode, by its position in the stretch."""
        found = self.episode(episode)
        at = self.location.at(group=found.group or None)
        return at if found.is_whole else at.at(record=found.base)

    def lasts(self, leaf: PlannedLeaf) -> Index:
        """Return the last record of a leaf in each span."""
        return self.offsets + np.array([span.records for span in self.spans]) + leaf.extra - 1


def stretches(
    plan: H5Plan, spans: Iterable[EpisodeSpan], witnesses: Sequence[PlannedLeaf], block_bytes: int,
    location: Location,
) -> Iterator[Stretch]:  # fmt: skip
    """Yield the stretches of one file: batches of short spans, parts of large spans.

    Args:
        plan: the plan of the data set.
        spans: the spans of one file, in order.
        witnesses: leaves that the layout compares with each other. Their records are in memory at
            the same time.
        block_bytes: number of bytes that the witnesses may take.
        location: the file.
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
                yield Stretch(plan, waiting, room, location)
                waiting, records, episodes = [], 0, 0
            if count > _EPISODES or (count > 1 and length * width > _PART_BYTES):
                for part in _parts(plan, span, max(1, _PART_BYTES // max(1, width))):
                    yield Stretch(plan, [part], room, location)
                continue
            waiting.append(span)
            records += length
            episodes += count
        if waiting:
            yield Stretch(plan, waiting, room, location)


def _parts(plan: H5Plan, span: EpisodeSpan, records: int) -> Iterator[EpisodeSpan]:
    """Cut a span of many episodes into parts.

    A part ends with the episode that contains its record number ``records``. A chunk that is cut is
    decompressed twice.
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
"""Size of a run up to which it is faster to copy records one by one than runs."""
_TOGETHER: Final = 1 << 16
"""Number of records in one copy."""


@dataclass(frozen=True)
class Runs:
    """Ranges of rows with their records.

    Run ``i`` has ``counts[i]`` rows, from row ``rows[i]`` on. These rows take ``counts[i]``
    records, from record ``records[i]`` on. There are no gaps between the rows of consecutive runs,
    and records never decrease. Rows are counted from the first row of the table. Records are
    counted from the first record of the stretch.
    """

    rows: Index
    records: Index
    counts: Index

    @classmethod
    def of(cls, episodes: EpisodeRows, target: Target, extra: int = 0) -> Runs:
        """Return the runs of a target over consecutive episodes. Cost: O(E).

        ``extra`` is the number of records of the leaf minus the number of records of the clock.
        """
        rows, counts = episodes.starts, episodes.rows
        records, stops = episodes.bases + target.offset, episodes.stops + extra
        # The state after the last row of an open episode was not recorded. The row repeats the
        # state before it.
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
        """Return the parts within records ``start .. stop - 1``."""
        ends = self.records + self.counts
        first = int(np.searchsorted(ends, start, "right"))
        last = int(np.searchsorted(self.records, stop, "left"))
        begins = np.maximum(self.records[first:last], start)
        ends = np.minimum(ends[first:last], stop)
        rows = self.rows[first:last] + begins - self.records[first:last]
        # Runs that end at the start or begin at the stop are excluded, so no run is empty.
        return Runs(rows, begins, ends - begins)

    def records_in(self, block: npt.NDArray[Any], start: int) -> npt.NDArray[Any]:
        """Return the records of all runs, in row order, from a block that contains them.

        A single run is returned as a view of the block. ``start`` is the first record of the block.
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
        # Indices of all records at once may take more memory than the records.
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
        """Set the marks of all records of the runs.

        ``marks[0]`` belongs to the record ``start``.
        """
        begins = (self.records - start).tolist()
        for begin, count in zip(begins, self.counts.tolist(), strict=True):
            marks[begin : begin + count] = True


Put = Callable[[Key, int, npt.NDArray[Any]], None]
"""A function that writes values of a column, from a given row of the table on."""


def store_flag(
    rows: range, key: Key, at: npt.NDArray[np.int64], *, is_set: bool, block: int, put: Put
) -> None:
    """Write a flag that is ``is_set`` at some rows, and the opposite at all others.

    Args:
        rows: the rows that are written.
        at: the rows at which the flag is ``is_set``.
        block: number of rows in one write.
    """
    for begin in rows[::block]:
        end = min(begin + block, rows.stop)
        values = np.full((end - begin, 1), not is_set)
        values[at[(at >= begin) & (at < end)] - begin] = is_set
        put(key, begin, values)


def store_constant(
    rows: range, starts: Index, key: Key, each: npt.NDArray[Any], *, block: int, put: Put
) -> None:
    """Write values that are the same in all rows of an episode.

    Args:
        rows: the rows of the episodes.
        starts: the first row of each episode.
        each: the value of each episode.
        block: number of rows in one write.
    """
    starts = np.append(starts, rows.stop)
    for begin in rows[::block]:
        end = min(begin + block, rows.stop)
        first = int(np.searchsorted(starts, begin, "right")) - 1
        last = int(np.searchsorted(starts, end, "left"))
        counts = np.minimum(starts[first + 1 : last + 1], end) - np.maximum(
            starts[first:last], begin
        )
        put(key, begin, np.repeat(each[first:last], counts))


_CACHED_BYTES: Final = 160 << 20
"""Greatest size of a stripe of chunks that stays decompressed while it is read."""


class StretchReader:
    """A reader of the leaves of a stretch.

    Args:
        file: the file that contains the stretch.
        stretch: the arrays.
        block_bytes: number of bytes of one leaf in one read.
        give_up: called as ``give_up(position, error)`` if one of several spans cannot be read.
            ``position`` is the position of that span in the stretch. If the call returns, the
            records of the span are zero from then on.
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
        """Return decoded records ``start .. stop - 1`` of a leaf, with its parts joined.

        If there are several spans, all records are read at once.

        Raises:
            CorpusError: records of a single span cannot be read completely, or cannot be decoded.
        """
        stretch = self._stretch
        if stretch.is_single:
            return self._read(stretch.spans[0], leaf, start, stop)
        block: npt.NDArray[Any] | None = None
        offsets = stretch.offsets.tolist()
        is_plain = leaf.decoder is None and len(leaf.paths) == 1 and not leaf.is_per_episode
        for i, span in enumerate(stretch.spans):
            records = span.records + leaf.extra
            location = slice(offsets[i], offsets[i] + records)
            into = block[location] if block is not None and is_plain else None
            part = self._tried(i, leaf, 1 if leaf.is_per_episode else records, into)
            if part is None or part is into:
                continue
            if block is None:
                # All spans of a stretch declare the same dtype.
                block = np.zeros((stretch.records, *part.shape[1:]), part.dtype)
            block[location] = part
        if block is None:
            return np.zeros((stretch.records, *leaf.shape), leaf.dtype)
        return block

    def _tried(
        self, position: int, leaf: PlannedLeaf, stop: int, into: npt.NDArray[Any] | None
    ) -> npt.NDArray[Any] | None:
        """Return the first records of one of several spans, or ``None`` if unreadable."""
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
        if not leaf.is_per_episode:
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
        """Yield the records of a leaf in blocks, each with the index of its first record.

        ``loaded`` contains the first records of leaves that were already read.

        HDF5 decompresses whole chunks. A stripe of chunks that is larger than a block is still read
        in blocks. HDF5 keeps a stripe of up to 160 MiB decompressed during these reads. A larger
        stripe is decompressed again for every block, which takes time. HDF5 decompresses a chunk as
        a whole, so a very large chunk always takes memory for all its bytes.
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
        if leaf.is_per_episode:
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
        # Blocks are whole stripes of chunks, so that no stripe is decompressed twice.
        step = stripe * max(1, self._block_bytes // nbytes)
        piece = step if nbytes <= self._block_bytes else self._block_bytes // leaf.record_bytes
        whole = max(nbytes for _, nbytes in stripes)
        kept = whole if piece < step and whole <= _CACHED_BYTES else 0
        start = begin
        while start < records:
            # A block ends with a stripe, even if it begins inside the stripe.
            end = min(((start + span.base) // step + 1) * step - span.base, records)
            with self._file.keeping(paths, kept):
                while start < end:
                    stop = min(start + max(1, piece), end)
                    yield start, self.read(leaf, start, stop)
                    start = stop
