"""Writing of the rows of episodes, with checks, in one pass over the source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import EPISODE_FIELDS, ColumnOutput
from replaykit.datasets.column_statistics import Statistics
from replaykit.datasets.engine.episode_checks import (
    EndFlags,
    StretchChecks,
    check_alignment,
    check_blanks,
    check_successor,
)
from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.h5 import H5File
from replaykit.datasets.engine.layout import SourceWindow
from replaykit.datasets.engine.plan import OBSERVED_KEY, EpisodeSpan, H5Plan, PlannedLeaf, presence
from replaykit.datasets.engine.policies import Judge
from replaykit.datasets.engine.row_batches import (
    Runs,
    Stretch,
    StretchReader,
    store_constant,
    store_flag,
    stretches,
)
from replaykit.datasets.sources import SourceFile
from replaykit.errors import CorpusError
from replaykit.ted import DEFAULT_DONE_KEYS, Key

_ENDS: Final = ("terminated", "truncated")
"""Roles whose flags are set by any number but zero. Other flags must be 0 or 1."""


def lost_numbers(block: npt.NDArray[Any], values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the numbers that a cast changed by more than rounding."""
    found, made = block.dtype.kind, values.dtype.kind
    if found not in "biufc":
        return np.zeros(block.shape, bool)
    if made == "b":
        return np.asarray(values.astype(block.dtype) != block)
    if made in "iu":
        # A cast back restores a number that has wrapped around, so signs are also compared.
        with np.errstate(over="ignore", invalid="ignore"):
            lost = values.astype(block.dtype) != block
        return np.asarray(lost | ((values < 0) != (block < 0)) if found in "iuf" else lost)
    lost = np.isfinite(block) & ~np.isfinite(values)
    if found == "c" and made == "f":
        lost |= block.imag != 0
    return np.asarray(lost)


_DIGEST_BYTES: Final = 16


def empty_table(count: int) -> dict[str, npt.NDArray[Any]]:
    """Return zeros for the columns of the episode table that writing fills."""
    found: dict[str, npt.NDArray[Any]] = {
        name: np.zeros(count, EPISODE_FIELDS[name][0])
        for name in ("terminated", "truncated", "return")
    }
    found["digest"] = np.zeros((count, _DIGEST_BYTES), np.uint8)
    return found


class RowWriter:
    """A writer of the spans of one file, and of the table of their episodes.

    Memory: one block of one leaf, one block of all witnesses together, and the checks of the
    episodes of a stretch. The memory does not depend on the length of episodes.

    Args:
        plan: the plan of the data set.
        columns: the column files of `column_specs`, or the parts of these files with the episodes.
        first: position in the plan of the first episode that is written.
        table: the result of `empty_table` for all written episodes, which is filled.
        block_bytes: number of bytes of one leaf in one read.
        judge: decides about episodes that break a rule.
        advance: called with the number of bytes of every block that was read.
    """

    def __init__(
        self,
        plan: H5Plan,
        columns: Mapping[Key, ColumnOutput],
        *,
        first: int,
        table: Mapping[str, npt.NDArray[Any]],
        block_bytes: int,
        judge: Judge,
        advance: Callable[[int], object],
    ) -> None:
        self._plan = plan
        self._layout = plan.layout
        self._columns = columns
        self._block_bytes = block_bytes
        self._judge = judge
        self._advance = advance
        known = {leaf.path: leaf for leaf in reversed(plan.leaves)}
        self._witnesses = [
            known[path]
            for path in plan.layout.witnesses(known.keys())
            if path in known and not known[path].is_per_episode and not known[path].is_padded
        ]
        self._required = {entry.name for entry in plan.layout.fields if entry.required}
        self._flags = EndFlags(plan.layout, judge.notes)
        self._presence = presence(plan)
        self._has_reward = any(leaf.role == "reward" and leaf.targets for leaf in plan.leaves)
        self.statistics: dict[Key, Statistics] = {key: Statistics() for key in columns}
        self._first = first
        self.tails: dict[Key, bytes] = {}
        self.table = table

    def write(
        self,
        file: H5File,
        source: SourceFile,
        spans: Iterable[EpisodeSpan],
        memory: dict[str, Any],
    ) -> None:
        """Write the episodes of all spans of a file.

        Args:
            memory: the dict for `SourceWindow.memory` of all episodes of the file.

        Raises:
            CorpusError: an episode breaks a rule. The message names file, group, key and record.
            DropLeaves: a field must be left out of the whole corpus.
            OSError: no space is left.
        """
        location = file.location(source.name)
        for stretch in stretches(self._plan, spans, self._witnesses, self._block_bytes, location):
            try:
                _StretchWriter(self, file, stretch).write(memory)
            except CorpusError as error:
                # Arrays that cannot be read affect all of their episodes.
                for position in range(stretch.first, stretch.stop):
                    self._judge.condemn(position, error)
                for column in self._columns.values():
                    column.skip_to(stretch.start + stretch.rows)

    def finish(self) -> None:
        """Complete the columns.

        Raises:
            RuntimeError: a row was not written, which is a fault of this engine (rule V34).
        """
        for name in DEFAULT_DONE_KEYS:
            # The state before a stored row is never a final state.
            column = self._columns[name,]
            count = column.finish()
            self.statistics[name,].merge(Statistics(count, 0, False, False))
        for key, column in self._columns.items():
            if not column.is_complete:
                raise RuntimeError(f"the rows of column {key} were not all written [V34]")


class _StretchWriter:
    """A writer of the values of one stretch into columns, with their statistics."""

    def __init__(self, writer: RowWriter, file: H5File, stretch: Stretch) -> None:
        self._writer, self._stretch = writer, stretch
        self._columns, self._judge = writer._columns, writer._judge
        self._reader = StretchReader(file, stretch, writer._block_bytes, self._give_up)
        self._checks = StretchChecks(stretch, writer._judge, writer._flags.outcomes)
        self._known_runs: dict[tuple[int, bool, int], Runs] = {}
        at = stretch.at
        # The third row of each episode is an arbitrary but fixed choice.
        mixed = at.starts.astype(np.uint64) * np.uint64(2654435761) + np.uint64(97)
        within = (mixed % at.rows.astype(np.uint64)).astype(np.int64)
        samples = np.sort(np.concatenate([at.starts, at.finals, at.starts + within]))
        self._samples = samples[np.diff(samples, prepend=-1) > 0]

    def write(self, memory: dict[str, Any]) -> None:
        writer, stretch = self._writer, self._stretch
        loaded = self._examine(memory)
        last: dict[str, npt.NDArray[Any]] = {}
        keeps_last = self._flags_want_last()
        for leaf in writer._plan.leaves:
            if leaf.is_unwanted:
                loaded.pop(leaf.path, None)
                continue
            if not stretch.leaves.issuperset(leaf.paths):
                for target in leaf.targets:
                    self._columns[target.key].skip_to(stretch.start + stretch.rows)
                continue
            runs = [self._runs(target, leaf.extra) for target in leaf.targets]
            finals = stretch.lasts(leaf) if keeps_last and leaf.path in writer._required else None
            for start, block in self._reader.blocks(leaf, loaded):
                self._checks.check(leaf, start, block, runs[0] if runs else None)
                if runs:
                    self._store(leaf, start, block, runs)
                if finals is not None and start + len(block) > finals[-1]:
                    last[leaf.path] = block[finals - start]
                writer._advance(block.nbytes)
            loaded.pop(leaf.path, None)
        check_blanks(stretch, writer._plan.leaves, self._columns, self._reader, self._judge.bad)
        self._store_ids()
        self._store_flags(last)

    def _give_up(self, span: int, error: CorpusError) -> None:
        found = self._stretch.spans[span]
        for position in range(found.first, found.stop):
            self._judge.condemn(position, error)

    def _flags_want_last(self) -> bool:
        is_one_each = all(span.stop - span.first == 1 for span in self._stretch.spans)
        return self._writer._flags.is_own and is_one_each

    def _runs(self, target: Target, extra: int) -> Runs:
        # Many leaves have the same runs.
        kind = (target.offset, target.is_after, extra)
        if kind not in self._known_runs:
            self._known_runs[kind] = Runs.of(self._stretch.at, target, extra)
        return self._known_runs[kind]

    def _examine(self, memory: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
        """Let the layout compare leaves, and return the records that it read."""
        writer, stretch = self._writer, self._stretch
        witnesses = [leaf for leaf in writer._witnesses if stretch.leaves.issuperset(leaf.paths)]
        if not witnesses or stretch.spans[0].base:
            # Only the first part of a file is compared.
            return {}
        count = stretch.records
        if stretch.is_single:
            record_bytes = sum(leaf.record_bytes for leaf in witnesses)
            count = min(count, max(2, writer._block_bytes // max(1, record_bytes)))
        has_extra = stretch.is_single and count == stretch.records
        arrays = {
            leaf.path: self._reader.read(leaf, 0, count + has_extra * leaf.extra)
            for leaf in witnesses
        }
        for i, (span, start) in enumerate(zip(stretch.spans, stretch.offsets, strict=True)):
            mine = {
                leaf.path: arrays[leaf.path][start : start + span.records + leaf.extra]
                for leaf in witnesses
            }
            location, notes = stretch.location_of(i), self._judge.notes
            try:
                writer._layout.examine(SourceWindow(mine, span.records, location, notes, memory))
            except CorpusError as error:
                if stretch.is_single:
                    raise
                self._give_up(i, error)
        return arrays

    def _store(
        self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any], runs: Sequence[Runs]
    ) -> None:
        """Write a block of records to the columns of its leaf, and check the rows.

        Args:
            leaf: the leaf that the block belongs to.
            start: the first record of the block.
            block: the records of the block.
            runs: the rows and their records, for each target.
        """
        values = self._cast(leaf, start, block)
        for target, run in zip(leaf.targets, runs, strict=True):
            part = run.within(start, start + len(block))
            if not len(part):
                continue
            row, entries = int(part.rows[0]), part.records_in(values, start)
            self._put(target.key, row, entries)
            check_alignment(self._stretch, leaf, target, start, values, row, entries)
            if leaf.is_successor:
                columns, tails = self._columns, self._writer.tails
                check_successor(self._stretch, target, row, entries, columns, self._judge, tails)

    def _put(self, key: Key, row: int, entries: npt.NDArray[Any]) -> None:
        """Write rows of a column, and read some of them back.

        The rows read back are the first row, the last row and one row of each episode.
        """
        first, last = np.searchsorted(self._samples, (row, row + len(entries)))
        verify = (self._samples[first:last] - row).tolist()
        self._columns[key].write(row, entries, verify=verify)
        self._writer.statistics[key].add(entries)

    def _cast(self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if leaf.stored == block.dtype:
            return block
        if leaf.stored.kind == "b" and leaf.role in _ENDS:
            return block != 0
        real = block.real if block.dtype.kind == "c" and leaf.stored.kind != "c" else block
        with np.errstate(over="ignore", invalid="ignore"):
            values = real.astype(leaf.stored)
        lost = lost_numbers(block, values)
        if lost.any():
            bad = start + int(np.argmax(lost.reshape(len(block), -1).any(axis=1)))
            at = self._stretch.location_at(bad, leaf.path)
            position = self._stretch.first + self._stretch.at.at_record(bad)
            self._judge.fail(position, at, f"a value does not fit {leaf.stored}", "V10")
        return values

    def _store_flags(self, last: Mapping[str, npt.NDArray[Any]]) -> None:
        stretch, block = self._stretch, self._writer._block_bytes
        condemn = self._judge.condemn
        flags = self._writer._flags.of(
            stretch, self._checks, last, lambda i, error: condemn(stretch.first + i, error)
        )
        self._fill_table(flags)
        put, key = self._put, OBSERVED_KEY
        finals = stretch.at.finals
        for name, values in flags.items():
            rows = finals[values]
            store_flag(stretch.all_rows, ("next", name), rows, is_set=True, block=block, put=put)
        if self._writer._plan.has_unrecorded:
            unknown = finals[stretch.at.is_open]
            store_flag(stretch.all_rows, key, unknown, is_set=False, block=block, put=put)

    def _fill_table(self, flags: Mapping[str, npt.NDArray[np.bool_]]) -> None:
        """Write the lines of the episodes into the table."""
        stretch, first = self._stretch, self._writer._first
        lines: dict[str, Any] = {
            "terminated": flags["terminated"],
            "truncated": flags["truncated"],
            # Without rewards the return is NaN, because it is not known to be zero.
            "return": self._checks.reward if self._writer._has_reward else np.nan,
            "digest": self._checks.digests(_DIGEST_BYTES),
        }
        here = slice(stretch.first - first, stretch.stop - first)
        for name, values in lines.items():
            self._writer.table[name][here] = values

    def _store_ids(self) -> None:
        stretch, block = self._stretch, max(1, self._writer._block_bytes // 8)
        numbers = stretch.column("number")
        values: dict[Key, npt.NDArray[Any]] = {
            ("episode",): numbers,
            ("seed",): stretch.column("file").astype(np.int64),
        }
        for key, leaf in self._writer._presence.items():
            here = stretch.leaves.issuperset(leaf.paths)
            values[key] = np.full(len(numbers), here)
        for key, each in values.items():
            store_constant(
                stretch.all_rows, stretch.at.starts, key, each, block=block, put=self._put
            )
