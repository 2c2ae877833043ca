"""Commit changes of a storage in files, and recover it after its process was killed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.checkpoint.dirty_chunks import TrackedTensor
from replaykit.errors import CheckpointError
from replaykit.recovery import CommitLock, Home
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.commit_state import (
    Changed,
    KeptCount,
    KeptState,
    KeptTable,
    PriorityKeeper,
    place_of,
    still_there,
    take_place,
)
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.storages.next_rows import Pairs
from replaykit.structure import Path
from replaykit.ted import format_key

if TYPE_CHECKING:
    from replaykit.storages.tensors import LazyTensorStorage

__all__ = [
    "BESIDE",
    "FOLLOWERS",
    "GENERATIONS",
    "POSITIONS",
    "PRIORITIES",
    "Committing",
    "Recovery",
    "ledger_counters",
    "rows_as_bytes",
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

    def adopt_sampler(self, sampler: PriorityKeeper) -> None:
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

    def tracked(self, sampler: PriorityKeeper, rows: TrackedTensor) -> TrackedTensor:
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


_ROWS = 1000
"""Numbers of tables; from the last on those of the files of the rows."""


class Recovery(Committing):
    """Keeps in files what tells which rows of a memory-mapped storage count.

    The lock of the storage is its clock: what was changed while it was held is committed when it is
    let go, all at once. Rows are noted in a journal before they are overwritten, so that a write
    that was cut off, by a kill or by an error before the ledger knew of it, is taken back.

    Args:
        storage: whose.
        home: the folder beside its files.
    """

    # -- opening ------------------------------------------------------------------------------

    def describe(self, schema: Schema, slots: int, lanes: torch.Size) -> dict[str, Any]:
        """What has to be the same when the storage is opened again."""
        storage = self._storage()
        assert storage is not None
        key = storage.lane_key
        return {
            "slots": slots,
            "ndim": storage.ndim,
            "lanes": list(lanes),
            "lane_key": None if key is None else list(key),
            "schema": schema.to_json(),
        }

    def known(self) -> dict[str, Any] | None:
        """The description of what is there; None: nothing.

        Raises:
            CheckpointError: it is damaged. ValueError: it is that of a storage with other
                arguments; says which.
        """
        found, storage = self.home.manifest(), self._storage()
        assert storage is not None
        if found is None:
            return None
        folder = self.home.folder.parent
        for name, own in (("ndim", storage.ndim), ("lane_key", storage.lane_key)):
            there = found.get(name)
            there = tuple(there) if isinstance(there, list) else there
            if there != own:
                shown = [format_key(k) if isinstance(k, tuple) else k for k in (own, there)]
                raise ValueError(f"expected {name}={shown[0]}, got {shown[1]} in {folder}")
        sizes = found.get("lanes")
        if not isinstance(sizes, list) or not all(type(n) is int and n > 0 for n in sizes):
            raise CheckpointError(f"{folder} has no sizes of lanes")
        slots = storage._slots_for(torch.Size(sizes))
        if found.get("slots") != slots:
            raise ValueError(
                f"expected a max_size of {slots} time steps, got {found.get('slots')} in {folder}: "
                "another capacity takes dumps and loads"
            )
        return found

    def check_once(self, found: dict[str, Any], pairs: Pairs | None) -> None:
        """Raises ValueError where other leaves are stored once than what is there tells of."""
        there, own = found.get("dedup_next"), None if pairs is None else _once_of(pairs)
        if there != own:
            shown = [
                False if keys is None else [key[0] if len(key) == 1 else tuple(key) for key in keys]
                for keys in (own, there)
            ]
            folder = self.home.folder.parent
            raise ValueError(f"expected dedup_next={shown[0]}, got {shown[1]} in {folder}")

    def begin(self, columns: Columns, files: list[FilePath]) -> None:
        """Has the rows of fresh files count as none, and opens them for noting."""
        self.open_anew(columns, files)
        self.publish(columns)

    def open_anew(self, columns: Columns, files: list[FilePath]) -> None:
        """The half of ``begin`` after which tables can be made."""
        self._open(columns, files, fresh=True)

    def publish(self, columns: Columns, pairs: Pairs | None = None) -> None:
        """The other half: from now on there is a storage to recover.

        Args:
            pairs: which leaves are stored once, of rows that have more leaves than the columns.
        """
        schema = columns.schema if pairs is None else pairs.schema
        content = self.describe(schema, columns.slots, columns.lanes)
        if pairs is not None:
            content["dedup_next"] = _once_of(pairs)
        self.home.publish(content, version=1 if pairs is None else 2)
        self.active = True

    def resume(self, columns: Columns, files: list[FilePath]) -> None:
        """Takes over what was committed: ledger, cuts and begins of episodes.

        Raises:
            CheckpointError: what is there contradicts itself.
        """
        storage = self._storage()
        assert storage is not None
        numbers = self._open(columns, files)
        self.active = True
        if not len(numbers):
            return
        try:
            state = KeptState.decode(numbers)
            for place, table in enumerate(state.priorities):
                self.home.check_table(PRIORITIES + place, np.float64, table.length)
            positions = self._table(POSITIONS, state.positions)
            generations = self._table(GENERATIONS, state.generations)
            ledger = Ledger.check(
                {
                    "slots": columns.slots,
                    "cursor": state.cursor,
                    "length": state.length,
                    "next_position": state.next_position,
                    "positions": positions,
                    "generations": generations,
                    "by_stream": state.by_stream,
                }
            )
            episodes = EpisodeIndexes.check(state.episodes())
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"{self.home.folder} contradicts itself: {error}") from None
        storage.ledger.restore(ledger, None)
        storage.ledger.cleared = state.cleared
        self._committed = state
        saved = Ledger(columns.slots)
        saved.restore(ledger, None)
        storage.indexes.restore(episodes, saved, None)
        self._saved_at = storage.ledger.next_position, storage.ledger.changes

    def _open(self, columns: Columns, files: list[FilePath], *, fresh: bool = False) -> Array:
        rows = rows_as_bytes(columns)
        targets = {_ROWS + number: cells for number, cells in enumerate(rows.values())}
        self._rows = dict(zip(rows, targets, strict=True))
        self.home.sync_with(files)
        storage = self._storage()
        assert storage is not None
        storage.ledger.touched = []
        return self.home.open(targets, fresh=fresh)

    def _table(self, number: int, length: int) -> torch.Tensor | None:
        if length < 0:
            return None
        self.home.check_table(number, np.int64, length)
        cells = self.home.table(number, np.int64, length)
        return torch.from_numpy(cells[:length].copy())

    # -- changes ------------------------------------------------------------------------------

    def note(self, at: Array | range, paths: Iterable[Path] | None = None) -> None:
        """Notes stored rows that are about to be overwritten, by slot. The lock is held.

        They are taken back when the lock is let go, unless the ledger has moved or ``made`` was
        called by then.

        Args:
            paths: of the leaves that are; None: all.

        Raises:
            OSError: there is no room for a copy of them; nothing has changed.
            RuntimeError: in a forked process.
        """
        self._note(at, paths)

    def _note(self, at: Array | range, paths: Iterable[Path] | None = None) -> None:
        storage = self._storage()
        assert storage is not None
        stored = storage.ledger.length
        if self._committed is not None:  # they count until the next commit, also after a `clear`
            stored = max(stored, self._committed.length)
        if isinstance(at, range):
            at = range(at.start, min(at.stop, stored))
        elif len(at) and int(at.max()) >= stored:
            at = at[at < stored]
        count, used = self.home.noted()
        now = count, ledger_counters(storage.ledger)
        if now != self._noted:  # what was noted before belongs to writes that count
            self._noted, self._whole = now, used
        rows = self._rows
        targets: Iterable[int] = rows.values()
        if paths is not None:  # those that have no place of their own lie in the records
            places = {path if path in rows else None for path in paths}
            targets = {rows[path] for path in places if path in rows}
        for target in targets:
            self.home.note(target, at)

    def note_more(self, target: int, at: Array | range) -> None:
        """``note`` of rows of a table, or of what else ``home`` knows, whichever are stored."""
        storage = self._storage()
        assert storage is not None
        count, used = self.home.noted()
        now = count, ledger_counters(storage.ledger)
        if now != self._noted:
            self._noted, self._whole = now, used
        self.home.note(target, at)

    def made(self) -> None:
        """Told that the change for which rows were noted was made to its end."""
        self._whole = self.home.noted()[1]

    def note_ring(self, first: int, count: int) -> None:
        """Notes the stored ones of ``count`` slots from ``first`` on, round the ring: those at the
        cursor."""
        self._note_ring(first, count)

    def _note_ring(self, first: int, count: int) -> None:
        storage = self._storage()
        assert storage is not None
        ledger = storage.ledger
        slots = ledger.slots
        first %= slots
        until = first + count
        if until <= ledger.length:  # what every write of few rows is, once the ring is full
            # Noted before it is said to whom it belongs: nothing is overwritten until then.
            sequence, used = self.home.note_rows(first, until)
            now = sequence, ledger_counters(ledger)
            if now != self._noted:
                self._noted, self._whole = now, used
        elif until <= slots:
            self._note(range(first, until))
        else:
            self._note(range(first, slots))
            self._note(range(until - slots))

    def look(self, *, whole: bool = False) -> None:
        """Told that somebody asks how much is stored, who may not hold the lock; ``whole``: or for
        something else."""

    def new_lock(self) -> Any:
        """The lock of the storage."""
        return CommitLock(self.settle)


def _once_of(pairs: Pairs) -> list[list[Any]]:
    """Which leaves at the root are stored once."""
    return [list(path) for path in pairs.root_of.values()]


def rows_as_bytes(columns: Columns) -> dict[Path | None, Array]:
    """The memory of columns by slot, uint8 ``[slots, bytes]`` each, without a copy.

    By the paths of the leaves; None: the records, which hold the others.
    """
    packed = {} if columns.layout is None else columns.layout.offsets
    alone: dict[Path | None, torch.Tensor] = {}
    if columns.records is not None:
        alone[None] = columns.records
    alone |= {path: tensor for path, tensor in columns.tensors.items() if path not in packed}
    return {
        path: tensor.reshape(-1).view(torch.uint8).reshape(columns.slots, -1).numpy()
        for path, tensor in alone.items()
        if tensor.numel()
    }
