"""Tensors as plain bytes, for pickles.

A pickle that goes to a spawned process sends tensors as handles of shared memory, which are gone
if nobody keeps the tensor until the process has started: those made for the pickle are not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from replaykit.leafwise import raw_bytes

__all__ = ["by_value", "from_value"]


@dataclass(frozen=True)
class _Bytes:
    raw: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


def by_value(value: Any) -> Any:
    """Returns lists, tuples and dicts with a copy of the bytes in the place of every tensor.

    Example:
        >>> import torch
        >>> from replaykit.storages.by_value import by_value, from_value
        >>> taken = by_value({"x": [torch.arange(3)]})
        >>> from_value(taken)
        {'x': [tensor([0, 1, 2])]}
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        raw = raw_bytes(value).numpy().copy()
        return _Bytes(raw, value.dtype, value.shape, value.device)
    return _mapped(value, by_value)


def from_value(value: Any) -> Any:
    """Puts the tensors back that ``by_value`` has taken out, on the devices where they were."""
    if isinstance(value, _Bytes):
        if not value.raw.size:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
        raw = value.raw
        if not raw.flags.writeable:  # read out of band, from memory that is not the tensor's own
            raw = raw.copy()
        tensor = torch.from_numpy(raw).view(value.dtype).view(value.shape)
        return tensor.to(value.device)
    return _mapped(value, from_value)


def _mapped(value: Any, function: Any) -> Any:
    if type(value) is dict:
        return {key: function(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    return value
