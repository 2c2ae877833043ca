"""The plan of a data set: episodes, columns, and the position of every row."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from replaykit.datasets.column_files import ColumnSpec, torch_dtype
from replaykit.datasets.engine.episode_finders import natural_key
from replaykit.datasets.engine.fields import Decoder, Role, Target
from replaykit.datasets.engine.h5_values import Held
from replaykit.datasets.engine.layout import Bounds, Layout, SourceFacts
from replaykit.datasets.engine.locations import Location, NameTable
from replaykit.datasets.engine.table_sources import TableLayout
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError
from replaykit.ted import DEFAULT_DONE_KEYS, Key

Index = npt.NDArray[np.int64]

_TOGETHER: Final = 1 << 12
"""Number of episodes that an iteration converts to objects at once."""


Excluded = dict[tuple[Any, ...], str]
"""Reasons to leave out episodes, by file, group and first record."""


class SourceEpisode(NamedTuple):
    """An episode that gives rows ``start .. start + rows - 1``.

    Attributes:
        file: position of the file in which the episode begins.
        group: the group of its arrays; ``""`` for the root.
        number: the number of the episode in its file.
        base: the first record of the episode in these arrays.
        records: number of records of the clock.
        rows: number of rows.
        start: the first row.
        is_open: True if the state after the last row was not recorded.
        is_whole: True if the arrays contain only this episode.
        facts: the information that does not come from the arrays.
        within: if several files are read as one, the first record of the file in the joined arrays.
    """

    file: int
    group: str
    number: int
    base: int
    records: int
    rows: int
    start: int
    is_open: bool
    is_whole: bool
    facts: SourceFacts
    within: int = 0

    @property
    def name(self) -> str:
        """The name of the group, or of the range of records."""
        if self.is_whole:
            return self.group or "/"
        first = self.base - self.within
        return self.named(self.group, first, first + self.records)

    @staticmethod
    def named(group: str, first: int, stop: int) -> str:
        """Return the name of the episode of records ``first .. stop - 1`` of a group."""
        return f"{group}[{first}:{stop}]"


@dataclass(frozen=True, slots=True)
class EpisodeSpan:
    """Arrays of one length that hold one or more episodes: a group, or a flat file.

    Attributes:
        file: position of the file, or of the first file if several are read as one.
        group: the group of the arrays; ``""`` for the root.
        records: length of the clock.
        first, stop: the positions of the episodes in the plan are ``first .. stop - 1``.
        start: the first row.
        rows: number of rows of the episodes.
        leaves: paths of the leaves that exist.
        form: a number that is equal for spans that declare the same leaves, shapes and dtypes.
        base: first record of the span, if it is a part of the arrays.
    """

    file: int
    group: str
    records: int
    first: int
    stop: int
    start: int
    rows: int
    leaves: frozenset[str]
    form: int
    base: int = 0


class Spans:
    """Spans in order, whose episodes and rows have no gaps."""

    def __init__(self) -> None:
        self.groups = NameTable()
        self._files = array("i")
        self._records = array("q")
        self._firsts = array("q")
        self._starts = array("q")
        self._kinds = array("i")
        self._known: dict[tuple[int, frozenset[str]], int] = {}
        self._kinds_of: list[tuple[int, frozenset[str]]] = []
        self._stop = 0
        self.rows = 0

    def append(self, span: EpisodeSpan) -> None:
        """Append a span, whose episodes and rows continue the last span."""
        kind = self._known.setdefault((span.form, span.leaves), len(self._kinds_of))
        if kind == len(self._kinds_of):
            self._kinds_of.append((span.form, span.leaves))
        self.groups.append(span.group)
        self._files.append(span.file)
        self._records.append(span.records)
        self._firsts.append(span.first)
        self._starts.append(span.start)
        self._kinds.append(kind)
        self._stop = span.stop
        self.rows = span.start + span.rows

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> EpisodeSpan:
        is_last = index + 1 == len(self._files)
        start, form = self._starts[index], self._kinds_of[self._kinds[index]]
        return EpisodeSpan(
            self._files[index],
            self.groups[index],
            self._records[index],
            self._firsts[index],
            self._stop if is_last else self._firsts[index + 1],
            start,
            (self.rows if is_last else self._starts[index + 1]) - start,
            form[1],
            form[0],
        )

    def __iter__(self) -> Iterator[EpisodeSpan]:
        return self.within(range(len(self)))

    def within(self, which: range) -> Iterator[EpisodeSpan]:
        """Yield the spans at a range of positions."""
        return (self[index] for index in which)

    def of_episode(self, position: int) -> int:
        """Return the position of the span that contains an episode."""
        return bisect_right(self._firsts, position) - 1

    def by_file(self) -> dict[int, range]:
        """Return the positions of the spans of each file, by file position."""
        files = np.asarray(self._files)
        begins = np.flatnonzero(np.diff(files, prepend=-1)).tolist()
        stops = [*begins[1:], len(files)]
        return {int(files[a]): range(a, b) for a, b in zip(begins, stops, strict=True)}

    @property
    def records(self) -> int:
        """The total number of records of the spans."""
        return int(np.asarray(self._records).sum())


_EPISODE: Final = np.dtype(
    [
        ("number", np.int64),
        ("base", np.int64),
        ("records", np.int64),
        ("rows", np.int64),
        ("start", np.int64),
        ("source_seed", np.int64),
        ("file", np.int32),
        ("success", np.int8),
        ("terminated", np.int8),
        ("is_open", np.bool_),
    ],
    align=True,
)
"""The stored values of a `SourceEpisode` and its facts."""
_UNKNOWN: Final = -1
"""The value that represents ``None`` in the column ``terminated``."""


class SourceEpisodes:
    """The episodes of a plan, in order, as one NumPy record each.

    `column` returns a column. Access by position or iteration creates `SourceEpisode` objects.

    Args:
        spans: the spans that contain the episodes.
        is_whole: whether each episode has separate arrays.
    """

    def __init__(self, spans: Spans, *, is_whole: bool) -> None:
        self.spans = spans
        self.is_whole = is_whole
        self._values = bytearray()
        # The key is the file. The dictionary is almost always empty.
        self._within: dict[int, int] = {}

    def append(self, episode: SourceEpisode) -> None:
        """Append an episode, before its span is appended."""
        values = {**episode._asdict(), **vars(episode.facts)}
        if values["terminated"] is None:
            values["terminated"] = _UNKNOWN
        self.extend(values, {episode.file: episode.within})

    def extend(self, columns: Mapping[str, Any], within: Mapping[int, int]) -> None:
        """Append episodes, before their span is appended.

        Args:
            columns: the values of each `column`, or one value for all episodes.
            within: the first record of each file in its arrays, by file.
        """
        added = np.empty(np.size(columns["file"]), _EPISODE)
        for name in _EPISODE.names or ():
            added[name] = columns[name]
        self._values += added.tobytes()
        self._within.update({file: start for file, start in within.items() if start})

    def cut(self, count: int) -> None:
        """Remove all episodes but the first ``count``."""
        del self._values[count * _EPISODE.itemsize :]

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of all episodes, ``[E]``, without a copy.

        ``terminated`` has the values from `SourceFacts`, with -1 for ``None``. No episode can be
        added while the array is in use.
        """
        return np.frombuffer(self._values, _EPISODE)[name]

    def __len__(self) -> int:
        return len(self._values) // _EPISODE.itemsize

    def __getitem__(self, position: int) -> SourceEpisode:
        at = range(len(self))[position]
        record = np.frombuffer(self._values, _EPISODE)[at].item()
        values = dict(zip(_EPISODE.names or (), record, strict=True))
        seed, success = values.pop("source_seed"), values.pop("success")
        said = values.pop("terminated")
        return SourceEpisode(
            group=self.spans.groups[self.spans.of_episode(at)],
            is_whole=self.is_whole,
            facts=SourceFacts(seed, success, None if said == _UNKNOWN else bool(said)),
            within=self._within.get(values["file"], 0),
            **values,
        )

    def __iter__(self) -> Iterator[SourceEpisode]:
        return (self[position] for position in range(len(self)))

    def names(self) -> Iterator[str]:
        """Yield the names of the episodes."""
        if self.is_whole:
            yield from (name or "/" for name in self.spans.groups)
            return
        for span in self.spans:
            for begin in range(span.first, span.stop, _TOGETHER):
                some = slice(begin, min(begin + _TOGETHER, span.stop))
                firsts, counts = self.column("base")[some], self.column("records")[some]
                if self._within:
                    files = self.column("file")[some].tolist()
                    firsts = firsts - [self._within.get(file, 0) for file in files]
                for first, stop in zip(firsts.tolist(), (firsts + counts).tolist(), strict=True):
                    yield SourceEpisode.named(span.group, first, stop)


@dataclass(frozen=True)
class PlannedLeaf:
    """A dataset that all episodes have, with the columns that it fills.

    Attributes:
        path: the name of the leaf in messages.
        paths: the datasets whose values are joined; usually one dataset.
        role: the role of the field.
        shape: the shape of one record.
        dtype: the dtype of the source.
        stored: the dtype of the columns.
        targets: the columns.
        extra: count of records of the leaf minus count of records of the clock.
        is_per_episode: True if the leaf has one value for all records of an episode.
        is_padded: True if some episodes lack the leaf, so that their rows are padded.
        is_successor: True if the leaf has the states after the steps.
        decoder: converts the values of the dataset to numbers; ``None`` if they are numbers.
        bounds: smallest and largest value, each a number or one number for each value of a record.
        field: position of the field in the layout.
    """

    path: str
    paths: tuple[str, ...]
    role: Role
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    targets: tuple[Target, ...]
    extra: int = 0
    is_per_episode: bool = False
    is_padded: bool = False
    is_successor: bool = False
    decoder: Decoder | None = None
    bounds: Bounds | None = None
    field: int = 0

    @property
    def is_unwanted(self) -> bool:
        """True if the leaf fills no column and is not needed otherwise.

        The episode table needs ends and rewards. Layouts need the last action to determine how an
        episode ended.
        """
        needed = ("terminated", "truncated", "reward", "action")
        return not self.targets and self.role not in needed

    @property
    def record_bytes(self) -> int:
        """Size of one record, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


Entry = dict[str, str]
"""An entry of a report, which names a thing and has the reason for it under ``why``."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rows of a data set, before they are written.

    Memory: 56 bytes for each episode, and about 50 bytes for each group.

    Attributes:
        layout: the layout that the files resolved to.
        leaves: the datasets, and the columns that they fill.
        facts: the facts of each column for the manifest, by key.
        episodes, spans: the episodes, and the arrays that contain them.
        location: returns the location of an episode, by its position.
        first: the first file, as the location of findings about all files.
        detects_copies: True if copies of episodes can be recognized by their equal content.
        left_out: ``key`` and ``why`` of leaves that fill no column.
        skipped: ``file``, ``name`` and ``why`` of episodes without rows, and of entries that are
            not episodes.
        numbering: ``file`` and ``why`` of files whose episodes have other numbers than their names.
        splits: the positions of episodes, by name.
    """

    layout: Layout | TableLayout
    leaves: Sequence[PlannedLeaf]
    facts: Mapping[Key, Mapping[str, Any]]
    episodes: SourceEpisodes
    spans: Spans
    location: Callable[[int], Location]
    first: Location
    detects_copies: bool
    left_out: Sequence[Entry]
    skipped: Sequence[Entry] = ()
    numbering: Sequence[Entry] = ()
    splits: Mapping[str, Sequence[int]]

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return self.spans.rows

    @property
    def source_bytes(self) -> int:
        """The uncompressed size of the episodes, in bytes."""
        width = sum(leaf.record_bytes for leaf in self.leaves if not leaf.is_unwanted)
        return width * self.spans.records

    @cached_property  # each part of each file asks
    def has_unrecorded(self) -> bool:
        """True if the next observation of at least one row was not recorded."""
        return bool(self.episodes.column("is_open").any())


@dataclass(frozen=True, kw_only=True)
class H5Plan(Plan):
    """The plan of a data set of H5 files.

    Attributes:
        about: the descriptions in the files, by position of the file.
        units: the files that are read as one, by the position of the first.
        held: values of small datasets that were read during the scan.
    """

    layout: Layout
    about: Mapping[int, Mapping[str, Any]]
    units: Mapping[int, tuple[int, ...]]
    held: Held


OBSERVED_KEY: Final[Key] = ("next", "observed")
"""The key of a flag that is False on rows whose next state was not recorded.

The column exists only if there are such rows.
"""


def presence_key(target: Key) -> Key:
    """Return the key of the flag that separates values of a column from padding."""
    return ("present", *(target[1:] if target[0] == "next" else target))


def column_specs(plan: Plan) -> list[ColumnSpec]:
    """Return the columns of a plan: first the columns of leaves, then flags and ids.

    Raises:
        TypeError: torch has no dtype for a leaf.
        CorpusError: two fields fill the same column, or one fills a column below the other's
            column.
    """
    specs: dict[Key, ColumnSpec] = {}
    sources: dict[Key, str] = {}

    def add(
        key: Key, shape: tuple[int, ...], dtype: torch.dtype, source: str = "the engine"
    ) -> None:
        if key in specs:
            raise plan.first.error(
                f"layout {plan.layout.name!r}: two of its fields fill the column {key}: "
                f"{sources[key]} and {source}",
                "V10",
            )
        specs[key], sources[key] = ColumnSpec(key, shape, dtype), source

    for leaf in plan.leaves:
        for target in leaf.targets:
            add(target.key, leaf.shape, torch_dtype(leaf.stored), repr(leaf.path))
    for key in presence(plan):
        add(key, (), torch.bool)
    for name in DEFAULT_DONE_KEYS:
        add((name,), (1,), torch.bool)
        add(("next", name), (1,), torch.bool)
    if plan.has_unrecorded:
        add(OBSERVED_KEY, (1,), torch.bool)
    for name in ("episode", "seed"):
        add((name,), (), torch.int64)
    for key in specs:
        above = next((key[:size] for size in range(1, len(key)) if key[:size] in specs), None)
        if above is not None:
            raise plan.first.error(
                f"layout {plan.layout.name!r}: {sources[above]} fills the column {above}, and "
                f"{sources[key]} the column {key} below it; give one of them another key",
                "V10",
            )
    return list(specs.values())


def presence(plan: Plan) -> dict[Key, PlannedLeaf]:
    """Return the columns that mark which rows have a leaf that some episodes lack."""
    return {
        presence_key(target.key): leaf
        for leaf in plan.leaves
        if leaf.is_padded
        for target in leaf.targets
    }


_DIGITS: Final = "0123456789"


def check_plan(plan: H5Plan, sources: Sources) -> None:
    """Check the count of rows of every episode, and the order of the groups.

    Cost: O(E), about 0.5 us for each group.

    Raises:
        CorpusError: the groups of a file are not in natural order (rule V35). The message names two
            of them.
        RuntimeError: the rows of episodes differ from the rows that the layout requires, or have
            gaps (rule V34). This is a fault of the engine or of a finder.
    """
    for index, spans in plan.spans.by_file().items():
        groups = (plan.spans.groups[at] for at in spans)
        for group, following in pairwise(groups):
            if not _comes_after(group, following):
                raise CorpusError(
                    f"{sources.files[index].path}: {following}: comes after {group}, but the "
                    "episodes of a file are in natural order of their names [V35]"
                )
    episodes = plan.episodes
    records, rows, starts = (episodes.column(name) for name in ("records", "rows", "start"))
    law = records - plan.layout.lost + episodes.column("is_open")
    wrong = (rows != law) | (rows < 1) | (starts != np.cumsum(rows) - rows)
    if wrong.any() or int(rows.sum()) != plan.rows:
        at = int(np.argmax(wrong)) if wrong.any() else len(episodes) - 1
        found = episodes[at]
        raise RuntimeError(
            f"{sources.files[found.file].path}: {found.name}: {found.records} records are rows "
            f"{found.start} to {found.start + found.rows - 1} of {plan.rows}, where the layout "
            f"{plan.layout.name!r} makes {int(law[at])} rows of them, after those before [V34]"
        )


def _comes_after(group: str, following: str) -> bool:
    """Return whether a name comes after another one in natural order."""
    # Nearly all names differ only in the number at the end. This shortcut is five times faster.
    heads = group.rstrip(_DIGITS), following.rstrip(_DIGITS)
    begin = len(heads[0])
    if heads[0] == heads[1] and "0" not in (group[begin : begin + 1], following[begin : begin + 1]):
        return (len(group), group) < (len(following), following)
    return natural_key(group) < natural_key(following)
