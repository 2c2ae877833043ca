"""What samplers with priorities are made with, checked."""

from __future__ import annotations

from typing import Any

import torch

from replaykit.reductions import REDUCTIONS

__all__ = ["REQUIRED", "check_options"]

_WEIGHT_NORMS = ("global", "batch")


class _Required:
    def __repr__(self) -> str:
        return "<required>"


REQUIRED: Any = _Required()
"""Default of an argument without one, that follows others with one."""


def check_options(
    kind: str,
    alpha: Any,
    beta: Any,
    max_capacity: Any,
    dtype: Any,
    reduction: Any,
    weight_norm: Any,
) -> None:
    """Raises what ``PrioritizedSampler`` does, but for the values of the exponents.

    Args:
        kind: class of the sampler, for what is said.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value is REQUIRED:
            raise TypeError(f"{kind} needs {name}; got none")
    if max_capacity is not None and (type(max_capacity) is not int or max_capacity < 1):
        raise ValueError(f"expected max_capacity as an int of at least 1, got {max_capacity!r}")
    if dtype not in (torch.float32, torch.float64):
        raise NotImplementedError(f"expected dtype float32 or float64, got {dtype}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"expected reduction as one of {REDUCTIONS}, got {reduction!r}")
    if weight_norm not in _WEIGHT_NORMS:
        raise ValueError(f"expected weight_norm as one of {_WEIGHT_NORMS}, got {weight_norm!r}")
