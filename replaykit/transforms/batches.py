"""Leaves in and out of the batch that a transform works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from replaykit._compat import TensorDict, fields_of, put_all
from replaykit.structure import Path
from replaykit.transforms.values import keep_padding

__all__ = ["over_features", "real_of", "set_all", "set_groups", "set_real"]


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
