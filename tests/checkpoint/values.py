"""States as values of Python, to be compared whole."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from replaykit import ReplayBuffer

__all__ = ["plain", "state_of"]


def plain(value: Any) -> Any:
    """A state with every tensor as its dtype, shape and numbers, and every TensorDict as a dict."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), value.tolist()
    if isinstance(value, TensorDict):
        return plain(value.to_dict())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def state_of(buffer: ReplayBuffer) -> Any:
    """Everything, but for the mark that a load leaves where an episode was being written."""
    state = buffer.state_dict()
    state["_writer"] = {key: item for key, item in state["_writer"].items() if key != "_episodes"}
    return plain(state)
