"""Read and write deduplicated rows in the compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from replaykit import native
from replaykit.episodes.interleaved import stream_keys
from replaykit.native import row_stride
from replaykit.storages.batch_memory import REUSED_FROM
from replaykit.storages.columns import Columns
from replaykit.storages.next_rows import Chains, Links, Pairs
from replaykit.storages.overflow_table import OverflowTable
from replaykit.storages.records import alone, plan_records
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, EPISODE_KEYS

__all__ = ["Batch", "ComparedStreams", "NativeDedup", "keys_of"]

Array = np.ndarray[Any, Any]

_THREADS_FROM = 2**20
"""Bytes of a batch from which on all threads of torch copy it."""

_CPU = torch.device("cpu")
"""Passed to every allocation, so that the caller's default device has no effect."""


class Batch(NamedTuple):
    """Rows of streams as int64 arrays, for a comparison in the core.

    Attributes:
        followers: for each row the place in the batch of the next row of its stream, or -1.
        newest: slots of the newest stored rows of some streams. No stored row follows these rows.
        first: for each of these streams, the place of its first row in the batch.
        expected: for each of these streams, 1 if its first row must continue the newest row, else
            0.
    """

    followers: Array
    newest: Array
    first: Array
    expected: Array


class NativeDedup:
    """Addresses of columns and of their overflow entries, in the form for the core.

    If the core cannot do the work of a method, the method returns None or False and changes
    nothing. The caller then uses torch, with the same result. The caller holds the storage's lock.

    Args:
        pairs: the leaves that are read from the following row.
        rows: columns of the leaves that are stored for every row.
        overflow: the next observations that differ from the following row.
        links: the slots of the following rows; None if the following row is in the next time slot.
    """

    @classmethod
    def over(
        cls, pairs: Pairs, rows: Columns, overflow: OverflowTable, links: Links | None = None
    ) -> NativeDedup | None:
        """Return an object over the rows, or None if the core cannot copy them."""
        if not rows.native:
            return None
        return cls(pairs, rows, overflow, links)

    def __init__(
        self, pairs: Pairs, rows: Columns, overflow: OverflowTable, links: Links | None = None
    ) -> None:
        self._rows, self._overflow, self._links = rows, overflow, links
        self._cells = rows.lanes.numel()
        leaves = pairs.schema.leaves
        self._paths = list(leaves)
        self._sizes = {p: leaf.shape.numel() * leaf.dtype.itemsize for p, leaf in leaves.items()}
        self._shapes = {path: leaf.shape for path, leaf in leaves.items()}
        self._dtypes = {path: leaf.dtype for path, leaf in leaves.items()}
        places = {path: place for place, path in enumerate(self._paths)}
        root_of = pairs.root_of
        self._follows = [places[root_of[p]] if p in root_of else -1 for p in self._paths]
        self._nexts = [path for path in self._paths if path in root_of]
        # Torch compares flags of other dtypes, in which zero may have several forms.
        whole = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        ends = [("next", name) for name in DEFAULT_DONE_KEYS]
        stored = [path for path in self._paths if path not in root_of]
        self._ends = [places[p] for p in ends if p in stored and leaves[p].dtype in whole]
        self._ids = [places[path] for path in EPISODE_KEYS if path in stored]
        self._leaf_sizes = list(self._sizes.values())
        self._row_bytes = sum(self._leaf_sizes)
        # A batch has the layout of dense rows: records for small leaves, and a tensor per wide
        # leaf.
        self._batch = plan_records(pairs.schema)
        self._alone = alone(leaves, self._batch)
        self.order = [*(self._batch.offsets if self._batch else ()), *self._alone]
        self._table: Columns | None = None
        self._moves = (-1, -1)

    def _ready(self) -> bool:
        """Update all addresses; return False if there is no overflow table yet."""
        table = self._overflow.table
        if table is None:
            return False
        self._rows.refresh_addresses()
        table.refresh_addresses()
        if table is not self._table or (self._rows.moves, table.moves) != self._moves:
            self._point(table)
        return True

    def _point(self, table: Columns) -> None:
        tensors, ndim = self._rows.tensors, self._rows.ndim
        lies = {path: (t.data_ptr(), row_stride(t, ndim)) for path, t in tensors.items()}
        lies.update((path, (t.data_ptr(), row_stride(t, 1))) for path, t in table.tensors.items())
        elements = self._rows.slots * self._cells
        memory, links = self._overflow.memory(), self._links
        linked = () if links is None else links.addresses()
        kind = native.core.Followed if links is None else native.core.Linked
        self._core = kind(
            [lies[path][0] for path in self._paths],
            [lies[path][1] for path in self._paths],
            [self._sizes[path] for path in self._paths],
            self._follows,
            self._ends,
            self._ids,
            elements,
            self._cells,
            memory.map,
            memory.wide,
            memory.entries,
            memory.stack,
            memory.free,
            *linked,
        )
        self._plan_reads(lies, elements)
        self._table, self._moves = table, (self._rows.moves, table.moves)

    # -- reading ------------------------------------------------------------------------------

    def _plan_reads(self, lies: dict[Path, tuple[int, Any]], elements: int) -> None:
        """Find pieces that are contiguous both in the columns and in a batch."""
        batch, sizes = self._batch, self._sizes
        stride = 0 if batch is None else batch.stride
        offsets = {} if batch is None else batch.offsets
        pieces: list[list[int]] = []  # base, stride, bytes, and the offset in a record of the batch
        for path, offset in sorted(offsets.items(), key=lambda item: item[1]):
            if path in self._nexts:
                continue
            (base, step), size = lies[path], sizes[path]
            if pieces:
                last = pieces[-1]
                if [last[0] + last[2], last[1], last[3] + last[2]] == [base, step, offset]:
                    last[2] += size
                    continue
            pieces.append([base, step, size, offset])
        wide = [path for path in self._alone if path not in self._nexts]
        self._offsets = [piece[3] for piece in pieces]
        self._wide = [self._alone.index(path) for path in wide]
        self._to_strides = [stride] * len(pieces) + [sizes[path] for path in wide]
        self._stored = native.Table(
            [piece[0] for piece in pieces] + [lies[path][0] for path in wide],
            [piece[1] for piece in pieces] + [lies[path][1] for path in wide],
            [piece[2] for piece in pieces] + [sizes[path] for path in wide],
            elements,
        )
        self._next_offsets = [offsets.get(path, -1) for path in self._nexts]
        self._next_wide = [
            -1 if path in offsets else self._alone.index(path) for path in self._nexts
        ]
        self._next_strides = [stride if path in offsets else sizes[path] for path in self._nexts]

    def gather(self, elements: torch.Tensor, limit: int) -> list[torch.Tensor] | None:
        """Copy elements ``[B]`` into new leaves ``[B, *F]``, in ``order``.

        Small leaves are strided views of one allocation. Return None for rows in files, and for
        batches large enough for the threads of torch.

        Raises:
            IndexError: an element is outside ``[0, limit)``.
        """
        count = len(elements)
        threads = self._threads(count)
        if self._rows.advise or (self._alone and threads > 1) or not self._ready():
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
        to = [
            lies[place] if offset < 0 else base + offset
            for offset, place in zip(self._next_offsets, self._next_wide, strict=True)
        ]
        self._core.gather(index, count, to, self._next_strides, threads)
        if self._batch is not None:
            leaves = self._batch.split(block)
        return leaves + wide

    def following(self, elements: torch.Tensor) -> dict[Path, torch.Tensor] | None:
        """Copy the counterparts of elements ``[B]`` into leaves ``[B, *F]``, by path.

        Each leaf is contiguous. Return None for rows in files.
        """
        if self._rows.advise or not self._ready():
            return None
        elements = elements.contiguous()
        count = len(elements)
        found = {path: self._fresh(path, count) for path in self._nexts}
        self._core.gather(
            elements.data_ptr(),
            count,
            [leaf.data_ptr() for leaf in found.values()],
            [self._sizes[path] for path in self._nexts],
            self._threads(count),
        )
        return found

    def _fresh(self, path: Path, count: int) -> torch.Tensor:
        shape = (count, *self._shapes[path])
        if count * self._sizes[path] >= REUSED_FROM:
            return self._rows.batch_memory.new(shape, self._dtypes[path])
        return torch.empty(shape, dtype=self._dtypes[path], device=_CPU)

    def _threads(self, count: int) -> int:
        return torch.get_num_threads() if count * self._row_bytes >= _THREADS_FROM else 1

    # -- writing ------------------------------------------------------------------------------

    def compare(
        self, addresses: Sequence[int], count: int, newest: int, severed: bool
    ) -> bool | None:
        """Compare consecutive rows without lanes with each other and with the newest row.

        The core keeps the result for a ``write`` of the same rows.

        Args:
            addresses: the address of each leaf, in the order of the schema.
            count: number of rows, below the number of slots.
            newest: slot of the newest row, which has an overflow entry.
            severed: whether the newest row ends its episode although no flag is set.

        Returns:
            False if a row may continue an episode, but differs from the next observation of the row
            before. None if nothing was compared.
        """
        if not self._ready():
            return None
        threads = self._threads(count)
        return not self._core.compare(addresses, count, newest, severed, threads)

    def write(self, addresses: Sequence[int], count: int, first: int, newest: int) -> bool:
        """Write the rows compared last from slot ``first`` on, as followers of ``newest``.

        Return False if the rows may be views of the columns.

        Raises:
            MemoryError, OSError: no room for overflow entries; nothing has changed then.
        """
        if self._rows.overlap(addresses, count, self._leaf_sizes):
            return False
        threads = self._threads(count)
        short = self._core.write(first, count, addresses, threads)
        if short:
            self._overflow.grow(short)
            self._ready()  # the table has moved
            self._core.compare(addresses, count, newest, True, threads)
            self._core.write(first, count, addresses, threads)
        return True

    # -- writing streams ----------------------------------------------------------------------

    def compare_streams(self, addresses: Sequence[int], batch: Batch) -> bool | None:
        """Compare rows with the rows before them in their streams, as ``compare`` does.

        The core keeps the result for a ``write_streams`` of the same rows.
        """
        if not self._ready():
            return None
        threads = self._threads(len(batch.followers))
        return not self._core.compare_linked(
            addresses,
            len(batch.followers),
            batch.followers.ctypes.data,
            len(batch.newest),
            batch.newest.ctypes.data,
            batch.first.ctypes.data,
            batch.expected.ctypes.data,
            threads,
        )

    def write_streams(self, addresses: Sequence[int], batch: Batch, slots: torch.Tensor) -> bool:
        """Write the rows compared last to distinct slots.

        Return False if the rows may be views of the columns.

        Raises:
            The same errors as ``write``.
        """
        count = len(slots)
        if self._rows.overlap(addresses, count, self._leaf_sizes):
            return False
        threads, slots = self._threads(count), slots.contiguous()
        short = self._core.write_linked(slots.data_ptr(), count, addresses, threads)
        if short:
            self._overflow.grow(short)
            self.compare_streams(addresses, batch)  # the table has moved
            self._core.write_linked(slots.data_ptr(), count, addresses, threads)
        return True


@dataclass
class ComparedStreams:
    """Rows that will be written, compared with the rows before them in their streams.

    Attributes:
        chains: pairs of rows that follow each other in a stream.
        differs: for each pair of ``chains``, whether the following row differs from the next
            observation. None if there are no pairs, or if the core keeps the result.
        batch: the rows of the core's last comparison; None if torch compared them.
        continues: whether every row that continues an episode equals the next observation of the
            row before.
    """

    chains: Chains
    differs: torch.Tensor | None
    batch: Batch | None = None
    continues: bool = True


def keys_of(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """Return the stream keys of ``values``, which may be a view in another dtype."""
    return stream_keys(values.view(dtype))
