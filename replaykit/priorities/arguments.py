"""What callers hand to a tree, brought to tensors; and the sentences about what cannot be."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from replaykit._compat import as_tensor
from replaykit.priorities.operations import Operation

__all__ = ["as_index", "as_numbers", "as_values", "refuse", "refuse_query", "refuse_range"]

_AS_THEY_ARE = (torch.float32, torch.float64)


def as_index(index: Any, device: torch.device) -> torch.Tensor:
    """Slots as int64 ``[K]`` on the device; TypeError for what are no whole numbers."""
    if isinstance(index, range):
        return torch.arange(index.start, index.stop, index.step, device=device)
    if not isinstance(index, torch.Tensor):
        index = as_tensor(index)
        if index.numel() == 0 and index.ndim == 1:
            index = index.to(torch.int64)  # an empty list has no dtype of its own
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise TypeError(f"expected indices that are integers, got {index.dtype}")
    if index.ndim != 1:
        raise ValueError(f"expected indices of shape [K], got {list(index.shape)}")
    return index.to(device, torch.int64).contiguous()


def as_values(value: Any, count: int, device: torch.device) -> torch.Tensor | float:
    """Values as one number, or as float32 or float64 ``[count]`` on the device."""
    if isinstance(value, numbers.Real):
        return float(value)
    value = as_numbers(value, device)
    if value.ndim == 0:
        # An expanded one needs no look at its value, which would wait for an accelerator.
        return float(value) if device.type == "cpu" else value.expand(count).contiguous()
    if value.shape != (count,):
        raise ValueError(
            f"expected one value or values of shape [{count}], got shape {list(value.shape)}"
        )
    return value


def as_numbers(value: Any, device: torch.device) -> torch.Tensor:
    """Real numbers as float32 or float64 on the device, contiguous, without gradient."""
    if not isinstance(value, torch.Tensor):
        real = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        value = as_tensor(value, dtype=torch.float64 if real else None)
    if value.dtype.is_complex or value.dtype == torch.bool:
        raise TypeError(f"expected values that are real numbers, got {value.dtype}")
    value = value.detach().resolve_neg().to(device)
    if value.dtype not in _AS_THEY_ARE:
        # float32 holds all shorter floats, float64 integers up to 2^53.
        value = value.to(torch.float32 if value.dtype.is_floating_point else torch.float64)
    return value.contiguous()


def refuse(
    operation: Operation, capacity: int, of_index: bool, offender: Any, position: Any
) -> None:
    """Raises what an update of an index or value that is not allowed raises."""
    where = "" if position is None else f" at position {position}"
    if of_index:
        raise IndexError(f"expected indices in [0, {capacity}), got {offender}{where}")
    raise ValueError(f"expected {operation.expected()}, got {offender}{where}")


def refuse_query(limit: float, offender: float, position: int) -> None:
    """Raises what a value that cannot be found raises; without a limit it is infinite."""
    what = "values of at least 0" if math.isinf(limit) else f"values in [0, {limit}], the total"
    raise ValueError(f"expected {what}, got {offender} at position {position}")


def refuse_range(capacity: int, start: Any, end: Any, position: Any = None) -> None:
    """Raises what a range that is none, or is not within the tree, raises."""
    where = "" if position is None else f" at position {position}"
    said = f"got [{start}, {end}){where}"
    if 0 <= start <= capacity and 0 <= end <= capacity:
        raise ValueError(f"expected a range that starts before it ends, {said}")
    raise IndexError(f"expected a range within [0, {capacity}), {said}")
