"""Store each next observation once, as the observation of the stream's next row."""

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
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.dedup_native import Batch, ComparedStreams, keys_of
from replaykit.storages.dedup_rows import DedupJournal
from replaykit.storages.indexing import Neighbours
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
from replaykit.storages.tensor_bytes import any_differing, carried, carried_rows, picked
from replaykit.structure import Path

__all__ = ["StreamColumns"]

Array = np.ndarray[Any, Any]
_Leaves = dict[Path, torch.Tensor]


class StreamColumns(DedupColumns):
    """``DedupColumns`` for rows of several streams, in slots of any order.

    The follower of a row is the next row of its stream, in any slot. A table holds the slot of each
    follower. A dict holds the slot of the newest row of each stream. That row is still stored if
    the key in its slot is the stream's key.

    Args:
        key: path of the leaf that names the stream of a row.

    Cost: 8 more bytes per row, and a dict entry for each stream. A read uses the table once for
    each row. A write takes a sort of the keys and a dict access for each stream in the batch.
    Without the core, it also takes some sixty operations on small tensors.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow, key: Path) -> None:
        self.links = Links(rows.slots, rows.device)
        super().__init__(pairs, rows, grow, self.links)
        leaf = pairs.schema.leaves[key]
        self.key = key
        self._tails = StreamTails(self.links, rows, key, key_dtype(leaf.shape, leaf.dtype))
        # Streams whose next row must continue the newest row, if that row is stored.
        self._continuing: set[Any] = set()
        self._streams_compared: tuple[Rows, ComparedStreams] | None = None
        # The streams and the slots of rows that are being loaded.
        self._coming: tuple[Chains, torch.Tensor] | None = None

    def clear(self) -> None:
        if self.journal is not None:
            self.journal.journal_links(range(self._stored))
        self.links.clear(self._stored)
        super().clear()
        self._tails.clear()
        self._continuing = set()
        self._streams_compared = self._coming = None

    def nbytes(self) -> int:
        return super().nbytes() + self.links.nbytes()

    def journal_by(self, kept: DedupJournal, *, there: bool) -> None:
        super().journal_by(kept, there=there)
        self.links.move_to(kept.followers(self.slots, self.links.kind, there=there))

    def reread(self, ledger: Ledger, table: Columns | None = None) -> None:
        super().reread(ledger, table)
        self._stored = max(self._stored, self.links.reread())
        ends = np.flatnonzero(self.links.ends(np.arange(ledger.length)))
        order = np.argsort(ledger.positions(torch.from_numpy(ends)).numpy())
        self._tails.found(torch.from_numpy(ends[order]))
        self._streams_compared = self._coming = None

    # -- streams --------------------------------------------------------------------------------

    def _forget_newest(self) -> None:
        self._continuing = set()

    def sever(self, lanes: Any) -> None:
        """End the episodes of the newest rows of streams, given by key; None for all."""
        if lanes is None:
            self._forget_newest()
        else:
            self._continuing.difference_update(lanes)

    def _update_newest(self, found: Chains, slots: torch.Tensor) -> None:
        there = self._tails.append(found, slots)
        if there is not None:
            self._continuing.intersection_update(there)

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

    # -- comparing ------------------------------------------------------------------------------

    def check(self, rows: Rows, *, matched: bool) -> None:
        """Check the next rows, each against the row before it in its stream.

        The result is kept for the next write, which must write the same rows.

        Args:
            matched: True if the rows have addresses, in the order of the schema.

        Raises:
            ValueError: a row continues an episode, but differs from the next observation of the
                row before.
        """
        self._streams_compared = None
        leaves = rows.leaves
        found = chains(stream_keys(leaves[self.key]))
        at, slots = self._tails.of(found)
        names = found.keys[at].tolist()
        expected = np.array([name in self._continuing for name in names], np.int64)
        if matched:
            compared = self._compare_streams(rows, found, at, slots, expected)
            if compared is not None and compared.continues:
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
        continues = self._native.compare_streams(rows.addresses, batch)
        return None if continues is None else ComparedStreams(found, None, batch, continues)

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
    def continuing(self) -> set[Any]:
        """Streams whose next row must continue the newest row.

        ``_forget_newest`` replaces this set. It does not change the set in place.
        """
        return self._continuing

    def continues(self, rows: Any, first: int) -> bool:
        """Return False, because ``check`` compares the rows."""
        return False

    def continues_from(self, streams: set[Any], keys: Array) -> None:
        """Require that the next rows of these streams continue the stored rows.

        ``streams`` and ``keys`` both hold keys of streams. ``keys`` are added to ``streams``.
        """
        streams.update(keys.tolist())
        self._continuing = streams

    # -- writing --------------------------------------------------------------------------------

    def write_ring(self, first: int, rows: Rows, skipped: int, *, matched: bool) -> None:
        slots = (arange(skipped, len(rows)) + first) % self.slots
        self.write_streams(slots, rows, slice(skipped, None), matched=matched)

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
        known, self._streams_compared = self._streams_compared, None
        compared = known[1] if known is not None and known[0] is rows else None
        continuing, leaves = self._continuing, rows.leaves
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
        self.continues_from(continuing, keys)

    def _write_linked(
        self, slots: torch.Tensor, rows: Any, found: Chains, compared: ComparedStreams | None
    ) -> bool:
        if compared is None or compared.batch is None:
            at, newest = self._tails.of(found)
            nothing = np.zeros(len(at), np.int64)
            compared = self._compare_streams(rows, found, at, newest, nothing)
        if compared is None or compared.batch is None or self._native is None:
            return False
        if self.journal is not None:
            before = self.links.before(slots).numpy()
            self.journal.journal_linked(
                np.concatenate([slots.numpy(), before, compared.batch.newest])
            )
        stored = self._stored
        self._stored = max(stored, int(slots.numpy().max()) + 1)
        self.rows.changes.wrote_at(slots)
        if not self._native.write_streams(rows.addresses, compared.batch, slots):
            return False
        self._update_newest(found, slots)
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
        """Write rows ``kept`` of the leaves to distinct slots ``[K]``.

        In the order of ``slots`` they become the newest rows of their streams. A KeyboardInterrupt
        is raised after everything is written.
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
        """Write rows to distinct slots, after the newest rows of their streams.

        Args:
            flat: the values of all leaves in pairs, ``[K, *F]``, in separate memory.
            write: as for ``_write_changed``.
        """
        links, overflow, found = self.links, self._overflow, compared.chains
        elements = slots.to(self.device)
        roots = self._roots_of(flat)
        alone = torch.ones(len(slots), dtype=torch.bool, device=self.device)
        rows, followers = found.at(self.device)
        if compared.differs is not None:
            alone[rows] = compared.differs
        places = alone.nonzero().flatten()
        holders = elements[places]
        values = {path: carried(flat[path])[places] for path in self._nexts}
        entries = overflow.entries(elements)
        cleared, back = [elements], [entries[entries > 0]]
        # Stored rows that lose their follower get an entry with the follower's values.
        after, before = links.after(elements), links.before(elements)
        orphans = before[before != elements]
        if len(orphans):
            orphans = orphans[~torch.isin(orphans, elements)]
            lost = orphans[overflow.entries(orphans) == 0]
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
            entries = overflow.entries(newest)
            freed = fits & (entries > 0)
            cleared.append(newest[freed])
            back.append(entries[freed])
        change = overflow.plan(torch.cat(back).to(torch.int64) - 1, len(holders))
        if self.journal is not None:
            self.journal.journal_links(torch.cat([elements, before, newest]))

        def both() -> None:
            write()
            links.part(before, after)
            links.part(elements, elements)
            if compared.differs is not None:
                links.join(elements[rows], elements[followers])
            links.join(newest, elements[first])
            self._update_newest(found, slots)

        self._stored = max(self._stored, int(slots.numpy().max()) + 1)
        self._commit(change, values, torch.cat(cleared), holders, both)

    def _neighbours(self, elements: torch.Tensor, stored: int, *, at_cursor: bool) -> Neighbours:
        return self.links.neighbours(elements, stored)

    # -- loading --------------------------------------------------------------------------------

    def begin(self, keys: Array, order: torch.Tensor) -> None:
        """Remove all rows, and link the slots of the rows that ``fill`` will load.

        ``fill`` must load all of them.

        Args:
            keys: the keys of their streams, ``[n]`` by slot, ``n >= 1``.
            order: slots from the oldest row to the newest, int64 ``[n]``.
        """
        self.clear()
        found = chains(keys[order.numpy()])
        elements = order.to(self.device)
        if self.journal is not None:
            self.journal.journal_links(range(len(order)))
        if found.linked:
            rows, followers = found.at(self.device)
            self.links.join(elements[rows], elements[followers])
        self._stored = len(order)  # the tables cover all of them
        self._coming = found, order

    def link(self, steps: Sequence[MappedRows]) -> None:
        """Adopt the distances of stored rows to the next rows of their streams, ``[n]``.

        See ``Links.set_distances_later``. New rows will not follow the stored rows. For that, the
        newest row of each stream would be needed, and thus a read of all keys.
        """
        self.links.set_distances_later(steps)

    def fill(self, start: int, leaves: Mapping[Path, Any], kept: torch.Tensor | slice) -> None:
        """Write rows ``kept`` of the leaves to the slots from ``start`` on.

        ``begin`` has linked these slots. The slots before ``start`` are already filled.
        """
        sources = {path: self.rows.own(picked(leaves[path], kept)) for path in self.schema.leaves}
        slots = arange(start, start + len(sources[self.key]))
        flat = {path: sources[path] for path in (*self._nexts, *self._roots.order)}

        def write() -> None:
            self.rows.scatter(slots, sources, slice(None))

        self._write_changed(slots.to(self.device), flat, write, start)
        if start + len(slots) == self._stored and self._coming is not None:
            self._update_newest(*self._coming)
            self._coming = None

    def own_following(self, stop: int) -> tuple[torch.Tensor, _Leaves]:
        # A row without a follower has an entry.
        elements = self._overflow.elements_with(stop)
        return elements, self._following(elements, True)
