"""Move, compare and pickle tensors as bytes, whatever their dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from replaykit.checkpoint import RowChunks
from replaykit.structure import raw_bytes

_Key = TypeVar("_Key")

_NATIVE = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    }
)  # fmt: skip
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a view in a dtype that every torch operation supports."""
    if tensor.dtype in _NATIVE:
        return tensor
    return tensor.view(_CARRIERS[tensor.dtype.itemsize])


def carried_rows(
    leaves: Mapping[_Key, torch.Tensor], at: slice | torch.Tensor
) -> dict[_Key, torch.Tensor]:
    """Return some rows of leaves, in dtypes that every torch operation supports."""
    return {key: carried(leaf)[at] for key, leaf in leaves.items()}


def picked(rows: Any, kept: torch.Tensor | slice) -> torch.Tensor:
    """Return some rows of a tensor or of files, in the dtype that ``carried`` gives."""
    if isinstance(rows, torch.Tensor):
        whole = isinstance(kept, slice) and kept.start in (None, 0) and kept.stop is None
        return carried(rows) if whole else carried(rows)[kept]
    return carried(rows[kept])  # rows in files


def picked_views(rows: Any, kept: torch.Tensor | slice) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows that ``picked`` returns, in contiguous parts.

    Each item is a pair: the count of rows before the part, and the part. A slice is not copied.
    """
    if isinstance(kept, slice) and isinstance(rows, RowChunks):
        for first, view in rows.views(kept.start, kept.stop):
            yield first - kept.start, carried(view)
    else:
        yield 0, picked(rows, kept)


_BLOCK_BYTES = 2**22
"""Bytes of a compared block, so that each result stays in the processor's cache."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a mask of the rows ``[n, *F]`` that differ in any bit, bool ``[n]``.

    Both tensors have the same dtype and shape.

    Cost: one pass over the bytes.

    Example:
        >>> import torch
        >>> from replaykit.storages.tensor_bytes import differing
        >>> a = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
        >>> differing(a, torch.tensor([[1.0, float("nan")], [-0.0, 2.0]]))
        tensor([False,  True])
    """
    count = a.shape[0]
    if not a.numel():
        return torch.zeros(count, dtype=torch.bool, device=a.device)
    a, b = _raw(a), _raw(b)
    row_bytes = a.shape[1] * a.dtype.itemsize
    offsets = row_bytes
    for x in (a, b):
        offsets |= int(x.storage_offset()) * x.dtype.itemsize
    for word in _WORDS:
        if not offsets % word.itemsize:
            break
    a, b = a.view(word), b.view(word)
    if a.shape[1] == 1:
        return (a != b).squeeze(1)
    step = max(1, _BLOCK_BYTES // row_bytes)
    if count <= step:
        return (a != b).any(1)
    found = torch.empty(count, dtype=torch.bool, device=a.device)
    for start in range(0, count, step):
        stop = start + step
        torch.any(a[start:stop] != b[start:stop], 1, out=found[start:stop])
    return found


def any_differing(a: Mapping[Any, torch.Tensor], b: Mapping[Any, torch.Tensor]) -> torch.Tensor:
    """Return a mask of the rows that differ in any leaf of ``a``, bool ``[n]``."""
    found: torch.Tensor | None = None
    for key, leaf in a.items():
        here = differing(leaf, b[key])
        found = here if found is None else found | here
    assert found is not None
    return found


def _raw(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as contiguous ``[n, bytes]`` or ``[n, words]`` in a NaN-free dtype."""
    if rows.is_conj() or rows.is_neg():
        rows = rows.resolve_conj().resolve_neg()
    # reshape would not do, because torch treats a tensor of one value as contiguous with any
    # strides.
    size = rows.numel() // rows.shape[0]
    flat = rows.contiguous().as_strided((rows.shape[0], size), (size, 1))
    return flat if flat.dtype in _WORDS else flat.view(torch.uint8)


@dataclass(frozen=True)
class _Bytes:
    raw: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


def by_value(value: Any) -> Any:
    """Return a copy of lists, tuples and dicts in which bytes replace the tensors.

    Example:
        >>> import torch
        >>> from replaykit.storages.tensor_bytes import by_value, from_value
        >>> taken = by_value({"x": [torch.arange(3)]})
        >>> from_value(taken)
        {'x': [tensor([0, 1, 2])]}
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        raw = raw_bytes(value).numpy().copy()
        return _Bytes(raw, value.dtype, value.shape, value.device)
    return _mapped(value, by_value)


def from_value(value: Any) -> Any:
    """Restore the tensors of a result of ``by_value``, on their devices."""
    if isinstance(value, _Bytes):
        if not value.raw.size:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
        raw = value.raw
        if (
            not raw.flags.writeable
        ):  # such an array was unpickled out of band, and does not own its memory
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
