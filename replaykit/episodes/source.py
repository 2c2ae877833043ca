"""What an index of episodes reads of a storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from replaykit.episodes.marks import CutMarks

if TYPE_CHECKING:
    from replaykit.schema import Schema
    from replaykit.structure import Path

__all__ = ["RowColumns", "RowNumbers", "RowSource", "SavedEpisodes"]


class RowNumbers(Protocol):
    """Which rows are stored, and where: the part of a ledger that an index of episodes reads."""

    next_position: int
    length: int
    cursor: int
    cleared: int
    changes: int
    by_stream: bool

    @property
    def in_order(self) -> bool:
        """Return whether the stored rows lie in ring order."""

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the positions of the rows in slots, int64 of the same shape."""

    def write_order(self) -> torch.Tensor:
        """Return the slots of all stored rows in the order in which they were written."""

    def tables(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the tables of positions and generations; None where they follow from the ring."""


class RowColumns(Protocol):
    """Columns of rows by path."""

    @property
    def schema(self) -> Schema:
        """Return the schema of a row."""

    @property
    def slots(self) -> int:
        """Return how many rows of every lane there is room for."""

    @property
    def ndim(self) -> int:
        """Return how many dimensions of a column come before those of a row."""

    @property
    def lanes(self) -> torch.Size:
        """Return the sizes of the dimensions between slot and row."""

    @property
    def order(self) -> Sequence[Path]:
        """Return the paths of all columns."""

    def __getitem__(self, path: Path) -> torch.Tensor:
        """Return one column."""

    def follow_memory(self) -> None:
        """Look again where the columns lie in memory."""


class SavedEpisodes(Protocol):
    """What a storage knows of episodes that does not follow from the rows it has."""

    @property
    def marks(self) -> CutMarks:
        """Return where streams were cut."""

    @property
    def is_told(self) -> bool:
        """Return whether another process or a checkpoint has noted how episodes began."""

    def take_heads(self) -> Mapping[str, Any] | None:
        """Return how the first episodes of lanes began, if that was saved."""

    def saved_streams(self) -> tuple[list[list[int]], bool]:
        """Return how the first episodes of streams began, and whether the list is complete."""


class RowSource(Protocol):
    """A storage, as an index of episodes sees it."""

    @property
    def ledger(self) -> RowNumbers:
        """Return which rows are stored, and where."""

    @property
    def indexes(self) -> SavedEpisodes:
        """Return what is known of episodes beyond the rows."""

    @property
    def lane_key(self) -> Path | None:
        """Return the key whose values tell interleaved streams apart."""

    def require(self) -> RowColumns:
        """Return the columns; RuntimeError before the first write."""
