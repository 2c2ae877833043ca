"""Blocks of records into the columns: cast, counted once for all columns, written, read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.checksum import LEAST_SHARED
from replaykit.datasets.columns import ColumnFile
from replaykit.datasets.engine.aligned import check_alignment
from replaykit.datasets.engine.judge import Judge
from replaykit.datasets.engine.plan import PlannedLeaf
from replaykit.datasets.engine.runs import Runs
from replaykit.datasets.engine.statistics import Statistics
from replaykit.datasets.engine.stretch import Stretch
from replaykit.native import crc32
from replaykit.ted import Key

__all__ = ["Storing"]

_ENDS: Final = ("terminated", "truncated")
"""What is set by any number but zero; other values are 0 or 1, or no flags."""
_LEAST_COMMON: Final = 1 << 16
"""Bytes from which on numbers that several columns take are counted once."""


class Storing:
    """Puts values of one stretch into columns, and keeps their statistics.

    Args:
        stretch: whose rows they are.
        columns: the column files, each written up to the first row of the stretch.
        statistics: of the columns; they are added to.
        judge: told of values that do not fit.
    """

    def __init__(
        self,
        stretch: Stretch,
        columns: Mapping[Key, ColumnFile],
        statistics: Mapping[Key, Statistics],
        judge: Judge,
    ) -> None:
        self._stretch = stretch
        self._columns = columns
        self._statistics = statistics
        self._judge = judge
        at = stretch.at
        # The last one is arbitrary, but the same every time.
        mixed = at.starts.astype(np.uint64) * np.uint64(2654435761) + np.uint64(97)
        within = (mixed % at.rows.astype(np.uint64)).astype(np.int64)
        samples = np.sort(np.concatenate([at.starts, at.finals, at.starts + within]))
        self._samples = samples[np.diff(samples, prepend=-1) > 0]

    def store(
        self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any], runs: Sequence[Runs]
    ) -> list[tuple[int, npt.NDArray[Any]] | None]:
        """Puts a block of records into the columns of its leaf.

        Args:
            leaf: what the block is of.
            start: the first record of the block.
            block: its records.
            runs: for each target which records go where.

        Returns:
            For each target the first row and what was stored from there on, if anything.
        """
        values = self._cast(leaf, start, block)
        parts = [run.within(start, start + len(block)) for run in runs]
        common = _Common.of(values, start, parts)
        stored: list[tuple[int, npt.NDArray[Any]] | None] = []
        for target, part in zip(leaf.targets, parts, strict=True):
            if not len(part):
                stored.append(None)
                continue
            row, entries = int(part.rows[0]), part.take(values, start)
            if common is None:
                self.put(target.key, row, entries)
            else:
                self._put_common(target.key, row, entries, int(part.records[0]), common)
            check_alignment(self._stretch, leaf, target, start, values, row, entries)
            stored.append((row, entries))
        return stored

    def put(self, key: Key, row: int, entries: npt.NDArray[Any]) -> None:
        """Writes rows of a column; the first, the last and one of each episode are read back."""
        self._write(key, row, entries, None)
        self._statistics[key].add(entries)

    def _put_common(
        self, key: Key, row: int, entries: npt.NDArray[Any], record: int, common: _Common
    ) -> None:
        first, stop = common.first - record, common.stop - record
        shared = None if common.crc32 is None else (first, stop, common.crc32)
        self._write(key, row, entries, shared)
        statistics = self._statistics[key]
        statistics.add(entries[:first])
        statistics.merge(common.statistics)
        statistics.add(entries[stop:])

    def _write(
        self, key: Key, row: int, entries: npt.NDArray[Any], shared: tuple[int, int, int] | None
    ) -> None:
        first, last = np.searchsorted(self._samples, (row, row + len(entries)))
        verify = (self._samples[first:last] - row).tolist()
        self._columns[key].write(row, entries, verify=verify, shared=shared)

    def _cast(self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if leaf.stored == block.dtype:
            return block
        if leaf.stored.kind == "b" and leaf.role in _ENDS:
            return block != 0
        real = block.real if block.dtype.kind == "c" and leaf.stored.kind != "c" else block
        with np.errstate(over="ignore", invalid="ignore"):
            values = real.astype(leaf.stored)
        lost = _lost(block, values)
        if lost.any():
            bad = start + int(np.argmax(lost.reshape(len(block), -1).any(axis=1)))
            at = self._stretch.place_at(bad, leaf.path)
            position = self._stretch.first + self._stretch.at.at_record(bad)
            self._judge.fail(position, at, f"a value does not fit {leaf.stored}", "V10")
        return values


def _lost(block: npt.NDArray[Any], values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which numbers were changed by more than rounding when they were cast."""
    found, made = block.dtype.kind, values.dtype.kind
    if found not in "biufc":
        return np.zeros(block.shape, bool)
    if made == "b":
        return np.asarray(values.astype(block.dtype) != block)
    if made in "iu":
        # A number that only changes its sign comes back as it was.
        with np.errstate(over="ignore", invalid="ignore"):
            lost = values.astype(block.dtype) != block
        return np.asarray(lost | ((values < 0) != (block < 0)) if found in "iuf" else lost)
    lost = np.isfinite(block) & ~np.isfinite(values)
    if found == "c" and made == "f":
        lost |= block.imag != 0
    return np.asarray(lost)


class _Common:
    """Records that all columns of a leaf take from a block, and what is known of them.

    An observation is stored as the one before a step and as the next one of the step that led to
    it: nearly all of a block is counted for both.

    Attributes:
        first, stop: the records ``first .. stop - 1``.
        crc32: of their bytes; ``None`` where it would save nothing.
        statistics: of their numbers.
    """

    def __init__(self, first: int, stop: int, values: npt.NDArray[Any]) -> None:
        self.first = first
        self.stop = stop
        self.crc32 = crc32(_bytes(values)) if values.nbytes >= LEAST_SHARED else None
        self.statistics = Statistics()
        self.statistics.add(values)

    @classmethod
    def of(cls, block: npt.NDArray[Any], start: int, parts: Sequence[Runs]) -> _Common | None:
        """Returns what there is in common; ``None`` where it would save nothing."""
        if len(parts) < 2 or any(len(part) != 1 for part in parts):
            return None
        first = max(int(part.records[0]) for part in parts)
        stop = min(int(part.records[0] + part.counts[0]) for part in parts)
        if (stop - first) * block[:1].nbytes < _LEAST_COMMON:
            return None
        return cls(first, stop, block[first - start : stop - start])


def _bytes(block: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
