"""Writing the rows of episodes: each source value is read once, checked, and put in its columns."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from replaykit.datasets.checksum import LEAST_SHARED
from replaykit.datasets.columns import ColumnFile, ColumnSpec, torch_dtype
from replaykit.datasets.episode_table import EPISODE_FIELDS
from replaykit.datasets.h5 import H5File
from replaykit.datasets.layout import Ends, Flags, Layout, Notes, Place, Window
from replaykit.datasets.plan import Episode, Plan, PlannedLeaf
from replaykit.datasets.sources import SourceFile
from replaykit.ted import DEFAULT_DONE_KEYS, Key

__all__ = ["RowWriter", "column_specs"]

_DIGEST_BYTES: Final = 16


def column_specs(plan: Plan) -> list[ColumnSpec]:
    """Returns the columns of a plan: those that leaves fill, then flags and ids.

    Raises:
        TypeError: torch has no dtype for a leaf.
    """
    specs = [
        ColumnSpec(target.key, leaf.shape, torch_dtype(leaf.dtype))
        for leaf in plan.leaves
        for target in leaf.targets
    ]
    for name in DEFAULT_DONE_KEYS:
        specs.append(ColumnSpec((name,), (1,), torch.bool))
        specs.append(ColumnSpec(("next", name), (1,), torch.bool))
    specs.extend(ColumnSpec((name,), (), torch.int64) for name in ("episode", "seed"))
    return specs


class RowWriter:
    """Writes episodes one after another and keeps their table.

    Memory: one block of one leaf and the first block of the witnesses, however long an episode is.

    Args:
        plan: what is to be written.
        layout: what the corpus declares.
        columns: the files of `column_specs`.
        block_bytes: how much of one leaf is read at a time.
        notes: takes findings that stop nothing.
        advance: told the bytes of every block that was read.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        columns: Mapping[Key, ColumnFile],
        *,
        block_bytes: int,
        notes: Notes,
        advance: Callable[[int], object],
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._columns = columns
        self._block_bytes = block_bytes
        self._notes = notes
        self._advance = advance
        known = {leaf.path: leaf for leaf in plan.leaves}
        self._witnesses = [
            known[path]
            for path in layout.witnesses(known.keys())
            if path in known and not known[path].is_once
        ]
        self._required = {entry.source for entry in layout.fields if entry.required}
        count = len(plan.episodes)
        self.table: dict[str, npt.NDArray[Any]] = {
            name: np.zeros((count, _DIGEST_BYTES) if name == "digest" else count, dtype)
            for name, (dtype, _) in EPISODE_FIELDS.items()
        }

    def write(self, file: H5File, source: SourceFile, index: int, memory: dict[str, Any]) -> None:
        """Writes the ``index``-th episode of the plan, from its file.

        Raises:
            CorpusError: the episode breaks a rule; names file, group, key and record.
            DropLeaves: a field must be left out of the whole corpus.
            OSError: there is no room.
        """
        episode = self._plan.episodes[index]
        place = Place(file.path, source.name, episode.group)
        loaded = self._examine(file, episode, place, memory)
        tally = _Tally(episode, place, self._notes)
        last: dict[str, npt.NDArray[Any]] = {}
        for leaf in self._plan.leaves:
            for start, block in self._blocks(file, episode, leaf, loaded):
                tally.take(leaf, start, block)
                self._store(episode, leaf, start, block)
                if leaf.path in self._required and start + len(block) == episode.records:
                    last[leaf.path] = block[-1:].copy()
                self._advance(block.nbytes)
            loaded.pop(leaf.path, None)
        flags = self._layout.flags(tally.ends(), last, place, self._notes)
        self._store_flags(episode, flags, place)
        self._store_constant(episode, "episode", episode.number)
        self._store_constant(episode, "seed", episode.file)
        row = {
            "start": episode.start,
            "length": episode.rows,
            "seed": episode.file,
            "episode": episode.number,
            "source_seed": self._layout.source_seed(source.name),
            "terminated": flags.terminated,
            "truncated": flags.truncated,
            "return": tally.reward,
            "digest": np.frombuffer(tally.digest.digest()[:_DIGEST_BYTES], np.uint8),
        }
        for name, value in row.items():
            self.table[name][index] = value

    def finish(self) -> None:
        """Completes the columns.

        Raises:
            RuntimeError: a row was not written: a fault of this engine (rule V34).
        """
        for name in DEFAULT_DONE_KEYS:
            # A stored row never starts from a finished state.
            self._columns[name,].finish()
        for key, column in self._columns.items():
            if not column.is_complete:
                raise RuntimeError(f"the rows of column {key} were not all written [V34]")

    def _examine(
        self, file: H5File, episode: Episode, place: Place, memory: dict[str, Any]
    ) -> dict[str, npt.NDArray[Any]]:
        """Lets the layout compare leaves; returns those that were read whole on the way."""
        if not self._witnesses:
            return {}
        record_bytes = sum(leaf.record_bytes for leaf in self._witnesses)
        count = min(episode.records, max(2, self._block_bytes // max(1, record_bytes)))
        arrays = {
            leaf.path: file.read(f"{episode.group}/{leaf.path}", 0, count)
            for leaf in self._witnesses
        }
        self._layout.examine(Window(arrays, episode.records, place, self._notes, memory))
        return arrays if count == episode.records else {}

    def _blocks(
        self,
        file: H5File,
        episode: Episode,
        leaf: PlannedLeaf,
        loaded: Mapping[str, npt.NDArray[Any]],
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yields the records of a leaf in blocks, each with the index of its first record."""
        if leaf.path in loaded:
            yield 0, loaded[leaf.path]
            return
        path = f"{episode.group}/{leaf.path}"
        step = episode.records
        if leaf.is_once:
            value = file.read(path, 0, 1)
            step = max(1, self._block_bytes // max(1, leaf.record_bytes))
            for start in range(0, episode.records, step):
                count = min(step, episode.records - start)
                yield start, np.broadcast_to(value, (count, *value.shape[1:]))
            return
        if leaf.record_bytes * episode.records > self._block_bytes:
            # Whole stripes of chunks, so that none is decompressed twice.
            stripe = file.chunk_rows(path)
            step = stripe * max(1, self._block_bytes // (stripe * leaf.record_bytes))
        for start in range(0, episode.records, step):
            yield start, file.read(path, start, min(start + step, episode.records))

    def _store(
        self, episode: Episode, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]
    ) -> None:
        rows = episode.rows
        # First, last and one row of each episode are read back; the one is arbitrary but fixed.
        samples = {0, rows - 1, (episode.start * 2654435761 + 97) % rows}
        # Row t holds record t + shift, so records shift .. shift + rows - 1 are stored.
        runs = [
            (max(target.shift, start), min(target.shift + rows, start + len(block)))
            for target in leaf.targets
        ]
        common, crc32 = _shared(block, start, runs)
        for target, (first, stop) in zip(leaf.targets, runs, strict=True):
            if first >= stop:
                continue
            row = first - target.shift
            self._columns[target.key].write(
                episode.start + row,
                block[first - start : stop - start],
                verify=[r - row for r in samples if row <= r < row + stop - first],
                shared=None if crc32 is None else (common[0] - first, common[1] - first, crc32),
            )

    def _store_flags(self, episode: Episode, flags: Flags, place: Place) -> None:
        done = flags.terminated or flags.truncated
        if not done:
            raise place.error("the episode does not end at its last row", "V31")
        final = episode.start + episode.rows - 1
        ends = {"done": done, "terminated": flags.terminated, "truncated": flags.truncated}
        for name, value in ends.items():
            column = self._columns["next", name]
            column.skip(episode.rows - 1)
            column.write(final, np.array([value]))

    def _store_constant(self, episode: Episode, name: str, value: int) -> None:
        step = max(1, self._block_bytes // 8)
        block = np.full(min(step, episode.rows), value, np.int64)
        for start in range(0, episode.rows, step):
            left = episode.rows - start
            self._columns[name,].write(episode.start + start, block[:left])


class _Tally:
    """What is checked and counted on the way through one episode."""

    def __init__(self, episode: Episode, place: Place, notes: Notes) -> None:
        self.reward = 0.0
        self.digest = hashlib.sha256()
        self._records = episode.records
        self._rows = episode.rows
        self._first_end: int | None = None
        self._last_end = False
        self._place = place
        self._notes = notes
        self._clock: npt.NDArray[Any] | None = None

    def take(self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]) -> None:
        """Checks one block of one leaf by its role."""
        if leaf.role == "observation":
            self._require_finite(leaf, start, block, "V21")
            self.digest.update(_bytes(block))
        elif leaf.role == "action":
            # The action of the last record leads nowhere and is not stored.
            self._require_finite(leaf, start, block[: max(0, self._rows - start)], "V20")
            self.digest.update(_bytes(block))
        elif leaf.role == "reward":
            # The reward of the first record belongs to no row.
            skipped = 1 if start == 0 else 0
            self._require_finite(leaf, start + skipped, block[skipped:], "V21")
            self.reward += float(block[skipped:].sum(dtype=np.float64))
        elif leaf.role == "end":
            self._require_finite(leaf, start, block, "V30")
            set_at = np.flatnonzero(block.reshape(len(block)))
            if set_at.size and self._first_end is None:
                self._first_end = start + int(set_at[0])
            self._last_end = bool(set_at.size) and int(set_at[-1]) == len(block) - 1
        elif leaf.role == "time":
            self._require_progress(leaf, start, block)

    def ends(self) -> Ends:
        """Returns where the end field was set, after all of it was taken."""
        return Ends(self._records, self._first_end, self._last_end)

    def _require_finite(
        self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any], rule: str
    ) -> None:
        if block.dtype.kind not in "fc" or not block.size or np.isfinite(block).all():
            return
        good = np.isfinite(block).reshape(len(block), -1).all(axis=1)
        bad = start + int(np.argmin(good))
        at = self._place.at(key=leaf.path, record=bad)
        raise at.error(f"the {leaf.role} holds NaN or infinity", rule)

    def _require_progress(self, leaf: PlannedLeaf, start: int, block: npt.NDArray[Any]) -> None:
        if block.dtype.kind not in "iuf" or not block.size:
            return
        known = 0 if self._clock is None else 1
        times = block if self._clock is None else np.concatenate([self._clock, block])
        if len(times) > 1:
            grows = (times[1:] > times[:-1]).reshape(len(times) - 1, -1).all(axis=1)
            if not grows.all():
                record = start - known + 1 + int(np.argmin(grows))
                at = self._place.at(key=leaf.path, record=record)
                self._notes.add("V27", f"{leaf.path} does not increase strictly", at)
        self._clock = block[-1:]


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
    return (first, stop), zlib.crc32(_bytes(block[first - start : stop - start]))


def _bytes(block: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
