"""Arrays of a sampler's saved state, which may lie in their files yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from replaykit._compat import dtype_name
from replaykit.checkpoint import MappedRows, ReadLater

__all__ = ["made_of_saved"]

Array = np.ndarray[Any, Any]
Made = TypeVar("Made")


def made_of_saved(
    state: Mapping[str, Any],
    names: Mapping[str, tuple[torch.dtype, ...]],
    make: Callable[..., Made],
    what: str,
    *,
    optional: bool = False,
) -> Made | ReadLater[Made]:
    """What is made of entries of a state: now, or later where some lie in files.

    Args:
        names: of the entries, with the dtypes that each may have.
        make: makes it of the arrays, ``[K]`` each, which are its own; ValueError where they
            contradict themselves.
        what: they are, for the error of who asks later.
        optional: entries that are missing are empty.

    Raises:
        ValueError: an entry is no vector, or of another dtype; what ``make`` raises.
    """
    found: list[Array | MappedRows] = []
    for name, kinds in names.items():
        part = state.get(name)
        if part is None and optional:
            part = torch.empty(0, dtype=kinds[0], device="cpu")
        if (
            not isinstance(part, (torch.Tensor, MappedRows))
            or len(part.shape) != 1
            or part.dtype not in kinds
        ):
            words = " or ".join(dtype_name(kind) for kind in kinds)
            raise ValueError(f"expected {name!r} as {words} [K], got {part!r}")
        found.append(part if isinstance(part, MappedRows) else part.cpu().numpy().copy())
    if any(isinstance(part, MappedRows) for part in found):
        return ReadLater(make, found, what)
    return make(*found)
