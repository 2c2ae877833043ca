"""Where in a corpus something was seen, and what was found there that stops nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from replaykit.errors import CorpusError

__all__ = ["WHOLE_FILE", "Note", "Notes", "Part", "Place", "path_below"]

WHOLE_FILE: Final = "the whole file"
"""Stands in the report for the name of an episode."""


def path_below(group: str, path: str) -> str:
    """Returns the path in a file of what lies below a group; ``""`` is the root."""
    return f"{group}/{path}" if group else path


@dataclass(frozen=True)
class Part:
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
    parts: tuple[Part, ...] = ()

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
    def _part(self) -> Part:
        """The file that the record is in."""
        if not self.parts or self.record is None:
            return Part(0, self.file, self.name)
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
