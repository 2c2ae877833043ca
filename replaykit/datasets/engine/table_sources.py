"""Sources with flat columns of records and ends of episodes, and the rules of their values."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.h5_checks import MOST_CHUNK_BYTES
from replaykit.datasets.engine.layout import ALWAYS
from replaykit.datasets.engine.locations import Location
from replaykit.datasets.engine.policies import Judge, Policies
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError
from replaykit.feeds.trajectory_sources import TrajectorySource
from replaykit.ted import TERMINATED, TRUNCATED, Key

Array = npt.NDArray[Any]
Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class SourceColumn:
    """A column that a source can fill.

    Attributes:
        key: the key of the column in TED. The keys ``("next", "terminated")`` and ``("next",
            "truncated")`` are the ends of episodes. The writer makes all other flags, ``episode``
            and ``seed``.
        shape: the shape of one entry.
        dtype: the dtype in the source.
        source: the name in the source, for messages and the manifest.
        frames: for a column of images that stay encoded, their ``kind`` and ``shape``; see
            `EncodedFrames`. Values of the kind ``"video"`` are references to attached files.
            Values of the kind ``"image"`` are ``bytes`` in an array of objects, which the writer
            puts into one file. Neither are measured or compared.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    source: str
    frames: Mapping[str, Any] | None = None


@dataclass
class TableEpisodes:
    """The episodes of a source, one entry for each of E episodes.

    Attributes:
        lengths: the count of rows, int64 ``[E]``.
        numbers: the number of the episode in its file, int64 ``[E]``. With ``files``, it must be
            unique.
        names: the name of each episode.
        files: the position of the source file, int64 ``[E]``; zeros by default.
        success: 1, 0, or -1 if it is not known, int8 ``[E]``; -1 by default.
        seeds: the seed of the environment's reset, or -1, int64 ``[E]``; -1 by default.
    """

    lengths: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    names: Sequence[str]
    files: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    success: npt.NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, np.int8))
    seeds: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if not len(self.files):
            self.files = np.zeros(len(self.lengths), np.int64)
        if not len(self.success):
            self.success = np.full(len(self.lengths), -1, np.int8)
        if not len(self.seeds):
            self.seeds = np.full(len(self.lengths), -1)


class TableSource(Protocol):
    """Columns of records in order, and the episodes that they belong to.

    A source checks the rules of its format when it is opened. It passes bad episodes to the
    `Judge`, by their positions in ``episodes``. While ``blocks`` reads values, it may find more.

    A source may have an attribute ``slow``: the keys of columns of images that take long to make.
    A block of such a column has rows of one episode. Before ``blocks`` makes the rows of an
    episode, it calls the attribute ``is_stored`` with key and position, which the writer sets. It
    leaves the rows out if the result is True.
    """

    @property
    def columns(self) -> Sequence[SourceColumn]:
        """All columns that the source can fill."""

    @property
    def episodes(self) -> TableEpisodes:
        """The episodes in the order of the source."""

    @property
    def left_out(self) -> Sequence[Mapping[str, str]]:
        """Data that does not become a column: entries with ``key`` and ``why``."""

    @property
    def attached(self) -> Mapping[str, Path]:
        """Files to keep in the data set, by their name in it."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the source for the manifest, as JSON values.

        ``fps`` is the number of rows per second, if it is fixed.
        """

    @property
    def splits(self) -> Mapping[str, Sequence[int]]:
        """Positions of episodes by the name of a split."""

    def location(self, position: int) -> Location:
        """Return the location of an episode."""

    def blocks(
        self, kept: npt.NDArray[np.bool_], keys: Sequence[Key], block_bytes: int
    ) -> Iterator[Mapping[Key, Array]]:
        """Yield the rows of episodes in order, in blocks of some of the columns.

        Each block holds the next rows of one or more columns, as ``[n, *shape]`` in the dtype of
        the column. Columns need not advance together, and blocks may span episodes. The rows of
        an episode that turns out to be bad may have any values, or be missing for images.

        Args:
            kept: the episodes to read, bool ``[E]``.
            keys: the columns to read.
            block_bytes: the size of a block of one column, as a goal.

        Raises:
            CorpusError: a file cannot be read, or breaks a rule. The message names file and rule.
        """


def episode_blocks(
    source: TableSource,
    kept: npt.NDArray[np.bool_],
    keys: Sequence[Key],
    rows_of: Callable[[int], Mapping[Key, Array]],
    judge: Judge,
) -> Iterator[Mapping[Key, Array]]:
    """Yield the rows of one episode after another, and zeros for one that cannot be read."""
    for position in np.flatnonzero(kept).tolist():
        try:
            found = rows_of(position)
        except CorpusError as error:
            judge.condemn(position, error)
            count = int(source.episodes.lengths[position])
            found = {
                column.key: np.zeros((count, *column.shape), column.dtype)
                for column in source.columns
            }
        yield {key: found[key] for key in keys}


class ValueChecks:
    """The rules of values in blocks of rows (V20, V21, V31).

    Args:
        source: the source of the blocks.
        columns: the columns that are read.
        kept: the episodes whose rows are read, bool ``[E]``.
        judge: decides about episodes that break a rule.

    Attributes:
        positions: the positions of the k kept episodes, int64 ``[k]``.
        starts, stops: their first rows and their ends in the blocks, int64 ``[k]``.

    Raises:
        CorpusError: one value of a column has more than 1 GiB (V10).
    """

    def __init__(
        self,
        source: TableSource,
        columns: Sequence[SourceColumn],
        kept: npt.NDArray[np.bool_],
        judge: Judge,
    ) -> None:
        self._source, self._judge = source, judge
        self._names = {column.key: column.source for column in columns}
        self.positions = np.flatnonzero(kept)
        lengths = source.episodes.lengths[self.positions]
        self.stops = lengths.cumsum()
        self.starts = self.stops - lengths
        for column in columns:
            size = math.prod(column.shape) * column.dtype.itemsize
            if size > MOST_CHUNK_BYTES and len(lengths):
                what = f"one value has {size:,} bytes, but at most {MOST_CHUNK_BYTES:,} are read"
                raise self.where(0, column.key).error(what, "V10")

    def check(self, key: Key, values: Array, start: int) -> None:
        """Check rows of a column from ``start`` on."""
        if key in (TERMINATED, TRUNCATED):
            self.check_ends(values.reshape(-1).astype(bool), key, start)
        elif values.dtype.kind in "fc":
            self.check_finite(key, values, start)

    def check_finite(self, key: Key, values: Array, start: int) -> None:
        """Check that the floats of an action, an observation or a reward are finite."""
        role = key[1] if key[0] == "next" and len(key) > 1 else key[0]
        if role in ("action", "observation", "reward"):
            rule = "V20" if role == "action" else "V21"
            wrong = ~np.isfinite(values.reshape(len(values), -1)).all(1)
            self.fail(wrong, start, key, "is not finite", rule)

    def check_ends(
        self, values: npt.NDArray[np.bool_], key: Key, start: int
    ) -> tuple[slice, npt.NDArray[np.int64]]:
        """Check that ends are set in last rows only; return the episodes and rows of these."""
        low, high = np.searchsorted(self.stops - 1, (start, start + len(values)))
        lasts = self.stops[low:high] - 1 - start
        early = values.copy()
        early[lasts] = False
        self.fail(early, start, key, "is set before the end of the episode", "V31")
        return slice(low, high), lasts

    def fail(self, wrong: Any, start: int, key: Key, what: str, rule: str) -> None:
        """Report the first wrong row of each episode."""
        if not wrong.any():
            return
        rows = np.flatnonzero(wrong) + start
        numbers, firsts = np.unique(np.searchsorted(self.stops, rows, "right"), return_index=True)
        for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True):
            where = self.where(number, key, int(rows[first]))
            self._judge.fail(int(self.positions[number]), where, what, rule)

    def where(self, number: int, key: Key = (), row: int | None = None) -> Location:
        """Return the location of a kept episode, a column and a row of the blocks."""
        record = None if row is None else row - int(self.starts[number])
        name = self._names[key] if key else None
        return self._source.location(int(self.positions[number])).at(key=name, record=record)


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """The declaration of files that hold flat columns, for `convert`.

    Attributes:
        name: the name of the layout in messages and manifests.
        version: the version of the rules, which increases with every change.
        suffixes: the suffixes of the files to read in a folder; empty for all files.
        natural_files: True to order numbers in the names of files by their value.
        copies: the treatment of episodes with equal observations and actions; see `Policies`.
    """

    name: str
    version: int
    suffixes: tuple[str, ...] = ()
    natural_files: bool = True
    copies: Literal["keep", "drop"] = "keep"
    has_files: ClassVar[bool] = True

    def open(self, sources: Sources, policies: Policies, judge: Judge) -> TableSource:
        """Return the source that reads some files.

        Raises:
            CorpusError: the files do not have this layout. The message names file and rule.
        """
        raise NotImplementedError(f"expected open() of {type(self).__name__}, got none")

    def recognizes(self, path: Path) -> bool:
        """Return whether a folder or file has this layout, from the names of files."""
        return False

    def repair(self, folder: Path) -> list[str]:
        """Correct entries that follow from the records; return the changes.

        Raises:
            CorpusError: a fault cannot be derived, so nothing was changed.
            ValueError: files of this layout are not repaired.
        """
        raise ValueError(f"{folder}: files of the layout {self.name!r} are not repaired")

    def described_by(self, path: Path) -> tuple[Path, ...]:
        """Return no path, because all files of a table are source files."""
        return ()


def dtype_of(name: Any) -> np.dtype[Any]:
    """Return a dtype of NumPy; that of objects for names that it does not know."""
    try:
        return np.dtype(name)
    except (TypeError, ValueError):
        return np.dtype(object)


def loaded_ahead(
    load: Callable[[Item], Value], items: Iterable[Item]
) -> Iterator[tuple[Item, Future[Value]]]:
    """Yield items with their values, while a thread loads the value of the next item.

    Memory: two values. The future of an item raises the errors of ``load``.
    """
    with ThreadPoolExecutor(1) as thread:
        begun: deque[tuple[Item, Future[Value]]] = deque()
        for item in items:
            begun.append((item, thread.submit(load, item)))
            if len(begun) > 1:
                yield begun.popleft()
        yield from begun


_MADE: Final = frozenset(ALWAYS) - {TERMINATED, TRUNCATED}
"""Keys that the writer makes, so those of the trajectories are left out."""


def _columns_of(rows: Any) -> dict[Key, Array]:
    """Return the columns of a trajectory, as NumPy arrays ``[n, ...]``."""
    found = {}
    for key in rows.keys(True, True):
        path = (key,) if isinstance(key, str) else tuple(key)
        if path not in _MADE:
            found[path] = rows[key].numpy()
    return dict(sorted(found.items()))


def content_of(source: TrajectorySource) -> str:
    """Return the SHA-256 of all rows of a source. Cost: every row is read once."""
    digest = hashlib.sha256()
    for number in range(len(source)):
        for key, values in _columns_of(source.load(number)).items():
            digest.update(f"{key}{values.dtype}{values.shape}".encode())
            digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class TrajectoryLayout(TableLayout):
    """The layout of a `TrajectorySource`, which a conversion reads instead of files."""

    name: str = "trajectories"
    version: int = 1
    has_files: ClassVar[bool] = False
    source: TrajectorySource

    def open(self, sources: Sources, policies: Policies, judge: Judge) -> TableSource:
        return _TrajectoryTable(self.source, judge)


class _TrajectoryTable:
    """The trajectories of a source, whose first one declares the columns."""

    left_out: Sequence[Mapping[str, str]] = ()
    attached: Mapping[str, Path] = {}
    splits: Mapping[str, Sequence[int]] = {}

    def __init__(self, source: TrajectorySource, judge: Judge) -> None:
        self._source = source
        count = len(source)
        self._name = type(source).__name__
        self.facts = {"source": self._name}
        lengths = np.array([source.length(number) for number in range(count)], np.int64)
        names = [f"trajectory_{number}" for number in range(count)]
        self.episodes = TableEpisodes(lengths, np.arange(count), names)
        first = next((each for each in range(count) if lengths[each]), None)
        rows = {} if first is None else _columns_of(source.load(first, stop=1))
        self.columns = [
            SourceColumn(key, values.shape[1:], values.dtype, "/".join(key))
            for key, values in rows.items()
        ]

    def location(self, position: int) -> Location:
        return Location(Path(self._name), self._name, self.episodes.names[position])

    def blocks(
        self, kept: npt.NDArray[np.bool_], keys: Sequence[Key], block_bytes: int
    ) -> Iterator[Mapping[Key, Array]]:
        for number in np.flatnonzero(kept).tolist():
            found = _columns_of(self._source.load(number))
            if found.keys() != {column.key for column in self.columns}:
                names = ["/".join(key) for key in found]
                raise self.location(number).error(f"has the other columns {names}", "V12")
            yield {key: found[key] for key in keys}
