"""Tables of a ledger, one number a slot: in memory, or in the files of a checkpoint until somebody
needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from replaykit.checkpoint import MappedRows, ReadLater

__all__ = ["Table", "Tables", "followed", "grown", "own_table", "saved_table"]

Table = torch.Tensor | ReadLater[torch.Tensor]


class Tables:
    """The two of a ledger: None where their numbers follow from its counters."""

    def __init__(self) -> None:
        self._position_table: Table | None = None
        self._generation_table: Table | None = None

    @property
    def counted(self) -> bool:
        """Whether generations follow from the counters, without a table."""
        return self._generation_table is None

    @property
    def in_order(self) -> bool:
        """Whether positions follow from the counters: records were only written at the cursor."""
        return self._position_table is None

    @property
    def _positions(self) -> torch.Tensor | None:
        table = self._position_table
        if isinstance(table, ReadLater):
            table = self._position_table = _read(table)
        return table

    @_positions.setter
    def _positions(self, table: Table | None) -> None:
        self._position_table = table

    @property
    def _generations(self) -> torch.Tensor | None:
        table = self._generation_table
        if isinstance(table, ReadLater):
            table = self._generation_table = _read(table)
        return table

    @_generations.setter
    def _generations(self, table: Table | None) -> None:
        self._generation_table = table

    @property
    def unread(self) -> bool:
        """Whether positions lie in the files of a checkpoint, and nobody has needed them yet."""
        return isinstance(self._position_table, ReadLater)

    def read_tables(self) -> None:
        """Reads what lies in files yet, as has to be done before a row is overwritten."""
        _ = self._positions, self._generations


def saved_table(
    value: torch.Tensor | MappedRows | None, check: Callable[[torch.Tensor], None], what: str
) -> Table | None:
    """A table of a saved state, to look at; one that lies in files is read and checked later.

    Args:
        check: raises ValueError where the table contradicts what else was saved.
        what: it is, for the error.
    """
    if not isinstance(value, MappedRows):
        return value

    def make(array: Any) -> torch.Tensor:
        table = torch.from_numpy(array)
        check(table)
        return table

    return ReadLater(make, [value], what)


# Here and below: tables made in inference mode could not be changed outside of it.
@torch.inference_mode(False)
def _read(table: ReadLater[torch.Tensor]) -> torch.Tensor:
    return table.read()


@torch.inference_mode(False)
def own_table(table: Table | None) -> Table | None:
    """The same for who goes on with it: what lies in files is copied page by page, once somebody
    writes to it, and the rest now."""
    return table.clone() if isinstance(table, torch.Tensor) else table


@torch.inference_mode(False)
def followed(table: torch.Tensor | None, values: Any, at: Any) -> torch.Tensor | None:
    """The table that another process has as an array; see ``Ledger.follow``."""
    if values is None:
        return None
    if table is None or at is None or len(table) > len(values):
        return torch.from_numpy(values.copy())
    table = grown(table, len(values), len(values))
    table.numpy()[at] = values[at]
    return table


@torch.inference_mode(False)
def grown(table: torch.Tensor, size: int, limit: int) -> torch.Tensor:
    """Returns the table with at least ``size`` entries, new ones -1; doubles to stay linear."""
    if size <= len(table):
        return table
    larger = torch.full(
        (min(limit, max(size, 2 * len(table))),), -1, dtype=torch.int64, device="cpu"
    )
    larger[: len(table)] = table
    return larger
