"""Represent what is known of a path, and read its rows in blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from replaykit.datasets.engine.statistics import Statistics

__all__ = [
    "Column",
    "EpisodeFacts",
    "Facts",
    "Finding",
    "KeyFacts",
    "LayoutGuess",
    "Spread",
    "Table",
    "TensorColumn",
    "blocks",
    "counted",
    "evenly",
    "measure",
    "to_json",
]


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as ``1 episode`` or ``2,000 episodes``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        check: what it is, in a few words.
        ok: whether it holds.
        text: of one that does not hold: what is wrong, with the file or key; else how much was
            looked at.
        is_warning: it does not hold, but nothing is wrong with the data as it was written.
    """

    check: str
    ok: bool
    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class Spread:
    """Five numbers that say how values are spread; all NaN where there is none.

    Example:
        >>> import numpy as np
        >>> from replaykit.inspection import Spread
        >>> Spread.of(np.array([1, 2, 6]))
        Spread(min=1.0, median=2.0, mean=3.0, max=6.0, total=9.0)
    """

    min: float
    median: float
    mean: float
    max: float
    total: float

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Spread:
        """Takes numbers ``[E]``; O(E)."""
        if not values.size:
            return cls(math.nan, math.nan, math.nan, math.nan, 0.0)
        wide = values.astype(np.float64)
        return cls(
            float(wide.min()),
            float(np.median(wide)),
            float(wide.mean()),
            float(wide.max()),
            float(wide.sum()),
        )


@dataclass(frozen=True)
class KeyFacts:
    """A key: what one row of it is, and what its values are.

    Attributes:
        key: its parts with ``/`` between them; of an H5 file the path, with ``*`` for what differs
            between episodes.
        shape: of one row.
        dtype: NumPy's name of it, or what the values are where they are no numbers.
        rows: how many there are.
        statistics: ``min``, ``max``, ``mean``, ``std`` over all numbers that are not NaN, and the
            number of NaNs, ``nan``; ``None`` where there are no numbers.
        looked_at: of how many rows; ``rows`` where the statistics are those of all values.
        source: where it comes from, if from elsewhere.
        note: what is to be known of it.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    rows: int
    statistics: Mapping[str, Any] | None = None
    looked_at: int = 0
    source: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class EpisodeFacts:
    """The episodes.

    Attributes:
        lengths: rows of each, ``[E]``.
        ends: why each ended: ``terminated``, ``truncated``, or another word, ``[E]``.
        returns: sum of the rewards of each, float64 ``[E]``; ``None`` where there are none.
        names: where each lies, such as its group; ``None`` where that is not known.
    """

    lengths: npt.NDArray[np.int64]
    ends: tuple[str, ...]
    returns: npt.NDArray[np.float64] | None = None
    names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def end_counts(self) -> dict[str, int]:
        """Returns how many episodes ended for each reason, the most frequent first."""
        found: dict[str, int] = {}
        for end in self.ends:
            found[end] = found.get(end, 0) + 1
        return dict(sorted(found.items(), key=lambda entry: (-entry[1], entry[0])))

    def summary(self) -> dict[str, Any]:
        """Returns counts and spreads, without the single episodes."""
        return {
            "count": len(self),
            "lengths": Spread.of(self.lengths),
            "returns": None if self.returns is None else Spread.of(self.returns),
            "ends": self.end_counts(),
        }

    def records(self, most: int) -> list[dict[str, Any]]:
        """Returns what is known of the first episodes, one entry each."""
        return [
            {
                "name": None if self.names is None else self.names[i],
                "length": int(self.lengths[i]),
                "return": None if self.returns is None else float(self.returns[i]),
                "end": self.ends[i],
            }
            for i in range(min(most, len(self)))
        ]


@dataclass(frozen=True)
class LayoutGuess:
    """Which layout files are of, and why.

    Attributes:
        layout: its name; ``None`` where none fits.
        reasons: why that one.
        refused: why not the others, by name.
        problem: what is wrong with the files though they are of that layout.
    """

    layout: str | None
    reasons: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of a path.

    Attributes:
        kind: ``corpus``, ``checkpoint``, ``buffer``, ``H5 file`` or ``H5 folder``.
        path: as it was given.
        rows: of the table; ``None`` where there is none.
        nbytes: that the files take.
        about: further facts, by name.
        keys: in the order of the table.
        episodes: ``None`` where nothing is known of them.
        warnings: what a user should know.
        guess: of an H5 file, its layout.
    """

    kind: str
    path: str
    rows: int | None
    nbytes: int
    about: Mapping[str, Any]
    keys: tuple[KeyFacts, ...]
    episodes: EpisodeFacts | None
    warnings: tuple[str, ...] = ()
    guess: LayoutGuess | None = None

    def to_json(self, *, episodes: int = 20) -> dict[str, Any]:
        """Returns JSON values, with no more single episodes than asked for; NaN is ``None``."""
        found = to_json(
            {
                name.name: getattr(self, name.name)
                for name in fields(self)
                if name.name != "episodes"
            }
        )
        assert isinstance(found, dict)
        found["episodes"] = None
        if self.episodes is not None:
            first = to_json(self.episodes.records(episodes))
            found["episodes"] = {**to_json(self.episodes.summary()), "first": first}
        return found


def to_json(value: Any) -> Any:
    """Returns a value as JSON has it: dataclasses as objects, what is not finite as ``None``.

    Example:
        >>> from replaykit.inspection.facts import to_json
        >>> to_json({"a": (1, float("nan"))})
        {'a': [1, None]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: to_json(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_json(entry) for name, entry in value.items()}
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(entry) for entry in value]
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


Array = npt.NDArray[Any]

_BLOCK_BYTES: Final = 1 << 20
_RUNS: Final = 64
"""Into how many runs of rows a sample is divided: reading single ones of a compressed file costs
as much as reading all of it."""


class Column(Protocol):
    """The values of one key."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""

    @property
    def rows(self) -> int:
        """How many there are."""

    def read(self, start: int, stop: int) -> Array:
        """Returns the rows ``start .. stop - 1``, ``[stop - start, *shape]``."""

    def episode(self, number: int, most: int) -> Array:
        """Returns rows of an episode, in order: all, or so many that lie evenly in it."""


@dataclass(frozen=True)
class TensorColumn:
    """A column over a tensor, or over what gives tensors for slices and indices.

    Attributes:
        values: ``[N, *shape]``.
        rows_of: the rows of an episode by its number, int64 ``[n]``.
        lanes: how many of the dimensions are those of rows, as one is.
    """

    values: Any
    rows_of: Callable[[int], Array]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: int
    lanes: tuple[int, ...] = ()

    def read(self, start: int, stop: int) -> Array:
        width = math.prod(self.lanes)
        if width == 1:
            return _numpy(self.values[start:stop]).reshape(-1, *self.shape)
        if not width:
            return np.empty((0, *self.shape), self.dtype)
        first, last = start // width, -(-stop // width)
        block = _numpy(self.values[first:last]).reshape(-1, *self.shape)
        return block[start - first * width : stop - first * width]

    def episode(self, number: int, most: int) -> Array:
        rows = evenly(self.rows_of(number), most)
        width = math.prod(self.lanes)
        if width == 1:
            return _numpy(self.values[torch.from_numpy(rows)]).reshape(-1, *self.shape)
        found = [self.read(int(row), int(row) + 1) for row in rows]
        return np.concatenate(found) if found else np.empty((0, *self.shape), self.dtype)


def evenly(values: Array, most: int) -> Array:
    """Returns all values, or so many of them that lie evenly."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).round().astype(np.int64)]


def _numpy(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.detach().cpu().numpy()


@dataclass(frozen=True)
class Table:
    """Columns and what they mean.

    Attributes:
        columns: by key, as in `KeyFacts`.
        episodes: how many there are.
        actions, rewards: the keys that hold them.
        priorities: of rows that lie evenly, as they were set, ``[K]``; ``None`` where there are
            none.
        prioritized: how many rows have one.
    """

    columns: Mapping[str, Column] = field(default_factory=dict)
    episodes: int = 0
    actions: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    priorities: Array | None = None
    prioritized: int = 0

    def images(self) -> list[str]:
        """Returns the keys of images: uint8 of ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``.

        Those of the states that rows arrive at are the same ones, and are left out.
        """
        return [
            key
            for key, column in self.columns.items()
            if column.dtype == np.uint8
            and not any(part.startswith("next") for part in key.split("/"))
            and is_image(column.shape)
        ]


def is_image(shape: Sequence[int]) -> bool:
    """Whether uint8 of such a shape is taken for an image."""
    if len(shape) == 2:
        return min(shape) >= 8
    if len(shape) != 3 or sorted(shape)[1] < 8:
        return False
    return shape[-1] in (1, 3, 4) or shape[0] in (1, 3, 4)


def blocks(column: Column, most_bytes: int | None) -> Iterator[Array]:
    """Yields all rows of a column in blocks, or of a large one those that lie evenly in it.

    Args:
        most_bytes: how much is read at most; ``None``: all. Memory: about 1 MiB, or one row.
    """
    row_bytes = max(1, math.prod(column.shape) * column.dtype.itemsize)
    step = max(1, _BLOCK_BYTES // row_bytes)
    if most_bytes is None or column.rows * row_bytes <= most_bytes:
        for start in range(0, column.rows, step):
            yield column.read(start, min(start + step, column.rows))
        return
    wanted = max(1, most_bytes // row_bytes)
    runs = min(_RUNS, wanted)
    length = max(1, wanted // runs)
    for start in np.linspace(0, column.rows - length, runs).astype(np.int64).tolist():
        for begin in range(start, start + length, step):
            yield column.read(begin, min(begin + step, start + length))


def measure(column: Column, most_bytes: int | None) -> tuple[dict[str, Any], int]:
    """Returns the statistics of a column, and of how many rows they are; see `blocks`."""
    statistics, rows = Statistics(), 0
    for block in blocks(column, most_bytes):
        statistics.add(block)
        rows += len(block)
    return statistics.to_json(), rows
