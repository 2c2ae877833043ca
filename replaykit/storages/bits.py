"""Rows compared bit by bit: NaN equals itself, and -0.0 is not 0.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["any_differing", "differing"]

_BLOCK_BYTES = 2**22
"""Compared at a time: the result of each comparison stays in the cache."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns which of the rows ``[n, *F]`` differ in a bit, bool ``[n]``; same dtype and shape.

    Cost: one pass over the bytes.

    Example:
        >>> import torch
        >>> from replaykit.storages.bits import differing
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
    """Returns which rows differ in any of the leaves that both have, bool ``[n]``."""
    found: torch.Tensor | None = None
    for key, leaf in a.items():
        here = differing(leaf, b[key])
        found = here if found is None else found | here
    assert found is not None
    return found


def _raw(rows: torch.Tensor) -> torch.Tensor:
    """Rows in one piece each, ``[n, bytes]`` or ``[n, words]``, in a dtype without a NaN."""
    if rows.is_conj() or rows.is_neg():
        rows = rows.resolve_conj().resolve_neg()
    # Not reshape: what has a single value counts as contiguous whatever its strides.
    size = rows.numel() // rows.shape[0]
    flat = rows.contiguous().as_strided((rows.shape[0], size), (size, 1))
    return flat if flat.dtype in _WORDS else flat.view(torch.uint8)
