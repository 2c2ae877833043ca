"""Commit changes of a storage to files, and recover it after its process has died."""

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
from replaykit.recovery import CommitLock, RecoveryFolder
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.commit_state import (
    Changed,
    CommittedPriorities,
    CommittedState,
    PriorityKeeper,
    RecoverableWriter,
    index_of_part,
    insert_part,
    still_there,
)
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.storages.next_rows import Pairs
from replaykit.structure import Path
from replaykit.ted import format_key

if TYPE_CHECKING:
    from replaykit.storages.tensors import LazyTensorStorage

__all__ = [
    "GENERATIONS",
    "POSITIONS",
    "PRIORITIES",
    "REFERENCES",
    "VERSION_SHARED",
    "Committing",
    "Recovery",
    "rows_as_bytes",
]

Array = np.ndarray[Any, Any]

POSITIONS, GENERATIONS = 0, 1
REFERENCES = 6
PRIORITIES = 8
"""Numbers of tables; shared storages also use 2, 3, 6 and 7, and no references."""


class Committing:
    """The part of ``Recovery`` that collects the state of a storage and commits it.

    All changes that were made while the lock was held are committed at once.

    Args:
        storage: the storage.
        home: the recovery folder next to the storage's files.
    """

    shared = False
    """True if several processes have the storage open."""

    _more: tuple[int, ...] = ()
    """Numbers that follow the committed state; see ``hand_over``."""

    def __init__(self, storage: LazyTensorStorage, home: RecoveryFolder) -> None:
        self._storage = weakref.ref(storage)
        self.home = home
        self.active = False
        """True after the first write, or if rows were recovered."""
        self._rows: dict[Any, int] = {}
        self._journaled: tuple[int, int] | None = None
        """Number of the state in progress, and of the ledger's log, at the last journaled write."""
        self._whole = 0
        """Bytes of the journal that belong to complete changes; a rollback stops there."""
        self._seen = -1
        """Number of the ledger's log at the last commit; -1 if the next commit must read the whole
        state of the parts, as after a failed commit."""
        self._counts: list[int] = []
        self._committed: CommittedState | None = None
        self._samplers: list[weakref.ref[Any]] = []
        self._writers: list[weakref.ref[Any]] = []
        self._saved_at: tuple[int, ...] = ()

    # -- parts --------------------------------------------------------------------------------

    def adopt_sampler(self, sampler: PriorityKeeper) -> None:
        """Commit the priorities of a sampler from now on, and restore its saved ones.

        A sampler that replaces another sampler of the same buffer gets the number of that sampler.

        Raises:
            CheckpointError: the table holds numbers that are not priorities.
        """
        place, saved = index_of_part(self._samplers, sampler), self._still_saved()
        if place < len(self._samplers):
            self._seen = -1
        elif saved is not None and place < len(saved.priorities):
            table = saved.priorities[place]
            cells = self.home.table(PRIORITIES + place, np.float64, table.length)[: table.length]
            if not (np.isfinite(cells) & (cells >= 0)).all():
                raise CheckpointError(
                    f"{self.home.folder} is damaged: number {PRIORITIES + place} of its tables "
                    "holds no priorities"
                )
            sampler.restore_priorities(torch.from_numpy(cells.copy()), table.most, table.dropped)
        insert_part(self._samplers, place, sampler)

    def adopt_writer(self, writer: RecoverableWriter) -> None:
        """Commit the count of a writer from now on, and restore its saved count."""
        place, saved = index_of_part(self._writers, writer), self._still_saved()
        if place < len(self._writers):
            self._seen = -1
        elif saved is not None and place < len(saved.counts):
            writer._write_count = saved.counts[place]
        insert_part(self._writers, place, writer)

    def _drop_parts(self, storage: LazyTensorStorage) -> None:
        """Remove the parts that have died, or are attached to another storage now."""
        for parts in (self._samplers, self._writers):
            there = still_there(parts, storage)
            if len(there) < len(parts):
                parts[:] = there
                self._seen = -1

    def _still_saved(self) -> CommittedState | None:
        """Return the recovered state; None if rows were written since the recovery."""
        storage = self._storage()
        if storage is None:
            return None
        ledger = storage.ledger
        return self._committed if self._saved_at == (ledger.next_position, ledger.cleared) else None

    # -- committing ---------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit all changes since the last commit.

        The lock calls this before its release.

        Raises:
            OSError: there is no room. No change is committed then, and the next call tries again.
        """
        storage = self._storage()
        if storage is None or not self.active:
            return
        if not self.shared and os.getpid() != self.home.process:
            return
        ledger = storage.ledger
        if self._journaled is not None:
            if self._journaled == (self.home.journaled()[0], ledger.log.number):
                self._rollback(self._whole)  # undo a write that failed before the ledger counted it
            self._journaled = None
        storage.indexes.settle()
        counts = self._write_counts()
        if not self.shared and (
            self._seen < 0 or self._saved_at != (ledger.next_position, ledger.cleared)
        ):
            self._drop_parts(storage)
        seen, self._seen = self._seen, -1  # until this commit is complete
        again, number = seen < 0, ledger.log.number
        changed: list[Changed | None] = []
        for known in self._samplers:
            sampler = known()
            changed.append(
                None if sampler is None else sampler.priorities_changed(everything=again)
            )
        moved = seen != number or counts != self._counts
        if moved or changed.count(None) < len(changed):
            numbers = None
            if not again and ledger.log.irregular <= seen:
                numbers = self._moved_on(storage, changed, counts)
            if numbers is None:
                self._committed = self._state(storage, changed, seen)
                numbers = self._committed.encode()
            self._commit(storage, numbers, seen)
        self._seen, self._counts = number, counts

    def _rollback(self, since: int) -> None:
        storage = self._storage()
        if self.home.roll_back(since) and storage is not None:
            storage.put_back()

    def _commit(self, storage: LazyTensorStorage, numbers: Array, seen: int) -> None:
        self.home.commit(numbers, self._more)

    def _logged(self, number: int, at: Array | range) -> None:
        """Record a change of rows of a table; a range may mean all rows."""

    def tracked(self, sampler: PriorityKeeper, rows: TrackedTensor) -> TrackedTensor:
        """Return a sampler's priorities for a save, with the tracker of their changes.

        The caller holds the lock.
        """
        return rows

    def _write_counts(self) -> list[int]:
        return [0 if (part := known()) is None else part._write_count for known in self._writers]

    def _moved_on(
        self, storage: LazyTensorStorage, changed: list[Changed | None], counts: list[int]
    ) -> Array | None:
        """Return the new state's numbers; None if it is not only a write at the cursor."""
        before, ledger = self._committed, storage.ledger
        if before is None or len(changed) != len(before.priorities) or not ledger.length:
            return None
        priorities = [
            self._priorities(place, one, before, False) for place, one in enumerate(changed)
        ]
        return before.moved_on(ledger, storage.indexes.first_known(), priorities, counts)

    def _state(
        self, storage: LazyTensorStorage, changed: list[Changed | None], seen: int
    ) -> CommittedState:
        before, ledger = self._committed, storage.ledger
        positions, generations = self._tables(ledger, before, seen)
        saved = self._still_saved()
        priorities = [
            self._priorities(place, one, before, seen < 0) for place, one in enumerate(changed)
        ]
        counts = self._write_counts()
        if saved is not None:  # keeps the entries of parts that are not attached yet
            priorities += saved.priorities[len(priorities) :]
            counts += saved.counts[len(counts) :]
        return CommittedState.of(
            ledger,
            storage.indexes.known() if ledger.length else None,
            positions=positions,
            generations=generations,
            priorities=priorities,
            counts=counts,
            more=len(self._more),
        )

    def _tables(self, ledger: Ledger, before: CommittedState | None, seen: int) -> tuple[int, int]:
        """Write the tables of the ledger to files; return their lengths, -1 for no table."""
        written = ledger.log.slots_since(seen, ledger.slots, edits=False)
        lengths = (-1, -1) if before is None else (before.positions, before.generations)
        positions, generations = ledger.tables()
        return (
            self._table_set(POSITIONS, positions, written, lengths[0], seen < 0),
            self._table_set(GENERATIONS, generations, written, lengths[1], seen < 0),
        )

    def _table_set(
        self,
        number: int,
        table: torch.Tensor | None,
        written: list[Array] | None,
        known: int,
        again: bool,
    ) -> int:
        if table is None:
            return -1
        values = table.numpy()
        if known < 0 or written is None:
            at: Array | range = range(len(values))
        else:
            at = np.unique(np.concatenate([*written, np.arange(known, len(values))]))
            at = at[at < len(values)]
        if len(at):
            of = slice(at.start, at.stop) if isinstance(at, range) else at
            # An interrupted commit may have taken effect.
            self.home.set(number, values[of], at, fresh=known < 0 and not again)
            self._logged(number, at)
        return len(values)

    def _priorities(
        self, place: int, changed: Changed | None, before: CommittedState | None, again: bool
    ) -> CommittedPriorities:
        known = None
        if before is not None and place < len(before.priorities):
            known = before.priorities[place]
        if changed is None:
            return CommittedPriorities(0, 1.0, 0) if known is None else known
        index = range(changed.length) if changed.elements is None else changed.elements
        if len(index):
            fresh = (known is None or not known.length) and not again
            self.home.set(PRIORITIES + place, changed.values, index, fresh=fresh)
            self._logged(PRIORITIES + place, index)
        return CommittedPriorities(changed.length, changed.most, changed.dropped)


VERSION_SHARED, VERSION_REFERENCES = 3, 4
"""Version of the format of folders whose rows processes share, or have shared."""

_ROWS = 1000
"""Number of the first file of rows. Tables have smaller numbers."""


class Recovery(Committing):
    """The recovery of a memory-mapped storage, with files that record its valid rows.

    All changes that were made while the storage's lock was held are committed at once, when the
    lock is released. Rows are journaled before they are overwritten. So a write is rolled back if
    the process is killed during it, or if an error comes before the ledger counts it.

    Args:
        storage: the storage.
        home: the recovery folder next to the storage's files.
    """

    # -- opening ------------------------------------------------------------------------------

    def describe(self, schema: Schema, slots: int, lanes: torch.Size) -> dict[str, Any]:
        """Return the values that must not differ when the storage is opened again."""
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
        """Return the description of the storage in the folder; None if there is none.

        Raises:
            CheckpointError: the description is damaged.
            ValueError: the storage was made with other arguments; the error names one.
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
                "use dumps and loads to change the capacity"
            )
        return found

    def check_dedup(self, found: dict[str, Any], pairs: Pairs | None) -> None:
        """Raise ValueError if the files were made with another ``dedup_next``."""
        there, own = found.get("dedup_next"), None if pairs is None else _dedup_columns_of(pairs)
        if there != own:
            shown = [
                False if keys is None else [key[0] if len(key) == 1 else tuple(key) for key in keys]
                for keys in (own, there)
            ]
            folder = self.home.folder.parent
            raise ValueError(f"expected dedup_next={shown[0]}, got {shown[1]} in {folder}")

    def begin(self, columns: Columns, files: list[FilePath]) -> None:
        """Open new row files, without stored rows, for the journal, and publish them."""
        self.reopen(columns, files)
        self.publish(columns)

    def reopen(self, columns: Columns, files: list[FilePath]) -> None:
        """Do the first half of ``begin``. Afterwards tables can be made."""
        self._open(columns, files, fresh=True)

    def publish(self, columns: Columns, pairs: Pairs | None = None) -> None:
        """Do the second half of ``begin``. From then on the storage can be recovered.

        Args:
            columns: the columns of the rows.
            pairs: the leaves that are stored once; None if the columns have all leaves.
        """
        schema = columns.schema if pairs is None else pairs.schema
        content = self.describe(schema, columns.slots, columns.lanes)
        if pairs is not None:
            content["dedup_next"] = _dedup_columns_of(pairs)
            content["references"] = REFERENCES
        version = VERSION_SHARED if self.shared else 1 if pairs is None else VERSION_REFERENCES
        self.home.publish(content, version=version)
        self.active = True

    def resume(self, columns: Columns, files: list[FilePath]) -> None:
        """Restore the committed ledger, cuts and begins of episodes.

        Raises:
            CheckpointError: the files contradict each other.
        """
        storage = self._storage()
        assert storage is not None
        numbers = self._open(columns, files)
        self.active = True
        if not len(numbers):
            return
        try:
            state = CommittedState.decode(numbers)
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
        self._saved_at = storage.ledger.next_position, storage.ledger.cleared
        self._seen = storage.ledger.log.number

    def _open(self, columns: Columns, files: list[FilePath], *, fresh: bool = False) -> Array:
        rows = rows_as_bytes(columns)
        targets = {_ROWS + number: cells for number, cells in enumerate(rows.values())}
        self._rows = dict(zip(rows, targets, strict=True))
        self.home.sync_with(files)
        storage = self._storage()
        assert storage is not None
        self._seen = storage.ledger.log.number
        return self.home.open(targets, fresh=fresh)

    def _table(self, number: int, length: int) -> torch.Tensor | None:
        if length < 0:
            return None
        self.home.check_table(number, np.int64, length)
        cells = self.home.table(number, np.int64, length)
        return torch.from_numpy(cells[:length].copy())

    @property
    def in_use(self) -> bool:
        """True if a sampler or a writer recovers its state here."""
        return bool(self._samplers or self._writers)

    def hand_over(self, more: Iterable[int]) -> None:
        """Commit the whole state, followed by ``more``, and change nothing from then on.

        Processes that share the rows then open the folder. The caller holds the lock.

        Raises:
            OSError: there is no room. No state has changed then.
        """
        found = self.home.manifest()
        if found is not None:
            self.home.publish(found, version=VERSION_SHARED)
            self._seen, self._more = -1, tuple(more)
            try:
                self.commit()
            except BaseException:
                self._more = ()
                raise
        self.active = False

    # -- changes ------------------------------------------------------------------------------

    def journal_rows(self, at: Array | range, paths: Iterable[Path] | None = None) -> None:
        """Journal stored rows, by slot, before they are overwritten.

        The caller holds the lock. The release of the lock rolls the rows back, unless by then the
        ledger has changed or ``made`` was called.

        Args:
            at: slots of the rows.
            paths: paths of the leaves that change; None for all leaves.

        Raises:
            OSError: there is no room for a copy of the rows. Nothing has changed then.
            RuntimeError: this is a forked process.
        """
        self._journal(at, paths)

    def _journal(self, at: Array | range, paths: Iterable[Path] | None = None) -> None:
        storage = self._storage()
        assert storage is not None
        stored = storage.ledger.length
        if (
            self._committed is not None
        ):  # its rows are valid until the next commit, even after a `clear`
            stored = max(stored, self._committed.length)
        if isinstance(at, range):
            at = range(at.start, min(at.stop, stored))
        elif len(at) and int(at.max()) >= stored:
            at = at[at < stored]
        count, used = self.home.journaled()
        now = count, storage.ledger.log.number
        if now != self._journaled:  # the journal so far belongs to complete writes
            self._journaled, self._whole = now, used
        rows = self._rows
        targets: Iterable[int] = rows.values()
        if paths is not None:  # a leaf without a separate column is in the records
            places = {path if path in rows else None for path in paths}
            targets = {rows[path] for path in places if path in rows}
        for target in targets:
            self.home.journal_rows(target, at)

    def journal_table(self, target: int, at: Array | range) -> None:
        """Journal rows of a table, or of another target of ``home``.

        The rows need not be stored rows.
        """
        storage = self._storage()
        assert storage is not None
        count, used = self.home.journaled()
        now = count, storage.ledger.log.number
        if now != self._journaled:
            self._journaled, self._whole = now, used
        self.home.journal_rows(target, at)

    def made(self) -> None:
        """Mark the change whose rows were journaled as complete."""
        self._whole = self.home.journaled()[1]

    def journal_ring(self, first: int, count: int) -> None:
        """Journal the stored rows in ``count`` slots of the ring, from ``first`` on.

        These are the slots at the cursor.
        """
        self._journal_ring(first, count)

    def _journal_ring(self, first: int, count: int) -> None:
        storage = self._storage()
        assert storage is not None
        ledger = storage.ledger
        slots = ledger.slots
        first %= slots
        until = first + count
        if until <= ledger.length:  # the case of every write of few rows to a full ring
            # The journal entry comes before `_journaled` is set. The write overwrites no row until
            # then.
            sequence, used = self.home.journal_file_rows(first, until)
            now = sequence, ledger.log.number
            if now != self._journaled:
                self._journaled, self._whole = now, used
        elif until <= slots:
            self._journal(range(first, until))
        else:
            self._journal(range(first, slots))
            self._journal(range(until - slots))

    def poll(self, *, whole: bool = False) -> None:
        """Poll other processes before the caller reads the number of rows.

        The caller need not hold the lock. The caller sets ``whole`` if it will also read other
        state.
        """

    def new_lock(self) -> Any:
        """Return a lock for the storage."""
        return CommitLock(self.commit)


def _dedup_columns_of(pairs: Pairs) -> list[list[Any]]:
    """Return the root paths of the leaves that are stored once."""
    return [list(path) for path in pairs.root_of.values()]


def rows_as_bytes(columns: Columns) -> dict[Path | None, Array]:
    """Return views of the memory of columns, uint8 ``[slots, bytes]`` each.

    The keys are the paths of leaves in separate columns, and None for the records.
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
