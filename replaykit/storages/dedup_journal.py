"""Keep overflow entries and references in recoverable files."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.recovery import check_file
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.recoverable import REFERENCES, rows_as_bytes
from replaykit.storages.references import followed_references
from replaykit.storages.row_files import RowFiles, grow_in_files
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.storages.recoverable import Recovery

__all__ = ["DedupJournal"]

Array = np.ndarray[Any, Any]

_ENTRIES = 500
"""The lowest number of a journal target that is a file of overflow entries."""

_BEFORE = (4, 5)
"""Tables of the folder's format before version 4: 1 + the overflow entry of each row, and the
distance to the next row of its stream."""


class DedupJournal:
    """A journal of the overflow entries and of the references of rows, which are in mapped files.

    Their old bytes are journaled before they change in place. The caller holds the storage's lock.
    The free entries and the newest rows of streams are not journaled, because
    ``DedupColumns.reread`` derives them.

    Args:
        recovery: the Recovery object of the storage, which journals and commits.
        folder: the folder with the files of the entries.
    """

    def __init__(self, recovery: Recovery, folder: FilePath) -> None:
        self._recovery, self._folder = recovery, folder
        self._grow_files = grow_in_files(folder)
        self.files: list[FilePath] = []
        """The files of the entries; empty before the first entry."""
        self._entries: range = range(0)

    # -- files --------------------------------------------------------------------------------

    def grow(self, schema: Schema, entries: int, table: Columns | None) -> Columns:
        """Allocate room for entries; see ``overflow_table.Grow``."""
        grown = self._grow_files(schema, entries, table)
        self._load_table(grown)
        return grown

    def open(self, schema: Schema, elements: int) -> None:
        """Map the files of entries that exist, so that a rollback can restore them.

        Raises:
            CheckpointError: a path is not a regular file; the error names it.
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
            self._load_table(RowFiles.of(self._folder, schema, entries, torch.Size()).opened(1))

    def table(self, schema: Schema, references: Array) -> Columns | None:
        """Return the entries up to the last one that a row refers to; None if there is none.

        The disk may have no blocks for later entries.

        Raises:
            CheckpointError: a file is too short or missing; the error names it.
        """
        entries = -int(references.min(initial=0))
        if entries < 1:
            return None
        plan = RowFiles.of(self._folder, schema, entries, torch.Size())
        for path, file in plan.files.items():
            check_file(file, plan.nbytes(path), exactly=False)
        found = plan.opened(1)
        self._load_table(found)
        return found

    def _load_table(self, table: Columns) -> None:
        cells = rows_as_bytes(table)
        self._entries = range(_ENTRIES, _ENTRIES + len(cells))
        plan = RowFiles.of(self._folder, table.schema, table.slots, torch.Size())
        targets = dict(zip(self._entries, cells.values(), strict=True))
        self.files = list(plan.files.values())
        self._recovery.home.also(targets, self.files)

    def references(self, elements: int, *, there: bool) -> Array:
        """Return the memory of the references, int32 ``[elements, 2]``.

        Raises:
            CheckpointError: ``there`` is set, but the file is missing; the error names it.
        """
        home = self._recovery.home
        if there:
            home.check_table(REFERENCES, np.int64, elements)
        return home.table(REFERENCES, np.int64, elements)[:elements].view(np.int32).reshape(-1, 2)

    def convert(self, elements: int, lanes: int, stored: int, *, streams: bool) -> Array:
        """Make the references of a folder in the format before version 4; see ``references``.

        Raises:
            CheckpointError: a table is missing or too short; the error names it.
            ValueError: the tables contradict each other.
        """
        home = self._recovery.home
        tables = []
        for number in _BEFORE[: 1 + streams]:
            home.check_table(number, np.int32, elements)
            tables.append(home.table(number, np.int32, elements)[:stored].copy())
        overflow = tables[0]
        own = np.flatnonzero(overflow)
        if len(own) and overflow[own].min() < 0:
            raise ValueError("expected numbers of overflow entries, got others")
        found = followed_references(stored, lanes, own, *tables[1:])
        found[own, 1] = -overflow[own]
        references = self.references(elements, there=False)
        references[:stored] = found
        return references

    def drop_converted(self) -> None:
        """Remove the tables that ``convert`` has read."""
        for number in _BEFORE:
            self._recovery.home.drop_table(number)

    # -- changes ------------------------------------------------------------------------------

    def journal(self, elements: Array, entries: Array, lanes: int, roots: list[Path]) -> None:
        """Journal the references of elements, and the entries that will get values.

        Args:
            elements: the elements, int64 ``[K]``.
            entries: the entries, as `references.entries_of` numbers them.
            lanes: number of lanes.
            roots: the columns that hold the entries of rows.
        """
        recovery, home = self._recovery, self._recovery.home
        recovery.journal_table(REFERENCES, _run_of(elements))
        if not len(entries):
            return
        inside = entries >= 0
        if inside.any():
            recovery.journal_rows(_run_of(np.unique(entries[inside] // lanes)), roots)
        if not inside.all():
            numbers = _run_of(np.sort(-1 - entries[~inside]))
            for target in self._entries:
                home.journal_rows(target, numbers)

    def journal_all(self, stored: int) -> None:
        """Journal the references of the first ``stored`` elements."""
        self._recovery.journal_table(REFERENCES, range(stored))


def _run_of(numbers: Array) -> Array | range:
    """Return the numbers as a range if they rise by one, which takes less time to journal."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1 and (len(numbers) < 3 or (np.diff(numbers) == 1).all()):
        return range(first, last + 1)
    return numbers
