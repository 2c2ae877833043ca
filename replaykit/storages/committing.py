"""How changes of a storage in files come to count."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.checkpoint.changes import TrackedTensor
from replaykit.errors import CheckpointError
from replaykit.recovery import Home
from replaykit.storages.kept_parts import (
    Changed,
    KeptCount,
    KeptPriorities,
    place_of,
    still_there,
    take_place,
)
from replaykit.storages.kept_state import KeptState, KeptTable
from replaykit.storages.ledger import Ledger

if TYPE_CHECKING:
    from replaykit.storages.tensors import LazyTensorStorage

__all__ = [
    "BESIDE",
    "FOLLOWERS",
    "GENERATIONS",
    "POSITIONS",
    "PRIORITIES",
    "Committing",
    "ledger_counters",
]

Array = np.ndarray[Any, Any]

POSITIONS, GENERATIONS = 0, 1
BESIDE, FOLLOWERS = 4, 5
PRIORITIES = 8
"""Numbers of tables; 2, 3, 6 and 7 are those of storages that processes share."""


class Committing:
    """Has what was changed while the lock was held count all at once; the half of ``Recovery`` that
    knows what belongs to a state.

    Args:
        storage: whose.
        home: the folder beside its files.
    """

    shared = False
    """Whether several processes have it open."""

    def __init__(self, storage: LazyTensorStorage, home: Home) -> None:
        self._storage = weakref.ref(storage)
        self.home = home
        self.active = False
        """Whether there are rows: from the first write on, or what was recovered."""
        self._rows: dict[Any, int] = {}
        self._noted: tuple[int, tuple[int, ...]] | None = None
        """How far the ledger, and what it counts on, had come when rows were noted last."""
        self._whole = 0
        """How much of what was noted then belongs to changes that were made to their end."""
        self._again = False
        """Whether a commit has failed: what it took from the parts is asked for once more."""
        self._seen: Any = None
        self._marks: Any = None
        self._committed: KeptState | None = None
        self._samplers: list[weakref.ref[Any]] = []
        self._writers: list[weakref.ref[Any]] = []
        self._saved_at: tuple[int, ...] = ()

    # -- parts --------------------------------------------------------------------------------

    def adopt_sampler(self, sampler: KeptPriorities) -> None:
        """Keeps a sampler's priorities; gives it those that the one in its place had.

        The one that comes for another one of the same buffer takes its place.

        Raises:
            CheckpointError: there are none in its file, but other numbers.
        """
        place, saved = place_of(self._samplers, sampler), self._still_saved()
        if place < len(self._samplers):
            self._again = True
        elif saved is not None and place < len(saved.priorities):
            table = saved.priorities[place]
            cells = self.home.table(PRIORITIES + place, np.float64, table.length)[: table.length]
            if not (np.isfinite(cells) & (cells >= 0)).all():
                raise CheckpointError(
                    f"{self.home.folder} is damaged: number {PRIORITIES + place} of its tables "
                    "holds no priorities"
                )
            sampler.take_kept(torch.from_numpy(cells.copy()), table.most, table.dropped)
        take_place(self._samplers, place, sampler)

    def adopt_writer(self, writer: KeptCount) -> None:
        """The same for the count of a writer."""
        place, saved = place_of(self._writers, writer), self._still_saved()
        if place < len(self._writers):
            self._again = True
        elif saved is not None and place < len(saved.counts):
            writer._write_count = saved.counts[place]
        take_place(self._writers, place, writer)

    def _let_go_of_parts(self, storage: LazyTensorStorage) -> None:
        """Closes the places of parts that are gone, or work on something else now."""
        for parts in (self._samplers, self._writers):
            there = still_there(parts, storage)
            if len(there) < len(parts):
                parts[:] = there
                self._again = True

    def _still_saved(self) -> KeptState | None:
        """The state that parts can take over: nothing was written since it was opened."""
        storage = self._storage()
        if storage is None:
            return None
        ledger = storage.ledger
        return self._committed if self._saved_at == (ledger.next_position, ledger.changes) else None

    # -- committing ---------------------------------------------------------------------------

    def settle(self) -> None:
        """Commits what was changed since the last time; called when the lock is let go.

        Raises:
            OSError: no room for it; nothing of it counts yet, the next time tries again.
        """
        storage = self._storage()
        if storage is None or not self.active:
            return
        if not self.shared and os.getpid() != self.home.process:
            return
        ledger, marks = storage.ledger, storage.indexes.marks
        now = ledger_counters(ledger)
        if self._noted is not None:
            if self._noted[1] == now and self._noted[0] == self.home.noted()[0]:
                self._take_back(self._whole)  # what was given up before anybody knew of it
            self._noted = None
        counts = self._write_counts()
        seen = now, storage.edits, counts
        if not self.shared and (
            self._again or self._saved_at != (ledger.next_position, ledger.changes)
        ):
            self._let_go_of_parts(storage)
        self._again, again = True, self._again  # until it has come to its end
        if again:
            ledger.touched = [None]
        changed: list[Changed | None] = []
        for known in self._samplers:
            sampler = known()
            changed.append(
                None if sampler is None else sampler.priorities_changed(everything=again)
            )
        moved = again or seen != self._seen or marks.numbers is not self._marks
        if moved or changed.count(None) < len(changed):
            numbers = None if again else self._moved_on(storage, changed, counts)
            if numbers is None:
                self._committed = self._state(storage, changed, again)
                numbers = self._committed.encode()
            self._commit(storage, numbers)
            self._seen, self._marks = seen, marks.numbers
        self._again = False

    def _take_back(self, since: int) -> None:
        storage = self._storage()
        if self.home.roll_back(since) and storage is not None:
            storage.put_back()

    def _commit(self, storage: LazyTensorStorage, numbers: Array) -> None:
        self.home.commit(numbers)

    def _logged(self, number: int, at: Array | range) -> None:
        """Told which rows of a table the next commit changes; a range: it may be all."""

    def tracked(self, sampler: KeptPriorities, rows: TrackedTensor) -> TrackedTensor:
        """A sampler's priorities for a save, with who knows of their changes; the lock is held."""
        return rows

    def _write_counts(self) -> list[int]:
        return [0 if (part := known()) is None else part._write_count for known in self._writers]

    def _moved_on(
        self, storage: LazyTensorStorage, changed: list[Changed | None], counts: list[int]
    ) -> Array | None:
        """The numbers of the state, where nothing has come but rows at the cursor; else None."""
        before, ledger = self._committed, storage.ledger
        if (
            before is None
            or ledger.touched
            or storage.indexes.marks.numbers is not self._marks
            or len(changed) != len(before.priorities)
            or not ledger.length
        ):
            return None
        priorities = [
            self._priorities(place, one, before, False) for place, one in enumerate(changed)
        ]
        return before.moved_on(ledger, storage.indexes.first_known(), priorities, counts)

    def _state(
        self, storage: LazyTensorStorage, changed: list[Changed | None], again: bool
    ) -> KeptState:
        before, ledger = self._committed, storage.ledger
        positions, generations = self._tables(ledger, before, again)
        saved = self._still_saved()
        priorities = [
            self._priorities(place, one, before, again) for place, one in enumerate(changed)
        ]
        counts = self._write_counts()
        if saved is not None:  # until their parts are there
            priorities += saved.priorities[len(priorities) :]
            counts += saved.counts[len(counts) :]
        return KeptState.of(
            ledger,
            storage.indexes.known() if ledger.length else None,
            positions=positions,
            generations=generations,
            priorities=priorities,
            counts=counts,
        )

    def _tables(self, ledger: Ledger, before: KeptState | None, again: bool) -> tuple[int, int]:
        """Brings the tables of the ledger to the files; returns their lengths, -1 for none."""
        touched, ledger.touched = ledger.touched or [], []
        lengths = (-1, -1) if before is None else (before.positions, before.generations)
        positions, generations = ledger.tables()
        return (
            self._table_set(POSITIONS, positions, touched, lengths[0], again),
            self._table_set(GENERATIONS, generations, touched, lengths[1], again),
        )

    def _table_set(
        self,
        number: int,
        table: torch.Tensor | None,
        touched: list[torch.Tensor | None],
        known: int,
        again: bool,
    ) -> int:
        if table is None:
            return -1
        values, some = table.numpy(), [slots.numpy() for slots in touched if slots is not None]
        if known < 0 or len(some) < len(touched):
            at: Array | range = range(len(values))
        else:
            at = np.unique(np.concatenate([*some, np.arange(known, len(values))]))
            at = at[at < len(values)]
        if len(at):
            of = slice(at.start, at.stop) if isinstance(at, range) else at
            # A commit that was interrupted may have counted.
            self.home.set(number, values[of], at, fresh=known < 0 and not again)
            self._logged(number, at)
        return len(values)

    def _priorities(
        self, place: int, changed: Changed | None, before: KeptState | None, again: bool
    ) -> KeptTable:
        known = None
        if before is not None and place < len(before.priorities):
            known = before.priorities[place]
        if changed is None:
            return KeptTable(0, 1.0, 0) if known is None else known
        index = range(changed.length) if changed.elements is None else changed.elements
        if len(index):
            fresh = (known is None or not known.length) and not again
            self.home.set(PRIORITIES + place, changed.values, index, fresh=fresh)
            self._logged(PRIORITIES + place, index)
        return KeptTable(changed.length, changed.most, changed.dropped)


def ledger_counters(ledger: Ledger) -> tuple[int, ...]:
    return ledger.cursor, ledger.length, ledger.next_position, ledger.changes
