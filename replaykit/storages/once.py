"""Columns in which what follows a row is stored once: as the row that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.schema import Rows
from replaykit.storages.beside import Change, Grow
from replaykit.storages.bits import any_differing
from replaykit.storages.carrying import carried, carried_rows
from replaykit.storages.columns import Columns, picked
from replaykit.storages.indexing import last_occurrences, ravel
from replaykit.storages.links import Links
from replaykit.storages.matching import MatchedRows
from replaykit.storages.neighbours import Neighbours, neighbours
from replaykit.storages.once_reading import FollowedRows
from replaykit.storages.pairs import Pairs
from replaykit.structure import Path

__all__ = ["Compared", "OnceColumns"]

_Leaves = dict[Path, torch.Tensor]


@dataclass
class Compared:
    """Rows about to be written at the cursor, compared with those before them.

    Attributes:
        nexts: their counterparts, ``[n, *F]``, counted through rows and lanes.
        inside: which of them, but for the last time slot, the next row of the batch does not
            follow; None where there is one time slot.
        newest: which lanes of the newest time slot the first row does not follow; None where
            nothing is known to go on.
    """

    nexts: dict[Path, torch.Tensor]
    inside: torch.Tensor | None = None
    newest: torch.Tensor | None = None


class OnceColumns(FollowedRows):
    """Columns of which some leaves under ``next`` are those of the following row at the root.

    Has the face of ``Columns``. A row whose follower does not hold the same bits, or is not there,
    has its counterparts beside. So every row comes back as it was written, bit for bit, whatever
    is written, edited or displaced around it: whoever changes a root value settles the row before.

    Cost of a write: that of a dense one, and one more pass over the leaves in pairs. Where the core
    cannot do it, some forty operations on small tensors.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow, links: Links | None = None) -> None:
        super().__init__(pairs, rows, grow, links)
        self._stored = 0  # time slots that hold rows, or held some
        # The time slot that was written last, all of it beside. Known as long as the next row at
        # the cursor follows it in time.
        self._newest: int | None = None
        self._compared: tuple[Rows, Compared] | None = None
        self._noted: Rows | None = None  # compared by the core
        # Of which lanes the newest row is the last of its episode, whatever it says.
        self.severed: torch.Tensor | None = None
        # Where the leaves of every row are among all.
        places = {path: place for place, path in enumerate(pairs.schema.leaves)}
        self._places = [places[path] for path in rows.tensors]

    def clear(self) -> None:
        """Told that no row is stored any more; memory stays."""
        self._beside.clear(self._stored * self._cells)
        self._stored = 0
        self._newest = self.severed = None

    def check_writable(self) -> None:
        """Rows here have memory of their own."""

    def adopt(self, elements: torch.Tensor, table: Columns) -> None:
        """Takes rows that are there, all of them: which have counterparts beside, and those."""
        self._beside.adopt(elements, table)
        self._stored = self.slots

    # -- at the cursor ------------------------------------------------------------------------

    def scatter_ring(self, first: int, count: int, addresses: Sequence[int], skipped: int) -> bool:
        """False: rows have to be compared, which ``write_ring`` does."""
        return False

    def goes_on(self, rows: MatchedRows, first: int) -> bool:
        """Whether rows with addresses are known to go on, each, from the one before.

        They would be written from slot ``first`` on. False says nothing: ``compare`` tells more.
        What was found is kept, as by ``compare``.
        """
        found = self._compare_native(rows, first)
        self._noted = rows if found else None
        return bool(found)

    def _compare_native(self, rows: MatchedRows, first: int) -> bool | None:
        newest, count = self._newest, len(rows)
        if self._native is None or newest is None or self._cells > 1 or count >= self.slots:
            return None
        if newest != (first - 1) % self.slots:
            return None
        severed = self.severed is not None and bool(self.severed[0])
        return self._native.compare(rows.addresses, count, newest, severed)

    def _write_native(self, first: int, rows: MatchedRows) -> bool:
        """What ``write_ring`` does, by one call of the core; False where it cannot."""
        noted, self._noted = self._noted, None
        if noted is not rows and (
            (self._compared is not None and self._compared[0] is rows)
            or self._compare_native(rows, first) is None
        ):
            return False
        native, newest, stored, count = self._native, self._newest, self._stored, len(rows)
        assert native is not None
        assert newest is not None
        # Whatever happens on the way, no row is taken for one that it is not.
        self._newest = None
        self._stored = max(stored, min(first + count, self.slots))
        self.rows.changes.wrote(first, count)
        try:
            written = native.write(rows.addresses, count, first, newest)
        except Exception:
            self._newest, self._stored = newest, stored
            raise
        if not written:
            self._newest, self._stored = newest, stored
            return False
        self._newest = (first + count - 1) % self.slots
        self._compared = self.severed = None
        return True

    def compare(self, rows: Rows, first: int) -> Compared:
        """Compares rows that will be written from slot ``first`` on with those before them.

        What was found is kept for ``write_ring`` of the same rows, which has to come next.
        """
        compared = self._comparison(rows, first)
        self._compared = rows, compared
        return compared

    def sever(self, lanes: Any) -> None:
        """Told that nothing follows the newest row of lanes, bool ``[lanes]``; None: all."""
        if lanes is None:
            lanes = [True] * self._cells
        severed = torch.as_tensor(lanes, dtype=torch.bool, device=self.device)
        self.severed = severed if self.severed is None else self.severed | severed

    def forget(self) -> None:
        """Told that the rows compared last will not be written."""
        self._compared = self._noted = None

    def _comparison(self, rows: Rows, first: int) -> Compared:
        leaves, cells = rows.leaves, self._cells
        count, lead = rows.batch.numel(), len(rows.batch)
        flat: _Leaves = {}
        for path in (*self._nexts, *self._roots.order):
            leaf = leaves[path].to(self.device)
            flat[path] = leaf if lead == 1 else leaf.reshape(count, *leaf.shape[lead:])
        nexts = {path: flat[path] for path in self._nexts}
        roots = {path: flat[root] for path, root in self.pairs.root_of.items()}
        compared = Compared(nexts)
        if count > cells:
            compared.inside = any_differing(
                {path: leaf[:-cells] for path, leaf in nexts.items()},
                {path: leaf[cells:] for path, leaf in roots.items()},
            )
        if self._newest is not None and self._newest == (first - 1) % self.slots:
            values = self._following(self._elements_at(self._newest))
            compared.newest = any_differing(
                values, {path: leaf[:cells] for path, leaf in roots.items()}
            )
        return compared

    def _elements_at(self, slot: int) -> torch.Tensor:
        return arange(slot * self._cells, (slot + 1) * self._cells).to(self.device)

    def write_ring(self, first: int, rows: Rows, skipped: int, *, matched: bool) -> None:
        """Writes ``rows[skipped:]`` at the slots from ``first + skipped`` on, round the ring.

        They are the newest rows, which those written at the cursor next follow in time.

        Args:
            matched: the rows have addresses, in the order of the schema.
        """
        if matched and not skipped and self._write_native(first, rows):  # type: ignore[arg-type]
            return
        count, cells, slots = len(rows), self._cells, self.slots
        known, self._compared, self.severed = self._compared, None, None
        compared = known[1] if known and known[0] is rows else self._comparison(rows, first)
        newest, last = self._newest, (first + count - 1) % slots
        if skipped or newest is None or compared.newest is None or count >= slots:
            at = (arange(skipped, count) + first) % slots
            self.scatter(at, rows.leaves, slice(skipped, None))
            self._newest = last
            return
        size = count * cells
        elements = arange(first * cells, first * cells + size).to(self.device)
        if first + count > slots:
            elements %= self._elements
        # Beside lie the last rows, and those inside that the next one does not follow.
        tail = {path: carried(leaf)[-cells:] for path, leaf in compared.nexts.items()}
        holders, values = elements[-cells:], tail
        if compared.inside is not None:
            places = compared.inside.nonzero().squeeze(1)
            if places.shape[0]:
                holders = torch.cat([elements[places], holders])
                values = {
                    path: torch.cat([carried(leaf)[places], tail[path]])
                    for path, leaf in compared.nexts.items()
                }
        entries = self._beside.entries(elements)
        places = entries.nonzero().squeeze(1)
        cleared = self._elements_at(newest)
        back = self._beside.entries(cleared).to(torch.int64) - 1
        if bool(compared.newest.any()):
            fits = ~compared.newest
            back, cleared = back[fits], cleared[fits]
        if places.shape[0]:
            back = torch.cat([back, entries[places].to(torch.int64) - 1])
            cleared = torch.cat([cleared, elements[places]])
        change = self._beside.plan(back, holders.shape[0])

        def write() -> None:
            if matched:
                addresses = rows.addresses  # type: ignore[attr-defined]
                mine = [addresses[place] for place in self._places]
                if self.rows.scatter_ring(first, count, mine, 0):
                    return
            at = arange(first, first + count)
            self.rows.scatter(at % slots, rows.leaves, slice(None))

        self._newest = None
        self._stored = max(self._stored, min(first + count, slots))
        self._commit(change, values, cleared, holders, write)
        self._newest = last

    def newest_rows(self) -> _Leaves:
        """Returns the time slot that was written last, leaves ``[lanes, *F]``."""
        assert self._newest is not None
        elements = self._elements_at(self._newest)
        leaves = self.rows.gather_elements(elements, self._elements)
        found = dict(zip(self.rows.order, leaves, strict=True))
        return {**found, **self._following(elements)}

    # -- anywhere -----------------------------------------------------------------------------

    def scatter(
        self, slots: torch.Tensor, leaves: Mapping[Path, Any], kept: torch.Tensor | slice
    ) -> None:
        """Writes rows ``kept`` of the leaves to distinct slots ``[K]`` of dimension 0.

        An interrupt from the keyboard is passed on when all is written.
        """
        if not len(slots):
            return
        self._newest = None
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
        self._newest = None

    def _commit(
        self,
        change: Change,
        values: _Leaves,
        cleared: torch.Tensor,
        holders: torch.Tensor,
        write: Callable[[], None],
    ) -> None:
        """Makes a change: rows are written, ``cleared`` have no entry, ``holders`` new ones."""

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
