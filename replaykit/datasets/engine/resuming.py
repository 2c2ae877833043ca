"""What an interrupted conversion had finished, file by file, so that the next one goes on there.

A record is appended when the rows of a file have been written: checksums of its part of every
column, statistics, the lines of its episodes, findings; and now and then how far the file has come
that this process writes, see `milestones`. It is used only by the same conversion, and
only where the rows still have these checksums, so that neither the death of a process nor that of
the machine can make wrong rows of it: what was lost is written again.

Layout of the file: blocks one after another, each of magic, length of a JSON text, length of the
arrays, CRC-32 of both, then both. The first block says which conversion and which plan it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import ColumnOutput
from replaykit.datasets.dataset_manifest import provenance
from replaykit.datasets.engine.layout import DropLeaves, Layout, rules_digest
from replaykit.datasets.engine.places import Notes
from replaykit.datasets.engine.plan import Plan, column_specs
from replaykit.datasets.engine.row_writer import empty_table
from replaykit.datasets.engine.statistics import (
    Milestone,
    Statistics,
    kept_notes,
    kept_statistics,
    notes_of,
    statistics_of,
)
from replaykit.datasets.publishing import UNFINISHED_NAME
from replaykit.datasets.sources import Sources, sha256_of
from replaykit.filesystem import disk_errors
from replaykit.native import crc32
from replaykit.ted import Key

__all__ = ["Excluded", "FilePart", "Unfinished", "conversion_digest"]

_MAGIC: Final = b"rku1"
_HEAD: Final = struct.Struct("<4sQQI")
_BLOCK_BYTES: Final = 1 << 20

Excluded = dict[tuple[int, str, int], str]


@dataclass
class FilePart:
    """What is known of one file after its rows were written.

    ``is_told``: the table of all episodes and whoever counts the bytes have it already.
    """

    index: int
    rows: int
    nbytes: int
    crc32: Mapping[Key, int]
    statistics: Mapping[Key, Statistics]
    table: Mapping[str, npt.NDArray[Any]]
    notes: Notes
    bad: Mapping[int, str]
    facts: Mapping[str, Any]
    dropped: DropLeaves | None = None
    is_told: bool = False


@dataclass
class Unfinished:
    """The record of a conversion in its directory; read when it is made, damaged parts left out.

    Nothing is there before the first file is finished or has come far, and nothing of one file that
    is short.

    Args:
        directory: where the data set is being made.
        conversion: what `conversion_digest` returns.

    Cost: reads what is recorded once, one file's at a time; no row.
    """

    directory: Path
    conversion: str
    _head: dict[str, Any] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)
    _marks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _keys: list[Key] = field(default_factory=list)
    _is_kept: bool = False
    _is_single: bool = False

    def __post_init__(self) -> None:
        blocks = self._blocks()
        said = next(blocks, None)
        if said is None or said[1].get("conversion") != self.conversion:
            self.forget()
            return
        self._head, end = said[1], said[2]
        for at, part, end in blocks:  # noqa: B007 - the end of the last one
            self._note(part, at)
        # What is appended must not follow half a block.
        os.truncate(self._path, end)

    def _note(self, said: Mapping[str, Any], at: int) -> None:
        """Notes what a block says: of a file that is finished, or how far one has come."""
        index = said["index"]
        if "stop" not in said:
            self._places[index] = at
            self._marks.pop(index, None)
            return
        marks = self._marks.setdefault(index, [])
        if marks and said["first"] != marks[-1][1]:
            marks.clear()  # the file was begun anew
        marks.append((at, said["stop"]))

    @property
    def _path(self) -> Path:
        return self.directory / UNFINISHED_NAME

    @property
    def without(self) -> dict[str, str]:
        """Sources of fields that had been found to be left out, and why."""
        return dict(self._head.get("without", {}))

    @property
    def excluded(self) -> Excluded:
        """Episodes that had been found to be left out, and why."""
        found = self._head.get("excluded", ())
        return {(file, group, base): why for file, group, base, why in found}

    def is_of(self, plan: Plan) -> bool:
        """Whether there are finished files, and the plan is the one that they were written by."""
        is_begun = bool(self._places or self._marks)
        return is_begun and self._head["plan"] == _plan_digest(plan)

    def begin(self, plan: Plan, without: Mapping[str, str], excluded: Excluded) -> None:
        """Forgets what there is; what is recorded from now on is of this plan."""
        self.forget()
        self._is_kept = True
        self._is_single = len(plan.spans.by_file()) < 2
        self._head = {
            "conversion": self.conversion,
            "plan": _plan_digest(plan),
            "without": dict(without),
            "excluded": [[*episode, why] for episode, why in excluded.items()],
        }

    def go_on(self, columns: Mapping[Key, ColumnOutput], plan: Plan) -> None:
        """Keeps the files whose rows are as they were recorded; the others are written again.

        Args:
            columns: the columns, with what was written to them.
            plan: what they were written by.

        Cost: reads the rows of the finished files once, 1 MiB at a time.
        """
        self._is_kept = True
        self._is_single = len(plan.spans.by_file()) < 2
        self._keys = list(columns)
        for index, spans in plan.spans.by_file().items():
            known = self.milestone(index)
            if known is not None:
                first = plan.spans[spans[0]].start
                for key, (nbytes, crc32) in known.columns.items():
                    size = columns[key].spec.entry_bytes
                    stop = first + (nbytes // size if size else 0)
                    if _crc32(columns[key], first, stop) != crc32:
                        del self._marks[index]
                        break
            if index in self._places:
                first, wanted = plan.spans[spans[0]].start, self.part(index)
                stop = first + wanted.rows
                if any(_crc32(c, first, stop) != wanted.crc32[key] for key, c in columns.items()):
                    del self._places[index]

    @property
    def finished(self) -> frozenset[int]:
        """The positions of the files whose rows need not be written again."""
        return frozenset(self._places)

    def milestone(self, index: int) -> Milestone | None:
        """Returns how far a file has come that is not finished, if anything is known of that."""
        found: Milestone | None = None
        for at, _ in self._marks.get(index, ()):
            said, table = self._read(at)
            known = Milestone.of(said, self._keys, table)
            found = known if found is None else known.after(found)
        return found

    def mark(self, index: int, found: Milestone) -> None:
        """Appends how far a file has come; nothing where the layout has learnt what cannot be.

        Raises:
            OSError: there is no room; names the file.
        """
        if not self._is_kept:
            return
        self._keys = list(found.columns)
        try:
            said = {"index": index, "episodes": found.stop - found.first, **found.to_json()}
        except TypeError:
            return
        self._append(said, found.table)

    def _read(self, at: int) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        found = _read_block(self._path, at)
        assert found is not None
        said, body, _ = found
        table = empty_table(said["episodes"])
        for name, values in table.items():
            nbytes = values.nbytes
            raw = np.frombuffer(body[:nbytes], values.dtype)
            table[name], body = raw.reshape(values.shape), body[nbytes:]
        return said, table

    def part(self, index: int) -> FilePart:
        """Returns what is known of a finished file."""
        said, table = self._read(self._places[index])
        return FilePart(
            index,
            said["rows"],
            said["nbytes"],
            dict(zip(self._keys, said["crc32"], strict=True)),
            statistics_of(said["statistics"], self._keys),
            table,
            notes_of(said["notes"]),
            dict(said["bad"]),
            said["facts"],
        )

    def record(self, part: FilePart) -> None:
        """Appends what is known of a file whose rows have been written.

        Raises:
            OSError: there is no room; names the file.
        """
        if not self._is_kept or part.dropped is not None:
            return
        if self._is_single and part.index not in self._marks:
            return  # it was short, and would be again
        self._keys = list(part.crc32)
        said = {
            "index": part.index,
            "rows": part.rows,
            "nbytes": part.nbytes,
            "episodes": len(part.table["digest"]),
            "crc32": list(part.crc32.values()),
            "statistics": kept_statistics(part.statistics),
            "notes": kept_notes(part.notes),
            "bad": [list(each) for each in part.bad.items()],
            "facts": dict(part.facts),
        }
        self._append(said, part.table)

    def _append(self, said: Mapping[str, Any], table: Mapping[str, npt.NDArray[Any]]) -> None:
        arrays = [np.ascontiguousarray(table[name]) for name in empty_table(0)]
        nbytes = sum(array.nbytes for array in arrays)
        with disk_errors(self._path, nbytes), self._path.open("ab") as file:
            if not file.tell():
                _write_block(file, self._head, ())
            at = file.tell()
            _write_block(file, said, arrays)
        self._note(said, at)

    def forget(self) -> None:
        """Removes the record: the rows are about to be no longer those that it tells of."""
        self._path.unlink(missing_ok=True)
        self._head, self._places, self._marks, self._is_kept = {}, {}, {}, False

    def _blocks(self) -> Iterator[tuple[int, dict[str, Any], int]]:
        """Yields place, JSON and end of each block that is whole, up to the first that is not."""
        at = 0
        while (found := _read_block(self._path, at)) is not None:
            yield at, found[0], found[2]
            at = found[2]


def conversion_digest(
    sources: Sources,
    layout: Layout,
    said: Mapping[str, Any],
    stamps: Mapping[str, Any],
) -> str:
    """Returns a digest of all that the rows of a conversion follow from, before the scan.

    Args:
        sources: the files, with their hashes.
        layout: what the corpus declares.
        said: options and identity, JSON values.
        stamps: sizes and times of change of the files, and of those that describe them.

    Cost: reads the files that describe the sources.
    """
    made = {name: value for name, value in provenance().items() if name != "time"}
    beside = [
        [str(path), sha256_of(path)]
        for file in sources.files
        for path in layout.described_by(file.path)
        if path.is_file()
    ]
    files = [[str(f.path), f.name, f.size, f.sha256, f.is_verified] for f in sources.files]
    rules = [layout.name, layout.version, rules_digest(layout)]
    origin = repr(sources.origin)
    text = json.dumps([made, files, beside, rules, origin, said, stamps], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plan_digest(plan: Plan) -> str:
    """Returns a digest of where every row of a plan lies and what it is made of; O(E)."""
    digest = hashlib.sha256()
    for leaf in plan.leaves:
        targets = [(target.key, target.offset, target.is_after) for target in leaf.targets]
        kind = (leaf.is_once, leaf.is_padded, leaf.extra, str(leaf.dtype), str(leaf.stored))
        digest.update(repr((leaf.path, leaf.paths, leaf.shape, kind, targets)).encode())
    digest.update(repr(column_specs(plan)).encode())
    digest.update(repr(sorted(plan.spans.by_file().items())).encode())
    for name in ("file", "number", "base", "records", "rows", "start", "is_open", "terminated"):
        digest.update(plan.episodes.column(name).data)
    return digest.hexdigest()


def _crc32(column: ColumnOutput, first: int, stop: int) -> int:
    found = 0
    step = max(1, _BLOCK_BYTES // max(1, column.spec.entry_bytes))
    for start in range(first, stop, step):
        found = crc32(column.read(start, min(step, stop - start)), found)
    return found


def _write_block(file: Any, said: Mapping[str, Any], arrays: Sequence[npt.NDArray[Any]]) -> None:
    text = json.dumps(said).encode()
    found = crc32(text)
    for array in arrays:
        found = crc32(_bytes(array), found)
    file.write(_HEAD.pack(_MAGIC, len(text), sum(array.nbytes for array in arrays), found))
    file.write(text)
    for array in arrays:
        file.write(_bytes(array))


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read_block(path: Path, at: int) -> tuple[dict[str, Any], memoryview, int] | None:
    """Returns JSON, arrays and end of a block, or ``None`` where there is no whole one."""
    try:
        with path.open("rb") as file:
            left = os.fstat(file.fileno()).st_size - at - _HEAD.size
            file.seek(at)
            if left < 0:
                return None
            magic, nbytes, more, wanted = _HEAD.unpack(file.read(_HEAD.size))
            if magic != _MAGIC or nbytes + more > left:
                return None
            body = file.read(nbytes + more)
    except FileNotFoundError:
        return None
    if len(body) != nbytes + more or crc32(body) != wanted:
        return None
    return json.loads(body[:nbytes]), memoryview(body)[nbytes:], at + _HEAD.size + nbytes + more
