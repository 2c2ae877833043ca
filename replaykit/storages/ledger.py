"""Which record lies in which slot: cursor, length, positions and generations of one storage."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from replaykit import native
from replaykit._compat import arange
from replaykit.checkpoint import ReadLater
from replaykit.storages.ledger_state import check_generations, check_positions, checked_state
from replaykit.storages.ledger_tables import Table, Tables, followed, grown, own_table, saved_table

__all__ = ["Ledger"]


_core = native.core()


class Ledger(Tables):
    """Bookkeeping of a store of ``slots`` slots, in int64.

    *Slot*: where a record lies now. *Position*: the number of a record in write order, never used
    twice, also across ``clear`` and ``restore``. *Generation*: how often a slot was written, from
    0; a slot number together with its generation names one record for ever.

    As long as records are only ever written at the cursor, both follow from the counters and no
    memory is spent on them. The first write elsewhere (positions) or the first ``clear``
    (generations) makes a table of 8 bytes per slot. Tables of a checkpoint that was opened in place
    are read and checked when somebody needs them; CheckpointError then, where they contradict the
    counters.

    Stored records always occupy slots ``0..length-1``. Not thread-safe: the storage's lock guards
    it.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.cursor = 0
        self.length = 0
        self.next_position = 0
        # Grows with everything but writes at the cursor: what was derived from the order is old.
        self.changes = 0
        self.cleared = 0
        # Whether, where positions do not follow from the counters, rows were always displaced by
        # newer ones of their own stream, the oldest first.
        self.by_stream = False
        # Slots whose entries in the tables have changed, None for all, where somebody wants to
        # know.
        self.touched: list[torch.Tensor | None] | None = None

    # -- reading ------------------------------------------------------------------------------

    def next_slots(self, count: int) -> torch.Tensor:
        """Slots of the next ``count`` records, in write order: int64 ``[count]``."""
        slots = arange(self.cursor, self.cursor + count)
        return slots if self.cursor + count <= self.slots else slots % self.slots

    def write_order(self) -> torch.Tensor:
        """Stored slots from the oldest record to the newest: int64 ``[length]``."""
        positions = self._positions
        if positions is not None:
            return torch.argsort(positions[: self.length])
        return (arange(self.length) + (self.cursor - self.length)) % self.slots

    @property
    def newest(self) -> int:
        """The slot of the newest record; one is stored."""
        positions = self._positions
        if positions is not None:
            return int(positions[: self.length].argmax())
        return (self.cursor - 1) % self.slots

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Positions of the records in ``slots``; -1 where no record is stored."""
        stored = (slots >= 0) & (slots < self.length)
        table = self._positions
        if table is not None:
            table = table.to(slots.device)
            found = table[slots.clamp(0, max(self.length - 1, 0))] if self.length else slots
        else:
            found = self.next_position - 1 - (self.cursor - 1 - slots) % self.slots
        return torch.where(stored, found, -1)

    def generations(self, slots: torch.Tensor) -> torch.Tensor:
        """How often each of ``slots`` was written, from 0; -1 where it never was."""
        if self._generation_table is None:
            if _core is not None and is_plain_index(slots):
                found = torch.empty_like(slots)
                count = slots.numel()
                _core.generations(
                    slots.data_ptr(), count, self.next_position, self.slots, found.data_ptr()
                )
                return found
            found = torch.div(self.next_position - 1 - slots, self.slots, rounding_mode="floor")
            return torch.where((slots >= 0) & (slots < self.slots), found, -1)
        table = self._generations
        assert table is not None
        if not len(table):
            return torch.full_like(slots, -1)
        table = table.to(slots.device)
        known = (slots >= 0) & (slots < len(table))
        return torch.where(known, table[slots.clamp(0, len(table) - 1)], -1)

    def next_ones(self, slots: torch.Tensor, count: int) -> bool:
        """Whether any of ``slots``, each of a row, is among the next ``count`` to be written at the
        cursor; at most ``slots`` of them."""
        if _core is not None and is_plain_index(slots):
            at, number = slots.data_ptr(), slots.numel()
            return bool(_core.any_next(at, number, self.cursor, count, self.slots))
        return bool(((slots - self.cursor) % self.slots < count).any())

    @property
    def oldest_first(self) -> bool:
        """Whether no row is gone that is newer than a stored one, of all or of its stream."""
        return self.in_order or self.by_stream

    def keeps_slots(self, slots: int) -> bool:
        """Whether every record can stay in its slot where there are ``slots`` of them: as many, or
        others that hold all, which lie in write order from 0. O(1)."""
        from_0 = self.in_order and self.cursor == self.length % self.slots
        return slots == self.slots or (from_0 and self.length <= slots)

    def tables(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Positions ``[length]`` and generations, to look at; None where they follow from the
        counters."""
        positions = self._positions
        return positions if positions is None else positions[: self.length], self._generations

    # -- writing ------------------------------------------------------------------------------

    def advance(self, count: int) -> None:
        """Commits ``count`` records written at the cursor; only the last ``slots`` are stored."""
        after = self.next_position + count
        if not self.counted:
            assert self._generations is not None
            laps, rest = divmod(count, self.slots)
            self._touch(None if laps else self.next_slots(rest))
            self._grow_generations(min(self.slots, self.cursor + count))
            self._generations += laps
            self._generations[self.next_slots(rest)] += 1
        if not self.in_order:
            assert self._positions is not None
            kept = min(count, self.slots)
            last = (arange(kept) + self.cursor + count - kept) % self.slots
            self._grow_positions(min(self.slots, self.cursor + count))
            self._touch(last)
            # Before an entry says so: an exception that comes from outside finds a valid ledger.
            self.next_position = after
            self._positions[last] = arange(kept) + after - kept
        # Not length + count: records placed elsewhere may lie beyond the cursor.
        self.length = max(self.length, min(self.slots, self.cursor + count))
        self.cursor = (self.cursor + count) % self.slots
        self.next_position = after
        self.by_stream = False

    def place(self, slots: torch.Tensor, *, move_cursor: bool) -> None:
        """Commits records written at ``slots`` in that order, a slot possibly more than once.

        The caller has checked that no slot below the highest one stays unwritten.
        ``move_cursor`` makes the last of them the newest record.
        """
        if not len(slots):
            return
        self.changes += 1
        self._place(slots)
        self.by_stream = False
        if move_cursor:
            self.cursor = (int(slots[-1]) + 1) % self.slots

    def place_by_stream(self, slots: torch.Tensor) -> None:
        """The same of records that lie in free slots, or in those of the oldest of their streams.

        The caller has checked that ``oldest_first`` holds, tells who derives from the order, and
        counts no change. The cursor is where the free slots begin.
        """
        self._place(slots)
        self.by_stream = True
        self.cursor = self.length % self.slots

    def _place(self, slots: torch.Tensor) -> None:
        top = max(self.length, int(slots.max()) + 1)
        if self._positions is None or len(self._positions) < top:
            self._make_positions(top)
        if self._generations is None or len(self._generations) < top:
            self._make_generations(top)
        assert self._positions is not None
        assert self._generations is not None
        # By NumPy, whose steps are short, and which of one slot's numbers keeps the last.
        at, first = slots.numpy(), self.next_position
        self._touch(slots)
        # Before an entry says so: an exception that comes from outside finds a valid ledger.
        self.next_position += len(slots)
        self._positions.numpy()[at] = np.arange(len(at)) + first
        np.add.at(self._generations.numpy(), at, 1)
        self.length = top

    def clear(self) -> None:
        """Forgets all records; every slot that was ever written counts one generation up."""
        if self.next_position:
            self._make_generations(self.length)
            assert self._generations is not None
            self._generations[self._generations >= 0] += 1
        self._touch(None)
        self._positions, self.by_stream = None, False
        self.cursor = 0
        self.length = 0
        self.changes += 1
        self.cleared = self.next_position

    # -- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns counters and tables as numbers and int64 tensors (copies)."""
        tables = (self._positions, self._generations)
        positions, generations = (None if t is None else t.clone() for t in tables)
        return {
            "cursor": self.cursor,
            "length": self.length,
            "next_position": self.next_position,
            "slots": self.slots,
            "positions": positions if positions is None else positions[: self.length],
            "by_stream": self.by_stream,
            "generations": generations,
        }

    check = staticmethod(checked_state)

    @classmethod
    def saved(cls, state: dict[str, Any]) -> Ledger:
        """The ledger of a checked state, to look at: its tables are those of the state."""
        found = cls(state["slots"])
        found.cursor, found.length = state["cursor"], state["length"]
        found.next_position = state["next_position"]
        length, written = found.length, found.next_position
        found._positions = saved_table(
            state["positions"],
            lambda table: check_positions(table, written),
            "positions of rows",
        )
        found._generations = saved_table(
            state["generations"],
            lambda table: check_generations(table, length),
            "generations of slots",
        )
        found.by_stream = not found.in_order and state.get("by_stream", False)
        if not found.length:
            found.cleared = found.next_position
        return found

    @torch.inference_mode(False)
    def restore(self, state: dict[str, Any], rows: torch.Tensor | None) -> None:
        """Takes over a checked state.

        Args:
            state: what ``state`` gave, of a ledger with any number of slots.
            rows: ``None`` to keep every record in its slot, where ``keeps_slots`` allows it; else
                the old slots, oldest first, of the records that now lie in slots ``0, 1, ...``.

        A ledger that was in use keeps its promise: positions go on above those it gave out, and
        no slot and generation that it gave out name another record now.
        """
        self.changes += 1
        self._touch(None)
        used, old = self.next_position, self._all_generations()
        source = Ledger.saved(state)
        if rows is None:
            assert source.keeps_slots(self.slots)
            self.cursor, self.length = source.cursor, source.length
            self._positions = own_table(source._position_table)
            self._generations = own_table(source._generation_table)
            if source.slots != self.slots:
                self.cursor = self.length % self.slots
                # Nothing to count where each slot was written once at most, in either ring.
                if not source.counted or source.next_position != source.length:
                    self._generations = source._generations_later(self.length)
        else:
            self.length = len(rows)
            self.cursor = self.length % self.slots
            newest = arange(self.length) + (source.next_position - self.length)
            positions = source.positions(rows)
            # The newest records, in order: their positions follow from the counters again.
            self._positions = None if torch.equal(positions, newest) else positions
            self._generations = source.generations(rows)
        self.by_stream = not self.in_order and state.get("by_stream", False)
        self.next_position = source.next_position
        if used:
            lowest = self.next_position - self.length
            if self._positions is not None and self.length:
                lowest = int(self._positions.min())
            shift = max(0, used - lowest)
            self.next_position += shift
            if self._positions is not None:
                self._positions += shift
            self._generations = self._outdate(old, self._generations, source)
        if not self.length:
            self.cleared = self.next_position

    def follow(
        self,
        cursor: int,
        length: int,
        next_position: int,
        cleared: int,
        by_stream: bool,
        changes: int,
        positions: tuple[Any, Any],
        generations: tuple[Any, Any],
    ) -> None:
        """Becomes what the ledger of another process over the same rows is.

        Args:
            positions, generations: the whole table as NumPy array, None for none, and which of its
                entries differ from those here, int64 ``[K]``; None: any.
        """
        self.cursor, self.length, self.next_position = cursor, length, next_position
        self.cleared, self.by_stream, self.changes = cleared, by_stream, changes
        if positions[0] is not None or not self.in_order:
            self._positions = followed(self._positions, *positions)
        if generations[0] is not None or not self.counted:
            self._generations = followed(self._generations, *generations)

    def _outdate(self, old: torch.Tensor, new: torch.Tensor | None, source: Ledger) -> torch.Tensor:
        new = source._all_generations() if new is None else new
        merged = torch.full((max(len(old), len(new)),), -1, device="cpu")
        merged[: len(old)] = torch.where(old >= 0, old + 1, -1)
        merged[: len(new)] = torch.maximum(merged[: len(new)], new)
        return merged

    # -- tables -------------------------------------------------------------------------------

    def _touch(self, slots: torch.Tensor | None) -> None:
        if self.touched is not None:
            self.touched.append(slots)

    def _all_generations(self) -> torch.Tensor:
        if self._generations is not None:
            return self._generations.clone()
        return self.generations(arange(min(self.slots, self.next_position)))

    def _generations_later(self, length: int) -> Table:
        """Those of the first slots, for another ledger: worked out when it needs them, but of a
        table in memory, which may change meanwhile."""
        if isinstance(self._generation_table, torch.Tensor):
            return self._generation_table[:length].clone()
        return ReadLater(lambda: self._all_generations()[:length], [], "generations of slots")

    @torch.inference_mode(False)
    def _make_positions(self, size: int) -> None:
        if self._positions is None:
            self._positions = self.positions(arange(self.length))
            self._touch(None)
        self._grow_positions(size)

    def _grow_positions(self, size: int) -> None:
        assert self._positions is not None
        self._positions = grown(self._positions, size, self.slots)

    @torch.inference_mode(False)
    def _make_generations(self, size: int) -> None:
        if self._generations is None:
            self._generations = self._all_generations()
            self._touch(None)
        self._grow_generations(size)

    def _grow_generations(self, size: int) -> None:
        assert self._generations is not None
        self._generations = grown(self._generations, size, self.slots)


def is_plain_index(slots: torch.Tensor) -> bool:
    """Whether the core can read the tensor as the int64 numbers that it is."""
    return slots.dtype is torch.int64 and slots.is_cpu and slots.is_contiguous()
