"""What shards are asked and answer, as messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import is_tensorclass

from replaykit._compat import is_tensordict
from replaykit.remote.packing import Message, pack, unpack
from replaykit.structure import Node, build, flatten

__all__ = ["decoded", "encoded"]


class _Container(NamedTuple):
    """A TensorDict or tensorclass, taken apart: pickle takes ten times as long."""

    root: Node
    leaves: dict[Any, torch.Tensor]
    batch: tuple[int, ...]


def encoded(value: Any) -> Message:
    """Returns the message of arguments or an answer; their tensors are not copied into it.

    Raises:
        TypeError: a TensorDict with something other than tensors in it; names the key.

    Example:
        >>> import torch
        >>> from replaykit.sharding.wire import decoded, encoded
        >>> decoded(encoded({"x": torch.arange(3), "n": 1}))
        {'x': tensor([0, 1, 2]), 'n': 1}
    """
    return pack(_apart(value))


def decoded(message: Message, *, own: bool = False) -> Any:
    """The way back.

    Args:
        own: tensors get memory of their own. Otherwise they lie in that of the message, which
            nobody may write to, and which the arguments of a call do not outlive.
    """
    return _together(unpack(message, own=own))


def _apart(value: Any) -> Any:
    if is_tensordict(value) or is_tensorclass(value):
        return _Container(*flatten(value, value.batch_dims), tuple(value.batch_size))
    return _inside(value, _apart)


def _together(value: Any) -> Any:
    if isinstance(value, _Container):
        device = torch.device("cpu")
        return build(value.root, value.leaves, torch.Size(value.batch), device)
    return _inside(value, _together)


def _inside(value: Any, function: Any) -> Any:
    if type(value) is dict:
        return {key: function(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(function(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(function(item) for item in value))
    return value
