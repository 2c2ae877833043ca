"""Store each observation once, and let rows refer to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.episodes.streams import key_dtype, stream_keys
from replaykit.schema import Rows, Schema
from replaykit.storages.columns import Columns, Grow
from replaykit.storages.indexing import elements_at, elements_of, ravel
from replaykit.storages.ledger import Ledger
from replaykit.storages.memory import any_differing
from replaykit.storages.next_rows import (
    Chains,
    Pairs,
    StreamTails,
    adjacent,
    chains,
    check_follows,
    following_lanes,
)
from replaykit.storages.observation_table import ObservationTable
from replaykit.storages.references import NEXT, OBSERVATION, entries_of
from replaykit.structure import Path, assembler
from replaykit.ted import format_key
from replaykit.transfer import BatchMemory

Array = np.ndarray[Any, Any]
_Leaves = dict[Path, torch.Tensor]

_PART = 4
"""If more than one of this many rows has changed, all of them are read."""


class DedupColumns:
    """Columns whose rows refer to observations in a separate table.

    The class has the methods of ``Columns``. An element is the number ``slot * lanes + lane`` of a
    row. The observation of a row is its leaves at the root that are in pairs, and its next
    observation is their counterparts under ``next``. Both are entries of one table. The columns of
    the root leaves hold as many entries as there are rows, and overflow entries hold the others.

    A write decides once whether a row shares an entry: its observation with the next observation of
    the row before, or its next observation with the observation of the row after. They share one
    only if their bits are equal. A change gives a row other entries. It changes no other row.

    Args:
        pairs: the leaves that are stored once.
        rows: columns of the other leaves and of the root leaves.
        grow: function that allocates memory for overflow entries.
        key: path of the leaf that names the stream of a row. None if the row before is in the
            time slot before.

    Attributes:
        order: the paths, in the order in which leaves are gathered.
        advise: whether to request the pages of a batch in mapped files from the kernel in advance.
        table: the observations, and the references to them.

    Cost: a write takes the time of a dense write, and one more pass over the leaves in pairs. A
    read takes the time of a dense read. Streams take a dict entry each. Pages of all tables are
    allocated when rows are written.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow, key: Path | None = None) -> None:
        self.rows = rows
        self.ndim, self.slots, self.lanes = rows.ndim, rows.slots, rows.lanes
        self.device, self.advise, self.changes = rows.device, rows.advise, rows.changes
        self._cells = rows.lanes.numel()
        self._elements = rows.slots * self._cells
        self.table = ObservationTable(pairs, rows, grow)
        self.key = key
        # The next row at the cursor continues the rows of this time slot, or the newest rows of
        # these streams. No row continues lanes that are severed.
        self._newest: int | None = None
        self._severed: Array = np.zeros(self._cells, np.bool_)
        self._continuing: set[Any] = set()
        self._compared: Any = None  # rows that were compared, their streams, and what was compared
        self._tails: StreamTails | None = None
        if key is not None:
            leaf = pairs.schema.leaves[key]
            self._tails = StreamTails(rows, key, key_dtype(leaf.shape, leaf.dtype))
        # The rows before and after the rows of a load, their streams, and their order.
        self._coming: tuple[Array, Array, Chains | None, Array] | None = None
        # The ledger of the rows, and the number of its log that this object has seen, if all other
        # data must be derived before the next write.
        self._outdated: tuple[Ledger, int] | None = None
        self._arrange(pairs)

    def _arrange(self, pairs: Pairs) -> None:
        """Derive the other attributes from the leaves."""
        self.pairs, self.schema, self._root_of = pairs, pairs.schema, pairs.root_of
        roots = list(pairs.root_of.values())
        # The columns of the other leaves; None if there are none. Root leaves in records are read
        # with them, and replaced.
        packed = {} if self.rows.layout is None else self.rows.layout.offsets
        self._others: Columns | None = self.rows
        if any(root not in packed for root in roots):
            stored = [path for path in self.rows.tensors if path not in roots]
            self._others = self.rows.part(stored) if stored else None
        known = {*roots, *pairs.root_of}
        others = [] if self._others is None else self._others.order
        self.order = [*(path for path in others if path not in known), *roots, *pairs.root_of]
        self._assemble = assembler(self.schema.root, self.order)
        if self.table.native is not None:
            self._assemble_native = assembler(self.schema.root, self.table.native.order)

    def add(self, schema: Schema, tensors: Mapping[Path, torch.Tensor]) -> None:
        """Add leaves that are stored for every row; see ``Columns.add``."""
        pairs = self.pairs
        stored = schema.part([path for path in schema.leaves if path not in pairs.root_of])
        self.rows.add(stored, tensors)
        pairs = replace(pairs, schema=schema, stored=stored)
        self.table.arrange(pairs)
        self._arrange(pairs)

    # -- memory -------------------------------------------------------------------------------

    @property
    def batch_memory(self) -> BatchMemory:
        """The memory of large batches, which later batches reuse."""
        return self.rows.batch_memory

    def refresh_addresses(self) -> None:
        """Update addresses of memory that has moved; see ``Columns.refresh_addresses``."""
        self.rows.refresh_addresses()

    def check_writable(self) -> None:
        """Do nothing, because these rows share no memory."""

    def nbytes(self) -> int:
        """Return the bytes, in memory or in files, of the rows and of the observations."""
        return self.rows.nbytes() + self.table.nbytes()

    @property
    def overflow_rows(self) -> int:
        """Number of elements whose next observation is not the observation of an element."""
        self._derive()
        self.table.read_references()
        return int(self.table.core.alone())

    def clear(self) -> None:
        """Remove the references of all rows; the memory stays allocated."""
        self.table.clear()
        self._outdated = None
        self.rows.batch_memory.clear()
        self._forget_newest()
        self._coming = None
        if self._tails is not None:
            self._tails.clear()

    def outdate(self, ledger: Ledger, seen: int = -1) -> None:
        """Have the next write derive all other data from the tables in files.

        The tables have changed by a rollback, or by another process. The next rows need not
        continue the stored rows.

        Args:
            seen: number of the ledger's log before the changes; -1 if the log lacks them.
        """
        self.forget()
        self._forget_newest()
        if self._outdated is not None:
            seen = min(seen, self._outdated[1])
        self._outdated = ledger, seen

    def _derive(self) -> None:
        if self._outdated is None:
            return
        ledger, seen = self._outdated
        self._outdated = ledger, -1  # until everything is derived
        paths = {*self._root_of, *self._root_of.values()}
        slots = ledger.log.slots_since(seen, self.slots, paths, moves=True)
        self.table.read_stored(ledger.length)
        if slots is None or _PART * sum(map(len, slots)) > self.table.stored:
            self.reread(ledger)
        elif slots:
            changed = torch.from_numpy(np.unique(np.concatenate(slots)))
            self.table.follow(self._elements_at(changed))
            written = ledger.log.slots_since(seen, self.slots, edits=False, moves=True)
            if self._tails is not None and written:
                at = torch.from_numpy(np.unique(np.concatenate(written)))
                if len(at := at[at < ledger.length]):
                    self._tails.follow(at[ledger.positions(at).argsort()])
        self._outdated = None

    def reread(self, ledger: Ledger) -> None:
        """Derive all other data from the tables in files, as after a recovery.

        Raises:
            ValueError: the references contradict each other.
        """
        self.table.reread(ledger.length)
        self._forget_newest()
        if self._tails is not None:
            alone = self.table.lone_ends(ledger.length)
            order = np.argsort(ledger.positions(torch.from_numpy(alone)).numpy())
            self._tails.found(torch.from_numpy(alone[order]))

    # -- reading ------------------------------------------------------------------------------

    def __getitem__(self, path: Path) -> torch.Tensor:
        """Return a leaf that every row has; KeyError for a leaf that is in a pair."""
        if path in self._root_of or path in self._root_of.values():
            root = self._root_of.get(path, path)
            raise KeyError(
                f"expected a column with one value for each row, got {format_key(path)}, which is "
                f"stored once, under {format_key(root)}; leave it out of dedup_next"
            )
        return self.rows[path]

    def read(self, index: torch.Tensor, length: int, *, contiguous: bool = False) -> Any:
        """Read the rows at slots ``[B]`` into a new container.

        With lanes, ``index`` holds coordinates ``[B, ndim]``.

        Raises:
            IndexError: a slot is outside ``[0, length)``. Only an index on the CPU is checked,
                because the check would wait for any other device.
        """
        native = self.table.native
        if native is not None and not contiguous and not self.advise:
            elements = self._elements_of(index)
            self.table.read_references()
            self.table.point()
            found = native.gather(elements, length * self._cells)
            if found is not None:
                return self._assemble_native(found, index.shape[:1], self.device)
        leaves = self._gather(self._elements_of(index), length, contiguous)
        return self._assemble([leaves[p] for p in self.order], index.shape[:1], self.device)

    def gather(
        self, index: torch.Tensor, length: int | None = None, *, contiguous: bool = False
    ) -> _Leaves:
        """Copy rows as ``read`` does, into leaves ``[B, *F]`` by path.

        The default ``length`` is the number of slots.
        """
        length = self.slots if length is None else length
        found = self._gather(self._elements_of(index), length, contiguous)
        return {path: found[path] for path in self.schema.leaves}

    def gather_keys(self, paths: Sequence[Path], elements: torch.Tensor) -> _Leaves:
        """Copy some leaves of rows, ``[B, *F]`` by path; see ``Columns.gather_keys``."""
        roots = self._root_of.values()
        stored = [path for path in paths if path not in self._root_of and path not in roots]
        found = self.rows.gather_keys(stored, elements) if stored else {}
        if len(stored) < len(paths):
            elements = elements.to(self.device, torch.int64)
            if any(path in self._root_of for path in paths):
                found.update(self.table.shown(elements, NEXT))
            if any(path in roots for path in paths):
                found.update(self.table.shown(elements, OBSERVATION))
        return {path: found[path] for path in paths}

    def _elements_of(self, index: torch.Tensor) -> torch.Tensor:
        elements = index if self.ndim == 1 else ravel(index, self.lanes)
        if elements.dtype is not torch.int64 or elements.device != self.device:
            elements = elements.to(self.device, torch.int64)
        return elements

    def _gather(self, elements: torch.Tensor, length: int, contiguous: bool) -> _Leaves:
        limit = length * self._cells
        found: _Leaves = {}
        if self._others is not None:
            leaves = self._others.gather_elements(elements, limit, contiguous=contiguous)
            found.update(zip(self._others.order, leaves, strict=True))
        for kind in (OBSERVATION, NEXT):
            found.update(self.table.shown(elements, kind, contiguous))
        return found

    def parts(self, paths: Iterable[Path], first: int, until: int) -> dict[Path, torch.Tensor]:
        """Return some slots of leaves that every row has, as ``Columns.parts`` does."""
        return self.rows.parts(paths, first, until)

    def column(self, path: Path, stop: int) -> torch.Tensor:
        """Return the first ``stop`` slots of a leaf, copied if the leaf is in a pair."""
        kind = NEXT if path in self._root_of else OBSERVATION
        if kind == OBSERVATION and path not in self._root_of.values():
            return self.rows.column(path, stop)
        found = self.table.shown(arange(stop * self._cells).to(self.device), kind)
        return found[path].view(stop, *self.lanes, *self.schema.leaves[path].shape)

    def view(self, stop: int, index: Any = None, *, time_dim: int = 0) -> _Leaves:
        """Index the first ``stop`` slots as ``Columns.view``; leaves in pairs are copied."""
        leaves = self.rows.view(stop, index, time_dim=time_dim)
        index = slice(None) if index is None else index
        numbers = elements_at(index, stop, self.lanes, time_dim).to(self.device)
        for kind in (OBSERVATION, NEXT):
            for path, leaf in self.table.shown(numbers.reshape(-1), kind).items():
                leaves[path] = leaf.view(numbers.shape + leaf.shape[1:])
        return {path: leaves[path] for path in self.schema.leaves}

    # -- previous rows -----------------------------------------------------------------------------

    def _forget_newest(self) -> None:
        self._newest = self._compared = None
        self._severed[:] = False
        self._continuing = set()

    @property
    def continuing(self) -> set[Any]:
        """Streams whose next row must continue the newest row.

        ``_forget_newest`` replaces this set. It does not change the set in place.
        """
        return self._continuing

    def continues_from(self, streams: set[Any], keys: Array) -> None:
        """Require that the next rows of these streams continue the stored rows.

        ``streams`` and ``keys`` both hold keys of streams. ``keys`` are added to ``streams``.
        """
        streams.update(keys.tolist())
        self._continuing = streams

    def sever(self, lanes: Any) -> None:
        """End the episodes of the newest rows.

        ``lanes`` is bool ``[lanes]``, or holds the keys of streams; None for all.
        """
        if self.key is not None and lanes is not None:
            self._continuing.difference_update(lanes)
        elif self.key is not None:
            self._continuing = set()
        else:
            self._severed |= True if lanes is None else torch.as_tensor(lanes).cpu().numpy()

    def check(self, rows: Any, first: int, *, matched: bool) -> None:
        """Check the next rows, each against the row before it.

        The result is kept for the next write, which must write the same rows.

        Args:
            first: slot of the first row in the ring.
            matched: True if the rows have addresses, in the order of the schema.

        Raises:
            ValueError: a row continues an episode, but differs from the next observation of the row
                before.
        """
        self._derive()
        table = self.table
        sources = table.sources(rows, slice(None), matched=matched)
        try:
            streams, wrong = self._compare(rows.leaves, slice(None), len(rows), first, sources)
            if wrong & 1 or (wrong and self._expects(first)):
                self._check_slowly(rows, first, streams)
        except BaseException:
            table.core.forget()
            raise
        self._compared = rows, streams, sources

    def forget(self) -> None:
        """Drop the result of the last comparison, whose rows will not be written."""
        self._compared = None
        self.table.core.forget()

    def _expects(self, first: int) -> bool:
        """Return whether a row from slot ``first`` on may have to continue a stored row."""
        if self._tails is not None:
            return bool(self._continuing)
        return self._newest == (first - 1) % self.slots and not self._severed.all()

    def _check_slowly(self, rows: Rows, first: int, streams: Chains | None) -> None:
        count = len(rows) * self._cells
        if streams is None:
            before, at = following_lanes(count, self._cells, -1), np.zeros(0, np.int64)
            if self._newest is not None and self._newest == (first - 1) % self.slots:
                at = np.flatnonzero(~self._severed)
            slots = at + (self._newest or 0) * self._cells
        else:
            assert self._tails is not None
            before = streams.before(count)
            places, slots = self._tails.of(streams)
            names = streams.keys[places].tolist()
            expected = np.array([name in self._continuing for name in names], np.bool_)
            at, slots = streams.first[places[expected]], slots[expected]
        leaves = {
            path: leaf.reshape(count, *self.schema.leaves[path].shape)
            for path, leaf in rows.leaves.items()
        }
        stored: _Leaves = {}
        if len(at):
            elements = torch.from_numpy(slots).to(self.device)
            stored = self.gather_keys(list(self.schema.leaves), elements)
        check_follows(
            leaves, before, self.pairs, self._cells, stored, at, streams=streams is not None
        )

    def _compare(
        self, leaves: Mapping[Path, Any], kept: Any, count: int, first: int, sources: Any
    ) -> tuple[Chains | None, int]:
        """Compare ``count`` new rows with the rows before them.

        ``first`` is the slot of the first row, if rows follow each other in the ring.

        Returns:
            The streams of the rows, and the result of ``ObservationTable.compare``.
        """
        self._compared = None
        if self._tails is None:
            return None, self.table.compare_run(first, count, sources)
        assert self.key is not None
        keys = stream_keys(leaves[self.key])
        found = chains(keys[kept] if isinstance(kept, slice) else keys[kept.numpy()])
        before = found.before(count)
        at, slots = self._tails.of(found)
        before[found.first[at]] = -2 - slots
        return found, self.table.compare(before, None, sources)

    # -- writing ------------------------------------------------------------------------------

    def write_ring(self, first: int, rows: Rows, skipped: int, *, matched: bool) -> None:
        """Write ``rows[skipped:]`` at the slots from ``first + skipped`` on, in the ring.

        These rows become the newest. The next rows at the cursor follow them in time.

        Args:
            matched: True if ``rows`` is a `MatchedRows`, which has the memory addresses of its
                leaves in the order of the schema.
        """
        kept, first, count = (
            slice(skipped, None),
            (first + skipped) % self.slots,
            len(rows) - skipped,
        )
        if self.key is not None:
            slots = (arange(count) + first) % self.slots
            self.write_streams(slots, rows, kept, matched=matched)
            return
        self._write(rows, kept, count, matched and not skipped, first, None)
        self._newest = (first + count - 1) % self.slots
        self._severed[:] = False

    def write_streams(
        self, slots: torch.Tensor, rows: Rows, kept: torch.Tensor | slice, *, matched: bool
    ) -> None:
        """Write ``rows[kept]`` to distinct slots ``[K]``, as ``scatter`` does.

        The next rows of the streams must continue these rows.

        Args:
            matched: True if the rows have addresses, in the order of the schema.
        """
        if not len(slots):
            return
        continuing, whole = self._continuing, len(slots) == len(rows)
        found = self._write(rows, kept, len(slots), matched and whole, 0, slots)
        assert found is not None
        if whole:
            keys = found.keys
        else:
            assert self.key is not None
            keys = stream_keys(rows.leaves[self.key])
        self.continues_from(continuing, keys)

    def _write(
        self,
        rows: Any,
        kept: torch.Tensor | slice,
        count: int,
        matched: bool,
        first: int,
        slots: torch.Tensor | None,
    ) -> Chains | None:
        """Write ``count`` rows at the slots from ``first`` on, or at ``slots``."""
        self._derive()
        known = self._compared
        if known is not None and known[0] is rows and count == len(rows):
            _, streams, sources = known
            self._compared = None
        else:
            sources = self.table.sources(rows, kept, matched=matched)
            streams, _ = self._compare(rows.leaves, kept, count, first, sources)
        elements = self._elements_at(slots) if slots is not None else None
        self.table.write(sources, elements, first, count, slots)
        self._update_tails(streams, slots)
        return streams

    def _elements_at(self, slots: torch.Tensor) -> Array:
        at = slots.numpy().astype(np.int64, copy=False)
        return np.ascontiguousarray(elements_of(at, self._cells))

    def _update_tails(self, found: Chains | None, slots: torch.Tensor | None) -> None:
        if self._tails is not None and found is not None and slots is not None:
            there = self._tails.append(found, slots)
            if there is not None:
                self._continuing.intersection_update(there)

    # -- writing anywhere -----------------------------------------------------------------------

    def scatter(
        self, slots: torch.Tensor, leaves: Mapping[Path, Any], kept: torch.Tensor | slice
    ) -> None:
        """Write rows ``kept`` of the leaves to distinct slots ``[K]`` of dimension 0.

        With streams, in the order of ``slots`` they become the newest rows of their streams. A
        KeyboardInterrupt is raised after everything is written.
        """
        if not len(slots):
            return
        self._derive()
        self._forget_newest()
        rows = Rows(self.schema.root, dict(leaves), torch.Size([len(slots), *self.lanes]))
        sources = self.table.sources(rows, kept, matched=False)
        elements = self._elements_at(slots)
        found = None
        if self.key is None:
            self.table.compare(*self._adjacent(elements), sources)
        else:
            found, _ = self._compare(sources, slice(None), len(slots), 0, sources)
        self.table.write(sources, elements, 0, len(slots), slots)
        self._update_tails(found, slots)

    def _adjacent(self, elements: Array) -> tuple[Array, Array]:
        return adjacent(elements, self._cells, self._elements, self.table.stored * self._cells)

    def reserve(self, entries: int) -> None:
        """Make room for as many overflow entries, before ``begin_fill`` removes rows."""
        self.table.reserve(entries)

    def begin_fill(self, count: int, keys: Array | None, order: torch.Tensor) -> None:
        """Remove all rows, before ``fill`` loads rows into the slots ``0, 1, ...``.

        Args:
            count: number of slots to load.
            keys: the keys of their streams, ``[count]`` by slot; None without streams.
            order: slots from the oldest row to the newest, int64 ``[count]``.
        """
        self.clear()
        if not count:
            return
        elements, cells = np.arange(count * self._cells), self._cells
        before, after, found = elements - cells, elements + cells, None
        if self.key is not None and keys is not None:
            slots = order.numpy()
            found = chains(keys[slots])
            before, after = np.full((2, count), -1)
            before[slots[found.followers]] = slots[found.rows]
            after[slots[found.rows]] = slots[found.followers]
        elif count == self.slots:
            before, after = before % self._elements, after % self._elements
        self._coming = before, after, found, order.numpy()

    def fill(self, start: int, leaves: Mapping[Path, Any], kept: torch.Tensor | slice) -> None:
        """Write rows ``kept`` of the leaves to the slots from ``start`` on.

        ``begin_fill`` has named all rows. The slots before ``start`` are already filled.
        """
        assert self._coming is not None
        rows = Rows(self.schema.root, dict(leaves), torch.Size([0, *self.lanes]))
        sources = self.table.sources(rows, kept, matched=False)
        count = len(next(iter(sources.values()))) // self._cells
        low, high = start * self._cells, (start + count) * self._cells
        before, after = (part[low:high] for part in self._coming[:2])
        # Rows that are not filled yet are found from the other side.
        inside = (before >= low) & (before < high)
        earlier = np.where((before >= 0) & (before < low), -2 - before, -1)
        inner = np.where(inside, before - low, earlier)
        self.table.compare(inner, np.where(after < low, after, -1), sources)
        self.table.write(sources, np.arange(low, high), 0, count, arange(start, start + count))
        found, order = self._coming[2:]
        if self.table.stored == len(self._coming[0]) // self._cells:
            self._update_tails(found, torch.from_numpy(order))
            self._coming = None

    def put(
        self, elements: torch.Tensor | None, leaves: Mapping[Path, torch.Tensor], stop: int = 0
    ) -> None:
        """Write leaves ``[K, *F]`` into distinct elements; see ``Columns.put``."""
        at = arange(stop * self._cells) if elements is None else elements
        stored = {path: leaf for path, leaf in leaves.items() if not self._in_pair(path)}
        paired = {
            path: leaf.reshape(len(at), *self.schema.leaves[path].shape)
            for path, leaf in leaves.items()
            if path not in stored
        }

        def write() -> None:
            if stored:
                self.rows.put(elements, stored, stop)

        self._edit(at if paired else None, paired, write, leaves)

    def _in_pair(self, path: Path) -> bool:
        return path in self._root_of or path in self._root_of.values()

    def _edit(
        self,
        elements: torch.Tensor | None,
        flat: Mapping[Path, torch.Tensor],
        write: Callable[[], None],
        leaves: Mapping[Path, Any],
    ) -> None:
        """Replace some values of stored elements; other values stay.

        Args:
            elements: the distinct elements of values in pairs; None if there are none.
            flat: the values in pairs, ``[K, *F]``.
            write: function that writes the other values.
            leaves: the values of all leaves that change, by path.
        """
        if self.key is not None and self.key in leaves:
            self._forget_newest()
        if elements is None:
            write()
            return
        if not len(elements):
            return
        self._derive()
        self._forget_newest()
        here = elements.to(self.device)
        sources, keep = {}, np.zeros(len(elements), np.uint8)
        for kind in (OBSERVATION, NEXT):
            known = self.table.shown(here, kind)
            paths = [path for path in known if path in flat]
            new = {p: self.rows.own(flat[p]).view(self.schema.leaves[p].dtype) for p in paths}
            new = {path: leaf.contiguous() for path, leaf in new.items()}
            changed = any_differing(new, known).cpu().numpy() if new else np.bool_(False)
            keep |= np.where(changed, 0, 1 << kind).astype(np.uint8)
            sources.update({**known, **new})
        at = elements.numpy()
        before, after = self._adjacent(at) if self.key is None else (self._followed(at), None)
        self.table.compare_by_torch(before, after, sources)
        slots = elements if self._cells == 1 else elements // self._cells
        self.table.write(sources, at, 0, len(at), slots, keep.ctypes.data, write)

    def _followed(self, elements: Array) -> Array:
        """Return for each element the place of the one whose next observation it shows, or -1."""
        own, nexts = (
            entries_of(self.table.references, elements, 1, kind) for kind in (OBSERVATION, NEXT)
        )
        order = np.argsort(nexts)
        at = np.minimum(np.searchsorted(nexts[order], own), len(order) - 1)
        return np.where(nexts[order][at] == own, order[at], -1)
