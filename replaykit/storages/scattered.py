"""Some of the rows of columns, read where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.assembly import assembler
from replaykit.checkpoint.changes import Changes
from replaykit.storages.carrying import carried, picked
from replaykit.storages.columns import Columns
from replaykit.storages.indexing import check_range, last_occurrences, selected_elements
from replaykit.structure import Path

__all__ = ["ScatteredColumns"]


class ScatteredColumns(Columns):
    """Runs of rows of other columns, as if they followed each other: ``slots`` counts them.

    What is read is copied out of where it lies, and what is written goes there; nothing else of
    the rows is held in memory. A leaf that somebody wants as one tensor, ``columns[path]``, is
    copied when it is asked for, and lies in that tensor from then on: flags and ids of episodes, a
    few bytes a row.

    Args:
        columns: all rows, on the CPU and with one dimension.
        starts, lengths: int64 ``[R]``: where each run begins in these columns, and how many rows it
            has.

    Cost: 16 bytes a run. Of a read: that of all rows, and a binary search among the runs for each
    row; leaves come in fresh memory, also where other columns give views.
    """

    @torch.inference_mode(False)  # what is made in that mode could not be changed outside
    def __init__(self, columns: Columns, starts: torch.Tensor, lengths: torch.Tensor) -> None:
        self._ends = lengths.cumsum(0)
        self._shifts = starts - (self._ends - lengths)
        slots = int(self._ends[-1])
        changes = Changes(slots, columns.schema.row_bytes())
        self._set_up(columns, {}, changes, slots)

    def _set_up(
        self, columns: Columns, alone: dict[Path, torch.Tensor], changes: Changes, slots: int
    ) -> None:
        super().__init__(columns.schema, columns.tensors, 1, mapped=columns.advise, changes=changes)
        self._all = columns
        self._alone = alone
        self._native = self.frames = None
        self.slots = slots
        self.order = columns.order
        self._assemble = assembler(self.schema.root, self.order)

    def _lying(self, rows: torch.Tensor) -> torch.Tensor:
        """Where rows ``[B]`` lie among all of them."""
        rows = rows.to(torch.int64)
        return rows + self._shifts[torch.searchsorted(self._ends, rows, right=True)]

    @torch.inference_mode(False)
    def __getitem__(self, path: Path) -> torch.Tensor:
        if path not in self._alone:
            self._alone[path] = self.column(path, self.slots)
        return self._alone[path]

    def column(self, path: Path, stop: int) -> torch.Tensor:
        """Returns the first ``stop`` rows of one leaf: a copy, unless it lies in one tensor."""
        if path in self._alone:
            return self._alone[path][:stop]
        return self._all.gather_keys([path], self._lying(arange(stop)))[path]

    def nbytes(self) -> int:
        return super().nbytes() + sum(tensor.nbytes for tensor in self._alone.values())

    # -- out ----------------------------------------------------------------------------------

    def gather_keys(
        self, paths: Sequence[Path], elements: torch.Tensor
    ) -> dict[Path, torch.Tensor]:
        elements = elements.to("cpu", torch.int64)
        lying = [path for path in paths if path not in self._alone]
        found = self._all.gather_keys(lying, self._lying(elements)) if lying else {}
        return {
            path: found[path] if path in found else self._picked(path, elements) for path in paths
        }

    def _picked(self, path: Path, rows: torch.Tensor) -> torch.Tensor:
        column = self._alone[path]
        return carried(column).index_select(0, rows).view(column.dtype)

    def part(self, paths: Sequence[Path]) -> Columns:
        key = tuple(paths)
        found = self._parts.get(key)
        if found is None:
            found = ScatteredColumns.__new__(ScatteredColumns)
            found._ends, found._shifts = self._ends, self._shifts
            # Leaves that lie in one tensor do so for both.
            found._set_up(self._all.part(key), self._alone, self.changes, self.slots)
            self._parts[key] = found
        return found

    def gather_elements(
        self, rows: torch.Tensor, limit: int, *, contiguous: bool = False
    ) -> Sequence[torch.Tensor]:
        return self._gather(rows, limit, contiguous)

    def _gather(self, index: torch.Tensor, length: int, contiguous: bool) -> Sequence[torch.Tensor]:
        rows = index.to("cpu", torch.int64)
        check_range(rows, 0, length)
        lying, slots = self._lying(rows), self._all.slots
        leaves = self._all.gather_elements(lying, slots, contiguous=contiguous)
        if not self._alone:
            return leaves
        return [
            self._picked(path, rows) if path in self._alone else leaf
            for path, leaf in zip(self.order, leaves, strict=True)
        ]

    def view(self, stop: int, index: Any = None, *, time_dim: int = 0) -> dict[Path, torch.Tensor]:
        """Indexes the first ``stop`` rows: copies."""
        rows = selected_elements(slice(None) if index is None else index, torch.Size([stop]), [1])
        found = self.gather(rows.reshape(-1), stop)
        return {path: leaf.view(rows.shape + leaf.shape[1:]) for path, leaf in found.items()}

    # -- in -----------------------------------------------------------------------------------

    def scatter(
        self,
        slots: torch.Tensor,
        leaves: Mapping[Path, torch.Tensor],
        kept: torch.Tensor | slice,
    ) -> None:
        sources = {path: self.own(picked(leaves[path], kept)) for path in self.tensors}
        self.put((slots,), sources)

    def fill(
        self,
        start: int,
        count: int,
        leaves: Mapping[Path, Any],
        kept: torch.Tensor | slice,
        packed: Any,
    ) -> None:
        self.scatter(arange(start, start + count), leaves, kept)

    def scatter_ring(self, first: int, count: int, addresses: Sequence[int], skipped: int) -> bool:
        return False

    def assign(
        self,
        stop: int,
        leaves: Mapping[Path, torch.Tensor],
        at: Any,
        batch: torch.Size,
        *,
        time_dim: int = 0,
    ) -> None:
        rows = selected_elements(at, torch.Size([stop]), [1]).reshape(-1)
        last = last_occurrences(rows)
        flat = {
            path: carried(leaf).reshape(len(rows), *self.schema.leaves[path].shape)[last]
            for path, leaf in leaves.items()
        }
        self.put((rows[last],), {path: self.own(leaf) for path, leaf in flat.items()})

    def put(self, cells: Sequence[torch.Tensor], leaves: Mapping[Path, torch.Tensor]) -> None:
        """Writes leaves ``[K, *F]`` into distinct rows, int64 ``[K]``.

        An interrupt from the keyboard is passed on after the last leaf, never between two.
        """
        rows = cells[0].to("cpu", torch.int64)
        self.check_writable()
        self.changes.wrote_at(rows, leaves)
        lying = {path: leaf for path, leaf in leaves.items() if path not in self._alone}

        def write() -> None:
            self._all.put((self._lying(rows),), lying)
            for path in leaves.keys() - lying.keys():
                carried(self._alone[path])[rows] = carried(leaves[path])

        try:
            write()
        except KeyboardInterrupt:
            write()
            raise
