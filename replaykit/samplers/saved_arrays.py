"""Arrays of a sampler's saved state, which may lie in their files yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from replaykit._compat import dtype_name
from replaykit.checkpoint import MappedRows
from replaykit.errors import CheckpointError

__all__ = ["ReadLater", "saved_arrays"]

Array = np.ndarray[Any, Any]
Made = TypeVar("Made")


class ReadLater(Generic[Made]):
    """What is made of saved arrays when somebody asks for it: opening a checkpoint reads nothing.

    Args:
        make: makes it of the arrays; ValueError where they contradict themselves.
        arrays: over files of a checkpoint, ``[K]`` each.
        what: they are, for the error.
    """

    def __init__(self, make: Callable[..., Made], arrays: list[Array], what: str) -> None:
        self._make, self._arrays, self._what = make, arrays, what

    def read(self) -> Made:
        """Makes it: O(K).

        Raises:
            CheckpointError: the arrays contradict themselves.
        """
        try:
            return self._make(*self._arrays)
        except ValueError as error:
            raise CheckpointError(f"the {self._what} of the checkpoint: {error}") from None


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
