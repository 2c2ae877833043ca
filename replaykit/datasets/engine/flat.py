"""The episodes of flat arrays, all at once: there may be millions in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.finding import EpisodeRefs
from replaykit.datasets.engine.layout import Layout
from replaykit.datasets.engine.plan import Skipped

__all__ = ["Excluded", "flat_episodes", "gives_no_row"]

Excluded = Mapping[tuple[int, str, int], str]
"""Episodes to leave out, by file, group and first record, and why."""


def gives_no_row(records: int) -> str:
    """Says why an episode is left out that is too short (rule V37)."""
    return f"it has {records} record{'s' * (records != 1)}, so it gives no row [V37]"


def flat_episodes(
    refs: EpisodeRefs,
    layout: Layout,
    last_steps: str,
    unit: Sequence[int],
    starts: Sequence[int],
    excluded: Excluded,
    row: int,
) -> tuple[dict[str, npt.NDArray[Any]], list[Skipped]]:
    """Returns the columns of `Episodes` for those that give rows, and those that are left out.

    Args:
        refs: with the first record, the length, and how each ended.
        layout: what the corpus declares.
        last_steps: as ``Policies.last_steps``.
        unit: the files that are read as one, by their positions.
        starts: where the records of each of them begin.
        excluded: episodes that are to be left out.
        row: the first row.
    """
    assert refs.bases is not None
    assert refs.records is not None
    assert refs.terminated is not None
    bases, records = refs.bases, refs.records
    parts = np.zeros(len(refs), np.int64) if refs.parts is None else refs.parts
    files = np.array(unit)[parts]
    is_open = np.full(len(refs), layout.is_open and last_steps == "keep")
    if layout.is_open and last_steps == "terminated":
        is_open = refs.terminated & (records > 0)
    rows = records - layout.lost + is_open
    why = {at: gives_no_row(int(records[at])) for at in np.flatnonzero(rows < 1).tolist()}
    if excluded:
        for at, key in enumerate(zip(files.tolist(), bases.tolist(), strict=True)):
            text = excluded.get((key[0], "", key[1]))
            if text is not None:
                why[at] = text
    skipped = []
    for at in sorted(why):
        first = int(bases[at]) - starts[int(parts[at])]
        name = f"[{first}:{first + int(records[at])}]"
        skipped.append(Skipped(int(files[at]), name, why[at]))
    kept = np.ones(len(refs), np.bool_)
    kept[list(why)] = False
    rows = rows[kept]
    columns = {
        "file": files[kept],
        "number": refs.numbers[kept],
        "base": bases[kept],
        "records": records[kept],
        "rows": rows,
        "start": row + np.cumsum(rows) - rows,
        "is_open": is_open[kept],
        "terminated": refs.terminated[kept],
    }
    return columns, skipped
