"""Writing the rows of episodes: each source value is read once, checked, and put in its columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.checksum import LEAST_SHARED
from replaykit.datasets.columns import ColumnFile, torch_dtype
from replaykit.datasets.engine.checks import Judge, SpanChecks
from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import Flags, Window
from replaykit.datasets.engine.marks import Put, store_constant, store_flag
from replaykit.datasets.engine.places import Notes, Place
from replaykit.datasets.engine.plan import Episode, Plan, PlannedLeaf, Span
from replaykit.datasets.engine.reading import SpanReader
from replaykit.datasets.engine.runs import Runs
from replaykit.datasets.engine.specs import OBSERVED_KEY, presence
from replaykit.datasets.engine.statistics import Statistics
from replaykit.datasets.episode_table import EPISODE_FIELDS
from replaykit.datasets.sources import SourceFile
from replaykit.errors import CorpusError
from replaykit.native import crc32
from replaykit.ted import DEFAULT_DONE_KEYS, Key

__all__ = ["RowWriter"]

_DIGEST_BYTES: Final = 16


@dataclass
class _Open:
    """The span at work: its arrays, its episodes, and what is checked of them."""

    reader: SpanReader
    span: Span
    episodes: list[Episode]
    place: Place
    checks: SpanChecks
    runs: dict[tuple[int, bool, int], Runs] = field(default_factory=dict)


class RowWriter:
    """Writes spans one after another and keeps the table of their episodes.

    Memory: one block of one leaf and the first block of the witnesses, however long an episode is;
    some 100 bytes for each episode of a span.

    Args:
        plan: what is to be written.
        columns: the files of `column_specs`, or the parts of them that hold these episodes.
        first, stop: the episodes ``first .. stop - 1`` of the plan; ``table`` is of them.
        block_bytes: how much of one leaf is read at a time.
        judge: decides what becomes of episodes that break a rule.
        advance: told the bytes of every block that was read.
    """

    def __init__(
        self,
        plan: Plan,
        columns: Mapping[Key, ColumnFile],
        *,
        first: int,
        stop: int,
        block_bytes: int,
        judge: Judge,
        advance: Callable[[int], object],
    ) -> None:
        self._plan = plan
        self._layout = plan.layout
        self._columns = columns
        self._block_bytes = block_bytes
        self._judge = judge
        self._notes: Notes = judge.notes
        self._advance = advance
        known = {leaf.path: leaf for leaf in plan.leaves}
        self._witnesses = [
            known[path]
            for path in plan.layout.witnesses(known.keys())
            if path in known and not known[path].is_once and not known[path].is_padded
        ]
        fields = plan.layout.fields
        self._required = {entry.name for entry in fields if entry.required}
        self._outcomes = {
            entry.name: plan.layout.alignment.outcome + entry.shift
            for entry in fields
            if entry.is_end
        }
        self._presence = presence(plan)
        self.statistics: dict[Key, Statistics] = {key: Statistics() for key in columns}
        self._first, count = first, stop - first
        self.table: dict[str, npt.NDArray[Any]] = {
            name: np.zeros((count, _DIGEST_BYTES) if name == "digest" else count, dtype)
            for name, (dtype, _) in EPISODE_FIELDS.items()
        }

    def write(self, file: H5File, source: SourceFile, span: Span, memory: dict[str, Any]) -> None:
        """Writes the episodes of a span, from its file.

        Raises:
            CorpusError: an episode breaks a rule; names file, group, key and record.
            DropLeaves: a field must be left out of the whole corpus.
            OSError: there is no room.
        """
        place = file.place(source.name).at(group=span.group or None)
        episodes = self._plan.episodes[span.first : span.stop]
        checks = SpanChecks(episodes, span.first, span.records, place, self._judge)
        reader = SpanReader(file, span, self._block_bytes)
        work = _Open(reader, span, episodes, place, checks)
        try:
            self._write(work, memory)
        except CorpusError as error:
            # What cannot be read is wrong for all episodes of the span.
            for position in range(span.first, span.stop):
                self._judge.condemn(position, error)
            for column in self._columns.values():
                column.skip_to(span.start + span.rows)

    def _write(self, work: _Open, memory: dict[str, Any]) -> None:
        loaded = self._examine(work, memory)
        last: dict[str, npt.NDArray[Any]] = {}
        for leaf in self._plan.leaves:
            if not work.span.leaves.issuperset(leaf.paths):
                for target in leaf.targets:
                    self._columns[target.key].skip_to(work.span.start + work.span.rows)
                continue
            runs = [self._runs(work, target, leaf.extra) for target in leaf.targets]
            for start, block in work.reader.blocks(leaf, loaded):
                work.checks.take(leaf, start, block, runs[0] if runs else None)
                if runs:
                    self._store(work, leaf, start, block, runs)
                is_end = start + len(block) == work.span.records + leaf.extra
                if leaf.path in self._required and is_end and len(work.episodes) == 1:
                    last[leaf.path] = block[-1:].copy()
                self._advance(block.nbytes)
            loaded.pop(leaf.path, None)
        self._store_ids(work)
        self._store_flags(work, last)

    def _runs(self, work: _Open, target: Target, extra: int) -> Runs:
        # Many leaves go to the same rows.
        kind = (target.offset, target.is_after, extra)
        if kind not in work.runs:
            work.runs[kind] = Runs.of(work.episodes, target, extra)
        return work.runs[kind]

    def finish(self) -> None:
        """Completes the columns.

        Raises:
            RuntimeError: a row was not written: a fault of this engine (rule V34).
        """
        for name in DEFAULT_DONE_KEYS:
            # A stored row never starts from a finished state.
            column = self._columns[name,]
            count = column.finish()
            self.statistics[name,].merge(Statistics(count, 0, False, False))
        for key, column in self._columns.items():
            if not column.is_complete:
                raise RuntimeError(f"the rows of column {key} were not all written [V34]")

    # -- reading --------------------------------------------------------------------------------

    def _examine(self, work: _Open, memory: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """Lets the layout compare leaves; returns those that were read whole on the way."""
        if not self._witnesses:
            return {}
        records = work.span.records
        record_bytes = sum(leaf.record_bytes for leaf in self._witnesses)
        count = min(records, max(2, self._block_bytes // max(1, record_bytes)))
        is_whole = count == records
        arrays = {
            leaf.path: work.reader.read(leaf, 0, count + is_whole * leaf.extra)
            for leaf in self._witnesses
        }
        window = Window(arrays, records, work.place, self._notes, memory)
        self._layout.examine(window)
        return arrays if is_whole else {}

    # -- storing --------------------------------------------------------------------------------

    def _store(
        self, work: _Open, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any], runs: list[Runs]
    ) -> None:
        stop = start + len(block)
        values = self._cast(work, leaf, start, block)
        parts = [list(run.within(start, stop)) for run in runs]
        common, crc32 = None, None
        if all(len(part) == 1 for part in parts):
            spans = [(part[0][1], part[0][1] + part[0][2]) for part in parts]
            common, crc32 = _shared(values, start, spans)
        for target, part in zip(leaf.targets, parts, strict=True):
            if not part:
                continue
            row, record, count = part[0]
            shared = None
            if len(part) == 1:
                stored = values[record - start : record - start + count]
                if common is not None and crc32 is not None:
                    shared = (common[0] - record, common[1] - record, crc32)
            else:
                stored = np.concatenate([values[r - start : r - start + n] for _, r, n in part])
            self._put(target.key, row, stored, work, shared)
            if leaf.is_successor:
                self._check_successor(work, target, row, stored)

    def _cast(
        self, work: _Open, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        if leaf.stored == block.dtype:
            return block
        if leaf.stored.kind == "b":
            return block != 0
        with np.errstate(over="ignore", invalid="ignore"):
            values = block.astype(leaf.stored)
        lost = None
        if block.dtype.kind in "fc" and leaf.stored.kind in "fc":
            lost = np.isfinite(block) & ~np.isfinite(values)
        elif block.dtype.kind in "iuf" and leaf.stored.kind in "iu":
            lost = values.astype(block.dtype) != block
        if lost is not None and lost.any():
            bad = start + int(np.argmax(lost.reshape(len(block), -1).any(axis=1)))
            at = work.place.at(key=leaf.path, record=bad)
            position = self._position(work, bad)
            self._judge.fail(position, at, f"a value does not fit {leaf.stored}", "V10")
        return values

    def _position(self, work: _Open, record: int) -> int:
        stops = [episode.base + episode.records for episode in work.episodes]
        return work.span.first + min(int(np.searchsorted(stops, record, "right")), len(stops) - 1)

    def _put(
        self,
        key: Key,
        row: int,
        entries: npt.NDArray[Any],
        work: _Open,
        shared: tuple[int, int, int] | None = None,
    ) -> None:
        """Writes rows of a column; the first, the last and one of each episode are read back."""
        stop = row + len(entries)
        samples = {
            row_of
            for episode in self._touched(work, row, stop)
            for row_of in (
                episode.start,
                episode.start + episode.rows - 1,
                # Arbitrary, but the same every time.
                episode.start + (episode.start * 2654435761 + 97) % episode.rows,
            )
        }
        verify = [sample - row for sample in samples if row <= sample < stop]
        self._columns[key].write(row, entries, verify=verify, shared=shared)
        self.statistics[key].add(entries)

    def _touched(self, work: _Open, row: int, stop: int) -> list[Episode]:
        if len(work.episodes) == 1:
            return work.episodes
        starts = [episode.start for episode in work.episodes]
        first = int(np.searchsorted(starts, row, "right")) - 1
        return work.episodes[first : int(np.searchsorted(starts, stop, "left"))]

    def _check_successor(
        self, work: _Open, target: Target, row: int, stored: npt.NDArray[Any]
    ) -> None:
        """Compares next observations with the observations that follow (rule V22)."""
        column = self._columns.get(target.key[1:])
        if (
            column is None
            or target.key[0] != "next"
            or column.spec.dtype != torch_dtype(stored.dtype)
        ):
            return
        end = min(row + len(stored), work.span.start + work.span.rows - 1)
        if end <= row:
            return
        following = column.read(row + 1, end - row).reshape(end - row, -1)
        given = np.ascontiguousarray(stored[: end - row]).reshape(end - row, -1).view(np.uint8)
        differs = (following != given).any(axis=1)
        stops = np.array([e.start + e.rows for e in work.episodes], np.int64)
        lasts = stops[(stops > row) & (stops <= end)] - 1 - row
        self._note_ends_without_reset(work, target, row, lasts[~differs[lasts]])
        differs[lasts] = False
        seen = -1
        for at in np.flatnonzero(differs).tolist():
            position = int(np.searchsorted(stops, row + at, "right"))
            if position == seen:
                continue
            seen = position
            episode = work.episodes[position]
            record = episode.base + row + at - episode.start
            self._judge.fail(
                work.span.first + position,
                work.place.at(key=".".join(target.key), record=record),
                "the state that the step arrived at is not the one that the next step starts "
                "from: rows of several episodes are mixed, or an end is not flagged",
                "V22",
            )

    def _note_ends_without_reset(
        self, work: _Open, target: Target, row: int, lasts: npt.NDArray[np.int64]
    ) -> None:
        """Notes ends after which the next episode goes on from where the step arrived (V39)."""
        if target.key[:2] != ("next", "observation"):
            return
        stops = [episode.start + episode.rows for episode in work.episodes]
        for at in lasts.tolist():
            i = int(np.searchsorted(stops, row + at, "right"))
            episode, following = work.episodes[i], work.episodes[i + 1]
            if following.base == episode.base + episode.records:
                record = following.base - 1
                text = (
                    "an end is flagged where the next episode goes on from the state that the "
                    "step arrived at: the environment was not reset there"
                )
                self._notes.add("V39", text, work.place.at(key=".".join(target.key), record=record))

    def _store_flags(self, work: _Open, last: Mapping[str, npt.NDArray[Any]]) -> None:
        span = work.span
        ends = {name: np.zeros(len(work.episodes), np.bool_) for name in DEFAULT_DONE_KEYS}
        for i, episode in enumerate(work.episodes):
            place = work.place if episode.is_whole else work.place.at(record=episode.base)
            facts = episode.facts
            if self._layout.is_open and not episode.is_open:
                # The step at which it terminated is not a row.
                facts = replace(facts, terminated=None)
            try:
                flags = self._layout.flags(
                    work.checks.ends(i, self._outcomes), last, facts, place, self._notes
                )
                if not (flags.terminated or flags.truncated):
                    raise place.error("the episode does not end at its last row", "V31")
            except CorpusError as error:
                self._judge.condemn(span.first + i, error)
                continue
            ends["terminated"][i], ends["truncated"][i] = flags.terminated, flags.truncated
            ends["done"][i] = True
            self._note(work, i, flags)
        finals = np.array([e.start + e.rows - 1 for e in work.episodes], np.int64)
        put = self._put_in(work)
        key: Key
        for name, values in ends.items():
            key = ("next", name)
            store_flag(span, key, finals[values], is_set=True, block=self._block_bytes, put=put)
        if self._plan.has_unrecorded:
            unknown = finals[[episode.is_open for episode in work.episodes]]
            key = OBSERVED_KEY
            store_flag(span, key, unknown, is_set=False, block=self._block_bytes, put=put)

    def _note(self, work: _Open, i: int, flags: Flags) -> None:
        """Fills the line of an episode in the table."""
        episode = work.episodes[i]
        row = {
            "start": episode.start,
            "length": episode.rows,
            "seed": episode.file,
            "episode": episode.number,
            "source_seed": episode.facts.source_seed,
            "success": episode.facts.success,
            "terminated": flags.terminated,
            "truncated": flags.truncated,
            "return": work.checks.reward[i],
            "digest": np.frombuffer(work.checks.digest(i)[:_DIGEST_BYTES], np.uint8),
        }
        for name, value in row.items():
            self.table[name][work.span.first + i - self._first] = value

    def _store_ids(self, work: _Open) -> None:
        values: dict[Key, npt.NDArray[Any]] = {
            ("episode",): np.array([episode.number for episode in work.episodes], np.int64),
            ("seed",): np.array([episode.file for episode in work.episodes], np.int64),
        }
        for key, leaf in self._presence.items():
            here = work.span.leaves.issuperset(leaf.paths)
            values[key] = np.full(len(work.episodes), here)
        block, put = max(1, self._block_bytes // 8), self._put_in(work)
        for key, each in values.items():
            store_constant(work.span, work.episodes, key, each, block=block, put=put)

    def _put_in(self, work: _Open) -> Put:
        return lambda key, row, entries: self._put(key, row, entries, work)


def _shared(
    block: npt.NDArray[Any], start: int, runs: list[tuple[int, int]]
) -> tuple[tuple[int, int], int | None]:
    """Returns the records that all columns take from a block, and the CRC-32 of their bytes.

    There is none where it would save nothing.
    """
    first = max((run[0] for run in runs), default=0)
    stop = min((run[1] for run in runs), default=0)
    count = stop - first
    if len(runs) < 2 or count < 1 or count * block[:1].nbytes < LEAST_SHARED:
        return (first, stop), None
    return (first, stop), crc32(_bytes(block[first - start : stop - start]))


def _bytes(block: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
