"""Name places in a corpus, collect notes on them, and judge episodes by them."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replaykit.errors import CorpusError

__all__ = ["WHOLE_FILE", "Judge", "NameTable", "Note", "Notes", "Place", "SourcePart", "path_below"]


class NameTable:
    """Texts in order, which take no object each.

    Example:
        >>> from replaykit.datasets.engine.places import NameTable
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
        """Adds a text at the end."""
        self._text += name.encode("utf-8")
        self._ends.append(len(self._text))

    def cut(self, count: int) -> None:
        """Keeps the first ones only."""
        del self._ends[count:]
        del self._text[self._ends[-1] if self._ends else 0 :]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        begin = self._ends[index - 1] if index else 0
        return self._text[begin : self._ends[index]].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))


WHOLE_FILE: Final = "the whole file"
"""Stands in the report for the name of an episode."""


def path_below(group: str, path: str) -> str:
    """Returns the path in a file of what lies below a group; ``""`` is the root."""
    return f"{group}/{path}" if group else path


@dataclass(frozen=True)
class SourcePart:
    """A file of several that are read as one: where its records begin among those of all."""

    start: int
    file: Path
    name: str


@dataclass(frozen=True)
class Place:
    """Where in a corpus something was seen; prints as a user would look for it.

    ``name`` is the path of the file in the corpus, which does not depend on the machine. Where
    several files are read as one, ``parts`` are these, and a record is told by the one it is in.
    """

    file: Path
    name: str
    group: str | None = None
    key: str | None = None
    record: int | None = None
    parts: tuple[SourcePart, ...] = ()

    def at(
        self, *, group: str | None = None, key: str | None = None, record: int | None = None
    ) -> Place:
        """Returns a place inside this one."""
        return Place(self.file, self.name, group or self.group, key or self.key, record, self.parts)

    def __str__(self) -> str:
        return self._below(str(self._part.file), self._part.start)

    @property
    def brief(self) -> str:
        """The place, with the file as the corpus names it."""
        return self._below(self._part.name, self._part.start)

    @property
    def _part(self) -> SourcePart:
        """The file that the record is in."""
        if not self.parts or self.record is None:
            return SourcePart(0, self.file, self.name)
        return self.parts[bisect_right([part.start for part in self.parts], self.record) - 1]

    def _below(self, file: str, start: int) -> str:
        parts = [part for part in (self.group, self.key) if part is not None]
        where = f"{file}: {'/'.join(parts)}" if parts else file
        return where if self.record is None else f"{where}, record {self.record - start}"

    def error(self, what: str, rule: str) -> CorpusError:
        """Returns the error that says what is wrong here and which rule says so."""
        return CorpusError(f"{self}: {what} [{rule}]")


@dataclass
class Note:
    """A finding that stops nothing: the rule, what it is about, how often, and where first.

    A quiet one is only in the manifest, others are also in the warning.

    Attributes:
        name: the part of ``text`` in which it differs from other findings of its kind, such as the
            path of a column.
    """

    rule: str
    text: str
    first: str
    quiet: bool
    count: int = 1
    name: str = ""


class Notes:
    """The findings of one conversion, one `Note` for each rule and text.

    Memory: one entry for each distinct text, however often it is added.
    """

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], Note] = {}

    def add(
        self,
        rule: str,
        text: str,
        place: Place,
        *,
        quiet: bool = False,
        count: int = 1,
        name: str = "",
    ) -> None:
        """Counts a finding, or ``count`` of them; the first place is kept.

        ``name``: the part of ``text`` that names what was found, see `Note`.
        """
        note = self._notes.get((rule, text))
        if note is None:
            self._notes[rule, text] = Note(rule, text, place.brief, quiet, count, name)
        else:
            note.count += count

    @classmethod
    def of(cls, notes: Iterable[Note]) -> Notes:
        """Returns findings that were written down, in their order."""
        found = cls()
        found._notes = {(note.rule, note.text): note for note in notes}
        return found

    def extend(self, other: Notes) -> None:
        """Adds the findings of what was looked at after this."""
        for key, note in other._notes.items():
            known = self._notes.setdefault(key, note)
            if known is not note:
                known.count += note.count

    def __iter__(self) -> Iterator[Note]:
        return iter(self._notes.values())


class Judge:
    """Decides what becomes of an episode that breaks a rule; see `Policies.on_invalid`.

    Attributes:
        bad: why each episode is to be left out, by position.
    """

    def __init__(self, on_invalid: str, notes: Notes) -> None:
        self.bad: dict[int, str] = {}
        self.notes = notes
        self._on_invalid = on_invalid

    @property
    def skips(self) -> bool:
        """Whether bad episodes are left out."""
        return self._on_invalid == "skip"

    def condemn(self, position: int, error: CorpusError) -> None:
        """Notes that an episode cannot be rows.

        Raises:
            CorpusError: the one given, unless bad episodes are left out.
        """
        if not self.skips:
            raise error
        self.bad.setdefault(position, str(error))

    def fail(self, position: int, place: Place, what: str, rule: str) -> None:
        """Notes that values of an episode break a rule.

        Raises:
            CorpusError: if that stops the conversion.
        """
        if self._on_invalid == "keep":
            self.notes.add(rule, f"{what}, and is kept", place)
        else:
            self.condemn(position, place.error(what, rule))
