"""Commit changes of a storage to files, and roll back changes that were not committed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np

from replaykit.checkpoint.dirty_chunks import TrackedTensor
from replaykit.errors import CheckpointError
from replaykit.recovery.locks import CommitLock
from replaykit.recovery.recovery_folder import RecoveryFolder, Tables
from replaykit.storages.columns import Columns
from replaykit.storages.commit_state import (
    CUTS,
    TAGS,
    CommittedPriorities,
    CommittedState,
    Parts,
    Places,
    PriorityColumn,
    PriorityKeeper,
    RecoverableWriter,
    index_of_part,
    insert_part,
    set_alone,
    still_there,
    write_log,
)
from replaykit.storages.ledger import Ledger
from replaykit.storages.row_files import rows_as_bytes
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.episodes import CutMarks
    from replaykit.storages.episode_tags import EpisodeTags
    from replaykit.storages.shared_storage import Sharing
    from replaykit.storages.tensors import LazyTensorStorage

Array = np.ndarray[Any, Any]


class Recovery:
    """The files of a storage, which hold its committed rows, tables, counters and priorities.

    All changes that were made while the storage's lock was held are committed at once, when the
    lock is released. Rows are journaled before they are overwritten. So a write is rolled back if
    the process is killed during it, or if an error comes before the ledger counts it.

    Args:
        storage: the storage.
        home: the recovery folder next to the storage's files.
        existsok: whether to reuse the space of existing files.
        mapped: True if the folder is on a disk, and False if it is in memory.

    Attributes:
        folder: the folder of the row files.
        sharing: the link to other processes that have the folder open; None if there are none.
        active: True after the first write, or if rows were recovered.
        state: the latest state that this process has committed, recovered or followed.
        seen: number of the ledger's log at the latest commit; -1 if the next commit must read the
            whole state of the parts, as after a failed commit.
        samplers: the columns of the priorities that are committed.
        writers: references to the writers whose counts are committed.
    """

    def __init__(
        self,
        storage: LazyTensorStorage,
        home: RecoveryFolder,
        *,
        existsok: bool = False,
        mapped: bool = True,
    ) -> None:
        self.storage_ref = weakref.ref(storage)
        self.home, self.folder = home, home.folder.parent
        self.existsok, self.mapped = existsok, mapped
        self.sharing: Sharing | None = None
        self.active = False
        self.state: CommittedState | None = None
        self.seen = -1
        self.samplers: Parts = []
        self.writers: Parts = []
        # The next row id, and the row id of the latest clear, at the state.
        self._state_at: tuple[int, ...] = ()
        # True until the first commit after a recovery, which has cut open episodes.
        self._restarted = False
        self._counts: list[int] = []
        # The state that has the numbers of all parts.
        self._settled: CommittedState | None = None
        # The committed places of tags and cuts; see `write_log`.
        self._places: Places = ((0, 0), (0, 0))
        # Numbers that follow the committed state; see `hand_over`.
        self._more: tuple[int, ...] = ()
        # The targets of the journal with the rows, by the path of a leaf, or None for the records.
        self._rows: dict[Any, int] = {}
        # The number of the state in progress, and the ledger's counters, at the last journal entry.
        self.journaled: tuple[int, ...] | None = None
        # Bytes of the journal that belong to complete changes; a rollback stops there.
        self._whole = 0
        # True if `change_table` was called since the last commit.
        self._table_changed = False

    @property
    def shared(self) -> bool:
        """True if several processes have the storage open."""
        return self.sharing is not None

    @property
    def storage(self) -> LazyTensorStorage:
        """The storage, which must exist."""
        storage = self.storage_ref()
        assert storage is not None
        return storage

    # -- opening ------------------------------------------------------------------------------

    def open_rows(self, columns: Columns, files: list[FilePath], *, fresh: bool = False) -> Array:
        """Open the folder for these rows, undo uncommitted changes, and return the state.

        Args:
            columns: the columns of the rows.
            files: the files of the rows and of overflow entries.
            fresh: whether the files are new.

        Raises:
            CheckpointError: a file is missing or damaged, or contradicts the other files.
        """
        rows = rows_as_bytes(columns)
        targets = {Tables.ROWS + number: cells for number, cells in enumerate(rows.values())}
        self._rows = dict(zip(rows, targets, strict=True))
        self.home.sync_with(files)
        self.seen = self.storage.ledger.log.number
        self.storage.ledger.region = self
        undoing = None if self.sharing is None else self.sharing.announce_rollback
        numbers = self.home.open(targets, fresh=fresh, undoing=undoing)
        if self.sharing is not None:
            self.sharing.open_tables(columns)
        return numbers

    def in_state(self, state: CommittedState, *, restarted: bool = False) -> None:
        """Record that the storage is in a state that is in the files.

        Args:
            restarted: whether the storage has cut the episodes that were open.
        """
        ledger = self.storage.ledger
        self.state, self._state_at = state, (ledger.next_position, ledger.cleared)
        self.seen, self._restarted = ledger.log.number, restarted
        self._counts = self._write_counts()
        self._places = state.places

    @property
    def writable(self) -> bool:
        """True if the files exist, and this process may change them."""
        return self.active and (self.sharing is not None or os.getpid() == self.home.process)

    @property
    def in_use(self) -> bool:
        """True if a sampler or a writer recovers its state here."""
        return bool(self.samplers or self.writers)

    def hand_over(self, more: Iterable[int]) -> None:
        """Commit the whole state, followed by ``more``, and change nothing from then on.

        Processes that share the rows then open the folder. The caller holds the lock.

        Raises:
            OSError: there is no room. No state has changed then.
        """
        self.seen, self._more = -1, tuple(more)
        try:
            self.commit()
        except BaseException:
            self._more = ()
            raise
        self.active = False

    # -- parts --------------------------------------------------------------------------------

    def adopt_sampler(self, sampler: PriorityKeeper) -> None:
        """Commit the priorities of a sampler from now on, and restore its saved ones.

        A sampler that replaces another sampler of the same buffer gets the number of that sampler.

        Raises:
            CheckpointError: the table holds numbers that are not priorities.
            RuntimeError: processes share the storage, and another buffer has a sampler over it.
        """
        column = PriorityColumn(sampler, self)
        if self.sharing is not None:
            with self.storage.lock:
                others = list(self.samplers)
                set_alone(self.samplers, column)
                for other in others:
                    other.whole = True  # it writes nothing from now on
                column.number = Tables.PRIORITIES
                sampler.use_column(column)
                if self.state is not None and self.state.priorities:
                    column.follow(self.committed_priorities(0, None), self.state.priorities[0])
            return
        place, saved = index_of_part(self.samplers, sampler), self._still_saved()
        if place < len(self.samplers):
            self.seen = -1
        elif saved is not None and place < len(saved.priorities):
            found = self.committed_priorities(place, None)
            if not (np.isfinite(found[1]) & (found[1] >= 0)).all():
                raise CheckpointError(
                    f"{self.home.folder} is damaged: number {Tables.PRIORITIES + place} of its "
                    "tables holds no priorities"
                )
            column.number = Tables.PRIORITIES + place
            column.follow(found, saved.priorities[place])
        insert_part(self.samplers, place, column)
        self._number_columns()
        sampler.use_column(column)

    def _number_columns(self) -> None:
        """Give each sampler the table of its place in the list."""
        for number, column in enumerate(self.samplers, Tables.PRIORITIES):
            if column.number != number:
                column.number, column.whole = number, True

    def committed_priorities(self, place: int, at: Array | None) -> tuple[Array | None, Array]:
        """Return elements and copies of committed priorities of a sampler.

        The elements are those ``at`` positions that have priorities; None for all.
        """
        assert self.state is not None
        length = self.state.priorities[place].length
        cells = self.home.table(Tables.PRIORITIES + place, length)[:length]
        if at is None:
            return None, cells.copy()
        at = at[at < length]
        return at, cells[at]

    def adopt_writer(self, writer: RecoverableWriter) -> None:
        """Commit the count of a writer from now on, and restore its saved count."""
        if self.sharing is not None:
            with self.storage.lock:
                set_alone(self.writers, weakref.ref(writer))
                if self.state is not None and len(self.state.counts):
                    writer._write_count = int(self.state.counts[0])
            return
        place, saved = index_of_part(self.writers, writer), self._still_saved()
        if place < len(self.writers):
            self.seen = -1
        elif saved is not None and place < len(saved.counts):
            writer._write_count = int(saved.counts[place])
        insert_part(self.writers, place, weakref.ref(writer))

    def _drop_parts(self, storage: LazyTensorStorage) -> None:
        """Remove the parts that have died, or are attached to another storage now."""
        samplers = list(self.samplers)
        for parts in (self.samplers, self.writers):
            there = still_there(parts, storage)
            if len(there) < len(parts):
                parts[:] = there
                self.seen = -1
        for column in samplers:
            if column not in self.samplers:
                column.whole = True  # its table may become that of another sampler
        self._number_columns()

    def _still_saved(self) -> CommittedState | None:
        """Return the recovered state; None if rows were written since the recovery."""
        ledger = self.storage.ledger
        return self.state if self._state_at == (ledger.next_position, ledger.cleared) else None

    def tracked(self, rows: TrackedTensor) -> TrackedTensor:
        """Return a sampler's priorities for a save, with the tracker of their changes.

        The caller holds the lock.
        """
        return rows if self.sharing is None else self.sharing.tracked(rows)

    # -- committing ---------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit all changes since the last commit.

        The lock calls this before its release.

        Raises:
            OSError: there is no room. No change is committed then, and the next call tries again.
        """
        storage, alone = self.storage_ref(), self.sharing is None
        if storage is None or not self.active or (alone and os.getpid() != self.home.process):
            return
        ledger = storage.ledger
        if self.journaled is not None:
            if self.journaled == (self.home.journaled()[0], *_counters(ledger)):
                self.roll_back(self._whole)  # undo a write that failed before the ledger counted it
            self.journaled = None
        indexes = storage.indexes
        indexes.settle()
        counts = self._write_counts()
        if alone and (self.seen < 0 or self._state_at != (ledger.next_position, ledger.cleared)):
            self._drop_parts(storage)
        seen, self.seen = self.seen, -1  # until this commit is complete
        number, tags, cuts, places = ledger.log.number, indexes.tags, indexes.marks, self._places
        if not ledger.length:
            cuts.clear()
        if seen < 0 and len(latest := self.home.states.view()):
            # An interrupted commit may have taken effect.
            places = CommittedState(latest).places
        priorities, logged = [], tags.uncommitted or cuts.uncommitted
        written, same = seen != number, counts == self._counts
        changed = written or self._table_changed or logged
        for column in self.samplers:
            sampler = column.sampler()
            if sampler is None:
                found = column.counts
            else:
                found = sampler.settle_priorities(written=written)
            priorities.append(found)
            same = same and found == column.counts
            changed = changed or column.written or column.whole
        if changed or not same:
            if written and self.sharing is not None:
                self.sharing.log_rows(storage, seen)
            state = self.state
            if logged:
                places = self._write_logs(tags, cuts, places)
            whole = (
                seen < 0
                or self._restarted
                or state is None
                or (logged and not state.set_places(places))
                or (written and not self._advanced(storage, state, seen))
                or not ((same and state is self._settled) or state.set_parts(priorities, counts))
            )
            if whole:
                state = self._whole_state(storage, priorities, counts, places)
            assert state is not None
            self.state = self._settled = state
            self._restarted = False
            if self.sharing is None:
                self.home.commit(state.numbers, self._more)
            else:
                self.sharing.commit_state(state, whole=whole or logged)
            for place, column in enumerate(self.samplers):
                column.counts, column.written, column.whole = priorities[place], False, False
        self.seen, self._counts, self._table_changed = number, counts, False
        if logged:
            self._places = places
            tags.committed()
            cuts.committed()

    def _write_logs(self, tags: EpisodeTags, cuts: CutMarks, places: Places) -> Places:
        """Append uncommitted tags and cuts to their logs, and return the places of all."""
        tagged, cut = places
        if tags.uncommitted:
            tagged = write_log(self.home, TAGS, tags, tagged)
        if cuts.uncommitted:
            cut = write_log(self.home, CUTS, cuts, cut)
        return tagged, cut

    @staticmethod
    def _advanced(storage: LazyTensorStorage, state: CommittedState, seen: int) -> bool:
        """Let a state follow writes at the cursor, if there was no other change."""
        ledger = storage.ledger
        return (
            ledger.log.irregular <= seen
            and ledger.length > 0
            and state.advance(ledger, storage.indexes.first_known())
        )

    def _whole_state(
        self,
        storage: LazyTensorStorage,
        priorities: list[CommittedPriorities],
        counts: list[int],
        places: Places,
    ) -> CommittedState:
        ledger, saved = storage.ledger, self._still_saved()
        if saved is not None:  # keeps the entries of parts that are not attached yet
            priorities = priorities + saved.priorities[len(priorities) :]
            counts = counts + saved.counts[len(counts) :].tolist()
        return CommittedState.of(
            ledger,
            storage.indexes.heads() if ledger.length else None,
            priorities=priorities,
            counts=counts,
            places=places,
            more=2 if self.shared else len(self._more),
        )

    def _write_counts(self) -> list[int]:
        return [getattr(known(), "_write_count", 0) for known in self.writers]  # 0 if it has died

    def roll_back(self, since: int) -> None:
        """Undo the changes that were journaled after the first ``since`` bytes of the journal."""
        storage = self.storage_ref()
        if self.sharing is not None:  # readers without the lock may have read rows
            self.sharing.disturb()
        if self.home.roll_back(since):
            for column in self.samplers:
                column.whole |= column.written
            if storage is not None:
                storage.put_back()

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
        if self.sharing is not None:
            self.sharing.disturb()
        self.journal_stored(at, paths)

    def journal_stored(
        self, at: Array | range, paths: Iterable[Path] | None = None, used: int = 0
    ) -> None:
        """Journal as ``journal_rows`` does, but give readers without the lock no sign.

        ``used`` is the number of slots with values that count, if it exceeds that of stored rows.
        """
        ledger = self.storage.ledger
        stored = max(ledger.length, used)
        if self.state is not None:  # its rows are valid until the next commit, even after a `clear`
            stored = max(stored, self.state.length)
        at, rows = _below(stored, at), self._rows
        targets: Iterable[int] = rows.values()
        if paths is not None:  # a leaf without a separate column is in the records
            places = {path if path in rows else None for path in paths}
            targets = {rows[path] for path in places if path in rows}
        self._begin_entry(ledger, *self.home.journaled())
        for target in targets:
            self.home.journal_rows(target, at)

    def journal_table(self, target: int, at: Array | range) -> None:
        """Journal rows of a table, or of another target of ``home``.

        The rows need not be stored rows.
        """
        self._begin_entry(self.storage.ledger, *self.home.journaled())
        self.home.journal_rows(target, at)

    def change_table(self, number: int, at: Array, values: Array) -> None:
        """Set entries ``at`` of an open table. The release of the lock commits them."""
        self.journal_table(number, at)
        self._table_changed = True
        self.home.table(number, 0)[at] = values
        self.made()

    def ledger_table(self, number: int, entries: int) -> Array:
        """Return entries of a table of the ledger; see `storages.ledger.Region`."""
        return self.home.table(number, entries)[:entries]

    def before_change(self, number: int, at: Array | range) -> None:
        """Journal committed entries of a table of the ledger before they change."""
        self.home.check_process()
        if self.sharing is not None and isinstance(at, range):  # not only the rows of a write
            self.sharing.disturb()
        if self.seen >= 0:  # else an interrupted commit may have taken effect
            state = self.state
            lengths = (-1, -1) if state is None else (state.positions, state.generations)
            at = _below(lengths[number], at)
        if len(at):
            self.journal_table(number, at)

    def _begin_entry(self, ledger: Ledger, sequence: int, used: int) -> None:
        """Set how much of the journal belongs to complete writes."""
        now = sequence, *_counters(ledger)
        if now != self.journaled:
            self.journaled, self._whole = now, used

    def made(self) -> None:
        """Mark the change whose rows were journaled as complete."""
        self._whole = self.home.journaled()[1]

    def journal_ring(self, first: int, count: int) -> None:
        """Journal the stored rows in ``count`` slots of the ring, from ``first`` on.

        These are the slots at the cursor.
        """
        ledger = self.storage.ledger
        if self.sharing is not None:
            self.sharing.announce(ledger, first, count)
        slots = ledger.slots
        first %= slots
        until = first + count
        if until <= ledger.length:  # the case of every write of few rows to a full ring
            # The journal entry comes before `_begin_entry`. The write overwrites no row until then.
            self._begin_entry(ledger, *self.home.journal_file_rows(first, until))
        elif until <= slots:
            self.journal_stored(range(first, until))
        else:
            self.journal_stored(range(first, slots))
            self.journal_stored(range(until - slots))

    # -- other processes ----------------------------------------------------------------------

    def poll(self, *, whole: bool = False) -> None:
        """Poll other processes before the caller reads the number of rows.

        The caller need not hold the lock. The caller sets ``whole`` if it will also read other
        state.
        """
        if self.sharing is not None:
            self.sharing.poll(whole=whole)

    def new_lock(self) -> Any:
        """Return a lock for the storage."""
        return CommitLock(self.commit) if self.sharing is None else self.sharing.new_lock()


def _below(stop: int, at: Array | range) -> Array | range:
    """Return the numbers below ``stop``, which may be negative."""
    if isinstance(at, range):
        return range(at.start, min(at.stop, stop))
    return at[at < stop] if len(at) and int(at.max()) >= stop else at


def _counters(ledger: Ledger) -> tuple[int, int, int]:
    """Return numbers that every complete write of rows changes, and edits and cuts do not."""
    return ledger.next_position, ledger.cleared, ledger.changes
