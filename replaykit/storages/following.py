"""What a process learns of the writes of others that share its rows."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.errors import CheckpointError
from replaykit.recovery import ChangeLog, Home
from replaykit.storages.committing import (
    GENERATIONS,
    POSITIONS,
    PRIORITIES,
    ledger_counters,
)
from replaykit.storages.kept_parts import Changed, KeptPriorities
from replaykit.storages.kept_state import KeptState
from replaykit.storages.recoverable import Recovery

if TYPE_CHECKING:
    from replaykit.storages.tensors import LazyTensorStorage

__all__ = ["ANEW", "ANNOUNCED", "IRREGULAR", "OWN", "SIGNS", "Following"]

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

    def _hand_over(self, sampler: KeptPriorities, place: int, at: Array | None) -> None:
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
