"""What tells of rows stored once, in files that are there again after their process was killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.recovery import check_file
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.committing import BESIDE, FOLLOWERS
from replaykit.storages.recoverable import rows_as_bytes
from replaykit.storages.row_files import RowFiles, grow_in_files

if TYPE_CHECKING:
    from replaykit.storages.recoverable import Recovery

__all__ = ["KeptOnce"]

Array = np.ndarray[Any, Any]

_ENTRIES = 500
"""Numbers of the journal's targets, from here on: the files of the entries beside."""


class KeptOnce:
    """The entries beside the rows, the map that says whose they are, and the links between rows.

    They are changed where they lie, in mapped files; what was there is noted before, with the
    storage's lock held. Which entries are free, which row lies before which, and which is the
    newest of its stream follows from them (``OnceColumns.reread``).

    An entry that an operation has given back may be overwritten by it. The core takes such entries
    without a word, so that they are noted when it gives them back; whoever does not note them then
    keeps the core from writing until the next commit (``loose``).

    Args:
        recovery: that of the storage, which notes and commits.
        folder: where the entries lie.
    """

    def __init__(self, recovery: Recovery, folder: FilePath) -> None:
        self._recovery, self._folder = recovery, folder
        self._grow_files = grow_in_files(folder)
        self.files: list[FilePath] = []
        """Those of the entries, once there are any."""
        self._entries: Sequence[int] = ()
        self._loose = 0
        self._map: Array = np.zeros(0, np.int32)

    # -- files --------------------------------------------------------------------------------

    def grow(self, schema: Schema, entries: int, table: Columns | None) -> Columns:
        """Takes room for entries; as ``beside.Grow``."""
        grown = self._grow_files(schema, entries, table)
        self._take(grown)
        return grown

    def open(self, schema: Schema, elements: int) -> None:
        """Maps what is there, for the journal to put back what it has of it.

        Raises:
            CheckpointError: a file is no plain one; names it.
        """
        plan = RowFiles.of(self._folder, schema, 1, torch.Size())
        entries = elements
        for path, file in plan.files.items():
            if not file.exists() and not file.is_symlink():
                return
            check_file(file, 0, exactly=False)
            if plan.nbytes(path):
                entries = min(entries, file.stat().st_size // plan.nbytes(path))
        if entries:
            self._take(RowFiles.of(self._folder, schema, entries, torch.Size()).opened(1))

    def table(self, schema: Schema) -> Columns | None:
        """The entries up to the last one that the map tells of; None: it tells of none.

        Of those behind it nobody knows whether the disk has room for them.

        Raises:
            CheckpointError: a file has fewer, or is not there; names it.
        """
        entries = int(self._map.max(initial=0))
        if entries < 1:
            return None
        plan = RowFiles.of(self._folder, schema, entries, torch.Size())
        for path, file in plan.files.items():
            check_file(file, plan.nbytes(path), exactly=False)
        found = plan.opened(1)
        self._take(found)
        return found

    def _take(self, table: Columns) -> None:
        cells = rows_as_bytes(table)
        self._entries = range(_ENTRIES, _ENTRIES + len(cells))
        plan = RowFiles.of(self._folder, table.schema, table.slots, torch.Size())
        targets = dict(zip(self._entries, cells.values(), strict=True))
        self.files = list(plan.files.values())
        self._recovery.home.also(targets, self.files)

    def map(self, elements: int, dtype: Any, *, there: bool) -> Array:
        """The memory of the map, ``[elements]``; ``there``: made before.

        Raises:
            CheckpointError: it is not there; names the file.
        """
        self._map = self._table(BESIDE, elements, dtype, there)
        return self._map

    def followers(self, slots: int, dtype: Any, *, there: bool) -> Array:
        """The same of how far away the next row of each lies."""
        return self._table(FOLLOWERS, slots, dtype, there)

    def _table(self, number: int, rows: int, dtype: Any, there: bool) -> Array:
        home = self._recovery.home
        if there:
            home.check_table(number, dtype, rows)
        return home.table(number, dtype, rows)[:rows]

    # -- changes ------------------------------------------------------------------------------

    @property
    def loose(self) -> bool:
        """Whether entries were given back since the last commit that were not noted."""
        return self._loose == self._recovery.home.noted()[0]

    def note(self, elements: torch.Tensor | range, numbers: Array) -> None:
        """Notes what is about to change: the map at elements, and entries that get values."""
        at = elements if isinstance(elements, range) else elements.numpy()
        self._recovery.note_more(BESIDE, at)
        self._note_entries(numbers)
        self._loose = self._recovery.home.noted()[0]

    def note_ring(self, first: int, count: int) -> None:
        """Notes what the core changes by writing rows from slot ``first`` on, round the ring,
        behind the one before: its entry and theirs come back.

        The rows were noted already: what an ``extend`` costs beside them.
        """
        slots, home = len(self._map), self._recovery.home
        start = (first or slots) - 1
        stop = start + count + 1
        for begin, end in ((start, min(stop, slots)), (0, stop - slots)):
            if end > begin:
                home.note(BESIDE, range(begin, end))
                used = self._map[begin:end]
                self._note_entries(used[used.nonzero()] - 1)

    def note_linked(self, slots: Array) -> None:
        """The same where rows of streams are written.

        Args:
            slots: those of the rows, of the rows before them, and of the newest rows of streams.
        """
        self._recovery.home.note(BESIDE, slots)
        self._recovery.home.note(FOLLOWERS, slots)
        used = np.unique(self._map[slots])
        self._note_entries(used[used.nonzero()] - 1)

    def note_links(self, slots: torch.Tensor | range) -> None:
        """Notes that other rows will follow some."""
        at = slots if isinstance(slots, range) else slots.numpy()
        self._recovery.note_more(FOLLOWERS, at)

    def _note_entries(self, numbers: Array) -> None:
        home = self._recovery.home
        if not len(numbers):
            return
        at: Array | range = numbers.astype(np.int64, copy=False)
        if len(numbers) == 1:  # which takes a third of the time
            at = range(int(numbers[0]), int(numbers[0]) + 1)
        for target in self._entries:
            home.note(target, at)
