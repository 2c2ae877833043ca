"""Whether the state that a step arrived at is the one that the next step starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.columns import ColumnFile, torch_dtype
from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.judge import Judge
from replaykit.datasets.engine.stretch import Stretch
from replaykit.ted import Key

__all__ = ["check_successor"]

_COMPARED_BYTES: Final = 1 << 20
"""Bytes that are read back at a time: they stay in a fast cache."""


def check_successor(
    stretch: Stretch,
    target: Target,
    row: int,
    stored: npt.NDArray[Any],
    columns: Mapping[Key, ColumnFile],
    judge: Judge,
    tails: dict[Key, bytes],
) -> None:
    """Compares next observations with the observations that follow (rule V22).

    Where that ends no conversion, steps of flat arrays that break it are counted too (rule V40).

    Args:
        stretch: whose rows they are; the observations of all of it were written.
        target: the column of next observations.
        row: the first row.
        stored: what was stored from there on.
        columns: the column files.
        judge: told of episodes that break the rule.
        tails: what the last row of the stretch before arrived at, where it is of the same arrays;
            for that what follows was not written yet.
    """
    column = columns.get(target.key[1:])
    if (
        column is None
        or target.key[0] != "next"
        or column.spec.dtype != torch_dtype(stored.dtype)
        or not column.spec.entry_bytes
    ):
        return
    size = column.spec.entry_bytes
    tail = tails.pop(target.key, None) if row == stretch.start else None
    if tail is not None and stretch.spans[0].base and column.read(row, 1).tobytes() == tail:
        _note_end_without_reset(stretch, target, -1, judge)
    if row + len(stored) == stretch.start + stretch.rows:
        tails[target.key] = np.ascontiguousarray(stored[-1]).tobytes()
    end = min(row + len(stored), stretch.start + stretch.rows - 1)
    if end <= row:
        return
    differs = np.empty(end - row, np.bool_)
    step = max(1, _COMPARED_BYTES // size)
    for begin in range(0, end - row, step):
        given = np.ascontiguousarray(stored[begin : min(begin + step, end - row)])
        following = column.read(row + 1 + begin, len(given)).reshape(-1)
        here = _differing(following, given.reshape(-1).view(np.uint8), size)
        differs[begin : begin + len(given)] = here
    finals = stretch.at.finals
    lasts = finals[(finals >= row) & (finals < end)] - row
    for at in lasts[~differs[lasts]].tolist():
        _note_end_without_reset(stretch, target, stretch.at.at_row(row + at), judge)
    differs[lasts] = False
    rows = row + np.flatnonzero(differs)
    episodes, at = np.unique(
        np.searchsorted(stretch.at.starts, rows, "right") - 1, return_index=True
    )
    if len(rows) and not stretch.episode(0).is_whole:
        i = int(episodes[0])
        record = int(stretch.at.bases[i] + rows[0] - stretch.at.starts[i])
        judge.notes.add(
            "V40",
            "the next observation of a step that no flag ends is not the observation of the next "
            "record: rows of several episodes are mixed, or an end is not flagged",
            stretch.place_at(record, ".".join(target.key)),
            count=len(rows),
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


def _note_end_without_reset(stretch: Stretch, target: Target, i: int, judge: Judge) -> None:
    """Notes an end after which the next episode goes on from where the step arrived (V39).

    ``i``: the episode that ends, counted from the first of the stretch; -1 is the one before.
    """
    if target.key[:2] != ("next", "observation"):
        return
    episode, following = stretch.episode(i), stretch.episode(i + 1)
    goes_on = following.base == episode.base + episode.records
    if goes_on and following.group == episode.group:
        record = int(stretch.at.bases[i + 1]) - 1
        text = (
            "an end is flagged where the next episode goes on from the state that the "
            "step arrived at: the environment was not reset there"
        )
        judge.notes.add("V39", text, stretch.place_at(record, ".".join(target.key)))
