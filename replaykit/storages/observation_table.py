"""Store observations in a table, and the references of rows to its entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.checkpoint import ReadLater
from replaykit.schema import Rows
from replaykit.storages.columns import Columns, Grow
from replaykit.storages.dedup_memory import DedupJournal, NativeObservations, observations_of
from replaykit.storages.memory import any_differing, carried, carried_rows, picked
from replaykit.storages.next_rows import Pairs, following_lanes
from replaykit.storages.references import (
    NEXT,
    OBSERVATION,
    REFERENCES_KEY,
    References,
    entries_of,
)
from replaykit.structure import Path

Array = np.ndarray[Any, Any]
_Leaves = dict[Path, torch.Tensor]

_FIRST_ENTRIES = 64
"""Number of overflow entries in the smallest table."""


class ObservationTable:
    """The observations of rows, and two references of each row to them.

    The columns of the root leaves hold as many entries as there are rows, and overflow entries hold
    the others. ``compare`` finds the entries that new rows can share with the rows before and after
    them, because their bits are equal. Then ``write`` chooses the other entries, and writes the
    rows and the entries. It changes no entry that another row refers to. The caller holds the
    storage's lock.

    Args:
        pairs: the leaves that are stored once.
        rows: columns of the other leaves and of the root leaves.
        grow: function that allocates memory for overflow entries.

    Attributes:
        core: the entries in use, in the compiled core.
        native: reads and writes by the core; None if torch moves the rows, as on other devices.
        journal: the journal of overflow entries and references; None if they are only in memory.
        stored: number of time slots whose references count. The last of these may hold no row after
            a removal of rows, and keep their entries until other rows are written there. Processes
            that share the rows agree on the number.
        used: number of time slots whose entries committed rows may refer to. It can be larger than
            ``stored``, after a removal of rows and a recovery.

    Cost: 8 bytes per row for the references, and 1 byte for each entry in use. The references of a
    checkpoint that was opened in place are read at their first use.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow) -> None:
        self.rows, self.device, self.grow = rows, rows.device, grow
        self.cells = rows.lanes.numel()
        self.elements = rows.slots * self.cells
        self._roots = rows.part(list(pairs.root_of.values()))
        self._overflow: Columns | None = None
        self.stored = self.used = 0
        # The system allocates pages of zeros only when they are written to.
        self._references: Array = np.zeros((self.elements, 2), np.int32)
        self._later: ReadLater[None] | None = None
        # The references on the device of the rows; None if that is the CPU.
        self._mirror: torch.Tensor | None = None
        if self.device.type != "cpu":
            self._mirror = torch.zeros((self.elements, 2), dtype=torch.int32, device=self.device)
        self.journal: DedupJournal | None = None
        self.arrange(pairs)

    def arrange(self, pairs: Pairs) -> None:
        """Set the leaves, of which more may be stored for every row than before."""
        self.read_references()
        self._schema, self._root_of, self._overflow_schema = (
            pairs.schema,
            pairs.root_of,
            pairs.overflow,
        )
        self.core = observations_of(pairs, self.elements, self.cells)
        self.native: NativeObservations | None = None
        if self.rows.native:
            self.native = NativeObservations(pairs, self.rows, self.core)
        self._moves: Any = None
        self.point()
        self.core.derive(self.stored * self.cells)

    # -- memory -------------------------------------------------------------------------------

    @property
    def references(self) -> Array:
        """The references of all elements, int32 ``[elements, 2]``; see `references.entries_of`."""
        self.read_references()
        return self._references

    def read_references(self) -> None:
        """Read and check the references, if they are in files of a checkpoint.

        Raises:
            CheckpointError: they contradict each other; the error names the files.
        """
        if self._later is not None:
            self._later.read()
            self._later = None

    def _use_references(self, found: Array) -> None:
        if len(found) == self.elements:
            self._references, self._moves = found, None
            self.point()
        else:
            self._references[: len(found)] = found
        self.core.derive(len(found))

    def point(self) -> None:
        """Update the addresses that the core uses, if memory has moved."""
        rows, overflow = self.rows, self._overflow
        rows.refresh_addresses()
        if overflow is not None:
            overflow.refresh_addresses()
        moves = rows.moves, overflow, None if overflow is None else overflow.moves
        if moves == self._moves:
            return
        width = len(self._schema.leaves)
        bases, strides = [0] * width, [0] * width
        if self.native is not None:
            bases, strides = self.native.memory(overflow)
        count = 0 if overflow is None else overflow.slots
        self.core.point(bases, strides, self._references.ctypes.data, count)
        self._moves = moves

    def nbytes(self) -> int:
        """Return the bytes of the references, the overflow entries and the entries in use."""
        overflow = self._overflow
        entries = 0 if overflow is None else overflow.nbytes() + overflow.slots
        return self._references.nbytes + self.elements + entries

    def clear(self) -> None:
        """Remove the references of all rows; the memory stays allocated."""
        if self.journal is not None:
            self.journal.set_stored(0)
        self._later = None
        self.core.clear()  # writes no reference
        self.stored = 0

    def adopt_later(self, references: list[References], table: Columns | None, stored: int) -> None:
        """Adopt stored rows, and read and check their references only on their first use.

        Args:
            references: the references, once or several times. Each use raises CheckpointError if
                they are invalid or not equal.
            table: the overflow entries; None if there are none.
            stored: number of slots that hold rows.
        """
        self._overflow, self.stored = table, stored
        self.point()
        self._later = references[0].later(references[1:], self._use_references)

    def journal_by(self, kept: DedupJournal, references: Array) -> None:
        """Use references in files from now on, and journal changes. ``reread`` must follow."""
        self._references, self.journal, self._moves = references, kept, None
        self.point()

    @property
    def overflow_entries(self) -> int:
        """Number of the overflow entries with memory."""
        return 0 if self._overflow is None else self._overflow.slots

    def use_overflow(self, overflow: Columns | None) -> None:
        """Use the overflow entries that another process, or a recovery, has mapped."""
        self._overflow = overflow
        self.point()

    def reserve(self, entries: int) -> None:
        """Make room for as many overflow entries.

        Raises:
            MemoryError, OSError: there is no room; nothing has changed.
        """
        if entries > self.overflow_entries:
            self.use_overflow(self.grow(self._overflow_schema, entries, self._overflow))

    def reread(self, stored: int) -> None:
        """Find the entries in use from the references in files.

        Args:
            stored: number of slots that hold rows.

        Raises:
            ValueError: the references contradict each other.
        """
        self.point()
        self.read_stored(stored)
        self._count_used(self.references[: self.stored * self.cells])
        self.core.derive(self.stored * self.cells)

    def read_stored(self, stored: int) -> None:
        """Read ``stored`` if processes share it, and set it to the given number otherwise."""
        self.stored = stored if self.journal is None else self.journal.stored(stored)

    def _count_used(self, references: Array) -> None:
        most = int(references.max(initial=0))
        self.used = max(self.used, self.stored, -(-most // self.cells))

    def follow(self, elements: Array) -> None:
        """Find the entries in use after another process has changed references of elements.

        The elements are distinct. ``read_stored`` has been called.

        Raises:
            ValueError: the references contradict each other.
        """
        self.point()
        elements = elements[elements < self.stored * self.cells]
        self._count_used(self._references[elements])
        self.core.follow(elements.ctypes.data, len(elements), self.stored * self.cells)

    def lone_ends(self, stored: int) -> Array:
        """Return the elements whose next observation is not the observation of an element.

        ``stored`` is the number of slots that hold rows.
        """
        elements = np.arange(stored * self.cells)
        own, nexts = (
            entries_of(self._references, elements, self.cells, kind) for kind in (OBSERVATION, NEXT)
        )
        return np.flatnonzero(~np.isin(nexts, own))

    # -- reading ------------------------------------------------------------------------------

    def shown(self, elements: torch.Tensor, kind: int, contiguous: bool = True) -> _Leaves:
        """Return the entries that elements ``[B]`` refer to, in new memory ``[B, *F]``, by path."""
        self.read_references()
        if self.native is not None and contiguous and not self.rows.advise:
            self.point()
            return self.native.shown(elements, kind)
        references: Any = self._mirror
        if references is None:
            references = torch.from_numpy(self._references)
        entries = entries_of(references, elements, self.cells, kind)
        part, table = self._roots, self._overflow
        leaves = part.gather_elements(entries.clamp(min=0), self.elements, contiguous=contiguous)
        found = dict(zip(part.order, leaves, strict=True))
        if table is not None:
            # A search for overflow entries would wait for any other device.
            at = (entries < 0).nonzero().flatten() if entries.is_cpu else None
            numbers = (-1 - entries if at is None else -1 - entries[at]).clamp_(min=0)
            values = table.gather(numbers) if len(numbers) else {}
            for path, own in values.items():
                root = self._root_of[path]
                if at is not None:
                    carried(found[root]).index_copy_(0, at, carried(own))
                    continue
                has = (entries < 0).view(-1, *[1] * (own.ndim - 1))
                patched = torch.where(has, carried(own), carried(found[root]))
                found[root] = patched.view(own.dtype)
        if kind == OBSERVATION:
            return found
        return {path: found[root] for path, root in self._root_of.items()}

    def content(self, stop: int) -> tuple[References, _Leaves]:
        """Return the references of the first ``stop`` slots, and copies of the overflow entries.

        After a removal of rows, the others may refer to entries behind them. Copies of these become
        further overflow entries.
        """
        limit, behind = stop * self.cells, _NOTHING
        references = self.references[:limit]
        count = -int(references.min(initial=0))
        last = references[max(limit - self.cells, 0) :, NEXT]
        if references.max(initial=0) > limit or not last.all():
            elements, places = np.arange(limit), np.empty((limit, 2), np.int64)
            for kind in (OBSERVATION, NEXT):
                places[:, kind] = entries_of(references, elements, self.cells, kind)
            behind, number = np.unique(places[places >= limit], return_inverse=True)
            references = references.copy()
            references[places >= limit] = -1 - count - number
        if self._overflow is None:
            schema = self._overflow_schema.leaves
            values = {
                path: torch.empty((0, *leaf.shape), dtype=leaf.dtype, device=self.device)
                for path, leaf in schema.items()
            }
        else:
            values = self._overflow.gather(arange(count).to(self.device), contiguous=True)
        if len(behind):
            at, roots = torch.from_numpy(behind).to(self.device), list(self._root_of.values())
            added = self._roots.gather_keys(roots, at)
            for path, leaf in values.items():
                parts = carried(leaf), carried(added[self._root_of[path]])
                values[path] = torch.cat(parts).view(leaf.dtype)
        shape = stop, *self.rows.lanes, 2
        return References(
            limit,
            self.cells,
            (torch.from_numpy(references).view(shape),),
            count + len(behind),
            moved=len(behind) > 0,
        ), values

    # -- comparing ------------------------------------------------------------------------------

    def compare_run(self, first: int, count: int, sources: Any) -> int:
        """Compare ``count`` rows for the slots of the ring from ``first`` on; see ``compare``."""
        self.read_references()
        self.point()
        slots = self.rows.slots
        prior, count = (first - 1) % slots, count * self.cells
        newest = prior * self.cells if prior < self.stored else -1
        if self.native is None:
            return self.compare(following_lanes(count, self.cells, newest), None, sources)
        threads = self.native.threads(count)
        return int(self.core.compare_run(count, newest, self._addresses(sources), threads))

    def compare(self, before: Array, after: Array | None, sources: Any) -> int:
        """Compare rows with the rows before and after them.

        Args:
            before, after: these rows, as `next_rows.adjacent` returns them.
            sources: rows with addresses, or leaves ``[n, *F]`` by path.

        Returns:
            0 if each row that continues an episode has the next observation of the row before. Else
            bit 0 is set if that row is in the batch, and bit 1 if it is stored.
        """
        if self.native is None:
            return self.compare_by_torch(before, after, sources)
        self.read_references()
        self.point()
        return self._begin(before, after, self._addresses(sources))

    def _begin(self, before: Array, after: Array | None, addresses: Sequence[int]) -> int:
        at = 0 if after is None else after.ctypes.data
        threads = 1 if self.native is None else self.native.threads(len(before))
        found = self.core.compare(before.ctypes.data, at, len(before), addresses, threads)
        return int(found)

    def compare_by_torch(self, before: Array, after: Array | None, sources: _Leaves) -> int:
        """Compare as ``compare`` does, but also set bits for rows after the end of an episode.

        ``sources`` need only the leaves in pairs.
        """
        self.read_references()
        self.point()
        self._begin(before, after, [])
        shares = np.zeros((2, len(before)), np.bool_)
        root_of = self._root_of
        nexts = {path: sources[path] for path in root_of}
        roots = {path: sources[root] for path, root in root_of.items()}

        def fits(kind: int, at: Array, earlier: _Leaves, later: _Leaves) -> None:
            shares[kind, at] = ~any_differing(earlier, later).cpu().numpy()

        def some(leaves: _Leaves, at: Array) -> _Leaves:
            return carried_rows(leaves, torch.from_numpy(at).to(self.device))

        def shown(elements: Array, kind: int) -> _Leaves:
            found = self.shown(torch.from_numpy(elements).to(self.device), kind)
            return found if kind == NEXT else {p: found[root] for p, root in root_of.items()}

        stored = self.stored * self.cells
        if len(at := np.flatnonzero(before >= 0)):
            fits(0, at, some(nexts, before[at]), some(roots, at))
        if len(at := np.flatnonzero((before < -1) & (-2 - before < stored))):
            fits(0, at, _carried(shown(-2 - before[at], NEXT)), some(roots, at))
        if after is not None and len(at := np.flatnonzero((after >= 0) & (after < stored))):
            fits(1, at, some(nexts, at), _carried(shown(after[at], OBSERVATION)))
        self.core.set_shares(shares[0].ctypes.data, shares[1].ctypes.data)
        wrong = ~shares[0]
        return int(wrong[before >= 0].any()) + 2 * int(wrong[before < -1].any())

    # -- writing ------------------------------------------------------------------------------

    def sources(self, rows: Any, kept: torch.Tensor | slice, *, matched: bool) -> Any:
        """Return rows ``kept`` for ``compare`` and ``write``.

        These are the rows themselves if the core can read them at their addresses. Else they are
        contiguous leaves ``[n, *F]`` outside of the columns.

        Args:
            matched: True if all rows are kept, and have addresses in the order of the schema.
        """
        native = self.native
        if (
            matched
            and native is not None
            and not self.rows.overlap(rows.addresses, len(rows), native.sizes)
        ):
            return rows
        found = {}
        for path, leaf in self._schema.leaves.items():
            own = self.rows.own(picked(rows.leaves[path], kept)).resolve_conj().resolve_neg()
            own = own.contiguous().view(leaf.dtype)
            found[path] = own.view(own.shape[: self.rows.ndim].numel(), *leaf.shape)
        return found

    def _addresses(self, sources: Any) -> Sequence[int]:
        if isinstance(sources, Rows):
            return sources.addresses  # type: ignore[attr-defined]
        return [sources[path].data_ptr() for path in self._schema.leaves]

    def _plan(self, elements: Array | None, first: int, count: int, keep: int) -> tuple[int, int]:
        """Plan the references of the compared rows, and make room for their entries.

        Returns:
            The least and the greatest entry of rows that will be written; the greatest is -1 if
            there is none.
        """
        for _ in range(2):
            if elements is None:
                found = self.core.plan_run(first * self.cells, count * self.cells)
            else:
                found = self.core.plan(elements.ctypes.data, len(elements), keep)
            if not found[0]:
                return found[1], found[2]
            known = self.overflow_entries
            grown = max(_FIRST_ENTRIES, 2 * known, known + found[0])
            self.reserve(min(grown, self.elements))
        raise RuntimeError(f"expected room for all entries, got {found[0]} too few")

    def write(
        self,
        sources: Any,
        elements: Array | None,
        first: int,
        count: int,
        slots: torch.Tensor | None,
        keep: int = 0,
        assign: Callable[[], None] | None = None,
    ) -> None:
        """Write the compared rows and their entries; if it raises, nothing has changed.

        Args:
            sources: as for ``compare``.
            elements: the elements; None for those of ``count`` slots from ``first`` on.
            slots: the slots of the elements, or None as for ``elements``.
            keep: address of the references that stay; see ``Observations::plan``.
            assign: function that writes the leaves that are not in pairs; None for all of them in
                ``sources``.
        """
        core, cells = self.core, self.cells
        try:
            low, high = self._plan(elements, first, count, keep)
            near = high - low < 4 * count * cells + 64
            if high >= 0 and near:
                self.rows.changes.wrote(low // cells, high // cells - low // cells + 1)
            direct = self.native is not None and assign is None
            entries = _NOTHING, _NOTHING
            if not direct or self.journal is not None or not near:
                entries = self._planned(elements, first, count, marked=near)
            if slots is None:
                self.rows.changes.wrote(first, count)
                top = min(first + count, self.rows.slots)
            else:
                self.rows.changes.wrote_at(slots, [REFERENCES_KEY] if assign else None)
                top = int(slots.numpy().max()) + 1
            stored = max(self.stored, top)
            if self.journal is not None:
                self.journal.set_stored(stored)
        except BaseException:
            core.forget()
            raise
        self.stored = stored
        self.used = max(self.used, self.stored)
        if direct and self.native is not None:
            core.write(self._addresses(sources), self.native.threads(count * cells))
            return
        if elements is None:
            elements = (np.arange(count * cells) + first * cells) % self.elements
            slots = torch.from_numpy((np.arange(count) + first) % self.rows.slots)

        def write() -> None:
            if assign is not None:
                assign()
            else:
                assert slots is not None
                shape = (len(slots), *self.rows.lanes)
                self._scatter_stored(slots, sources, shape)
            self._write_entries(sources, *entries)
            core.commit()
            if self._mirror is not None:
                at = torch.from_numpy(elements).to(self.device)
                self._mirror[at] = torch.from_numpy(self._references[elements]).to(self.device)

        try:
            write()
        except KeyboardInterrupt:
            write()
            raise
        except BaseException:
            core.forget()
            raise

    def _planned(
        self, elements: Array | None, first: int, count: int, *, marked: bool
    ) -> tuple[Array, Array]:
        """Journal the entries that the plan writes; return them and their sources.

        ``marked`` is True if they are marked as changed.
        """
        core, cells = self.core, self.cells
        entries = np.empty(core.planned(), np.int64)
        places = np.empty_like(entries)
        core.fresh(entries.ctypes.data, places.ctypes.data)
        if not marked:
            inside = torch.from_numpy(np.unique(entries[entries >= 0] // cells))
            self.rows.changes.wrote_at(inside, self._root_of.values())
        if self.journal is not None:
            if elements is None:
                elements = (np.arange(count * cells) + first * cells) % self.elements
            roots = list(self._root_of.values())
            self.journal.journal(elements, entries, cells, roots, self.used)
        return entries, places

    def _scatter_stored(
        self, slots: torch.Tensor, sources: _Leaves, shape: tuple[int, ...]
    ) -> None:
        roots = self._root_of.values()
        stored = [path for path in self.rows.tensors if path not in roots]
        if stored:
            leaves = {
                path: sources[path].reshape(*shape, *self._schema.leaves[path].shape)
                for path in stored
            }
            self.rows.part(stored).scatter(slots, leaves, slice(None))

    def _write_entries(self, sources: _Leaves, entries: Array, places: Array) -> None:
        for kind in (OBSERVATION, NEXT):
            of = (places & 1) == kind
            for inside in (True, False):
                at = np.flatnonzero(of & ((entries >= 0) == inside))
                if not len(at):
                    continue
                rows = torch.from_numpy(places[at] >> 1).to(self.device)
                values = {
                    path: carried(sources[path if kind == NEXT else root])[rows]
                    for path, root in self._root_of.items()
                }
                if inside:
                    roots = {self._root_of[path]: leaf for path, leaf in values.items()}
                    self._roots.put(torch.from_numpy(entries[at]), roots)
                else:
                    assert self._overflow is not None
                    numbers = torch.from_numpy(-1 - entries[at])
                    self._overflow.scatter(numbers, values, slice(None))


_NOTHING = np.zeros(0, np.int64)


def _carried(leaves: _Leaves) -> _Leaves:
    return {path: carried(leaf) for path, leaf in leaves.items()}
