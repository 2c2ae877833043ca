"""Record which row lies in which slot: cursor, length, positions and generations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from replaykit import native
from replaykit._compat import arange
from replaykit.checkpoint import MappedRows, ReadLater
from replaykit.storages.slot_sets import all_distinct, contained

__all__ = [
    "Ledger",
    "MovedPositions",
    "Table",
    "Tables",
    "check_generations",
    "check_positions",
    "checked_state",
    "followed",
    "grown",
    "own_table",
    "saved_table",
]

Table = torch.Tensor | ReadLater[torch.Tensor]


class Tables:
    """The two of a ledger: None where their numbers follow from its counters."""

    def __init__(self) -> None:
        self._position_table: Table | None = None
        self._generation_table: Table | None = None

    @property
    def counted(self) -> bool:
        """Whether generations follow from the counters, without a table."""
        return self._generation_table is None

    @property
    def in_order(self) -> bool:
        """Whether positions follow from the counters: records were only written at the cursor."""
        return self._position_table is None

    @property
    def _positions(self) -> torch.Tensor | None:
        table = self._position_table
        if isinstance(table, ReadLater):
            table = self._position_table = _read(table)
        return table

    @_positions.setter
    def _positions(self, table: Table | None) -> None:
        self._position_table = table

    @property
    def _generations(self) -> torch.Tensor | None:
        table = self._generation_table
        if isinstance(table, ReadLater):
            table = self._generation_table = _read(table)
        return table

    @_generations.setter
    def _generations(self, table: Table | None) -> None:
        self._generation_table = table

    @property
    def unread(self) -> bool:
        """Whether positions lie in the files of a checkpoint, and nobody has needed them yet."""
        return isinstance(self._position_table, ReadLater)

    def read_tables(self) -> None:
        """Reads what lies in files yet, as has to be done before a row is overwritten."""
        _ = self._positions, self._generations


def saved_table(
    value: torch.Tensor | MappedRows | None, check: Callable[[torch.Tensor], None], what: str
) -> Table | None:
    """A table of a saved state, to look at; one that lies in files is read and checked later.

    Args:
        check: raises ValueError where the table contradicts what else was saved.
        what: it is, for the error.
    """
    if not isinstance(value, MappedRows):
        return value

    def make(array: Any) -> torch.Tensor:
        table = torch.from_numpy(array)
        check(table)
        return table

    return ReadLater(make, [value], what)


# Here and below: tables made in inference mode could not be changed outside of it.
@torch.inference_mode(False)
def _read(table: ReadLater[torch.Tensor]) -> torch.Tensor:
    return table.read()


@torch.inference_mode(False)
def own_table(table: Table | None) -> Table | None:
    """The same for who goes on with it: what lies in files is copied page by page, once somebody
    writes to it, and the rest now."""
    return table.clone() if isinstance(table, torch.Tensor) else table


@torch.inference_mode(False)
def followed(table: torch.Tensor | None, values: Any, at: Any) -> torch.Tensor | None:
    """The table that another process has as an array; see ``Ledger.follow``."""
    if values is None:
        return None
    if table is None or at is None or len(table) > len(values):
        return torch.from_numpy(values.copy())
    table = grown(table, len(values), len(values))
    table.numpy()[at] = values[at]
    return table


@torch.inference_mode(False)
def grown(table: torch.Tensor, size: int, limit: int) -> torch.Tensor:
    """Returns the table with at least ``size`` entries, new ones -1; doubles to stay linear."""
    if size <= len(table):
        return table
    larger = torch.full(
        (min(limit, max(size, 2 * len(table))),), -1, dtype=torch.int64, device="cpu"
    )
    larger[: len(table)] = table
    return larger


_MOST = 2**54
"""Numbers beyond this are no counts, and would not fit into int64 a little later, with lanes
counted too."""


def checked_state(state: object) -> dict[str, Any]:
    """Returns the state of a ledger if it is one that `Ledger.state` can have given.

    What tables say that lie in files is left to who reads them: `Ledger.saved`.

    Raises:
        ValueError: names the entry that is missing or impossible.
    """
    if not isinstance(state, dict):
        raise ValueError(f"expected a ledger's state as a mapping, got {type(state).__name__}")
    for name in ("slots", "length", "cursor", "next_position"):
        value = state.get(name)
        most = 2**63 - 1 if name == "slots" else _MOST
        if type(value) is not int or not (name == "slots") <= value <= most:
            raise ValueError(f"expected a count for {name!r}, got {value!r}")
    slots, length, written = state["slots"], state["length"], state["next_position"]
    if not (length <= min(slots, written) and state["cursor"] <= min(length, slots - 1)):
        raise ValueError(
            "expected length <= slots, length <= next_position and a cursor at one of the "
            f"stored records or after them, got {state}"
        )
    positions = _checked_table(state, "positions", length, length)
    if isinstance(positions, torch.Tensor):
        check_positions(positions, written)
    if positions is None and state["cursor"] != length % slots and length < slots:
        raise ValueError(f"expected 'positions', or the cursor at {length}, got {state}")
    if type(state.get("by_stream", False)) is not bool:
        raise ValueError(f"expected a bool for 'by_stream', got {state['by_stream']!r}")
    generations = _checked_table(state, "generations", length, slots)
    if isinstance(generations, torch.Tensor):
        check_generations(generations, length)
    return state


def check_positions(table: torch.Tensor, written: int) -> None:
    """Raises ValueError where these are not positions of stored records, of ``written`` ones."""
    known = table.numpy()
    if len(known) and (known.min() < 0 or known.max() >= written or not all_distinct(known)):
        raise ValueError(f"expected distinct 'positions' below {written}, got {table}")


def check_generations(table: torch.Tensor, length: int) -> None:
    """Raises ValueError where a slot of the first ``length`` was never written, or one that often
    as nobody can have written it."""
    known = table.numpy()
    if len(known) and (known.min() < -1 or known.max() > _MOST or (known[:length] < 0).any()):
        raise ValueError(
            f"expected 'generations' of all {length} stored records, up to {_MOST}, got {table}"
        )


def _checked_table(
    state: dict[str, Any], name: str, fewest: int, most: int
) -> torch.Tensor | MappedRows | None:
    if name not in state:
        raise ValueError(f"expected the entry {name!r} in a ledger's state")
    table = state[name]
    if table is None:
        return None
    if (
        not isinstance(table, (torch.Tensor, MappedRows))
        or table.dtype != torch.int64
        or len(table.shape) != 1
    ):
        raise ValueError(f"expected {name!r} as an int64 vector, got {table!r}")
    if not fewest <= len(table) <= most:
        raise ValueError(f"expected {fewest} to {most} entries in {name!r}, got {len(table)}")
    return table


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


Array = np.ndarray[Any, Any]


class MovedPositions:
    """From the positions that stored records had in one ledger to those they have in another.

    Args:
        old: the ledger as it was saved.
        new: the one that was restored from it.
        rows: as for ``Ledger.restore``.

    Attributes:
        oldest: the lowest old position of a record that is stored now.
        shift: what that record's position has grown by.

    Cost: O(1) where every record keeps its slot and positions follow from the counters, a pass over
    all positions where it does and they do not; else a sort of them.
    """

    def __init__(self, old: Ledger, new: Ledger, rows: torch.Tensor | None) -> None:
        self._count = new.length
        self._sorted: tuple[Array, Array] | None = None
        self._old: Array | None = None
        if rows is None and old.in_order and new.in_order:
            self.oldest = old.next_position - old.length
            self.shift = new.next_position - old.next_position
            return
        table = old.tables()[0]
        if rows is None and table is not None and not new.in_order:
            # All have moved alike.
            self._old = table.numpy()
            first = int(new.positions(torch.zeros(1, dtype=torch.int64, device="cpu")))
            self.oldest, self.shift = int(self._old.min()), first - int(self._old[0])
            return
        kept = arange(new.length) if rows is None else rows
        before = old.positions(kept).numpy()
        now = new.positions(arange(new.length)).numpy()
        order = np.argsort(before, kind="stable")
        self._sorted = before[order], now[order]
        self.oldest = int(before[order[0]])
        self.shift = int(now[order[0]]) - self.oldest

    def find(self, positions: Array) -> tuple[Array, Array]:
        """Looks up old positions: which of them, bool ``[K]``, are stored now, and the new
        positions of those."""
        if self._old is not None:
            there = contained(positions, self._old)
            return there, positions[there] + self.shift
        if self._sorted is None:
            there = (positions >= self.oldest) & (positions < self.oldest + self._count)
            return there, positions[there] + self.shift
        before, now = self._sorted
        at = np.minimum(np.searchsorted(before, positions), len(before) - 1)
        there = before[at] == positions
        return there, now[at[there]]
