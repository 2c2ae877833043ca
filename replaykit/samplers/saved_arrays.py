"""Arrays of a sampler's saved state, which may lie in their files yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from replaykit._compat import dtype_name
from replaykit.checkpoint import MappedRows

__all__ = ["saved_arrays"]

Array = np.ndarray[Any, Any]


def saved_arrays(
    state: Mapping[str, Any],
    names: Mapping[str, tuple[torch.dtype, ...]],
    *,
    optional: bool = False,
) -> tuple[list[Array], bool]:
    """Entries of a state by name, with the dtypes that each may have: ``[K]``, copies.

    Args:
        optional: those that are missing are empty.

    Returns:
        The arrays, and whether they lie in files: then nothing of them was read.

    Raises:
        ValueError: an entry is no vector, or of another dtype.
    """
    found, mapped = [], False
    for name, kinds in names.items():
        part = state.get(name)
        if part is None and optional:
            part = torch.empty(0, dtype=kinds[0], device="cpu")
        late = isinstance(part, MappedRows)
        if isinstance(part, MappedRows):
            part = part.spanned()
        if not isinstance(part, torch.Tensor) or part.ndim != 1 or part.dtype not in kinds:
            words = " or ".join(dtype_name(kind) for kind in kinds)
            raise ValueError(f"expected {name!r} as {words} [K], got {part!r}")
        found.append(part.numpy() if late else part.cpu().numpy().copy())
        mapped = mapped or late
    return found, mapped
