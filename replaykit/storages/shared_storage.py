"""Let several processes write and read the rows of one storage."""

from __future__ import annotations

import multiprocessing.util
import os
import platform
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.checkpoint.dirty_chunks import RECORDS, Changes, SharedChanges, TrackedTensor
from replaykit.errors import CheckpointError
from replaykit.recovery.locks import (
    ElementLog,
    GivenViews,
    ProcessRegistry,
    SharedLock,
    check_flock,
    is_held,
    one_thread_in_children,
)
from replaykit.recovery.recovery_folder import (
    DESCRIPTION,
    LOCK,
    MEMBERS,
    RECOVERABLE,
    SHARED,
    RecoveryFolder,
    Tables,
    is_shared,
    read_manifest,
    write_manifest,
)
from replaykit.storages.change_log import ChangeKind
from replaykit.storages.columns import Columns
from replaykit.storages.commit_state import TAGS, CommittedState, read_cuts, read_log
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.ledger import Ledger
from replaykit.storages.recoverable import Recovery
from replaykit.storages.recoverable_files import (
    ANNOUNCED,
    IRREGULAR,
    REMOVED,
    RESERVED,
    RESET,
    SIGN_COUNT,
    open_files,
    published_content,
)
from replaykit.storages.references import REFERENCES_KEY

if TYPE_CHECKING:
    from replaykit.storages.tensors import LazyTensorStorage

Array = np.ndarray[Any, Any]

_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686")
"""True if processors see each other's stores in order; else reads take the lock."""

_PLACED, _MOVED, _EDITED, _REMOVED, _COLUMNS = 1, 2, 3, 4, 1 << 10
"""Numbers in the shared log for rows written by stream, for other changes of the order of rows, for
edits of any column, for removals, and for edits of the first column. All other numbers are those of
priorities.
"""

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

HOW = ("private", "mapped", "existsok", "recover", "durable")
"""Names of the arguments of ``begin_sharing`` that are the same in all processes."""


class Sharing:
    """The link between the processes that have the files of one storage open.

    The processes take turns and follow each other's changes. Committed rows, counters and
    priorities are in files that all processes map. Each process has a separate ledger, episode
    index and trees. When it takes the lock, it updates them from the changes of the other
    processes. If a process dies, the next process that takes the lock rolls back the uncommitted
    changes. Without the lock, a reader follows only the counters.

    Args:
        recovery: the files of the storage.
        private: whether the last user of the folder removes it.

    Attributes:
        signs: numbers that writers set for readers without the lock; see ``recoverable_files``.
    """

    def __init__(self, recovery: Recovery, *, private: bool, how: dict[str, bool]) -> None:
        self.recovery, self.home = recovery, recovery.home
        self._private, self._how = private, how
        self.signs: Any = None
        # Number of the state that this process has followed; -1 to read everything. And the count
        # of the entries in the shared log at that state.
        self._known = self._logged_until = 0
        # The count of entries up to the last one that is not for priorities.
        self._rows_logged = 0
        # True if this process has read only the ledger's counters from that state.
        self._lags = False
        self._log: ElementLog | None = None
        self._changes: SharedChanges | None = None
        self._set: SharedChanges | None = None
        self._members: ProcessRegistry | None = None
        self._become_member()

    # -- members ------------------------------------------------------------------------------

    def _become_member(self) -> None:
        self._process = self.home.process = os.getpid()
        inherited = self._members
        self._members = ProcessRegistry(self.home.folder / MEMBERS)
        if inherited is not None:
            inherited.drop()
        # `atexit` does not run in processes that multiprocessing started. A priority below 0 runs
        # this after the process has waited for its children, which may still open the folder.
        self.leave = multiprocessing.util.Finalize(
            self, _leave, args=(self._members, self.recovery.folder, self._private), exitpriority=-1
        )

    def invitation(self) -> dict[str, Any]:
        """Return the arguments that another process needs to join."""
        return {"folder": self.recovery.folder, **self._how}

    def describe_sharing(self, content: dict[str, Any]) -> None:
        """Write the description of the storage for processes that join; see ``join_folder``."""
        write_manifest(self.home.folder, content | self._how, _VERSION, DESCRIPTION)

    def new_lock(self) -> SharedLock:
        """Return a lock for this process, which may be a forked child."""
        if self._process != os.getpid():
            # At the fork, another thread of the parent may have been in the middle of a change.
            self._become_member()
            self._forget()
            self.recovery.active = False
        return SharedLock(self.home.folder / _LOCK, self._enter, self.commit)

    # -- tables -------------------------------------------------------------------------------

    def open_tables(self, columns: Columns) -> None:
        """Open the tables that only processes that share the rows need."""
        self._changes = columns.changes = self._row_changes(columns)
        like = Changes(columns.slots * columns.lanes.numel(), _PRIORITY_BYTES)
        cells = self._cells(Tables.PRIORITIES_SET, SharedChanges.length(like))
        self._set = SharedChanges(cells, like, pending_changes=self._pending_changes)
        self._log = ElementLog(self._cells(Tables.CHANGED, _LOG_LENGTH))
        for column in self.recovery.samplers:
            column.direct = None  # it uses the tables of before
        self.signs = self._cells(Tables.SIGNS, SIGN_COUNT).data

    def announce_rollback(self) -> None:
        """Tell readers without the lock that rows change other than by writes at the cursor."""
        self._cells(Tables.SIGNS, SIGN_COUNT)[IRREGULAR] |= 1

    def _cells(self, number: int, count: int) -> Array:
        return self.home.table(number, count)[:count]

    def _row_changes(self, columns: Columns) -> SharedChanges:
        """Return the record of dirty rows, for the next save, that all processes share."""
        before, like = self._changes, columns.changes
        keys: list[Any] = [RECORDS, REFERENCES_KEY]
        keys += [path for path in columns.tensors if path not in like.packed]
        cells = self._cells(Tables.ROWS_WRITTEN, SharedChanges.length(like, keys))
        views = GivenViews(self.home.folder)
        made = SharedChanges(cells, like, keys, views, self._pending_changes)
        if before is not None and before.exposed:
            made.lend()  # a forked child has its parent's views
        return made

    def _lacks_entries(self, storage: LazyTensorStorage) -> bool:
        """Return whether another process has made overflow entries that are not mapped here."""
        columns = storage._columns
        if not isinstance(columns, DedupColumns):
            return False
        return bool(columns.table.overflow_entries != self.signs[RESERVED])

    def _map_entries(self, storage: LazyTensorStorage) -> None:
        """Map the overflow entries that another process has made."""
        if self._lacks_entries(storage):
            columns: Any = storage._columns
            table, reserved = columns.table, self.signs[RESERVED]
            table.use_overflow(table.journal.table(columns.pairs.overflow, reserved))

    # -- reading without the lock -------------------------------------------------------------

    def glance(self) -> tuple[int, int, int | None] | None:
        """Follow writes at the cursor without the shared lock.

        The caller keeps the other threads of this process out. Afterwards it reads rows, which are
        valid if ``intact`` then returns True.

        Returns:
            The first argument for ``intact``; None if the caller has to take the lock.
        """
        storage, signs = self.recovery.storage_ref(), self.signs
        if storage is None or signs is None or self._known < 0 or not _ORDERED:
            return None
        irregular = signs[IRREGULAR]
        if irregular & 1:
            return None
        ledger, indexed = storage.ledger, storage.indexes.indexed_until()
        found = self.home.states.first(self._known)
        if found is None:
            return None
        if found[0] != self._known:
            if self.recovery.samplers:  # they may set priorities, which needs the lock
                return None
            # An index that lacks earlier rows is not in use, and probably not needed now. Its next
            # use reads the rest of the state; see ``_heads``.
            in_use = indexed is not None and indexed >= ledger.next_position
            if in_use or signs[RESET] > self._known:
                if not self._glance_at_all(storage):
                    return None
            else:
                self._known, self._lags = found[0], True
                self._follow_writes(storage, *found[1:])
                self.recovery.seen = ledger.log.number
        if self._lacks_entries(storage):  # a commit comes after the sign for its entries
            return None
        return irregular, ledger.next_position, indexed

    @staticmethod
    def _follow_writes(storage: LazyTensorStorage, *counters: int) -> None:
        """Follow writes at the cursor, of which only the counters were read."""
        ledger, columns = storage.ledger, storage._columns
        if isinstance(columns, DedupColumns):
            columns.outdate(ledger, ledger.log.number)
        ledger.follow_writes(*counters)

    def _glance_at_all(self, storage: LazyTensorStorage) -> bool:
        """Follow the whole latest state, and return whether that was possible."""
        found, before = self.home.states.glance(), self.recovery.state
        if found is None or before is None or int(found[1][-1]) != self._logged_until:
            return False
        state = CommittedState(found[1])
        if not state.only_moved(before):
            return False
        self._follow_writes(storage, state.cursor, state.length, state.next_position)
        self._follow_counts(state)
        self._known, self._lags = found[0], False
        return True

    def intact(self, glanced: tuple[int, int, int | None], slots: torch.Tensor | None) -> bool:
        """Return whether rows have not changed since ``glance``.

        Args:
            glanced: the result of ``glance``.
            slots: the slots that the caller has read, int64 ``[K]``; None if they may be any slots.
        """
        storage, signs = self.recovery.storage_ref(), self.signs
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

    # -- following other processes ------------------------------------------------------------

    def _enter(self) -> None:
        """Follow the changes of other processes, right after the lock was acquired."""
        home, signs, changes = self.home, self.signs, self._changes
        if changes is not None and changes.exposed:
            changes.check_views()
        recovery = self.recovery
        regular = recovery.active and not self._lags and not signs[IRREGULAR] & 1
        storage = recovery.storage_ref()
        if storage is None:
            return
        if regular and home.journaled() == (self._known + 1, 0):
            if signs[RESERVED]:
                self._map_entries(storage)  # a failed write leaves entries without a commit
            return  # no process has changed anything in the meantime
        if not self.recovery.active:
            if not home.published:
                return
            found = published_content(self.recovery)
            assert found is not None
            open_files(self.recovery, found)
            signs = self.signs
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
            known, self._known = self._known, -1
            self._lags = False
            self._follow(storage, known)
            self._known = sequence

    def poll(self, *, whole: bool = False) -> None:
        storage = self.recovery.storage_ref()
        if storage is None or storage.lock.apart:
            return
        changed = self.recovery.active and (
            self.home.states.sequence != self._known or (whole and self._lags)
        )
        if (
            changed
            or (not self.recovery.active and self.home.published)
            or self._process != os.getpid()
        ):
            with storage.lock:
                pass

    def _follow(self, storage: LazyTensorStorage, known: int) -> None:
        """Follow the latest state after state number ``known``; -1: no earlier state is known."""
        reset = known < 0
        numbers, before = self.home.states.view().copy(), self.recovery.state
        state, rows_logged, logged = CommittedState.empty(), 0, 0
        if len(numbers):
            state, (rows_logged, logged) = CommittedState(numbers), numbers[-2:].tolist()
        since: dict[int, Array | None] | None = {}
        if reset or before is None:
            since = None
        elif logged != self._logged_until:
            assert self._log is not None
            since = self._log.since(self._logged_until, logged)
            if since is None and rows_logged <= self._logged_until:
                since = {Tables.PRIORITIES: None}
        ledger, indexes = storage.ledger, storage.indexes
        placed = None if since is None else since.get(_PLACED, _NO_ELEMENTS)
        columns = storage._columns
        if isinstance(columns, DedupColumns):
            columns.outdate(ledger, -1 if since is None else ledger.log.number)
        moved = since is None or _MOVED in since or _REMOVED in since
        outdated = None if since is None else self._outdated_slots(ledger, since, state)
        length, complete = ledger.length, indexes.complete()
        removed = reset or bool(self.signs[REMOVED] > known)
        ledger.follow(state, moved=moved, removed=removed, placed=placed, slots=outdated)
        if since is not None:
            self._follow_edits(storage, since)
        changed = since is None or any(
            number in (_MOVED, _EDITED, _REMOVED) or number >= _COLUMNS for number in since
        )
        followed = None if reset else before
        if changed or followed is None or not state.only_moved(followed):
            cuts = read_cuts(self.home, state, followed, indexes.present_marks)
            cut = followed is not None and state.places[1] != followed.places[1]
            indexes.follow(cuts, cut=cut, reset=reset)
        read_log(self.home, TAGS, indexes.present_tags, state, followed)
        indexes.heads_from = self._heads
        self._logged_at(rows_logged, logged)
        self._follow_counts(state)
        if outdated is not None and complete:
            indexes.follow_moves(outdated, length)
        for place, counts in enumerate(state.priorities[: len(self.recovery.samplers)]):
            at = None if since is None else since.get(Tables.PRIORITIES + place, _NO_ELEMENTS)
            found = self.recovery.committed_priorities(place, at)
            self.recovery.samplers[place].follow(found, counts)

    @staticmethod
    def _outdated_slots(
        ledger: Ledger, since: dict[int, Array | None], state: CommittedState
    ) -> Array | None:
        """Return the slots that have other rows, or none, after removals; None if any may have.

        The ledger has not followed ``state`` yet.
        """
        placed, moved = since.get(_PLACED, _NO_ELEMENTS), since.get(_REMOVED)
        # The log has no writes at the cursor that came before the first write by stream.
        whole = _MOVED in since or ledger.in_order or state.cleared != ledger.cleared
        if whole or placed is None or moved is None:
            return None
        return np.unique(np.concatenate([placed, moved, np.arange(state.length, ledger.length)]))

    def _follow_edits(self, storage: LazyTensorStorage, since: dict[int, Array | None]) -> None:
        """Record the edits of other processes in this process's log."""
        if _EDITED in since:
            storage.ledger.log.edit(since[_EDITED])
        columns = list(storage.require().schema.leaves)
        for number in since:
            if number >= _COLUMNS:
                storage.ledger.log.edit(since[number], [columns[number - _COLUMNS]])

    def _follow_counts(self, state: CommittedState) -> None:
        """Follow the counts of writers; the ledger has followed the state."""
        counts = state.counts.tolist() or [0]  # no commit has succeeded yet
        for writer, count in zip(self.recovery.writers, counts, strict=False):
            if (part := writer()) is not None:
                part._write_count = count
        self.recovery.in_state(state)

    def _heads(self) -> dict[str, Any] | None:
        """Return the first episodes' begins from the state that this process has read.

        The entry ``now`` of the result is True if this process has changed nothing since that
        state.
        """
        storage = self.recovery.storage_ref()
        if self._lags and storage is not None:
            self._catch_up(storage)
        state = self.recovery.state
        heads = None if state is None else state.heads()
        if heads is not None and storage is not None:
            heads["now"] = storage.ledger.log.number == self.recovery.seen
        return heads

    def _forget(self) -> None:
        """Mark the state that this process has followed as unknown."""
        self._known, self._lags, self.recovery.journaled = -1, False, None

    # -- changes ------------------------------------------------------------------------------

    def disturb(self) -> None:
        """Tell readers without the lock that any rows may change, until the next commit."""
        self.signs[IRREGULAR] |= 1

    def announce(self, ledger: Ledger, first: int, count: int) -> None:
        """Tell readers without the lock that ``count`` slots at the cursor change."""
        # The cursor of other processes differs, or these slots already have rows.
        if ledger.log.irregular > self.recovery.seen or first < ledger.length < ledger.slots:
            self.disturb()
        self.signs[ANNOUNCED] = ledger.next_position + first - ledger.cursor + count

    def commit(self) -> None:
        """Commit all changes since the last commit; see ``Recovery.commit``."""
        recovery, signs = self.recovery, self.signs
        storage = recovery.storage_ref()
        try:
            # A child that was forked under the lock releases it, too.
            if signs is None or storage is None or self._process != os.getpid():
                return
            if storage.ledger.log.irregular > recovery.seen:
                self.disturb()
            recovery.commit()
            if signs[IRREGULAR] & 1:
                signs[IRREGULAR] += 1
        except BaseException:
            self._forget()
            if recovery.active:
                recovery.roll_back(0)
            raise

    def log_rows(self, storage: LazyTensorStorage, seen: int) -> None:
        """Log the changes of rows since number ``seen`` of the ledger's log, for a commit."""
        assert self._log is not None
        if storage.ledger.log.removed > seen:
            self.signs[REMOVED] = self._known + 1
        if storage.ledger.log.irregular <= seen and storage.ledger.in_order:
            return
        if pending := self._changes_since(storage, seen):
            self._log.append(pending)
            self._rows_logged = self._log.core.count

    def log_priorities(self, number: int, at: Array | range) -> tuple[Any, ...]:
        """Log elements of a table of priorities that were set, or all of them for a range.

        Returns:
            The arguments of ``RecoveryFolder.column``, so that the core logs them from now on.
        """
        marks, log = self._set, self._log
        assert marks is not None
        assert log is not None
        if isinstance(at, range):
            marks.wrote(at.start, len(at))
            log.append([(number, None)])
        else:
            marks.wrote_at(torch.from_numpy(at))
            log.append([(number, at)])
        return (log.core, *marks.marking())

    def commit_state(self, state: CommittedState, *, whole: bool) -> None:
        """Commit a state with all changes that were logged.

        Args:
            whole: whether more has changed than a write at the cursor changes.
        """
        assert self._log is not None
        core = self._log.core
        logged = core.count
        if self._rows_logged > self._logged_until:
            self._rows_logged = logged
        if whole or logged != self._logged_until:
            # This comes before the commit, because readers without the lock read first the state
            # and then this sign.
            self.signs[RESET] = self._known + 1
        self._known = self.home.commit(state.numbers, (self._rows_logged, logged))
        core.committed = self._logged_until = logged

    def _logged_at(self, rows_logged: int, logged: int) -> None:
        """Set the counts of the shared log in the state that is followed."""
        assert self._log is not None
        self._rows_logged, self._logged_until = rows_logged, logged
        self._log.core.count = self._log.core.committed = logged

    def _changes_since(
        self, storage: LazyTensorStorage, seen: int
    ) -> list[tuple[int, Array | None]]:
        """Return the changes of rows since ``seen`` that counters do not show."""
        ledger, columns = storage.ledger, list(storage.require().schema.leaves)
        changes, found = ledger.log.since(seen), []
        if changes is None:
            return [(_MOVED, None)]
        for change in changes:
            slots = change.slots
            if change.kind is ChangeKind.EDIT and change.columns is None:
                found.append((_EDITED, slots))
            elif change.kind is ChangeKind.EDIT:
                numbers = (_COLUMNS + columns.index(path) for path in change.columns or ())
                found.extend((number, slots) for number in numbers)
            elif change.removal is not None:
                # The last slots may have no row now, although none has moved.
                source, target, length = change.removal
                found.append((_REMOVED, np.concatenate([source, target, [length]])))
            elif change.kind is ChangeKind.MOVE or (
                change.kind is ChangeKind.PLACE and not ledger.by_stream
            ):
                found.append((_MOVED, None))
            elif change.kind in (ChangeKind.APPEND, ChangeKind.PLACE) and not ledger.in_order:
                found.append((_PLACED, change.in_ring(ledger.slots)))
        return found

    def tracked(self, rows: TrackedTensor) -> TrackedTensor:
        """Return a sampler's priorities with the shared tracker; see ``Recovery.tracked``."""
        if self._set is None:
            return rows
        if any(column.whole for column in self.recovery.samplers):
            self._set.wrote(0, self._set.rows)
        return replace(rows, changes=self._set)

    def _pending_changes(self) -> bool:
        """Return whether changes that were made under the lock are not committed yet."""
        pending = any(column.pending for column in self.recovery.samplers)
        return pending or self.home.journaled()[1] > 0


def begin_sharing(
    storage: LazyTensorStorage,
    folder: FilePath,
    *,
    private: bool,
    mapped: bool,
    existsok: bool = False,
    recover: bool = False,
    durable: bool = False,
    join: bool = False,
) -> Recovery:
    """Open the files of a storage, in which no row is stored yet, for several processes.

    Args:
        storage: the storage.
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
    if join and not folder.exists():
        raise RuntimeError(
            f"{folder} is gone: the processes that shared the buffer ended before this one "
            "received it"
        )
    check_flock()
    one_thread_in_children()
    home = RecoveryFolder(folder, shared=True, recoverable=recover, durable=durable)
    if not join and not recover:
        if is_shared(home.folder):
            raise RuntimeError(f"{folder} is in use by other processes, which share it")
        shutil.rmtree(home.folder)
        home.folder.mkdir()
    recovery = Recovery(storage, home, existsok=existsok, mapped=mapped)
    how = dict(zip(HOW, (private, mapped, existsok, recover, durable), strict=True))
    recovery.sharing = Sharing(recovery, private=private, how=how)
    if join and recover and is_held(home.folder / LOCK):
        recovery.sharing.leave()
        raise RuntimeError(f"{folder} is in use by a process that recovers it alone")
    return recovery


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
        if old and other != made and ProcessRegistry.is_unused(other / "%shared" / MEMBERS):
            shutil.rmtree(other, ignore_errors=True)
    return made


def _leave(members: ProcessRegistry, folder: FilePath, private: bool) -> None:
    """Remove a private folder if this process was its last user."""
    members.drop()
    if private and ProcessRegistry.is_unused(folder / "%shared" / MEMBERS):
        shutil.rmtree(folder, ignore_errors=True)
