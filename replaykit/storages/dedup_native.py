"""Read and write observations in the compiled core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from replaykit import native
from replaykit.native import row_stride
from replaykit.storages.batch_memory import REUSED_FROM
from replaykit.storages.columns import Columns
from replaykit.storages.next_rows import Pairs
from replaykit.storages.records import alone, plan_records
from replaykit.structure import Path
from replaykit.ted import DEFAULT_DONE_KEYS, EPISODE_KEYS

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
