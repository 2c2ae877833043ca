"""Locations in a corpus, and findings with their locations."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replaykit.errors import CorpusError


class NameTable:
    """A compact sequence of texts, without a Python object for each text.

    Example:
        >>> from replaykit.datasets.engine.locations import NameTable
        >>> names = NameTable(["demo_0", "", "demo_12"])
        >>> len(names), names[2], list(names)
        (3, 'demo_12', ['demo_0', '', 'demo_12'])
    """

    __slots__ = ("_ends", "_text")

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._text = bytearray()
        self._ends = array("q")
        for name in names:
            self.append(name)

    def append(self, name: str) -> None:
        """Append a text."""
        self._text += name.encode("utf-8")
        self._ends.append(len(self._text))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        begin = self._ends[index - 1] if index else 0
        return self._text[begin : self._ends[index]].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))


WHOLE_FILE: Final = "the whole file"
"""The name in place of an episode, for a report entry about a whole file."""


def path_below(group: str, path: str) -> str:
    """Return the path in a file for a path below a group; ``""`` is the root."""
    return f"{group}/{path}" if group else path


@dataclass(frozen=True)
class SourcePart:
    """One of several files that are read as one. ``start`` is its first record."""

    start: int
    file: Path
    name: str


@dataclass(frozen=True)
class Location:
    """A location in a corpus, whose text names file, group, key and record.

    ``name`` is the path of the file in the corpus, which does not depend on the machine. If several
    files are read as one, ``parts`` lists them. The text of the location then names the file that
    contains the record.
    """

    file: Path
    name: str
    group: str | None = None
    key: str | None = None
    record: int | None = None
    parts: tuple[SourcePart, ...] = ()

    def at(
        self, *, group: str | None = None, key: str | None = None, record: int | None = None
    ) -> Location:
        """Return a location inside this location."""
        return Location(
            self.file, self.name, group or self.group, key or self.key, record, self.parts
        )

    def __str__(self) -> str:
        return self._below(str(self._part.file), self._part.start)

    @property
    def brief(self) -> str:
        """The text of the location, with the file's path in the corpus."""
        return self._below(self._part.name, self._part.start)

    @property
    def _part(self) -> SourcePart:
        """The file that contains the record."""
        if not self.parts or self.record is None:
            return SourcePart(0, self.file, self.name)
        return self.parts[bisect_right([part.start for part in self.parts], self.record) - 1]

    def _below(self, file: str, start: int) -> str:
        parts = [part for part in (self.group, self.key) if part is not None]
        where = f"{file}: {'/'.join(parts)}" if parts else file
        return where if self.record is None else f"{where}, record {self.record - start}"

    def error(self, what: str, rule: str) -> CorpusError:
        """Return an error that names this location, a violation and its rule."""
        return CorpusError(f"{self}: {what} [{rule}]")


@dataclass
class RuleFinding:
    """A finding that does not stop the conversion, with its count and first location.

    A quiet finding is reported only in the manifest. Other findings are also part of the warning.

    Attributes:
        name: the part of ``text`` that differs between findings of one kind, such as the path of a
            column.
    """

    rule: str
    text: str
    first: str
    quiet: bool
    count: int = 1
    name: str = ""


class RuleFindings:
    """The findings of one conversion, one `RuleFinding` for each rule and text.

    Memory: one entry for each distinct text.
    """

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], RuleFinding] = {}

    def add(
        self,
        rule: str,
        text: str,
        location: Location,
        *,
        quiet: bool = False,
        count: int = 1,
        name: str = "",
    ) -> None:
        """Count one finding or ``count`` findings, and store the first location.

        ``name`` is the variable part of ``text``; see `RuleFinding`.
        """
        note = self._notes.get((rule, text))
        if note is None:
            self._notes[rule, text] = RuleFinding(rule, text, location.brief, quiet, count, name)
        else:
            note.count += count

    @classmethod
    def of(cls, notes: Iterable[RuleFinding]) -> RuleFindings:
        """Return the findings from saved entries, in their order."""
        found = cls()
        found._notes = {(note.rule, note.text): note for note in notes}
        return found

    def extend(self, other: RuleFindings) -> None:
        """Add the findings of a later part of the conversion."""
        for key, note in other._notes.items():
            known = self._notes.setdefault(key, note)
            if known is not note:
                known.count += note.count

    def __iter__(self) -> Iterator[RuleFinding]:
        return iter(self._notes.values())
