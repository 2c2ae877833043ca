"""Records: the small columns of a storage side by side in one row, so that a sample is one gather.

A random read costs a miss of the cache, hardly its bytes: ten columns of a small transition are ten
misses a row, one record of them is two or three.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from replaykit.schema import Schema
from replaykit.structure import Path

__all__ = ["WIDE_BYTES", "RecordLayout", "alone", "field_view", "plan_records"]

WIDE_BYTES = 512
"""From this size on a leaf is bound by bandwidth: it gains nothing from a record and lies alone."""


_MODEL_ROWS = 4096
"""Up to this many rows a block is kept as the model of the next: half the time of describing it."""


class RecordLayout:
    """Where each small leaf lies in a record of ``stride`` bytes.

    Leaves of one dtype are neighbours, wider dtypes come first: every field is aligned, padding
    is at the end and at most 5 % or an element, and one view and one split per dtype take a block
    of records apart.

    Attributes:
        offsets: first byte of each leaf.
        sizes: its bytes.
        stride: bytes of a record.
    """

    def __init__(self, schema: Schema, paths: list[Path]) -> None:
        by_dtype: dict[torch.dtype, list[Path]] = {}
        for path in paths:
            by_dtype.setdefault(schema.leaves[path].dtype, []).append(path)
        # Stable: leaves of one dtype stay in the schema's order.
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
        """The dtype, the sizes to split a row into, where the first leaf is, and the shapes of
        leaves that are not vectors."""
        unit = dtype.itemsize
        sizes = [self.sizes[path] // unit for path in members]
        before = self.offsets[members[0]] // unit
        after = self.stride // unit - before - sum(sizes)
        parts = [before] * bool(before) + sizes + [after] * bool(after)
        shaped = [
            (place, self._shapes[path])
            for place, path in enumerate(members)
            if len(self._shapes[path]) != 1
        ]
        taken = slice(int(bool(before)), int(bool(before)) + len(members))
        return dtype, parts, taken, shaped

    @property
    def word(self) -> torch.dtype:
        """The widest integer that records are whole numbers of: what torch moves them as."""
        return next(w for w in (torch.int64, torch.int32, torch.int16, torch.uint8)
                    if self.stride % w.itemsize == 0)  # fmt: skip

    def views(self, block: torch.Tensor) -> dict[Path, torch.Tensor]:
        """Returns the leaves ``[*batch, *F]`` of a block uint8 ``[*batch, stride]``, as views."""
        return {
            path: field_view(block, offset, self._dtypes[path], self._shapes[path])
            for path, offset in self.offsets.items()
        }

    def new_block(self, rows: int) -> torch.Tensor:
        """Returns uninitialised records for ``split``, on the CPU."""
        model = self._model  # another thread may exchange it
        if model is not None and model.shape[0] == rows:
            return torch.empty_like(model)
        # A default device of the caller's, which torch.empty would follow, has no say here.
        block = torch.empty((rows, self._width), dtype=self._first, device="cpu")
        if rows <= _MODEL_ROWS:
            self._model = torch.empty_like(block)
        return block

    def as_block(self, words: torch.Tensor) -> torch.Tensor:
        """Returns fresh records ``[B, stride]`` of any dtype in the form that ``split`` takes."""
        return words.view(self._first)

    def split(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Takes fresh records apart into leaves, in the order of ``offsets``.

        The leaves share the block's memory and nothing else: each is a tensor of its own to
        autograd, with its own version. Cost: one operation a dtype, and one a leaf that is not a
        vector.
        """
        leaves: list[torch.Tensor] = []
        for dtype, parts, taken, shaped in self._groups:
            rows = block if dtype is block.dtype else block.view(dtype)
            pieces = torch.unsafe_split_with_sizes(rows, parts, 1)[taken]
            if shaped:
                pieces = list(pieces)
                for place, shape in shaped:
                    pieces[place] = _unsafe_view(pieces[place], [rows.shape[0], *shape])
            leaves += pieces
        return leaves

    def __len__(self) -> int:
        return len(self.offsets)


def field_view(
    block: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size
) -> torch.Tensor:
    """Returns the values ``[*batch, *F]`` of one leaf of a block of records, as a view.

    Args:
        block: uint8 ``[*batch, stride]``; its start, ``offset`` and ``stride`` are multiples of the
            size of a value.
        offset: first byte of the leaf in a record.
        shape: of the leaf, ``F``.
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
        outer[dim] = step  # a single row is viewed as if it were alone
    return row.as_strided(
        [*block.shape[:-1], *shape],
        [*outer, *reversed(inner)],
        row.storage_offset() + offset // dtype.itemsize,
    )


def _stride(nbytes: int, widest: int) -> int:
    """Bytes from one record to the next: as well aligned as 5 % of padding allows.

    Fewer lines of the cache are cut, which a random read pays for one by one.
    """
    for alignment in (64, 32, 16, 8):
        padded = -(-nbytes // alignment) * alignment
        if alignment > widest and padded * 20 <= nbytes * 21:
            return padded
    return -(-nbytes // widest) * widest


_unsafe_view: Any = torch.ops.aten._unsafe_view.default


def plan_records(schema: Schema) -> RecordLayout | None:
    """Returns the layout of the leaves that are small; None where there are not two of them.

    Leaves that were added lie alone: records are laid out by the first write.
    """
    small = []
    for path, leaf in schema.leaves.items():
        nbytes = leaf.shape.numel() * leaf.dtype.itemsize
        if 0 < nbytes < WIDE_BYTES and not leaf.added:
            small.append(path)
    return RecordLayout(schema, small) if len(small) > 1 else None


def alone(leaves: Mapping[Path, Any], layout: RecordLayout | None) -> list[Path]:
    """Returns the leaves that lie in columns of their own."""
    return [path for path in leaves if layout is None or path not in layout.offsets]
