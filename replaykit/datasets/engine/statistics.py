"""Statistics of columns, and milestones from which a conversion resumes."""

from __future__ import annotations

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.locations import RuleFinding, RuleFindings
from replaykit.declared import Rule
from replaykit.native import MOST_MOMENTS, moments
from replaykit.ted import Key

__all__ = [
    "Milestone",
    "Notes",
    "Statistics",
    "StatisticsOf",
    "memory_to_json",
]

_SCALE: Final = 64
"""The exponent of ``2 ** -64``, by which numbers are scaled if a sum would overflow."""


@dataclass
class Statistics:
    """Minimum, maximum, mean, standard deviation and number of NaNs of a column.

    NaNs are counted separately, and infinities count as numbers. For complex numbers, only the NaNs
    are counted. The mean and the sum of squared distances from the mean are updated block by block.
    Therefore these values neither overflow nor lose digits if the numbers are far from zero. Only
    the last digits of the result depend on the blocks. The blocks do not depend on the number of
    workers.

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
        """Add the numbers of a block, in O(values) time and less than 2 MiB of memory."""
        flat = block.reshape(-1)
        for start in range(0, flat.size, MOST_MOMENTS):
            part = flat[start : start + MOST_MOMENTS]
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
        """Add the statistics of the following numbers."""
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
        """Return the statistics as JSON values, with ``None`` if a number is not finite."""
        known = self.count > 0
        return {
            "min": _finite(self.least),
            "max": _finite(self.largest),
            "mean": _finite(self.mean) if known else None,
            "std": _finite(math.sqrt(self.squares / self.count)) if known else None,
            "nan": self.nan,
        }


def _is_known(least: Any, largest: Any, mean: float, squares: float) -> bool:
    """Return whether the mean is finite, or infinite because a number is infinite."""
    return math.isfinite(mean) or not (math.isfinite(least) and math.isfinite(largest))


def _scaled(block: npt.NDArray[Any]) -> tuple[Any, Any, float, float]:
    """Return the moments of numbers whose sum exceeds the largest float."""
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


def memory_to_json(memory: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the memory of a layout as JSON values that distinguish sets from lists.

    Raises:
        TypeError: JSON cannot represent the values.

    Example:
        >>> from replaykit.datasets.engine.statistics import memory_to_json
        >>> memory_to_json({"rewards": {"dense"}, "columns": {"x": 2}})
        {'rewards': ['set', ['dense']], 'columns': ['value', {'x': 2}]}
    """
    found = {
        name: [_SET, sorted(value)] if isinstance(value, set) else [_VALUE, value]
        for name, value in memory.items()
    }
    if not all(_is_plain(value) for _, value in found.values()):
        raise TypeError("expected the memory of the layout to hold sets and JSON values only")
    return found


def _memory_of(said: Mapping[str, Any]) -> dict[str, Any]:
    return {name: set(value) if kind == _SET else value for name, (kind, value) in said.items()}


def _is_plain(value: Any) -> bool:
    """Return whether a value stays unchanged when it is stored as JSON."""
    if type(value) is dict:
        return all(type(name) is str and _is_plain(each) for name, each in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)


def _converted(build: Callable[[Any], Any], save: Callable[[Any], Any]) -> Rule:
    """Return the rule of a value that is saved in another form, in a record with a checksum."""
    return Rule("any value", lambda value: True, lambda value, path: build(value), save)


StatisticsOf = Mapping[
    Key,
    Annotated[Any, _converted(lambda said: Statistics(*said), lambda found: list(astuple(found)))],
]
Notes = Annotated[
    Any,
    _converted(
        lambda said: RuleFindings.of(RuleFinding(*each) for each in said),
        lambda notes: [list(astuple(note)) for note in notes],
    ),
]
_Bytes = Annotated[Any, _converted(b64decode, lambda tail: b64encode(tail).decode())]


@dataclass(frozen=True)
class Milestone:
    """The progress of the conversion of one file, and its results so far.

    Attributes:
        first, stop: the episodes ``first .. stop - 1`` of the plan were written since the preceding
            milestone.
        nbytes: number of bytes of the file that were read.
        columns: number of written bytes in the file's part of each column, and their CRC-32.
        statistics: the statistics of each column so far.
        notes: the findings so far.
        bad: the episodes to leave out so far, with the reasons.
        tails: as in `RowWriter.tails`.
        memory: the information that the layout has stored in ``SourceWindow.memory`` for the file.
        table: the lines of the new episodes in the episode table.
    """

    UNSAVED: ClassVar = ("table",)
    first: int
    stop: int
    nbytes: int
    columns: Mapping[Key, tuple[int, int]]
    statistics: StatisticsOf
    notes: Notes
    bad: Mapping[int, str]
    tails: Mapping[Key, _Bytes]
    memory: Annotated[Any, _converted(_memory_of, memory_to_json)]
    table: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def after(self, earlier: Milestone) -> Milestone:
        """Return this milestone with the table lines of an earlier milestone in front."""
        table = {
            name: np.concatenate([earlier.table[name], lines]) for name, lines in self.table.items()
        }
        return Milestone(**{**self.__dict__, "first": earlier.first, "table": table})
