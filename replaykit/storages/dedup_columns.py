"""Store each next observation once, as the observation of the following row."""

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
from replaykit.storages.dedup_rows import DedupJournal, DedupRows
from replaykit.storages.ledger import Ledger
from replaykit.storages.next_rows import Links, Pairs
from replaykit.storages.overflow_table import Grow
from replaykit.storages.schema_match import MatchedRows
from replaykit.storages.tensor_bytes import any_differing, carried
from replaykit.structure import Path

__all__ = ["Compared", "DedupColumns"]

_NO_NUMBERS = np.zeros(0, np.int64)

Array = np.ndarray[Any, Any]
_Leaves = dict[Path, torch.Tensor]


@dataclass
class Compared:
    """Rows that will be written at the cursor, compared with the rows before them.

    Attributes:
        nexts: the counterparts ``[n, *F]`` of all elements of the rows, which are leaves under
            ``next``.
        inside: bool, one per element except those of the last time slot. True if the next row of
            the batch differs from the element's next observation. None if the batch has one time
            slot.
        newest: bool ``[lanes]``. True if the first row of the lane differs from the next
            observation of its newest stored row. None if no newest row is known.
    """

    nexts: dict[Path, torch.Tensor]
    inside: torch.Tensor | None = None
    newest: torch.Tensor | None = None


class DedupColumns(DedupRows):
    """Columns whose leaves under ``next`` are read from the root of the following row.

    The class has the methods of ``Columns``. A row has an overflow entry for these leaves if its
    follower has other bits or is missing. So every read returns the bits that were written, even if
    other rows are written, edited or replaced. A change of a root value also updates the entry of
    the row before.

    Cost of a write: the cost of a dense write, and one more pass over the leaves in pairs. Without
    the core, a write also takes some forty operations on small tensors.
    """

    def __init__(self, pairs: Pairs, rows: Columns, grow: Grow, links: Links | None = None) -> None:
        super().__init__(pairs, rows, grow, links)
        # The time slot that was written last. All its rows have overflow entries. None if the next
        # row at the cursor will not follow it in time.
        self._newest: int | None = None
        self._compared: tuple[Rows, Compared] | None = None
        self._noted: Rows | None = None  # the rows that the core has compared
        # Lanes whose newest row ends its episode, even if no flag says so.
        self.severed: torch.Tensor | None = None

    def clear(self) -> None:
        """Remove the overflow entries of all rows; the memory stays allocated."""
        if self.journal is not None:
            self.journal.journal(range(self._stored * self._cells), _NO_NUMBERS)
        self._overflow.clear(self._stored * self._cells)
        self.rows.batch_memory.clear()
        self._stored = 0
        self._newest = self.severed = None

    def check_writable(self) -> None:
        """Do nothing, because these rows share no memory."""

    def adopt(self, elements: torch.Tensor, table: Columns) -> None:
        """Adopt stored rows in all slots, and the overflow entries of some of them.

        Args:
            elements: the elements with an entry.
            table: the values of the entries; it may have more entries than ``elements``.
        """
        self._overflow.adopt(elements, table)
        self._stored = self.slots

    def adopt_later(
        self, elements: Sequence[MappedRows], table: Columns | None, stored: int
    ) -> None:
        """Adopt stored rows, and read and check ``elements`` only on their first use.

        Args:
            elements: as for ``OverflowTable.adopt_later``.
            table: as for ``adopt``; None if no element has an entry.
            stored: number of slots that hold rows.
        """
        if table is not None:
            self._overflow.adopt_later(elements, table, stored * self._cells)
        self._stored = stored

    def drop_unread(self) -> None:
        """Drop overflow elements that were not read yet.

        The caller will replace all rows. Invalid elements then raise no error.
        """
        if self._overflow.unread:
            self.clear()

    def journal_by(self, kept: DedupJournal, *, there: bool) -> None:
        """Move the map of overflow entries to files, and journal its changes.

        Args:
            kept: the journal of the entries.
            there: True if the files exist already. The caller must then call ``reread``.

        Raises:
            CheckpointError: an existing file is missing; the error names it.
        """
        self._overflow.move_to(kept.map(self._elements, self._overflow.kind, there=there))
        self.journal = kept

    def reread(self, ledger: Ledger, table: Columns | None = None) -> None:
        """Derive all other data from the tables in files, after a recovery or a rollback.

        The next rows need not continue the stored rows.

        Args:
            table: the recovered overflow entries.

        Raises:
            ValueError: the tables contradict each other.
        """
        known = -(-self._overflow.reread(table) // self._cells)
        self._stored = max(ledger.length, known)
        self._newest = self._compared = self._noted = self.severed = None

    # -- at the cursor ------------------------------------------------------------------------

    def scatter_ring(self, first: int, count: int, addresses: Sequence[int], skipped: int) -> bool:
        """Return False, because only ``write_ring`` compares the rows."""
        return False

    def continues(self, rows: MatchedRows, first: int) -> bool:
        """Return whether the core found that each row continues the row before.

        The rows will be written from slot ``first`` on. If the result is False, the caller must
        call ``compare``. The core keeps the result of the comparison for ``write_ring``.
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
        """Write as ``write_ring`` in one call of the core; return False if it cannot."""
        noted, self._noted = self._noted, None
        if noted is not rows and (
            (self._compared is not None and self._compared[0] is rows)
            or self._compare_native(rows, first) is None
        ):
            return False
        native, newest, stored, count = self._native, self._newest, self._stored, len(rows)
        assert native is not None
        assert newest is not None
        if self.journal is not None:
            self.journal.journal_ring(first, count)
        # If an interrupt comes, no row is mistaken for the newest row.
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
        """Compare rows with the rows before them.

        The rows will be written from slot ``first`` on. The result is kept for ``write_ring``. The
        next write must write the same rows.
        """
        compared = self._comparison(rows, first)
        self._compared = rows, compared
        return compared

    def sever(self, lanes: Any) -> None:
        """End the episodes of the newest rows of lanes, bool ``[lanes]``, or None for all."""
        if lanes is None:
            lanes = [True] * self._cells
        severed = torch.as_tensor(lanes, dtype=torch.bool, device=self.device)
        self.severed = severed if self.severed is None else self.severed | severed

    def forget(self) -> None:
        """Drop the result of the last comparison, whose rows will not be written."""
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
        """Write ``rows[skipped:]`` at the slots from ``first + skipped`` on, in the ring.

        These rows become the newest. The next rows at the cursor follow them in time.

        Args:
            matched: True if ``rows`` is a `MatchedRows`, which has the memory addresses of its
                leaves in the order of the schema.
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
        # The last rows need entries. So do rows whose next observation the next row lacks.
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
        entries = self._overflow.entries(elements)
        places = entries.nonzero().squeeze(1)
        cleared = self._elements_at(newest)
        back = self._overflow.entries(cleared).to(torch.int64) - 1
        if bool(compared.newest.any()):
            fits = ~compared.newest
            back, cleared = back[fits], cleared[fits]
        if places.shape[0]:
            back = torch.cat([back, entries[places].to(torch.int64) - 1])
            cleared = torch.cat([cleared, elements[places]])
        change = self._overflow.plan(back, holders.shape[0])

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
        """Return the rows of the last written time slot, as leaves ``[lanes, *F]``."""
        assert self._newest is not None
        elements = self._elements_at(self._newest)
        leaves = self.rows.gather_elements(elements, self._elements)
        found = dict(zip(self.rows.order, leaves, strict=True))
        return {**found, **self._following(elements)}
