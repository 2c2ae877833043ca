"""A storage in files that is there again after its process was killed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.errors import CheckpointError
from replaykit.recovery import CommitLock
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.indexes import EpisodeIndexes
from replaykit.storages.kept_state import KeptState
from replaykit.storages.ledger import Ledger
from replaykit.storages.pairs import Pairs
from replaykit.structure import Path
from replaykit.ted import format_key

if TYPE_CHECKING:
    pass

from replaykit.storages.committing import (
    GENERATIONS,
    POSITIONS,
    PRIORITIES,
    Committing,
    ledger_counters,
)

__all__ = ["Recovery", "rows_as_bytes"]

Array = np.ndarray[Any, Any]

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
