"""Copies of what was stored, beside what later transforms make of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replaykit._compat import lookup
from replaykit.ted import Key, format_key, unravel
from replaykit.transforms.base import Transform

__all__ = ["KeepRaw"]


class KeepRaw(Transform):
    """Keeps some keys as they were stored, under another name.

    Belongs to the stage "raw": it comes before every transform that changes them.

    Args:
        keys: keys to keep, nested ones as tuples.
        under: where: ``("next", "reward")`` comes back as ``(under, "next", "reward")``.

    Raises:
        ValueError: no key. KeyError: on read, a key that the batch does not have, or something
            that is there already.

    Cost: a copy of the values.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import Compose, KeepRaw, LazyTensorStorage, ReplayBuffer, RewardClip
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(2), transform=Compose(
        ...     KeepRaw([("next", "reward")]), RewardClip(-1, 1)))
        >>> _ = rb.extend(TensorDict({"next": {"reward": torch.tensor([[5.0]])}}, [1]))
        >>> rb[:]["next", "reward"].item(), rb[:]["raw", "next", "reward"].item()
        (1.0, 5.0)
    """

    stage = "raw"

    def __init__(self, keys: Sequence[Any], under: str = "raw") -> None:
        if isinstance(keys, str) or not keys:
            raise ValueError(f"expected a list of at least one key, got {keys!r}")
        self.keys: list[Key] = [unravel(key) for key in keys]
        self.under = unravel(under)

    def forward(self, data: Any) -> Any:
        """Adds the copies."""
        for key in self.keys:
            value = lookup(data, key)
            if value is None:
                raise KeyError(f"no key {format_key(key)} to keep")
            if lookup(data, self.under + key) is not None:
                raise KeyError(f"there is a key {format_key(self.under + key)} already")
            data.set(self.under + key, value.clone())
        return data

    def __repr__(self) -> str:
        return f"KeepRaw([{', '.join(map(format_key, self.keys))}], {format_key(self.under)})"
