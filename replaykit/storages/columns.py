"""Keep rows as columns, and read and write rows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.checkpoint.dirty_chunks import Changes
from replaykit.schema import Schema
from replaykit.storages import row_kernels
from replaykit.storages.history_kernels import Frames, StepsAhead, StepsPlan
from replaykit.storages.indexing import (
    check_range,
    last_occurrences,
    ravel,
    selected_elements,
    unravel_index,
    without_repeats,
)
from replaykit.storages.memory import ColumnMemory, overlaps
from replaykit.storages.records import PackedLeaves, RecordLayout, runs_of
from replaykit.storages.row_kernels import NativeRows
from replaykit.storages.tensor_bytes import carried, picked, picked_views
from replaykit.structure import Path, assembler
from replaykit.ted import format_key

__all__ = ["Columns", "ScatteredColumns"]


class Columns:
    """One tensor of shape ``[slots, *lanes, *F]`` per leaf of a schema.

    Small leaves may be views of records, which then are what rows are moved as. ``gather`` and
    ``read`` return fresh memory, ``view`` returns views. Where rows go is not checked against what
    is stored: the caller has done so.

    Args:
        tensors: the leaves that lie alone, ``[slots, *lanes, *F]``.
        layout, records: where the other leaves lie, and records: uint8 ``[slots, *lanes, stride]``.
        mapped: whether rows lie in mapped files, whose pages may have to come from disk.
        changes: who is told of writes, where these are columns over memory of others.

    Attributes:
        advise: whether the kernel is told which pages of mapped files a batch will touch.
        row_bytes: bytes of an element's values.
        order: the paths, in the order in which leaves are gathered.
        frames: what copies rows with those before them; None where only ``gather_keys`` can.
        moves: how often the memory was found to lie somewhere else.
        changes: knows which rows were written when. Every write tells it first.
    """

    @torch.inference_mode(False)  # what is made in that mode could not be changed outside
    def __init__(
        self,
        schema: Schema,
        tensors: Mapping[Path, torch.Tensor],
        ndim: int,
        *,
        layout: RecordLayout | None = None,
        records: torch.Tensor | None = None,
        mapped: bool = False,
        changes: Changes | None = None,
    ) -> None:
        packed = {} if layout is None or records is None else layout.views(records)
        self.schema = schema
        self.tensors = {
            path: packed[path] if path in packed else tensors[path] for path in schema.leaves
        }
        self.ndim = ndim
        self.layout = layout
        self.records = records
        self.advise = mapped
        self.moves = 0
        first = next(iter(self.tensors.values()))
        self.slots = first.shape[0]
        self.lanes = first.shape[1:ndim]
        self._cells = self.lanes.numel()
        self.device = first.device
        # Of all leaves in records these tell where they lie.
        held = [] if records is None else [records]
        held += [tensor for path, tensor in self.tensors.items() if path not in packed]
        if changes is None:
            changes = Changes(self.slots, schema.row_bytes() * self._cells, held, packed)
        self.changes = changes
        self._parts: dict[tuple[Path, ...], Columns] = {}
        self._arrange(held)

    def _arrange(self, held: list[torch.Tensor]) -> None:
        """Work out what follows from the leaves; ``held``: all memory that they lie in."""
        self._held = held
        self._overlapping = [p for p, tensor in self.tensors.items() if overlaps(tensor)]
        self._memory = ColumnMemory(held)
        self.row_bytes = self.schema.row_bytes()
        self._native = NativeRows.over(self)
        # Leaves come out in this order.
        self.order = list(self.tensors) if self._native is None else self._native.order
        self._assemble = assembler(self.schema.root, self.order)
        plain = None if self.advise else self._native
        self.frames = None if plain is None else Frames(self, plain)

    @torch.inference_mode(False)
    def add(self, schema: Schema, tensors: Mapping[Path, torch.Tensor]) -> None:
        """Take more leaves, which lie alone.

        Args:
            schema: of all leaves, those that are here among them.
            tensors: the others, ``[slots, *lanes, *F]``, of which nobody has a view.
        """
        if self.changes.reads is not None:
            self.changes.reads.wait()
        self.schema = schema
        self.tensors = {
            path: tensors[path] if path in tensors else self.tensors[path] for path in schema.leaves
        }
        self._arrange([*self._held, *tensors.values()])
        self.changes.follow(list(tensors.values()))

    def follow_memory(self) -> None:
        """Looks where the columns lie: whoever holds a view may have had the memory moved.

        Raises:
            RuntimeError: somebody has taken memory away that rows need.
        """
        if self._memory.has_moved():
            self.moves += 1
            if self._native is not None:
                self._native.point()

    @property
    def native(self) -> bool:
        """Whether the core can move the rows: on the CPU, each of its values in one piece."""
        return self._native is not None and not self._overlapping

    def __getitem__(self, path: Path) -> torch.Tensor:
        return self.tensors[path]

    def column(self, path: Path, stop: int) -> torch.Tensor:
        """Returns the first ``stop`` slots of one leaf, as a view."""
        return self.tensors[path][:stop]

    def nbytes(self) -> int:
        """Bytes of memory, or of files, that the rows take."""
        memory = {
            storage.data_ptr(): storage.nbytes()
            for storage in (tensor.untyped_storage() for tensor in self.tensors.values())
        }
        return sum(memory.values())

    # -- out ----------------------------------------------------------------------------------

    def read(self, index: torch.Tensor, length: int, *, contiguous: bool = False) -> Any:
        """Reads the rows at slots ``[B]`` (coordinates ``[B, ndim]``) into a fresh container.

        Raises:
            IndexError: a slot outside ``[0, length)``; not on devices where asking means waiting.
        """
        leaves = self._gather(index, length, contiguous)
        return self._assemble(leaves, index.shape[:1], self.device)

    def begin_read(self, index: torch.Tensor, length: int, contiguous: bool) -> tuple[Any, Any]:
        """Begins what ``read`` does, where ``native``: see ``NativeRows.begin``."""
        assert self._native is not None
        rows = index if self.ndim == 1 else ravel(index, self.lanes)
        leaves, begun = self._native.begin(rows, length * self._cells, contiguous)
        return self._assemble(leaves, index.shape[:1], self.device), begun

    def gather(
        self, index: torch.Tensor, length: int | None = None, *, contiguous: bool = False
    ) -> dict[Path, torch.Tensor]:
        """Copies rows out: leaves ``[B, *F]`` by path; as ``read``, by default of all slots."""
        length = self.slots if length is None else length
        found = dict(zip(self.order, self._gather(index, length, contiguous), strict=True))
        return {path: found[path] for path in self.tensors}

    def gather_keys(
        self, paths: Sequence[Path], elements: torch.Tensor
    ) -> dict[Path, torch.Tensor]:
        """Copies some leaves of rows out: ``[B, *F]`` by path, each in one piece.

        Args:
            elements: int64 ``[B]``: slots, or ``slot * lanes + lane``; of stored rows.
        """
        if self._native is not None:
            return self._native.gather_some(tuple(paths), elements)
        return row_kernels.gather_some(self, paths, elements)

    def part(self, paths: Sequence[Path]) -> Columns:
        """Returns columns of some leaves over the same memory; made once for each ``paths``."""
        key = tuple(paths)
        found = self._parts.get(key)
        if found is None:
            tensors = {path: self.tensors[path] for path in key}
            part = self.schema.part(key)
            found = Columns(part, tensors, self.ndim, mapped=self.advise, changes=self.changes)
            self._parts[key] = found
        return found

    def gather_elements(
        self, rows: torch.Tensor, limit: int, *, contiguous: bool = False
    ) -> Sequence[torch.Tensor]:
        """Copies elements ``[B]`` out, counted through time slots and lanes: leaves in ``order``.

        Raises:
            IndexError: an element outside ``[0, limit)``; not where asking a device means waiting.
        """
        if self._native is not None:
            return self._native.gather(rows, limit, contiguous)
        if self.device.type == "cpu":
            check_range(rows, 0, limit)
        rows = rows.to(self.device)
        index = rows if self.ndim == 1 else unravel_index(rows, self.lanes)
        return row_kernels.gather(self, index, rows, contiguous)

    def discounted(self, path: Path, elements: Any, steps: Any, gamma: float) -> Any:
        """Discounted sums of one number over stored elements and the rows of their lane after them.

        Args:
            path: a leaf of one float32 or float64 a row.
            elements, steps: NumPy int64 ``[B]``; the sum is over ``steps + 1`` rows.

        Returns:
            The leaf's shape, ``[B, *F]``; None where only ``gather_keys`` can read it.
        """
        if self._native is None or self.advise:
            return None
        return self._native.discounted(path, elements, steps, gamma)

    def steps_ahead(self, plan: StepsPlan) -> StepsAhead | None:
        """Sums over several steps in one call; None where it takes ``discounted``, or more."""
        if self._native is None or self.advise:
            return None
        return self._native.steps_ahead(plan)

    def _gather(self, index: torch.Tensor, length: int, contiguous: bool) -> Sequence[torch.Tensor]:
        rows = index if self.ndim == 1 else ravel(index, self.lanes)
        if self._native is not None:
            return self._native.gather(rows, length * self._cells, contiguous)
        if self.device.type == "cpu":  # elsewhere the check would wait for the device
            check_range(rows, 0, length * self._cells)
        return row_kernels.gather(self, index.to(self.device), rows.to(self.device), contiguous)

    def view(self, stop: int, index: Any = None, *, time_dim: int = 0) -> dict[Path, torch.Tensor]:
        """Indexes the first ``stop`` slots: views, except where torch itself has to copy.

        ``time_dim``: the dimension that is exchanged with that of time before.
        """
        views = {path: column[:stop] for path, column in self.tensors.items()}
        if time_dim:
            views = {path: view.transpose(0, time_dim) for path, view in views.items()}
        if index is None:
            return views
        return {path: carried(view)[index].view(view.dtype) for path, view in views.items()}

    # -- in -----------------------------------------------------------------------------------

    def scatter(
        self,
        slots: torch.Tensor,
        leaves: Mapping[Path, torch.Tensor],
        kept: torch.Tensor | slice,
    ) -> None:
        """Writes rows ``kept`` of the leaves to distinct slots ``[K]`` of dimension 0.

        An interrupt from the keyboard is passed on after the last column, never between two.
        """
        if not len(slots):
            return
        self.check_writable()
        self.follow_memory()
        # All values are at hand, in memory of their own, before the first one is written: what can
        # fail, fails here, and rows that are views of these columns are not overwritten on the way.
        sources = {path: self.own(picked(leaves[path], kept)) for path in self.tensors}
        self.changes.wrote_at(slots)
        if self._native is not None and self._native.scatter(slots, sources):
            return
        runs = runs_of(slots)
        if runs is None:
            slots = slots.to(self.device)
        try:
            row_kernels.scatter(self, slots, runs, sources)
        except KeyboardInterrupt:
            row_kernels.scatter(self, slots, runs, sources)
            raise

    def packed(self, stop: int) -> PackedLeaves | None:
        """Returns the records of the first ``stop`` slots, as views; None where there are none."""
        if self.layout is None or self.records is None:
            return None
        return PackedLeaves(self.records[:stop], self.layout.offsets)

    def fill(
        self,
        start: int,
        count: int,
        leaves: Mapping[Path, Any],
        kept: torch.Tensor | slice,
        packed: PackedLeaves | None,
    ) -> None:
        """Writes rows ``kept`` of stored ones, ``count`` of them, to the slots from ``start`` on.

        Args:
            packed: records in which some leaves lie; where they lie likewise here, copied whole.
        """
        if not self.lies_as(packed):
            self.scatter(arange(start, start + count), leaves, kept)
            return
        self.follow_memory()
        offsets = packed.offsets if packed is not None else {}
        alone = [path for path in self.tensors if path not in offsets]
        targets = [carried(self.tensors[path]) for path in alone]
        sources = [leaves[path] for path in alone]
        if packed is not None and self.records is not None:
            targets.append(self.records)
            sources.append(packed.records)
        # All values are at hand before the first one is written.
        parts = [
            (target[start + first : start + first + len(view)], self.own(view))
            for target, source in zip(targets, sources, strict=True)
            for first, view in picked_views(source, kept)
        ]
        self.changes.wrote(start, count)
        for target, values in parts:
            row_kernels.copy_rows(target, values)

    def lies_as(self, packed: PackedLeaves | None) -> bool:
        """Whether rows, with these records or none, lie in memory as here."""
        if packed is None or self.records is None:
            return packed is None and self.records is None
        return packed.lie_as(self.layout)

    def scatter_ring(self, first: int, count: int, addresses: Sequence[int], skipped: int) -> bool:
        """Writes rows that lie one after the other at ``addresses``, one a leaf, round the ring.

        Args:
            first: slot of the first row written.
            count: number of rows at the addresses; the first ``skipped`` are left out.
            addresses: as ``storages.matching.Matcher`` gives them.

        Returns:
            False, and nothing has changed, where only ``scatter`` can write them.
        """
        if self._native is None or self._overlapping:
            return False
        self.follow_memory()
        if self.overlap(addresses, count, self._native.leaf_sizes):
            return False
        self.changes.wrote(first % self.slots, count - skipped)
        self._native.scatter_ring(
            first * self._cells, count * self._cells, addresses, skipped * self._cells
        )
        return True

    def clear(self) -> None:
        """Told that no row is stored any more; memory stays."""

    def assign(
        self,
        stop: int,
        leaves: Mapping[Path, torch.Tensor],
        at: Any,
        batch: torch.Size,
        *,
        time_dim: int = 0,
    ) -> None:
        """Writes leaves ``[*batch, *F]`` into rows that ``at`` selects of the first ``stop`` slots.

        Of rows that are named twice the last one counts. ``time_dim`` as for ``view``.
        """
        self.follow_memory()
        shape = [stop, *self.lanes]
        shape[0], shape[time_dim] = shape[time_dim], shape[0]
        if (once := without_repeats(at, torch.Size(shape))) is not None:
            at, last = once
            leaves = {
                path: carried(leaf).flatten(0, len(batch) - 1)[last].view(leaf.dtype)
                for path, leaf in leaves.items()
            }
        # All values are at hand, in memory of their own, before the first one is written.
        sources = {path: self.own(carried(leaf)) for path, leaf in leaves.items()}
        parts = at if isinstance(at, tuple) else (at,)
        # Of other indices than one of time, any row.
        time = parts[time_dim] if len(parts) > time_dim and _by_dimension(parts) else Ellipsis
        self.changes.wrote_index(time, stop, sources)
        for path, source in sources.items():
            column = self.tensors[path][:stop]
            carried(column.transpose(0, time_dim) if time_dim else column)[at] = source

    def put(self, cells: Sequence[torch.Tensor], leaves: Mapping[Path, torch.Tensor]) -> None:
        """Writes leaves ``[K, *F]`` into distinct cells, int64 ``[K]`` for each dimension."""
        at = tuple(part.to(self.device) for part in cells)
        self.changes.wrote_at(cells[0], leaves)
        for path, leaf in leaves.items():
            carried(self.tensors[path])[at] = carried(leaf.to(self.device))

    def check_writable(self) -> None:
        """Raises RuntimeError where rows share memory: one write would change several of them."""
        if self._overlapping:
            key = format_key(self._overlapping[0] or ("(root)",))
            raise RuntimeError(
                f"expected rows with memory of their own, got an expanded or overlapping tensor "
                f"under {key}; clone() it to write to it"
            )

    def overlap(self, addresses: Sequence[int], count: int, sizes: Sequence[int]) -> bool:
        """Whether leaves, ``count`` rows of some bytes each, may be views of the columns."""
        return self._memory.overlap(addresses, count, sizes)

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values on the columns' device, copied if they lie in the columns' memory."""
        if self._memory.holds(values):
            return values.clone()
        return values if values.device == self.device else values.to(self.device)


def _by_dimension(parts: Sequence[Any]) -> bool:
    """Whether each part of an index is of one dimension of the rows."""
    return all(
        isinstance(part, (int, slice))
        or (isinstance(part, torch.Tensor) and part.dtype == torch.int64)
        for part in parts
    )


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
