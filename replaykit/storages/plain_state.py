"""TensorDicts as dictionaries of tensors, for state dicts that any loader of tensors can read.

``torch.load`` takes no classes but its own; the entries ``__batch_size`` and ``__device`` are those
of ``TensorDict.state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replaykit._compat import TensorDict, TensorDictBase, is_non_tensor, is_tensordict

__all__ = ["from_plain", "to_plain"]

_BATCH, _DEVICE = "__batch_size", "__device"


def to_plain(value: Any) -> Any:
    """Returns a TensorDict of tensors as a dictionary; anything else as it is.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit.storages.plain_state import from_plain, to_plain
        >>> plain = to_plain(TensorDict({"x": torch.zeros(2)}, [2]))
        >>> plain["x"], plain["__batch_size"]
        (tensor([0., 0.]), torch.Size([2]))
        >>> from_plain(plain).batch_size
        torch.Size([2])
    """
    if not is_tensordict(value) or not _representable(value):
        return value
    plain = {key: to_plain(item) for key, item in value.items()}
    return {**plain, _BATCH: value.batch_size, _DEVICE: value.device}


def from_plain(value: Any) -> Any:
    """Puts TensorDicts together again, those in a list too; anything else is returned as it is."""
    if type(value) is list:
        return [from_plain(item) for item in value]
    if not isinstance(value, Mapping) or _BATCH not in value:
        return value
    items = {key: from_plain(item) for key, item in value.items() if key not in (_BATCH, _DEVICE)}
    return TensorDict(items, value[_BATCH], device=value.get(_DEVICE))


def _representable(value: TensorDictBase) -> bool:
    taken = any(key in (_BATCH, _DEVICE) for key in value.keys())  # noqa: SIM118 - not a mapping
    return not taken and not any(is_non_tensor(item) for item in value.values())
