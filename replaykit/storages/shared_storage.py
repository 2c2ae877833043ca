"""Let several processes write and read the rows of one storage."""

from __future__ import annotations

import multiprocessing.util
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.checkpoint.dirty_chunks import RECORDS, Changes, TrackedTensor
from replaykit.checkpoint.shared_dirty_chunks import SharedChanges
from replaykit.errors import CheckpointError
from replaykit.recovery import (
    DESCRIPTION,
    LOCK,
    MEMBERS,
    RECOVERABLE,
    SHARED,
    ElementLog,
    GivenViews,
    ProcessRegistry,
    RecoveryFolder,
    SharedLock,
    check_flock,
    is_held,
    is_shared,
    one_thread_in_children,
    read_manifest,
    write_manifest,
)
from replaykit.recovery.recovery_folder import (
    CHANGED,
    GENERATIONS,
    POSITIONS,
    PRIORITIES,
    PRIORITIES_SET,
    ROWS_WRITTEN,
    SIGNS,
)
from replaykit.storages.change_log import ChangeKind
from replaykit.storages.columns import Columns
from replaykit.storages.commit_state import (
    Changed,
    CommittedState,
    PriorityKeeper,
    RecoverableWriter,
    set_alone,
)
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.recoverable import (
    ANNOUNCED,
    IRREGULAR,
    RESERVED,
    RESET,
    SIGN_COUNT,
    Recovery,
)
from replaykit.storages.references import REFERENCES_KEY
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.storages.tensors import LazyTensorStorage

__all__ = [
    "HOW",
    "Following",
    "Sharing",
    "memory_folder",
    "read_description",
]

Array = np.ndarray[Any, Any]

_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686")
"""True if processors see each other's stores in order; else reads take the lock."""

_MOVED, _EDITED, _COLUMNS = 2, 3, 1 << 10
"""Numbers in the shared log for changes of the order of rows, for edits of any column, and for
edits of the first column. All other numbers there are of tables."""


class Following(Recovery):
    """The part of ``Sharing`` that follows the commits of other processes.

    With the lock, it updates all data that this process derives from the rows. Without the lock, it
    updates only the counters, and only for reads.

    Args:
        storage, home, existsok, mapped: as for ``Committing``.
    """

    def __init__(self, storage: LazyTensorStorage, home: RecoveryFolder, **options: bool) -> None:
        super().__init__(storage, home, **options)
        self._known = 0
        """Number of the state that this process has followed; -1 to read everything."""
        self._logged_until = 0
        """Count of the entries in the shared log at that state."""
        self._lags = False
        """True if this process has read only the ledger's counters from that state."""
        self._pending: list[tuple[int, Array | None]] = []
        self._log: ElementLog | None = None
        self._signs: Any = None

    def _forget(self) -> None:
        """Mark the state that this process has followed as unknown."""
        self._known, self._lags, self._journaled, self._pending = -1, False, None, []

    def glance(self) -> tuple[int, int, int | None] | None:
        """Follow writes at the cursor without the shared lock.

        The caller keeps the other threads of this process out. Afterwards it reads rows, which are
        valid if ``intact`` then returns True.

        Returns:
            The first argument for ``intact``; None if the caller has to take the lock.
        """
        storage, signs = self._storage(), self._signs
        if storage is None or signs is None or self._known < 0 or not _ORDERED:
            return None
        irregular = signs[IRREGULAR]
        if irregular & 1 or self._lacks_entries(storage):
            return None
        ledger, indexed = storage.ledger, storage.indexes.indexed_until()
        found = self.home.states.first(self._known)
        if found is None:
            return None
        if found[0] != self._known:
            # An index that lacks earlier rows is not in use, and probably not needed now. Its next
            # use reads the rest of the state; see ``_heads``.
            in_use = indexed is not None and indexed >= ledger.next_position
            if in_use or signs[RESET] > self._known:
                if not self._glance_at_all(storage):
                    return None
            else:
                self._known, self._lags = found[0], True
                self._follow_writes(storage, *found[1:])
                self._seen = ledger.log.number
        return irregular, ledger.next_position, indexed

    def _lacks_entries(self, storage: LazyTensorStorage) -> bool:
        """Return whether another process has made overflow entries that are not mapped here."""
        columns = storage._columns
        if not isinstance(columns, DedupColumns):
            return False
        return bool(columns.table.overflow_entries != self._signs[RESERVED])

    def _map_entries(self, storage: LazyTensorStorage) -> None:
        """Map the overflow entries that another process has made."""
        if self._lacks_entries(storage):
            columns: Any = storage._columns
            table = columns.table
            reserved = self._signs[RESERVED]
            table.use_overflow(table.journal.table(columns.pairs.overflow, reserved))

    @staticmethod
    def _follow_writes(storage: LazyTensorStorage, *counters: int) -> None:
        """Follow writes at the cursor, of which only the counters were read."""
        storage.ledger.follow_writes(*counters)
        if isinstance(storage._columns, DedupColumns):
            storage._columns.outdate(storage.ledger)

    def _glance_at_all(self, storage: LazyTensorStorage) -> bool:
        """Follow the whole latest state, and return whether that was possible."""
        found, before = self.home.states.glance(), self._committed
        if found is None or before is None or int(found[1][-1]) != self._logged_until:
            return False
        if not before.follow(found[1][:-1]):
            return False
        self._follow_writes(storage, before.cursor, before.length, before.next_position)
        self._follow_counters(storage, before)
        self._known, self._lags = found[0], False
        return True

    def intact(self, glanced: tuple[int, int, int | None], slots: torch.Tensor | None) -> bool:
        """Return whether rows have not changed since ``glance``.

        Args:
            glanced: the result of ``glance``.
            slots: the slots that the caller has read, int64 ``[K]``; None if they may be any slots.
        """
        storage, signs = self._storage(), self._signs
        assert storage is not None
        irregular, position, indexed = glanced
        announced, ledger = signs[ANNOUNCED], storage.ledger
        if signs[IRREGULAR] != irregular or self._known < 0:
            return False
        count = announced - position
        if count <= 0 or ledger.length + count <= ledger.slots:
            return True
        if indexed is None:  # if the caller has made an index since then, it has read all rows
            made = storage.indexes.indexed_until() is not None
            indexed = position - ledger.length if made else position
        if announced - indexed > ledger.slots:
            # An index may have read rows that another process was overwriting.
            self._known = -1
            return False
        if slots is None or count >= ledger.slots:
            return False
        return not ledger.next_ones(slots, count)

    def _catch_up(self, storage: LazyTensorStorage) -> None:
        """Follow the rest of a state of which only the counters were read."""
        known = self._known
        if not (self._glance_at_all(storage) and self._known == known):
            # Another commit has replaced the state, so data derived from it is not used.
            self._known = -1

    def _follow_counters(self, storage: LazyTensorStorage, state: CommittedState) -> None:
        """Follow the changes of writes at the cursor."""
        ledger = storage.ledger
        for writer, count in zip(self._writers, state.counts, strict=False):
            if (part := writer()) is not None:
                part._write_count = count
        self._seen, self._counts = ledger.log.number, self._write_counts()
        self._saved_at = ledger.next_position, ledger.cleared

    def _follow(self, storage: LazyTensorStorage, reset: bool) -> None:
        numbers, logged = self._state_numbers()
        before, ledger, indexes = self._committed, storage.ledger, storage.indexes
        since: dict[int, Array | None] | None = {}
        if reset or before is None:
            since = None
        elif logged != self._logged_until:
            assert self._log is not None
            since = self._log.since(self._logged_until, logged)
        steady = since is not None and not any(
            number in (_MOVED, _EDITED) or number >= _COLUMNS for number in since
        )
        if not (steady and before is not None and before.follow(numbers)):
            steady = False
            before = self._committed = CommittedState.of_numbers(self.home.states.view())
        assert before is not None
        tables = []
        for number, length in ((POSITIONS, before.positions), (GENERATIONS, before.generations)):
            cells = self.home.table(number, length)[:length] if length >= 0 else None
            tables.append((cells, None if since is None else since.get(number, _NO_ELEMENTS)))
        ledger.follow(
            before.cursor,
            before.length,
            before.next_position,
            before.cleared,
            before.by_stream,
            *tables,
            moved=since is None or _MOVED in since,
        )
        if since is not None:
            self._follow_edits(storage, since)
        if isinstance(storage._columns, DedupColumns):
            storage._columns.outdate(ledger)
        if not steady:
            indexes.follow(before.marks, before.codes, reset=reset)
        indexes.heads_from = self._heads
        self._logged_until = logged
        for place, known in enumerate(self._samplers[: len(before.priorities)]):
            sampler = known()
            if sampler is None:
                continue
            at = None if since is None else since.get(PRIORITIES + place, _NO_ELEMENTS)
            self._hand_over(sampler, place, at)
        self._follow_counters(storage, before)

    def _follow_edits(self, storage: LazyTensorStorage, since: dict[int, Array | None]) -> None:
        """Record the edits of other processes in this process's log."""
        if _EDITED in since:
            storage.ledger.log.edit(since[_EDITED])
        columns = list(storage.require().schema.leaves)
        for number in since:
            if number >= _COLUMNS:
                storage.ledger.log.edit(since[number], [columns[number - _COLUMNS]])

    def _log_changes(self, storage: LazyTensorStorage, seen: int) -> None:
        """Log the changes since ``seen`` that tables and counters do not show."""
        log, columns = storage.ledger.log, list(storage.require().schema.leaves)
        changes = log.since(seen)
        if changes is None:
            self._pending.append((_MOVED, None))
        for change in changes or ():
            slots = change.slots
            if change.kind is ChangeKind.EDIT and change.columns is None:
                self._pending.append((_EDITED, slots))
            elif change.kind is ChangeKind.EDIT:
                numbers = (_COLUMNS + columns.index(path) for path in change.columns or ())
                self._pending.extend((number, slots) for number in numbers)
            elif change.kind in (ChangeKind.CLEAR, ChangeKind.MOVE) or (
                change.kind is ChangeKind.PLACE and not storage.ledger.by_stream
            ):
                self._pending.append((_MOVED, None))

    def _hand_over(self, sampler: PriorityKeeper, place: int, at: Array | None) -> None:
        """Give a sampler the present priorities of some elements; None for all."""
        assert self._committed is not None
        table = self._committed.priorities[place]
        cells = self.home.table(PRIORITIES + place, table.length)[: table.length]
        if at is not None:
            at = at[at < table.length]
        values = cells.copy() if at is None else cells[at]
        sampler.follow_priorities(Changed(at, values, table.length, table.most, table.dropped))

    def _state_numbers(self) -> tuple[Array, int]:
        """Return the numbers of the latest state, and the count of logged elements."""
        numbers = self.home.states.view()
        return (numbers[:-1], int(numbers[-1])) if len(numbers) else (numbers, 0)

    def _heads(self) -> dict[str, Any] | None:
        """Return the first episodes' begins from the state that this process has read.

        The entry ``now`` of the result is True if this process has changed nothing since that
        state.
        """
        storage = self._storage()
        if self._lags and storage is not None:
            self._catch_up(storage)
        state = self._committed
        heads = None if state is None else state.episodes()["heads"]
        if heads is not None and storage is not None:
            heads["now"] = storage.ledger.log.number == self._seen
        return heads


_NO_ELEMENTS = np.zeros(0, np.int64)


_VERSION = 5
"""Version of the description of a shared storage."""

_LOG_LENGTH = 1 << 17
_PREFIX = "replaykit-shared-"
_LOCK = "turn"
_PRIORITY_BYTES = 4
"""Bytes of a priority, so that chunks have the same size as in other samplers."""
_YOUNG = 60.0
"""Seconds during which a new folder is kept although no process uses it yet."""


class Sharing(Following):
    """The sharing of a storage by several processes.

    The processes take turns and follow each other's changes. Committed rows, counters and
    priorities are in files that all processes map. Each process has a separate ledger, episode
    index and trees. When it takes the lock, it updates them from the changes of the other
    processes. If a process dies, the next process that takes the lock rolls back the uncommitted
    changes.

    Args:
        storage: the storage, in which no row is stored yet.
        folder: the folder of the files.
        private: whether the last user of the folder removes it.
        mapped: True if the folder is on a disk, so that rows are read ahead. False if it is in
            memory.
        existsok: whether to reuse the space of existing files.
        recover: whether the rows are kept after the last process has ended.
        durable: whether commits also survive a loss of power.
        join: whether another process has made the folder.

    Raises:
        RuntimeError: ``join`` is False, but other processes use the folder.
        RuntimeError: ``join`` is True, but the folder is gone, or one process recovers it alone.
        RuntimeError: the system has no file locks.
        OSError: the folder cannot be made or opened.
    """

    shared = True
    _more = (0,)

    def __init__(
        self,
        storage: LazyTensorStorage,
        folder: FilePath,
        *,
        private: bool,
        mapped: bool,
        existsok: bool = False,
        recover: bool = False,
        durable: bool = False,
        join: bool = False,
    ) -> None:
        if join and not folder.exists():
            raise RuntimeError(
                f"{folder} is gone: the processes that shared the buffer ended before this one "
                "received it"
            )
        check_flock()
        one_thread_in_children()
        home = RecoveryFolder(folder, shared=True, recoverable=recover, durable=durable)
        super().__init__(storage, home, existsok=existsok, mapped=mapped)
        self._private = private
        self._how = dict(zip(HOW, (private, mapped, existsok, recover, durable), strict=True))
        if not join and not recover:
            if is_shared(home.folder):
                raise RuntimeError(f"{folder} is in use by other processes, which share it")
            shutil.rmtree(home.folder)
            home.folder.mkdir()
        self._members: ProcessRegistry | None = None
        self._changes: SharedChanges | None = None
        self._set: SharedChanges | None = None
        self._become_member()
        if join and recover and is_held(home.folder / LOCK):
            self._leave()
            raise RuntimeError(f"{folder} is in use by a process that recovers it alone")

    def _become_member(self) -> None:
        self._process = self.home.process = os.getpid()
        inherited = self._members
        self._members = ProcessRegistry(self.home.folder / MEMBERS)
        if inherited is not None:
            inherited.drop()
        # `atexit` does not run in processes that multiprocessing started. A priority below 0 runs
        # this after the process has waited for its children, which may still open the folder.
        self._leave = multiprocessing.util.Finalize(
            self, _leave, args=(self._members, self.folder, self._private), exitpriority=-1
        )

    def invitation(self) -> dict[str, Any]:
        """Return the arguments that another process needs to join."""
        return {"folder": self.folder, **self._how}

    def describe_sharing(self, content: dict[str, Any]) -> None:
        """Write the description of the storage for processes that join; see ``join_folder``."""
        write_manifest(self.home.folder, content | self._how, _VERSION, DESCRIPTION)

    def new_lock(self) -> SharedLock:
        """Return a lock for this process, which may be a forked child."""
        if self._process != os.getpid():
            # At the fork, another thread of the parent may have been in the middle of a change.
            self._become_member()
            self._forget()
            self.active = False
        return SharedLock(self.home.folder / _LOCK, self._enter, self.commit)

    # -- files --------------------------------------------------------------------------------

    def _open(self, columns: Columns, files: list[FilePath], *, fresh: bool = False) -> Array:
        numbers = super()._open(columns, files, fresh=fresh)
        self._open_log(columns)
        return numbers

    def _open_log(self, columns: Columns) -> None:
        self._changes = columns.changes = self._row_changes(columns)
        like = Changes(columns.slots * columns.lanes.numel(), _PRIORITY_BYTES)
        cells = self._cells(PRIORITIES_SET, SharedChanges.length(like))
        self._set = SharedChanges(cells, like, pending_changes=self._pending_changes)
        self._log = ElementLog(self._cells(CHANGED, _LOG_LENGTH))
        self._signs = self._cells(SIGNS, SIGN_COUNT).data

    def _dedup(self, storage: LazyTensorStorage, *given: Any) -> DedupColumns:
        columns = super()._dedup(storage, *given)
        journal = columns.table.journal
        assert journal is not None
        journal.reserved = self._signs[RESERVED:]
        columns.outdate(storage.ledger)
        return columns

    def _cells(self, number: int, count: int) -> Array:
        return self.home.table(number, count)[:count]

    def _row_changes(self, columns: Columns) -> SharedChanges:
        """Return the record of dirty rows, for the next save, that all processes share."""
        before, like = self._changes, columns.changes
        keys: list[Any] = [RECORDS, REFERENCES_KEY]
        keys += [path for path in columns.tensors if path not in like.packed]
        cells = self._cells(ROWS_WRITTEN, SharedChanges.length(like, keys))
        views = GivenViews(self.home.folder)
        made = SharedChanges(cells, like, keys, views, self._pending_changes)
        if before is not None and before.exposed:
            made.lend()  # a forked child has its parent's views
        return made

    # -- parts --------------------------------------------------------------------------------

    def adopt_sampler(self, sampler: PriorityKeeper) -> None:
        storage = self._storage()
        assert storage is not None
        with storage.lock:
            set_alone(self._samplers, sampler)
            state = self._committed
            if state is not None and state.priorities:
                self._hand_over(sampler, 0, None)

    def adopt_writer(self, writer: RecoverableWriter) -> None:
        storage = self._storage()
        assert storage is not None
        with storage.lock:
            set_alone(self._writers, writer)
            if self._committed is not None and self._committed.counts:
                writer._write_count = self._committed.counts[0]

    def _still_saved(self) -> CommittedState | None:
        return self._committed

    # -- following other processes ------------------------------------------------------------

    def _enter(self) -> None:
        """Follow the changes of other processes, right after the lock was acquired."""
        home, signs, changes = self.home, self._signs, self._changes
        if changes is not None and changes.exposed:
            changes.check_views()
        regular = self.active and not self._lags and not signs[IRREGULAR] & 1
        if regular and home.journaled() == (self._known + 1, 0):
            return  # no process has changed anything in the meantime
        storage = self._storage()
        if storage is None:
            return
        if not self.active:
            if not home.published:
                return
            found = self.known()
            assert found is not None
            self._open_files(storage, found)
            signs = self._signs
        self._map_entries(storage)
        sequence, used = home.journaled()
        sequence -= 1
        if used:  # the process that journaled these rows has died
            signs[IRREGULAR] |= 1
            home.roll_back()
        if signs[IRREGULAR] & 1:
            signs[IRREGULAR] += 1
        if sequence == self._known and self._lags:
            self._catch_up(storage)
        if sequence != self._known:
            reset, self._known = self._known < 0, -1
            self._lags = False
            self._follow(storage, reset)
            self._known = sequence

    def poll(self, *, whole: bool = False) -> None:
        storage = self._storage()
        if storage is None or storage.lock.apart:
            return
        changed = self.active and (
            self.home.states.sequence != self._known or (whole and self._lags)
        )
        if changed or (not self.active and self.home.published) or self._process != os.getpid():
            with storage.lock:
                pass

    # -- changes ------------------------------------------------------------------------------

    def journal_rows(self, at: Array | range, paths: Iterable[Path] | None = None) -> None:
        self._signs[IRREGULAR] |= 1
        super().journal_rows(at, paths)

    def journal_ring(self, first: int, count: int) -> None:
        storage, signs = self._storage(), self._signs
        assert storage is not None
        ledger = storage.ledger
        if ledger.log.irregular > self._seen:  # the cursor of other processes differs
            signs[IRREGULAR] |= 1
        signs[ANNOUNCED] = ledger.next_position + first - ledger.cursor + count
        self._journal_ring(first, count)

    def _rollback(self, since: int) -> None:
        # Readers without the lock may have read rows that are now rolled back.
        self._signs[IRREGULAR] |= 1
        super()._rollback(since)

    def commit(self) -> None:
        storage, signs = self._storage(), self._signs
        try:
            if signs is None or storage is None:
                return
            if storage.ledger.log.irregular > self._seen:
                signs[IRREGULAR] |= 1
            super().commit()
            if signs[IRREGULAR] & 1:
                signs[IRREGULAR] += 1
        except BaseException:
            self._forget()
            if self.active:
                self._rollback(0)
            raise

    def _state(self, *given: Any) -> CommittedState:
        # This comes before the commit, because readers without the lock read first the state and
        # then this sign.
        self._signs[RESET] = self.home.states.sequence + 1
        return super()._state(*given)

    def _logged(self, number: int, at: Array | range) -> None:
        self._pending.append((number, None if isinstance(at, range) else at))
        if number >= PRIORITIES and self._set is not None:  # before the change is committed
            if isinstance(at, range):
                self._set.wrote(at.start, len(at))
            else:
                self._set.wrote_rising(at)

    def tracked(self, sampler: PriorityKeeper, rows: TrackedTensor) -> TrackedTensor:
        if self._set is None:
            return rows
        if sampler.priorities_pending():
            self._set.wrote(0, self._set.rows)
        return replace(rows, changes=self._set)

    def _pending_changes(self) -> bool:
        """Return whether changes that were made under the lock are not committed yet."""
        samplers = [known() for known in self._samplers]
        pending = any(sampler is not None and sampler.priorities_pending() for sampler in samplers)
        return pending or self.home.journaled()[1] > 0

    def _commit(self, storage: LazyTensorStorage, numbers: Array, seen: int) -> None:
        logged = self._logged_until
        if storage.ledger.log.irregular > seen:
            self._log_changes(storage, seen)
        if self._pending:
            assert self._log is not None
            logged = self._log.append(logged, self._pending)
            self._pending = []
            self._signs[RESET] = self.home.states.sequence + 1
        self._known = self.home.commit(numbers, [logged])
        self._logged_until = logged


HOW = ("private", "mapped", "existsok", "recover", "durable")
"""Names of the arguments of ``Sharing`` that are the same in all processes."""


def read_description(folder: FilePath) -> dict[str, Any]:
    """Return the description that ``Sharing.describe_sharing`` has written for a folder.

    Raises:
        FileNotFoundError: no processes have shared rows in the folder.
        CheckpointError: the description is damaged.
    """
    # Another run may have left the other home here. The home in use comes first.
    homes = sorted((folder / name for name in (RECOVERABLE, SHARED)), key=is_shared, reverse=True)
    for home in homes:
        if (found := read_manifest(home, DESCRIPTION)) is not None:
            counts = [found.get("max_size"), found.get("ndim")]
            key = found.get("lane_key")
            if not (
                all(type(count) is int and count > 0 for count in counts)
                and all(type(found.get(one)) is bool for one in HOW)
                and isinstance(found.get("parts"), dict)
                and (key is None or isinstance(key, list))
            ):
                raise CheckpointError(f"{home / DESCRIPTION} does not describe a shared buffer")
            dedup: Any = found.get("dedup_next", False)  # not there before version 5
            found["on_mismatch"] = found.get("on_mismatch", "error")
            found["lane_key"] = None if key is None else tuple(key)
            if isinstance(dedup, list):
                dedup = [tuple(path) for path in dedup]
            found["dedup_next"] = dedup
            return found
    raise FileNotFoundError(
        f"expected a folder of a buffer with shared=True, got {folder}, in which there is no "
        f"{RECOVERABLE}/{DESCRIPTION} and no {SHARED}/{DESCRIPTION}"
    )


def memory_folder() -> FilePath:
    """Make a private folder, whose files are in memory if the system supports that.

    This also removes such folders of processes that were killed.
    """
    memory = FilePath("/dev/shm")
    root = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    made = FilePath(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    for other in made.parent.glob(f"{_PREFIX}*"):
        try:
            old = time.time() - other.stat().st_mtime > _YOUNG
        except OSError:
            continue
        if old and other != made and ProcessRegistry.nobody(other / "%shared" / MEMBERS):
            shutil.rmtree(other, ignore_errors=True)
    return made


def _leave(members: ProcessRegistry, folder: FilePath, private: bool) -> None:
    """Remove a private folder if this process was its last user."""
    members.drop()
    if private and ProcessRegistry.nobody(folder / "%shared" / MEMBERS):
        shutil.rmtree(folder, ignore_errors=True)
