"""The episodes of a plan, and the arrays that hold them, as columns.

An object for each would take a kilobyte; here an episode of a flat file takes 58 bytes, and a group
for each 33 more and its name.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from replaykit.datasets.engine.layout import Facts
from replaykit.datasets.engine.names import Names

__all__ = ["Episode", "Episodes", "Span", "Spans"]

Index = npt.NDArray[np.int64]

_TOGETHER: Final = 1 << 12
"""Episodes that are made objects of at a time where all are looked at."""


class Episode(NamedTuple):
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
    facts: Facts
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
class Span:
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
        self.groups = Names()
        self._files = array("i")
        self._records = array("q")
        self._firsts = array("q")
        self._starts = array("q")
        self._kinds = array("i")
        self._known: dict[tuple[int, frozenset[str]], int] = {}
        self._kinds_of: list[tuple[int, frozenset[str]]] = []
        self._stop = 0
        self.rows = 0

    def append(self, span: Span) -> None:
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

    def __getitem__(self, index: int) -> Span:
        is_last = index + 1 == len(self._files)
        start, form = self._starts[index], self._kinds_of[self._kinds[index]]
        return Span(
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

    def __iter__(self) -> Iterator[Span]:
        return self.within(range(len(self)))

    def within(self, which: range) -> Iterator[Span]:
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
"""Stands for ``Facts.terminated`` that is ``None``."""


class Episodes:
    """The episodes of a plan, in order.

    The columns are attributes of `column`; an `Episode` is made when one is asked for.

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

    def append(self, episode: Episode) -> None:
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
        self, columns: Mapping[str, npt.NDArray[Any]], facts: Facts, within: Mapping[int, int]
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

        ``terminated`` is that of `Facts`, with -1 for ``None``. While it is held no episode can be
        added.
        """
        found = np.asarray(self._columns[name])
        return found.view(np.bool_) if name == "is_open" else found

    def __len__(self) -> int:
        return len(self._columns["file"])

    def __getitem__(self, position: int) -> Episode:
        at = position + len(self) if position < 0 else position
        values = {name: column[at] for name, column in self._columns.items()}
        return self._made(self.spans.groups[self.spans.of_episode(at)], **values)

    def __iter__(self) -> Iterator[Episode]:
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
    ) -> Episode:
        said = None if terminated == _UNKNOWN else bool(terminated)
        return Episode(
            file, group, number, base, records, rows, start, bool(is_open), self.is_whole,
            Facts(source_seed, success, said), self._within.get(file, 0),
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
                    yield Episode.named(span.group, first, stop)
