"""Whether the state that a step arrived at is the one that the next step starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from replaykit.datasets.columns import ColumnFile, torch_dtype
from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.judge import Judge
from replaykit.datasets.engine.stretch import Stretch
from replaykit.ted import Key

__all__ = ["check_successor"]


def check_successor(
    stretch: Stretch,
    target: Target,
    row: int,
    stored: npt.NDArray[Any],
    columns: Mapping[Key, ColumnFile],
    judge: Judge,
) -> None:
    """Compares next observations with the observations that follow (rule V22).

    Args:
        stretch: whose rows they are; the observations of all of it were written.
        target: the column of next observations.
        row: the first row.
        stored: what was stored from there on.
        columns: the column files.
        judge: told of episodes that break the rule.
    """
    column = columns.get(target.key[1:])
    if (
        column is None
        or target.key[0] != "next"
        or column.spec.dtype != torch_dtype(stored.dtype)
        or not column.spec.entry_bytes
    ):
        return
    end = min(row + len(stored), stretch.start + stretch.rows - 1)
    if end <= row:
        return
    following = column.read(row + 1, end - row).reshape(-1)
    given = np.ascontiguousarray(stored[: end - row]).reshape(-1).view(np.uint8)
    differs = _differing(following, given, column.spec.entry_bytes)
    finals = stretch.at.finals
    lasts = finals[(finals >= row) & (finals < end)] - row
    _note_ends_without_reset(stretch, target, row, lasts[~differs[lasts]], judge)
    differs[lasts] = False
    rows = row + np.flatnonzero(differs)
    episodes, at = np.unique(
        np.searchsorted(stretch.at.starts, rows, "right") - 1, return_index=True
    )
    for i, first in zip(episodes.tolist(), rows[at].tolist(), strict=True):
        record = int(stretch.at.bases[i] + first - stretch.at.starts[i])
        judge.fail(
            stretch.first + i,
            stretch.place_at(record, ".".join(target.key)),
            "the state that the step arrived at is not the one that the next step starts "
            "from: rows of several episodes are mixed, or an end is not flagged",
            "V22",
        )


def _differing(
    one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8], size: int
) -> npt.NDArray[np.bool_]:
    """Returns which entries of ``size`` bytes differ."""
    wide: Any = next(kind for kind in (np.uint64, np.uint32, np.uint16, np.uint8)
                     if size % np.dtype(kind).itemsize == 0)  # fmt: skip
    places = np.flatnonzero(one.view(wide) != other.view(wide))
    differs = np.zeros(one.size // size, np.bool_)
    differs[places // (size // np.dtype(wide).itemsize)] = True
    return differs


def _note_ends_without_reset(
    stretch: Stretch, target: Target, row: int, lasts: npt.NDArray[np.int64], judge: Judge
) -> None:
    """Notes ends after which the next episode goes on from where the step arrived (V39)."""
    if target.key[:2] != ("next", "observation"):
        return
    for at in lasts.tolist():
        i = stretch.at.at_row(row + at)
        episode, following = stretch.episodes[i], stretch.episodes[i + 1]
        goes_on = following.base == episode.base + episode.records
        if goes_on and following.group == episode.group:
            record = int(stretch.at.bases[i + 1]) - 1
            text = (
                "an end is flagged where the next episode goes on from the state that the "
                "step arrived at: the environment was not reset there"
            )
            judge.notes.add("V39", text, stretch.place_at(record, ".".join(target.key)))
