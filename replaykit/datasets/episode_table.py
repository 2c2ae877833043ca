"""The episode table of a data set: one entry per episode, in a directory beside the columns.

The numbers are columns like those of the rows. The names of the source groups are a text file of
one JSON string per line, read when they are asked for: opening a data set of millions of episodes
costs what opening one of ten costs.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.columns import ColumnSpec, create_columns, torch_dtype
from replaykit.datasets.manifest import Array
from replaykit.filesystem import disk_errors

__all__ = ["EPISODE_DIRECTORY", "EPISODE_FIELDS", "read_groups", "write_episode_table"]

EPISODE_DIRECTORY: Final = "episodes"
GROUP_FILE: Final = "groups.txt"
_TOGETHER: Final = 1 << 12
"""Names that are written at a time."""

EPISODE_FIELDS: Final[Mapping[str, tuple[npt.DTypeLike, str]]] = {
    "start": (np.int64, "first row"),
    "length": (np.int64, "rows"),
    "seed": (np.int64, "position of the source file"),
    "episode": (np.int64, "number in the source file"),
    "source_seed": (np.int64, "seed that the path of the source file names, or -1"),
    "success": (np.int8, "whether the source says that the task was solved: 1, 0, or -1 if not"),
    "terminated": (np.bool_, "the last row is terminated"),
    "truncated": (np.bool_, "the last row is truncated"),
    "return": (np.float64, "sum of the rewards, NaN without rewards"),
    "digest": (np.uint8, "16 bytes of the SHA-256 of observations and actions"),
}
"""Columns of the table: dtype and meaning. ``digest`` is ``[E, 16]``, all others ``[E]``."""


def write_episode_table(
    directory: Path, columns: Mapping[str, npt.NDArray[Any]], groups: Iterable[str]
) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """Writes the table below a data set's directory.

    Args:
        directory: the data set's directory.
        columns: an array ``[E, ...]`` for each of `EPISODE_FIELDS`; those of an older version
            may lack some.
        groups: the group of each episode; they are written as they come.

    Returns:
        What the manifest says of its columns and of its text file.
    """
    specs = [
        ColumnSpec((name,), columns[name].shape[1:], torch_dtype(dtype))
        for name, (dtype, _) in EPISODE_FIELDS.items()
        if name in columns
    ]
    home = directory / EPISODE_DIRECTORY
    files = create_columns(home, specs, (len(columns["start"]),))
    for (name,), file in files.items():
        file.write(0, columns[name].astype(EPISODE_FIELDS[name][0], copy=False))
    arrays = tuple(file.describe(directory, {}) for file in files.values())
    path = home / GROUP_FILE
    nbytes = crc32 = 0
    # A line break between strings, which hold none themselves once they are JSON.
    lines, left = json.JSONEncoder(separators=("\n", ":")), iter(groups)
    with path.open("wb") as names:
        while some := list(islice(left, _TOGETHER)):
            text = f"{lines.encode(some)[1:-1]}\n".encode()
            nbytes, crc32 = nbytes + len(text), zlib.crc32(text, crc32)
            with disk_errors(path, nbytes):
                names.write(text)
                names.flush()
    facts = {
        "file": path.relative_to(directory).as_posix(),
        "nbytes": nbytes,
        "crc32": f"{crc32:08x}",
    }
    return arrays, facts


def read_groups(path: Path) -> list[str]:
    """Returns the group names in the order of the episodes. Cost: O(E)."""
    return [json.loads(line) for line in path.read_text().splitlines()]
