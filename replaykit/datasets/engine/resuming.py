"""Records of finished source files, from which another process continues a conversion.

A line is appended to the record when the rows of a file have been written. The line has checksums
of the file's part of every column, statistics, the lines of its episodes, and findings. A line of a
table is for a column of images and one episode. Only the same conversion uses the record, and only
if the rows still have these checksums. Rows that were lost with a process or the machine are
detected and written again.

A line has the CRC-32 of a JSON text, and the text. The first line identifies the conversion and the
plan. A line without a valid checksum is ignored.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from replaykit.datasets.column_files import ColumnOutput
from replaykit.datasets.column_statistics import Statistics
from replaykit.datasets.dataset_manifest import provenance
from replaykit.datasets.engine.layout import DropLeaves, Layout, rules_digest
from replaykit.datasets.engine.locations import RuleFinding, RuleFindings
from replaykit.datasets.engine.plan import Excluded, Plan, column_specs
from replaykit.datasets.engine.table_sources import TableLayout
from replaykit.datasets.publishing import UNFINISHED_NAME
from replaykit.datasets.sources import Sources, sha256_of
from replaykit.declared import Rule, decode_state, encode_state
from replaykit.filesystem import disk_errors
from replaykit.native import crc32
from replaykit.ted import Key


def _converted(build: Callable[[Any], Any], save: Callable[[Any], Any]) -> Rule:
    """Return the rule of a value that is saved in another form, in a line with a checksum."""
    return Rule("any value", lambda value: True, lambda value, path: build(value), save)


def _array_of(said: tuple[str, list[int], str]) -> npt.NDArray[Any]:
    dtype, shape, text = said
    return np.frombuffer(b64decode(text), dtype).reshape(shape)


_Statistics = Annotated[
    Any, _converted(lambda said: Statistics(*said), lambda found: list(astuple(found)))
]
_Notes = Annotated[
    Any,
    _converted(
        lambda said: RuleFindings.of(RuleFinding(*each) for each in said),
        lambda notes: [list(astuple(note)) for note in notes],
    ),
]
_Table = Mapping[
    str,
    Annotated[
        Any,
        _converted(
            _array_of, lambda found: [str(found.dtype), found.shape, b64encode(found).decode()]
        ),
    ],
]


@dataclass
class FilePart:
    """The results of a file whose rows were written.

    ``is_reported`` is True if the progress bar already includes the file.
    """

    UNSAVED: ClassVar = ("dropped", "is_reported")
    index: int
    rows: int
    nbytes: int
    crc32: Mapping[Key, int]
    statistics: Mapping[Key, _Statistics]
    notes: _Notes
    bad: Mapping[int, str]
    facts: Mapping[str, Any]
    table: _Table
    dropped: DropLeaves | None = None
    is_reported: bool = False


@dataclass
class ImagesPart:
    """The results of a column of images in an episode of a table, whose rows were written.

    Attributes:
        index: a number of the episode and the column.
        crc32: the checksum of the column up to the end of the episode.
        digest: the digest of the rows, in hexadecimal digits.
        file: size and checksum of the file of encoded images up to the end of the episode.
    """

    index: int
    crc32: int
    statistics: _Statistics
    digest: str
    file: tuple[int, int] = (0, 0)


Part = TypeVar("Part", FilePart, ImagesPart)


class Unfinished(Generic[Part]):
    """The record of an unfinished conversion, in its directory.

    The constructor reads the record. No record is written before the first part is finished.

    Args:
        directory: the directory of the unfinished data set.
        conversion: the result of `conversion_digest`.
        kind: the class of the parts.

    Cost: the record is read once. No row is read.
    """

    def __init__(self, directory: Path, conversion: str, kind: type[Part]) -> None:
        self._path = directory / UNFINISHED_NAME
        self._conversion = conversion
        self._head: dict[str, Any] = {}
        self.finished: dict[int, Part] = {}
        lines = _read_lines(self._path)
        head = next(lines, {})
        if head.get("conversion") != conversion:
            self.forget()
            return
        self._head = head
        for said in lines:
            self.finished[said["index"]] = decode_state(kind, said, str(self._path))

    @property
    def without(self) -> dict[str, str]:
        """Sources of fields that the interrupted conversion left out, with the reasons."""
        return dict(self._head.get("without", {}))

    @property
    def excluded(self) -> Excluded:
        """Episodes that the interrupted conversion left out, with the reasons."""
        return {tuple(episode): why for episode, why in self._head.get("excluded", ())}

    def is_of(self, plan: str) -> bool:
        """Return whether the record has finished parts of the plan with this digest."""
        return bool(self.finished) and self._head["plan"] == plan

    def begin(self, plan: str, without: Mapping[str, str], excluded: Excluded) -> None:
        """Remove the record, and start one of the plan with this digest."""
        self.forget()
        self._head = {
            "conversion": self._conversion,
            "plan": plan,
            "without": dict(without),
            "excluded": list(excluded.items()),
        }

    def record(self, part: Part) -> None:
        """Append the results of a part whose rows have been written.

        Raises:
            OSError: no space is left. The message names the file.
        """
        if not self._path.exists():
            _append_line(self._path, self._head)
        _append_line(self._path, encode_state(part))

    def forget(self) -> None:
        """Remove the record, because its rows are about to change."""
        self._path.unlink(missing_ok=True)
        self._head, self.finished = {}, {}


def drop_damaged(
    finished: dict[int, FilePart], columns: Mapping[Key, ColumnOutput], plan: Plan
) -> None:
    """Drop files whose rows differ from the record, so that they are written again.

    Args:
        finished: the parts of the record.
        columns: the columns, with the rows that were written to them.
        plan: the plan with which the rows were written.

    Cost: the rows of the finished files are read once, in blocks of 1 MiB.
    """
    for index, spans in plan.spans.by_file().items():
        part, first = finished.get(index), plan.spans[spans[0]].start
        if part is not None and any(
            _crc32(column, first, first + part.rows) != part.crc32[key]
            for key, column in columns.items()
        ):
            del finished[index]


def conversion_digest(
    sources: Sources,
    layout: Layout | TableLayout,
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


def plan_digest(plan: Plan) -> str:
    """Return a digest of the position and source of every row of a plan. Cost: O(E)."""
    digest = hashlib.sha256()
    for leaf in plan.leaves:
        targets = [(target.key, target.offset, target.is_after) for target in leaf.targets]
        kind = (leaf.is_per_episode, leaf.is_padded, leaf.extra, str(leaf.dtype), str(leaf.stored))
        digest.update(repr((leaf.path, leaf.paths, leaf.shape, kind, targets)).encode())
    digest.update(repr(column_specs(plan)).encode())
    digest.update(repr(sorted(plan.spans.by_file().items())).encode())
    for name in ("file", "number", "base", "records", "rows", "start", "is_open", "terminated"):
        digest.update(plan.episodes.column(name).tobytes())
    return digest.hexdigest()


def _crc32(column: ColumnOutput, first: int, stop: int) -> int:
    found = 0
    for _, block in column.blocks(first, stop):
        found = crc32(block, found)
    return found


def _append_line(path: Path, said: Mapping[str, Any]) -> None:
    # The line break comes first, because the last line may be incomplete.
    text = json.dumps(said).encode()
    line = b"\n%08x %s" % (crc32(text), text)
    with disk_errors(path, len(line)), path.open("ab") as file:
        file.write(line)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each line with a valid checksum."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            found, _, text = line.rstrip(b"\n").partition(b" ")
            if text and found == b"%08x" % crc32(text):
                yield json.loads(text)
