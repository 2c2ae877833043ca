"""Keys of streams, as NumPy compares them and dicts find them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["cell_bytes", "key_dtype", "stream_keys"]

Array = np.ndarray[Any, Any]


def key_dtype(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Returns the dtype of the keys of cells of some shape: int64 for a whole number or a flag,
    else bytes.

    Example:
        >>> import torch
        >>> from replaykit.episodes.stream_keys import key_dtype
        >>> key_dtype([1], torch.uint8), key_dtype([2], torch.float32)
        (<class 'numpy.int64'>, 'S8')
    """
    small = math.prod(shape) == 1 and not dtype.is_floating_point and not dtype.is_complex
    return np.int64 if small else f"S{max(1, cell_bytes(shape, dtype))}"


def stream_keys(values: torch.Tensor) -> Array:
    """Returns a key for each cell of a column ``[n, *F]``, equal where all bits are: ``[n]``.

    Example:
        >>> import torch
        >>> from replaykit.episodes.stream_keys import stream_keys
        >>> stream_keys(torch.tensor([[3], [1]])).tolist()
        [3, 1]
    """
    dtype = np.dtype(key_dtype(values.shape[1:], values.dtype))
    values = values.detach()
    if dtype == np.int64:
        return values.to(device="cpu", dtype=torch.int64).reshape(-1).numpy()
    own = torch.empty(values.shape, dtype=values.dtype, device="cpu").copy_(values)
    cells = own.view(-1).view(torch.uint8).numpy().reshape(len(values), -1)
    if not cells.shape[1]:
        return np.zeros(len(cells), dtype)
    return np.ascontiguousarray(cells).view(dtype).reshape(-1)


def cell_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Returns how many bytes a cell of a column takes."""
    return math.prod(shape) * dtype.itemsize
