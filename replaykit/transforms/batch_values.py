"""Read and set the values of a batch that a transform works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from tensordict import is_tensorclass

from replaykit._compat import TensorDict, fields_of, is_tensordict, lookup, put_all
from replaykit.keywords import as_number
from replaykit.structure import Path
from replaykit.ted import Key, format_key, no_key, unravel
from replaykit.transforms.history import Surroundings, filled, over_features
from replaykit.transforms.transform import Transform

_MASK_KEYS: Final[tuple[Key, ...]] = (("validity_mask",), ("collector", "mask"))
_LAID_OUT_MASK: Final[Key] = ("mask",)


class ValueTransform(Transform):
    """A transform that maps each value separately and needs no other rows."""

    stage = "value"


def real_rows(data: Any) -> torch.Tensor | None:
    """Return a bool mask of the rows that are not padding; None if no row is padding.

    The mask has the shape of the batch. The function reads it from ``validity_mask`` and
    ``("collector", "mask")``. In batches of two or more dimensions it also reads ``mask``, the key
    of padded trajectories. A mask is bool and has the batch size, with or without one more
    dimension of size 1. The function ignores any other tensor under these keys, because it is a
    column of the user.
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
    """Return ``new`` at real rows and ``old`` at padding, in the dtype of ``new``."""
    if real is None:
        return new
    return torch.where(over_features(real, new), new, old.to(new.dtype))


def require_tensor(data: Any, key: Key) -> torch.Tensor:
    """Return the tensor at a key.

    Raises:
        TypeError: the data has no keys.
        KeyError: the key is absent.
        ValueError: the key does not hold a tensor.
    """
    if not (is_tensordict(data) or is_tensorclass(data)):
        raise TypeError(f"expected a TensorDict with {format_key(key)}, got {type(data).__name__}")
    value = require(data, key)
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"key {format_key(key)}: expected a tensor, got {type(value).__name__}")
    return value


def require_numbers(data: Any, key: Key) -> torch.Tensor:
    """Return a column of real numbers.

    Raises:
        TypeError: the data has no keys, or the column is bool or complex.
        KeyError, ValueError: as for ``require_tensor``.
    """
    value = require_tensor(data, key)
    if value.dtype is torch.bool or value.dtype.is_complex:
        raise TypeError(f"key {format_key(key)}: expected real numbers, got {value.dtype}")
    return value


def with_values(data: Any, values: Mapping[Path, torch.Tensor]) -> Any:
    """Return a TensorDict with other values; ``data`` does not change."""
    made = data.copy()
    for path, value in values.items():
        made.set(path, value)
    return made


def check_range(low: Any, high: Any) -> tuple[float, float]:
    """Return both bounds as floats.

    Raises:
        TypeError: a bound is not a number.
        ValueError: ``min`` is not below ``max``, or a bound is NaN.
    """
    low, high = as_number("min", low), as_number("max", high)
    if not low < high:
        raise ValueError(f"expected min below max, got min {low} and max {high}")
    return low, high


def as_keys(keys: Any) -> list[Path]:
    """Return the argument ``keys`` as paths.

    Raises:
        TypeError: it is not a list of keys.
        ValueError: it is empty.
    """
    if not isinstance(keys, (list, tuple)):
        raise TypeError(f"keys: expected a list of keys, got {keys!r}")
    if not keys:
        raise ValueError("keys: expected at least one key, got none")
    return [unravel(key) for key in keys]


def set_all(data: Any, values: Mapping[Path, torch.Tensor]) -> None:
    """Set leaves of a batch ``[B]``, each ``[B, *F]`` on the device of the batch.

    In a batch of plain TensorDicts, this call takes a tenth of the time of ``data.set``.
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
    """Set leaves of a batch as ``set_all`` does, grouped by the path above them."""
    for above, leaves in groups.items():
        branch = _plain_branch(data, above, next(iter(leaves.values())))
        if branch is not None:
            put_all(branch, leaves)
            continue
        for name, value in leaves.items():
            data.set((*above, name), value)


def _plain_branch(data: Any, path: Path, value: torch.Tensor) -> Any:
    """Return the TensorDict at a path if ``value`` fits without conversion, else None."""
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
    """Set leaves of a batch ``[B]`` at its real rows.

    Padding rows keep their values. In a new leaf, padding rows get zeros.

    Args:
        mask: bool ``[B]``, False at padding; None: no row is padding.
    """
    real = real_of(mask, data)
    if real is not None:
        values = {
            path: _with_padding(data.get(path, None), value, real) for path, value in values.items()
        }
    set_all(data, values)


def real_of(mask: np.ndarray[Any, Any] | None, data: Any) -> torch.Tensor | None:
    """Return the mask as a tensor on the batch's device; None if no row is padding."""
    if mask is None or mask.all():
        return None
    leaf = next(iter(data.values(True, True)))
    return torch.from_numpy(np.ascontiguousarray(mask)).to(leaf.device)


def _with_padding(old: Any, new: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    if old is None:
        return filled(new, ~real, 0)
    return keep_padding(real, new, old)


Array = np.ndarray[Any, Any]


def rows_ahead(around: Surroundings, ended: Array | None = None) -> Array:
    """Return the number of rows of the same window and episode that follow each row.

    The result is int64 ``[B]``. Padding rows have 0. A padding row also ends the run of rows before
    it.

    Args:
        ended: bool ``[B]``, True at rows that end a run in addition to the ends of episodes.

    Raises:
        ValueError: neighbours in the batch belong to one window and episode, but do not follow
            each other in time.
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
    return rows_until(~np.append(same, False))


def rows_until(stops: Array) -> Array:
    """Return the number of rows from each row to the next stop, int64 ``[n]``.

    ``stops`` are bool ``[n]``, True at the very last row.
    """
    at = np.flatnonzero(stops)
    return at[np.cumsum(stops) - stops] - np.arange(len(stops))


def nearest_real(around: Surroundings) -> Array:
    """Return the batch index of the real row nearest to each row, int64 ``[B]``.

    For a real row, the result is the row's own index. For a padding row, the result is the index of
    the last real row before it in its window. If no real row is before it, the result is the index
    of the first real row after it. In a window without real rows, the result is the row's own
    index.
    """
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
    """Return the batch index of the last real row of each row's window, int64 ``[B]``.

    In a window without real rows, the result for each row is the row's own index.
    """
    count = len(around)
    own = np.arange(count)
    if not count:
        return own
    ends = np.append(around.window[1:] != around.window[:-1], True).nonzero()[0]
    stop = ends[np.searchsorted(ends, own)]
    if around.mask is None:
        return stop
    found = np.maximum.accumulate(np.where(around.mask, own, -1))[stop]
    inside = (found >= 0) & (around.window[found] == around.window)
    return np.where(inside, found, own)


def require(data: Any, key: Key) -> Any:
    """Return the value of a key; if it is absent, raise KeyError with all keys."""
    value = lookup(data, key)
    if value is None:
        raise no_key(key, map(unravel, data.keys(True, True)))
    return value
