"""Other dtypes on read than those that are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import is_tensorclass

from replaykit._compat import dtype_name, is_tensordict
from replaykit.ted import FLAG_KEYS, Key, format_key, unravel
from replaykit.transforms.keys import require
from replaykit.transforms.values import ValueTransform

__all__ = ["Cast"]


class Cast(ValueTransform):
    """Gives columns another dtype on read.

    Bools and flags (``done``, ``terminated``, ``truncated``, also under ``next``) are never cast:
    below a key that names several columns they are left out.

    Args:
        dtype: what the columns become. Values are converted as ``Tensor.to`` does: floats lose
            their fraction on the way to integers.
        keys: a list of keys, each a column or an entry with columns below it.
        with_next: whether the same keys under ``next`` are cast too.

    Raises:
        TypeError: no dtype; ``keys`` is no list of keys; on read, where the data has no keys.
        ValueError: ``torch.bool``; no key; a key that is a flag; on read, a key that is a column
            of bools. KeyError: on read, where a key is absent, also under ``next``.

    Cost: one pass over each column that has another dtype; none over others.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import Cast
        >>> pixels = torch.zeros(2, 4, dtype=torch.uint8)
        >>> data = TensorDict({"pixels": pixels, "next": {"pixels": pixels}}, [2])
        >>> data = Cast(torch.float32, ["pixels"], with_next=True)(data)
        >>> data["pixels"].dtype, data["next", "pixels"].dtype
        (torch.float32, torch.float32)
    """

    def __init__(self, dtype: torch.dtype, keys: Sequence[Any], with_next: bool = False) -> None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype: expected a torch dtype, got {dtype!r}")
        if dtype is torch.bool:
            raise ValueError("dtype: expected numbers, got torch.bool")
        if not isinstance(keys, (list, tuple)):
            raise TypeError(f"keys: expected a list of keys, got {keys!r}")
        self.dtype = dtype
        self.keys = [unravel(key) for key in keys]
        if not self.keys:
            raise ValueError("keys: expected at least one key, got none")
        self.with_next = bool(with_next)
        for key in self._all_keys():
            if key in FLAG_KEYS:
                raise ValueError(f"keys: {format_key(key)} is a flag; flags are never cast")

    def forward(self, data: Any) -> Any:
        """Returns a TensorDict with the columns cast; the given one stays as it is."""
        if not (is_tensordict(data) or is_tensorclass(data)):
            raise TypeError(f"expected a TensorDict, got {type(data).__name__}")
        found: dict[Key, torch.Tensor] = {}
        for key in self._all_keys():
            value = require(data, key)
            if not isinstance(value, torch.Tensor):
                found.update(_columns_below(value, key))
            elif value.dtype is torch.bool:
                raise ValueError(f"key {format_key(key)} is bool; bools are never cast")
            else:
                found[key] = value
        data = data.copy()
        for key, value in found.items():
            data.set(key, value.to(self.dtype))
        return data

    def _all_keys(self) -> list[Key]:
        return [*self.keys, *([("next", *key) for key in self.keys] if self.with_next else [])]

    def __repr__(self) -> str:
        keys = ", ".join(map(format_key, self.keys))
        also = ", with_next=True" if self.with_next else ""
        return f"Cast({dtype_name(self.dtype)}, [{keys}]{also})"


def _columns_below(data: Any, key: Key) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yields the columns of numbers below a key, flags left out."""
    for name, value in data.items():
        path = (*key, name)
        if is_tensordict(value) or is_tensorclass(value):
            yield from _columns_below(value, path)
        elif isinstance(value, torch.Tensor) and not (
            value.dtype is torch.bool or path in FLAG_KEYS
        ):
            yield path, value
