"""Records of finished files, from which another process continues a conversion.

A block is appended to the record when the rows of a file have been written. The block has checksums
of the file's part of every column, statistics, the lines of its episodes, and findings. For a long
file that this process writes, milestones are also appended. Only the same conversion uses the
record, and only if the rows still have these checksums. Rows that were lost with a process or the
machine are detected and written again.

The file is a sequence of blocks. A block has a magic number, the length of a JSON text, the length
of the arrays, and the CRC-32 of both. The JSON text and the arrays follow. The first block
identifies the conversion and the plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import ColumnOutput
from replaykit.datasets.dataset_manifest import provenance
from replaykit.datasets.engine.layout import DropLeaves, Layout, rules_digest
from replaykit.datasets.engine.plan import Plan, column_specs
from replaykit.datasets.engine.row_writer import empty_table
from replaykit.datasets.engine.statistics import Milestone, Notes, StatisticsOf
from replaykit.datasets.publishing import UNFINISHED_NAME
from replaykit.datasets.sources import Sources, sha256_of
from replaykit.declared import decode_state, encode_state
from replaykit.filesystem import disk_errors
from replaykit.native import crc32
from replaykit.ted import Key

__all__ = ["Excluded", "FilePart", "Unfinished", "conversion_digest"]

_MAGIC: Final = b"rku2"
_HEAD: Final = struct.Struct("<4sQQI")
_BLOCK_BYTES: Final = 1 << 20

Excluded = dict[tuple[int, str, int], str]


@dataclass
class FilePart:
    """The results of a file whose rows were written.

    ``is_reported`` is True if the episode table and the progress bar already include the file.
    """

    UNSAVED: ClassVar = ("table", "dropped", "is_reported")
    index: int
    rows: int
    nbytes: int
    crc32: Mapping[Key, int]
    statistics: StatisticsOf
    notes: Notes
    bad: Mapping[int, str]
    facts: Mapping[str, Any]
    table: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    dropped: DropLeaves | None = None
    is_reported: bool = False


@dataclass
class Unfinished:
    """The record of an unfinished conversion, in its directory.

    The constructor reads the record, and leaves out damaged parts. No record is written before the
    first file is finished or has a milestone. The conversion of a single short file has no record.

    Args:
        directory: the directory of the unfinished data set.
        conversion: the result of `conversion_digest`.

    Cost: the record is read once, file by file. No row is read.
    """

    directory: Path
    conversion: str
    _head: dict[str, Any] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)
    _marks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _is_kept: bool = False
    _is_single: bool = False

    def __post_init__(self) -> None:
        blocks = self._blocks()
        said = next(blocks, None)
        if said is None or said[1].get("conversion") != self.conversion:
            self.forget()
            return
        self._head, end = said[1], said[2]
        for at, part, end in blocks:  # noqa: B007 - the end of the last block
            self._record(part, at)
        # Blocks must not be appended to an incomplete block.
        os.truncate(self._path, end)

    def _record(self, said: Mapping[str, Any], at: int) -> None:
        """Index the block of a finished file or of a milestone."""
        index = said["index"]
        if "stop" not in said:
            self._places[index] = at
            self._marks.pop(index, None)
            return
        marks = self._marks.setdefault(index, [])
        if marks and said["first"] != marks[-1][1]:
            marks.clear()  # the file was started again
        marks.append((at, said["stop"]))

    @property
    def _path(self) -> Path:
        return self.directory / UNFINISHED_NAME

    @property
    def without(self) -> dict[str, str]:
        """Sources of fields that the interrupted conversion left out, with the reasons."""
        return dict(self._head.get("without", {}))

    @property
    def excluded(self) -> Excluded:
        """Episodes that the interrupted conversion left out, with the reasons."""
        found = self._head.get("excluded", ())
        return {(file, group, base): why for file, group, base, why in found}

    def is_of(self, plan: Plan) -> bool:
        """Return whether the record has finished files or milestones of this plan."""
        is_begun = bool(self._places or self._marks)
        return is_begun and self._head["plan"] == _plan_digest(plan)

    def begin(self, plan: Plan, without: Mapping[str, str], excluded: Excluded) -> None:
        """Remove the record, and start a record of this plan."""
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
        """Drop files whose rows differ from the record, so that they are written again.

        Args:
            columns: the columns, with the rows that were written to them.
            plan: the plan with which the rows were written.

        Cost: the rows of the finished files are read once, in blocks of 1 MiB.
        """
        self._is_kept = True
        self._is_single = len(plan.spans.by_file()) < 2
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
        """The positions of the files whose rows are complete."""
        return frozenset(self._places)

    def milestone(self, index: int) -> Milestone | None:
        """Return the milestone of an unfinished file, or ``None``."""
        found: Milestone | None = None
        for at, _ in self._marks.get(index, ()):
            said, table = self._read(at)
            known = replace(decode_state(Milestone, said, str(self._path)), table=table)
            found = known if found is None else known.after(found)
        return found

    def mark(self, index: int, found: Milestone) -> None:
        """Append a milestone of a file.

        Nothing is appended if JSON cannot represent the layout's memory.

        Raises:
            OSError: no space is left. The message names the file.
        """
        if not self._is_kept:
            return
        try:
            said = {"index": index, "episodes": found.stop - found.first, **encode_state(found)}
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
        """Return the results of a finished file."""
        said, table = self._read(self._places[index])
        return replace(decode_state(FilePart, said, str(self._path)), table=table)

    def record(self, part: FilePart) -> None:
        """Append the results of a file whose rows have been written.

        Raises:
            OSError: no space is left. The message names the file.
        """
        if not self._is_kept or part.dropped is not None:
            return
        if self._is_single and part.index not in self._marks:
            return  # it is cheap to write a single short file again
        said = {"episodes": len(part.table["digest"]), **encode_state(part)}
        self._append(said, part.table)

    def _append(self, said: Mapping[str, Any], table: Mapping[str, npt.NDArray[Any]]) -> None:
        arrays = [np.ascontiguousarray(table[name]) for name in empty_table(0)]
        nbytes = sum(array.nbytes for array in arrays)
        with disk_errors(self._path, nbytes), self._path.open("ab") as file:
            if not file.tell():
                _write_block(file, self._head, ())
            at = file.tell()
            _write_block(file, said, arrays)
        self._record(said, at)

    def forget(self) -> None:
        """Remove the record, because its rows are about to change."""
        self._path.unlink(missing_ok=True)
        self._head, self._places, self._marks, self._is_kept = {}, {}, {}, False

    def _blocks(self) -> Iterator[tuple[int, dict[str, Any], int]]:
        """Yield offset, JSON and end of each block, up to the first incomplete one."""
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
    """Return a digest of all inputs that determine the rows of a conversion.

    The digest can be computed before the files are scanned.

    Args:
        sources: the files, with their hashes.
        layout: the declaration of the corpus.
        said: options and identity, as JSON values.
        stamps: sizes and modification times of the files, and of the files that describe them.
            Cost: the files that describe the sources are read.
    """
    made = {name: value for name, value in provenance().items() if name != "time"}
    descriptions = [
        [str(path), sha256_of(path)]
        for file in sources.files
        for path in layout.described_by(file.path)
        if path.is_file()
    ]
    files = [[str(f.path), f.name, f.size, f.sha256, f.is_verified] for f in sources.files]
    rules = [layout.name, layout.version, rules_digest(layout)]
    origin = repr(sources.origin)
    text = json.dumps([made, files, descriptions, rules, origin, said, stamps], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _plan_digest(plan: Plan) -> str:
    """Return a digest of the position and source of every row of a plan. Cost: O(E)."""
    digest = hashlib.sha256()
    for leaf in plan.leaves:
        targets = [(target.key, target.offset, target.is_after) for target in leaf.targets]
        kind = (leaf.is_per_episode, leaf.is_padded, leaf.extra, str(leaf.dtype), str(leaf.stored))
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
    """Return JSON, arrays and end of a block, or ``None`` if it is incomplete."""
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
