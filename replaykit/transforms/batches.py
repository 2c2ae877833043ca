"""Leaves in and out of the batch that a transform works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from replaykit._compat import TensorDict, fields_of, put_all
from replaykit.structure import Path
from replaykit.transforms.values import keep_padding

__all__ = ["over_features", "real_of", "set_all", "set_real"]


def set_all(data: Any, values: Mapping[Path, torch.Tensor]) -> None:
    """Sets leaves of a batch, each with the batch's rows first.

    A tenth of the time of ``data.set`` where the batch is a plain TensorDict on their device.
    """
    for path, value in values.items():
        branch = data
        for part in path[:-1]:
            branch = fields_of(branch).get(part) if type(branch) is TensorDict else None
        if (
            type(branch) is TensorDict
            and not branch.is_locked
            and branch.device in (None, value.device)
            and branch.batch_size == value.shape[: branch.batch_dims]
        ):
            put_all(branch, {path[-1]: value})
        else:
            data.set(path, value)


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
    return values.reshape(*values.shape, *[1] * (like.ndim - values.ndim))


def _kept(old: Any, new: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    if old is None:
        return new.masked_fill(over_features(~real, new), 0)
    return keep_padding(real, new, old)
