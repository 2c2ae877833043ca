"""Information about a path, and columns that read its rows in blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from replaykit.datasets.column_statistics import Statistics


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as ``1 episode`` or ``2,000 episodes``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def size(nbytes: int | None) -> str:
    """Return a number of bytes as readable text.

    Example:
        >>> from replaykit.tools.facts import size
        >>> size(999), size(18548952)
        ('999 B', '18.5 MB')
    """
    if nbytes is None:
        return "-"
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def number(value: Any) -> str:
    """Return a number as text with four significant digits; ``-`` for NaN and ``None``."""
    if value is None or value != value:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: a short name of the check.
        ok: whether the check passed.
        text: the error, with its file or key. If the check passed, the amount of checked data.
        is_warning: True if the check failed, but the data still counts as correct.
    """

    check: str
    ok: bool
    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class Spread:
    """Five numbers that describe values.

    Without values, ``total`` is 0 and the other four numbers are NaN.

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
        """Return the spread of numbers ``[E]``. Cost: O(E)."""
        if not values.size:
            return cls(math.nan, math.nan, math.nan, math.nan, 0.0)
        wide = values.astype(np.float64)
        measures = (np.min, np.median, np.mean, np.max, np.sum)
        return cls(*(float(measure(wide)) for measure in measures))


@dataclass(frozen=True)
class KeyFacts:
    """A key, with the shape of its rows and the statistics of its values.

    Attributes:
        key: the parts of the key, joined by ``/``. For an H5 file, the path in the file, in which
            ``*`` replaces the numbers that differ between episodes.
        shape: the shape of one row.
        dtype: NumPy's name of the dtype, or ``-`` if the values are not numbers.
        rows: the number of rows.
        statistics: ``min``, ``max``, ``mean`` and ``std`` of all numbers that are not NaN, and the
            number of NaNs, ``nan``. ``None`` if the values are not numbers.
        looked_at: the count of rows that the statistics cover. It equals ``rows`` if all rows were
            read.
        source: the source of the values, for a converted data set.
        note: a remark about the key.
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
    """The episodes of a data set, a buffer or H5 files.

    Attributes:
        lengths: the number of rows of each episode, ``[E]``.
        ends: the reason why each episode ended, ``[E]``: ``terminated``, ``truncated``, or another
            word.
        returns: the sum of the rewards of each episode, float64 ``[E]``; ``None`` without rewards.
        names: the name of each episode, such as its group; ``None`` if the names are not known.
    """

    lengths: npt.NDArray[np.int64]
    ends: tuple[str, ...]
    returns: npt.NDArray[np.float64] | None = None
    names: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def end_counts(self) -> dict[str, int]:
        """Return the number of episodes for each end, from the most frequent end on."""
        return dict(sorted(Counter(self.ends).items(), key=lambda entry: (-entry[1], entry[0])))

    def summary(self) -> dict[str, Any]:
        """Return counts and spreads of all episodes together."""
        return {
            "count": len(self),
            "lengths": Spread.of(self.lengths),
            "returns": None if self.returns is None else Spread.of(self.returns),
            "ends": self.end_counts(),
        }

    def records(self, most: int) -> list[dict[str, Any]]:
        """Return one entry for each of the first ``most`` episodes."""
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
    """The layout of files, with the reasons for the guess.

    Attributes:
        layout: the name of the layout; ``None`` if no layout fits.
        reasons: the reasons for this layout.
        refused: the reasons against the other layouts, by name.
        problem: a rule that the files break, although they have this layout; or ``None``.
    """

    layout: str | None
    reasons: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Facts:
    """Information about the data at a path.

    Attributes:
        kind: ``corpus``, ``checkpoint``, ``recording``, ``buffer``, ``H5 file`` or ``H5 folder``.
        path: the path, as the caller gave it.
        rows: the number of rows of the table; ``None`` if it is not known.
        nbytes: the total size of the files, in bytes. For a recording, the size of its rows.
        about: further information, by name.
        keys: the keys, in the order of the table.
        episodes: the episodes; ``None`` if they are not known.
        warnings: warnings for the user.
        guess: the guessed layout of H5 files.
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
        """Return JSON values with at most ``episodes`` episodes. NaN becomes ``None``."""
        found: dict[str, Any] = to_json(replace(self, episodes=None))
        if (known := self.episodes) is not None:
            found["episodes"] = to_json({**known.summary(), "first": known.records(episodes)})
        return found


KEY_COLUMNS: Final = ("dtype", "shape", "rows", "min", "mean", "max", "std", "NaN")
"""Headings of the texts that `key_texts` returns."""


def key_texts(key: KeyFacts) -> list[str]:
    """Return the texts that describe a key in a table."""
    found = [key.dtype, "x".join(map(str, key.shape)) or "-", f"{key.rows:,}"]
    if key.statistics is None:
        return found + ["-"] * 5
    values = [key.statistics.get(name) for name in ("min", "mean", "max", "std")]
    return [*found, *map(number, values), f"{key.statistics['nan']:,}"]


def episode_texts(episodes: EpisodeFacts, most: int) -> list[list[str]]:
    """Return number, rows, return, end and name of the first ``most`` episodes as texts."""
    return [
        [str(i), f"{each['length']:,}", number(each["return"]), each["end"], each["name"] or ""]
        for i, each in enumerate(episodes.records(most))
    ]


def details(facts: Facts) -> list[tuple[str, str, list[str]]]:
    """Return name, text and remarks of each entry of ``about``, and of the guessed layout."""
    found: list[tuple[str, str, list[str]]] = [
        (name, str(value), []) for name, value in facts.about.items()
    ]
    if (guess := facts.guess) is not None:
        refused = {} if guess.layout else guess.refused
        reasons = [*guess.reasons, *(f"not {name}: {why}" for name, why in refused.items())]
        found.append(("layout", guess.layout or "none fits", reasons))
    return found


def to_json(value: Any) -> Any:
    """Return a value as JSON values, with dataclasses as objects and NaN as ``None``.

    Example:
        >>> from replaykit.tools.facts import to_json
        >>> to_json({"a": (1, float("nan"))})
        {'a': [1, None]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: to_json(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_json(entry) for name, entry in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return to_json(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


Array = npt.NDArray[Any]

_BLOCK_BYTES: Final = 1 << 20
_MOST_PRIORITIES: Final = 200_000
_RUNS: Final = 64
"""Number of runs of rows in a sample.

Reading single rows of a compressed file would cost as much as reading all rows.
"""


class Column(Protocol):
    """The values of one key."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""

    @property
    def rows(self) -> int:
        """The number of rows."""

    def read(self, start: int, stop: int) -> Array:
        """Return the rows ``start .. stop - 1``, ``[stop - start, *shape]``."""

    def episode(self, number: int, most: int) -> Array:
        """Return all rows of an episode, or ``most`` rows of it at even intervals."""


@dataclass(frozen=True)
class TensorColumn:
    """A column of a tensor, or of an object that can be indexed like a tensor.

    Attributes:
        values: the tensor, ``[N, *shape]``, or ``[N, *lanes, *shape]``.
        rows_of: a function that maps the number of an episode to the indices of its rows, int64
            ``[n]``.
        lanes: the sizes of the lane dimensions.
    """

    values: Any
    rows_of: Callable[[int], Array]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: int
    lanes: tuple[int, ...] = ()

    def read(self, start: int, stop: int) -> Array:
        width = math.prod(self.lanes)
        if not width:
            return np.empty((0, *self.shape), self.dtype)
        first, last = start // width, -(-stop // width)
        block = _numpy(self.values[first:last])
        block = block.reshape(len(block) * width, *self.shape)
        return block[start - first * width : stop - first * width]

    def episode(self, number: int, most: int) -> Array:
        rows = evenly(self.rows_of(number), most)
        if not self.lanes:
            return _numpy(self.values[torch.from_numpy(rows)]).reshape(len(rows), *self.shape)
        found = [self.read(int(row), int(row) + 1) for row in rows]
        return np.concatenate(found) if found else np.empty((0, *self.shape), self.dtype)


def evenly(values: Array, most: int) -> Array:
    """Return all values, or ``most`` of the values at even intervals."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).round().astype(np.int64)]


def _numpy(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.detach().cpu().numpy()


@dataclass(frozen=True)
class Table:
    """Columns of data, with the keys of the actions and the rewards.

    Attributes:
        columns: the columns by key, as in `KeyFacts`.
        episodes: the number of episodes.
        actions, rewards: the keys of actions and of rewards.
        priorities: the priorities of rows at even intervals, as they were set, ``[K]``; ``None``
            without priorities.
        prioritized: the number of rows with a priority.
    """

    columns: Mapping[str, Column] = field(default_factory=dict)
    episodes: int = 0
    actions: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    priorities: Array | None = None
    prioritized: int = 0

    def images(self) -> list[str]:
        """Return the keys of uint8 images ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``.

        Images below ``next`` are left out, because they repeat the other images.
        """
        return [
            key
            for key, column in self.columns.items()
            if column.dtype == np.uint8
            and not any(part.startswith("next") for part in key.split("/"))
            and is_image(column.shape)
        ]


def table_of(
    leaves: Mapping[Any, tuple[Any, Sequence[int], torch.dtype]],
    batch: Sequence[int],
    episodes: int,
    rows_of: Callable[[int], Array],
    priorities: Any = None,
) -> Table:
    """Return rows as a table, without reading them.

    Args:
        leaves: values ``[*batch, *shape]``, shape and dtype by key.
        batch: the number of rows, followed by the sizes of the lane dimensions.
        episodes: the number of episodes.
        rows_of: a function that maps the number of an episode to the indices of its rows, int64
            ``[n]``.
        priorities: the priorities of the rows, ``[N]``, indexed by row.
    """
    columns = {}
    for path, (values, shape, dtype) in leaves.items():
        kind = torch.empty(0, dtype=torch.float32 if dtype == torch.bfloat16 else dtype).numpy()
        columns["/".join(map(str, path)) or "data"] = TensorColumn(
            values, rows_of, tuple(shape), kind.dtype, math.prod(batch), tuple(batch[1:])
        )
    count, shown = 0 if priorities is None else len(priorities), None
    if count:
        at = torch.from_numpy(evenly(np.arange(count), _MOST_PRIORITIES))
        shown = priorities[at].reshape(-1).to(torch.float64).numpy()
    return Table(
        columns,
        episodes,
        tuple(key for key in columns if key.split("/")[0] == "action"),
        tuple(key for key in columns if key == "next/reward"),
        shown,
        count,
    )


def is_image(shape: Sequence[int]) -> bool:
    """Return whether a uint8 row of this shape is shown as an image."""
    if len(shape) == 2:
        return min(shape) >= 8
    if len(shape) != 3 or sorted(shape)[1] < 8:
        return False
    return shape[-1] in (1, 3, 4) or shape[0] in (1, 3, 4)


def blocks(column: Column, most_bytes: int | None) -> Iterator[Array]:
    """Yield the rows of a column in blocks.

    If the column has more than ``most_bytes`` bytes, the blocks cover only runs of rows at even
    intervals.

    Args:
        column: the column.
        most_bytes: the limit of the bytes to read; ``None`` reads all rows.

    Memory: about 1 MiB, or one row.
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


def measured(key: str, column: Column, most_bytes: int | None, note: str | None = None) -> KeyFacts:
    """Return information about a key, with statistics of the rows that `blocks` yields."""
    statistics, rows = Statistics(), 0
    for block in blocks(column, most_bytes):
        statistics.add(block)
        rows += len(block)
    found = statistics.to_json()
    return KeyFacts(key, column.shape, str(column.dtype), column.rows, found, rows, note=note)
