"""A batch and what is known of its draw, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import lazy_stack

from replaykit._compat import (
    LazyStackedTensorDict,
    TensorDict,
    fields_of,
    is_tensordict,
    put_all,
)

__all__ = [
    "check_told",
    "is_ragged",
    "merged",
    "shaped",
    "with_each",
    "with_markers",
    "with_masks",
]

_MASKS = ("validity_mask", ("collector", "mask"))
_READ: dict[Any, torch.dtype] = {
    "sequence_id": torch.int64,
    "anchor_index": torch.int64,
    **dict.fromkeys(_MASKS, torch.bool),
}
"""What is read of what a draw tells, row by row, some of it by the compiled core."""


def check_told(info: Mapping[Any, Any], rows: int) -> None:
    """Raises ValueError where what a saved draw tells is not what will be read of it.

    What else a sampler tells is its own, and may be anything.
    """
    for key, dtype in _READ.items():
        value = info.get(key)
        if value is None:
            continue
        fits = isinstance(value, torch.Tensor) and value.dtype == dtype and value.ndim
        if not fits or len(value) != rows:
            raise ValueError(
                f"expected {key!r} of a prepared draw as {dtype} of {rows} rows, got {value!r}"
            )


def merged(data: Any, info: dict[Any, Any], dim: int, *, needed: bool = True) -> Any:
    """Puts the info of a draw into a TensorDict whose rows lie along ``dim``; other data stay.

    Where it does not belong to the rows any more: an error if it is ``needed``.
    """
    rows = info["index"].shape[0]
    if type(data) is TensorDict and not dim and _put_all(data, info, rows):
        return data
    if not is_tensordict(data):
        return data
    if data.is_locked:
        data = data.copy()
    dim = dim if dim >= 0 else dim + data.batch_dims
    if data.batch_dims <= dim or data.batch_size[dim] != rows:
        if not needed:
            return data
        raise RuntimeError(
            f"a transform or collate_fn made batch size {list(data.batch_size)} of {rows} rows, "
            "so that index and info no longer belong to them; call sample(return_info=True), "
            "which gives them beside the data"
        )
    found = {
        key: value
        for key, value in info.items()
        if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == rows
    }
    if is_ragged(data) and data.stack_dim == dim:
        return with_each(data, found)
    for key, value in found.items():
        data.set(key, _over_rows(value, data.batch_size, dim))
    return data


def is_ragged(data: Any) -> bool:
    """Whether rows are stacked whose batch sizes differ, so that no tensor spans the stack."""
    return isinstance(data, LazyStackedTensorDict) and -1 in data.batch_size


def with_each(data: LazyStackedTensorDict, values: Mapping[Any, torch.Tensor]) -> Any:
    """Returns a stack of copies of the rows, with a value for each.

    Args:
        values: ``[B, ...]`` by key, for the rows along ``data.stack_dim``.
    """
    rows = [row.copy() for row in data.tensordicts]
    for key, value in values.items():
        for row, part in zip(rows, value, strict=True):
            row.set(key, part.expand(*row.batch_size, *part.shape).clone())
    return lazy_stack(rows, data.stack_dim)


def shaped(data: Any, rows: int, shape: tuple[int, ...]) -> Any:
    """A flat batch in another batch shape, where it still has its rows."""
    return data.reshape(shape) if data.batch_size == (rows,) else data


def with_masks(data: Any, info: dict[Any, Any]) -> Any:
    """Lets transforms see which rows are padding."""
    for key in _MASKS:
        mask = info.get(key)
        if mask is not None and is_tensordict(data) and data.batch_size == mask.shape:
            data.set(key, mask)
    return data


def with_markers(data: Any, markers: dict[Any, Any]) -> Any:
    """Lets transforms that change what a sampler marks see what it has marked."""
    for key, value in markers.items():
        fits = isinstance(value, torch.Tensor) and is_tensordict(data)
        if fits and value.shape[:1] == data.batch_size[:1]:
            data.set(key, value)
    return data


def _put_all(data: TensorDict, info: dict[Any, Any], rows: int) -> bool:
    """The plain case of ``merged``: one batch dimension, everything on one device."""
    if data.is_locked or data.batch_size != (rows,):
        return False
    device = data.device
    if len(info) == 1 and info["index"].device == device:
        put_all(data, info)
        return True
    on_cpu = device is not None and device.type == "cpu"
    plain: dict[str, torch.Tensor] = {}
    nested: dict[str, dict[str, torch.Tensor]] = {}
    fields = fields_of(data)
    for key, value in info.items():
        within = type(key) is tuple and len(key) == 2
        if within:
            found = fields.get(key[0])
            if type(found) is TensorDict and fields_of(found).get(key[1]) is value:
                continue  # marked where it is
        if type(value) is not torch.Tensor or not value.ndim or value.shape[0] != rows:
            return False
        if not (on_cpu and value.is_cpu) and value.device != device:
            return False
        if type(key) is str:
            plain[key] = value
        elif within:
            nested.setdefault(key[0], {})[key[1]] = value
        else:
            return False
    inner = []
    for name, values in nested.items():
        part: Any = fields.get(name)
        if type(part) is not TensorDict or part.is_locked or part.batch_size != (rows,):
            return False
        inner.append((part, values))
    put_all(data, plain)
    for part, values in inner:
        put_all(part, values)
    return True


def _over_rows(value: torch.Tensor, batch: torch.Size, dim: int) -> torch.Tensor:
    """Repeats ``[B, ...]`` over the other batch dimensions, those that the rows have themselves."""
    if len(batch) == 1:
        return value
    shape = [1] * len(batch)
    shape[dim] = batch[dim]
    return value.reshape(*shape, *value.shape[1:]).expand(*batch, *value.shape[1:]).clone()
