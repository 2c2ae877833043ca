"""Conversion of files in sequence or in parallel, and removal of episodes and columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import ColumnOutput, ColumnSpec, create_columns, synced_early
from replaykit.datasets.column_statistics import Statistics
from replaykit.datasets.dataset_manifest import AttachedFile
from replaykit.datasets.engine.layout import DropLeaves
from replaykit.datasets.engine.locations import RuleFindings
from replaykit.datasets.engine.plan import H5Plan, Plan, column_specs
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.engine.resuming import FilePart, Unfinished, drop_damaged
from replaykit.datasets.engine.row_writer import RowWriter, empty_table
from replaykit.datasets.engine.source_files import open_sources
from replaykit.datasets.publishing import hold_back
from replaykit.datasets.sources import Sources
from replaykit.datasets.worker_pool import WorkerPool
from replaykit.ted import DEFAULT_DONE_KEYS, Key

_Parts = Generator[FilePart, None, None]

_MOST_ORDERED: Final = 256
"""Greatest number of files of which the largest is begun first.

The results of later files wait in memory for the first file. Among many files, the last file takes
little of the total time.
"""


@dataclass
class WrittenRows:
    """The rows of a plan in their columns, and the results of writing them.

    Attributes:
        columns: the columns.
        table: the episode table; empty if the rows must be planned and written again.
        statistics: the statistics of columns of values.
        report: entries of the report.
        bad: the reasons to leave out episodes, by position.
        attached: the files next to the columns, which are made when they are asked for.
        finals: the columns that replace some of ``columns``; see `store_once`.
    """

    columns: dict[Key, ColumnOutput]
    table: dict[str, npt.NDArray[Any]]
    statistics: dict[Key, Statistics]
    report: dict[str, Any] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    attached: Iterable[AttachedFile] = ()
    finals: dict[Key, ColumnOutput] = field(default_factory=dict)


def write_files(
    plan: H5Plan,
    create: Callable[[], dict[Key, ColumnOutput]],
    *,
    sources: Sources,
    block_bytes: int,
    on_invalid: str,
    workers: int,
    notes: RuleFindings,
    advance: Callable[[int], object],
    unfinished: Unfinished[FilePart],
) -> WrittenRows:
    """Write the rows of all files that are not finished yet.

    Args:
        plan: the plan of the data set.
        create: returns the columns, with the rows of finished files.
        sources: the files.
        block_bytes: number of bytes of one leaf in one read of a worker.
        on_invalid: as in `Policies`.
        workers: number of processes that write, including this process. Each writes one file after
            another.
        notes: collects the findings.
        advance: called with the number of bytes that were read.
        unfinished: the record of the finished files, to which newly finished files are added.

    Raises:
        CorpusError: an episode breaks a rule. The message names file, group, key and record.
        DropLeaves: a field must be left out of the whole corpus.
        OSError: no space is left.
        RuntimeError: a worker died.
    """
    columns = create()
    drop_damaged(unfinished.finished, columns, plan)
    filled = empty_table(len(plan.episodes))
    found = WrittenRows(
        columns,
        {**known_table(plan), **filled},
        {key: Statistics() for key in columns},
        {"files": [], "rules": plan.layout.declaration()},
    )
    spans = plan.spans.by_file()
    write = partial(
        _write_file, plan, sources, columns, spans, block_bytes=block_bytes, on_invalid=on_invalid
    )
    left = [index for index in spans if index not in unfinished.finished]
    mine = partial(write, advance=advance)
    if workers < 2 or len(left) < 2:
        parts: _Parts = (mine(index) for index in left)
    else:
        if len(left) <= _MOST_ORDERED:
            left.sort(key=lambda index: len(_rows(plan, spans[index])), reverse=True)
        parts = _as_they_come(write, mine, left, min(workers, len(left)))
    with synced_early(columns), closing(_in_order(spans, parts, unfinished)) as ordered:
        for part in ordered:
            if part.dropped is not None:
                raise part.dropped
            if not part.is_reported:
                advance(part.nbytes)
            first = plan.spans[spans[part.index][0]].first
            for name, values in part.table.items():
                filled[name][first : first + len(values)] = values
            for key, column in columns.items():
                column.join(part.crc32[key], part.rows)
                found.statistics[key].merge(part.statistics[key])
            notes.extend(part.notes)
            found.bad.update(part.bad)
            facts = {**plan.about.get(part.index, {}), **part.facts}
            if facts:
                found.report["files"].append({"file": sources.files[part.index].name, **facts})
    return found


def known_table(plan: Plan) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of the episode table that a plan determines."""
    names = {
        "start": "start",
        "length": "rows",
        "seed": "file",
        "episode": "number",
        "source_seed": "source_seed",
        "success": "success",
    }
    return {name: plan.episodes.column(column) for name, column in names.items()}


def _as_they_come(
    write: Callable[[int], FilePart],
    mine: Callable[[int], FilePart],
    indices: list[int],
    workers: int,
) -> _Parts:
    """Yield the parts that this process and the workers write, in order of completion.

    Args:
        write: writes a part in a worker.
        mine: writes a part in this process.
        indices: positions of the files, in the order in which they are begun.
        workers: number of processes that write, including this process.
    """
    with WorkerPool(write, indices[1:], workers - 1) as pool:
        index: int | None = indices[0]
        while index is not None:
            yield mine(index)
            while (part := pool.answer(waits=False)) is not None:
                yield part
            index = pool.take()
        yield from pool.answers()


def _in_order(indices: Collection[int], parts: _Parts, unfinished: Unfinished[FilePart]) -> _Parts:
    """Yield finished and newly written parts in the order of the files; record the new ones."""
    waiting = dict(unfinished.finished)
    with closing(parts):
        for index in indices:
            while index not in waiting:
                part = next(parts)
                if part.dropped is None and len(indices) > 1:
                    unfinished.record(part)
                waiting[part.index] = part
            yield waiting.pop(index)


def _rows(plan: Plan, spans: range) -> range:
    """Return the rows of consecutive spans of one file."""
    last = plan.spans[spans[-1]]
    return range(plan.spans[spans[0]].start, last.start + last.rows)


def _write_file(
    plan: H5Plan,
    sources: Sources,
    columns: Mapping[Key, ColumnOutput],
    by_file: Mapping[int, range],
    index: int,
    *,
    block_bytes: int,
    on_invalid: str,
    advance: Callable[[int], object] | None = None,
) -> FilePart:
    """Write the rows of one file.

    ``advance`` is given if this process shows the progress.
    """
    source = sources.files[index]
    spans = by_file[index]
    rows = _rows(plan, spans)
    first, end = plan.spans[spans[0]].first, plan.spans[spans[-1]].stop
    parts = {key: column.part(rows.start, rows.stop) for key, column in columns.items()}
    notes = RuleFindings()
    memory: dict[str, Any] = {}
    judge = Judge(on_invalid, notes)
    counted = 0

    def count(nbytes: int) -> None:
        nonlocal counted
        counted += nbytes
        if advance is not None:
            advance(nbytes)

    writer = RowWriter(
        plan,
        parts,
        first=first,
        table=empty_table(end - first),
        block_bytes=block_bytes,
        judge=judge,
        advance=count,
    )
    dropped = None
    try:
        with ExitStack() as stack:
            if advance is None:
                # The threads that sync the columns exist only in the parent process.
                stack.enter_context(synced_early(parts))
            unit = [sources.files[position] for position in plan.units.get(index, (index,))]
            file = stack.enter_context(
                open_sources(unit, plan.layout.clock, plan.held, plan.layout.chunks)
            )
            writer.write(file, source, plan.spans.within(spans), memory)
        writer.finish()
    except DropLeaves as drop:
        # The signal is returned, because an exception from a worker would count as an error.
        dropped = drop
    return FilePart(
        index,
        len(rows),
        counted,
        {key: part.crc32 for key, part in parts.items()},
        writer.statistics,
        notes,
        judge.bad,
        plan.layout.file_facts(memory),
        writer.table,
        dropped,
        is_reported=advance is not None,
    )


_BLOCK_BYTES: Final = 1 << 20

Index = npt.NDArray[np.int64]


def has_rows_of(before: Plan, after: Plan, kept: Index) -> bool:
    """Return whether a plan has the columns of another plan, and its episodes ``kept``."""
    names = ("file", "number", "base", "records", "rows", "is_open")
    mine, theirs = before.episodes, after.episodes
    return (
        before.leaves == after.leaves
        and column_specs(before) == column_specs(after)
        and all(np.array_equal(mine.column(n)[kept], theirs.column(n)) for n in names)
    )


def without_episodes(
    directory: Path,
    written: WrittenRows,
    before: Plan,
    after: Plan,
    kept: Index,
) -> WrittenRows:
    """Remove the episodes that are not kept.

    Args:
        directory: the directory of the unfinished data set.
        written: the complete rows of the data set.
        before, after: the plans with and without the episodes.
        kept: the positions of the remaining episodes, in order; see `has_rows_of`.

    Cost: all rows after the first removed episode are moved. All columns are read once for their
    checksums and statistics. Memory: a block of 1 MiB.

    Raises:
        OSError: the file system fails. The message names the file.
    """
    runs = _runs(before, after, kept)
    found = {key: ColumnOutput(c.path, c.spec, (after.rows,)) for key, c in written.columns.items()}
    statistics = {key: _move(column, runs) for key, column in found.items()}
    # This shortens the files and their descriptions.
    create_columns(directory, column_specs(after), (after.rows,), is_new=False)
    hold_back(directory)
    table = {name: values[kept] for name, values in written.table.items()}
    table["start"] = after.episodes.column("start")
    return WrittenRows(found, table, statistics, written.report)


def _runs(before: Plan, after: Plan, kept: Index) -> list[tuple[int, int, int]]:
    """Return the moves of rows as (from, to, count). Adjacent rows move together."""
    old = before.episodes.column("start")[kept]
    new, rows = after.episodes.column("start"), after.episodes.column("rows")
    begins = np.flatnonzero(np.append(True, old[1:] != old[:-1] + rows[:-1]))
    counts = np.add.reduceat(rows, begins)
    return list(zip(old[begins].tolist(), new[begins].tolist(), counts.tolist(), strict=True))


def _move(column: ColumnOutput, runs: list[tuple[int, int, int]]) -> Statistics:
    """Move runs of rows (from, to, count), update the checksum, and return statistics."""
    statistics = Statistics()
    if column.path is None:
        return statistics
    dtype = np.dtype(str(column.spec.dtype).removeprefix("torch."))
    for old, new, count in runs:
        for at, block in column.blocks(old, old + count):
            if old == new:
                column.adopt(block)
            else:
                column.write(new + at - old, block)
            statistics.add(block.reshape(-1).view(dtype).reshape(-1, *column.spec.shape))
    return statistics


_MOST_VALUES: Final = 4096
"""Most numbers of a constant value in the manifest, about 80 kB of text.

This is enough for the positions of all bodies of a simulator's model, but not for an image. Columns
with longer constant values stay, and are reported.
"""


def condense(
    directory: Path,
    plan: Plan,
    columns: dict[Key, ColumnOutput],
    policies: Policies,
    notes: RuleFindings,
) -> list[dict[str, Any]]:
    """Remove constant and duplicate info columns, as the policies require.

    Args:
        directory: the directory of the unfinished data set.
        plan: the plan of its rows.
        columns: the columns. Removed columns are deleted from this mapping.
        policies: the caller's decisions.
        notes: collects the constant columns that are kept because the manifest cannot hold their
            value.

    Returns:
        The key of each removed column, with its value or the key of the equal column, as JSON
        values.

    Cost: each constant column, and each column whose checksum equals that of another column, is
    read once.
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
                notes.add("V13", text, plan.first, name=name)
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
    """Return why the manifest cannot hold a value, or ``None`` if it can."""
    if value.size > _MOST_VALUES:
        return (
            f"its {value.size:,} numbers are more than the {_MOST_VALUES:,} of a manifest's entry"
        )
    return None if np.isfinite(value).all() else "JSON has no number for NaN and infinity"


def _constant(column: ColumnOutput) -> npt.NDArray[Any] | None:
    """Return the common value of all entries of a column, or ``None``."""
    entries = column.nbytes // max(1, column.spec.entry_bytes)
    width = int(np.prod(column.spec.shape))
    if not entries or not width:
        return None
    first = column.read(0, 1)
    if any((block != first).any() for _, block in column.blocks(0, entries)):
        return None
    dtype = str(column.spec.dtype).removeprefix("torch.")
    return first.reshape(-1).view(np.dtype(dtype)).reshape(column.spec.shape)


def _is_equal(one: ColumnOutput, other: ColumnOutput) -> bool:
    if one.shape != other.shape:
        return False
    entries = one.nbytes // one.spec.entry_bytes
    blocks = one.blocks(0, entries)
    return all(np.array_equal(block, other.read(at, len(block))) for at, block in blocks)


def remove_column(directory: Path, column: ColumnOutput) -> None:
    """Remove a column from its directory and from tensordict's description."""
    assert column.path is not None
    column.path.unlink()
    # The description of the root is hidden while a data set is being made.
    home = column.path.parent
    meta = next(path for path in home.glob("meta.json*") if path.is_file())
    described = json.loads(meta.read_text())
    del described[column.spec.key[-1]]
    meta.write_text(json.dumps(described))


FINALS_DIRECTORY: Final = "finals"
_NEVER: Final = frozenset((*DEFAULT_DONE_KEYS, "reward"))


def store_once(
    directory: Path, lasts: npt.NDArray[np.int64], columns: dict[Key, ColumnOutput]
) -> dict[Key, ColumnOutput]:
    """Replace columns that repeat the following row by the last values of episodes.

    Only columns under ``next`` are replaced.

    Args:
        directory: the directory of the unfinished data set.
        lasts: the last row of each episode, ``[E]``.
        columns: the complete columns. Replaced columns are deleted from this mapping.

    Returns:
        The last values of episodes, ``[E, ...]``, by the keys of the replaced columns.

    Cost: the compared columns are read once. Memory: a few blocks of 1 MiB.

    Raises:
        OSError: no space is left, or a file cannot be read.
    """
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
        _copy_rows(column, lasts, finals[key])
        remove_column(directory, columns.pop(key))
    return finals


def _repeats(columns: Mapping[Key, ColumnOutput], key: Key, lasts: npt.NDArray[np.int64]) -> bool:
    """Return whether a column repeats the following row, except at ends of episodes."""
    column, root = columns[key], columns.get(key[1:])
    if root is None or root.path is None or column.path is None:
        return False
    if (root.spec.shape, root.spec.dtype) != (column.spec.shape, column.spec.dtype):
        return False
    for start, block in column.blocks(0, column.shape[0] - 1):
        differs = (block != root.read(start + 1, len(block))).any(axis=1)
        first, stop = np.searchsorted(lasts, (start, start + len(block)))
        differs[lasts[first:stop] - start] = False
        if differs.any():
            return False
    return True


def _copy_rows(column: ColumnOutput, rows: npt.NDArray[np.int64], to: ColumnOutput) -> None:
    """Copy rows of a column, in ascending order, to the first rows of another column."""
    step = max(1, _BLOCK_BYTES // column.spec.entry_bytes)
    for first in range(0, len(rows), step):
        some: list[Any] = [column.read(int(row), 1) for row in rows[first : first + step]]
        to.write(first, np.concatenate(some))
