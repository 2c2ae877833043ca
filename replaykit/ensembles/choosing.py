"""Which members an index names: the same for ensembles of buffers, storages, samplers, writers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["chosen"]


def chosen(index: Any, count: int, what: str) -> int | list[int]:
    """Returns the number of the member that an index names, or of those that it names, in order.

    Args:
        index: int, slice, ``...``, range, list, NumPy array or tensor ``[K]`` of integers, or of
            bools, one a member. Negative ones count from the end.
        count: number of members.
        what: what is indexed, for errors.

    Raises:
        TypeError: numbers with fractions, or no index at all. RuntimeError: more than one
            dimension. IndexError: no such member.
    """
    if index is Ellipsis:
        return list(range(count))
    if isinstance(index, slice):
        return list(range(count))[index]
    if isinstance(index, (bool, np.bool_)) or not isinstance(
        index, (int, np.integer, list, tuple, range, np.ndarray, torch.Tensor)
    ):
        raise TypeError(
            f"expected an int, slice, list or tensor of ints as the index of {what}, got {index!r}"
        )
    if isinstance(index, (int, np.integer)):
        return _member(int(index), count, what)
    numbers = index.cpu() if isinstance(index, torch.Tensor) else index
    array = np.asarray(numbers)
    if array.ndim > 1:
        raise RuntimeError(
            f"expected an index of {what} of at most one dimension, got {array.ndim}"
        )
    if array.dtype == bool:
        if array.shape != (count,):
            raise IndexError(f"expected {count} bools as the index of {what}, got {len(array)}")
        return [int(number) for number in np.nonzero(array)[0]]
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"expected integers as the index of {what}, got {array.dtype}")
    if not array.ndim:
        return _member(int(array), count, what)
    return [_member(int(number), count, what) for number in array]


def _member(number: int, count: int, what: str) -> int:
    if not -count <= number < count:
        raise IndexError(f"expected a member of {what} in [{-count}, {count}), got {number}")
    return number % count
