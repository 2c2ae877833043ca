"""Whether an index names all rows, whatever its form, and values in the order of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replaykit._compat import arange, as_tensor
from replaykit.storages.tensor_bytes import carried

__all__ = [
    "as_cells",
    "as_index",
    "as_slots",
    "check_cells",
    "check_no_hole",
    "check_range",
    "elements_at",
    "in_order",
    "indexed_shape",
    "last_occurrences",
    "order_of_all",
    "ravel",
    "selected_elements",
    "unravel_index",
    "with_lanes",
    "without_repeats",
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
        span = range(*index.indices(rows))
        if span.step > 0:
            return slice(span.start, span.stop, span.step)
        # torch has no slices that run backwards.
        return arange(span.start, span.stop, span.step) if span else arange(0)
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


def _as_tensor(index: Any) -> torch.Tensor:
    if isinstance(index, torch.Tensor):
        tensor = index.cpu()  # bounds are checked there; it may index tensors of any device
    elif isinstance(index, (list, range, np.ndarray)) or (
        isinstance(index, Sequence) and not isinstance(index, (str, bytes, tuple))
    ):
        # NumPy takes any sequence, but not one of tensors.
        of_tensors = isinstance(index, list) and any(isinstance(i, torch.Tensor) for i in index)
        numbers = index if of_tensors else np.asarray(index)
        tensor = as_tensor(numbers) if len(index) else arange(0)
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
        IndexError: a position outside ``[0, limit)``. TypeError: not integers; a mask is none.
    """
    if isinstance(cursor, slice):
        cursor = range(*cursor.indices(limit))
    if isinstance(cursor, (int, np.integer)) and not isinstance(cursor, bool):
        cursor = [int(cursor)]
    if isinstance(cursor, tuple):
        cursor = list(cursor)
    positions = _as_tensor(cursor)
    if positions.dtype == torch.bool:
        raise TypeError("expected integer positions, got a bool mask; mask.nonzero() gives them")
    slots = positions.to(torch.int64).reshape(-1).cpu()
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


def selected_elements(index: Any, shape: torch.Size, strides: Sequence[int]) -> torch.Tensor:
    """Numbers of the elements that a valid index selects, in the shape that it selects.

    Args:
        shape, strides: those of the grid of elements; the strides count elements.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if all(type(part) in (int, slice) for part in parts):
        parts = (*parts, *[slice(None)] * (len(shape) - len(parts)))
        found = torch.zeros((), dtype=torch.int64, device="cpu")
        for part, size, stride in zip(parts, shape, strides, strict=True):
            if isinstance(part, slice):
                found = found[..., None] + arange(*part.indices(size)) * stride
            else:
                found = found + part % size * stride
        return found
    found = torch.zeros((), dtype=torch.int64, device="cpu")
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        # An expanded vector: indexing it takes memory for what is selected only.
        coordinate = arange(size).view(-1, *[1] * (len(shape) - dim - 1)).expand(shape)
        found = found + coordinate[index] * stride
    return found


def elements_at(index: Any, rows: int, lanes: torch.Size, time_dim: int) -> torch.Tensor:
    """Numbers of the elements that an index of ``rows`` time slots of lanes selects, in the shape
    that it selects, time lying along ``time_dim``: int64.

    Raises:
        IndexError: rows that are not stored.
    """
    shape, strides = [rows, *lanes], [lanes[dim:].numel() for dim in range(len(lanes) + 1)]
    for part in (shape, strides):
        part[0], part[time_dim] = part[time_dim], part[0]
    grid = torch.Size(shape)
    return selected_elements(as_cells(index, grid)[0], grid, strides)


def with_lanes(slots: torch.Tensor, lanes: torch.Size) -> torch.Tensor:
    """Coordinates ``[K * prod(lanes), ndim]`` of all cells of time slots ``[K]``, time-major.

    Without lanes: the slots themselves.
    """
    if not lanes:
        return slots
    cells = arange(lanes.numel())
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


def without_repeats(
    index: Any, shape: torch.Size
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor] | None:
    """Of an index that selects some rows more than once, what selects each of them once.

    Which of the values of one row is stored would be chance, and another one for every column.

    Returns:
        The index, one tensor a dimension, and which of the selected rows (flattened, in order) it
        stands for: the last one of each. None where no row is selected twice.
    """
    if _on_meta(index):
        return None
    flat = torch.zeros(1, dtype=torch.int64, device="cpu").expand(shape)[index]
    for dim, size in enumerate(shape):
        # An expanded vector: indexing it takes memory for what is selected only.
        coordinate = arange(size).view(-1, *[1] * (len(shape) - dim - 1)).expand(shape)
        flat = flat * size + coordinate[index]
    flat = flat.reshape(-1)
    last = last_occurrences(flat)
    if isinstance(last, slice):
        return None
    return unravel_index(flat[last], shape[1:]).unbind(-1), last


def last_occurrences(slots: torch.Tensor) -> torch.Tensor | slice:
    """Where each distinct slot occurs last, rising; a full slice if none occurs twice."""
    values, inverse = slots.unique(return_inverse=True)
    if len(values) == len(slots):
        return slice(None)
    last = torch.zeros_like(values).scatter_reduce_(
        0, inverse, arange(len(slots)), "amax", include_self=False
    )
    return last.sort().values


def as_cells(index: Any, shape: torch.Size) -> tuple[Any, torch.Size]:
    """Brings an index of rows of several dimensions to what torch indexes every column with.

    Lists, ranges and NumPy arrays become tensors, masks the positions that they select: once, not
    for every column. Returns it with the shape that it selects.

    Raises:
        IndexError: a position outside the shape, or a mask of another one.
    """
    parts = [_as_part(part) for part in (index if isinstance(index, tuple) else (index,))]
    if isinstance(index, tuple):
        parts = _without_ellipsis(parts, len(shape))
    index = tuple(parts) if isinstance(index, tuple) else parts[0]
    selected = indexed_shape(shape, index)
    if not any(_is_mask(part) for part in parts):
        return index, selected
    positions: list[Any] = []
    for part in parts:
        positions.extend(part.nonzero(as_tuple=True) if _is_mask(part) else (part,))
    return tuple(positions), selected


def _as_part(part: Any) -> Any:
    if not isinstance(part, (torch.Tensor, list, range, np.ndarray)):
        return part
    tensor = _as_tensor(part)
    # Bytes are numbers here; torch would take them for a mask.
    return tensor if tensor.dtype == torch.bool else tensor.to(torch.int64)


def _without_ellipsis(parts: list[Any], dims: int) -> list[Any]:
    """Writes an Ellipsis out: columns have dimensions of their own behind those of the rows."""
    at = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(at) != 1:
        return parts
    taken = sum(p.ndim if _is_mask(p) else p is not None and p is not Ellipsis for p in parts)
    return [*parts[: at[0]], *[slice(None)] * (dims - taken), *parts[at[0] + 1 :]]


def _is_mask(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype == torch.bool


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
    return torch.empty(1, dtype=torch.bool, device="cpu").expand(shape)[index].shape


def order_of_all(at: Any, batch: torch.Size, shape: torch.Size) -> slice | torch.Tensor | None:
    """Find where each row lies among those that an index names.

    Args:
        at: an index of the rows, as ``as_index`` or ``as_cells`` gives it.
        batch: the shape that it selects.
        shape: that of all rows.

    Returns:
        A full slice where the index names the rows in their order, else int64 ``[N]`` of the
        flattened rows. None where it does not name each row once.

    Cost: O(1) for slices, else one pass over the index.

    Example:
        >>> import torch
        >>> from replaykit.storages.indexing import order_of_all
        >>> three = torch.Size([3])
        >>> order_of_all(torch.tensor([2, 0, 1]), three, three)
        tensor([1, 2, 0])
        >>> order_of_all(torch.tensor([2, 0, 0]), three, three) is None
        True
    """
    count = shape.numel()
    if not count or batch.numel() != count:
        return None
    parts = at if isinstance(at, tuple) else (at,)
    if all(
        part is Ellipsis or (isinstance(part, slice) and part.indices(size) == (0, size, 1))
        for part, size in zip(parts, shape, strict=False)
    ):
        return slice(None)
    strides = [shape[dim + 1 :].numel() for dim in range(len(shape))]
    numbers = selected_elements(at, shape, strides).reshape(-1)
    order = torch.full((count,), -1, dtype=torch.int64, device="cpu")
    order[numbers] = arange(count)
    if bool((order < 0).any()):
        return None
    return slice(None) if torch.equal(numbers, arange(count)) else order


def in_order(
    values: torch.Tensor, order: slice | torch.Tensor, batch: torch.Size, shape: torch.Size
) -> torch.Tensor:
    """Lay values ``[*batch, *F]`` of the rows that an index names out as all rows ``[*shape, *F]``.

    Args:
        order: what ``order_of_all`` gave.

    Example:
        >>> import torch
        >>> from replaykit.storages.indexing import in_order
        >>> three = torch.Size([3])
        >>> in_order(torch.tensor([7, 8, 9]), torch.tensor([1, 2, 0]), three, three)
        tensor([8, 9, 7])
    """
    features = values.shape[len(batch) :]
    flat = values.reshape(shape.numel(), *features)
    if isinstance(order, torch.Tensor):
        flat = carried(flat)[order].view(flat.dtype)
    return flat.reshape(shape + features)
