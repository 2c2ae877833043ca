"""Columns that say nothing of their own: taken out after all rows are known, and recorded.

A decision on the first episode would lose data (rule V13), so that it falls here, on columns that
are whole. Only what is carried along may go: ``info``, and what `Field.role` calls so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.columns import ColumnFile
from replaykit.datasets.engine.places import Notes, Place
from replaykit.datasets.engine.plan import Plan
from replaykit.datasets.engine.policies import Policies
from replaykit.ted import Key

__all__ = ["condense", "remove_column"]

_BLOCK_BYTES: Final = 1 << 20
_MOST_VALUES: Final = 4096
"""Numbers of a constant entry that the manifest holds, some 80 kB of text: positions of all bodies
of a simulator's model, not an image that never changes. Longer ones stay, and are reported."""


def condense(
    directory: Path,
    plan: Plan,
    columns: dict[Key, ColumnFile],
    policies: Policies,
    notes: Notes,
    place: Place,
) -> list[dict[str, Any]]:
    """Removes columns of infos that are constant, or equal another one, where that is asked for.

    Args:
        directory: the data set that is being made.
        plan: what was written.
        columns: the columns; those that go are removed from it.
        policies: what the caller decides.
        notes: takes constants that stay, since the manifest cannot hold their value.
        place: the first file.

    Returns:
        Key and value, or key and the key that it equals, of each column that went; JSON values.

    Cost: reads the columns whose checksums are equal, and the constant ones, once.
    """
    removed: list[dict[str, Any]] = []
    infos = [target.key for leaf in plan.leaves if leaf.role == "info" for target in leaf.targets]
    if policies.constant == "drop":
        for key in infos:
            value = _constant(columns[key])
            if value is None:
                continue
            why = _unsaid(value)
            if why is None:
                removed.append({"key": list(key), "why": "constant", "value": value.tolist()})
            else:
                name = "/".join(key)
                text = f"{name} is constant and kept as a column: {why}"
                notes.add("V13", text, place, name=name)
    if policies.duplicate == "drop":
        gone = {tuple(entry["key"]) for entry in removed}
        seen: dict[tuple[Any, ...], list[Key]] = {}
        ordered = [*(key for key in columns if key not in set(infos)), *infos]
        for key in ordered:
            column = columns[key]
            if key in gone or column.path is None:
                continue
            found = seen.setdefault((column.crc32, column.nbytes, column.spec.dtype), [])
            same = next((other for other in found if _is_equal(columns[other], column)), None)
            if same is not None and key in infos:
                removed.append({"key": list(key), "why": "duplicate", "same_as": list(same)})
            else:
                found.append(key)
    for entry in removed:
        remove_column(directory, columns.pop(tuple(entry["key"])))
    return removed


def _unsaid(value: npt.NDArray[Any]) -> str | None:
    """Says why the manifest cannot hold a value; ``None`` where it can."""
    if value.size > _MOST_VALUES:
        return (
            f"its {value.size:,} numbers are more than the {_MOST_VALUES:,} of a manifest's entry"
        )
    return None if np.isfinite(value).all() else "JSON has no number for NaN and infinity"


def _constant(column: ColumnFile) -> npt.NDArray[Any] | None:
    """Returns the value of all entries of a column; ``None`` where they differ."""
    entries = column.nbytes // max(1, column.spec.entry_bytes)
    width = int(np.prod(column.spec.shape))
    if not entries or not width:
        return None
    first = column.read(0, 1)
    step = max(1, _BLOCK_BYTES // column.spec.entry_bytes)
    for start in range(0, entries, step):
        if (column.read(start, min(step, entries - start)) != first).any():
            return None
    dtype = str(column.spec.dtype).removeprefix("torch.")
    return first.reshape(-1).view(np.dtype(dtype)).reshape(column.spec.shape)


def _is_equal(one: ColumnFile, other: ColumnFile) -> bool:
    if one.shape != other.shape:
        return False
    entries = one.nbytes // one.spec.entry_bytes
    step = max(1, _BLOCK_BYTES // one.spec.entry_bytes)
    return all(
        np.array_equal(one.read(at, count), other.read(at, count))
        for at in range(0, entries, step)
        for count in (min(step, entries - at),)
    )


def remove_column(directory: Path, column: ColumnFile) -> None:
    """Takes a column out of its directory, and out of tensordict's description of it."""
    assert column.path is not None
    column.path.unlink()
    # The description of the root is held back while a data set is being made.
    home = column.path.parent
    meta = next(path for path in home.glob("meta.json*") if path.is_file())
    described = json.loads(meta.read_text())
    del described[column.spec.key[-1]]
    meta.write_text(json.dumps(described))
