"""Leaves that lie side by side in records, as they travel between storages and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from replaykit._compat import dtype_by_name, dtype_name
from replaykit.checkpoint import RowChunks
from replaykit.schema import Schema
from replaykit.storages.records import RecordLayout, field_view
from replaykit.structure import Path

__all__ = ["PackedLeaves", "field_of"]


@dataclass(frozen=True)
class PackedLeaves:
    """Records, and where the leaves lie in them.

    Attributes:
        records: uint8 ``[n, *lanes, stride]``: a tensor, or what reads like one in files.
        offsets: first byte of each leaf in a record.
    """

    records: Any
    offsets: Mapping[Path, int]

    def to_state(self, schema: Schema) -> dict[Path, dict[str, Any]]:
        """Returns by path what a saved state has instead of a column."""
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
        """Whether records of a layout have the same leaves at the same places."""
        return (
            layout is not None
            and layout.stride == self.records.shape[-1]
            and layout.offsets == self.offsets
        )

    def fields(self, records: torch.Tensor, schema: Schema) -> dict[Path, torch.Tensor]:
        """Returns the leaves of records that lie as these do, as views."""
        return {
            path: field_view(records, at, schema.leaves[path].dtype, schema.leaves[path].shape)
            for path, at in self.offsets.items()
        }

    def padding(self, schema: Schema) -> int:
        """Bytes at the end of a record in which no leaf lies."""
        leaves = schema.leaves
        ends = [
            at + leaves[path].shape.numel() * leaves[path].dtype.itemsize
            for path, at in self.offsets.items()
        ]
        return int(self.records.shape[-1]) - max(ends)


def field_of(column: Mapping[str, Any], records: Any) -> Any:
    """Returns the column of a leaf that a saved state says lies in records, as views of them.

    Args:
        column: what ``PackedLeaves.to_state`` gave.
        records: those of the state.

    Raises:
        ValueError: there are no such values in the records.
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
