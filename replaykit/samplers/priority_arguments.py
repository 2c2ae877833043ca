"""What users give to ``update_priority``, brought to elements and one priority each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from replaykit._compat import as_tensor
from replaykit.errors import PriorityCountError
from replaykit.samplers.priority_law import PriorityLaw
from replaykit.storages import Storage
from replaykit.storages.indexing import check_range, ravel

__all__ = [
    "Update",
    "as_elements",
    "as_it_is",
    "as_priorities",
    "bounds",
    "last_of_each",
    "resolved_update",
    "stored_elements",
]

_FAR = 1 << 40
"""Beyond every slot, and small enough to be multiplied by a number of lanes."""


class Update(NamedTuple):
    """What a call of ``update_priority`` comes to.

    Attributes:
        elements: int64 ``[K]``, all of them stored, possibly one several times.
        priorities: ``[K]`` in the law's dtype, all of them allowed.
        top: what lies above every element; 0 where there is none.
        most: the largest priority; 0 where there is none.
        dropped: entries that were left out because their record had been overwritten.
    """

    elements: torch.Tensor
    priorities: torch.Tensor
    top: int
    most: float
    dropped: int


def resolved_update(
    index: Any,
    priority: Any,
    generation: Any,
    law: PriorityLaw,
    storage: Storage | None,
    limit: int,
) -> Update:
    """Checks the arguments of ``update_priority`` and returns what is left to be set.

    Args:
        limit: number of stored elements.

    Raises:
        TypeError, ValueError, IndexError: as ``update_priority`` does.
    """
    elements = as_elements(index, torch.Size() if storage is None else storage.lanes)
    count = elements.shape[0]
    values = as_priorities(priority, count, law.dtype)
    if not count:
        return Update(elements, values, 0, 0.0, 0)
    least, most = bounds(values)
    law.check(least, most)
    dropped = 0
    if generation is not None:
        live = _live(elements, generation, storage)
        if live is not None:
            dropped = count - int(live.sum())
            elements, values = elements[live], values[live.to(values.device)]
    kept, top = stored_elements(elements, limit)
    if kept is not elements:
        values = values[(elements != -1).to(values.device)]
    if kept.shape[0] < count:
        most = bounds(values)[1] if top else 0.0
    return Update(kept, values, top, most, dropped)


def as_elements(index: Any, lanes: torch.Size) -> torch.Tensor:
    """Returns the elements that an index names: int64 ``[K]``, -1 where it says -1.

    Args:
        index: int, LongTensor ``[K]`` (``[K, ndim]`` where there are lanes), tuple of one
            LongTensor a dimension, or a sequence or array of such numbers.
        lanes: sizes of the dimensions beside time.

    Raises:
        TypeError: not integers. ValueError: another shape. IndexError: a lane that does not exist.
        Whether the elements are stored is not looked at.
    """
    ndim = len(lanes) + 1
    if type(index) is torch.Tensor and index.dtype is torch.int64 and index.dim() == 1 == ndim:
        return index
    if isinstance(index, tuple) and (ndim > 1 or len(index) == 1):
        parts = torch.broadcast_tensors(*(_integers(part) for part in index))
        index = torch.stack([part.reshape(-1) for part in parts], -1)
    index = _integers(index)
    if ndim == 1:
        if index.ndim > 2 or (index.ndim == 2 and index.shape[1] != 1):
            raise ValueError(f"expected an index of shape [K], got {list(index.shape)}")
        return index.reshape(-1)
    if index.ndim == 1 and index.shape[0] == ndim:
        index = index[None]
    if index.ndim != 2 or index.shape[1] != ndim:
        raise ValueError(f"expected an index of shape [K, {ndim}], got {list(index.shape)}")
    refused = index[:, 0] == -1
    for dim, size in enumerate(lanes, start=1):
        check_range(index[:, dim].masked_fill(refused, 0), 0, size)
    time = index[:, :1].clamp(-2, _FAR)
    return ravel(torch.cat([time, index[:, 1:]], 1), lanes).masked_fill_(refused, -1)


def _integers(index: Any) -> torch.Tensor:
    if not isinstance(index, torch.Tensor):
        if isinstance(index, (str, bytes)) or not isinstance(
            index, (int, np.integer, np.ndarray, range, Sequence)
        ):
            raise TypeError(f"expected an index as a LongTensor, got {type(index).__name__}")
        index = as_tensor(np.asarray(index) if np.size(index) else [], dtype=None)
        index = index if index.numel() else index.to(torch.int64)
    if index.dtype is torch.int64:
        return index
    if index.dtype is torch.bool or index.is_floating_point() or index.is_complex():
        raise TypeError(f"expected an index of integers, got dtype {index.dtype}")
    return index.to(torch.int64)


def as_priorities(priority: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns one priority for each of ``count`` elements, ``[count]``, detached.

    Raises:
        ValueError: not one number for all, ``[count]`` or ``[count, 1]`` (PriorityCountError), or
            complex numbers.
        Whether they can be set is not looked at.
    """
    plain = type(priority) is torch.Tensor and not priority.requires_grad
    if plain and priority.dtype is dtype and priority.shape == (count,) and not priority.is_neg():
        return priority
    if not isinstance(priority, torch.Tensor):
        priority = as_tensor(np.asarray(priority))  # numbers of Python as float64
    priority = priority.detach().resolve_neg()
    if priority.is_complex():
        raise ValueError(f"expected real numbers as priorities, got {priority.dtype}")
    if priority.dtype is not dtype:
        priority = priority.to(dtype)
    if priority.ndim == 0:
        return priority.repeat(count)
    if priority.shape[0] != count or priority.numel() != count:
        raise PriorityCountError(
            "priority should be a number or an iterable of the same length as index: expected one "
            f"number, or a priority for each of the {count} index entries, got shape "
            f"{list(priority.shape)}"
        )
    return priority.reshape(-1)


def as_it_is(tensor: Any, dtype: torch.dtype, count: int) -> bool:
    """Whether the core can read ``count`` numbers of the dtype where the tensor lies."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.dim() == 1
        and tensor.numel() == count
        and tensor.is_contiguous()
    )


def last_of_each(index: torch.Tensor, priority: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives every occurrence of an element the priority of its last one.

    Then the order in which a device writes them does not matter. No shape depends on the data, so
    that nothing waits for the device.
    """
    ordered, order = index.sort(stable=True)
    last = torch.searchsorted(ordered, ordered, right=True) - 1
    return ordered, priority[order[last]]


def bounds(values: torch.Tensor) -> tuple[Any, Any]:
    """Returns the least and the largest of ``[K]``, K at least 1; NaN where there is one.

    On cuda this waits for the device, once.
    """
    least, most = torch.aminmax(values)
    if values.is_cpu:
        return least.item(), most.item()
    return tuple(torch.stack([least, most]).tolist())


def _live(elements: torch.Tensor, generation: Any, storage: Storage | None) -> torch.Tensor | None:
    """Which elements ``[K]`` still have the generation that was seen; None: all of them.

    Elements -1 count as live. IndexError for one that never was stored.
    """
    if storage is None:
        raise ValueError("expected a storage to compare generations with, got none")
    seen = _integers(generation).to(elements.device)
    if seen.dim() != 1:
        seen = seen.reshape(-1)
    if seen.shape != elements.shape:
        raise ValueError(
            f"expected a generation for each of the {len(elements)} index entries, got {len(seen)}"
        )
    lanes = storage.lanes.numel()
    slots = elements if lanes == 1 else torch.div(elements, lanes, rounding_mode="floor")
    now = storage.ledger.generations(slots)
    if torch.equal(now, seen):
        return None
    ignored = elements == -1
    never = (now == -1) & ~ignored
    if bool(never.any()):
        _raise_outside(elements[never], len(storage))
    return (now == seen) | ignored


def stored_elements(elements: torch.Tensor, limit: int) -> tuple[torch.Tensor, int]:
    """Returns elements without those that are -1, and what lies above the largest.

    Raises:
        IndexError: one outside ``[0, limit)``.
    """
    if not elements.numel():
        return elements, 0
    least, most = bounds(elements)
    if least < 0:
        elements = elements[elements != -1]
        if not len(elements):
            return elements, 0
        least, most = bounds(elements)
    if least < 0 or most >= limit:
        _raise_outside(elements, limit)
    return elements, most + 1


def _raise_outside(elements: torch.Tensor, limit: int) -> NoReturn:
    outside = elements[(elements < 0) | (elements >= limit)]
    raise IndexError(
        f"expected an index in [0, {limit}), or -1 to leave an entry out, got {int(outside[0])}"
    )
