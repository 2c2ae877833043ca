"""Columns in which what follows a row is stored once: as the row that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows
from replaykit.schema import Rows
from replaykit.storages.columns import Columns
from replaykit.storages.dedup_rows import KeptOnce, SettledRows
from replaykit.storages.ledger import Ledger
from replaykit.storages.next_rows import Links, Pairs
from replaykit.storages.overflow_table import Grow
from replaykit.storages.schema_match import MatchedRows
from replaykit.storages.tensor_bytes import any_differing, carried
from replaykit.structure import Path

__all__ = ["Compared", "OnceColumns"]

_NO_NUMBERS = np.zeros(0, np.int64)

Array = np.ndarray[Any, Any]
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


class OnceColumns(SettledRows):
    """Columns of which some leaves under ``next`` are those of the following row at the root.

    Has the face of ``Columns``. A row whose follower does not hold the same bits, or is not there,
    has its counterparts beside. So every row comes back as it was written, bit for bit, whatever
    is written, edited or displaced around it: whoever changes a root value settles the row before.

    Cost of a write: that of a dense one, and one more pass over the leaves in pairs. Where the core
    cannot do it, some forty operations on small tensors.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow, links: Links | None = None) -> None:
        super().__init__(pairs, rows, grow, links)
        # The time slot that was written last, all of it beside. Known as long as the next row at
        # the cursor follows it in time.
        self._newest: int | None = None
        self._compared: tuple[Rows, Compared] | None = None
        self._noted: Rows | None = None  # compared by the core
        # Of which lanes the newest row is the last of its episode, whatever it says.
        self.severed: torch.Tensor | None = None

    def clear(self) -> None:
        """Told that no row is stored any more; memory stays."""
        if self.kept is not None:
            self.kept.note(range(self._stored * self._cells), _NO_NUMBERS)
        self._beside.clear(self._stored * self._cells)
        self._stored = 0
        self._newest = self.severed = None

    def check_writable(self) -> None:
        """Rows here have memory of their own."""

    def adopt(self, elements: torch.Tensor, table: Columns) -> None:
        """Takes rows that are there, in all slots: which have counterparts beside, and those.

        Args:
            table: of as many entries or more.
        """
        self._beside.adopt(elements, table)
        self._stored = self.slots

    def adopt_later(
        self, elements: Sequence[MappedRows], table: Columns | None, stored: int
    ) -> None:
        """As ``adopt``; which rows those are is read and checked once somebody asks.

        Args:
            elements: as for ``Beside.adopt_later``.
            table: None: there are no such rows.
            stored: how many slots hold rows.
        """
        if table is not None:
            self._beside.adopt_later(elements, table, stored * self._cells)
        self._stored = stored

    def let_go_unread(self) -> None:
        """Told that all rows are about to be replaced: what nobody has read yet is not read for
        that, and may contradict itself."""
        if self._beside.unread:
            self.clear()

    def keep(self, kept: KeptOnce, *, there: bool) -> None:
        """Has what tells of the rows lie in files; ``there``: it does, and ``reread`` takes it.

        Raises:
            CheckpointError: it is not there; names the file.
        """
        self._beside.keep_in(kept.map(self._elements, self._beside.kind, there=there))
        self.kept = kept

    def reread(self, ledger: Ledger, table: Columns | None = None) -> None:
        """Works out anew what follows from what lies in files, where that was put back or found.

        Nothing is expected of the rows that come next.

        Args:
            table: the entries beside that were found.

        Raises:
            ValueError: it contradicts itself.
        """
        known = -(-self._beside.reread(table) // self._cells)
        self._stored = max(ledger.length, known)
        self._newest = self._compared = self._noted = self.severed = None

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
        if self._is_loose:
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
        if self.kept is not None:
            self.kept.note_ring(first, count)
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

    def _forget_newest(self) -> None:
        self._newest = None

    def newest_rows(self) -> _Leaves:
        """Returns the time slot that was written last, leaves ``[lanes, *F]``."""
        assert self._newest is not None
        elements = self._elements_at(self._newest)
        leaves = self.rows.gather_elements(elements, self._elements)
        found = dict(zip(self.rows.order, leaves, strict=True))
        return {**found, **self._following(elements)}
