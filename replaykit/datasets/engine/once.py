"""Columns that repeat another one a row later: only what episodes end with stays of them.

Found out by comparing the columns when all rows are known: what a source stores twice may differ,
and then both are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.columns import ColumnFile, ColumnSpec, create_columns
from replaykit.datasets.engine.condense import remove_column
from replaykit.datasets.engine.plan import Plan
from replaykit.ted import DEFAULT_DONE_KEYS, Key

__all__ = ["FINALS_DIRECTORY", "store_once"]

FINALS_DIRECTORY: Final = "finals"
_BLOCK_BYTES: Final = 1 << 20
_NEVER: Final = frozenset((*DEFAULT_DONE_KEYS, "reward"))


def store_once(
    directory: Path, plan: Plan, columns: dict[Key, ColumnFile]
) -> dict[Key, ColumnFile]:
    """Replaces columns under ``next`` that repeat the following row by what episodes end with.

    Args:
        directory: the data set that is being made.
        plan: what was written.
        columns: the columns, complete; those that go are removed from it.

    Returns:
        Columns ``[E, ...]`` by the keys of those that went.

    Cost: reads the columns that are compared once. Memory: a few blocks of 1 MiB.

    Raises:
        OSError: there is no room, or a file cannot be read.
    """
    lasts = plan.episodes.column("start") + plan.episodes.column("rows") - 1
    found = {
        key: column
        for key, column in columns.items()
        if key[0] == "next" and key[-1] not in _NEVER and _repeats(columns, key, lasts)
    }
    if not found:
        return {}
    specs = [ColumnSpec(key, column.spec.shape, column.spec.dtype) for key, column in found.items()]
    finals = create_columns(directory / FINALS_DIRECTORY, specs, (len(lasts),))
    for key, column in found.items():
        _take(column, lasts, finals[key])
        remove_column(directory, columns.pop(key))
    return finals


def _repeats(columns: Mapping[Key, ColumnFile], key: Key, lasts: npt.NDArray[np.int64]) -> bool:
    """Whether each row but the last ones of episodes has what the row after it starts from."""
    column, root = columns[key], columns.get(key[1:])
    if root is None or root.path is None or column.path is None:
        return False
    if (root.spec.shape, root.spec.dtype) != (column.spec.shape, column.spec.dtype):
        return False
    rows = column.shape[0]
    step = max(1, _BLOCK_BYTES // column.spec.entry_bytes)
    for start in range(0, rows - 1, step):
        count = min(step, rows - 1 - start)
        differs = (column.read(start, count) != root.read(start + 1, count)).any(axis=1)
        first, stop = np.searchsorted(lasts, (start, start + count))
        differs[lasts[first:stop] - start] = False
        if differs.any():
            return False
    return True


def _take(column: ColumnFile, rows: npt.NDArray[np.int64], to: ColumnFile) -> None:
    """Writes some rows of a column, in rising order, one after the other to another one."""
    step = max(1, _BLOCK_BYTES // column.spec.entry_bytes)
    for first in range(0, len(rows), step):
        some: list[Any] = [column.read(int(row), 1) for row in rows[first : first + step]]
        to.write(first, np.concatenate(some))
