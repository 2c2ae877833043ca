"""Keep statistics of columns, and the points from which a conversion resumes."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.places import Note, Notes
from replaykit.native import moments
from replaykit.native.fallback import MOST
from replaykit.ted import Key

__all__ = [
    "Milestone",
    "Statistics",
    "kept_memory",
    "kept_notes",
    "kept_statistics",
    "notes_of",
    "statistics_of",
]

_SCALE: Final = 64
"""Numbers are taken ``2 ** -64`` times as large where their sum would overflow."""


@dataclass
class Statistics:
    """Smallest, largest, mean and standard deviation of all numbers of a column, and its NaNs.

    NaNs count apart; infinities are numbers here. Of complex numbers only the NaNs are counted.
    The mean is kept with the sum of squared
    distances from it, block by block, so that neither overflows nor loses digits where the values
    are far from zero. The result depends on the blocks in its last digits only, and blocks do not
    depend on the number of workers.

    Example:
        >>> import numpy as np
        >>> from replaykit.datasets.engine.statistics import Statistics
        >>> found = Statistics()
        >>> found.add(np.array([1.0, np.nan, 3.0]))
        >>> found.to_json()
        {'min': 1.0, 'max': 3.0, 'mean': 2.0, 'std': 1.0, 'nan': 1}
    """

    count: int = 0
    nan: int = 0
    least: Any = None
    largest: Any = None
    mean: float = 0.0
    squares: float = 0.0

    def add(self, block: npt.NDArray[Any]) -> None:
        """Adds the numbers of a block; O(values), in less than 2 MiB of memory."""
        flat = block.reshape(-1)
        for start in range(0, flat.size, MOST):
            part = flat[start : start + MOST]
            if part.dtype.kind == "c":
                self.nan += int(np.count_nonzero(np.isnan(part)))
            else:
                self._add(part)

    def _add(self, block: npt.NDArray[Any]) -> None:
        if block.dtype.kind == "b":
            count, mean = block.size, float(np.count_nonzero(block) / block.size)
            squares = count * mean * (1 - mean)
            self.merge(Statistics(count, 0, mean == 1.0, mean > 0.0, mean, squares))
            return
        if block.dtype == np.float16:
            block = block.astype(np.float32)
        count, *found = moments(block)
        self.nan += block.size - count
        if count:
            self.merge(Statistics(count, 0, *(found if _is_known(*found) else _scaled(block))))

    def merge(self, other: Statistics) -> None:
        """Adds what another one has seen after this one."""
        self.nan += other.nan
        if not other.count:
            return
        self.least = other.least if self.least is None else min(self.least, other.least)
        self.largest = other.largest if self.largest is None else max(self.largest, other.largest)
        total = self.count + other.count
        apart = other.mean - self.mean
        if math.isfinite(apart * other.count):
            self.mean += apart * other.count / total
        else:
            self.mean = self.mean * (self.count / total) + other.mean * (other.count / total)
        self.squares += other.squares + apart * apart * self.count * other.count / total
        self.count = total

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; ``None`` where there is no finite number."""
        known = self.count > 0
        return {
            "min": _finite(self.least),
            "max": _finite(self.largest),
            "mean": _finite(self.mean) if known else None,
            "std": _finite(math.sqrt(self.squares / self.count)) if known else None,
            "nan": self.nan,
        }


def _is_known(least: Any, largest: Any, mean: float, squares: float) -> bool:
    """Whether the mean is a number, or cannot be, since infinities are among the numbers."""
    return math.isfinite(mean) or not (math.isfinite(least) and math.isfinite(largest))


def _scaled(block: npt.NDArray[Any]) -> tuple[Any, Any, float, float]:
    """Returns the moments of numbers whose sum is beyond the largest float."""
    _, least, largest, mean, squares = moments(np.ldexp(block, -_SCALE))
    return (
        math.ldexp(least, _SCALE),
        math.ldexp(largest, _SCALE),
        math.ldexp(mean, _SCALE),
        squares * 4.0**_SCALE,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
        >>> from replaykit.datasets.engine.statistics import kept_memory
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
