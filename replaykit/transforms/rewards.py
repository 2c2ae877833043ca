"""Rewards clipped, scaled, shifted or mapped on read; what is stored stays."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from replaykit.ted import format_key, unravel
from replaykit.transforms.values import (
    ValueTransform,
    as_number,
    check_range,
    keep_padding,
    real_rows,
    require_tensor,
)

__all__ = ["RewardClip", "RewardMap", "RewardScale", "RewardShift"]

_REWARD = ("next", "reward")


class _RewardTransform(ValueTransform):
    """Replaces one column on read by another one of its shape, on real rows alone."""

    def __init__(self, key: Any) -> None:
        self.key = unravel(key)

    def forward(self, data: Any) -> Any:
        """Returns the batch with the mapped column; the given one stays as it is.

        Raises:
            TypeError: no TensorDict, or the column is bool or complex. KeyError: no such column.
        """
        old = require_tensor(data, self.key)
        if old.dtype is torch.bool or old.dtype.is_complex:
            raise TypeError(f"key {format_key(self.key)}: expected real numbers, got {old.dtype}")
        new = self._mapped(old, real_rows(data))
        return data.copy().set(self.key, new)

    @abstractmethod
    def _mapped(self, old: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """The new column; ``real``: which rows are no padding, None: all."""

    def _show(self, *arguments: str) -> str:
        key = [] if self.key == _REWARD else [f"key={format_key(self.key)}"]
        return f"{type(self).__name__}({', '.join([*arguments, *key])})"


class RewardClip(_RewardTransform):
    """Clips rewards to ``[min, max]`` on read.

    Args:
        min: smallest reward that is left.
        max: largest one; infinite bounds clip nothing.
        key: the column, ``[*batch, *F]``.

    Shape and floating dtype stay; integers keep theirs where both bounds are whole and some number
    of it lies between them, and become torch's default dtype otherwise. NaN stays NaN. Padding, by
    ``validity_mask``, ``("collector", "mask")`` or the ``mask`` of padded trajectories, stays.

    Raises:
        TypeError: bounds that are no numbers; on read, where the column is bool or complex.
        ValueError: ``min`` is not below ``max``. KeyError: on read, where the column is absent.

    Cost: one pass over the column.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import RewardClip
        >>> data = TensorDict({"next": {"reward": torch.tensor([[-3.0], [0.5], [9.0]])}}, [3])
        >>> RewardClip(-1, 1)(data)["next", "reward"].squeeze(-1)
        tensor([-1.0000,  0.5000,  1.0000])
    """

    def __init__(self, min: float, max: float, key: Any = _REWARD) -> None:
        super().__init__(key)
        self.min, self.max = check_range(min, max)

    def _mapped(self, old: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        low, high = self.min, self.max
        if not old.dtype.is_floating_point:
            limits = torch.iinfo(old.dtype)
            # Bounds beyond the dtype's, which it cannot hold, are never reached.
            capped = max(low, limits.min), min(high, limits.max)
            whole = all(math.isinf(bound) or bound.is_integer() for bound in (low, high))
            if whole and limits.min <= capped[0] <= capped[1] <= limits.max:
                return keep_padding(real, old.clamp(int(capped[0]), int(capped[1])), old)
            old = old.to(torch.get_default_dtype())
        return keep_padding(real, old.clamp(low, high), old)

    def __repr__(self) -> str:
        return self._show(f"{self.min:g}", f"{self.max:g}")


class RewardScale(_RewardTransform):
    """Multiplies rewards by a scale on read, then adds a shift: ``reward * scale + shift``.

    Args:
        scale: positive.
        shift: added after scaling.
        key: the column, ``[*batch, *F]``.

    Shape and floating dtype stay; integers become torch's default dtype. Padding, by
    ``validity_mask``, ``("collector", "mask")`` or the ``mask`` of padded trajectories, stays.

    Raises:
        TypeError: no numbers; on read, where the column is bool or complex.
        ValueError: a scale that is not positive, or a number that is not finite.
        KeyError: on read, where the column is absent.

    Cost: two passes over the column.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import RewardScale
        >>> data = TensorDict({"next": {"reward": torch.tensor([[1.0], [4.0]])}}, [2])
        >>> RewardScale(0.5, shift=-1)(data)["next", "reward"].squeeze(-1)
        tensor([-0.5000,  1.0000])
    """

    def __init__(self, scale: float, shift: float = 0.0, key: Any = _REWARD) -> None:
        super().__init__(key)
        self.scale = as_number("scale", scale, finite=True)
        self.shift = as_number("shift", shift, finite=True)
        if self.scale <= 0:
            raise ValueError(f"scale: expected a positive number, got {self.scale}")

    def _mapped(self, old: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        new = old * self.scale
        return keep_padding(real, new + self.shift if self.shift else new, old)

    def __repr__(self) -> str:
        shift = [f"shift={self.shift:g}"] if self.shift else []
        return self._show(f"{self.scale:g}", *shift)


class RewardShift(_RewardTransform):
    """Adds a number to rewards on read.

    Args:
        shift: what is added.
        key: the column, ``[*batch, *F]``.

    Shape and floating dtype stay; integers become torch's default dtype. Padding, by
    ``validity_mask``, ``("collector", "mask")`` or the ``mask`` of padded trajectories, stays.

    Raises:
        TypeError: no number; on read, where the column is bool or complex.
        ValueError: not finite. KeyError: on read, where the column is absent.

    Cost: one pass over the column.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import RewardShift
        >>> data = TensorDict({"next": {"reward": torch.tensor([[0.0], [1.0]])}}, [2])
        >>> RewardShift(-1)(data)["next", "reward"].squeeze(-1)
        tensor([-1.,  0.])
    """

    def __init__(self, shift: float, key: Any = _REWARD) -> None:
        super().__init__(key)
        self.shift = as_number("shift", shift, finite=True)

    def _mapped(self, old: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        return keep_padding(real, old + self.shift, old)

    def __repr__(self) -> str:
        return self._show(f"{self.shift:g}")


class RewardMap(_RewardTransform):
    """Applies a function to rewards on read.

    Args:
        fn: takes rewards and returns as many, a tensor of the same shape, of any dtype. Where
            the batch has padding it gets the real rows alone, ``[n, *F]``, else the column
            ``[*batch, *F]``. It must leave what it is given as it is.
        key: the column.

    Padding, by ``validity_mask``, ``("collector", "mask")`` or the ``mask`` of padded
    trajectories, stays.

    Raises:
        TypeError: ``fn`` is not callable; on read, where it returns no tensor, or the column is
            bool or complex. ValueError: on read, where it returns another shape.
        KeyError: on read, where the column is absent.

    Cost: the function's; with padding also the selection of rows, which waits for an accelerator.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import RewardMap
        >>> data = TensorDict({"next": {"reward": torch.tensor([[-3.0], [0.0], [9.0]])}}, [3])
        >>> RewardMap(torch.sign)(data)["next", "reward"].squeeze(-1)
        tensor([-1.,  0.,  1.])
    """

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor], key: Any = _REWARD) -> None:
        super().__init__(key)
        if not callable(fn):
            raise TypeError(f"fn: expected a function of rewards, got {fn!r}")
        self.fn = fn

    def _mapped(self, old: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        given = old if real is None else old[real]
        new = self.fn(given)
        if not isinstance(new, torch.Tensor):
            raise TypeError(f"{self!r}: expected a tensor of rewards, got {type(new).__name__}")
        if new.shape != given.shape:
            raise ValueError(
                f"{self!r}: expected rewards of shape {list(given.shape)}, got {list(new.shape)}"
            )
        if real is None:
            return new
        whole = old.to(new.dtype, copy=True)
        whole[real] = new
        return whole

    def __repr__(self) -> str:
        return self._show(getattr(self.fn, "__name__", repr(self.fn)))
