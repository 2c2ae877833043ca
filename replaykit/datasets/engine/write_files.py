"""Write source files in turn or in parallel, and remove episodes and columns afterwards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import ColumnOutput, ColumnSpec, create_columns, synced_early
from replaykit.datasets.engine.layout import DropLeaves
from replaykit.datasets.engine.places import Judge, Notes, Place
from replaykit.datasets.engine.plan import Plan, SourceEpisode, column_specs
from replaykit.datasets.engine.policies import Policies
from replaykit.datasets.engine.resuming import FilePart, Unfinished
from replaykit.datasets.engine.row_writer import RowWriter, empty_table
from replaykit.datasets.engine.source_files import open_sources
from replaykit.datasets.engine.statistics import Milestone, Statistics
from replaykit.datasets.sources import Sources
from replaykit.datasets.worker_pool import WorkerPool
from replaykit.filesystem import disk_errors
from replaykit.native import crc32
from replaykit.ted import DEFAULT_DONE_KEYS, Key

__all__ = [
    "FINALS_DIRECTORY",
    "WrittenFile",
    "condense",
    "kept_episodes",
    "remove_column",
    "store_once",
    "without_episodes",
    "write_files",
]

_Parts = Generator[FilePart, None, None]

_MARKED_BYTES: Final = 64 << 20
"""Bytes of a file after which it is noted how far it has come, which takes less than a
millisecond."""
_MOST_ORDERED: Final = 256
"""Files up to which the largest is begun first. What is known of later ones waits for the first;
of many files the last one is little in any case."""


@dataclass
class WrittenFile:
    """What is known of all files after their rows were written.

    Attributes:
        table: the episode table.
        statistics: of each column.
        facts: what was learnt of each file.
        bad: episodes that are to be left out, by position, and why.
    """

    table: dict[str, npt.NDArray[Any]]
    statistics: dict[Key, Statistics]
    facts: list[dict[str, Any]]
    bad: dict[int, str]


def write_files(
    plan: Plan,
    sources: Sources,
    columns: Mapping[Key, ColumnOutput],
    *,
    block_bytes: int,
    on_invalid: str,
    workers: int,
    notes: Notes,
    advance: Callable[[int], object],
    unfinished: Unfinished,
) -> WrittenFile:
    """Writes the rows of all files that are not finished yet.

    Args:
        plan: what is to be written.
        sources: the files.
        columns: the files of `column_specs`, empty but for the rows of finished files.
        block_bytes: how much of one leaf is read at a time, by each worker.
        on_invalid: as in `Policies`.
        workers: how many processes work at once, each on a file, this one among them.
        notes: takes the findings.
        advance: told the bytes that were read.
        unfinished: has the files that are finished, and takes those that are now.

    Raises:
        CorpusError: an episode breaks a rule; names file, group, key and record.
        DropLeaves: a field must be left out of the whole corpus.
        OSError: there is no room.
        RuntimeError: a worker died.
    """
    filled = empty_table(len(plan.episodes))
    table = {**_known(plan), **filled}
    found = WrittenFile(
        table, {key: Statistics() for key in columns}, [{} for _ in sources.files], {}
    )
    spans = plan.spans.by_file()
    write = partial(
        _write_file, plan, sources, columns, spans, block_bytes=block_bytes, on_invalid=on_invalid
    )
    finished = unfinished.finished
    left = [index for index in spans if index not in finished]
    mine = partial(write, advance=advance, table=filled, unfinished=unfinished)
    if workers < 2 or len(left) < 2:
        parts: _Parts = (mine((index, index)) for index in left)
    else:
        if len(left) <= _MOST_ORDERED:
            left.sort(key=lambda index: len(_rows(plan, spans[index])), reverse=True)
        parts = _as_they_come(write, mine, left, min(workers, len(left)))
    with closing(_in_order(spans, finished, _recorded(parts, unfinished), unfinished)) as ordered:
        for part in ordered:
            if part.dropped is not None:
                raise part.dropped
            if not part.is_told:
                advance(part.nbytes)
                first = plan.spans[spans[part.index][0]].first
                for name, values in part.table.items():
                    filled[name][first : first + len(values)] = values
            for key, column in columns.items():
                column.join(part.crc32[key], part.rows)
                found.statistics[key].merge(part.statistics[key])
            notes.extend(part.notes)
            found.bad.update(part.bad)
            found.facts[part.index] = {**plan.about.get(part.index, {}), **part.facts}
    return found


def _known(plan: Plan) -> dict[str, npt.NDArray[Any]]:
    """Returns what a plan knows of the episodes, by the names of the episode table."""
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
    write: Callable[[tuple[int, int]], FilePart],
    mine: Callable[[tuple[int, int]], FilePart],
    indices: list[int],
    workers: int,
) -> _Parts:
    """Yields the parts that this process and others write, whichever is done first.

    Args:
        write: writes one in another process.
        mine: writes one in this process.
        indices: of which files, in the order in which they are begun.
        workers: how many processes write, this one among them.
    """
    pieces = [(index, index) for index in indices]
    with WorkerPool(write, pieces[1:], workers - 1) as crew:
        piece: tuple[int, int] | None = pieces[0]
        while piece is not None:
            yield mine(piece)
            while (part := crew.answer(waits=False)) is not None:
                yield part
            piece = crew.take()
        while (part := crew.answer()) is not None:
            yield part


def _recorded(parts: _Parts, unfinished: Unfinished) -> _Parts:
    """Yields the parts, each after it was recorded."""
    with closing(parts):
        for part in parts:
            unfinished.record(part)
            yield part


def _in_order(
    indices: Iterable[int],
    finished: frozenset[int],
    parts: _Parts,
    unfinished: Unfinished,
) -> _Parts:
    """Yields the parts in the order of the files: those of before, and those that are written."""
    waiting: dict[int, FilePart] = {}
    with closing(parts):
        for index in indices:
            if index in finished:
                yield unfinished.part(index)
                continue
            while index not in waiting:
                part = next(parts)
                waiting[part.index] = part
            yield waiting.pop(index)


def _rows(plan: Plan, spans: range) -> range:
    """Returns the rows of some spans of one file in a row."""
    last = plan.spans[spans[-1]]
    return range(plan.spans[spans[0]].start, last.start + last.rows)


def _write_file(
    plan: Plan,
    sources: Sources,
    columns: Mapping[Key, ColumnOutput],
    by_file: Mapping[int, range],
    piece: tuple[int, int],
    *,
    block_bytes: int,
    on_invalid: str,
    advance: Callable[[int], object] | None = None,
    table: Mapping[str, npt.NDArray[Any]] | None = None,
    unfinished: Unfinished | None = None,
) -> FilePart:
    """Writes the rows of one file; the piece is its position, twice.

    ``table``: of all episodes, where it can be filled right here; ``advance`` and ``unfinished``,
    which is told now and then how far the file has come, are given as well.
    """
    index = piece[0]
    source = sources.files[index]
    spans = by_file[index]
    rows = _rows(plan, spans)
    first, end = plan.spans[spans[0]].first, plan.spans[spans[-1]].stop
    if table is None:
        table = empty_table(end - first)
    else:
        table = {name: values[first:end] for name, values in table.items()}
    parts = {key: column.part(rows.start, rows.stop) for key, column in columns.items()}
    notes = Notes()
    memory: dict[str, Any] = {}
    judge = Judge(on_invalid, notes)
    counted = [0]

    def count(nbytes: int) -> None:
        counted[0] += nbytes
        if advance is not None:
            advance(nbytes)

    writer = RowWriter(
        plan,
        parts,
        first=first,
        table=table,
        block_bytes=block_bytes,
        judge=judge,
        advance=count,
    )
    known = None if unfinished is None else unfinished.milestone(index)
    if known is not None:
        count(known.nbytes)
        notes.extend(known.notes)
        judge.bad.update(known.bad)
        memory.update(known.memory)
        writer.go_on(known)
    last = [known.stop if known is not None else first, counted[0]]

    def reached(stop: int) -> None:
        if unfinished is None or counted[0] - last[1] < _MARKED_BYTES or stop == end:
            return
        lines = slice(last[0] - first, stop - first)
        unfinished.mark(
            index,
            Milestone(
                last[0], stop, counted[0], {key: part.reached for key, part in parts.items()},
                writer.statistics, notes, judge.bad, writer.tails, memory,
                {name: values[lines] for name, values in writer.table.items()},
            ),
        )  # fmt: skip
        last[:] = stop, counted[0]

    dropped = None
    try:
        with ExitStack() as stack:
            if advance is None:
                # The threads of the one it came with are in the process that started this one.
                stack.enter_context(synced_early(parts))
            unit = [sources.files[position] for position in plan.units.get(index, (index,))]
            file = stack.enter_context(
                open_sources(unit, plan.layout.clock, plan.held, plan.layout.chunks)
            )
            writer.write(file, source, plan.spans.within(spans), memory, last[0], reached)
        writer.finish()
    except DropLeaves as drop:
        # Handed over as it is: the way back from a worker is for errors.
        dropped = drop
    return FilePart(
        index,
        len(rows),
        counted[0],
        {key: part.crc32 for key, part in parts.items()},
        writer.statistics,
        writer.table,
        notes,
        judge.bad,
        plan.layout.file_facts(memory),
        dropped,
        is_told=advance is not None,
    )


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


def _identity(episode: SourceEpisode) -> tuple[object, ...]:
    return (
        episode.file, episode.group, episode.base, episode.records, episode.rows, episode.number,
        episode.is_open,
    )  # fmt: skip


def without_episodes(
    directory: Path,
    columns: Mapping[Key, ColumnOutput],
    written: WrittenFile,
    before: Plan,
    after: Plan,
    kept: Index,
) -> tuple[dict[Key, ColumnOutput], WrittenFile]:
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
    found = {key: ColumnOutput(c.path, c.spec, (after.rows,)) for key, c in columns.items()}
    statistics = {key: _move(column, runs) for key, column in found.items()}
    for path in directory.rglob("meta.json*"):
        _shorten(path, before.rows, after.rows)
    table = {name: values[kept] for name, values in written.table.items()}
    table["start"] = after.episodes.column("start")
    return found, WrittenFile(table, statistics, written.facts, {})


def _runs(before: Plan, after: Plan, kept: Index) -> list[tuple[int, int, int]]:
    """Returns which rows move: from, to, how many; rows that stay side by side together."""
    old = before.episodes.column("start")[kept]
    new, rows = after.episodes.column("start"), after.episodes.column("rows")
    begins = np.flatnonzero(np.append(True, old[1:] != old[:-1] + rows[:-1]))
    counts = np.add.reduceat(rows, begins)
    return list(zip(old[begins].tolist(), new[begins].tolist(), counts.tolist(), strict=True))


def _move(column: ColumnOutput, runs: list[tuple[int, int, int]]) -> Statistics:
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


_MOST_VALUES: Final = 4096
"""Numbers of a constant entry that the manifest holds, some 80 kB of text: positions of all bodies
of a simulator's model, not an image that never changes. Longer ones stay, and are reported."""


def condense(
    directory: Path,
    plan: Plan,
    columns: dict[Key, ColumnOutput],
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


def _constant(column: ColumnOutput) -> npt.NDArray[Any] | None:
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


def _is_equal(one: ColumnOutput, other: ColumnOutput) -> bool:
    if one.shape != other.shape:
        return False
    entries = one.nbytes // one.spec.entry_bytes
    step = max(1, _BLOCK_BYTES // one.spec.entry_bytes)
    return all(
        np.array_equal(one.read(at, count), other.read(at, count))
        for at in range(0, entries, step)
        for count in (min(step, entries - at),)
    )


def remove_column(directory: Path, column: ColumnOutput) -> None:
    """Takes a column out of its directory, and out of tensordict's description of it."""
    assert column.path is not None
    column.path.unlink()
    # The description of the root is held back while a data set is being made.
    home = column.path.parent
    meta = next(path for path in home.glob("meta.json*") if path.is_file())
    described = json.loads(meta.read_text())
    del described[column.spec.key[-1]]
    meta.write_text(json.dumps(described))


FINALS_DIRECTORY: Final = "finals"
_NEVER: Final = frozenset((*DEFAULT_DONE_KEYS, "reward"))


def store_once(
    directory: Path, plan: Plan, columns: dict[Key, ColumnOutput]
) -> dict[Key, ColumnOutput]:
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


def _repeats(columns: Mapping[Key, ColumnOutput], key: Key, lasts: npt.NDArray[np.int64]) -> bool:
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


def _take(column: ColumnOutput, rows: npt.NDArray[np.int64], to: ColumnOutput) -> None:
    """Writes some rows of a column, in rising order, one after the other to another one."""
    step = max(1, _BLOCK_BYTES // column.spec.entry_bytes)
    for first in range(0, len(rows), step):
        some: list[Any] = [column.read(int(row), 1) for row in rows[first : first + step]]
        to.write(first, np.concatenate(some))
