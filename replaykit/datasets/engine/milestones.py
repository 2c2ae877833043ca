"""How far the rows of one file have come, so that a file of hours need not be begun again.

A milestone is all that the rest of a file is written from: how far each column is and its checksum,
statistics, findings, what the layout has learnt, and the lines of the episodes since the one
before. It is restored to the bit, so that what follows is what would have followed.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.places import Note, Notes
from replaykit.datasets.engine.statistics import Statistics
from replaykit.ted import Key

__all__ = ["Milestone", "kept_memory", "kept_notes", "kept_statistics", "notes_of", "statistics_of"]

_SET = "set"
_VALUE = "value"


@dataclass(frozen=True)
class Milestone:
    """What is known of a file of which some episodes were written.

    Attributes:
        first, stop: the episodes ``first .. stop - 1`` of the plan were written since the
            milestone before.
        nbytes: how many bytes of the file were read.
        columns: how many bytes of its part of each column are there, and their CRC-32.
        statistics: of each column, so far.
        notes: the findings so far.
        bad: the episodes that are to be left out so far, and why.
        tails: as `RowWriter.tails`.
        memory: of the layout.
        table: the lines of the episodes.
    """

    first: int
    stop: int
    nbytes: int
    columns: Mapping[Key, tuple[int, int]]
    statistics: Mapping[Key, Statistics]
    notes: Notes
    bad: Mapping[int, str]
    tails: Mapping[Key, bytes]
    memory: Mapping[str, Any]
    table: Mapping[str, npt.NDArray[Any]]

    def to_json(self) -> dict[str, Any]:
        """Returns all but the table as JSON values; the columns by their order.

        Raises:
            TypeError: the layout has learnt what JSON values do not give back.
        """
        keys = list(self.columns)
        return {
            "first": self.first,
            "stop": self.stop,
            "nbytes": self.nbytes,
            "columns": [list(each) for each in self.columns.values()],
            "statistics": kept_statistics(self.statistics),
            "notes": kept_notes(self.notes),
            "bad": [list(each) for each in self.bad.items()],
            "tails": [[keys.index(key), b64encode(tail).decode()]
                      for key, tail in self.tails.items()],
            "memory": kept_memory(self.memory),
        }  # fmt: skip

    @classmethod
    def of(
        cls, said: Mapping[str, Any], keys: list[Key], table: Mapping[str, npt.NDArray[Any]]
    ) -> Milestone:
        """Returns what was written down."""
        return cls(
            said["first"],
            said["stop"],
            said["nbytes"],
            dict(zip(keys, ((nbytes, crc32) for nbytes, crc32 in said["columns"]), strict=True)),
            statistics_of(said["statistics"], keys),
            notes_of(said["notes"]),
            dict(said["bad"]),
            {keys[at]: b64decode(text) for at, text in said["tails"]},
            _memory_of(said["memory"]),
            table,
        )

    def after(self, earlier: Milestone) -> Milestone:
        """Returns this one with the lines of the one before it."""
        table = {
            name: np.concatenate([earlier.table[name], lines]) for name, lines in self.table.items()
        }
        return Milestone(**{**self.__dict__, "first": earlier.first, "table": table})


def kept_statistics(found: Mapping[Key, Statistics]) -> list[list[Any]]:
    """Returns statistics as JSON values, by the order of the columns."""
    return [
        [each.count, each.nan, each.least, each.largest, each.mean, each.squares]
        for each in found.values()
    ]


def statistics_of(said: list[list[Any]], keys: list[Key]) -> dict[Key, Statistics]:
    """Returns statistics that were written down."""
    return dict(zip(keys, (Statistics(*each) for each in said), strict=True))


def kept_notes(notes: Notes) -> list[list[Any]]:
    """Returns findings as JSON values."""
    return [list(astuple(note)) for note in notes]


def notes_of(said: list[list[Any]]) -> Notes:
    """Returns findings that were written down."""
    return Notes.of(Note(*each) for each in said)


def kept_memory(memory: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns what a layout has learnt as JSON values; sets are told from lists.

    Raises:
        TypeError: JSON values would not give it back.

    Example:
        >>> from replaykit.datasets.engine.milestones import kept_memory
        >>> kept_memory({"rewards": {"dense"}, "columns": {"x": 2}})
        {'rewards': ['set', ['dense']], 'columns': ['value', {'x': 2}]}
    """
    found = {
        name: [_SET, sorted(value)] if isinstance(value, set) else [_VALUE, value]
        for name, value in memory.items()
    }
    if not all(_is_plain(value) for _, value in found.values()):
        raise TypeError("what the layout has learnt is not made of JSON values")
    return found


def _memory_of(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: set(value) if kind == _SET else value for name, (kind, value) in said.items()}


def _is_plain(value: Any) -> bool:
    """Whether JSON gives a value back as it is."""
    if type(value) is dict:
        return all(type(name) is str and _is_plain(each) for name, each in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
