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
from replaykit.checkpoint.shared_dirty_chunks import KeptChanges
from replaykit.errors import CheckpointError
from replaykit.recovery import (
    MEMBERS,
    ChangeLog,
    GivenViews,
    Home,
    ProcessRegistry,
    SharedLock,
    check_file,
    check_flock,
    give_up_rows,
    one_thread_in_children,
)
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.commit_state import Changed, KeptCount, KeptState, PriorityKeeper, set_alone
from replaykit.storages.recoverable import (
    GENERATIONS,
    POSITIONS,
    PRIORITIES,
    Recovery,
    ledger_counters,
)
from replaykit.storages.row_files import RowFiles, columns_in_files, refuse_taken
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.storages.tensors import LazyTensorStorage

__all__ = [
    "ANEW",
    "ANNOUNCED",
    "IRREGULAR",
    "OWN",
    "SIGNS",
    "Following",
    "Sharing",
    "memory_folder",
]

Array = np.ndarray[Any, Any]

ANNOUNCED, IRREGULAR, ANEW = range(SIGNS := 3)
"""Signs: up to which position rows are being written at the cursor; how often, twice, rows were
overwritten otherwise, odd while they are; number of the last state in which something else has
changed than what rows at the cursor change."""

_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686")
"""Whether what a processor stores and loads is seen in order by the others: elsewhere who reads
takes the lock."""

OWN = 4
"""Numbers behind those of a KeptState: how much was logged, and the counters by which others learn
that what they derived is old: ``changes`` of the ledger, ``edits``, ``bounding`` of the indexes."""


class Following(Recovery):
    """Brings what one process derives from the rows up to what others have committed: with the
    lock all of it, without it the counters, for who only reads.

    Args:
        storage: whose.
        home: the folder that all have open.
    """

    def __init__(self, storage: LazyTensorStorage, home: Home) -> None:
        super().__init__(storage, home)
        self._known = 0
        """Number of the state that this process has taken note of; -1: it has to look at all."""
        self._own = [0] * OWN
        self._lags = False
        """Whether only the counters of the ledger were taken from that state."""
        self._pending: list[tuple[int, Array | None]] = []
        self._log: ChangeLog | None = None
        self._signs: Any = None

    def _forget(self) -> None:
        """What this process believes is not what the others see."""
        self._known, self._lags, self._noted, self._pending = -1, False, None, []

    def glance(self) -> tuple[int, int, int | None] | None:
        """Brings this process up to date without the lock, where only rows at the cursor have come.

        Other threads of it are kept out. What is read then is as it was if ``intact`` says so.

        Returns:
            What ``intact`` asks for; None: it takes the lock.
        """
        storage, signs = self._storage(), self._signs
        if storage is None or signs is None or self._known < 0 or not _ORDERED:
            return None
        irregular = signs[IRREGULAR]
        if irregular & 1:
            return None
        ledger, noted = storage.ledger, storage.indexes.noted()
        found = self.home.states.first(self._known)
        if found is None:
            return None
        if found[0] != self._known:
            # An index with rows yet to be noted was not asked since they came: nor is it expected
            # to be now. Whoever asks has the rest of the state brought, see ``_heads``.
            asked = noted is not None and noted >= ledger.next_position
            if asked or signs[ANEW] > self._known:
                if not self._glance_at_all(storage):
                    return None
            else:
                self._known, ledger.cursor, ledger.length, ledger.next_position = found
                self._lags, storage.indexes.stale = True, True
        return irregular, ledger.next_position, noted

    def _glance_at_all(self, storage: LazyTensorStorage) -> bool:
        """Takes the whole of the latest state, if it is one of which that can be done."""
        found, before = self.home.states.glance(), self._committed
        if found is None or before is None or found[1][-OWN:].tolist() != self._own:
            return False
        if not before.follow(found[1][:-OWN]):
            return False
        self._take_counters(storage, before)
        self._known, self._lags = found[0], False
        return True

    def intact(self, glanced: tuple[int, int, int | None], slots: torch.Tensor | None) -> bool:
        """Whether rows were as ``glance`` found them until now.

        Args:
            slots: those that were read, int64 ``[K]``; None: it may have been any.
        """
        storage, signs = self._storage(), self._signs
        assert storage is not None
        irregular, position, noted = glanced
        announced, ledger = signs[ANNOUNCED], storage.ledger
        if signs[IRREGULAR] != irregular or self._known < 0:
            return False
        count = announced - position
        if count <= 0 or ledger.length + count <= ledger.slots:
            return True
        if noted is None:  # one that was made since has read all rows
            made = storage.indexes.noted() is not None
            noted = position - ledger.length if made else position
        if announced - noted > ledger.slots:
            # What an index has read of rows that were not noted may have been others.
            self._known = -1
            return False
        if slots is None or count >= ledger.slots:
            return False
        return not ledger.next_ones(slots, count)

    def _catch_up(self, storage: LazyTensorStorage) -> None:
        """Takes the rest of a state of which only the counters are known here."""
        known = self._known
        if not (self._glance_at_all(storage) and self._known == known):
            # It is gone: nothing that is made of it counts.
            self._known = -1

    def _take_counters(self, storage: LazyTensorStorage, state: KeptState) -> None:
        """Takes over what a write at the cursor changes."""
        ledger = storage.ledger
        ledger.cursor, ledger.length = state.cursor, state.length
        ledger.next_position = state.next_position
        storage.indexes.stale = True  # it is noted before it is overwritten here
        for writer, count in zip(self._writers, state.counts, strict=False):
            if (part := writer()) is not None:
                part._write_count = count
        self._seen = ledger_counters(ledger), storage.edits, self._write_counts()
        self._saved_at = ledger.next_position, ledger.changes

    def _follow(self, storage: LazyTensorStorage, anew: bool) -> None:
        numbers, own = self._state_numbers()
        before, ledger, indexes = self._committed, storage.ledger, storage.indexes
        since: dict[int, Array | None] | None = {}
        if anew or before is None:
            since = None
        elif own[0] != self._own[0]:
            assert self._log is not None
            since = self._log.since(self._own[0], own[0])
        steady = not anew and own[1:] == self._own[1:] and before is not None
        if not (steady and before is not None and before.follow(numbers)):
            steady = False
            before = self._committed = KeptState.of_numbers(numbers)
        assert before is not None
        tables = []
        for number, length in ((POSITIONS, before.positions), (GENERATIONS, before.generations)):
            cells = self.home.table(number, np.int64, length)[:length] if length >= 0 else None
            tables.append((cells, None if since is None else since.get(number, _NO_ELEMENTS)))
        ledger.follow(
            before.cursor,
            before.length,
            before.next_position,
            before.cleared,
            before.by_stream,
            own[1],
            *tables,
        )
        storage.edits = own[2]
        if not steady:
            indexes.follow(before.marks, before.codes, anew=anew, edited=own[3] != self._own[3])
            indexes.bounding = own[3]
        indexes.heads_from = self._heads
        self._own = own
        for place, known in enumerate(self._samplers[: len(before.priorities)]):
            sampler = known()
            if sampler is None:
                continue
            at = None if since is None else since.get(PRIORITIES + place, _NO_ELEMENTS)
            self._hand_over(sampler, place, at)
        self._take_counters(storage, before)
        self._marks = indexes.marks.numbers
        ledger.touched = []

    def _hand_over(self, sampler: PriorityKeeper, place: int, at: Array | None) -> None:
        """Gives a sampler the priorities of some elements as they are now; None: of all."""
        assert self._committed is not None
        table = self._committed.priorities[place]
        cells = self.home.table(PRIORITIES + place, np.float64, table.length)[: table.length]
        if at is not None:
            at = at[at < table.length]
        values = cells.copy() if at is None else cells[at]
        sampler.take_changed(Changed(at, values, table.length, table.most, table.dropped))

    def _state_numbers(self) -> tuple[Array, list[int]]:
        numbers = self.home.states.look()
        if not len(numbers):
            return numbers, [0] * OWN
        if len(numbers) < OWN:
            raise CheckpointError(f"{self.home.folder} is damaged: its state is too short")
        return numbers[:-OWN], numbers[-OWN:].tolist()

    def _heads(self) -> dict[str, Any] | None:
        """Where the first episodes began as of the state that is known here; ``now``: whether this
        process has done nothing since."""
        storage = self._storage()
        if self._lags and storage is not None:
            self._catch_up(storage)
        state = self._committed
        heads = None if state is None else state.episodes()["heads"]
        if heads is not None and storage is not None and state is not None:
            ledger = storage.ledger
            now = [state.next_position, *self._own[1:3]]
            heads["now"] = now == [ledger.next_position, ledger.changes, storage.edits]
        return heads


_NO_ELEMENTS = np.zeros(0, np.int64)


_LOG, _SIGNS, _ROWS_WRITTEN, _PRIORITIES_SET = 2, 3, 6, 7
"""Numbers of tables: of the log of changes, of what writers show to who reads without the lock, and
of which rows and priorities were changed before which save."""

_LOG_LENGTH = 1 << 17
_PREFIX = "replaykit-shared-"
_LOCK = "lock"
_PRIORITY_BYTES = 4
"""By which chunks of priorities are as large as they are for every sampler."""
_YOUNG = 60.0
"""Seconds for which a folder is left alone although nobody seems to use it: it may be in the
making."""


class Sharing(Following):
    """Has the processes that hold a storage take turns, and each learn what the others have done.

    What is committed lies in files that all of them map: rows, counters, priorities. Beside it each
    has a ledger, an index of episodes and trees of its own, which it brings up to date when it
    takes the lock, from what has changed. What a process had not committed when it died is taken
    back by the next one that takes the lock.

    Args:
        storage: whose; nothing is stored yet.
        folder: where the files lie.
        private: whether it goes when nobody uses it any more.
        mapped: whether it is on a disk, from which rows are read ahead, and not in memory.
        existsok: whether files of others may be taken as space.
        join: whether another process has made it.

    Raises:
        RuntimeError: others use the folder, without ``join``; or the system has no such locks.
        OSError: the folder cannot be made or opened.
    """

    shared = True

    def __init__(
        self,
        storage: LazyTensorStorage,
        folder: FilePath,
        *,
        private: bool,
        mapped: bool,
        existsok: bool = False,
        join: bool = False,
    ) -> None:
        if join and not folder.exists():
            raise RuntimeError(
                f"{folder} is gone: the processes that shared the buffer have ended before this "
                "one got it"
            )
        check_flock()
        one_thread_in_children()
        home = Home(folder, shared=True)
        super().__init__(storage, home)
        self._folder, self._private, self._mapped = folder, private, mapped
        self._existsok = existsok
        if not join:
            if (home.folder / MEMBERS).exists() and not ProcessRegistry.nobody(
                home.folder / MEMBERS
            ):
                raise RuntimeError(f"{folder} is in use by other processes, which share it")
            shutil.rmtree(home.folder)
            home.folder.mkdir()
        self._members: ProcessRegistry | None = None
        self._changes: KeptChanges | None = None
        self._set: KeptChanges | None = None
        self._become_member()

    def _become_member(self) -> None:
        self._process = self.home.process = os.getpid()
        inherited = self._members
        self._members = ProcessRegistry(self.home.folder / MEMBERS)
        if inherited is not None:
            inherited.let_go()
        # It is run in processes that multiprocessing has started too, which `atexit` is not. Below
        # 0: after this process has waited for its children, which may have yet to open the folder.
        self._leave = multiprocessing.util.Finalize(
            self, _leave, args=(self._members, self._folder, self._private), exitpriority=-1
        )

    def invitation(self) -> dict[str, Any]:
        """What another process makes the same of."""
        return {
            "folder": self._folder,
            "private": self._private,
            "mapped": self._mapped,
            "existsok": self._existsok,
        }

    @property
    def folder(self) -> FilePath:
        """Where the files of the rows lie."""
        return self._folder

    def new_lock(self) -> SharedLock:
        """The lock of this process, which may be a forked child."""
        if self._process != os.getpid():
            # A thread of the parent, which is not here, may have been in the middle of anything.
            self._become_member()
            self._forget()
            self.active = False
        return SharedLock(self.home.folder / _LOCK, self._enter, self.settle)

    # -- files --------------------------------------------------------------------------------

    def make_columns(self, schema: Schema, slots: int, lanes: torch.Size) -> Columns:
        """Makes the files of the rows; the lock is held."""
        storage, home = self._storage(), self.home
        assert storage is not None
        plan = RowFiles.of(self._folder, schema, slots, lanes)
        present = {file for file in plan.files.values() if file.exists()}
        if not home.half_made:
            refuse_taken(self._folder, present, existsok=self._existsok, own=home.folder)
            if present:
                give_up_rows(self._folder, home.folder)
        with home.making():
            columns = columns_in_files(
                self._folder,
                schema,
                slots,
                lanes,
                existsok=True,
                taken=[],
                ndim=storage.ndim,
                mapped=self._mapped,
            )
            self.begin(columns, list(plan.files.values()))
        self._open_log(columns)
        return columns

    def _attach(self, storage: LazyTensorStorage) -> None:
        """Maps the files that another process has made."""
        found = self.known()
        assert found is not None
        lanes = torch.Size(found["lanes"])
        schema = Schema.from_json(found["schema"])
        plan = RowFiles.of(self._folder, schema, storage._slots_for(lanes), lanes)
        for path, file in plan.files.items():
            check_file(file, plan.nbytes(path))
        columns = plan.opened(storage.ndim, mapped=self._mapped)
        self._open(columns, list(plan.files.values()))
        self._open_log(columns)
        storage._columns = columns
        storage._adopt(columns)
        self.active = True

    def _open_log(self, columns: Columns) -> None:
        self._changes = columns.changes = self._row_changes(columns)
        like = Changes(columns.slots * columns.lanes.numel(), _PRIORITY_BYTES)
        cells = self._cells(_PRIORITIES_SET, KeptChanges.length(like))
        self._set = KeptChanges(cells, like, unsettled=self._unsettled)
        self._log = ChangeLog(self.home.table(_LOG, np.int64, _LOG_LENGTH)[:_LOG_LENGTH])
        self._signs = self.home.table(_SIGNS, np.int64, SIGNS)[:SIGNS].data

    def _cells(self, number: int, count: int) -> Array:
        return self.home.table(number, np.int64, count)[:count]

    def _row_changes(self, columns: Columns) -> KeptChanges:
        """What all processes note of the rows that they write, for the next save by one of them."""
        before, like = self._changes, columns.changes
        keys = [RECORDS, *(path for path in columns.tensors if path not in like.packed)]
        cells = self._cells(_ROWS_WRITTEN, KeptChanges.length(like, keys))
        views = GivenViews(self.home.folder)
        made = KeptChanges(cells, like, keys, views, self._unsettled)
        if before is not None and before.exposed:
            made.lend()  # a forked child has the views of its parent
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

    def adopt_writer(self, writer: KeptCount) -> None:
        storage = self._storage()
        assert storage is not None
        with storage.lock:
            set_alone(self._writers, writer)
            if self._committed is not None and self._committed.counts:
                writer._write_count = self._committed.counts[0]

    def _still_saved(self) -> KeptState | None:
        return self._committed

    # -- taking note of what others have done -------------------------------------------------

    def _enter(self) -> None:
        """Brings this process up to date; it has just got the lock."""
        home, signs, changes = self.home, self._signs, self._changes
        if changes is not None and changes.exposed:
            changes.look()
        regular = self.active and not self._lags and not signs[IRREGULAR] & 1
        if regular and home.noted() == (self._known + 1, 0):
            return  # nobody has done anything meanwhile
        storage = self._storage()
        if storage is None:
            return
        if not self.active:
            if not home.published:
                return
            self._attach(storage)
            signs = self._signs
        sequence, used = home.noted()
        sequence -= 1
        if used:  # who noted it has died
            signs[IRREGULAR] |= 1
            home.roll_back()
        if signs[IRREGULAR] & 1:
            signs[IRREGULAR] += 1
        if sequence == self._known and self._lags:
            self._catch_up(storage)
        if sequence != self._known:
            anew, self._known = self._known < 0, -1
            self._lags = False
            self._follow(storage, anew)
            self._known = sequence

    def look(self, *, whole: bool = False) -> None:
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

    def note(self, at: Array | range, paths: Iterable[Path] | None = None) -> None:
        self._signs[IRREGULAR] |= 1
        super().note(at, paths)

    def note_ring(self, first: int, count: int) -> None:
        storage, signs = self._storage(), self._signs
        assert storage is not None
        ledger = storage.ledger
        if ledger.changes != self._own[1]:  # the cursor is not where others believe
            signs[IRREGULAR] |= 1
        signs[ANNOUNCED] = ledger.next_position + first - ledger.cursor + count
        self._note_ring(first, count)

    def _take_back(self, since: int) -> None:
        # Who has read rows that are put back finds them as they were, and not what he has read.
        self._signs[IRREGULAR] |= 1
        super()._take_back(since)

    def settle(self) -> None:
        storage, signs = self._storage(), self._signs
        try:
            if signs is None or storage is None:
                return
            if storage.ledger.changes != self._own[1]:
                signs[IRREGULAR] |= 1
            super().settle()
            if signs[IRREGULAR] & 1:
                signs[IRREGULAR] += 1
        except BaseException:
            self._forget()
            self._again = False
            if self.active:
                self._take_back(0)
            raise

    def _state(self, *given: Any) -> KeptState:
        # Before it is committed: who reads without the lock looks at the state, then at this.
        self._signs[ANEW] = self.home.states.sequence + 1
        return super()._state(*given)

    def _logged(self, number: int, at: Array | range) -> None:
        self._pending.append((number, None if isinstance(at, range) else at))
        if number >= PRIORITIES and self._set is not None:  # before it counts
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

    def _unsettled(self) -> bool:
        """Whether something was changed under the lock that does not count yet."""
        samplers = [known() for known in self._samplers]
        pending = any(sampler is not None and sampler.priorities_pending() for sampler in samplers)
        return pending or self.home.noted()[1] > 0

    def _commit(self, storage: LazyTensorStorage, numbers: Array) -> None:
        logged = self._own[0]
        if self._pending:
            assert self._log is not None
            logged = self._log.note(logged, self._pending)
            self._pending = []
        own = [logged, storage.ledger.changes, storage.edits, storage.indexes.bounding]
        if own != self._own:
            self._signs[ANEW] = self.home.states.sequence + 1
        self._known = self.home.commit(numbers, own)
        self._own = own


def memory_folder() -> FilePath:
    """Makes a private folder whose files are memory, where the system has such a place.

    Takes away those that processes left which were killed.
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
    """Removes a private folder, if this process was the last one to use it."""
    members.let_go()
    if private and ProcessRegistry.nobody(folder / "%shared" / MEMBERS):
        shutil.rmtree(folder, ignore_errors=True)
