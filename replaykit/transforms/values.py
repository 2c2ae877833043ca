"""What transforms of values have in common: which rows are real, and how a value is replaced."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from tensordict import is_tensorclass

from replaykit._compat import is_tensordict, lookup
from replaykit.ted import Key, format_key
from replaykit.transforms.base import Transform
from replaykit.transforms.keys import require

__all__ = [
    "ValueTransform",
    "as_number",
    "check_range",
    "keep_padding",
    "real_rows",
    "require_tensor",
]

_MASK_KEYS: Final[tuple[Key, ...]] = (("validity_mask",), ("collector", "mask"))
_LAID_OUT_MASK: Final[Key] = ("mask",)


class ValueTransform(Transform):
    """A transform that maps values one by one, and needs no other row for it."""

    stage = "value"


def real_rows(data: Any) -> torch.Tensor | None:
    """Returns which rows of a batch are no padding, bool, batch size; None: all.

    Read from ``validity_mask`` and ``("collector", "mask")``, and in batches of two and more
    dimensions from ``mask``, as padded trajectories have it. What is no bool of the batch size, or
    of it and one more dimension of size 1, is a column of the user's.
    """
    keys = _MASK_KEYS if data.batch_dims < 2 else (*_MASK_KEYS, _LAID_OUT_MASK)
    real: torch.Tensor | None = None
    for key in keys:
        mask = lookup(data, key)
        if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool:
            continue
        if mask.shape == (*data.batch_size, 1):
            mask = mask.squeeze(-1)
        if mask.shape == data.batch_size:
            real = mask if real is None else real & mask
    return real


def keep_padding(real: torch.Tensor | None, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Returns ``new`` on real rows and ``old`` on the others, with the dtype of ``new``."""
    if real is None:
        return new
    over_features = real.reshape(*real.shape, *[1] * (new.ndim - real.ndim))
    return torch.where(over_features, new, old.to(new.dtype))


def require_tensor(data: Any, key: Key) -> torch.Tensor:
    """Returns the tensor at a key.

    Raises:
        TypeError: the data has no keys. KeyError: no such key. ValueError: no tensor there.
    """
    if not (is_tensordict(data) or is_tensorclass(data)):
        raise TypeError(f"expected a TensorDict with {format_key(key)}, got {type(data).__name__}")
    value = require(data, key)
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"key {format_key(key)}: expected a tensor, got {type(value).__name__}")
    return value


def check_range(low: Any, high: Any) -> tuple[float, float]:
    """Returns both as floats.

    Raises:
        TypeError: not numbers. ValueError: ``min`` is not below ``max``, or one is NaN.
    """
    low, high = as_number("min", low), as_number("max", high)
    if not low < high:
        raise ValueError(f"expected min below max, got min {low} and max {high}")
    return low, high


def as_number(name: str, value: Any, *, finite: bool = False) -> float:
    """Returns a number given as argument ``name`` as a float.

    Raises:
        TypeError: no number. ValueError: infinite or NaN where it must be ``finite``.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None
    if finite and not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return number
