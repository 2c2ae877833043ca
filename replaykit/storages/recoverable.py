"""Commit changes of a storage to files, and recover it after its process has died."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.checkpoint.dirty_chunks import TrackedTensor
from replaykit.errors import CheckpointError
from replaykit.recovery import CommitLock, RecoveryFolder, check_file, give_up_rows
from replaykit.recovery.recovery_folder import (
    GENERATIONS,
    POSITIONS,
    PRIORITIES,
    REFERENCES,
    ROWS,
    SIGNS,
)
from replaykit.schema import Schema
from replaykit.storages.column_reads import AnyColumns
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
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.dedup_journal import DedupJournal
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.storages.next_rows import Pairs
from replaykit.storages.row_files import (
    OVERFLOW,
    RowFiles,
    columns_in_files,
    refuse_taken,
    rows_as_bytes,
)
from replaykit.structure import Path
from replaykit.ted import format_key

if TYPE_CHECKING:
    from replaykit.storages.tensors import LazyTensorStorage

__all__ = [
    "ANNOUNCED",
    "IRREGULAR",
    "RESERVED",
    "RESET",
    "SIGN_COUNT",
    "VERSION_SHARED",
    "Committing",
    "Recovery",
]

Array = np.ndarray[Any, Any]


class Committing:
    """The part of ``Recovery`` that collects the state of a storage and commits it.

    All changes that were made while the lock was held are committed at once.

    Args:
        storage: the storage.
        home: the recovery folder next to the storage's files.
        existsok: whether to reuse the space of existing files.
        mapped: True if the folder is on a disk, and False if it is in memory.
    """

    shared = False
    """True if several processes have the storage open."""

    _more: tuple[int, ...] = ()
    """Numbers that follow the committed state; see ``hand_over``."""

    def __init__(
        self,
        storage: LazyTensorStorage,
        home: RecoveryFolder,
        *,
        existsok: bool = False,
        mapped: bool = True,
    ) -> None:
        self._storage = weakref.ref(storage)
        self.home = home
        self.folder = home.folder.parent
        """The folder of the row files."""
        self._existsok, self._mapped = existsok, mapped
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
            cells = self.home.table(PRIORITIES + place, table.length)[: table.length]
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
"""Versions of the format of folders whose rows processes share or have shared, and of folders with
references."""

ANNOUNCED, IRREGULAR, RESET, RESERVED = range(SIGN_COUNT := 4)
"""Numbers of the signs that writers set for readers without the lock.

- ``ANNOUNCED``: row id up to which a process is writing rows at the cursor.
- ``IRREGULAR``: twice the number of other overwrites of rows. It is odd during an overwrite.
- ``RESET``: number of the last state with changes that are not writes at the cursor.
- ``RESERVED``: number of overflow entries with reserved blocks.
"""


class Recovery(Committing):
    """The recovery of a memory-mapped storage, with files that record its valid rows.

    All changes that were made while the storage's lock was held are committed at once, when the
    lock is released. Rows are journaled before they are overwritten. So a write is rolled back if
    the process is killed during it, or if an error comes before the ledger counts it.

    Args:
        storage, home, existsok, mapped: as for ``Committing``.
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

    def make_columns(self, schema: Schema, lanes: torch.Size, pairs: Pairs | None) -> AnyColumns:
        """Make the files of the rows, in which none is stored yet, and publish them.

        Args:
            schema: the layout of the rows.
            lanes: sizes of the dimensions after time.
            pairs: the leaves that are stored once; None if every row stores all leaves.

        Raises:
            RuntimeError: another storage or process uses the folder, or this is a forked process.
            OSError: the disk has too little room.
        """
        storage, home, folder = self._storage(), self.home, self.folder
        assert storage is not None
        home.check_process()
        stored, slots = schema if pairs is None else pairs.stored, storage._slots_for(lanes)
        plan = RowFiles.of(folder, stored, slots, lanes)
        present = {file for file in plan.files.values() if file.exists()}
        if pairs is not None:
            present |= set((folder / OVERFLOW).rglob("*.memmap"))
        if not home.half_made:  # else the files are leftovers of this storage
            refuse_taken(folder, present, existsok=self._existsok, own=home.folder)
            if present:
                give_up_rows(folder, home.folder)
        with home.making():
            rows = columns_in_files(
                folder,
                stored,
                slots,
                lanes,
                existsok=True,
                taken=[],
                ndim=storage.ndim,
                mapped=self._mapped,
            )
            self._open(rows, list(plan.files.values()), fresh=True)
            columns: AnyColumns = rows
            if pairs is not None:
                journal = DedupJournal(self, folder / OVERFLOW, mapped=self._mapped)
                references = journal.references(slots * lanes.numel(), there=False)
                columns = self._dedup(storage, pairs, rows, journal, references)
            self._publish(schema, rows, pairs)
        return columns

    def _dedup(
        self,
        storage: LazyTensorStorage,
        pairs: Pairs,
        rows: Columns,
        journal: DedupJournal,
        references: Array,
    ) -> DedupColumns:
        columns = DedupColumns(pairs, rows, journal.grow, storage.lane_key)
        columns.table.journal_by(journal, references)
        return columns

    def _publish(self, schema: Schema, rows: Columns, pairs: Pairs | None) -> None:
        """Write the manifest. From then on the storage can be recovered."""
        content = self.describe(schema, rows.slots, rows.lanes)
        if pairs is not None:
            content["dedup_next"] = _dedup_columns_of(pairs)
            content["references"] = REFERENCES
        self.home.publish(content, version=self._version(content))
        self.active = True

    def _version(self, content: Mapping[str, Any]) -> int:
        if "references" in content:
            return VERSION_REFERENCES
        return VERSION_SHARED if self.shared else 1

    def resume(self) -> None:
        """Resume with the rows that a storage of the same arguments left in the folder.

        Raises:
            ValueError: the storage was made with other arguments; the error names one.
            CheckpointError: the files are damaged, or contradict each other.
        """
        found, storage = self.known(), self._storage()
        assert storage is not None
        if found is None:
            return
        with storage.lock:
            try:
                self._restore(storage, *self._open_files(storage, found))
                if isinstance(storage._columns, DedupColumns):
                    self._restore_references(storage, storage._columns, found)
            except BaseException:
                self.active = False  # its present state must not be committed
                raise

    def _open_files(
        self, storage: LazyTensorStorage, found: Mapping[str, Any]
    ) -> tuple[Columns, Array]:
        """Map the files of the rows and undo uncommitted changes; return rows and state.

        Raises:
            ValueError: the files were made with another ``dedup_next``.
            CheckpointError: a file is damaged or missing; the error names it.
        """
        folder = self.folder
        try:
            schema = Schema.from_json(found.get("schema"))
        except ValueError as error:
            raise CheckpointError(f"the schema of {folder} cannot be read: {error}") from None
        lanes, pairs = torch.Size(found["lanes"]), storage.pairs_for(schema)
        there, own = found.get("dedup_next"), None if pairs is None else _dedup_columns_of(pairs)
        if there != own:
            shown = [
                False if keys is None else [key[0] if len(key) == 1 else tuple(key) for key in keys]
                for keys in (own, there)
            ]
            raise ValueError(f"expected dedup_next={shown[0]}, got {shown[1]} in {folder}")
        stored = schema if pairs is None else pairs.stored
        plan = RowFiles.of(folder, stored, storage._slots_for(lanes), lanes)
        for path, file in plan.files.items():
            check_file(file, plan.nbytes(path))
        rows, files = plan.opened(storage.ndim, mapped=self._mapped), list(plan.files.values())
        elements = rows.slots * lanes.numel()
        columns: AnyColumns = rows
        if pairs is not None:
            journal = DedupJournal(self, folder / OVERFLOW, mapped=self._mapped)
            journal.open(pairs.overflow, elements)
            files += journal.files
        numbers = self._open(rows, files)
        if pairs is not None:
            there = "references" in found
            references = journal.references(elements, there=there)
            columns = self._dedup(storage, pairs, rows, journal, references)
        storage._columns = columns
        storage._adopt(columns)
        self.active = True
        return rows, numbers

    def _restore_references(
        self, storage: LazyTensorStorage, columns: DedupColumns, found: Mapping[str, Any]
    ) -> None:
        """Find the entries in use; convert the tables of a folder before version 4."""
        table, rows = columns.table, columns.rows
        journal, cells = table.journal, rows.lanes.numel()
        assert journal is not None
        stored, streams = storage.ledger.length * cells, storage.lane_key is not None
        try:
            if "references" not in found:
                journal.convert(table.references, cells, stored, streams=streams)
            # The disk may have no blocks for entries after the last one in use.
            used = -int(table.references[:stored].min(initial=0))
            table.use_overflow(journal.table(columns.pairs.overflow, used))
            columns.reread(storage.ledger)
        except ValueError as error:
            raise CheckpointError(f"{self.folder} contradicts itself: {error}") from None
        if "references" not in found:
            self._publish(columns.schema, rows, columns.pairs)
            journal.drop_converted()

    def _restore(self, storage: LazyTensorStorage, columns: Columns, numbers: Array) -> None:
        """Restore the committed ledger, cuts and begins of episodes.

        Raises:
            CheckpointError: the files contradict each other.
        """
        if not len(numbers):
            return
        try:
            state = CommittedState.decode(numbers)
            for place, table in enumerate(state.priorities):
                self.home.check_table(PRIORITIES + place, table.length)
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
        targets = {ROWS + number: cells for number, cells in enumerate(rows.values())}
        self._rows = dict(zip(rows, targets, strict=True))
        self.home.sync_with(files)
        storage = self._storage()
        assert storage is not None
        self._seen = storage.ledger.log.number
        return self.home.open(targets, fresh=fresh)

    def _table(self, number: int, length: int) -> torch.Tensor | None:
        if length < 0:
            return None
        self.home.check_table(number, length)
        cells = self.home.table(number, length)
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
        found, storage = self.home.manifest(), self._storage()
        assert storage is not None
        self.home.drop_following()
        if found is not None:
            self.home.publish(found, version=max(VERSION_SHARED, self._version(found)))
            self._seen, self._more = -1, tuple(more)
            try:
                self.commit()
            except BaseException:
                self._more = ()
                raise
            if isinstance(storage._columns, DedupColumns):
                signs = self.home.table(SIGNS, SIGN_COUNT)
                signs[RESERVED] = storage._columns.table.overflow_entries
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
        self.journal_stored(at, paths)

    def journal_stored(self, at: Array | range, paths: Iterable[Path] | None = None) -> None:
        """Journal as ``journal_rows`` does, but give readers without the lock no sign."""
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
            self.journal_stored(range(first, until))
        else:
            self.journal_stored(range(first, slots))
            self.journal_stored(range(until - slots))

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
