"""What a corpus declares, so that one engine converts them all.

A `Layout` says which root members of a file are episodes, which dataset of an episode becomes
which TED key and whether it describes the state before or after a step, and why an episode ended.
The engine does the rest: scanning, the common schema, alignment, validation, writing, publishing.

Words: a *record* is one entry of the source arrays, a *row* is one transition. An episode of ``T``
records has ``T - 1`` rows: row ``t`` leads from record ``t`` to record ``t + 1``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from replaykit.datasets.h5 import Member
from replaykit.errors import CorpusError
from replaykit.ted import Key

__all__ = [
    "DropLeaves",
    "Ends",
    "EpisodeRef",
    "Field",
    "Flags",
    "Found",
    "Layout",
    "Note",
    "Notes",
    "Place",
    "Role",
    "Window",
]

Role = Literal["observation", "action", "reward", "end", "time", "info"]
"""What a field means, and so what is checked.

``observation``, ``reward``: finite (V21). ``action``: finite where it is stored (V20). ``end``:
any number, non-zero where the episode has ended; not stored itself, `Layout.flags` turns it into
flags. ``time``: should increase strictly (V27). ``info``: carried, nothing is required of it.
"""


@dataclass(frozen=True)
class Field:
    """One line of a layout: from a dataset of an episode to columns of the table.

    Args:
        source: path of the dataset in its episode; with a closing ``/``, all datasets below that
            group, whose paths are appended to the keys.
        role: see `Role`.
        before: key that takes the value at the record a step starts from, if any.
        after: key that takes the value at the record a step arrives at, if any.
        column: whether a scalar per record is stored as ``[N, 1]`` and not as ``[N]``.
        required: whether every episode must have it, with one shape and dtype. A leaf of a field
            that is not required is left out when some episode lacks it or has it differently.
    """

    source: str
    role: Role
    before: Key | None = None
    after: Key | None = None
    column: bool = False
    required: bool = True

    @property
    def is_group(self) -> bool:
        """Whether the field stands for all datasets below a group."""
        return self.source.endswith("/")


@dataclass(frozen=True)
class Place:
    """Where in a corpus something was seen; prints as a user would look for it.

    ``name`` is the path of the file in the corpus, which does not depend on the machine.
    """

    file: Path
    name: str
    group: str | None = None
    key: str | None = None
    record: int | None = None

    def at(
        self, *, group: str | None = None, key: str | None = None, record: int | None = None
    ) -> Place:
        """Returns a place inside this one."""
        return Place(self.file, self.name, group or self.group, key or self.key, record)

    def __str__(self) -> str:
        return self._below(str(self.file))

    @property
    def brief(self) -> str:
        """The place, with the file as the corpus names it."""
        return self._below(self.name)

    def _below(self, file: str) -> str:
        parts = [part for part in (self.group, self.key) if part is not None]
        where = f"{file}: {'/'.join(parts)}" if parts else file
        return where if self.record is None else f"{where}, record {self.record}"

    def error(self, what: str, rule: str) -> CorpusError:
        """Returns the error that says what is wrong here and which rule says so."""
        return CorpusError(f"{self}: {what} [{rule}]")


@dataclass
class Note:
    """A finding that stops nothing: the rule, what it is about, how often, and where first.

    A quiet one is only in the manifest, others are also in the warning.
    """

    rule: str
    text: str
    first: str
    quiet: bool
    count: int = 1


class Notes:
    """The findings of one conversion, one `Note` for each rule and text.

    Memory: one entry for each distinct text, however often it is added.
    """

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], Note] = {}

    def add(self, rule: str, text: str, place: Place, *, quiet: bool = False) -> None:
        """Counts a finding; the first place is kept."""
        note = self._notes.get((rule, text))
        if note is None:
            self._notes[rule, text] = Note(rule, text, place.brief, quiet)
        else:
            note.count += 1

    def __iter__(self) -> Iterator[Note]:
        return iter(self._notes.values())


@dataclass(frozen=True)
class EpisodeRef:
    """An episode as the layout names it: its group, and its number in the file."""

    group: str
    number: int


@dataclass
class Found:
    """What `Layout.find` sees in a file: the episodes in order, and what is none, with why."""

    episodes: list[EpisodeRef] = field(default_factory=list)
    strangers: list[tuple[str, str]] = field(default_factory=list)
    numbering: str | None = None
    """Says how episodes were numbered where that is not by the number in their names."""


@dataclass(frozen=True)
class Window:
    """The first records of an episode, of the leaves that `Layout.witnesses` named.

    Attributes:
        arrays: path to ``[w, ...]``, ``w <= records``; all of one length.
        records: how many records the episode has.
        place: the episode, for messages.
        notes: takes findings that stop nothing.
        memory: of the layout, kept from episode to episode of one file.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    records: int
    place: Place
    notes: Notes
    memory: dict[str, Any]


@dataclass(frozen=True)
class Ends:
    """What the ``end`` field of an episode says, in two words: it may have millions of records.

    Attributes:
        records: how many records the episode has.
        first: the first record at which it is set, if any.
        last: whether it is set at the last record.
    """

    records: int
    first: int | None
    last: bool


@dataclass(frozen=True)
class Flags:
    """Why an episode ended: the flags of its last row. Those of all other rows are False."""

    terminated: bool
    truncated: bool


class DropLeaves(Exception):
    """Raised by `Layout.examine`: all leaves of a field are unusable in the whole corpus.

    The engine starts over without them and says so. Not an error that users see.
    """

    def __init__(self, source: str, why: str) -> None:
        super().__init__(source, why)
        self.source = source
        self.why = why


class Layout(ABC):
    """The declaration of one corpus family.

    Attributes:
        name: names the layout in messages and manifests.
        version: raised with every change of a rule, so that older conversions are told apart.
        fields: which dataset becomes which key; the engine adds flags, ``episode`` and ``seed``.
        clock: the source path whose length is the number of records of an episode.
    """

    name: str
    version: int
    fields: tuple[Field, ...]
    clock: str

    @abstractmethod
    def find(self, members: Sequence[Member], place: Place) -> Found:
        """Returns the episodes among the root members of a file, in their order.

        Raises:
            CorpusError: the file is of another layout (rule V04).
        """

    @abstractmethod
    def flags(
        self,
        ends: Ends,
        last: Mapping[str, npt.NDArray[Any]],
        place: Place,
        notes: Notes,
    ) -> Flags:
        """Returns why an episode ended; one flag at least is set.

        Args:
            ends: where the ``end`` field is set.
            last: the last record ``[1, ...]`` of every required field.
            place: the episode, for messages.
            notes: takes findings that stop nothing.

        Raises:
            CorpusError: the records break a rule of the corpus.
        """

    def witnesses(self, leaves: Collection[str]) -> tuple[str, ...]:
        """Returns the paths that `examine` wants to see together; none by default."""
        return ()

    def examine(self, window: Window) -> None:
        """Checks leaves against each other, on the first records of an episode.

        Raises:
            CorpusError: the episode breaks a rule of the corpus.
            DropLeaves: a field must be left out of the whole corpus.
        """

    def file_facts(self, memory: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what was learnt of a file, for the manifest; JSON values."""
        return {}

    def hint(self, path: str, shape: tuple[int, ...]) -> str | None:
        """Returns what to do about a leaf of the wrong length, where the corpus knows."""
        return None

    def source_seed(self, name: str) -> int:
        """Returns the seed that the name of a source file tells, or -1."""
        return -1
