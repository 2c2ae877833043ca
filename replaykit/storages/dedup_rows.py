"""Read and write rows whose next observations are stored with the row after them."""

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
from replaykit.storages.dedup_native import NativeOnce
from replaykit.storages.indexing import last_occurrences, ravel, selected_elements
from replaykit.storages.next_rows import Links, Pairs
from replaykit.storages.overflow_table import Beside, Change, Grow
from replaykit.storages.recoverable import BESIDE, FOLLOWERS, rows_as_bytes
from replaykit.storages.row_files import RowFiles, grow_in_files
from replaykit.storages.slot_sets import Neighbours, neighbours
from replaykit.storages.tensor_bytes import any_differing, carried, carried_rows, picked
from replaykit.structure import Path, assembler
from replaykit.ted import format_key

if TYPE_CHECKING:
    from replaykit.storages.recoverable import Recovery

__all__ = ["FollowedRows", "KeptOnce", "SettledRows"]

_Leaves = dict[Path, torch.Tensor]


class FollowedRows:
    """The reading face of ``OnceColumns``: as that of ``Columns``, with all leaves.

    Rows are elements here, counted through time slots and lanes; the one that follows an element
    lies one time slot further, round the ring, in the same lane, or where ``links`` say.

    Args:
        pairs: which leaves are those of the following row.
        rows: columns of the leaves that every row has.
        grow: takes memory for the rows beside.
        links: where the following rows lie, without lanes.

    Attributes:
        order: the paths, in the order in which leaves are gathered.
        advise: whether the kernel is told which pages of mapped files a batch will touch.

    Cost of a read: that of a dense one, and a few operations on int64 ``[B]``.
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
        # The counterparts come out in the order of the roots.
        self._nexts = [next_of[root] for root in self._roots.order]
        self._beside = Beside(pairs.beside, self._elements, self.device, grow)
        self._links = links
        self._arrange(pairs)

    def _arrange(self, pairs: Pairs) -> None:
        """Work out what follows from which leaves there are."""
        self.pairs = pairs
        self.schema = pairs.schema
        self.order = [*self.rows.order, *self._nexts]
        self._assemble = assembler(self.schema.root, self.order)
        self._native = NativeOnce.over(pairs, self.rows, self._beside, self._links)
        if self._native is not None:
            self._assemble_native = assembler(self.schema.root, self._native.order)
        # Where the leaves of every row are among all.
        places = {path: place for place, path in enumerate(pairs.schema.leaves)}
        self._places = [places[path] for path in self.rows.tensors]

    def add(self, schema: Schema, tensors: Mapping[Path, torch.Tensor]) -> None:
        """Take more leaves, which every row has; see ``Columns.add``."""
        pairs = self.pairs
        stored = schema.part([path for path in schema.leaves if path not in pairs.root_of])
        self.rows.add(stored, tensors)
        self._arrange(replace(pairs, schema=schema, stored=stored))

    def __getitem__(self, path: Path) -> torch.Tensor:
        """A leaf as it lies, to look at; KeyError for what is rebuilt and lies nowhere."""
        if path in self.pairs.root_of:
            raise KeyError(
                f"{format_key(path)} is stored once, under {format_key(self.pairs.root_of[path])}, "
                "and cannot tell where episodes end; give dedup_next the other keys"
            )
        return self.rows[path]

    def follow_memory(self) -> None:
        """Looks where the columns lie: whoever holds a view may have had the memory moved."""
        self.rows.follow_memory()

    @property
    def kept_beside(self) -> int:
        """Number of rows (elements, for ``ndim > 1``) that have their counterparts beside."""
        return len(self._beside)

    def nbytes(self) -> int:
        """Bytes of memory, or of files, that the rows take, those beside among them."""
        return self.rows.nbytes() + self._beside.nbytes()

    def read(self, index: torch.Tensor, length: int, *, contiguous: bool = False) -> Any:
        """Reads the rows at slots ``[B]`` (coordinates ``[B, ndim]``) into a fresh container.

        Raises:
            IndexError: a slot outside ``[0, length)``; not on devices where asking means waiting.
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
        """Copies rows out: leaves ``[B, *F]`` by path; as ``read``, by default of all slots."""
        length = self.slots if length is None else length
        found = dict(zip(self.order, self._gather(index, length, contiguous), strict=True))
        return {path: found[path] for path in self.schema.leaves}

    def gather_keys(self, paths: Sequence[Path], elements: torch.Tensor) -> _Leaves:
        """Copies some leaves of rows out: ``[B, *F]`` by path; see ``Columns.gather_keys``."""
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
        """The counterparts of elements ``[B]``: ``[B, *F]``, in fresh memory."""
        if self._native is not None and contiguous:
            found = self._native.following(elements)
            if found is not None:
                return found
        after = self._after(elements)
        leaves = self._roots.gather_elements(after, self._elements, contiguous=contiguous)
        return self._beside.patch(elements, dict(zip(self._nexts, leaves, strict=True)))

    def _after(self, elements: torch.Tensor) -> torch.Tensor:
        """The elements that follow elements ``[B]``.

        The one after the newest row may never have been written; what it holds is not asked for.
        """
        if self._links is not None:
            return self._links.after(elements)
        return (elements + self._cells).remainder_(self._elements)

    def column(self, path: Path, stop: int) -> torch.Tensor:
        """Returns the first ``stop`` slots of a leaf: a copy where it is one of a pair."""
        if path not in self.pairs.root_of and path not in self.pairs.root_of.values():
            return self.rows.column(path, stop)
        elements = arange(stop * self._cells).to(self.device)
        if path in self.pairs.root_of:
            found = self._following(elements, contiguous=True)
        else:
            found = self._at_root(elements, contiguous=True)
        return found[path].view(stop, *self.lanes, *self.schema.leaves[path].shape)

    def _at_root(self, elements: torch.Tensor, contiguous: bool = False) -> _Leaves:
        """The root values in pairs of elements ``[B]``, in fresh memory."""
        part = self._roots
        leaves = part.gather_elements(elements, self._elements, contiguous=contiguous)
        return dict(zip(part.order, leaves, strict=True))

    def view(self, stop: int, index: Any = None, *, time_dim: int = 0) -> _Leaves:
        """Indexes the first ``stop`` slots: copies of leaves in pairs, else as ``Columns.view``.

        A view of a root value would let it be changed without the row before.
        """
        leaves = self.rows.view(stop, index, time_dim=time_dim)
        numbers = self._selected(stop, slice(None) if index is None else index, time_dim)
        elements = numbers.reshape(-1)
        for found in (self._at_root(elements, True), self._following(elements, True)):
            for path, leaf in found.items():
                leaves[path] = leaf.view(numbers.shape + leaf.shape[1:])
        return {path: leaves[path] for path in self.schema.leaves}

    def _selected(self, stop: int, index: Any, time_dim: int) -> torch.Tensor:
        """Numbers of the elements that an index selects of the first ``stop`` slots."""
        shape, strides, step = [stop, *self.lanes], [], self._cells
        for size in (1, *self.lanes):
            step //= size
            strides.append(step)
        for grid in (shape, strides):
            grid[0], grid[time_dim] = grid[time_dim], grid[0]
        return selected_elements(index, torch.Size(shape), strides).to(self.device)

    def own_following(self, stop: int) -> tuple[torch.Tensor, _Leaves]:
        """What is needed beside the root values of the first ``stop`` slots to rebuild them all.

        Returns:
            Elements, rising, int64 ``[K]``, and their counterparts ``[K, *F]``: those that do not
            follow from the row behind them, which is the first one for the last of a full ring.
        """
        elements = self._beside.elements_with(stop * self._cells)
        if stop and stop < self.slots:
            last = arange((stop - 1) * self._cells, stop * self._cells).to(self.device)
            elements = torch.cat([elements[elements < last[0]], last])
        return elements, self._following(elements, True)


Array = np.ndarray[Any, Any]

_ENTRIES = 500
"""Numbers of the journal's targets, from here on: the files of the entries beside."""


class KeptOnce:
    """The entries beside the rows, the map that says whose they are, and the links between rows.

    They are changed where they lie, in mapped files; what was there is noted before, with the
    storage's lock held. Which entries are free, which row lies before which, and which is the
    newest of its stream follows from them (``OnceColumns.reread``).

    An entry that an operation has given back may be overwritten by it. The core takes such entries
    without a word, so that they are noted when it gives them back; whoever does not note them then
    keeps the core from writing until the next commit (``loose``).

    Args:
        recovery: that of the storage, which notes and commits.
        folder: where the entries lie.
    """

    def __init__(self, recovery: Recovery, folder: FilePath) -> None:
        self._recovery, self._folder = recovery, folder
        self._grow_files = grow_in_files(folder)
        self.files: list[FilePath] = []
        """Those of the entries, once there are any."""
        self._entries: Sequence[int] = ()
        self._loose = 0
        self._map: Array = np.zeros(0, np.int32)

    # -- files --------------------------------------------------------------------------------

    def grow(self, schema: Schema, entries: int, table: Columns | None) -> Columns:
        """Takes room for entries; as ``beside.Grow``."""
        grown = self._grow_files(schema, entries, table)
        self._take(grown)
        return grown

    def open(self, schema: Schema, elements: int) -> None:
        """Maps what is there, for the journal to put back what it has of it.

        Raises:
            CheckpointError: a file is no plain one; names it.
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
            self._take(RowFiles.of(self._folder, schema, entries, torch.Size()).opened(1))

    def table(self, schema: Schema) -> Columns | None:
        """The entries up to the last one that the map tells of; None: it tells of none.

        Of those behind it nobody knows whether the disk has room for them.

        Raises:
            CheckpointError: a file has fewer, or is not there; names it.
        """
        entries = int(self._map.max(initial=0))
        if entries < 1:
            return None
        plan = RowFiles.of(self._folder, schema, entries, torch.Size())
        for path, file in plan.files.items():
            check_file(file, plan.nbytes(path), exactly=False)
        found = plan.opened(1)
        self._take(found)
        return found

    def _take(self, table: Columns) -> None:
        cells = rows_as_bytes(table)
        self._entries = range(_ENTRIES, _ENTRIES + len(cells))
        plan = RowFiles.of(self._folder, table.schema, table.slots, torch.Size())
        targets = dict(zip(self._entries, cells.values(), strict=True))
        self.files = list(plan.files.values())
        self._recovery.home.also(targets, self.files)

    def map(self, elements: int, dtype: Any, *, there: bool) -> Array:
        """The memory of the map, ``[elements]``; ``there``: made before.

        Raises:
            CheckpointError: it is not there; names the file.
        """
        self._map = self._table(BESIDE, elements, dtype, there)
        return self._map

    def followers(self, slots: int, dtype: Any, *, there: bool) -> Array:
        """The same of how far away the next row of each lies."""
        return self._table(FOLLOWERS, slots, dtype, there)

    def _table(self, number: int, rows: int, dtype: Any, there: bool) -> Array:
        home = self._recovery.home
        if there:
            home.check_table(number, dtype, rows)
        return home.table(number, dtype, rows)[:rows]

    # -- changes ------------------------------------------------------------------------------

    @property
    def loose(self) -> bool:
        """Whether entries were given back since the last commit that were not noted."""
        return self._loose == self._recovery.home.noted()[0]

    def note(self, elements: torch.Tensor | range, numbers: Array) -> None:
        """Notes what is about to change: the map at elements, and entries that get values."""
        at = elements if isinstance(elements, range) else elements.numpy()
        self._recovery.note_more(BESIDE, at)
        self._note_entries(numbers)
        self._loose = self._recovery.home.noted()[0]

    def note_ring(self, first: int, count: int) -> None:
        """Notes what the core changes by writing rows from slot ``first`` on, round the ring,
        behind the one before: its entry and theirs come back.

        The rows were noted already: what an ``extend`` costs beside them.
        """
        slots, home = len(self._map), self._recovery.home
        start = (first or slots) - 1
        stop = start + count + 1
        for begin, end in ((start, min(stop, slots)), (0, stop - slots)):
            if end > begin:
                home.note(BESIDE, range(begin, end))
                used = self._map[begin:end]
                self._note_entries(used[used.nonzero()] - 1)

    def note_linked(self, slots: Array) -> None:
        """The same where rows of streams are written.

        Args:
            slots: those of the rows, of the rows before them, and of the newest rows of streams.
        """
        self._recovery.home.note(BESIDE, slots)
        self._recovery.home.note(FOLLOWERS, slots)
        used = np.unique(self._map[slots])
        self._note_entries(used[used.nonzero()] - 1)

    def note_links(self, slots: torch.Tensor | range) -> None:
        """Notes that other rows will follow some."""
        at = slots if isinstance(slots, range) else slots.numpy()
        self._recovery.note_more(FOLLOWERS, at)

    def _note_entries(self, numbers: Array) -> None:
        home = self._recovery.home
        if not len(numbers):
            return
        at: Array | range = numbers.astype(np.int64, copy=False)
        if len(numbers) == 1:  # which takes a third of the time
            at = range(int(numbers[0]), int(numbers[0]) + 1)
        for target in self._entries:
            home.note(target, at)


class SettledRows(FollowedRows):
    """The half of ``OnceColumns`` that writes and edits rows wherever they lie.

    What follows a row, and what a row follows, may change by it: whoever changes a root value puts
    beside what the row before had there, in the same step.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow, links: Links | None = None) -> None:
        super().__init__(pairs, rows, grow, links)
        self._stored = 0  # time slots that hold rows, or held some
        self.kept: KeptOnce | None = None
        """Where what tells of the rows is kept; None: in memory, as long as this lives."""

    @property
    def _is_loose(self) -> bool:
        """Whether the core has to keep from writing; see ``KeptOnce``."""
        return self.kept is not None and self.kept.loose

    def scatter(
        self, slots: torch.Tensor, leaves: Mapping[Path, Any], kept: torch.Tensor | slice
    ) -> None:
        """Writes rows ``kept`` of the leaves to distinct slots ``[K]`` of dimension 0.

        An interrupt from the keyboard is passed on when all is written.
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
        self._settle(elements, flat, write, stored, at_cursor=True)

    def assign(
        self,
        stop: int,
        leaves: Mapping[Path, torch.Tensor],
        at: Any,
        batch: torch.Size,
        *,
        time_dim: int = 0,
    ) -> None:
        """Writes leaves ``[*batch, *F]`` into rows; see ``Columns.assign``."""
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
        """Writes leaves ``[K, *F]`` into distinct cells, int64 ``[K]`` for each dimension."""
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
        """Replaces some values in pairs of stored elements; the others are as they are stored."""
        if not len(elements):
            return
        self._forget_newest()
        known = dict(flat)
        for path, leaf in (*self._at_root(elements).items(), *self._following(elements).items()):
            known.setdefault(path, leaf)
        self._settle(elements, known, write, self._stored)

    def _settle(
        self,
        elements: torch.Tensor,
        flat: _Leaves,
        write: Callable[[], None],
        stored: int,
        *,
        at_cursor: bool = False,
    ) -> None:
        """Has distinct elements ``[K]`` written, and puts beside what does not follow any more.

        Args:
            flat: all leaves in pairs that the elements have afterwards, ``[K, *F]``.
            write: writes them, but for the counterparts; called again after an interrupt.
            stored: how many time slots held rows before.
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
        entries = self._beside.entries(elements)
        cleared, back = elements, entries[entries > 0]
        if len(near.before):
            # The rows before keep what they have, wherever it has to be.
            current, entries = self._following(near.before), self._beside.entries(near.before)
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
        change = self._beside.plan(back.to(torch.int64) - 1, len(holders))

        self._commit(change, values, cleared, holders, write)

    def _neighbours(self, elements: torch.Tensor, stored: int, *, at_cursor: bool) -> Neighbours:
        total = self._elements
        return neighbours(elements, self._cells, total, stored * self._cells, at_cursor=at_cursor)

    def _forget_newest(self) -> None:
        """Told that nothing is expected of what comes next."""

    def _commit(
        self,
        change: Change,
        values: _Leaves,
        cleared: torch.Tensor,
        holders: torch.Tensor,
        write: Callable[[], None],
    ) -> None:
        """Makes a change: rows are written, ``cleared`` have no entry, ``holders`` new ones."""
        if self.kept is not None:
            self.kept.note(torch.cat([cleared, holders]), change.numbers.numpy())

        def commit() -> None:
            write()
            self._beside.commit(change, values)
            self._beside.assign(cleared, None)
            self._beside.assign(holders, change.numbers)

        try:
            commit()
        except KeyboardInterrupt:
            commit()
            raise
