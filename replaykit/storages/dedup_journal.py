"""Keep overflow entries and references in recoverable files."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.recovery.recovery_folder import Tables, check_file
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.references import followed_references
from replaykit.storages.row_files import RowFiles, grow_in_files, rows_as_bytes
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.storages.recoverable import Recovery

Array = np.ndarray[Any, Any]

_BEFORE = (Tables.OVERFLOW_BEFORE_4, Tables.STEPS_BEFORE_4)
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
        mapped: True if the folder is on a disk, and False if it is in memory.
    """

    def __init__(self, recovery: Recovery, folder: FilePath, *, mapped: bool) -> None:
        self._recovery, self._folder, self._mapped = recovery, folder, mapped
        self._grow_files = grow_in_files(folder, mapped=mapped)
        self.files: list[FilePath] = []
        """The files of the entries; empty before the first entry."""
        self.reserved: Any = None
        """The number of entries with reserved blocks, in memory that processes share; None if the
        rows are not shared."""
        self._targets: range = range(0)

    # -- files --------------------------------------------------------------------------------

    def grow(self, schema: Schema, entries: int, table: Columns | None) -> Columns:
        """Allocate room for entries; see ``overflow_table.Grow``."""
        if self.reserved is not None:  # another process has mapped as many
            entries = max(entries, self.reserved[0])
        grown = self._grow_files(schema, entries, table)
        self._load_table(grown)
        if self.reserved is not None:
            self.reserved[0] = entries
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
            self.table(schema, entries)

    def table(self, schema: Schema, entries: int) -> Columns | None:
        """Map a number of entries; return None if the number is 0.

        Raises:
            CheckpointError: a file is too short or missing; the error names it.
        """
        if not entries:
            return None
        plan = RowFiles.of(self._folder, schema, entries, torch.Size())
        for path, file in plan.files.items():
            check_file(file, plan.nbytes(path), exactly=False)
        found = plan.opened(1, mapped=self._mapped)
        self._load_table(found)
        return found

    def _load_table(self, table: Columns) -> None:
        cells = rows_as_bytes(table)
        self._targets = range(Tables.ENTRIES, Tables.ENTRIES + len(cells))
        plan = RowFiles.of(self._folder, table.schema, table.slots, torch.Size())
        targets = dict(zip(self._targets, cells.values(), strict=True))
        self.files = list(plan.files.values())
        self._recovery.home.also(targets, self.files)

    def references(self, elements: int, *, there: bool) -> Array:
        """Return the memory of the references, int32 ``[elements, 2]``.

        Raises:
            CheckpointError: ``there`` is set, but the file is missing; the error names it.
        """
        home = self._recovery.home
        if there:
            home.check_table(Tables.REFERENCES, elements)
        return home.table(Tables.REFERENCES, elements)[:elements].view(np.int32).reshape(-1, 2)

    def convert(self, references: Array, lanes: int, stored: int, *, streams: bool) -> None:
        """Make the references of a folder in the format before version 4.

        Args:
            references: the result of ``references``, whose first ``stored`` rows get values.
            lanes: number of lanes.
            stored: number of elements that hold rows.
            streams: whether rows follow each other by stream.

        Raises:
            CheckpointError: a table is missing or too short; the error names it.
            ValueError: the tables contradict each other.
        """
        home = self._recovery.home
        tables = []
        for number in _BEFORE[: 1 + streams]:
            home.check_table(number, len(references))
            tables.append(home.table(number, stored)[:stored].copy())
        overflow = tables[0]
        own = np.flatnonzero(overflow)
        if len(own) and overflow[own].min() < 0:
            raise ValueError("expected numbers of overflow entries, got others")
        found = followed_references(stored, lanes, own, *tables[1:])
        found[own, 1] = -overflow[own]
        references[:stored] = found

    def drop_converted(self) -> None:
        """Remove the tables that ``convert`` has read."""
        for number in _BEFORE:
            self._recovery.home.drop_table(number)

    # -- changes ------------------------------------------------------------------------------

    def journal(
        self, elements: Array, entries: Array, lanes: int, roots: list[Path], used: int = 0
    ) -> None:
        """Journal the references of elements, and the entries that will get values.

        Args:
            elements: the elements, int64 ``[K]``.
            entries: the entries, as `references.entries_of` numbers them.
            lanes: number of lanes.
            roots: the columns that hold the entries of rows.
            used: number of slots whose entries committed rows may refer to.
        """
        recovery, home = self._recovery, self._recovery.home
        recovery.journal_table(Tables.REFERENCES, _run_of(elements))
        if not len(entries):
            return
        inside = entries >= 0
        if inside.any():
            # No stored row refers to these entries, so readers without the lock need no sign.
            recovery.journal_stored(_run_of(np.unique(entries[inside] // lanes)), roots, used)
        if not inside.all():
            numbers = _run_of(np.sort(-1 - entries[~inside]))
            for target in self._targets:
                home.journal_rows(target, numbers)

    def journal_all(self, stored: int) -> None:
        """Journal the references of the first ``stored`` elements."""
        self._recovery.journal_table(Tables.REFERENCES, range(stored))


def _run_of(numbers: Array) -> Array | range:
    """Return the numbers as a range if they rise by one, which takes less time to journal."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1 and (len(numbers) < 3 or (np.diff(numbers) == 1).all()):
        return range(first, last + 1)
    return numbers
