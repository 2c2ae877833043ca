"""Taking episodes out of columns that were written: the rows of the others move together.

Which episodes break a rule, or are copies, is known when all have been written. Where the others
make the same columns without them, nothing has to be read from the sources again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.columns import ColumnFile
from replaykit.datasets.engine.filework import Written
from replaykit.datasets.engine.plan import Episode, Plan
from replaykit.datasets.engine.specs import column_specs
from replaykit.datasets.engine.statistics import Statistics
from replaykit.filesystem import disk_errors
from replaykit.native import crc32
from replaykit.ted import Key

__all__ = ["kept_episodes", "without_episodes"]

_BLOCK_BYTES: Final = 1 << 20

Index = npt.NDArray[np.int64]


def kept_episodes(before: Plan, after: Plan) -> Index | None:
    """Returns which episodes of a plan another one still has, by their positions; O(E).

    ``None`` where the other one has other columns, or rows that were not written.
    """
    if before.leaves != after.leaves or column_specs(before) != column_specs(after):
        return None
    found = np.empty(len(after.episodes), np.int64)
    # Both are in the order of files and arrays.
    rest = enumerate(map(_identity, before.episodes))
    for at, wanted in enumerate(map(_identity, after.episodes)):
        found[at] = next((position for position, each in rest if each == wanted), -1)
        if found[at] < 0:
            return None
    return found


def _identity(episode: Episode) -> tuple[object, ...]:
    return (
        episode.file, episode.group, episode.base, episode.records, episode.rows, episode.number,
        episode.is_open,
    )  # fmt: skip


def without_episodes(
    directory: Path,
    columns: Mapping[Key, ColumnFile],
    written: Written,
    before: Plan,
    after: Plan,
    kept: Index,
) -> tuple[dict[Key, ColumnFile], Written]:
    """Takes out the episodes that are not kept; returns the columns and what is known of them.

    Args:
        directory: the data set that is being made.
        columns: its columns, complete.
        written: what is known of them.
        before, after: the plans with and without the episodes.
        kept: what `kept_episodes` found.

    Cost: moves the rows behind the first episode that goes, and reads all columns once, for their
    checksums and statistics. Memory: a block of 1 MiB.

    Raises:
        OSError: the file system fails; names the file.
    """
    runs = _runs(before, after, kept)
    found = {key: ColumnFile(c.path, c.spec, (after.rows,)) for key, c in columns.items()}
    statistics = {key: _move(column, runs) for key, column in found.items()}
    for path in directory.rglob("meta.json*"):
        _shorten(path, before.rows, after.rows)
    table = {name: values[kept] for name, values in written.table.items()}
    table["start"] = after.episodes.column("start")
    return found, Written(table, statistics, written.facts, {})


def _runs(before: Plan, after: Plan, kept: Index) -> list[tuple[int, int, int]]:
    """Returns which rows move: from, to, how many; rows that stay side by side together."""
    old = before.episodes.column("start")[kept]
    new, rows = after.episodes.column("start"), after.episodes.column("rows")
    begins = np.flatnonzero(np.append(True, old[1:] != old[:-1] + rows[:-1]))
    counts = np.add.reduceat(rows, begins)
    return list(zip(old[begins].tolist(), new[begins].tolist(), counts.tolist(), strict=True))


def _move(column: ColumnFile, runs: list[tuple[int, int, int]]) -> Statistics:
    """Moves runs of rows (from, to, how many) to the front, and takes their checksum anew."""
    statistics, size = Statistics(), column.spec.entry_bytes
    if column.path is None or not size:
        return statistics
    dtype = np.dtype(str(column.spec.dtype).removeprefix("torch."))
    step = max(1, _BLOCK_BYTES // size)
    descriptor = os.open(column.path, os.O_RDWR)
    try:
        with disk_errors(column.path, column.nbytes):
            for old, new, count in runs:
                for start in range(0, count, step):
                    length = min(step, count - start) * size
                    block = os.pread(descriptor, length, (old + start) * size)
                    done = 0 if old != new else length
                    while done < length:
                        at = (new + start) * size + done
                        done += os.pwrite(descriptor, memoryview(block)[done:], at)
                    column.crc32 = crc32(block, column.crc32)
                    values = np.frombuffer(block, dtype).reshape(-1, *column.spec.shape)
                    statistics.add(values)
            os.ftruncate(descriptor, column.nbytes)
    finally:
        os.close(descriptor)
    return statistics


def _shorten(path: Path, before: int, after: int) -> None:
    """Changes the number of rows in what tensordict says of a directory."""
    said = json.loads(path.read_text())
    for entry in (said, *(value for value in said.values() if isinstance(value, dict))):
        shape = entry.get("shape")
        if isinstance(shape, list) and shape[:1] == [before]:
            shape[0] = after
    path.write_text(json.dumps(said))
