"""Store rows as columns, and read and write these rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.checkpoint.dirty_chunks import Changes
from replaykit.schema import Schema
from replaykit.storages import row_kernels
from replaykit.storages.indexing import (
    check_range,
    ravel,
    selected_elements,
    unravel_index,
)
from replaykit.storages.memory import allocate, carried, overlaps, picked, picked_views, reach
from replaykit.storages.records import PackedLeaves, RecordLayout, plan_records, runs_of
from replaykit.storages.row_kernels import Frames, NativeRows, StepsAhead, StepsPlan
from replaykit.structure import Path, assembler
from replaykit.ted import format_key
from replaykit.transfer import BatchMemory, put_on, to_device

_CPU = torch.device("cpu")

_MOST_PACKED = 2**24
"""Bytes of the most rows that are written to a device as new records, which need as much memory."""

_MOST_READ = 2**18
"""Bytes of the most records that are read from a device for a part of their leaves. The time of
smaller copies is mostly that of their start."""


class ColumnMemory:
    """The memory of tensors, which moves if code with a view resizes a tensor.

    Args:
        tensors: all tensors through which the memory is used, each once.

    Raises:
        RuntimeError: the memory was resized and is too small for the rows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._pass_addresses()

    def _pass_addresses(self) -> None:
        memory = [tensor.untyped_storage() for tensor in self.tensors]
        for tensor, storage in zip(self.tensors, memory, strict=True):
            if storage.nbytes() < reach(tensor):
                raise RuntimeError(
                    f"expected {reach(tensor)} bytes of memory behind stored rows, "
                    f"got {storage.nbytes()}: it was resized from outside"
                )
        self._held = [(tensor, tensor.data_ptr()) for tensor in self.tensors]
        self._ranges = {(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in memory if s.nbytes()}
        self._from = min((start for start, _ in self._ranges), default=0)
        self._to = max((stop for _, stop in self._ranges), default=0)

    def has_moved(self) -> bool:
        """Return whether the memory moved since the last call.

        Raises:
            RuntimeError: as for the class.
        """
        for tensor, address in self._held:
            if tensor.data_ptr() != address:
                self._pass_addresses()
                return True
        return False

    def overlap(self, addresses: Sequence[int], count: int, sizes: Sequence[int]) -> bool:
        """Return whether some leaves may be views of the memory.

        Args:
            addresses: the addresses of the leaves.
            count: number of rows of each leaf.
            sizes: for each leaf, the bytes of a row.
        """
        # This fast test is enough for most rows.
        if min(addresses) >= self._to or max(addresses) + count * max(sizes) <= self._from:
            return False
        return any(
            self._touches(address, address + count * size)
            for address, size in zip(addresses, sizes, strict=True)
        )

    def holds(self, values: torch.Tensor) -> bool:
        """Return whether the tensor storage of ``values`` overlaps the memory."""
        # This test is enough for many values, and ten times cheaper than the full test.
        if values.data_ptr() >= self._to or values._is_zerotensor():
            return False
        memory = values.untyped_storage()
        return self._touches(memory.data_ptr(), memory.data_ptr() + memory.nbytes())

    def _touches(self, start: int, stop: int) -> bool:
        return any(start < end and begin < stop for begin, end in self._ranges)


class Columns:
    """One tensor of shape ``[slots, *lanes, *F]`` per leaf of a schema.

    Small leaves may be views of records. Reads and writes then move whole records. ``gather`` and
    ``read`` return new memory, and ``view`` returns views. The caller has checked that the slots of
    a write are allowed.

    Args:
        tensors: the leaves that are not in records, ``[slots, *lanes, *F]``.
        layout: the offset in a record of each leaf that is not in ``tensors``.
        records: uint8 ``[slots, *lanes, stride]``.
        mapped: whether rows are in mapped files, whose pages may have to be read from disk.
        changes: the record of changes of other columns over the same memory; None for a new record.

    Attributes:
        advise: whether to request the pages of a batch in mapped files from the kernel in advance.
        row_bytes: bytes of the values of an element, which is a row of one lane.
        order: the paths, in the order in which leaves are gathered.
        frames: an object that copies rows with the rows before them; None if only ``gather_keys``
            can copy them.
        batch_memory: the memory of large batches, which later batches reuse.
        moves: the count of times that the memory was found at new addresses.
        changes: the record of the last write to each row. Every write notifies it first.
    """

    @torch.inference_mode(False)  # tensors of that mode cannot be changed outside it
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
        self.batch_memory = BatchMemory()
        self.moves = 0
        first = next(iter(self.tensors.values()))
        self.slots = first.shape[0]
        self.lanes = first.shape[1:ndim]
        self._cells = self.lanes.numel()
        self.device = first.device
        # The records hold the memory of all leaves in them.
        held = [] if records is None else [records]
        held += [tensor for path, tensor in self.tensors.items() if path not in packed]
        if changes is None:
            changes = Changes(self.slots, schema.row_bytes() * self._cells, held, packed)
        self.changes = changes
        self._parts: dict[tuple[Path, ...], Columns] = {}
        self._arrange(held)

    def _arrange(self, held: list[torch.Tensor]) -> None:
        """Derive the other attributes from the leaves, whose whole memory is ``held``."""
        self._held = held
        self._overlapping = [p for p, tensor in self.tensors.items() if overlaps(tensor)]
        self._memory = ColumnMemory(held)
        self.row_bytes = self.schema.row_bytes()
        self._native = NativeRows.over(self)
        self.order = list(self.tensors) if self._native is None else self._native.order
        self._assemble = assembler(self.schema.root, self.order)
        plain = None if self.advise else self._native
        self.frames = None if plain is None else Frames(self, plain)

    @torch.inference_mode(False)
    def add(self, schema: Schema, tensors: Mapping[Path, torch.Tensor]) -> None:
        """Add leaves that are not stored in records.

        Args:
            schema: the schema of all leaves, old and new.
            tensors: the new leaves, ``[slots, *lanes, *F]``. No caller has a view of them.
        """
        if self.changes.reads is not None:
            self.changes.reads.wait()
        self.schema = schema
        self.tensors = {
            path: tensors[path] if path in tensors else self.tensors[path] for path in schema.leaves
        }
        self._arrange([*self._held, *tensors.values()])
        self.changes.track(list(tensors.values()))

    def refresh_addresses(self) -> None:
        """Update the addresses of columns whose memory has moved.

        Code that has a view can resize the memory, which moves it.

        Raises:
            RuntimeError: code outside the package has released memory of rows.
        """
        if self._memory.has_moved():
            self.moves += 1
            if self._native is not None:
                self._native.point()
        if self.changes.last_write is not None:  # other streams of the device wait for its end
            stream, event = self.changes.last_write
            current = torch.cuda.current_stream(self.device)
            if current != stream:
                current.wait_event(event)

    @property
    def native(self) -> bool:
        """Return whether the compiled core can copy the rows.

        The rows must be on the CPU, each value must be contiguous, and rows must share no memory.
        """
        return self._native is not None and not self._overlapping

    def __getitem__(self, path: Path) -> torch.Tensor:
        return self.tensors[path]

    def column(self, path: Path, stop: int) -> torch.Tensor:
        """Return the first ``stop`` slots of one leaf, as a view."""
        return self.tensors[path][:stop]

    def parts(self, paths: Iterable[Path], first: int, until: int) -> dict[Path, torch.Tensor]:
        """Return slots ``[first, until)`` of some leaves.

        A device copies small leaves of few rows to the CPU, in one copy. Other parts are views.
        """
        found = {path: self[path][first:until] for path in paths}
        layout = self.layout
        records = None if self.records is None else self.records[first:until]
        if layout is None or records is None or records.is_cpu or records.nbytes > _MOST_READ:
            return found
        return found | layout.views(records.cpu(), layout.offsets.keys() & found.keys())

    def nbytes(self) -> int:
        """Return the bytes of memory, or of files, that the rows take."""
        memory = {
            storage.data_ptr(): storage.nbytes()
            for storage in (tensor.untyped_storage() for tensor in self.tensors.values())
        }
        return sum(memory.values())

    # -- out ----------------------------------------------------------------------------------

    def read(self, index: torch.Tensor, length: int, *, contiguous: bool = False) -> Any:
        """Read the rows at slots ``[B]`` into a new container.

        With lanes, ``index`` holds coordinates ``[B, ndim]``.

        Raises:
            IndexError: a slot is outside ``[0, length)``. Only an index on the CPU is checked,
                because the check would wait for any other device.
        """
        if self._native is None or self.ndim > 1:
            leaves = self._gather(index, length, contiguous)
        else:
            leaves = self._native.gather(index, length * self._cells, contiguous)
        return self._assemble(leaves, index.shape[:1], self.device)

    def begin_read(self, index: torch.Tensor, length: int, contiguous: bool) -> tuple[Any, Any]:
        """Begin to ``read`` rows of ``native`` columns; see ``NativeRows.begin``."""
        assert self._native is not None
        rows = index if self.ndim == 1 else ravel(index, self.lanes)
        leaves, begun = self._native.begin(rows, length * self._cells, contiguous)
        return self._assemble(leaves, index.shape[:1], self.device), begun

    def gather(
        self, index: torch.Tensor, length: int | None = None, *, contiguous: bool = False
    ) -> dict[Path, torch.Tensor]:
        """Copy rows as ``read`` does, into leaves ``[B, *F]`` by path.

        The default ``length`` is the number of slots.
        """
        length = self.slots if length is None else length
        found = dict(zip(self.order, self._gather(index, length, contiguous), strict=True))
        return {path: found[path] for path in self.tensors}

    def gather_keys(
        self, paths: Sequence[Path], elements: torch.Tensor
    ) -> dict[Path, torch.Tensor]:
        """Copy some leaves of rows into contiguous tensors ``[B, *F]``, by path.

        Args:
            elements: int64 ``[B]``, the slots of stored rows, or ``slot * lanes + lane``.
        """
        if self._native is not None:
            return self._native.gather_some(tuple(paths), elements)
        return row_kernels.gather_some(self, paths, elements)

    def part(self, paths: Sequence[Path]) -> Columns:
        """Return columns of some leaves over the same memory, cached by ``paths``."""
        key = tuple(paths)
        if key not in self._parts:
            self._parts[key] = self._part(key)
        return self._parts[key]

    def _part(self, paths: tuple[Path, ...]) -> Columns:
        tensors = {path: self.tensors[path] for path in paths}
        part = self.schema.part(paths)
        found = Columns(part, tensors, self.ndim, mapped=self.advise, changes=self.changes)
        found.batch_memory = self.batch_memory
        return found

    def gather_elements(
        self, rows: torch.Tensor, limit: int, *, contiguous: bool = False
    ) -> Sequence[torch.Tensor]:
        """Copy elements ``[B]`` (``slot * lanes + lane``) into new leaves, in ``order``.

        Raises:
            IndexError: an element is outside ``[0, limit)``. Only elements on the CPU are checked.
        """
        if self._native is not None:
            return self._native.gather(rows, limit, contiguous)
        if self.device.type == "cpu":
            check_range(rows, 0, limit)
        return row_kernels.gather(self, rows.to(self.device), contiguous)

    def steps_ahead(self, plan: StepsPlan) -> StepsAhead | None:
        """Return an object that computes the sums of a plan; None if the core cannot."""
        if self._native is None or self.advise:
            return None
        return self._native.steps_ahead(plan)

    def _gather(self, index: torch.Tensor, length: int, contiguous: bool) -> Sequence[torch.Tensor]:
        rows = index if self.ndim == 1 else ravel(index, self.lanes)
        return self.gather_elements(rows, length * self._cells, contiguous=contiguous)

    def view(self, stop: int, index: Any = None, *, time_dim: int = 0) -> dict[Path, torch.Tensor]:
        """Index the first ``stop`` slots; the results are views, unless torch has to copy.

        The dimension ``time_dim`` is exchanged with the time dimension before the index applies.
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
        """Write rows ``kept`` of the leaves to distinct slots ``[K]`` of dimension 0.

        A KeyboardInterrupt is raised after the last column is written, never between two columns.
        """
        if not len(slots):
            return
        self.check_writable()
        self.refresh_addresses()
        # All values are copied to separate memory before the first value is written. Errors are
        # raised here. Rows that are views of these columns are copied before a write changes them.
        sources = {path: picked(leaves[path], kept) for path in self.tensors}
        block = None if self._native is not None else self._packed(sources)
        if any(source.device != self.device for source in sources.values()):
            sources = to_device(sources, self.device)  # in one copy
        sources = {path: self.own(source) for path, source in sources.items()}
        self.changes.wrote_at(slots)
        if self._native is not None and self._native.scatter(slots, sources):
            return
        runs = runs_of(slots)
        if runs is None:
            slots = put_on(slots, self.device)
            block = None if block is None else put_on(block, self.device)
        try:
            row_kernels.scatter(self, slots, runs, sources, block)
        except KeyboardInterrupt:
            row_kernels.scatter(self, slots, runs, sources, block)
            raise
        finally:
            if self.device.type == "cuda":
                stream = torch.cuda.current_stream(self.device)
                self.changes.last_write = stream, stream.record_event()

    def _packed(self, sources: dict[Path, torch.Tensor]) -> torch.Tensor | None:
        """Return records of the small leaves of few rows, and remove these leaves from ``sources``.

        Records from the CPU are in pinned memory, so that a CUDA device copies them later. Return
        None if there are no records, more rows, or leaves on several devices.
        """
        layout = self.layout
        if layout is None or self.records is None:
            return None
        devices = {sources[path].device for path in layout.offsets}
        count = len(sources[next(iter(layout.offsets))])
        if len(devices) > 1 or count * self._cells * layout.stride > _MOST_PACKED:
            return None
        found = {path: sources.pop(path) for path in layout.offsets}
        sends = devices == {_CPU} and self.device.type == "cuda"
        return layout.pack(found, pinned=sends)

    def packed(self, stop: int) -> PackedLeaves | None:
        """Return the records of the first ``stop`` slots, as views; None without records."""
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
        """Write ``count`` rows, ``kept`` of stored leaves, to the slots from ``start`` on.

        Args:
            packed: records that hold some of the leaves. They are copied whole if the records of
                these columns have the same layout.
        """
        if not self.lies_as(packed):
            self.scatter(arange(start, start + count), leaves, kept)
            return
        self.refresh_addresses()
        offsets = packed.offsets if packed is not None else {}
        alone = [path for path in self.tensors if path not in offsets]
        targets = [carried(self.tensors[path]) for path in alone]
        sources = [leaves[path] for path in alone]
        if packed is not None and self.records is not None:
            targets.append(self.records)
            sources.append(packed.records)
        # All values are ready before the first value is written.
        parts = [
            (target[start + first : start + first + len(view)], self.own(view))
            for target, source in zip(targets, sources, strict=True)
            for first, view in picked_views(source, kept)
        ]
        self.changes.wrote(start, count)
        for target, values in parts:
            row_kernels.copy_rows(target, values)

    def lies_as(self, packed: PackedLeaves | None) -> bool:
        """Return whether ``packed`` records have this layout; None stands for no records."""
        if packed is None or self.records is None:
            return packed is None and self.records is None
        return packed.lie_as(self.layout)

    def scatter_ring(self, first: int, count: int, addresses: Sequence[int], skipped: int) -> bool:
        """Write consecutive rows from ``addresses``, one per leaf, into the ring.

        Args:
            first: slot of the first written row.
            count: number of rows at the addresses. The first ``skipped`` of them are not written.
            addresses: as ``schema.Matcher`` returns them.

        Returns:
            False if only ``scatter`` can write the rows. Nothing is written then.
        """
        if self._native is None or self._overlapping:
            return False
        self.refresh_addresses()
        self.changes.wrote(first, count - skipped)
        cells = self._cells
        return self._native.scatter_ring(first * cells, count * cells, addresses, skipped * cells)

    def clear(self) -> None:
        """Record the removal of all rows; their memory stays allocated."""
        self.batch_memory.clear()

    def put(
        self, elements: torch.Tensor | None, leaves: Mapping[Path, torch.Tensor], stop: int = 0
    ) -> None:
        """Write leaves ``[K, *F]`` into distinct elements.

        Args:
            elements: int64 ``[K]`` on the CPU; None for the first ``stop`` slots, whose leaves are
                ``[stop, *lanes, *F]``.
        """
        self.refresh_addresses()
        # All values are copied to separate memory before the first value is written.
        sources = {path: self.own(carried(leaf)) for path, leaf in leaves.items()}
        at: Any = slice(0, stop)
        if elements is None:
            self.changes.wrote(0, stop, leaves)
        else:
            at = (elements,) if self.ndim == 1 else unravel_index(elements, self.lanes).unbind(-1)
            self.changes.wrote_at(at[0], leaves)
            at = tuple(part.to(self.device) for part in at)
        for path, source in sources.items():
            carried(self.tensors[path])[at] = source

    def check_writable(self) -> None:
        """Raise RuntimeError if rows share memory, so that a write changes several rows."""
        if self._overlapping:
            key = format_key(self._overlapping[0] or ("(root)",))
            raise RuntimeError(
                f"expected rows that share no memory, got an expanded or overlapping tensor under "
                f"{key}; clone() it to write to it"
            )

    def overlap(self, addresses: Sequence[int], count: int, sizes: Sequence[int]) -> bool:
        """Return whether leaves of ``count`` rows may be views of the columns."""
        return self._memory.overlap(addresses, count, sizes)

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values on this device, copied if they are in this memory."""
        if self._memory.holds(values):
            return values.clone()
        return values if values.device == self.device else values.to(self.device)


class ScatteredColumns(Columns):
    """Runs of rows of other columns, presented as consecutive rows.

    ``slots`` is the number of these rows. Reads copy from the other columns, and writes change the
    other columns. This object keeps no copy of the rows, with one exception. A leaf that a reader
    requests as one tensor, ``columns[path]``, is copied into that tensor and stays there. Readers
    request only flags and ids of episodes, a few bytes per row.

    Args:
        columns: the other columns, on the CPU and without lanes.
        starts, lengths: int64 ``[R]``, the first row of each run in ``columns``, and the run's
            number of rows.

    Cost: 16 bytes per run. A read costs as much as a read of ``columns``, plus a binary search
    among the runs for each row. All results are in new memory, also from methods that return views
    for other columns.
    """

    @torch.inference_mode(False)  # tensors of that mode cannot be changed outside it
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
        """Return the slots of rows ``[B]`` in the other columns."""
        rows = rows.to(torch.int64)
        return rows + self._shifts[torch.searchsorted(self._ends, rows, right=True)]

    @torch.inference_mode(False)
    def __getitem__(self, path: Path) -> torch.Tensor:
        if path not in self._alone:
            self._alone[path] = self.column(path, self.slots)
        return self._alone[path]

    def column(self, path: Path, stop: int) -> torch.Tensor:
        """Return the first ``stop`` rows of a leaf, copied unless it is one tensor already."""
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

    def _part(self, paths: tuple[Path, ...]) -> Columns:
        found = ScatteredColumns.__new__(ScatteredColumns)
        found._ends, found._shifts = self._ends, self._shifts
        # Both objects share the leaves that are in one tensor.
        found._set_up(self._all.part(paths), self._alone, self.changes, self.slots)
        return found

    def gather_elements(
        self, rows: torch.Tensor, limit: int, *, contiguous: bool = False
    ) -> Sequence[torch.Tensor]:
        rows = rows.to("cpu", torch.int64)
        check_range(rows, 0, limit)
        lying, slots = self._lying(rows), self._all.slots
        leaves = self._all.gather_elements(lying, slots, contiguous=contiguous)
        if not self._alone:
            return leaves
        return [
            self._picked(path, rows) if path in self._alone else leaf
            for path, leaf in zip(self.order, leaves, strict=True)
        ]

    def view(self, stop: int, index: Any = None, *, time_dim: int = 0) -> dict[Path, torch.Tensor]:
        """Index the first ``stop`` rows; the results are copies."""
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
        self.put(slots, {path: picked(leaves[path], kept) for path in self.tensors})

    def lies_as(self, packed: PackedLeaves | None) -> bool:
        return False

    def put(
        self, elements: torch.Tensor | None, leaves: Mapping[Path, torch.Tensor], stop: int = 0
    ) -> None:
        """Write leaves ``[K, *F]`` into distinct rows; see ``Columns.put``.

        A KeyboardInterrupt is raised after the last leaf is written, never between two leaves.
        """
        rows = arange(stop) if elements is None else elements.to("cpu", torch.int64)
        self.check_writable()
        leaves = {path: self.own(leaf) for path, leaf in leaves.items()}
        self.changes.wrote_at(rows, leaves)
        lying = {path: leaf for path, leaf in leaves.items() if path not in self._alone}

        def write() -> None:
            self._all.put(self._lying(rows), lying)
            for path in leaves.keys() - lying.keys():
                carried(self._alone[path])[rows] = carried(leaves[path])

        try:
            write()
        except KeyboardInterrupt:
            write()
            raise


Grow = Callable[[Schema, int, Columns | None], Columns]
"""``grow(schema, entries, table)`` returns columns with ``entries`` slots and the table's
values."""


def grow_in_memory(device: torch.device) -> Grow:
    """Return a function that copies a table into a larger one on a device."""

    def grow(schema: Schema, entries: int, table: Columns | None) -> Columns:
        layout = plan_records(schema)
        tensors, records = allocate(schema, entries, torch.Size(), device, layout)
        grown = Columns(schema, tensors, 1, layout=layout, records=records)
        if table is not None:
            for path, column in table.tensors.items():
                carried(grown[path])[: table.slots] = carried(column)
        return grown

    return grow
