"""Resolve an index to slots, and compute relations between sets of slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from replaykit._compat import arange, as_tensor
from replaykit.storages.memory import carried


def as_index(index: Any, rows: int) -> int | slice | torch.Tensor:
    """Convert an index of dimension 0 to an int, a slice or an int64 tensor.

    Lists, ranges, NumPy arrays and bool masks (``[rows]``) become tensors. Negative numbers count
    from the end. All numbers of the result are in ``[0, rows)``.

    Raises:
        IndexError: a row is not stored, or a mask has another length.
        TypeError: the object cannot index rows.
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
        tensor = index.cpu()  # for the check of bounds; it can index tensors of any device
    elif isinstance(index, (list, range, np.ndarray)) or (
        isinstance(index, Sequence) and not isinstance(index, (str, bytes, tuple))
    ):
        # NumPy converts any sequence except one of tensors.
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
    """Convert the slots of a low-level write to an int64 vector within ``[0, limit)``.

    Raises:
        IndexError: a slot is outside ``[0, limit)``.
        TypeError: the slots are not integers, or are a mask.
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
    """Raise IndexError if an entry is outside ``[low, high)``. Cost: one sync on CUDA."""
    if not index.numel():
        return
    least, most = (int(value) for value in torch.aminmax(index))
    if least < low or most >= high:
        wrong = least if least < low else most
        raise IndexError(f"expected rows in [{max(low, 0)}, {high}), got {wrong}")


def ravel(index: torch.Tensor, lanes: torch.Size) -> torch.Tensor:
    """Convert coordinates ``[..., ndim]`` to indices of the flattened storage.

    The first coordinate is time, the others are lanes.
    """
    flat = index[..., 0]
    for dim, size in enumerate(lanes, start=1):
        flat = flat * size + index[..., dim]
    return flat


def unravel_index(flat: torch.Tensor, lanes: torch.Size) -> torch.Tensor:
    """Convert indices of the flattened storage to coordinates ``[..., ndim]``.

    This is the inverse of ``ravel``.
    """
    coordinates = []
    for size in reversed(lanes):
        coordinates.append(flat % size)
        flat = torch.div(flat, size, rounding_mode="floor")
    return torch.stack([flat, *reversed(coordinates)], -1)


def selected_elements(index: Any, shape: torch.Size, strides: Sequence[int]) -> torch.Tensor:
    """Return the elements that a valid index selects, in the shape of the selection.

    Args:
        shape, strides: shape and strides of the grid of elements; the strides count elements.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if all(type(part) in (int, slice) for part in parts):
        parts = (*parts, *[slice(None)] * (len(shape) - len(parts)))
        found = torch.zeros((), dtype=torch.int64, device="cpu")
        for part, size, stride in zip(parts, shape, strides, strict=True):
            if isinstance(part, slice):
                chosen = np.arange(*part.indices(size), dtype=np.int64)  # may end before it begins
                found = found[..., None] + torch.from_numpy(chosen) * stride
            else:
                found = found + part % size * stride
        return found
    found = torch.zeros((), dtype=torch.int64, device="cpu")
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        # Indexing an expanded vector allocates memory for the selected elements only.
        coordinate = arange(size).view(-1, *[1] * (len(shape) - dim - 1)).expand(shape)
        found = found + coordinate[index] * stride
    return found


def elements_at(index: Any, rows: int, lanes: torch.Size, time_dim: int) -> torch.Tensor:
    """Return the numbers of the elements that an index of rows selects, int64.

    The index is applied to ``rows`` time slots with lanes, with time along ``time_dim``. The result
    has the shape of the selection.

    Raises:
        IndexError: rows that are not stored.
    """
    shape, strides = [rows, *lanes], [lanes[dim:].numel() for dim in range(len(lanes) + 1)]
    for part in (shape, strides):
        part[0], part[time_dim] = part[time_dim], part[0]
    grid = torch.Size(shape)
    return selected_elements(as_cells(index, grid)[0], grid, strides)


def is_stored(item: Any, length: Any) -> bool | torch.Tensor:
    """Return whether rows are among the first ``length``: bool for an int, bools for a tensor.

    Raises:
        TypeError: ``item`` is neither an int nor an integer tensor.
    """
    if isinstance(item, int) and not isinstance(item, bool):
        return -length <= item < length
    if not isinstance(item, torch.Tensor) or item.dtype == torch.bool or item.is_floating_point():
        raise TypeError(f"expected an int or an integer tensor, got {type(item).__name__}")
    return (item >= 0) & (item < length)


def with_lanes(slots: torch.Tensor, lanes: torch.Size) -> torch.Tensor:
    """Return the coordinates of all rows of time slots ``[K]``, in time-major order.

    Their shape is ``[K * prod(lanes), ndim]``. Without lanes the result is the slots.
    """
    return torch.cartesian_prod(slots, *map(arange, lanes)) if lanes else slots


def check_cells(index: torch.Tensor, shape: torch.Size) -> None:
    """Raise IndexError if coordinates ``[..., ndim]`` are outside ``shape``."""
    if index.shape[-1] != len(shape):
        raise IndexError(f"expected {len(shape)} coordinates, got {index.shape[-1]}")
    for dim, size in enumerate(shape):
        check_range(index[..., dim], 0, size)


def check_no_hole(slots: torch.Tensor, length: int) -> None:
    """Raise RuntimeError if a write of ``slots`` would leave an empty slot below them."""
    fresh = slots[slots >= length].unique()
    if len(fresh) and int(fresh[-1]) != length + len(fresh) - 1:
        raise RuntimeError(
            f"expected no gap after the {length} stored rows, got a write at slot {int(fresh[-1])}"
        )


def distinct_elements(
    index: Any, rows: int, lanes: torch.Size, time_dim: int
) -> tuple[torch.Tensor, slice | torch.Tensor]:
    """Return the elements that an index selects, int64 ``[K]``, each only once.

    If a write repeated rows, chance would decide, for each column, which value is stored.

    Args:
        index: as for ``elements_at``; without lanes, a result of ``as_index``.
        rows, lanes, time_dim: as for ``elements_at``.

    Returns:
        The elements, and their places among the selected rows in flattened order. For a row that is
        selected several times, it is the last place.
    """
    if isinstance(index, torch.Tensor) and not lanes:
        elements = index.reshape(-1)
    else:
        elements = elements_at(index, rows, lanes, time_dim).reshape(-1)
    parts = index if isinstance(index, tuple) else (index,)
    repeats = any(isinstance(part, torch.Tensor) for part in parts)  # slices never do
    last = last_occurrences(elements) if repeats else slice(None)
    return elements[last], last


def last_occurrences(slots: torch.Tensor) -> torch.Tensor | slice:
    """Return the last place of each distinct slot, rising.

    The result is a full slice if all slots are distinct.
    """
    values, inverse = slots.unique(return_inverse=True)
    if len(values) == len(slots):
        return slice(None)
    last = torch.zeros_like(values).scatter_reduce_(
        0, inverse, arange(len(slots)), "amax", include_self=False
    )
    return last.sort().values


def as_cells(index: Any, shape: torch.Size) -> tuple[Any, torch.Size]:
    """Convert an index of several dimensions for use with torch on all columns.

    Lists, ranges and NumPy arrays become tensors, and masks become the coordinates that they
    select. The conversion happens once, not for every column.

    Returns:
        The index, and the shape that it selects.

    Raises:
        IndexError: a row is outside the shape, or a mask has another shape.
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
    # A uint8 index holds numbers here, but torch would treat it as a mask.
    return tensor if tensor.dtype == torch.bool else tensor.to(torch.int64)


def _without_ellipsis(parts: list[Any], dims: int) -> list[Any]:
    """Replace an Ellipsis by slices, because columns have feature dimensions, too."""
    at = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(at) != 1:
        return parts
    taken = sum(p.ndim if _is_mask(p) else p is not None and p is not Ellipsis for p in parts)
    return [*parts[: at[0]], *[slice(None)] * (dims - taken), *parts[at[0] + 1 :]]


def _is_mask(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype == torch.bool


def indexed_shape(shape: torch.Size, index: Any) -> torch.Size:
    """Return the shape of an indexed tensor, without an allocation of its values."""
    # A tensor of one byte is expanded to the whole shape, so that advanced indexing checks bounds.
    return torch.empty(1, dtype=torch.bool, device="cpu").expand(shape)[index].shape


def order_of_all(at: Any, batch: torch.Size, shape: torch.Size) -> slice | torch.Tensor | None:
    """Return the place of each row among the rows that an index selects.

    Args:
        at: an index of the rows, as ``as_index`` or ``as_cells`` returns it.
        batch: the shape of the selection.
        shape: the shape of all rows.

    Returns:
        A full slice if the index selects the rows in their order. Else the places of the flattened
        rows, int64 ``[N]``. None if the index does not select each row once.

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
    """Return the values of selected rows in the order of all rows, ``[*shape, *F]``.

    Args:
        values: the values of the selected rows, ``[*batch, *F]``.
        order: the result of ``order_of_all`` for the index.

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


Array = np.ndarray[Any, Any]
Numbers = TypeVar("Numbers", Array, torch.Tensor)

_WIDEST = 16
"""Most bytes of a lookup table per number. For a wider range, the numbers are sorted instead, which
takes about ten times as long."""


def agreed(*tables: Array) -> Array:
    """Return the first of several equal arrays, int64 ``[K]``.

    Raises:
        ValueError: the arrays differ.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.indexing import agreed
        >>> agreed(np.array([5, 3]), np.array([5, 3]))
        array([5, 3])
    """
    if not all(np.array_equal(table, tables[0]) for table in tables[1:]):
        raise ValueError(f"expected equal tables for all columns, got {len(tables)} that differ")
    return tables[0]


def rising(numbers: Array) -> Array:
    """Return the distinct integers of ``[K]`` in ascending order.

    Cost: O(K log K), or O(K) for integers that rise already. A sort of a few hundred numbers takes
    a quarter of the time of ``np.unique``, which may hash them first.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.indexing import rising
        >>> rising(np.array([7, 5, 7]))
        array([5, 7])
    """
    if (numbers[1:] > numbers[:-1]).all():
        return numbers
    ordered = np.sort(numbers)
    rises = ordered[1:] > ordered[:-1]
    return ordered if rises.all() else ordered[np.concatenate([[True], rises])]


def all_distinct(numbers: Array) -> bool:
    """Return whether all numbers ``[K]`` differ.

    Cost: O(K) if they are close together.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.indexing import all_distinct
        >>> all_distinct(np.array([7, 5, 6])), all_distinct(np.array([7, 5, 7]))
        (True, False)
    """
    if not len(numbers):
        return True
    lowest, highest = int(numbers.min()), int(numbers.max())
    if highest - lowest >= _WIDEST * len(numbers):
        return len(np.unique(numbers)) == len(numbers)
    table = np.zeros(highest - lowest + 1, bool)
    table[numbers - lowest] = True
    return int(np.count_nonzero(table)) == len(numbers)


def rising_below(stop: int, numbers: Numbers) -> Numbers:
    """Return ``numbers`` ``[K]`` after a check that they rise within ``[0, stop)``.

    Raises:
        ValueError: the numbers do not rise, or are outside.

    Example:
        >>> import numpy as np
        >>> from replaykit.storages.indexing import rising_below
        >>> rising_below(8, np.array([5, 6, 7]))
        array([5, 6, 7])
    """
    if not len(numbers):
        return numbers
    first, last = int(numbers[0]), int(numbers[-1])
    falling = int((numbers[1:] <= numbers[:-1]).sum())
    if falling or first < 0 or last >= stop:
        raise ValueError(
            f"expected rising elements of a column below {stop}, got {len(numbers)} from {first} "
            f"to {last}, of which {falling} do not rise"
        )
    return numbers


def elements_of(slots: Array, lanes: int) -> Array:
    """Return the flat indices of the rows of all lanes in slots, int64 ``[K * lanes]``."""
    if lanes == 1:
        return slots
    return np.asarray((slots[:, None] * lanes + np.arange(lanes)).reshape(-1))
