"""Record the cursor, the length, and the row ids and generations of all slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import numpy as np
import torch

from replaykit import native
from replaykit._compat import arange
from replaykit.checkpoint import MappedRows, ReadLater, ReadOnce
from replaykit.declared import decode_state, vector, within
from replaykit.recovery.recovery_folder import Tables
from replaykit.storages.change_log import ChangeKind, ChangeLog, Removal
from replaykit.storages.indexing import all_distinct

if TYPE_CHECKING:
    from replaykit.storages.commit_state import CommittedState

Array = np.ndarray[Any, Any]
Table = torch.Tensor | ReadLater[torch.Tensor]
TablePair = tuple[torch.Tensor, torch.Tensor]
"""The tables of row ids and generations."""

_NO_SLOTS = np.zeros(0, np.int64)


class Region(Protocol):
    """Memory that holds the tables of a ledger, and undoes changes that are not committed.

    Several processes may use it. Each has a ledger, and only one of them changes it at a time.
    """

    def ledger_table(self, number: int, entries: int) -> Array:
        """Return the first entries of a table of ``Tables``, int64; the memory grows if needed."""

    def before_change(self, number: int, at: Array | range) -> None:
        """Journal entries of a table before they change."""


def _saved_table(
    value: torch.Tensor | MappedRows | None, check: Callable[[torch.Tensor], None], name: str
) -> Table | None:
    """Return a table of a saved state, which the caller does not change.

    A table in files is read and checked later. The error of ``check`` names it ``name``.
    """
    if not isinstance(value, MappedRows):
        return value

    def make(array: Any) -> torch.Tensor:
        table = torch.from_numpy(array)
        check(table)
        return table

    return ReadLater(make, [value], name)


_MOST = 2**54
"""Upper bound of valid counts. Larger counts, times the number of lanes, might soon exceed
int64."""


_Counted = Annotated[int, within(0, _MOST)]
_Numbers = Annotated[Any, vector(torch.int64)]


@dataclass(frozen=True)
class LedgerState:
    """The counters and tables of a ledger. Tables in files are checked when they are read."""

    slots: Annotated[int, within(1, 2**63 - 1)]
    length: _Counted
    cursor: _Counted
    next_position: _Counted
    positions: _Numbers | None
    generations: _Numbers | None
    by_stream: bool = False

    def __post_init__(self) -> None:
        slots, length, written = self.slots, self.length, self.next_position
        if not (length <= min(slots, written) and self.cursor <= min(length, slots - 1)):
            raise ValueError(
                "expected length <= slots, length <= next_position and a cursor at one of the "
                f"stored rows or after them, got {self}"
            )
        if self.positions is None and self.cursor != length % slots and length < slots:
            raise ValueError(f"expected positions, or the cursor at {length}, got {self}")
        for name, table, most in (
            ("positions", self.positions, length),
            ("generations", self.generations, slots),
        ):
            if table is not None and not length <= len(table) <= most:
                raise ValueError(f"expected {length} to {most} entries in {name}, got {len(table)}")
        if isinstance(self.positions, torch.Tensor):
            _check_positions(self.positions, written)
        if isinstance(self.generations, torch.Tensor):
            _check_generations(self.generations, length)


def _check_positions(table: torch.Tensor, written: int) -> None:
    """Raise ValueError unless the row ids are distinct and in ``[0, written)``."""
    known = table.numpy()
    if len(known) and (known.min() < 0 or known.max() >= written or not all_distinct(known)):
        raise ValueError(f"expected distinct 'positions' below {written}, got {table}")


def _check_generations(table: torch.Tensor, length: int) -> None:
    """Raise ValueError if a generation is impossible.

    Each of the first ``length`` slots must have been written, and no slot more than `_MOST` times.
    """
    known = table.numpy()
    if len(known) and (known.min() < -1 or known.max() > _MOST or (known[:length] < 0).any()):
        raise ValueError(
            f"expected 'generations' of all {length} stored rows, up to {_MOST}, got {table}"
        )


class Ledger:
    """The row ids and generations of a storage with ``slots`` slots, in int64.

    A row id (``position``) is the number of a row in write order. It is never used twice, even
    after ``clear`` or ``restore``. A generation counts the writes of a slot, from 0. A slot and its
    generation identify one row for ever.

    As long as all rows are written at the cursor, row ids and generations follow from the counters
    and need no memory. The first write to another slot makes a table of row ids and a table of
    generations. The first ``clear`` makes a table of generations. A table takes 8 bytes per slot.
    Tables of a checkpoint that was opened in place are read and checked on first use. That use
    raises CheckpointError if they contradict the counters.

    Attributes:
        generation_table: the table of generations, which may still be in files; None if the
            counters imply them.
        region: the memory of the tables; None for the memory of this process.

    Stored rows always occupy slots ``0..length-1``. Not thread-safe: the storage's lock guards it.
    """

    # Each table is None if the counters imply its numbers.
    _positions = ReadOnce["torch.Tensor | None"]("_position_table")
    _generations = ReadOnce["torch.Tensor | None"]("generation_table")

    def __init__(self, slots: int) -> None:
        self._position_table: Table | None = None
        self.generation_table: Table | None = None
        self.region: Region | None = None
        self.slots = slots
        self.cursor = 0
        self.length = 0
        self.next_position = 0
        # Grows with every change except writes at the cursor. Data derived from the order of rows
        # is then outdated.
        self.changes = 0
        self.cleared = 0
        # The row id after the last load: rows with lower ids were not written here since then.
        self._moved_at = 0
        # True if row ids are in a table, and each write replaced the oldest row of its stream.
        self.by_stream = False
        # The changes of rows. A storage also records its edits here.
        self.log = ChangeLog(slots)

    # -- reading ------------------------------------------------------------------------------

    @property
    def generation_count(self) -> int:
        """The length of the table of generations; -1 without a table."""
        table = self._generations
        return -1 if table is None else len(table)

    @property
    def in_order(self) -> bool:
        """True if row ids follow from the counters, since all writes were at the cursor."""
        return self._position_table is None

    @property
    def unread(self) -> bool:
        """True if row ids are in the files of a checkpoint and were not read yet."""
        return isinstance(self._position_table, ReadLater)

    def read_tables(self) -> None:
        """Read the tables that are still in files.

        The caller must do this before it overwrites a row.
        """
        _ = self._positions, self._generations

    def next_slots(self, count: int) -> torch.Tensor:
        """Return the slots of the next ``count`` rows in write order: int64 ``[count]``."""
        # This takes half the time of torch.arange.
        slots = torch.from_numpy(np.arange(self.cursor, self.cursor + count, dtype=np.int64))
        return slots if self.cursor + count <= self.slots else slots % self.slots

    def write_order(self) -> torch.Tensor:
        """Return the stored slots from the oldest row to the newest: int64 ``[length]``."""
        positions = self._positions
        if positions is not None:  # a stable sort takes little time if slots hold runs of rows
            return torch.from_numpy(positions[: self.length].numpy().argsort(kind="stable"))
        return (arange(self.length) + (self.cursor - self.length)) % self.slots

    @property
    def newest(self) -> int:
        """The slot of the newest row. At least one row must be stored."""
        positions = self._positions
        if positions is not None:
            return int(positions[: self.length].argmax())
        return (self.cursor - 1) % self.slots

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the ids of the rows in ``slots``; -1 for a slot without a row."""
        stored = (slots >= 0) & (slots < self.length)
        table = self._positions
        if table is not None:
            table = table.to(slots.device)
            found = table[slots.clamp(0, max(self.length - 1, 0))] if self.length else slots
        else:
            found = self.next_position - 1 - (self.cursor - 1 - slots) % self.slots
        return torch.where(stored, found, -1)

    def generations(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the generation of each of ``slots``; -1 if it was never written."""
        if self.generation_table is None:
            if is_plain_index(slots):
                found = torch.empty_like(slots)
                count = slots.numel()
                native.core.generations(
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
        """Return whether any of ``slots`` is among the next ``count`` slots at the cursor.

        Each of ``slots`` must hold a row, and ``count`` is at most the number of slots of the
        ledger.
        """
        if is_plain_index(slots):
            at, number = slots.data_ptr(), slots.numel()
            return bool(native.core.any_next(at, number, self.cursor, count, self.slots))
        return bool(((slots - self.cursor) % self.slots < count).any())

    @property
    def oldest_first(self) -> bool:
        """True if each write replaced only the oldest rows, of the storage or of a stream."""
        return self.in_order or self.by_stream

    def keeps_slots(self, slots: int) -> bool:
        """Return whether every row can keep its slot in a storage of ``slots`` slots.

        It can if the number of slots is the same. It also can if the rows are in write order from
        slot 0 and there are enough slots. Cost: O(1).
        """
        from_0 = self.in_order and self.cursor == self.length % self.slots
        return slots == self.slots or (from_0 and self.length <= slots)

    @property
    def place_in_log(self) -> tuple[int, int]:
        """The number of the log, and the next row id, for a later ``written_since``."""
        return self.log.number, self.next_position

    def written_since(self, seen: tuple[int, int] | None) -> tuple[bool, Array]:
        """Return whether a clear came since, and the slots that were written after it.

        Rows that a load has stored do not count, nor do earlier writes.

        Args:
            seen: an earlier ``place_in_log``; None for the present one.
        """
        cleared, slots = False, [_NO_SLOTS]
        changes = [] if seen is None else self.log.since(seen[0])
        if changes is None:
            assert seen is not None
            stored = arange(self.length)
            since = max(seen[1], self._moved_at)
            return False, stored[self.positions(stored) >= since].numpy()
        for change in changes:
            if change.kind in (ChangeKind.CLEAR, ChangeKind.MOVE):
                cleared, slots = change.kind is ChangeKind.CLEAR, [_NO_SLOTS]
            elif change.kind in (ChangeKind.APPEND, ChangeKind.PLACE):
                slots.append(change.in_ring(self.slots))
            elif change.removal is not None:
                slots = [change.removal.follow(np.concatenate(slots))]
        return cleared, np.concatenate(slots)

    def position_table(self) -> torch.Tensor | None:
        """Return the row ids ``[length]`` without a copy; None if the counters imply them."""
        return None if self._positions is None else self._positions[: self.length]

    # -- writing ------------------------------------------------------------------------------

    def advance(self, count: int) -> None:
        """Commit ``count`` rows written at the cursor; only the last ``slots`` are stored."""
        after = self.next_position + count
        if self.generation_table is not None:
            laps, rest = divmod(count, self.slots)
            table, at = (
                self._table_for(Tables.GENERATIONS, min(self.slots, self.cursor + count)),
                None,
            )
            if rest:
                at = self.next_slots(rest)
            self._before(Tables.GENERATIONS, range(len(table)) if laps else at)
            if laps:
                table += laps
            if at is not None:
                table[at] += 1
        if self._position_table is not None:
            kept = min(count, self.slots)
            last = (arange(kept) + self.cursor + count - kept) % self.slots
            table = self._table_for(Tables.POSITIONS, min(self.slots, self.cursor + count))
            self._before(Tables.POSITIONS, last)
            # This comes before the change of the table, so that an interrupt in between leaves a
            # valid ledger.
            self.next_position = after
            table[last] = arange(kept) + after - kept
        # The length is not length + count, because placed rows may be in slots after the cursor.
        until = self.cursor + count
        if until > self.length:
            self.length = until if until < self.slots else self.slots
        self.log.append(self.cursor, count)
        self.cursor = until % self.slots
        self.next_position = after
        self.by_stream = False

    def reserve(self, slots: torch.Tensor | range, removal: Removal | None = None) -> TablePair:
        """Return tables for rows that will be placed, after all steps that may fail.

        This comes before the write of the rows, and changes nothing.
        """
        before = self._position_table, self.generation_table
        top = max(self.length, slots.stop if type(slots) is range else int(slots.max()) + 1)
        try:
            positions = self._table_for(Tables.POSITIONS, top)
            generations = self._table_for(Tables.GENERATIONS, top)
            if self.region is not None:
                for number in (Tables.POSITIONS, Tables.GENERATIONS):
                    self._before(number, slots)
                    if removal is not None:
                        self._before(number, removal.target)
                if removal is not None:
                    self._before(Tables.GENERATIONS, range(removal.length, top))
            return positions, generations
        finally:
            self._position_table, self.generation_table = before

    def place(
        self, slots: torch.Tensor, tables: TablePair | None = None, *, move_cursor: bool
    ) -> None:
        """Commit rows written at ``slots`` in that order, a slot possibly more than once.

        ``tables`` is the result of ``reserve``, if it was called. The caller has checked that no
        slot below the highest slot stays unwritten. With ``move_cursor`` the cursor moves to the
        slot after the last of ``slots``.
        """
        if not len(slots):
            return
        self._place(slots, self.reserve(slots) if tables is None else tables)
        self.changes += 1  # at last, because it marks a complete write
        self.by_stream = False
        if move_cursor:
            self.cursor = (int(slots[-1]) + 1) % self.slots

    def place_in_streams(
        self, slots: torch.Tensor | range, tables: TablePair, removal: Removal | None = None
    ) -> None:
        """Commit rows in free slots, or in the slots of the oldest rows of their streams.

        A range of slots, of step 1, takes less time than the same slots in a tensor.

        The caller has checked that ``oldest_first`` is true. ``changes`` does not grow, because the
        caller notifies the parts that follow the order of rows. The cursor becomes the first free
        slot.

        Args:
            tables: the result of ``reserve`` for these arguments.
            removal: a removal after the write, of which each stream has lost only its oldest rows.
                Rows that move keep their row ids. No pair of a slot and a generation from before
                names one of the slots ``removal.target``, or a slot without a row.
        """
        self._place(slots, tables, removal)
        self.by_stream = True
        self.cursor = self.length % self.slots

    def _place(self, slots: Any, tables: TablePair, removal: Removal | None = None) -> None:
        """Change the tables. No step may fail."""
        is_run, length = type(slots) is range, self.length
        self._positions, self._generations = positions, generations = tables
        first, until = self.next_position, self.next_position + len(slots)
        self.log.place(slots if is_run else slots.numpy())
        # This comes before the changes of the tables, so that an interrupt in between leaves a
        # valid ledger.
        self.next_position = until
        if is_run:
            top = max(length, slots.stop)
            pointers = positions.data_ptr(), generations.data_ptr()
            native.core.place_run(*pointers, top, slots.start, until - first, first)
        else:
            # NumPy has less overhead. If a slot repeats, it stores the last row id.
            positions.numpy()[slots.numpy()] = np.arange(first, until)
            top = max(length, int(slots.max()) + 1)
            np.add.at(generations.numpy(), slots.numpy(), 1)
        self.length = top
        if removal is not None:
            source, target, self.length = removal
            self.log.remove(removal, top)
            positions.numpy()[target] = positions.numpy()[source]
            generations.numpy()[target] += 1
            generations[self.length : top] += 1

    @torch.inference_mode(False)
    def resize(self, slots: int, rows: torch.Tensor | None) -> None:
        """Change the number of slots; rows keep their row ids.

        A row that keeps its slot keeps its generation. No earlier pair of another slot and a
        generation names a row that has moved.

        Args:
            rows: as for ``restore``.
        """
        before, old = self.length, self._all_generations()
        rows = arange(before) if rows is None else rows
        row_id, length = self.positions(rows), len(rows)
        by_age = self.next_position - length
        generations = torch.full((max(len(old), length),), -1, device="cpu")
        generations[: len(old)] = old
        other = torch.ones(len(generations), dtype=torch.bool, device="cpu")
        other[:length] = rows != arange(length)  # slots of another row, or of no row
        generations[other & (generations >= 0)] += 1
        generations[:length].clamp_(min=0)
        if by_age or other[:length].any() or self.generation_table is not None:
            self._generations = generations
        self._positions = None if torch.equal(row_id, arange(length) + by_age) else row_id
        self.by_stream = self.by_stream and self._positions is not None
        self.slots = self.log.rows = slots
        self.length, self.cursor = length, length % slots
        self._moved_at = self.next_position
        self.changes += 1
        self.log.move()

    def clear(self) -> None:
        """Forget all rows, and increase the generation of every slot that was written."""
        if self.next_position:
            table = self._table_for(Tables.GENERATIONS, self.length)
            self._before(Tables.GENERATIONS, range(len(table)))
            table[table >= 0] += 1
        self._forget_rows()

    def _forget_rows(self) -> None:
        self.log.clear()
        self._positions, self.by_stream = None, False
        self.cursor = self.length = 0
        self.changes += 1
        self.cleared = self.next_position

    # -- state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the counters as ints and copies of the tables as int64 tensors."""
        tables = (self._positions, self._generations)
        positions, generations = (None if t is None else t.clone() for t in tables)
        return {
            "cursor": self.cursor,
            "length": self.length,
            "next_position": self.next_position,
            "slots": self.slots,
            "positions": positions if positions is None else positions[: self.length],
            "by_stream": self.by_stream,
            # A larger ledger before ``resize`` may have left more.
            "generations": generations if generations is None else generations[: self.slots],
        }

    @staticmethod
    def check(state: Any) -> dict[str, Any]:
        """Return a state after a check that ``state`` can have returned it.

        Raises:
            ValueError: an entry is missing or impossible; the error names it.
        """
        decode_state(LedgerState, state, "the state of a ledger")
        return cast(dict[str, Any], state)

    @classmethod
    def saved(cls, state: dict[str, Any]) -> Ledger:
        """Return a read-only ledger over a checked state, whose tables it shares."""
        found = cls(state["slots"])
        found.cursor, found.length = state["cursor"], state["length"]
        found.next_position = state["next_position"]
        length, written = found.length, found.next_position
        found._positions = _saved_table(
            state["positions"],
            lambda table: _check_positions(table, written),
            "positions of rows",
        )
        found._generations = _saved_table(
            state["generations"],
            lambda table: _check_generations(table, length),
            "generations of slots",
        )
        found.by_stream = not found.in_order and state.get("by_stream", False)
        if not found.length:
            found.cleared = found.next_position
        return found

    @torch.inference_mode(False)
    def restore(self, state: dict[str, Any], rows: torch.Tensor | None) -> None:
        """Restore a checked state.

        Args:
            state: the result of ``state`` of a ledger with any number of slots.
            rows: None to keep every row in its slot, if ``keeps_slots`` allows it. Otherwise the
                old slots, oldest first, of the rows that are now in slots ``0, 1, ...``.

        If this ledger was in use, its guarantees still hold. Row ids continue above all earlier
        ids. No earlier pair of slot and generation now identifies another row.
        """
        used, old = self.next_position, self._all_generations()
        source = Ledger.saved(state)
        positions, generations = source._position_table, source.generation_table
        length, cursor, following = source.length, source.cursor, source.next_position
        if rows is None:
            assert source.keeps_slots(self.slots)
            if source.slots != self.slots:
                cursor = length % self.slots
                # No table is needed if each slot was written at most once.
                if source.generation_table is not None or following != length:
                    generations = source._generations_later(length)
        else:
            length = len(rows)
            cursor = length % self.slots
            newest = arange(length) + (following - length)
            positions, generations = source.positions(rows), source.generations(rows)
            if torch.equal(positions, newest):
                positions = None  # these ids follow from the counters again
        if used:
            positions, lowest = _read(positions), following - length
            if positions is not None and length:
                lowest = int(positions.min())
            shift = max(0, used - lowest)
            following += shift
            positions = None if positions is None else positions + shift
            generations = self._outdate(old, _read(generations), source)
        positions = self._own(Tables.POSITIONS, positions)
        self._generations = self._own(Tables.GENERATIONS, generations)
        self._positions = positions
        self.by_stream = positions is not None and state.get("by_stream", False)
        self.cursor, self.length = cursor, length
        self.next_position = self._moved_at = following
        if not length:
            self.cleared = following
        self.changes += 1
        self.log.move()

    @torch.inference_mode(False)
    def follow(
        self,
        state: CommittedState,
        *,
        moved: bool,
        removed: bool,
        placed: Array | None = None,
        slots: Array | None = None,
    ) -> None:
        """Follow a committed ledger, whose tables are in the region.

        Args:
            moved: whether more has changed than a clear and writes at the cursor and by stream.
            removed: whether rows may have been removed and others moved.
            placed: the slots of rows that were written by stream, and possibly of others; None
                if they may be any.
            slots: if rows were removed, the slots that have other rows or no row now; None if they
                may be any.
        """
        counters = state.cursor, state.length, state.next_position
        if moved:
            self.changes += 1
            self.log.move(slots)
            if removed:
                self.log.removed = self.log.number
            self._moved_at = state.next_position
        elif state.cleared != self.cleared:
            self.next_position = state.cleared
            self._forget_rows()
        if moved or state.positions >= 0:
            if not moved:
                if placed is None or self.in_order:  # rows at the cursor may have come before
                    placed = np.arange(state.length)
                self.log.place(placed[placed < state.length])
            self.cursor, self.length, self.next_position = counters
        else:
            self.follow_writes(*counters)
        self.cleared, self.by_stream = state.cleared, bool(state.by_stream)
        self._positions, self._generations = (
            None if entries < 0 else self._in_region(number, entries)  # -1 for no table
            for number, entries in (
                (Tables.POSITIONS, state.positions),
                (Tables.GENERATIONS, state.generations),
            )
        )

    def follow_writes(self, cursor: int, length: int, next_position: int) -> None:
        """Follow writes at the cursor by another process."""
        if next_position > self.next_position:
            self.log.append(self.cursor, next_position - self.next_position)
        self.cursor, self.length, self.next_position = cursor, length, next_position

    def _outdate(self, old: torch.Tensor, new: torch.Tensor | None, source: Ledger) -> torch.Tensor:
        new = source._all_generations() if new is None else new
        merged = torch.full((max(len(old), len(new)),), -1, device="cpu")
        merged[: len(old)] = torch.where(old >= 0, old + 1, -1)
        merged[: len(new)] = torch.maximum(merged[: len(new)], new)
        return merged

    # -- tables -------------------------------------------------------------------------------

    def _all_generations(self) -> torch.Tensor:
        if self._generations is not None:
            return self._generations.clone()
        return self.generations(arange(min(self.slots, self.next_position)))

    def _generations_later(self, length: int) -> Table:
        """Return the generations of the first ``length`` slots, for another ledger.

        They are computed when the other ledger reads them. But a table in memory is copied now,
        because it may change before that.
        """
        if isinstance(self.generation_table, torch.Tensor):
            return self.generation_table[:length].clone()
        return ReadLater(lambda: self._all_generations()[:length], [], "generations of slots")

    def _before(self, number: int, at: torch.Tensor | Array | range | None) -> None:
        """Let a region journal entries that are about to change."""
        if self.region is not None and at is not None:
            slots = at.numpy() if isinstance(at, torch.Tensor) else at
            self.region.before_change(number, slots)

    def _in_region(self, number: int, entries: int) -> torch.Tensor:
        assert self.region is not None
        return torch.from_numpy(self.region.ledger_table(number, entries))

    @torch.inference_mode(False)  # tables made in that mode cannot be changed outside of it
    def _own(self, number: int, table: Table | None) -> Table | None:
        """Return a table that this ledger may change, with the numbers of a given one.

        In the memory of this process, a table in files is copied page by page, on the first write
        to each page.
        """
        if self.region is None:
            return table.clone() if isinstance(table, torch.Tensor) else table
        if (table := _read(table)) is None:
            return None
        own = self._in_region(number, len(table))
        self._before(number, range(len(own)))
        return own.copy_(table)

    def _table_for(self, number: int, size: int) -> torch.Tensor:
        """Return the table of row ids or generations, with at least ``size`` entries."""
        table = self._position_table if number == Tables.POSITIONS else self.generation_table
        if type(table) is torch.Tensor and table.numel() >= size:
            return table
        return self._grown(number, _read(table), size)

    @torch.inference_mode(False)
    def _grown(self, number: int, table: torch.Tensor | None, size: int) -> torch.Tensor:
        """Make a table, or let it at least double, so that the cost of growth stays linear.

        New entries are -1.
        """
        is_positions = number == Tables.POSITIONS
        if table is None:
            known = self.positions(arange(self.length)) if is_positions else self._all_generations()
            table = _read(self._own(number, known))
            assert table is not None
        count = len(table)
        if size > count:
            size, smaller = min(self.slots, max(size, 2 * count)), table
            if self.region is None:
                table = torch.empty(size, dtype=torch.int64, device="cpu")
                table[:count] = smaller
            else:
                table = self._in_region(number, size)
                self._before(number, range(count, size))  # committed before a clear
            table[count:] = -1
        if is_positions:
            self._positions = table
        else:
            self._generations = table
        return table


def _read(table: Table | None) -> torch.Tensor | None:
    return table.read() if isinstance(table, ReadLater) else table


def is_plain_index(slots: torch.Tensor) -> bool:
    """Return whether the tensor is contiguous int64 on the CPU, as the core needs it."""
    return slots.dtype is torch.int64 and slots.is_cpu and slots.is_contiguous()
