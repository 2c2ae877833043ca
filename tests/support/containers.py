"""Containers of every kind that move between devices and processes, and what they are."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass

__all__ = ["containers", "described"]


@tensorclass
class Point:
    x: torch.Tensor
    y: torch.Tensor
    label: str


class Pair(NamedTuple):
    left: Any
    right: Any


def containers() -> dict[str, Any]:
    """Make a container of each kind that a batch may be."""
    rows = {"x": torch.rand(2, 3), "n": {"y": torch.arange(2)}}
    return {
        "tensor": torch.rand(3),
        "tensordict": TensorDict(rows, [2], names=["time"]),
        "locked": TensorDict(rows, [2]).lock_(),
        "with objects": TensorDict({**rows, "s": NonTensorData("text", batch_size=[2])}, [2]),
        "tensorclass": Point(x=torch.rand(2), y=torch.rand(2), label="a", batch_size=[2]),
        "ragged": LazyStackedTensorDict(
            TensorDict({"x": torch.rand(3)}, []), TensorDict({"x": torch.rand(4)}, [])
        ),
        "ragged inside": TensorDict(
            {
                "r": LazyStackedTensorDict(
                    TensorDict({"x": torch.rand(3)}, []), TensorDict({"x": torch.rand(4)}, [])
                )
            },
            [2],
        ),
        "pytree": {"a": [torch.rand(2), None, "text"], 3: Pair((torch.rand(1), 4.5), {})},
        "ordered": collections.OrderedDict(b=torch.rand(2), a=torch.rand(1)),
        "default": collections.defaultdict(list, b=torch.rand(2)),
        "empty": TensorDict({}, [4]),
        "nothing": [],
    }


def described(data: Any, device: str | None = None) -> Any:
    """Return kinds, keys and shapes; ``device`` is asserted of every tensor."""
    if isinstance(data, torch.Tensor):
        assert device is None or data.device.type == device
        return (data.dtype, tuple(data.shape), data.stride())
    if isinstance(data, LazyStackedTensorDict):
        return "stack", data.stack_dim, [described(row, device) for row in data.tensordicts]
    if isinstance(data, Point):
        return "point", described(data.x, device), described(data.y, device), data.label
    if isinstance(data, TensorDict):
        assert device is None or data.device.type == device
        items = [(key, described(value, device)) for key, value in data._tensordict.items()]
        return "tensordict", data.batch_size, data.names, items
    if isinstance(data, NonTensorData):
        return "object", data.data
    if isinstance(data, dict):
        return type(data), [(key, described(value, device)) for key, value in data.items()]
    if isinstance(data, (list, tuple)):
        return type(data), [described(value, device) for value in data]
    return data
