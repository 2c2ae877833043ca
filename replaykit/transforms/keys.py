"""Choose, rename, join and copy keys when a batch is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from replaykit._compat import lookup
from replaykit.ted import Key, format_key, unravel
from replaykit.transforms.transform import Transform

__all__ = ["CatTensors", "ExcludeTransform", "KeepRaw", "RenameTransform", "SelectTransform"]


class ExcludeTransform(Transform):
    """Drops keys on read; absent ones are ignored.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import ExcludeTransform
        >>> data = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2])
        >>> sorted(ExcludeTransform("a", ("next", "info"))(data).keys())
        ['b']
    """

    def __init__(self, *keys: Any) -> None:
        self.keys = [unravel(key) for key in keys]

    def forward(self, data: Any) -> Any:
        """Returns a TensorDict without the keys; the given one stays as it is."""
        return data.exclude(*self.keys)

    def __repr__(self) -> str:
        return f"ExcludeTransform({', '.join(map(format_key, self.keys))})"


class SelectTransform(Transform):
    """Keeps only the given keys on read.

    Raises:
        KeyError: on read, where one of them is absent.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import SelectTransform
        >>> data = TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2])
        >>> sorted(SelectTransform("a")(data).keys())
        ['a']
    """

    def __init__(self, *keys: Any) -> None:
        self.keys = [unravel(key) for key in keys]

    def forward(self, data: Any) -> Any:
        """Returns a TensorDict of the keys alone; KeyError, where one of them is absent."""
        for key in self.keys:
            require(data, key)
        return data.select(*self.keys)

    def __repr__(self) -> str:
        return f"SelectTransform({', '.join(map(format_key, self.keys))})"


class RenameTransform(Transform):
    """Renames keys on read.

    Raises:
        ValueError: not as many new names as old ones. KeyError: on read, where one is absent.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import RenameTransform
        >>> data = TensorDict({"a": torch.zeros(2)}, [2])
        >>> RenameTransform(["a"], [("next", "b")])(data)["next", "b"].shape
        torch.Size([2])
    """

    def __init__(self, in_keys: Sequence[Any], out_keys: Sequence[Any]) -> None:
        if len(in_keys) != len(out_keys):
            raise ValueError(f"expected {len(in_keys)} new names, got {len(out_keys)}")
        self.in_keys = [unravel(key) for key in in_keys]
        self.out_keys = [unravel(key) for key in out_keys]

    def forward(self, data: Any) -> Any:
        """Returns a TensorDict with the new names; the given one stays as it is."""
        # All values are taken before the first name changes: names may be swapped.
        values = [require(data, key) for key in self.in_keys]
        # A copy, since names may go into branches that the given data shares.
        data = data.exclude(*self.in_keys).copy()
        for key, value in zip(self.out_keys, values, strict=True):
            data.set(key, value)
        return data

    def __repr__(self) -> str:
        return f"RenameTransform({self.in_keys}, {self.out_keys})"


class CatTensors(Transform):
    """Joins tensors along a feature dimension on read.

    Args:
        in_keys: what is joined, in this order.
        out_key: where the result goes.
        dim: feature dimension; negative counts from the end.
        del_keys: whether the parts are dropped.

    Raises:
        KeyError: on read, where a part is absent.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import CatTensors
        >>> data = TensorDict({"a": torch.zeros(2, 3), "b": torch.zeros(2, 1)}, [2])
        >>> CatTensors(["a", "b"], "obs")(data)["obs"].shape
        torch.Size([2, 4])
    """

    def __init__(
        self, in_keys: Sequence[Any], out_key: Any, dim: int = -1, del_keys: bool = True
    ) -> None:
        if not in_keys:
            raise ValueError("expected at least one key to join, got none")
        self.in_keys = [unravel(key) for key in in_keys]
        self.out_key = unravel(out_key)
        self.dim = dim
        self.del_keys = del_keys

    def forward(self, data: Any) -> Any:
        """Returns a TensorDict with the joined tensor; the given one stays as it is."""
        parts = [require(data, key) for key in self.in_keys]
        dim = self.dim if self.dim < 0 else self.dim + data.batch_dims
        joined = torch.cat(parts, dim)
        data = data.exclude(*self.in_keys) if self.del_keys else data
        return data.copy().set(self.out_key, joined)

    def __repr__(self) -> str:
        return f"CatTensors({self.in_keys}, {format_key(self.out_key)}, dim={self.dim})"


def require(data: Any, key: Key) -> Any:
    """Returns the value of a key; KeyError, with the keys that are there, where it is absent."""
    value = lookup(data, key)
    if value is None:
        known = (format_key(unravel(known)) for known in data.keys(True, True))
        raise KeyError(f"no key {format_key(key)}; there are {', '.join(sorted(known))}")
    return value


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
