"""Checks that rows hold the records that the alignment requires."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import ColumnOutput, torch_dtype
from replaykit.datasets.engine.fields import Target
from replaykit.datasets.engine.plan import PlannedLeaf
from replaykit.datasets.engine.policies import Judge
from replaykit.datasets.engine.row_batches import Stretch, StretchReader
from replaykit.ted import Key

_COMPARED_BYTES: Final = 1 << 20
"""Number of bytes in one comparison."""


def check_alignment(
    stretch: Stretch,
    leaf: PlannedLeaf,
    target: Target,
    start: int,
    values: npt.NDArray[Any],
    row: int,
    entries: npt.NDArray[Any],
) -> None:
    """Compare some rewards and final states with the records of the alignment.

    The rewards of the first, a middle and the last row of every episode are compared (rule V24).
    The state after the last row is also compared (rule V23). Other leaves are not compared. Cost:
    O(E) for each block, plus the compared entries.

    Args:
        stretch: the stretch that contains the rows.
        leaf: the leaf that the block belongs to.
        target: the column.
        start: the first record of the block.
        values: the records of the block, in the form in which they are stored.
        row: the first row that was stored from the block.
        entries: the values that were stored from ``row`` on.

    Raises:
        RuntimeError: a row holds a wrong record, which is a fault of this engine.
    """
    at = stretch.at
    first, offset = at.bases + target.offset, at.rows - 1
    if leaf.role == "reward":
        rule, steps = "V24", np.concatenate([np.zeros_like(offset), at.rows // 2, offset])
        episodes = np.tile(np.arange(len(at)), 3)
    elif leaf.role == "observation" and target.is_after:
        rule, episodes = "V23", np.flatnonzero(~at.is_open)
        steps = offset[episodes]
    else:
        return
    records = first[episodes] + steps
    here = (records >= start) & (records < start + len(values))
    records, rows = records[here], (at.starts[episodes] + steps)[here]
    # A record after the last one of its episode belongs to the next episode.
    wrong = records >= at.stops[episodes[here]] + leaf.extra
    wrong |= (rows < row) | (rows >= row + len(entries))
    known = np.flatnonzero(~wrong)
    step = max(1, _COMPARED_BYTES // max(1, entries[:1].nbytes))
    for begin in range(0, len(known), step):
        some = known[begin : begin + step]
        wrong[some] = _differ(entries[rows[some] - row], values[records[some] - start])
    if wrong.any():
        record = int(records[np.argmax(wrong)])
        what = "the reward" if rule == "V24" else "the final state"
        raise RuntimeError(
            f"{stretch.location_at(record, leaf.path)}: expected {what} of this "
            f"record, but row {int(rows[np.argmax(wrong)])} holds that of another one [{rule}]"
        )


def _differ(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the entries that differ in any byte, so that NaN equals itself."""
    width = one[:1].nbytes
    if not width:
        return np.zeros(len(one), np.bool_)
    first, second = (
        np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, width)
        for array in (one, other)
    )
    return np.asarray((first != second).any(axis=1))


Index = npt.NDArray[np.int64]

_READ_BYTES: Final = 1 << 20
"""Number of bytes of a column in one check. They stay in a fast cache."""
_ROWS: Final = 1 << 15
"""Number of rows in one check. Row numbers take more memory than narrow entries."""


def check_blanks(
    stretch: Stretch,
    leaves: Sequence[PlannedLeaf],
    columns: Mapping[Key, ColumnOutput],
    reader: StretchReader,
    bad: Collection[int],
) -> None:
    """Check that rows that contain only zeros are also zero in the source (rule V28).

    Args:
        stretch: the stretch that contains the rows, which were all written.
        leaves: the leaves that fill the rows.
        columns: the column files.
        reader: reads the source again for rows with only zeros.
        bad: positions of the episodes to leave out.

    Raises:
        RuntimeError: the source has other values for such a row, which is a fault of this engine.

    Cost: the actions are read back. For rows with zero actions, the other columns are also read, in
    the order of their width, narrowest first. Memory: a block of 1 MiB. If a row has only zeros, a
    block of the source is also in memory.
    """
    filled = [
        (leaf, target)
        for leaf in leaves
        if stretch.leaves.issuperset(leaf.paths)
        for target in leaf.targets
        if columns[target.key].spec.entry_bytes
    ]
    # Actions are rarely zero, so usually no other column is read.
    filled.sort(key=lambda pair: (pair[0].role != "action", pair[0].record_bytes))
    if not filled:
        return
    (_, narrow), rest = filled[0], filled[1:]
    stop = stretch.start + stretch.rows
    step = min(_ROWS, max(1, _READ_BYTES // columns[narrow.key].spec.entry_bytes))
    for start in range(stretch.start, stop, step):
        blank = _blank(columns[narrow.key], np.arange(start, min(start + step, stop)))
        for _, target in rest:
            if not len(blank):
                break
            blank = _blank(columns[target.key], blank)
        episodes = np.searchsorted(stretch.at.starts, blank, "right") - 1
        good = np.isin(episodes + stretch.first, list(bad), invert=True)
        if good.any():
            for leaf, target in filled:
                _check_source(stretch, leaf, target, reader, blank[good], episodes[good])


def _blank(column: ColumnOutput, rows: Index) -> Index:
    """Return the rows among ``rows`` that are zero in a column."""
    found = [rows[:0]]
    for some in _together(rows, max(1, _READ_BYTES // column.spec.entry_bytes)):
        block = column.read(int(some[0]), int(some[-1] - some[0]) + 1)
        is_blank = np.logical_not(block.any(axis=1))
        found.append(some[np.asarray(is_blank)[some - some[0]]])
    return np.concatenate(found)


def _together(numbers: Index, most: int) -> Iterator[Index]:
    """Yield ascending numbers in pieces that each span fewer than ``most`` numbers."""
    begin = 0
    while begin < len(numbers):
        end = int(np.searchsorted(numbers, numbers[begin] + most))
        yield numbers[begin:end]
        begin = end


def _check_source(
    stretch: Stretch,
    leaf: PlannedLeaf,
    target: Target,
    reader: StretchReader,
    rows: Index,
    episodes: Index,
) -> None:
    """Check that the source records of rows that read back as zero are zero."""
    at = stretch.at
    records = at.bases[episodes] + target.offset + rows - at.starts[episodes]
    # The last row of an open episode repeats the state that it started from.
    records = np.minimum(records, at.stops[episodes] + leaf.extra - 1)
    most = max(1, _READ_BYTES // max(1, leaf.record_bytes))
    for some in _together(records, stretch.records if not stretch.is_single else most):
        first, stop = int(some[0]), int(some[-1]) + 1
        if not stretch.is_single:
            first, stop = 0, stretch.records
        elif leaf.is_per_episode:
            first, stop = 0, 1
        block = reader.read(leaf, first, stop)
        values = block if leaf.is_per_episode and stretch.is_single else block[some - first]
        with np.errstate(over="ignore", invalid="ignore"):
            # Values that are too small for the column's dtype become zero.
            values = values.astype(leaf.stored) if leaf.stored.kind in "fc" else values
        filled = (values != 0).reshape(len(values), -1).any(axis=1)
        if filled.any():
            which = int(np.argmax(filled))
            row = int(rows[np.searchsorted(records, some[which])])
            raise RuntimeError(
                f"{stretch.location_at(int(some[which]), leaf.path)}: this record was not "
                f"stored: row {row} is zero in every column [V28]"
            )


def check_successor(
    stretch: Stretch,
    target: Target,
    row: int,
    stored: npt.NDArray[Any],
    columns: Mapping[Key, ColumnOutput],
    judge: Judge,
    tails: dict[Key, bytes],
) -> None:
    """Compare next observations with the observations of the following rows (V22).

    In flat arrays, the steps that break the rule are also counted (rule V40), because the
    conversion may continue.

    Args:
        stretch: the stretch that contains the rows. All its observations were written.
        target: the column of next observations.
        row: the first row.
        stored: the values that were stored from ``row`` on.
        columns: the column files.
        judge: receives the episodes that break the rule.
        tails: by key, the last next observation of the preceding part of the same arrays. The call
            compares it now, because the row after it had not been written before. The call then
            replaces it by the last next observation of this part.
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
        _report_end_without_reset(stretch, target, -1, judge)
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
        _report_end_without_reset(stretch, target, stretch.at.at_row(row + at), judge)
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
            stretch.location_at(record, ".".join(target.key)),
            count=len(rows),
        )
    for i, first in zip(episodes.tolist(), rows[at].tolist(), strict=True):
        record = int(stretch.at.bases[i] + first - stretch.at.starts[i])
        judge.fail(
            stretch.first + i,
            stretch.location_at(record, ".".join(target.key)),
            "the state that the step arrived at is not the one that the next step starts "
            "from: rows of several episodes are mixed, or an end is not flagged",
            "V22",
        )


def _differing(
    one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8], size: int
) -> npt.NDArray[np.bool_]:
    """Return a mask of the entries that differ, of ``size`` bytes each."""
    wide: Any = next(kind for kind in (np.uint64, np.uint32, np.uint16, np.uint8)
                     if size % np.dtype(kind).itemsize == 0)  # fmt: skip
    places = np.flatnonzero(one.view(wide) != other.view(wide))
    differs = np.zeros(one.size // size, np.bool_)
    differs[places // (size // np.dtype(wide).itemsize)] = True
    return differs


def _report_end_without_reset(stretch: Stretch, target: Target, i: int, judge: Judge) -> None:
    """Report an end after which the environment was not reset (rule V39).

    ``i`` is the position of the episode that ends in the stretch. It is -1 for the episode before
    the stretch.
    """
    if target.key[:2] != ("next", "observation"):
        return
    episode, following = stretch.episode(i), stretch.episode(i + 1)
    is_adjacent = following.base == episode.base + episode.records
    if is_adjacent and following.group == episode.group:
        record = int(stretch.at.bases[i + 1]) - 1
        text = (
            "an end is flagged, but the next episode continues from the state that the "
            "step arrived at: the environment was not reset there"
        )
        judge.notes.add("V39", text, stretch.location_at(record, ".".join(target.key)))
