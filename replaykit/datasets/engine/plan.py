"""What will be written: episodes, the schema they share, and where every row will lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replaykit.datasets.engine.decoding import Decoder
from replaykit.datasets.engine.episodes import Episode, Episodes, Span, Spans
from replaykit.datasets.engine.fields import Role, Target
from replaykit.datasets.engine.held import Held
from replaykit.datasets.engine.layout import Bounds, Layout

__all__ = ["Episode", "LeftOut", "Plan", "PlannedLeaf", "Skipped", "Span"]


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
    episodes: Episodes
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
