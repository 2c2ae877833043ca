"""Read and set the values of a batch that a transform works on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from tensordict import is_tensorclass

from replaykit._compat import TensorDict, fields_of, is_tensordict, lookup, put_all
from replaykit.structure import Path
from replaykit.ted import Key, format_key
from replaykit.transforms.history import Surroundings
from replaykit.transforms.keys import require
from replaykit.transforms.transform import Transform

__all__ = [
    "ValueTransform",
    "as_number",
    "check_range",
    "keep_padding",
    "last_real",
    "nearest_real",
    "over_features",
    "real_of",
    "real_rows",
    "require_tensor",
    "rows_ahead",
    "set_all",
    "set_groups",
    "set_real",
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


def set_all(data: Any, values: Mapping[Path, torch.Tensor]) -> None:
    """Sets leaves of a batch ``[B]``, each ``[B, *F]`` and where the batch is.

    A tenth of the time of ``data.set`` where the batch is made of plain TensorDicts.
    """
    groups: dict[Path, dict[str, torch.Tensor]] = {}
    for path, value in values.items():
        above = path[:-1]
        if above in groups:
            groups[above][path[-1]] = value
        else:
            groups[above] = {path[-1]: value}
    set_groups(data, groups)


def set_groups(data: Any, groups: Mapping[Path, Mapping[str, torch.Tensor]]) -> None:
    """The same, with the leaves below each path by their names."""
    for above, leaves in groups.items():
        branch = _plain_branch(data, above, next(iter(leaves.values())))
        if branch is not None:
            put_all(branch, leaves)
            continue
        for name, value in leaves.items():
            data.set((*above, name), value)


def _plain_branch(data: Any, path: Path, value: torch.Tensor) -> Any:
    """The TensorDict at a path, if such leaves can be put there as they are; else None."""
    for part in path:
        if type(data) is not TensorDict:
            return None
        data = fields_of(data).get(part)
    if type(data) is not TensorDict or data.is_locked or data.batch_size != value.shape[:1]:
        return None
    device = data.device
    return data if device is None or device == value.device else None


def set_real(
    data: Any,
    values: Mapping[Path, torch.Tensor],
    mask: np.ndarray[Any, Any] | None,
) -> None:
    """Sets leaves of a batch ``[B]`` at its real rows.

    Padding keeps what it has, and gets zeros where it had nothing.

    Args:
        mask: bool ``[B]``, False at padding; None: there is none.
    """
    real = real_of(mask, data)
    if real is not None:
        values = {path: _kept(data.get(path, None), value, real) for path, value in values.items()}
    set_all(data, values)


def real_of(mask: np.ndarray[Any, Any] | None, data: Any) -> torch.Tensor | None:
    """The mask as a tensor where the leaves of the batch lie; None: nothing is padding."""
    if mask is None or mask.all():
        return None
    leaf = next(iter(data.values(True, True)))
    return torch.from_numpy(np.ascontiguousarray(mask)).to(leaf.device)


def over_features(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[B, *k]`` with a dimension of size 1 for each further one of ``like``."""
    more = like.ndim - values.ndim
    if more == 0:
        return values
    return values.unsqueeze(-1) if more == 1 else values.reshape(*values.shape, *[1] * more)


def _kept(old: Any, new: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    if old is None:
        return new.masked_fill(over_features(~real, new), 0)
    return keep_padding(real, new, old)


Array = np.ndarray[Any, Any]


def rows_ahead(around: Surroundings, ended: Array | None = None) -> Array:
    """How many rows of the same window and episode follow each row in the batch, int64 ``[B]``.

    Padding has none, and ends what is before it.

    Args:
        ended: bool ``[B]``, rows after which nothing of theirs follows; besides those at which
            episodes end.

    Raises:
        ValueError: rows of a window and an episode that lie side by side in the batch and do not
            follow each other in time.
    """
    count = len(around)
    if count < 2:
        return np.zeros(count, np.int64)
    same = (
        (around.window[1:] == around.window[:-1])
        & (around.lane[1:] == around.lane[:-1])
        & (around.begin[1:] == around.begin[:-1])
    )
    if around.mask is not None:
        same &= around.mask[1:] & around.mask[:-1]
    if (same & (around.time[1:] != around.time[:-1] + 1)).any():
        raise ValueError(
            "expected windows of rows that follow each other, got windows with gaps between rows"
        )
    if ended is not None:
        same &= ~ended[:-1]
    # The end of the run that a row belongs to: the nearest row not followed by one of the same.
    stop = np.where(np.append(same, False), count, np.arange(count))
    return np.minimum.accumulate(stop[::-1])[::-1] - np.arange(count)


def nearest_real(around: Surroundings) -> Array:
    """Places in the batch, int64 ``[B]``: of real rows their own, of padding that of the real row
    before it in its window, else of the first one after it, else its own."""
    own = np.arange(len(around))
    if around.mask is None or around.mask.all():
        return own
    real, count = around.mask, len(own)
    before = np.maximum.accumulate(np.where(real, own, -1))
    after = np.minimum.accumulate(np.where(real, own, count)[::-1])[::-1]
    after = np.minimum(after, count - 1)
    in_front = (before >= 0) & (around.window[before] == around.window)
    behind = real[after] & (around.window[after] == around.window)
    return np.where(in_front, before, np.where(behind, after, own))


def last_real(around: Surroundings) -> Array:
    """Places in the batch, int64 ``[B]``, of the last real row of each row's window; the row
    itself in a window without any."""
    count = len(around)
    own = np.arange(count)
    if not count:
        return own
    ends = np.append(around.window[1:] != around.window[:-1], True)
    stop = np.minimum.accumulate(np.where(ends, own, count)[::-1])[::-1]
    if around.mask is None:
        return stop
    found = np.maximum.accumulate(np.where(around.mask, own, -1))[stop]
    inside = (found >= 0) & (around.window[found] == around.window)
    return np.where(inside, found, own)
