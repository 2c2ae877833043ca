"""Change dtypes, images and rewards when a batch is read."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from tensordict import is_tensorclass

from replaykit._compat import dtype_name, is_tensordict, lookup
from replaykit.ted import FLAG_KEYS, Key, format_key, unravel
from replaykit.transforms.batch_values import (
    ValueTransform,
    as_number,
    check_range,
    keep_padding,
    real_rows,
    require_tensor,
)
from replaykit.transforms.keys import require

__all__ = ["Cast", "ImageScale", "RewardClip", "RewardMap", "RewardScale", "RewardShift"]


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


_OBSERVATION: Final[Key] = ("observation",)
_NEXT_OBSERVATION: Final[Key] = ("next", "observation")


class ImageScale(ValueTransform):
    """Reads images of bytes as floats from ``min`` to ``max``: ``x / 255 * (max - min) + min``.

    Written images may be bytes, which are stored as they are, or floats of that range, which become
    the nearest byte: every byte survives the way out and in again.

    Args:
        min: what 0 becomes.
        max: what 255 becomes.
        keys: a list of keys of images, uint8 ``[*batch, *F]``; those under ``next`` are named like
            others. None: ``observation``, and ``("next", "observation")`` where it is there.

    The result is float32. Padding, by ``validity_mask``, ``("collector", "mask")`` or the ``mask``
    of padded trajectories, keeps its values.

    Raises:
        TypeError: bounds that are no numbers; ``keys`` is no list of keys; on read, images that are
            not uint8; on write, neither uint8 nor floats.
        ValueError: ``min`` is not below ``max``, or one is infinite; no keys; a key that is no
            tensor, as a nested observation without ``keys``; on write, floats outside the range.
        KeyError: a key is absent.

    Cost: four passes over the images.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import ImageScale
        >>> scale = ImageScale(keys=["pixels"])
        >>> data = TensorDict({"pixels": torch.tensor([[0, 255]], dtype=torch.uint8)}, [1])
        >>> scale(data)["pixels"]
        tensor([[-1.,  1.]])
        >>> scale.inv(scale(data))["pixels"]
        tensor([[  0, 255]], dtype=torch.uint8)
    """

    def __init__(
        self, min: float = -1.0, max: float = 1.0, keys: Sequence[Any] | None = None
    ) -> None:
        as_number("min", min, finite=True)
        as_number("max", max, finite=True)
        self.min, self.max = check_range(min, max)
        if keys is not None and not isinstance(keys, (list, tuple)):
            raise TypeError(f"keys: expected a list of keys, got {keys!r}")
        self.keys = None if keys is None else [unravel(key) for key in keys]
        if self.keys == []:
            raise ValueError("keys: expected at least one key, got none")

    def forward(self, data: Any) -> Any:
        """Returns a TensorDict with scaled images; the given one stays as it is."""
        found = self._found(data)
        for key, image in found.items():
            if image.dtype is not torch.uint8:
                raise TypeError(f"key {format_key(key)}: expected uint8, got {image.dtype}")
        real = real_rows(data)
        data = data.copy()
        for key, image in found.items():
            scaled = image.to(torch.float32).div_(255).mul_(self.max - self.min).add_(self.min)
            data.set(key, keep_padding(real, scaled, image))
        return data

    def inv(self, data: Any) -> Any:
        """Returns a TensorDict with bytes in place of scaled images; bytes stay."""
        made = {}
        for key, image in self._found(data).items():
            if image.dtype is torch.uint8:
                continue
            if not image.dtype.is_floating_point:
                raise TypeError(
                    f"key {format_key(key)}: expected uint8 or floats, got {image.dtype}"
                )
            made[key] = self._bytes(image, key)
        if not made:
            return data
        data = data.copy()
        for key, image in made.items():
            data.set(key, image)
        return data

    def _bytes(self, image: torch.Tensor, key: Key) -> torch.Tensor:
        exact = torch.promote_types(image.dtype, torch.float32)
        levels = image.to(exact).sub(self.min).mul_(255 / (self.max - self.min)).round_()
        # Also false for NaN.
        if not bool(((levels >= 0) & (levels <= 255)).all()):
            raise ValueError(
                f"key {format_key(key)}: expected values from {self.min:g} to {self.max:g}, got "
                f"values from {image.min():g} to {image.max():g}"
            )
        return levels.to(torch.uint8)

    def _found(self, data: Any) -> dict[Key, torch.Tensor]:
        if self.keys is not None:
            return {key: require_tensor(data, key) for key in self.keys}
        keys = [_OBSERVATION]
        if lookup(data, _NEXT_OBSERVATION) is not None:
            keys.append(_NEXT_OBSERVATION)
        found = {}
        for key in keys:
            try:
                found[key] = require_tensor(data, key)
            except ValueError as error:
                raise ValueError(f"{error}; name the images in it with keys=") from None
        return found

    def __repr__(self) -> str:
        keys = "" if self.keys is None else f", [{', '.join(map(format_key, self.keys))}]"
        return f"ImageScale({self.min:g}, {self.max:g}{keys})"


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
