"""What will be written: episodes, the schema they share, and where every row will lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from replaykit.datasets.engine.decoding import Decoder
from replaykit.datasets.engine.fields import Role, Target
from replaykit.datasets.engine.layout import Bounds, Facts, Layout

__all__ = ["Episode", "LeftOut", "Plan", "PlannedLeaf", "Skipped", "Span"]


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
        return f"{self.group}[{first}:{first + self.records}]"


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
    """What will be written. Memory: a few hundred bytes for each episode of the corpus.

    ``layout`` is the one that the files resolved to; ``splits`` names episodes by position,
    ``about`` has what the files say of themselves, ``units`` which files are read as one.
    """

    layout: Layout
    leaves: list[PlannedLeaf]
    episodes: list[Episode]
    spans: list[Span]
    left_out: list[LeftOut]
    skipped: list[Skipped]
    numbering: list[tuple[int, str]]
    splits: Mapping[str, list[int]] = field(default_factory=dict)
    about: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    units: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return self.spans[-1].start + self.spans[-1].rows if self.spans else 0

    @property
    def source_bytes(self) -> int:
        """How many bytes the episodes hold, uncompressed."""
        width = sum(leaf.record_bytes for leaf in self.leaves)
        return width * sum(span.records for span in self.spans)

    @property
    def has_unrecorded(self) -> bool:
        """Whether some row has no next observation of its own."""
        return any(episode.is_open for episode in self.episodes)
