"""Read and write rows whose next observations are stored in the following rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.recovery import check_file
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.dedup_native import NativeDedup
from replaykit.storages.indexing import (
    Neighbours,
    last_occurrences,
    neighbours,
    ravel,
    selected_elements,
)
from replaykit.storages.next_rows import Links, Pairs
from replaykit.storages.overflow_table import Change, Grow, OverflowTable
from replaykit.storages.recoverable import FOLLOWERS, OVERFLOW, rows_as_bytes
from replaykit.storages.row_files import RowFiles, grow_in_files
from replaykit.storages.tensor_bytes import any_differing, carried, carried_rows, picked
from replaykit.structure import Path, assembler
from replaykit.ted import format_key

if TYPE_CHECKING:
    from replaykit.storages.recoverable import Recovery

__all__ = ["DedupJournal", "DedupRows", "LinkedRows"]

_Leaves = dict[Path, torch.Tensor]


class LinkedRows:
    """The half of ``DedupColumns`` that reads rows, with the methods of ``Columns``.

    An element is the number ``slot * lanes + lane`` of a row. Its follower is in the next time slot
    of the ring and in the same lane, or in the slot that ``links`` name. The counterparts of an
    element are its leaves under ``next`` that are read from the follower.

    Args:
        pairs: the leaves that are read from the following row.
        rows: columns of the leaves that are stored for every row.
        grow: function that allocates memory for overflow entries.
        links: the slots of the following rows, without lanes.

    Attributes:
        order: the paths, in the order in which leaves are gathered.
        advise: whether to request the pages of a batch in mapped files from the kernel in advance.

    Cost of a read: the cost of a dense read, and a few operations on int64 ``[B]``.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow, links: Links | None = None) -> None:
        self.rows = rows
        self.ndim, self.slots, self.lanes = rows.ndim, rows.slots, rows.lanes
        self.device = rows.device
        self.advise = rows.advise
        self.changes = rows.changes
        self._cells = rows.lanes.numel()
        self._elements = rows.slots * self._cells
        self._roots = rows.part(list(pairs.root_of.values()))
        next_of = {root: path for path, root in pairs.root_of.items()}
        # The counterparts are gathered in the order of the roots.
        self._nexts = [next_of[root] for root in self._roots.order]
        self._overflow = OverflowTable(pairs.overflow, self._elements, self.device, grow)
        self._links = links
        self._arrange(pairs)

    def _arrange(self, pairs: Pairs) -> None:
        """Derive the other attributes from the leaves."""
        self.pairs = pairs
        self.schema = pairs.schema
        self.order = [*self.rows.order, *self._nexts]
        self._assemble = assembler(self.schema.root, self.order)
        self._native = NativeDedup.over(pairs, self.rows, self._overflow, self._links)
        if self._native is not None:
            self._assemble_native = assembler(self.schema.root, self._native.order)
        # For each leaf that is stored for every row, its place among all leaves.
        places = {path: place for place, path in enumerate(pairs.schema.leaves)}
        self._places = [places[path] for path in self.rows.tensors]

    def add(self, schema: Schema, tensors: Mapping[Path, torch.Tensor]) -> None:
        """Add leaves that are stored for every row; see ``Columns.add``."""
        pairs = self.pairs
        stored = schema.part([path for path in schema.leaves if path not in pairs.root_of])
        self.rows.add(stored, tensors)
        self._arrange(replace(pairs, schema=schema, stored=stored))

    def __getitem__(self, path: Path) -> torch.Tensor:
        """Return a stored leaf; KeyError for a leaf that is read from the following row."""
        if path in self.pairs.root_of:
            raise KeyError(
                f"{format_key(path)} is stored once, under {format_key(self.pairs.root_of[path])}, "
                "and cannot tell where episodes end; give dedup_next the other keys"
            )
        return self.rows[path]

    def refresh_addresses(self) -> None:
        """Update addresses of memory that has moved; see ``Columns.refresh_addresses``."""
        self.rows.refresh_addresses()

    @property
    def overflow_rows(self) -> int:
        """Number of rows (elements, for ``ndim > 1``) that have an overflow entry."""
        return len(self._overflow)

    def nbytes(self) -> int:
        """Return the bytes, in memory or in files, of the rows and overflow entries."""
        return self.rows.nbytes() + self._overflow.nbytes()

    def read(self, index: torch.Tensor, length: int, *, contiguous: bool = False) -> Any:
        """Read the rows at slots ``[B]`` into a new container.

        With lanes, ``index`` holds coordinates ``[B, ndim]``.

        Raises:
            IndexError: a slot is outside ``[0, length)``. Only an index on the CPU is checked,
                because the check would wait for any other device.
        """
        if self._native is not None and not contiguous:
            elements = self._elements_of(index)
            found = self._native.gather(elements, length * self._cells)
            if found is not None:
                return self._assemble_native(found, index.shape[:1], self.device)
        leaves = self._gather(index, length, contiguous)
        return self._assemble(leaves, index.shape[:1], self.device)

    def gather(
        self, index: torch.Tensor, length: int | None = None, *, contiguous: bool = False
    ) -> _Leaves:
        """Copy rows as ``read`` does, into leaves ``[B, *F]`` by path.

        The default ``length`` is the number of slots.
        """
        length = self.slots if length is None else length
        found = dict(zip(self.order, self._gather(index, length, contiguous), strict=True))
        return {path: found[path] for path in self.schema.leaves}

    def gather_keys(self, paths: Sequence[Path], elements: torch.Tensor) -> _Leaves:
        """Copy some leaves of rows, ``[B, *F]`` by path; see ``Columns.gather_keys``."""
        stored = [path for path in paths if path not in self.pairs.root_of]
        found = self.rows.gather_keys(stored, elements) if stored else {}
        if len(stored) < len(paths):
            following = self._following(elements.to(self.device, torch.int64), contiguous=True)
            found.update(following)
        return {path: found[path] for path in paths}

    def _elements_of(self, index: torch.Tensor) -> torch.Tensor:
        elements = index if self.ndim == 1 else ravel(index, self.lanes)
        if elements.dtype is not torch.int64 or elements.device != self.device:
            elements = elements.to(self.device, torch.int64)
        return elements

    def _gather(self, index: torch.Tensor, length: int, contiguous: bool) -> list[torch.Tensor]:
        elements = self._elements_of(index)
        limit = length * self._cells
        leaves = list(self.rows.gather_elements(elements, limit, contiguous=contiguous))
        following = self._following(elements, contiguous)
        leaves.extend(following[path] for path in self._nexts)
        return leaves

    def _following(self, elements: torch.Tensor, contiguous: bool = False) -> _Leaves:
        """Return the counterparts of elements ``[B]``, in new memory ``[B, *F]``."""
        if self._native is not None and contiguous:
            found = self._native.following(elements)
            if found is not None:
                return found
        after = self._after(elements)
        leaves = self._roots.gather_elements(after, self._elements, contiguous=contiguous)
        return self._overflow.patch(elements, dict(zip(self._nexts, leaves, strict=True)))

    def _after(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the followers of elements ``[B]``.

        The element after the newest row may never have been written. Its values are not used.
        """
        if self._links is not None:
            return self._links.after(elements)
        return (elements + self._cells).remainder_(self._elements)

    def column(self, path: Path, stop: int) -> torch.Tensor:
        """Return the first ``stop`` slots of a leaf, copied if the leaf is in a pair."""
        if path not in self.pairs.root_of and path not in self.pairs.root_of.values():
            return self.rows.column(path, stop)
        elements = arange(stop * self._cells).to(self.device)
        if path in self.pairs.root_of:
            found = self._following(elements, contiguous=True)
        else:
            found = self._at_root(elements, contiguous=True)
        return found[path].view(stop, *self.lanes, *self.schema.leaves[path].shape)

    def _at_root(self, elements: torch.Tensor, contiguous: bool = False) -> _Leaves:
        """Return the root values of elements ``[B]`` that are in pairs, in new memory."""
        part = self._roots
        leaves = part.gather_elements(elements, self._elements, contiguous=contiguous)
        return dict(zip(part.order, leaves, strict=True))

    def view(self, stop: int, index: Any = None, *, time_dim: int = 0) -> _Leaves:
        """Index the first ``stop`` slots as ``Columns.view``; leaves in pairs are copied.

        A write through a view of a root value would also change the row before.
        """
        leaves = self.rows.view(stop, index, time_dim=time_dim)
        numbers = self._selected(stop, slice(None) if index is None else index, time_dim)
        elements = numbers.reshape(-1)
        for found in (self._at_root(elements, True), self._following(elements, True)):
            for path, leaf in found.items():
                leaves[path] = leaf.view(numbers.shape + leaf.shape[1:])
        return {path: leaves[path] for path in self.schema.leaves}

    def _selected(self, stop: int, index: Any, time_dim: int) -> torch.Tensor:
        """Return the elements that an index selects of the first ``stop`` slots."""
        shape, strides, step = [stop, *self.lanes], [], self._cells
        for size in (1, *self.lanes):
            step //= size
            strides.append(step)
        for grid in (shape, strides):
            grid[0], grid[time_dim] = grid[time_dim], grid[0]
        return selected_elements(index, torch.Size(shape), strides).to(self.device)

    def own_following(self, stop: int) -> tuple[torch.Tensor, _Leaves]:
        """Return the counterparts that the root values do not imply.

        Args:
            stop: end of the slots to save.

        Returns:
            The elements whose counterparts differ from their followers, rising int64 ``[K]``, and
            these counterparts ``[K, *F]``. In a full ring, the first slot follows the last slot. In
            any other ring the elements of the last slot have no followers, so the result includes
            them.
        """
        elements = self._overflow.elements_with(stop * self._cells)
        if stop and stop < self.slots:
            last = arange((stop - 1) * self._cells, stop * self._cells).to(self.device)
            elements = torch.cat([elements[elements < last[0]], last])
        return elements, self._following(elements, True)


Array = np.ndarray[Any, Any]

_ENTRIES = 500
"""The lowest number of a journal target that is a file of overflow entries."""


class DedupJournal:
    """A journal of the overflow entries, of their map, and of the links between rows.

    All three are in mapped files. Their old bytes are journaled before they change in place. The
    caller holds the storage's lock. The free entries, the links to previous rows and the newest
    rows of streams are not journaled, because ``DedupColumns.reread`` derives them.

    An operation may overwrite an entry that it has just released. The core does so without a call
    to this journal. The entries that a write of the core releases are therefore journaled at their
    release. Entries that an operation of torch releases are not. After such an operation, the core
    must not write until the next commit (see ``loose``).

    Args:
        recovery: the Recovery object of the storage, which journals and commits.
        folder: the folder with the files of the entries.
    """

    def __init__(self, recovery: Recovery, folder: FilePath) -> None:
        self._recovery, self._folder = recovery, folder
        self._grow_files = grow_in_files(folder)
        self.files: list[FilePath] = []
        """The files of the entries; empty before the first entry."""
        self._entries: Sequence[int] = ()
        self._loose = 0
        self._map: Array = np.zeros(0, np.int32)

    # -- files --------------------------------------------------------------------------------

    def grow(self, schema: Schema, entries: int, table: Columns | None) -> Columns:
        """Allocate room for entries; see ``overflow_table.Grow``."""
        grown = self._grow_files(schema, entries, table)
        self._load_table(grown)
        return grown

    def open(self, schema: Schema, elements: int) -> None:
        """Map the files of entries that exist, so that a rollback can restore them.

        Raises:
            CheckpointError: a path is not a regular file; the error names it.
        """
        plan = RowFiles.of(self._folder, schema, 1, torch.Size())
        entries = elements
        for path, file in plan.files.items():
            if not file.exists() and not file.is_symlink():
                return
            check_file(file, 0, exactly=False)
            if plan.nbytes(path):
                entries = min(entries, file.stat().st_size // plan.nbytes(path))
        if entries:
            self._load_table(RowFiles.of(self._folder, schema, entries, torch.Size()).opened(1))

    def table(self, schema: Schema) -> Columns | None:
        """Return the entries up to the last entry in the map; None if the map is empty.

        The disk may have no blocks for later entries.

        Raises:
            CheckpointError: a file is too short or missing; the error names it.
        """
        entries = int(self._map.max(initial=0))
        if entries < 1:
            return None
        plan = RowFiles.of(self._folder, schema, entries, torch.Size())
        for path, file in plan.files.items():
            check_file(file, plan.nbytes(path), exactly=False)
        found = plan.opened(1)
        self._load_table(found)
        return found

    def _load_table(self, table: Columns) -> None:
        cells = rows_as_bytes(table)
        self._entries = range(_ENTRIES, _ENTRIES + len(cells))
        plan = RowFiles.of(self._folder, table.schema, table.slots, torch.Size())
        targets = dict(zip(self._entries, cells.values(), strict=True))
        self.files = list(plan.files.values())
        self._recovery.home.also(targets, self.files)

    def map(self, elements: int, dtype: Any, *, there: bool) -> Array:
        """Return the memory of the map, ``[elements]``.

        Raises:
            CheckpointError: ``there`` is set, but the file is missing; the error names it.
        """
        self._map = self._table(OVERFLOW, elements, dtype, there)
        return self._map

    def followers(self, slots: int, dtype: Any, *, there: bool) -> Array:
        """Return the memory of the distances to next rows, ``[slots]``; see ``map``."""
        return self._table(FOLLOWERS, slots, dtype, there)

    def _table(self, number: int, rows: int, dtype: Any, there: bool) -> Array:
        home = self._recovery.home
        if there:
            home.check_table(number, dtype, rows)
        return home.table(number, dtype, rows)[:rows]

    # -- changes ------------------------------------------------------------------------------

    @property
    def loose(self) -> bool:
        """True if entries were released, but not journaled, since the last commit."""
        return self._loose == self._recovery.home.journaled()[0]

    def journal(self, elements: torch.Tensor | range, numbers: Array) -> None:
        """Journal the map at elements, and the entries ``numbers``, which will get values."""
        at = elements if isinstance(elements, range) else elements.numpy()
        self._recovery.journal_table(OVERFLOW, at)
        self._journal_entries(numbers)
        self._loose = self._recovery.home.journaled()[0]

    def journal_ring(self, first: int, count: int) -> None:
        """Journal the entries that the core releases when it writes rows into the ring.

        These are the entries of the ``count`` slots from ``first`` on, and the entry of the slot
        before ``first``. The caller has journaled the rows.
        """
        slots, home = len(self._map), self._recovery.home
        start = (first or slots) - 1
        stop = start + count + 1
        for begin, end in ((start, min(stop, slots)), (0, stop - slots)):
            if end > begin:
                home.journal_rows(OVERFLOW, range(begin, end))
                used = self._map[begin:end]
                self._journal_entries(used[used.nonzero()] - 1)

    def journal_linked(self, slots: Array) -> None:
        """Journal the entries and links that the core changes when it writes streams.

        Args:
            slots: the slots of the written rows, of the rows before them, and of the newest rows
                of their streams.
        """
        self._recovery.home.journal_rows(OVERFLOW, slots)
        self._recovery.home.journal_rows(FOLLOWERS, slots)
        used = np.unique(self._map[slots])
        self._journal_entries(used[used.nonzero()] - 1)

    def journal_links(self, slots: torch.Tensor | range) -> None:
        """Journal the links of slots."""
        at = slots if isinstance(slots, range) else slots.numpy()
        self._recovery.journal_table(FOLLOWERS, at)

    def _journal_entries(self, numbers: Array) -> None:
        home = self._recovery.home
        if not len(numbers):
            return
        at: Array | range = numbers.astype(np.int64, copy=False)
        if len(numbers) == 1:  # a range takes a third of the time
            at = range(int(numbers[0]), int(numbers[0]) + 1)
        for target in self._entries:
            home.journal_rows(target, at)


class DedupRows(LinkedRows):
    """The half of ``DedupColumns`` that writes and edits rows in any slots.

    A write may change the follower of another row. That row then gets an overflow entry with its
    old counterparts, unless they equal the new root values.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow, links: Links | None = None) -> None:
        super().__init__(pairs, rows, grow, links)
        self._stored = 0  # time slots that hold rows, or have held some
        self.journal: DedupJournal | None = None
        """The journal of the overflow entries; None if they are only in memory."""

    @property
    def _is_loose(self) -> bool:
        """True if the core must not write now; see ``DedupJournal``."""
        return self.journal is not None and self.journal.loose

    def scatter(
        self, slots: torch.Tensor, leaves: Mapping[Path, Any], kept: torch.Tensor | slice
    ) -> None:
        """Write rows ``kept`` of the leaves to distinct slots ``[K]`` of dimension 0.

        A KeyboardInterrupt is raised after everything is written.
        """
        if not len(slots):
            return
        self._forget_newest()
        sources = {path: self.rows.own(picked(leaves[path], kept)) for path in self.schema.leaves}
        elements = slots.to(self.device)
        if self._cells > 1:
            cells = arange(self._cells).to(self.device)
            elements = (elements[:, None] * self._cells + cells).reshape(-1)
        flat = {
            path: sources[path].reshape(len(elements), *sources[path].shape[self.ndim :])
            for path in (*self._nexts, *self._roots.order)
        }

        def write() -> None:
            self.rows.scatter(slots, sources, slice(None))

        stored = self._stored
        self._stored = max(stored, int(slots.max()) + 1)
        self._write_changed(elements, flat, write, stored, at_cursor=True)

    def assign(
        self,
        stop: int,
        leaves: Mapping[Path, torch.Tensor],
        at: Any,
        batch: torch.Size,
        *,
        time_dim: int = 0,
    ) -> None:
        """Write leaves ``[*batch, *F]`` into rows; see ``Columns.assign``."""
        stored = {path: leaf for path, leaf in leaves.items() if path not in self.pairs.root_of}

        def write() -> None:
            if stored:
                self.rows.assign(stop, stored, at, batch, time_dim=time_dim)

        paired = {path: leaf for path, leaf in leaves.items() if self._in_pair(path)}
        if not paired:
            write()
            return
        elements = self._selected(stop, at, time_dim).reshape(-1)
        last = last_occurrences(elements.cpu())
        if not isinstance(last, slice):
            last = last.to(self.device)
        flat = {
            path: carried(leaf).reshape(len(elements), *self.schema.leaves[path].shape)[last]
            for path, leaf in paired.items()
        }
        flat = {path: self.rows.own(leaf) for path, leaf in flat.items()}
        self._edit(elements[last], flat, write)

    def put(self, cells: Sequence[torch.Tensor], leaves: Mapping[Path, torch.Tensor]) -> None:
        """Write leaves ``[K, *F]`` into distinct rows; see ``Columns.put``."""
        stored = {path: leaf for path, leaf in leaves.items() if path not in self.pairs.root_of}

        def write() -> None:
            self.rows.put(cells, stored)

        flat = {path: self.rows.own(leaf) for path, leaf in leaves.items() if self._in_pair(path)}
        if not flat:
            write()
            return
        elements = ravel(torch.stack(list(cells), -1), self.lanes).to(self.device)
        self._edit(elements, flat, write)

    def _in_pair(self, path: Path) -> bool:
        return path in self.pairs.root_of or path in self._roots.tensors

    def _edit(self, elements: torch.Tensor, flat: _Leaves, write: Callable[[], None]) -> None:
        """Replace some values of stored elements that are in pairs; other values stay."""
        if not len(elements):
            return
        self._forget_newest()
        known = dict(flat)
        for path, leaf in (*self._at_root(elements).items(), *self._following(elements).items()):
            known.setdefault(path, leaf)
        self._write_changed(elements, known, write, self._stored)

    def _write_changed(
        self,
        elements: torch.Tensor,
        flat: _Leaves,
        write: Callable[[], None],
        stored: int,
        *,
        at_cursor: bool = False,
    ) -> None:
        """Write distinct elements ``[K]``, and update the overflow entries around them.

        Args:
            flat: the values of all leaves in pairs after the write, ``[K, *F]``.
            write: function that writes the elements without counterparts. It is called again after
                an interrupt.
            stored: number of time slots that held rows before the write.
        """
        near = self._neighbours(elements, stored, at_cursor=at_cursor)
        nexts = {path: flat[path] for path in self._nexts}
        roots = {path: flat[root] for path, root in self.pairs.root_of.items()}
        alone = torch.ones(len(elements), dtype=torch.bool, device=self.device)
        for rows, followers in near.inside:
            alone[rows] = any_differing(carried_rows(nexts, rows), carried_rows(roots, followers))
        if len(near.outside):
            held = self._at_root(self._after(elements[near.outside]))
            held = {path: held[root] for path, root in self.pairs.root_of.items()}
            alone[near.outside] = any_differing(carried_rows(nexts, near.outside), held)
        places = alone.nonzero().flatten()
        holders, values = elements[places], carried_rows(nexts, places)
        entries = self._overflow.entries(elements)
        cleared, back = elements, entries[entries > 0]
        if len(near.before):
            # The rows before keep their counterparts, in an entry or as the new root values.
            current, entries = self._following(near.before), self._overflow.entries(near.before)
            differs = any_differing(current, carried_rows(roots, near.after_before))
            freed, lost = ~differs & (entries > 0), differs & (entries == 0)
            cleared, back = (
                torch.cat([cleared, near.before[freed]]),
                torch.cat([back, entries[freed]]),
            )
            if bool(lost.any()):
                holders = torch.cat([holders, near.before[lost]])
                values = {
                    p: torch.cat([leaf, carried(current[p])[lost]]) for p, leaf in values.items()
                }
        change = self._overflow.plan(back.to(torch.int64) - 1, len(holders))

        self._commit(change, values, cleared, holders, write)

    def _neighbours(self, elements: torch.Tensor, stored: int, *, at_cursor: bool) -> Neighbours:
        total = self._elements
        return neighbours(elements, self._cells, total, stored * self._cells, at_cursor=at_cursor)

    def _forget_newest(self) -> None:
        """Forget the newest row, so that the next rows need not continue it."""

    def _commit(
        self,
        change: Change,
        values: _Leaves,
        cleared: torch.Tensor,
        holders: torch.Tensor,
        write: Callable[[], None],
    ) -> None:
        """Write rows, remove the entries of ``cleared``, and give ``holders`` new entries."""
        if self.journal is not None:
            self.journal.journal(torch.cat([cleared, holders]), change.numbers.numpy())

        def commit() -> None:
            write()
            self._overflow.commit(change, values)
            self._overflow.assign(cleared, None)
            self._overflow.assign(holders, change.numbers)

        try:
            commit()
        except KeyboardInterrupt:
            commit()
            raise
