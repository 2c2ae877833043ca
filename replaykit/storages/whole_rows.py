"""Whether an index names all rows, whatever its form, and values in the order of the rows."""

from __future__ import annotations

from typing import Any

import torch

from replaykit._compat import arange
from replaykit.storages.carrying import carried
from replaykit.storages.indexing import selected_elements

__all__ = ["in_order", "order_of_all"]


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
        >>> from replaykit.storages.whole_rows import order_of_all
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
        >>> from replaykit.storages.whole_rows import in_order
        >>> three = torch.Size([3])
        >>> in_order(torch.tensor([7, 8, 9]), torch.tensor([1, 2, 0]), three, three)
        tensor([8, 9, 7])
    """
    features = values.shape[len(batch) :]
    flat = values.reshape(shape.numel(), *features)
    if isinstance(order, torch.Tensor):
        flat = carried(flat)[order].view(flat.dtype)
    return flat.reshape(shape + features)
