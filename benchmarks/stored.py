"""The memory behind a storage or a tree: which tensors there are, and how many bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from benchmarks.contender import Unavailable
from benchmarks.pages import resident_bytes

__all__ = ["distinct_bytes", "distinct_memory", "tensors_of_storage", "tensors_within"]


def tensors_of_storage(storage: Any) -> list[torch.Tensor]:
    """Returns the tensors that a replaykit storage keeps its rows in, one for each memory."""
    columns = getattr(storage, "_columns", None)
    tensors = tensors_within(columns)
    if not tensors:
        raise Unavailable(f"the memory of a {type(storage).__name__} cannot be seen")
    return distinct_memory(tensors)


def tensors_within(thing: Any, depth: int = 3) -> list[torch.Tensor]:
    """Returns the tensors among the attributes of an object, and in lists and dicts of them."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if depth == 0 or thing is None:
        return []
    parts: Iterable[Any] = ()
    if isinstance(thing, dict):
        parts = thing.values()
    elif isinstance(thing, list | tuple):
        parts = thing
    elif type(thing).__module__.startswith("replaykit"):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = [*getattr(thing, "__dict__", {}).values()]
        parts += [getattr(thing, name) for name in slots if hasattr(thing, name)]
    return [tensor for part in parts for tensor in tensors_within(part, depth - 1)]


def distinct_memory(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns one tensor for each memory that they lie in."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the bytes that their memory takes, counted once where they share it."""
    return sum(map(resident_bytes, distinct_memory(tensors)))
