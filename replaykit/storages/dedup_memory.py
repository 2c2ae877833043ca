"""Keep observations in memory and in recoverable files, and read them in the compiled core."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit import native
from replaykit.native import row_stride
from replaykit.recovery.recovery_folder import Tables, check_file
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.next_rows import Pairs
from replaykit.storages.records import alone, plan_records
from replaykit.storages.references import followed_references
from replaykit.storages.row_files import RowFiles, grow_in_files, rows_as_bytes
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, EPISODE_KEYS
from replaykit.transfer import REUSED_FROM

if TYPE_CHECKING:
    from replaykit.storages.recoverable import Recovery

_THREADS_FROM = 2**20
"""Bytes of a batch from which on all threads of torch copy it."""

_BOTH = 2
"""Stands for both references in calls of the core."""

_CPU = torch.device("cpu")
"""Passed to every allocation, so that the caller's default device has no effect."""


def observations_of(pairs: Pairs, elements: int, lanes: int) -> Any:
    """Return the core's object for rows of these leaves, without memory yet.

    Raises:
        ValueError: there are 2**31 - 1 elements or more.
    """
    leaves = pairs.schema.leaves
    places = {path: place for place, path in enumerate(leaves)}
    root_of = pairs.root_of
    # Torch compares flags of other dtypes, in which zero may have several forms.
    whole = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    ends = [("next", name) for name in DEFAULT_DONE_KEYS]
    return native.core.Observations(
        [leaf.shape.numel() * leaf.dtype.itemsize for leaf in leaves.values()],
        [places[root_of[path]] if path in root_of else -1 for path in leaves],
        [places[p] for p in ends if p in pairs.stored.leaves and leaves[p].dtype in whole],
        [places[path] for path in EPISODE_KEYS if path in pairs.stored.leaves],
        elements,
        lanes,
    )


class NativeObservations:
    """The memory of rows and entries, and a plan to read batches from it.

    The caller holds the storage's lock.

    Args:
        pairs: the leaves that are stored once.
        rows: columns of the leaves that are stored for every row.
        core: the result of ``observations_of``.
    """

    def __init__(self, pairs: Pairs, rows: Columns, core: Any) -> None:
        self._rows, self._core = rows, core
        leaves = pairs.schema.leaves
        self._paths = list(leaves)
        self.sizes = [leaf.shape.numel() * leaf.dtype.itemsize for leaf in leaves.values()]
        self._leaves = leaves
        self._root_of = pairs.root_of
        self._row_bytes = sum(self.sizes)
        sizes = dict(zip(self._paths, self.sizes, strict=True))
        # The paths and sizes of the leaves that each kind of reference shows.
        self._shown = [
            (list(paths), [sizes[path] for path in paths])
            for paths in (pairs.root_of.values(), pairs.root_of)
        ]
        # A batch has the layout of dense rows: records for small leaves, and a tensor per wide
        # leaf.
        self._batch = plan_records(pairs.schema)
        self._alone = alone(leaves, self._batch)
        self.order = [*(self._batch.offsets if self._batch else ()), *self._alone]

    def memory(self, table: Columns | None) -> tuple[list[int], list[Any]]:
        """Return the address and the stride of each leaf, and plan reads of this memory."""
        tensors, ndim = self._rows.tensors, self._rows.ndim
        lies: dict[Path, tuple[int, Any]] = {
            path: (t.data_ptr(), row_stride(t, ndim)) for path, t in tensors.items()
        }
        for path in self._root_of:
            tensor = None if table is None else table.tensors[path]
            lies[path] = (0, 0) if tensor is None else (tensor.data_ptr(), row_stride(tensor, 1))
        self._plan_reads(lies)
        return [lies[path][0] for path in self._paths], [lies[path][1] for path in self._paths]

    def _plan_reads(self, lies: Mapping[Path, tuple[int, Any]]) -> None:
        """Find pieces that are contiguous both in the columns and in a batch."""
        batch, sizes = self._batch, dict(zip(self._paths, self.sizes, strict=True))
        stride = 0 if batch is None else batch.stride
        offsets = {} if batch is None else batch.offsets
        paired = {*self._root_of, *self._root_of.values()}
        pieces: list[list[int]] = []  # base, stride, bytes, and the offset in a record of the batch
        for path, offset in sorted(offsets.items(), key=lambda item: item[1]):
            if path in paired:
                continue
            (base, step), size = lies[path], sizes[path]
            if pieces:
                last = pieces[-1]
                if [last[0] + last[2], last[1], last[3] + last[2]] == [base, step, offset]:
                    last[2] += size
                    continue
            pieces.append([base, step, size, offset])
        wide = [path for path in self._alone if path not in paired]
        self._offsets = [piece[3] for piece in pieces]
        self._wide = [self._alone.index(path) for path in wide]
        self._to_strides = [stride] * len(pieces) + [sizes[path] for path in wide]
        self._stored = native.Table(
            [piece[0] for piece in pieces] + [lies[path][0] for path in wide],
            [piece[1] for piece in pieces] + [lies[path][1] for path in wide],
            [piece[2] for piece in pieces] + [sizes[path] for path in wide],
            self._rows.slots * self._rows.lanes.numel(),
        )
        # The places of the root leaves and of their counterparts in a batch: an offset, or the
        # place of a wide leaf.
        paths = [*self._root_of.values(), *self._root_of]
        self._paired = (
            [offsets.get(path, -1) for path in paths],
            [-1 if path in offsets else self._alone.index(path) for path in paths],
            [stride if path in offsets else sizes[path] for path in paths],
        )

    def gather(self, elements: torch.Tensor, limit: int) -> list[torch.Tensor] | None:
        """Copy elements ``[B]`` into new leaves ``[B, *F]``, in ``order``.

        Small leaves are strided views of one allocation. Return None for batches large enough for
        the threads of torch.

        Raises:
            IndexError: an element is outside ``[0, limit)``.
        """
        count = len(elements)
        threads = self.threads(count)
        if self._alone and threads > 1:
            return None
        elements = elements.contiguous()
        leaves: list[torch.Tensor] = []
        base = 0
        if self._batch is not None:
            block = self._batch.new_block(count, self._rows.batch_memory)
            base = block.data_ptr()
        wide = [self._fresh(path, count) for path in self._alone]
        lies = [leaf.data_ptr() for leaf in wide]
        to = [base + offset for offset in self._offsets] + [lies[place] for place in self._wide]
        index = elements.data_ptr()
        self._stored.gather(index, count, limit, to, self._to_strides, threads)
        offsets, places, strides = self._paired
        to = [
            lies[place] if offset < 0 else base + offset
            for offset, place in zip(offsets, places, strict=True)
        ]
        self._core.gather(index, count, _BOTH, to, strides, threads)
        if self._batch is not None:
            leaves = self._batch.split(block)
        return leaves + wide

    def shown(self, elements: torch.Tensor, kind: int) -> dict[Path, torch.Tensor]:
        """Copy the entries that elements ``[B]`` refer to into contiguous leaves, by path."""
        elements = elements.contiguous()
        count = len(elements)
        paths, strides = self._shown[kind]
        found = {path: self._fresh(path, count) for path in paths}
        self._core.gather(
            elements.data_ptr(),
            count,
            kind,
            [leaf.data_ptr() for leaf in found.values()],
            strides,
            self.threads(count),
        )
        return found

    def _fresh(self, path: Path, count: int) -> torch.Tensor:
        leaf = self._leaves[path]
        shape = (count, *leaf.shape)
        if count * leaf.shape.numel() * leaf.dtype.itemsize >= REUSED_FROM:
            return self._rows.batch_memory.new(shape, leaf.dtype)
        return torch.empty(shape, dtype=leaf.dtype, device=_CPU)

    def threads(self, count: int) -> int:
        """Return the number of threads for a batch of ``count`` rows."""
        return torch.get_num_threads() if count * self._row_bytes >= _THREADS_FROM else 1


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
        self.referring: range | None = None
        """The place of the result of ``stored`` among the signs for other processes; None if the
        rows are not shared."""
        self._targets: range = range(0)

    # -- files --------------------------------------------------------------------------------

    def grow(self, schema: Schema, entries: int, table: Columns | None) -> Columns:
        """Allocate room for entries; see ``columns.Grow``."""
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

    def stored(self, length: int) -> int:
        """Return the number of slots whose references count, of which ``length`` hold rows."""
        at = self.referring
        if at is None:
            return length
        return int(self._recovery.home.table(Tables.SIGNS, at.stop)[at.start])

    def set_stored(self, slots: int) -> None:
        """Set the number of slots whose references count, for all processes.

        Raises:
            OSError: there is no room for the journal. Nothing has changed then.
            RuntimeError: this is a forked process.
        """
        at = self.referring
        self._recovery.home.check_process()
        if at is not None and self.stored(0) != slots:
            self._recovery.journal_table(Tables.SIGNS, at)
            self._recovery.home.table(Tables.SIGNS, at.stop)[at.start] = slots


def _run_of(numbers: Array) -> Array | range:
    """Return the numbers as a range if they rise by one, which takes less time to journal."""
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first == len(numbers) - 1 and (len(numbers) < 3 or (np.diff(numbers) == 1).all()):
        return range(first, last + 1)
    return numbers
