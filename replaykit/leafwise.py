"""One thing done to every tensor of a container, whatever else there is in it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tensordict import is_tensorclass

from replaykit._compat import LazyStackedTensorDict, is_tensordict

__all__ = ["contiguous", "map_tensors", "raw_bytes"]


def contiguous(data: Any) -> Any:
    """Returns the container with every tensor in one piece; tensors that are so already stay.

    Sparse tensors, which have no strides, stay as well.
    """
    return map_tensors(
        data, lambda tensor: tensor.contiguous() if tensor.layout is torch.strided else tensor
    )


def map_tensors(
    data: Any,
    function: Callable[[torch.Tensor], torch.Tensor],
    *,
    device: torch.device | None = None,
) -> Any:
    """Returns the container with ``function`` applied to every tensor, which keeps its shape.

    Everything that is no tensor, and no container of tensors, stays as it is. Lazy stacks, whose
    rows are objects of their own, stay stacks. ``device``: where the new tensors are.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, LazyStackedTensorDict):
        rows = [map_tensors(row, function, device=device) for row in data.tensordicts]
        return LazyStackedTensorDict(*rows, stack_dim=data.stack_dim)
    if is_tensordict(data) or is_tensorclass(data):
        return data.apply(function) if device is None else data.apply(function, device=device)
    if isinstance(data, dict):
        mapped = {key: map_tensors(value, function, device=device) for key, value in data.items()}
        if type(data) is dict:
            return mapped
        other = copy.copy(data)  # it may know more than its items, as a default
        other.update(mapped)
        return other
    if isinstance(data, (tuple, list)):
        items = [map_tensors(value, function, device=device) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    return data


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values' bytes, uint8 ``[n]`` on the CPU: a view where they lie in one piece."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not view(-1): a single value counts as contiguous whatever its stride.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
