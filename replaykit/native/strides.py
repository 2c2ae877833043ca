"""How the rows of a tensor lie in memory: what the core is told beside an address."""

from __future__ import annotations

import torch

__all__ = ["row_stride"]


def row_stride(tensor: torch.Tensor, ndim: int) -> int | None:
    """Bytes between elements of a column ``[slots, *lanes, *F]``, where ``[slots, *lanes]`` are its
    first ``ndim`` dimensions; those of a slot follow each other.

    None where they are not equally far apart, or where the values of one do not lie in one piece.

    Example:
        >>> import torch
        >>> from replaykit.native.strides import row_stride
        >>> column = torch.zeros(10, 4, 3, dtype=torch.float32)
        >>> row_stride(column, 1), row_stride(column, 2), row_stride(column[..., :2], 1)
        (48, 12, None)
    """
    shape, strides = tensor.shape, tensor.stride()
    step = 1
    for size, stride in zip(reversed(shape[ndim:]), reversed(strides[ndim:]), strict=True):
        if size > 1 and stride != step:
            return None
        step *= size
    between, reach = tensor.dtype.itemsize * step, None
    for size, stride in zip(reversed(shape[:ndim]), reversed(strides[:ndim]), strict=True):
        if size == 1:
            continue
        if reach is None:
            between = stride * tensor.dtype.itemsize
        elif stride != reach:
            return None
        reach = stride * size
    return between
