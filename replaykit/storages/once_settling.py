"""Rows whose followers hold a part of them, written anywhere: the rows before are settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.storages.beside import Change, Grow
from replaykit.storages.bits import any_differing
from replaykit.storages.carrying import carried, carried_rows, picked
from replaykit.storages.columns import Columns
from replaykit.storages.indexing import last_occurrences, ravel
from replaykit.storages.links import Links
from replaykit.storages.neighbours import Neighbours, neighbours
from replaykit.storages.once_kept import KeptOnce
from replaykit.storages.once_reading import FollowedRows
from replaykit.storages.pairs import Pairs
from replaykit.structure import Path

__all__ = ["SettledRows"]

_Leaves = dict[Path, torch.Tensor]


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
