"""Plan what will be written: episodes, columns, and where every row goes."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from replaykit.datasets.column_files import ColumnSpec, torch_dtype
from replaykit.datasets.engine.fields import Decoder, Role, Target
from replaykit.datasets.engine.finding import natural_key
from replaykit.datasets.engine.h5_values import Held
from replaykit.datasets.engine.layout import Bounds, Layout, SourceFacts
from replaykit.datasets.engine.places import NameTable
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError
from replaykit.ted import DEFAULT_DONE_KEYS, Key

__all__ = [
    "ALWAYS_KEYS",
    "OBSERVED_KEY",
    "EpisodeSpan",
    "LeftOut",
    "Plan",
    "PlannedLeaf",
    "Skipped",
    "SourceEpisode",
    "SourceEpisodes",
    "Spans",
    "check_plan",
    "column_specs",
    "presence",
    "presence_key",
]

Index = npt.NDArray[np.int64]

_TOGETHER: Final = 1 << 12
"""Episodes that are made objects of at a time where all are looked at."""


class SourceEpisode(NamedTuple):
    """An episode that gives rows ``start .. start + rows - 1``.

    Attributes:
        file: position of the file in which it begins.
        group: the group of its arrays; ``""`` for the root.
        number: its number in the file.
        base: its first record in these arrays.
        records: how many records of the clock it has there.
        rows: how many rows it gives.
        start: its first row.
        is_open: the state after its last row was not recorded.
        is_whole: the arrays are those of this episode alone.
        facts: what else is known of it.
        within: the first record of its file in these arrays, where several are read as one.
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
        """The group, or the records of the file that it is made of."""
        if self.is_whole:
            return self.group or "/"
        first = self.base - self.within
        return self.named(self.group, first, first + self.records)

    @staticmethod
    def named(group: str, first: int, stop: int) -> str:
        """Returns the name of the episode that is records ``first .. stop - 1`` of a group."""
        return f"{group}[{first}:{stop}]"


@dataclass(frozen=True, slots=True)
class EpisodeSpan:
    """Arrays of one length that hold one episode or several: a group, or a flat file.

    Attributes:
        file: position of the file, or of the first of those that are read as one.
        group: the group of the arrays; ``""`` for the root.
        records: length of the clock.
        first, stop: the episodes ``first .. stop - 1`` of the plan.
        start: the first row.
        rows: how many rows they give.
        leaves: which leaves are there.
        form: spans that declare the same leaves with the same shapes and dtypes have one number.
        base: the record of the arrays at which it begins, where it is a part of them.
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
    """Spans in order: their episodes and rows follow one another without a gap."""

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
        """Adds a span, whose episodes and rows are those after the last ones."""
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
        """Yields some of them."""
        return (self[index] for index in which)

    def of_episode(self, position: int) -> int:
        """Returns which one an episode is in."""
        return bisect_right(self._firsts, position) - 1

    def by_file(self) -> dict[int, range]:
        """Returns which ones are of each file, by its position."""
        files = np.asarray(self._files)
        begins = np.flatnonzero(np.diff(files, prepend=-1)).tolist()
        stops = [*begins[1:], len(files)]
        return {int(files[a]): range(a, b) for a, b in zip(begins, stops, strict=True)}

    @property
    def records(self) -> int:
        """How many records they have together."""
        return int(np.asarray(self._records).sum())


_CODES: Final = {
    "file": "i",
    "number": "q",
    "base": "q",
    "records": "q",
    "rows": "q",
    "start": "q",
    "is_open": "b",
    "source_seed": "q",
    "success": "b",
    "terminated": "b",
}
"""The columns, with the type codes of `array.array`."""
_UNKNOWN: Final = -1
"""Stands for ``SourceFacts.terminated`` that is ``None``."""


class SourceEpisodes:
    """The episodes of a plan, in order.

    The columns are attributes of `column`; an `SourceEpisode` is made when one is asked for.

    Args:
        spans: the arrays they are in.
        is_whole: whether each has arrays of its own.
    """

    def __init__(self, spans: Spans, *, is_whole: bool) -> None:
        self.spans = spans
        self.is_whole = is_whole
        self._columns = {name: array(code) for name, code in _CODES.items()}
        # By file: nearly always there is none.
        self._within: dict[int, int] = {}

    def append(self, episode: SourceEpisode) -> None:
        """Adds an episode; its span is added after it."""
        columns, facts = self._columns, episode.facts
        columns["file"].append(episode.file)
        columns["number"].append(episode.number)
        columns["base"].append(episode.base)
        columns["records"].append(episode.records)
        columns["rows"].append(episode.rows)
        columns["start"].append(episode.start)
        columns["is_open"].append(episode.is_open)
        columns["source_seed"].append(facts.source_seed)
        columns["success"].append(facts.success)
        said = facts.terminated
        columns["terminated"].append(_UNKNOWN if said is None else said)
        if episode.within:
            self._within[episode.file] = episode.within

    def extend(
        self, columns: Mapping[str, npt.NDArray[Any]], facts: SourceFacts, within: Mapping[int, int]
    ) -> None:
        """Adds episodes; their span is added after them.

        Args:
            columns: what `column` returns for them, but for ``source_seed`` and ``success``.
            facts: what is known of all of them; not why they ended.
            within: by file, where its records begin in their arrays.
        """
        count = len(columns["file"])
        same = {"source_seed": facts.source_seed, "success": facts.success}
        for name, code in _CODES.items():
            values = columns[name] if name in columns else np.full(count, same[name])
            self._columns[name].frombytes(values.astype(np.dtype(code), copy=False).tobytes())
        self._within.update({file: start for file, start in within.items() if start})

    def cut(self, count: int) -> None:
        """Keeps the first ones only."""
        for column in self._columns.values():
            del column[count:]

    def column(self, name: str) -> npt.NDArray[Any]:
        """Returns a fact of all of them, ``[E]``, without a copy.

        ``terminated`` is that of `SourceFacts`, with -1 for ``None``. No episode can be added
        while the array is in use.
        """
        found = np.asarray(self._columns[name])
        return found.view(np.bool_) if name == "is_open" else found

    def __len__(self) -> int:
        return len(self._columns["file"])

    def __getitem__(self, position: int) -> SourceEpisode:
        at = position + len(self) if position < 0 else position
        values = {name: column[at] for name, column in self._columns.items()}
        return self._made(self.spans.groups[self.spans.of_episode(at)], **values)

    def __iter__(self) -> Iterator[SourceEpisode]:
        for begin in range(0, len(self), _TOGETHER):
            some = {name: column[begin : begin + _TOGETHER].tolist()
                    for name, column in self._columns.items()}  # fmt: skip
            span = self.spans.of_episode(begin)
            stop, group = self.spans[span].stop, self.spans.groups[span]
            for at, values in enumerate(zip(*some.values(), strict=True), begin):
                if at == stop:
                    span += 1
                    stop, group = self.spans[span].stop, self.spans.groups[span]
                yield self._made(group, *values)

    def _made(
        self,
        group: str,
        file: int,
        number: int,
        base: int,
        records: int,
        rows: int,
        start: int,
        is_open: int,
        source_seed: int,
        success: int,
        terminated: int,
    ) -> SourceEpisode:
        said = None if terminated == _UNKNOWN else bool(terminated)
        return SourceEpisode(
            file, group, number, base, records, rows, start, bool(is_open), self.is_whole,
            SourceFacts(source_seed, success, said), self._within.get(file, 0),
        )  # fmt: skip

    def names(self) -> Iterator[str]:
        """Yields their names."""
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
    """A dataset of every episode, with the columns it fills.

    Attributes:
        path: its name in messages.
        paths: the datasets whose values stand side by side; mostly one.
        role: what it means.
        shape: of one record.
        dtype: of the source.
        stored: of the columns.
        targets: the columns.
        extra: how many records more than the clock it has.
        is_once: it has one value for all records of an episode.
        is_padded: some episodes lack it.
        is_successor: it has the states that rows arrive at.
        decoder: makes numbers of what the dataset stores.
        bounds: smallest and largest value, each one number or one for each value of a record.
        field: the field of the layout that takes it, by its position.
    """

    path: str
    paths: tuple[str, ...]
    role: Role
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stored: np.dtype[Any]
    targets: tuple[Target, ...]
    extra: int = 0
    is_once: bool = False
    is_padded: bool = False
    is_successor: bool = False
    decoder: Decoder | None = None
    bounds: Bounds | None = None
    field: int = 0

    @property
    def is_unwanted(self) -> bool:
        """Whether it fills no column and says nothing that every data set has.

        Ends and rewards are in the table of episodes; the last action tells layouts how an episode
        was closed.
        """
        needed = ("terminated", "truncated", "reward", "action")
        return not self.targets and self.role not in needed

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LeftOut:
    """A leaf that is not in the table, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Skipped:
    """An episode without a row, or a member of a file that is no episode, and why."""

    file: int
    name: str
    why: str


@dataclass
class Plan:
    """What will be written. Memory: 58 bytes for each episode, and some 50 for each group.

    ``layout`` is the one that the files resolved to; ``splits`` names episodes by position,
    ``about`` has what the files say of themselves, ``units`` which files are read as one, and
    ``held`` what was read of them already.
    """

    layout: Layout
    leaves: list[PlannedLeaf]
    episodes: SourceEpisodes
    spans: Spans
    left_out: list[LeftOut]
    skipped: list[Skipped]
    numbering: list[tuple[int, str]]
    splits: Mapping[str, list[int]] = field(default_factory=dict)
    about: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    units: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    held: Held = field(default_factory=lambda: Held(0, ()))

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return self.spans.rows

    @property
    def source_bytes(self) -> int:
        """How many bytes the episodes hold, uncompressed."""
        width = sum(leaf.record_bytes for leaf in self.leaves if not leaf.is_unwanted)
        return width * self.spans.records

    @property
    def tells_copies(self) -> bool:
        """Whether episodes of one content are copies: not where no observation was looked at."""
        roles = {leaf.role for leaf in self.leaves if not leaf.is_unwanted}
        return "observation" in roles or all(
            entry.role != "observation" for entry in self.layout.fields
        )

    @property
    def has_unrecorded(self) -> bool:
        """Whether some row has no next observation of its own."""
        return bool(self.episodes.column("is_open").any())


OBSERVED_KEY: Final[Key] = ("next", "observed")
"""False on the rows whose next state was not recorded; a column only where there are such rows."""
ALWAYS_KEYS: Final[tuple[Key, ...]] = (
    *((name,) for name in DEFAULT_DONE_KEYS),
    *(("next", name) for name in DEFAULT_DONE_KEYS),
    OBSERVED_KEY,
    ("episode",),
    ("seed",),
)
"""The columns that no leaf fills; `OBSERVED_KEY` only where it is needed."""


def presence_key(target: Key) -> Key:
    """Returns the key that tells values of a column from the zeros of episodes that lack it."""
    return ("present", *(target[1:] if target[0] == "next" else target))


def column_specs(plan: Plan) -> list[ColumnSpec]:
    """Returns the columns of a plan: those that leaves fill, then flags and ids.

    Raises:
        TypeError: torch has no dtype for a leaf.
        CorpusError: two fields fill one column, or one a column below that of the other.
    """
    specs: dict[Key, ColumnSpec] = {}
    sources: dict[Key, str] = {}

    def add(
        key: Key, shape: tuple[int, ...], dtype: torch.dtype, source: str = "the engine"
    ) -> None:
        if key in specs:
            raise CorpusError(
                f"layout {plan.layout.name!r}: two of its fields fill the column {key}: "
                f"{sources[key]} and {source} [V10]"
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
            raise CorpusError(
                f"layout {plan.layout.name!r}: {sources[above]} fills the column {above}, and "
                f"{sources[key]} the column {key} below it; give one of them another key [V10]"
            )
    return list(specs.values())


def presence(plan: Plan) -> dict[Key, PlannedLeaf]:
    """Returns the columns that say where a leaf is there, for leaves that some episodes lack."""
    return {
        presence_key(target.key): leaf
        for leaf in plan.leaves
        if leaf.is_padded
        for target in leaf.targets
    }


_DIGITS: Final = "0123456789"


def check_plan(plan: Plan, sources: Sources) -> None:
    """Checks the rows of every episode against the law of its layout, and the order of groups.

    Cost: O(E), some 0.5 us for each group.

    Raises:
        CorpusError: the groups of a file are not in natural order (rule V35); names two of them.
        RuntimeError: episodes have other rows than their layout gives them, or these do not
            follow one another (rule V34): a fault of this engine, or of a finder.
    """
    for index, spans in plan.spans.by_file().items():
        groups = (plan.spans.groups[at] for at in spans)
        for group, following in pairwise(groups):
            if not _follows(group, following):
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


def _follows(group: str, following: str) -> bool:
    """Whether a name comes after another one in natural order."""
    # Nearly all names differ only in the number at their end, of which this takes a fifth.
    heads = group.rstrip(_DIGITS), following.rstrip(_DIGITS)
    begin = len(heads[0])
    if heads[0] == heads[1] and "0" not in (group[begin : begin + 1], following[begin : begin + 1]):
        return (len(group), group) < (len(following), following)
    return natural_key(group) < natural_key(following)
