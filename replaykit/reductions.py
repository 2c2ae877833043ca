"""Reduce several numbers per row to one number, for a rank or a priority."""

from __future__ import annotations

from collections.abc import Callable

import torch

from replaykit._compat import dtype_name

_OVER_FEATURES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1),
    "mean": lambda x: x.mean(-1),
    "median": lambda x: x.median(-1).values,
    "sum": lambda x: x.sum(-1),
}

REDUCTIONS = tuple(_OVER_FEATURES)
"""Names of reductions. Of an even count, the median is the lower value, as in torch."""


def reduce_rows(values: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce values ``[N, *F]`` to float64 ``[N]``.

    Each row needs at least one number.

    Raises:
        ValueError: the values are complex numbers, which have no order.

    Example:
        >>> import torch
        >>> from replaykit.reductions import reduce_rows
        >>> reduce_rows(torch.tensor([[1, 2], [5, 3]]), "max")
        tensor([2., 5.], dtype=torch.float64)
    """
    if values.is_complex():
        raise ValueError(f"expected real numbers to rank by, got {dtype_name(values.dtype)}")
    rows = values.shape[0]
    if not rows:
        return torch.empty(0, dtype=torch.float64, device="cpu")
    flat = values.detach().to(torch.float64).reshape(rows, values.shape[1:].numel())
    return _OVER_FEATURES[reduction](flat)
