"""Store the small leaves of a row next to each other, in one record."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from replaykit import native
from replaykit._compat import dtype_by_name, dtype_name
from replaykit.checkpoint import RowChunks
from replaykit.schema import Schema
from replaykit.structure import Path
from replaykit.transfer import REUSED_FROM, BatchMemory, as_plain


def runs_of(slots: torch.Tensor) -> list[tuple[int, int, int]] | None:
    """Split slots into at most two rising runs ``(first slot, start, stop)``.

    Return None if there are more runs. A write to a ring has one run, or two runs around the end of
    the ring.
    """
    count = len(slots)
    if count == 1:
        return [(int(slots[0]), 0, 1)]
    at = slots.cpu().numpy()  # NumPy takes a tenth of torch's time for a few slots
    breaks = np.flatnonzero(np.diff(at) != 1)
    if len(breaks) > 1:
        return None
    bounds = [0, *(b + 1 for b in breaks.tolist()), count]
    return [(int(at[a]), a, b) for a, b in itertools.pairwise(bounds)]


WIDE_BYTES = 512
"""Bytes of a leaf from which on it is stored in a separate column. Memory bandwidth limits copies
of such leaves, so they gain nothing from a record."""


_MODEL_ROWS = 4096
"""Most rows of a block that serves as a template for the next block. A template halves the time to
make a block."""


class RecordLayout:
    """The offset of each small leaf in a record of ``stride`` bytes.

    Leaves of one dtype are neighbours, and wider dtypes come first. So every leaf is aligned, and
    padding is only at the end. The padding is at most 5 % of the leaves' bytes, or else less than
    one value of the widest dtype. A block of records is split with one view and one split per
    dtype.

    Attributes:
        offsets: first byte of each leaf.
        sizes: bytes of each leaf.
        stride: bytes of a record.
    """

    def __init__(self, schema: Schema, paths: list[Path]) -> None:
        by_dtype: dict[torch.dtype, list[Path]] = {}
        for path in paths:
            by_dtype.setdefault(schema.leaves[path].dtype, []).append(path)
        # The sort is stable, so leaves of one dtype stay in the schema's order.
        groups = sorted(by_dtype.items(), key=lambda item: -item[0].itemsize)
        self.offsets: dict[Path, int] = {}
        self.sizes: dict[Path, int] = {}
        end = 0
        for dtype, members in groups:
            for path in members:
                self.offsets[path] = end
                self.sizes[path] = schema.leaves[path].shape.numel() * dtype.itemsize
                end += self.sizes[path]
        widest = groups[0][0].itemsize
        self.stride = _stride(end, widest)
        self._shapes = {path: schema.leaves[path].shape for path in self.offsets}
        self._dtypes = {path: schema.leaves[path].dtype for path in self.offsets}
        self._first = groups[0][0]
        self._width = self.stride // widest
        self._model: torch.Tensor | None = None
        self._groups = [self._split_plan(dtype, members) for dtype, members in groups]

    def _split_plan(self, dtype: torch.dtype, members: list[Path]) -> tuple[Any, ...]:
        """Return the plan by which ``split`` makes the leaves of one dtype.

        Returns:
            The dtype, the sizes of the leaves and of the rest of a row, and the number of leaves.
            Last come the places and shapes of leaves that are not vectors.
        """
        unit = dtype.itemsize
        sizes = [self.sizes[path] // unit for path in members]
        rest = (self.stride - self.offsets[members[0]]) // unit - sum(sizes)
        last = members[-1] == list(self.offsets)[-1]
        shaped = [
            (place, self._shapes[path])
            for place, path in enumerate(members)
            if len(self._shapes[path]) != 1
        ]
        return dtype, sizes if last and not rest else [*sizes, rest], len(members), shaped

    @property
    def word(self) -> torch.dtype:
        """The widest integer dtype whose size divides ``stride``, for copies of records."""
        return next(w for w in (torch.int64, torch.int32, torch.int16, torch.uint8)
                    if self.stride % w.itemsize == 0)  # fmt: skip

    def views(
        self, block: torch.Tensor, paths: Iterable[Path] | None = None
    ) -> dict[Path, torch.Tensor]:
        """Return views of all or some leaves of a block uint8 ``[*batch, stride]``, by path."""
        return {
            path: field_view(block, self.offsets[path], self._dtypes[path], self._shapes[path])
            for path in (self.offsets if paths is None else paths)
        }

    def pack(self, leaves: Mapping[Path, torch.Tensor], *, pinned: bool) -> torch.Tensor:
        """Copy leaves ``[*batch, *F]`` of one device into new records uint8 ``[*batch, stride]``.

        A device runs one kernel. ``pinned`` puts records of the CPU into pinned memory.
        """
        some = next(iter(self.offsets))
        batch = leaves[some].shape[: leaves[some].ndim - len(self._shapes[some])]
        rows, plain = batch.numel(), [as_plain(leaves[path]).contiguous() for path in self.offsets]
        shape, device, sizes = (rows, self.stride), plain[0].device, [*self.sizes.values()]
        block = torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
        if block.is_cpu:
            base = block.data_ptr()
            bases = [base + offset for offset in self.offsets.values()]
            table = native.Table(bases, [self.stride] * len(bases), sizes, rows)
            table.scatter_ring(0, rows, 0, [leaf.data_ptr() for leaf in plain], 1)
        else:
            # A dimension of size 1 may have any stride, with which a tensor has no view as bytes.
            flat = (
                leaf.as_strided((rows, leaf.numel() // rows), (leaf.numel() // rows, 1))
                for leaf in plain
            )
            parts = [leaf.view(torch.uint8) for leaf in flat]
            parts.append(parts[0].new_empty((rows, self.stride - sum(sizes))))  # the padding
            torch.cat(parts, 1, out=block)
        return block.view(*batch, self.stride)

    def new_block(self, rows: int, memory: BatchMemory) -> torch.Tensor:
        """Return uninitialised records for ``split``, on the CPU.

        Large blocks are in ``memory``, which reuses that of earlier batches.
        """
        if rows * self.stride >= REUSED_FROM:
            return memory.new((rows, self._width), self._first)
        model = self._model  # another thread may replace it
        if model is not None and model.shape[0] == rows:
            return torch.empty_like(model)
        # The device is given, because torch.empty would use the caller's default device.
        block = torch.empty((rows, self._width), dtype=self._first, device="cpu")
        if rows <= _MODEL_ROWS:
            self._model = torch.empty_like(block)
        return block

    def as_block(self, words: torch.Tensor) -> torch.Tensor:
        """Return new records ``[B, stride]`` of any dtype in the form for ``split``."""
        return words.view(self._first)

    def split(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Split new records into leaves, in the order of ``offsets``.

        The leaves share the block's memory, but each is a separate tensor for autograd, with a
        separate version counter.

        Cost: one operation per dtype, and one per leaf that is not a vector.
        """
        leaves: list[torch.Tensor] = []
        rest = block
        for dtype, parts, count, shaped in self._groups:
            rows = rest if dtype is rest.dtype else rest.view(dtype)
            pieces = torch.unsafe_split_with_sizes(rows, parts, 1)
            rest, first = pieces[-1], len(leaves)
            leaves += pieces[:count]
            for place, shape in shaped:
                at = first + place
                leaves[at] = _unsafe_view(leaves[at], [rows.shape[0], *shape])
        return leaves

    def __len__(self) -> int:
        return len(self.offsets)


def field_view(
    block: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    """Return a view of the values ``[*batch, *F]`` of one leaf of a block of records.

    Args:
        block: uint8 ``[*batch, stride]``. Its address, ``offset`` and ``stride`` are multiples of
            the size of a value.
        offset: first byte of the leaf in a record.
        dtype: the dtype of the leaf.
        shape: the shape of the leaf, ``F``.
    """
    inner, step = [], 1
    for size in reversed(shape):
        inner.append(step)
        step *= size
    row = block.view(dtype)
    outer = list(row.stride()[:-1])
    for dim in reversed(range(len(outer))):
        if row.shape[dim] > 1:
            break
        outer[dim] = step  # for a dimension of size 1, the stride of a contiguous tensor
    return row.as_strided(
        [*block.shape[:-1], *shape],
        [*outer, *reversed(inner)],
        row.storage_offset() + offset // dtype.itemsize,
    )


def _stride(nbytes: int, widest: int) -> int:
    """Return the bytes from one record to the next, with at most 5 % of padding.

    An aligned record spans fewer cache lines. Each cache line costs a random read.
    """
    for alignment in (64, 32, 16, 8):
        padded = -(-nbytes // alignment) * alignment
        if alignment > widest and padded * 20 <= nbytes * 21:
            return padded
    return -(-nbytes // widest) * widest


_unsafe_view: Any = torch.ops.aten._unsafe_view.default


def plan_records(schema: Schema) -> RecordLayout | None:
    """Return the layout of the small leaves; None if there are fewer than two.

    The first write fixes the records, so leaves that are added later are in separate columns.
    """
    small = []
    for path, leaf in schema.leaves.items():
        nbytes = leaf.shape.numel() * leaf.dtype.itemsize
        if 0 < nbytes < WIDE_BYTES and not leaf.added:
            small.append(path)
    return RecordLayout(schema, small) if len(small) > 1 else None


def alone(leaves: Mapping[Path, Any], layout: RecordLayout | None) -> list[Path]:
    """Return the leaves that are stored in separate columns."""
    return [path for path in leaves if layout is None or path not in layout.offsets]


@dataclass(frozen=True)
class PackedLeaves:
    """Records, and the offsets of the leaves in them.

    Attributes:
        records: uint8 ``[n, *lanes, stride]``, a tensor or rows in files.
        offsets: first byte of each leaf in a record.
    """

    records: Any
    offsets: Mapping[Path, int]

    def to_state(self, schema: Schema) -> dict[Path, dict[str, Any]]:
        """Return for each leaf, by path, the entry that replaces its column in a save."""
        leaves = schema.leaves
        return {
            path: {
                "field": at,
                "dtype": dtype_name(leaves[path].dtype),
                "shape": list(leaves[path].shape),
            }
            for path, at in self.offsets.items()
        }

    def lie_as(self, layout: RecordLayout | None) -> bool:
        """Return whether records of a layout have the same leaves at the same offsets."""
        return (
            layout is not None
            and layout.stride == self.records.shape[-1]
            and layout.offsets == self.offsets
        )

    def fields(self, records: torch.Tensor, schema: Schema) -> dict[Path, torch.Tensor]:
        """Return views of the leaves of other records with the same offsets."""
        return {
            path: field_view(records, at, schema.leaves[path].dtype, schema.leaves[path].shape)
            for path, at in self.offsets.items()
        }

    def padding(self, schema: Schema) -> int:
        """Return the number of unused bytes at the end of a record."""
        leaves = schema.leaves
        ends = [
            at + leaves[path].shape.numel() * leaves[path].dtype.itemsize
            for path, at in self.offsets.items()
        ]
        return int(self.records.shape[-1]) - max(ends)


def field_of(column: Mapping[str, Any], records: Any) -> Any:
    """Return a leaf of a saved state that is stored in records, as a view of them.

    Args:
        column: an entry of ``PackedLeaves.to_state``.
        records: the records of the state.

    Raises:
        ValueError: the records cannot hold such values.
    """
    dtype, shape, at = dtype_by_name(column.get("dtype")), column.get("shape"), column["field"]
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"expected the shape of a field, got {shape!r}")
    size = dtype.itemsize
    if not isinstance(records, (torch.Tensor, RowChunks)) or records.dtype != torch.uint8:
        raise ValueError(f"expected records of bytes for a field, got {type(records).__name__}")
    stride = records.shape[-1] if len(records.shape) > 1 else 0
    if (
        type(at) is not int
        or at < 0
        or at % size
        or stride % size
        or at + math.prod(shape) * size > stride
    ):
        raise ValueError(
            f"expected {dtype} {shape} at a multiple of {size} in records of {stride} bytes, "
            f"got {at!r}"
        )
    view: Callable[[torch.Tensor], torch.Tensor] = partial(
        _aligned_field, offset=at, dtype=dtype, shape=torch.Size(shape)
    )
    return records.each(view) if isinstance(records, RowChunks) else view(records)


def _aligned_field(
    block: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    if block.numel() and (block.data_ptr() % dtype.itemsize or not block.is_contiguous()):
        raise ValueError(f"expected records at a multiple of {dtype.itemsize} in their file")
    return field_view(block, offset, dtype, shape)
