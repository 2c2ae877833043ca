"""One source file after another, or several at once: each fills rows that no other one touches.

A file is written by itself: its part of every column, its statistics and its findings. They are put
together in the order of the files, so that the result is the same for any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy.typing as npt

from replaykit.datasets.columns import ColumnFile, synced_early
from replaykit.datasets.crew import Crew
from replaykit.datasets.engine.joined import open_sources
from replaykit.datasets.engine.judge import Judge
from replaykit.datasets.engine.layout import DropLeaves
from replaykit.datasets.engine.milestones import Milestone
from replaykit.datasets.engine.places import Notes
from replaykit.datasets.engine.plan import Plan
from replaykit.datasets.engine.statistics import Statistics
from replaykit.datasets.engine.unfinished import FilePart, Unfinished
from replaykit.datasets.engine.write import RowWriter, empty_table
from replaykit.datasets.sources import Sources
from replaykit.ted import Key

__all__ = ["Written", "write_files"]

_Parts = Generator[FilePart, None, None]

_MARKED_BYTES: Final = 64 << 20
"""Bytes of a file after which it is noted how far it has come, which takes less than a
millisecond."""
_MOST_ORDERED: Final = 256
"""Files up to which the largest is begun first. What is known of later ones waits for the first;
of many files the last one is little in any case."""


@dataclass
class Written:
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
    columns: Mapping[Key, ColumnFile],
    *,
    block_bytes: int,
    on_invalid: str,
    workers: int,
    notes: Notes,
    advance: Callable[[int], object],
    unfinished: Unfinished,
) -> Written:
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
    found = Written(table, {key: Statistics() for key in columns}, [{} for _ in sources.files], {})
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
    with Crew(write, pieces[1:], workers - 1) as crew:
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
    columns: Mapping[Key, ColumnFile],
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
