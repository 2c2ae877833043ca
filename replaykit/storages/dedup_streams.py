"""Columns in which what follows a row is stored once: as the next row of its stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows
from replaykit.episodes.interleaved import key_dtype, stream_keys
from replaykit.schema import Rows
from replaykit.storages.columns import Columns
from replaykit.storages.dedup_columns import OnceColumns
from replaykit.storages.dedup_native import Batch, ComparedStreams, keys_of
from replaykit.storages.dedup_rows import KeptOnce
from replaykit.storages.ledger import Ledger
from replaykit.storages.next_rows import (
    Chains,
    Links,
    Pairs,
    StreamTails,
    chains,
    check_newest_of,
    check_streams,
)
from replaykit.storages.overflow_table import Grow
from replaykit.storages.slot_sets import Neighbours
from replaykit.storages.tensor_bytes import any_differing, carried, carried_rows, picked
from replaykit.structure import Path

__all__ = ["StreamColumns"]

Array = np.ndarray[Any, Any]
_Leaves = dict[Path, torch.Tensor]


class StreamColumns(OnceColumns):
    """``OnceColumns`` of rows of several streams, in slots of any order.

    The row that follows another one is the next of its stream, wherever it lies: a table says
    where. Which row is the newest of each stream is known by the key; whether it still is there is
    told from the key that lies in its slot.

    Args:
        key: path of the leaf that says to which stream a row belongs.

    Cost: 8 bytes a row more, and an entry of a dict for each stream. A read looks into the table
    once for each row. A write costs a sort of the keys, a step of a dict for each stream in it,
    and, where the core cannot do it, some sixty operations on small tensors.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow, key: Path) -> None:
        self.links = Links(rows.slots, rows.device)
        super().__init__(pairs, rows, grow, self.links)
        leaf = pairs.schema.leaves[key]
        self.key = key
        self._tails = StreamTails(self.links, rows, key, key_dtype(leaf.shape, leaf.dtype))
        # Streams of which the next row has to go on from the newest one, if that is there.
        self._going_on: set[Any] = set()
        self._streams_compared: tuple[Rows, ComparedStreams] | None = None
        # By stream, and where they will lie: rows that are being loaded.
        self._coming: tuple[Chains, torch.Tensor] | None = None

    def clear(self) -> None:
        if self.kept is not None:
            self.kept.note_links(range(self._stored))
        self.links.clear(self._stored)
        super().clear()
        self._tails.clear()
        self._going_on = set()
        self._streams_compared = self._coming = None

    def nbytes(self) -> int:
        return super().nbytes() + self.links.nbytes()

    def keep(self, kept: KeptOnce, *, there: bool) -> None:
        super().keep(kept, there=there)
        self.links.keep_in(kept.followers(self.slots, self.links.kind, there=there))

    def reread(self, ledger: Ledger, table: Columns | None = None) -> None:
        super().reread(ledger, table)
        self._stored = max(self._stored, self.links.reread())
        ends = np.flatnonzero(self.links.ends(np.arange(ledger.length)))
        order = np.argsort(ledger.positions(torch.from_numpy(ends)).numpy())
        self._tails.found(torch.from_numpy(ends[order]))
        self._streams_compared = self._coming = None

    # -- streams --------------------------------------------------------------------------------

    def _forget_newest(self) -> None:
        self._going_on = set()

    def sever(self, lanes: Any) -> None:
        """Told that nothing follows the newest rows of streams, by key; None: of all."""
        if lanes is None:
            self._forget_newest()
        else:
            self._going_on.difference_update(lanes)

    def _note_newest(self, found: Chains, slots: torch.Tensor) -> None:
        there = self._tails.note(found, slots)
        if there is not None:
            self._going_on.intersection_update(there)

    def assign(
        self,
        stop: int,
        leaves: Mapping[Path, torch.Tensor],
        at: Any,
        batch: torch.Size,
        *,
        time_dim: int = 0,
    ) -> None:
        if self.key in leaves:
            self._forget_newest()
        super().assign(stop, leaves, at, batch, time_dim=time_dim)

    def put(self, cells: Sequence[torch.Tensor], leaves: Mapping[Path, torch.Tensor]) -> None:
        if self.key in leaves:
            self._forget_newest()
        super().put(cells, leaves)

    # -- what goes on ---------------------------------------------------------------------------

    def check(self, rows: Rows, *, matched: bool) -> None:
        """Checks rows that come next, each with the one before it in its stream.

        What was found is kept for a write of the same rows, which has to come next.

        Args:
            matched: the rows have addresses, in the order of the schema.

        Raises:
            ValueError: a row goes on an episode with another value than the one before led to.
        """
        self._streams_compared = None
        leaves = rows.leaves
        found = chains(stream_keys(leaves[self.key]))
        at, slots = self._tails.of(found)
        names = found.keys[at].tolist()
        expected = np.array([name in self._going_on for name in names], np.int64)
        if matched:
            compared = self._compare_streams(rows, found, at, slots, expected)
            if compared is not None and compared.goes_on:
                self._streams_compared = rows, compared
                return
        flat = self._flat(leaves)
        if expected.any():
            which = np.flatnonzero(expected)
            first, slots = found.first[at[which]], slots[torch.from_numpy(which).to(self.device)]
            now = carried_rows(self._roots_of(flat), first.to(self.device))
            if bool(any_differing(self._following(slots), now).any()):
                check_newest_of(self._rows_at(slots), leaves, first, self.pairs)
        compared = ComparedStreams(found, self._inside(found, flat))
        if compared.differs is not None and bool(compared.differs.any()):
            check_streams(leaves, found, self.pairs)
        self._streams_compared = rows, compared

    def _compare_streams(
        self, rows: Any, found: Chains, at: Array, slots: torch.Tensor, expected: Array
    ) -> ComparedStreams | None:
        if self._native is None or len(rows) > self.slots or self._is_loose:
            return None
        first = np.ascontiguousarray(found.first.numpy()[at])
        batch = Batch(found.followers_of(len(rows)), slots.numpy(), first, expected)
        goes_on = self._native.compare_streams(rows.addresses, batch)
        return None if goes_on is None else ComparedStreams(found, None, batch, goes_on)

    def forget(self) -> None:
        super().forget()
        self._streams_compared = None

    def _inside(self, found: Chains, flat: _Leaves) -> torch.Tensor | None:
        if not found.linked:
            return None
        rows, followers = found.at(self.device)
        nexts = {path: flat[path] for path in self._nexts}
        return any_differing(
            carried_rows(nexts, rows), carried_rows(self._roots_of(flat), followers)
        )

    def _flat(self, leaves: Mapping[Path, torch.Tensor]) -> _Leaves:
        return {path: leaves[path].to(self.device) for path in (*self._nexts, *self._roots.order)}

    def _roots_of(self, flat: _Leaves) -> _Leaves:
        return {path: flat[root] for path, root in self.pairs.root_of.items()}

    def _rows_at(self, slots: torch.Tensor) -> _Leaves:
        leaves = self.rows.gather_elements(slots, self._elements)
        return {**dict(zip(self.rows.order, leaves, strict=True)), **self._following(slots)}

    @property
    def going_on(self) -> set[Any]:
        """Streams of which the next row has to go on from the newest one; another set once that
        is forgotten."""
        return self._going_on

    def goes_on(self, rows: Any, first: int) -> bool:
        """False: ``check`` tells."""
        return False

    def goes_on_from(self, streams: set[Any], keys: Array) -> None:
        """Told that the next rows go on from what was written, of some streams and of ``keys``."""
        streams.update(keys.tolist())
        self._going_on = streams

    # -- writing --------------------------------------------------------------------------------

    def write_ring(self, first: int, rows: Rows, skipped: int, *, matched: bool) -> None:
        slots = (arange(skipped, len(rows)) + first) % self.slots
        self.write_streams(slots, rows, slice(skipped, None), matched=matched)

    def write_streams(
        self, slots: torch.Tensor, rows: Rows, kept: torch.Tensor | slice, *, matched: bool
    ) -> None:
        """Writes ``rows[kept]`` to distinct slots ``[K]``, as ``scatter``: the next rows of their
        streams go on from them.

        Args:
            matched: the rows have addresses, in the order of the schema.
        """
        if not len(slots):
            return
        known, self._streams_compared = self._streams_compared, None
        compared = known[1] if known is not None and known[0] is rows else None
        going_on, leaves = self._going_on, rows.leaves
        if len(slots) < len(rows):
            self.scatter(slots, leaves, kept)
            keys = stream_keys(leaves[self.key])
        else:
            found = chains(stream_keys(leaves[self.key])) if compared is None else compared.chains
            keys = found.keys
            if not (matched and self._write_linked(slots, rows, found, compared)):
                if compared is not None and compared.batch is not None:
                    compared = None
                self._scatter_all(slots, leaves, found, compared)
        self.goes_on_from(going_on, keys)

    def _write_linked(
        self, slots: torch.Tensor, rows: Any, found: Chains, compared: ComparedStreams | None
    ) -> bool:
        if compared is None or compared.batch is None:
            at, newest = self._tails.of(found)
            nothing = np.zeros(len(at), np.int64)
            compared = self._compare_streams(rows, found, at, newest, nothing)
        if compared is None or compared.batch is None or self._native is None:
            return False
        if self.kept is not None:
            before = self.links.before(slots).numpy()
            self.kept.note_linked(np.concatenate([slots.numpy(), before, compared.batch.newest]))
        stored = self._stored
        self._stored = max(stored, int(slots.numpy().max()) + 1)
        self.rows.changes.wrote_at(slots)
        if not self._native.write_streams(rows.addresses, compared.batch, slots):
            return False
        self._note_newest(found, slots)
        return True

    def _scatter_all(
        self,
        slots: torch.Tensor,
        leaves: Mapping[Path, Any],
        found: Chains,
        compared: ComparedStreams | None,
    ) -> None:
        sources = {path: self.rows.own(carried(leaves[path])) for path in self.schema.leaves}
        if compared is None:
            compared = ComparedStreams(found, self._inside(found, sources))

        def write() -> None:
            self.rows.scatter(slots, sources, slice(None))

        self._write_streams(slots, compared, sources, write)

    def scatter(
        self, slots: torch.Tensor, leaves: Mapping[Path, Any], kept: torch.Tensor | slice
    ) -> None:
        """Writes rows ``kept`` of the leaves, the newest of their streams in that order, to
        distinct slots ``[K]``.

        An interrupt from the keyboard is passed on when all is written.
        """
        if not len(slots):
            return
        self._forget_newest()
        self._streams_compared = None
        sources = {path: self.rows.own(picked(leaves[path], kept)) for path in self.schema.leaves}
        found = chains(keys_of(sources[self.key], self.schema.leaves[self.key].dtype))

        def write() -> None:
            self.rows.scatter(slots, sources, slice(None))

        compared = ComparedStreams(found, self._inside(found, sources))
        self._write_streams(slots, compared, sources, write)

    def _write_streams(
        self,
        slots: torch.Tensor,
        compared: ComparedStreams,
        flat: _Leaves,
        write: Callable[[], None],
    ) -> None:
        """Has rows written to distinct slots, behind the newest ones of their streams.

        Args:
            flat: all leaves in pairs of the rows, ``[K, *F]``, in memory of their own.
            write: as for ``_settle``.
        """
        links, beside, found = self.links, self._beside, compared.chains
        elements = slots.to(self.device)
        roots = self._roots_of(flat)
        alone = torch.ones(len(slots), dtype=torch.bool, device=self.device)
        rows, followers = found.at(self.device)
        if compared.differs is not None:
            alone[rows] = compared.differs
        places = alone.nonzero().flatten()
        holders = elements[places]
        values = {path: carried(flat[path])[places] for path in self._nexts}
        entries = beside.entries(elements)
        cleared, back = [elements], [entries[entries > 0]]
        # Rows that stay, and lose what follows them, keep what that was.
        after, before = links.after(elements), links.before(elements)
        orphans = before[before != elements]
        if len(orphans):
            orphans = orphans[~torch.isin(orphans, elements)]
            lost = orphans[beside.entries(orphans) == 0]
            if len(lost):
                kept = self._following(lost)
                holders = torch.cat([holders, lost])
                values = {p: torch.cat([v, carried(kept[p])]) for p, v in values.items()}
        at, newest = self._tails.of(found)
        first = found.first[at].to(self.device)
        if len(at):
            there = ~torch.isin(newest, elements)
            newest, first = newest[there], first[there]
        if len(newest):
            fits = ~any_differing(self._following(newest), carried_rows(roots, first))
            entries = beside.entries(newest)
            freed = fits & (entries > 0)
            cleared.append(newest[freed])
            back.append(entries[freed])
        change = beside.plan(torch.cat(back).to(torch.int64) - 1, len(holders))
        if self.kept is not None:
            self.kept.note_links(torch.cat([elements, before, newest]))

        def both() -> None:
            write()
            links.part(before, after)
            links.part(elements, elements)
            if compared.differs is not None:
                links.join(elements[rows], elements[followers])
            links.join(newest, elements[first])
            self._note_newest(found, slots)

        self._stored = max(self._stored, int(slots.numpy().max()) + 1)
        self._commit(change, values, torch.cat(cleared), holders, both)

    def _neighbours(self, elements: torch.Tensor, stored: int, *, at_cursor: bool) -> Neighbours:
        return self.links.neighbours(elements, stored)

    # -- loading --------------------------------------------------------------------------------

    def begin(self, keys: Array, order: torch.Tensor) -> None:
        """Lets go of all rows, and makes ready for others of which it is known how they follow.

        Those come by ``fill``, every one of them.

        Args:
            keys: of their streams, ``[n]`` by slot, ``n >= 1``.
            order: slots from the oldest row to the newest, int64 ``[n]``.
        """
        self.clear()
        found = chains(keys[order.numpy()])
        elements = order.to(self.device)
        if self.kept is not None:
            self.kept.note_links(range(len(order)))
        if found.linked:
            rows, followers = found.at(self.device)
            self.links.join(elements[rows], elements[followers])
        self._stored = len(order)  # what the tables know of
        self._coming = found, order

    def link(self, steps: Sequence[MappedRows]) -> None:
        """Takes rows that are there: how far away the next one of their stream lies, ``[n]``, as
        ``Links.take_later``.

        Those that come follow none of them: which are the newest would take a look at the keys.
        """
        self.links.take_later(steps)

    def fill(self, start: int, leaves: Mapping[Path, Any], kept: torch.Tensor | slice) -> None:
        """Writes rows ``kept`` of the leaves to the slots from ``start`` on, up to which rows are
        there already, as ``begin`` has announced them."""
        sources = {path: self.rows.own(picked(leaves[path], kept)) for path in self.schema.leaves}
        slots = arange(start, start + len(sources[self.key]))
        flat = {path: sources[path] for path in (*self._nexts, *self._roots.order)}

        def write() -> None:
            self.rows.scatter(slots, sources, slice(None))

        self._settle(slots.to(self.device), flat, write, start)
        if start + len(slots) == self._stored and self._coming is not None:
            self._note_newest(*self._coming)
            self._coming = None

    def own_following(self, stop: int) -> tuple[torch.Tensor, _Leaves]:
        # A row that nothing follows has an entry.
        elements = self._beside.elements_with(stop)
        return elements, self._following(elements, True)
