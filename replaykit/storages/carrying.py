"""Dtypes that few operations of torch know, moved as others of their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

from replaykit.checkpoint import RowChunks

__all__ = ["carried", "carried_rows", "picked", "picked_views"]

_Key = TypeVar("_Key")

_NATIVE = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    }
)  # fmt: skip
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a view of its bytes as a dtype that every torch operation knows."""
    if tensor.dtype in _NATIVE:
        return tensor
    return tensor.view(_CARRIERS[tensor.dtype.itemsize])


def carried_rows(
    leaves: Mapping[_Key, torch.Tensor], at: slice | torch.Tensor
) -> dict[_Key, torch.Tensor]:
    """Returns some rows of leaves, in dtypes that every torch operation knows."""
    return {key: carried(leaf)[at] for key, leaf in leaves.items()}


def picked(rows: Any, kept: torch.Tensor | slice) -> torch.Tensor:
    """Returns some of the rows of a tensor or of what reads like one, in a dtype that moves."""
    if isinstance(rows, torch.Tensor):
        whole = isinstance(kept, slice) and kept.start in (None, 0) and kept.stop is None
        return carried(rows) if whole else carried(rows)[kept]
    return carried(rows[kept])  # rows in files


def picked_views(rows: Any, kept: torch.Tensor | slice) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields what ``picked`` returns as it lies, stretch by stretch, nothing copied of a slice: how
    many rows lie before, and views of rows of one piece."""
    if isinstance(kept, slice) and isinstance(rows, RowChunks):
        for first, view in rows.views(kept.start, kept.stop):
            yield first - kept.start, carried(view)
    else:
        yield 0, picked(rows, kept)
