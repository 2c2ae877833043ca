"""What users index with, brought to a form that storages read and write at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = [
    "as_index",
    "as_slots",
    "check_cells",
    "check_no_hole",
    "check_range",
    "indexed_shape",
    "last_occurrences",
    "mask_to_positions",
    "ravel",
    "unravel_index",
    "with_lanes",
]


def as_index(index: Any, rows: int) -> int | slice | torch.Tensor:
    """Brings an index of dimension 0 to an int, a slice or an int64 tensor, all within ``rows``.

    Lists, ranges, NumPy arrays and bool masks (``[rows]``) become tensors; negative numbers count
    from the end.

    Raises:
        IndexError: a position outside the stored rows, or a mask of another length.
        TypeError: not something that indexes rows.
    """
    if isinstance(index, (bool, np.bool_)):
        raise TypeError(f"expected an index of rows, got {index!r}")
    if isinstance(index, (int, np.integer)):
        position = int(index)
        if not -rows <= position < rows:
            raise IndexError(f"expected a row in [0, {rows}), got {position}")
        return position % rows
    if index is Ellipsis:
        return slice(0, rows, 1)
    if isinstance(index, slice):
        return slice(*index.indices(rows)) if (index.step or 1) > 0 else _reversed(index, rows)
    tensor = _as_tensor(index)
    if tensor.dtype == torch.bool:
        if tensor.shape != (rows,):
            raise IndexError(f"expected a mask of shape [{rows}], got {list(tensor.shape)}")
        return tensor.nonzero().squeeze(-1)
    tensor = tensor.to(torch.int64)
    if tensor.ndim == 0:
        return as_index(int(tensor), rows)
    check_range(tensor, -rows, rows)
    return torch.where(tensor < 0, tensor + rows, tensor)


def _reversed(index: slice, rows: int) -> torch.Tensor:
    return torch.arange(rows)[list(range(*index.indices(rows)))]


def _as_tensor(index: Any) -> torch.Tensor:
    if isinstance(index, torch.Tensor):
        tensor = index
    elif isinstance(index, (list, range, np.ndarray)) or (
        isinstance(index, Sequence) and not isinstance(index, (str, bytes, tuple))
    ):
        tensor = torch.as_tensor(np.asarray(index) if len(index) else [], dtype=None)
        tensor = tensor.to(torch.int64) if not len(index) else tensor
    else:
        raise TypeError(
            f"expected an int, slice, list, LongTensor or bool mask, got {type(index).__name__}"
        )
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"expected an integer or bool index, got dtype {tensor.dtype}")
    return tensor


def as_slots(cursor: Any, limit: int) -> torch.Tensor:
    """Brings the positions of a low-level write to an int64 vector within ``[0, limit)``.

    Raises:
        IndexError: a position outside ``[0, limit)``.
    """
    if isinstance(cursor, slice):
        cursor = range(*cursor.indices(limit))
    if isinstance(cursor, (int, np.integer)) and not isinstance(cursor, bool):
        cursor = [int(cursor)]
    if isinstance(cursor, tuple):
        cursor = list(cursor)
    slots = _as_tensor(cursor).to(torch.int64).reshape(-1).cpu()
    check_range(slots, 0, limit)
    return slots


def check_range(index: torch.Tensor, low: int, high: int) -> None:
    """Raises IndexError where an entry lies outside ``[low, high)``. On cuda: one sync."""
    if not index.numel():
        return
    least, most = (int(value) for value in torch.aminmax(index))
    if least < low or most >= high:
        wrong = least if least < low else most
        raise IndexError(f"expected rows in [{max(low, 0)}, {high}), got {wrong}")


def ravel(index: torch.Tensor, lanes: torch.Size) -> torch.Tensor:
    """Coordinates ``[..., ndim]`` (time, lane, ...) to positions in the flattened storage."""
    flat = index[..., 0]
    for dim, size in enumerate(lanes, start=1):
        flat = flat * size + index[..., dim]
    return flat


def unravel_index(flat: torch.Tensor, lanes: torch.Size) -> torch.Tensor:
    """Positions in the flattened storage to coordinates ``[..., ndim]``; inverse of ``ravel``."""
    coordinates = []
    for size in reversed(lanes):
        coordinates.append(flat % size)
        flat = torch.div(flat, size, rounding_mode="floor")
    return torch.stack([flat, *reversed(coordinates)], -1)


def with_lanes(slots: torch.Tensor, lanes: torch.Size) -> torch.Tensor:
    """Coordinates ``[K * prod(lanes), ndim]`` of all cells of time slots ``[K]``, time-major.

    Without lanes: the slots themselves.
    """
    if not lanes:
        return slots
    cells = torch.arange(lanes.numel())
    return unravel_index((slots[:, None] * lanes.numel() + cells).flatten(), lanes)


def check_cells(index: torch.Tensor, shape: torch.Size) -> None:
    """Raises IndexError where coordinates ``[..., ndim]`` lie outside ``shape``."""
    if index.shape[-1] != len(shape):
        raise IndexError(f"expected {len(shape)} coordinates, got {index.shape[-1]}")
    for dim, size in enumerate(shape):
        check_range(index[..., dim], 0, size)


def check_no_hole(slots: torch.Tensor, length: int) -> None:
    """Raises RuntimeError where writing ``slots`` leaves one below them without a record."""
    fresh = slots[slots >= length].unique()
    if len(fresh) and int(fresh[-1]) != length + len(fresh) - 1:
        raise RuntimeError(
            f"expected no gap after the {length} stored rows, got a write at slot {int(fresh[-1])}"
        )


def last_occurrences(slots: torch.Tensor) -> torch.Tensor | slice:
    """Where each distinct slot occurs last, rising; a full slice if none occurs twice."""
    values, inverse = slots.unique(return_inverse=True)
    if len(values) == len(slots):
        return slice(None)
    last = torch.zeros_like(values).scatter_reduce_(
        0, inverse, torch.arange(len(slots)), "amax", include_self=False
    )
    return last.sort().values


def mask_to_positions(index: Any) -> Any:
    """Replaces bool masks of a multi-dimensional index by the positions they select."""
    if isinstance(index, tuple):
        parts: list[Any] = []
        for part in index:
            replaced = mask_to_positions(part)
            parts.extend(replaced if isinstance(replaced, tuple) else (replaced,))
        return tuple(parts)
    if isinstance(index, (list, range, np.ndarray)):
        index = _as_tensor(index)
    if isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        return index.nonzero(as_tuple=True)
    return index


def indexed_shape(shape: torch.Size, index: Any) -> torch.Size:
    """Shape that a tensor of that shape has after indexing; costs no memory for the values."""
    return (
        torch.empty(shape, device="meta")[index].shape if _on_meta(index) else _probe(shape, index)
    )


def _on_meta(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(part, torch.Tensor) for part in parts)


def _probe(shape: torch.Size, index: Any) -> torch.Size:
    # One byte, seen as a tensor of the whole shape: advanced indexing then checks its bounds.
    return torch.empty(1, dtype=torch.bool).expand(shape)[index].shape
