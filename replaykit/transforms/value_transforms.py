"""Change dtypes, images, rewards and keys when a batch is read."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from tensordict import is_tensorclass

from replaykit._compat import dtype_name, is_tensordict, lookup
from replaykit.keywords import as_number
from replaykit.ted import FLAG_KEYS, REWARD, Key, format_key, unravel
from replaykit.transfer import BatchMemory
from replaykit.transforms.batch_values import (
    ValueTransform,
    as_keys,
    check_range,
    keep_padding,
    real_rows,
    require,
    require_numbers,
    require_tensor,
    with_values,
)
from replaykit.transforms.history import require_all
from replaykit.transforms.transform import Transform


class Cast(ValueTransform):
    """A transform that casts columns to another dtype on read.

    Bools and flags (``done``, ``terminated``, ``truncated``, also under ``next``) are never cast.
    If a key names an entry with several columns, the transform skips the bools and flags below it.

    Args:
        dtype: new dtype of the columns. ``Tensor.to`` converts the values, so floats lose their
            fraction when cast to integers.
        keys: a list of keys of columns, or of entries with columns below them.
        with_next: whether to cast also the same keys under ``next``.

    Raises:
        TypeError: ``dtype`` is not a dtype, or ``keys`` not a list of keys; on read, the data has
            no keys.
        ValueError: ``dtype`` is ``torch.bool``, ``keys`` is empty, or a key names a flag; on read,
            a key names a bool column.
        KeyError: on read, a key is absent, also under ``next``.

    Cost: one pass over each column that has another dtype. Columns that already have ``dtype`` cost
    nothing.

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
        self.dtype, self.keys, self._memory = dtype, as_keys(keys), BatchMemory()
        self.with_next = bool(with_next)
        for key in self._all_keys():
            if key in FLAG_KEYS:
                raise ValueError(f"keys: {format_key(key)} is a flag; flags are never cast")

    def forward(self, data: Any) -> Any:
        """Return a TensorDict with the columns cast; ``data`` does not change."""
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
        return with_values(data, {key: self._cast(value) for key, value in found.items()})

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        if value.dtype is self.dtype or value.requires_grad:
            return value.to(self.dtype)
        return self._memory.new_like(value, self.dtype).copy_(value)

    def _all_keys(self) -> list[Key]:
        return [*self.keys, *([("next", *key) for key in self.keys] if self.with_next else [])]

    def __repr__(self) -> str:
        keys = ", ".join(map(format_key, self.keys))
        also = ", with_next=True" if self.with_next else ""
        return f"Cast({dtype_name(self.dtype)}, [{keys}]{also})"


def _columns_below(data: Any, key: Key) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yield the columns of numbers below a key, except flags."""
    for name, value in data.items():
        path = (*key, name)
        if is_tensordict(value) or is_tensorclass(value):
            yield from _columns_below(value, path)
        elif isinstance(value, torch.Tensor) and not (
            value.dtype is torch.bool or path in FLAG_KEYS
        ):
            yield path, value


_BLOCK_BYTES = 2**18
"""Bytes of floats that each thread scales at a time. Three of the four passes over them then stay
in the caches."""

_OBSERVATION: Final[Key] = ("observation",)
_NEXT_OBSERVATION: Final[Key] = ("next", "observation")


class ImageScale(ValueTransform):
    """A transform that reads byte images as floats from ``min`` to ``max``.

    A byte x becomes ``x / 255 * (max - min) + min``. Written images may be bytes, which are stored
    unchanged, or floats in that range, which become the nearest byte. A byte that is read and
    written again keeps its value.

    Args:
        min: the float for 0.
        max: the float for 255.
        keys: a list of keys of images, uint8 ``[*batch, *F]``; keys under ``next`` are listed
            separately. None: ``observation``, and ``("next", "observation")`` if it is present.

    The result is float32. Padding rows keep their values. Padding is marked by ``validity_mask``,
    ``("collector", "mask")`` or the ``mask`` of padded trajectories.

    Raises:
        TypeError: a bound is not a number, or ``keys`` not a list of keys; on read, images are not
            uint8; on write, images are neither uint8 nor floats.
        ValueError: ``min`` is not below ``max``, a bound is infinite, or ``keys`` is empty; a key
            does not name a tensor, such as a nested observation without ``keys``; on write, floats
            are outside the range.
        KeyError: a key is absent.

    Cost: one pass over the images in memory.

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
        self.keys = None if keys is None else as_keys(keys)
        self._memory = BatchMemory()

    def forward(self, data: Any) -> Any:
        """Return a TensorDict with scaled images; ``data`` does not change."""
        found = self._found(data)
        for key, image in found.items():
            if image.dtype is not torch.uint8:
                raise TypeError(f"key {format_key(key)}: expected uint8, got {image.dtype}")
        real = real_rows(data)
        made = {key: keep_padding(real, self._scaled(image), image) for key, image in found.items()}
        return with_values(data, made)

    def _scaled(self, image: torch.Tensor) -> torch.Tensor:
        scaled = self._memory.new_like(image, torch.float32)
        new, old = (scaled,), (image,)
        if image.ndim and image.is_cpu:
            block = _BLOCK_BYTES * torch.get_num_threads()
            rows = max(1, len(image) * block // max(1, scaled.nbytes))
            new, old = scaled.split(rows), image.split(rows)
        for to, part in zip(new, old, strict=True):
            to.copy_(part).div_(255).mul_(self.max - self.min).add_(self.min)
        return scaled

    def inv(self, data: Any) -> Any:
        """Return a TensorDict with scaled images as bytes; byte images do not change."""
        made = {}
        for key, image in self._found(data).items():
            if image.dtype is torch.uint8:
                continue
            if not image.dtype.is_floating_point:
                raise TypeError(
                    f"key {format_key(key)}: expected uint8 or floats, got {image.dtype}"
                )
            made[key] = self._bytes(image, key)
        return with_values(data, made) if made else data

    def _bytes(self, image: torch.Tensor, key: Key) -> torch.Tensor:
        exact = torch.promote_types(image.dtype, torch.float32)
        levels = image.to(exact).sub(self.min).mul_(255 / (self.max - self.min)).round_()
        # The comparison is False for NaN.
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
                raise ValueError(f"{error}; pass the keys of its images as keys=") from None
        return found

    def __repr__(self) -> str:
        keys = "" if self.keys is None else f", [{', '.join(map(format_key, self.keys))}]"
        return f"ImageScale({self.min:g}, {self.max:g}{keys})"


class _RewardTransform(ValueTransform):
    """A transform that maps one column on read to a column of the same shape.

    Only real rows change.
    """

    def __init__(self, key: Any) -> None:
        self.key = unravel(key)

    def forward(self, data: Any) -> Any:
        """Return the batch with the mapped column; ``data`` does not change.

        Raises:
            TypeError: ``data`` is not a TensorDict, or the column is bool or complex.
            KeyError: the column is absent.
        """
        old = require_numbers(data, self.key)
        new = self._mapped(old, real_rows(data))
        return data.copy().set(self.key, new)

    @abstractmethod
    def _mapped(self, old: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Return the new column; ``real`` marks rows that are not padding, None all rows."""

    def _show(self, *arguments: str) -> str:
        key = [] if self.key == REWARD else [f"key={format_key(self.key)}"]
        return f"{type(self).__name__}({', '.join([*arguments, *key])})"


class RewardClip(_RewardTransform):
    """A transform that clips rewards to ``[min, max]`` on read.

    Args:
        min: smallest reward after clipping.
        max: largest reward after clipping; an infinite bound clips nothing.
        key: key of the column, ``[*batch, *F]``.

    Shape and floating dtypes do not change. An integer dtype does not change if both bounds are
    whole and the dtype has a number between them. Otherwise rewards are converted to torch's
    default dtype. NaN stays NaN. Padding rows keep their values. Padding is marked by
    ``validity_mask``, ``("collector", "mask")`` or the ``mask`` of padded trajectories.

    Raises:
        TypeError: a bound is not a number; on read, the column is bool or complex.
        ValueError: ``min`` is not below ``max``.
        KeyError: on read, the column is absent.

    Cost: one pass over the column.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import RewardClip
        >>> data = TensorDict({"next": {"reward": torch.tensor([[-3.0], [0.5], [9.0]])}}, [3])
        >>> RewardClip(-1, 1)(data)["next", "reward"].squeeze(-1)
        tensor([-1.0000,  0.5000,  1.0000])
    """

    def __init__(self, min: float, max: float, key: Any = REWARD) -> None:
        super().__init__(key)
        self.min, self.max = check_range(min, max)

    def _mapped(self, old: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        low, high = self.min, self.max
        if not old.dtype.is_floating_point:
            limits = torch.iinfo(old.dtype)
            # No value reaches a bound outside the limits of its dtype.
            capped = max(low, limits.min), min(high, limits.max)
            whole = all(math.isinf(bound) or bound.is_integer() for bound in (low, high))
            if whole and limits.min <= capped[0] <= capped[1] <= limits.max:
                return keep_padding(real, old.clamp(int(capped[0]), int(capped[1])), old)
            old = old.to(torch.get_default_dtype())
        return keep_padding(real, old.clamp(low, high), old)

    def __repr__(self) -> str:
        return self._show(f"{self.min:g}", f"{self.max:g}")


class RewardScale(_RewardTransform):
    """A transform that reads rewards as ``reward * scale + shift``.

    Args:
        scale: a positive number.
        shift: number that is added after scaling.
        key: key of the column, ``[*batch, *F]``.

    Shape and floating dtypes do not change; integers are converted to torch's default dtype.
    Padding rows keep their values. Padding is marked by ``validity_mask``, ``("collector",
    "mask")`` or the ``mask`` of padded trajectories.

    Raises:
        TypeError: an argument is not a number; on read, the column is bool or complex.
        ValueError: ``scale`` is not positive, or an argument is not finite.
        KeyError: on read, the column is absent.

    Cost: two passes over the column.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import RewardScale
        >>> data = TensorDict({"next": {"reward": torch.tensor([[1.0], [4.0]])}}, [2])
        >>> RewardScale(0.5, shift=-1)(data)["next", "reward"].squeeze(-1)
        tensor([-0.5000,  1.0000])
    """

    def __init__(self, scale: float, shift: float = 0.0, key: Any = REWARD) -> None:
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
    """A transform that adds a number to rewards on read.

    Args:
        shift: the number to add.
        key: key of the column, ``[*batch, *F]``.

    Shape and floating dtypes do not change; integers are converted to torch's default dtype.
    Padding rows keep their values. Padding is marked by ``validity_mask``, ``("collector",
    "mask")`` or the ``mask`` of padded trajectories.

    Raises:
        TypeError: ``shift`` is not a number; on read, the column is bool or complex.
        ValueError: ``shift`` is not finite.
        KeyError: on read, the column is absent.

    Cost: one pass over the column.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import RewardShift
        >>> data = TensorDict({"next": {"reward": torch.tensor([[0.0], [1.0]])}}, [2])
        >>> RewardShift(-1)(data)["next", "reward"].squeeze(-1)
        tensor([-1.,  0.])
    """

    def __init__(self, shift: float, key: Any = REWARD) -> None:
        super().__init__(key)
        self.shift = as_number("shift", shift, finite=True)

    def _mapped(self, old: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        return keep_padding(real, old + self.shift, old)

    def __repr__(self) -> str:
        return self._show(f"{self.shift:g}")


class RewardMap(_RewardTransform):
    """A transform that applies a function to rewards on read.

    Args:
        fn: function of rewards that returns a tensor of the same shape and any dtype. Its argument
            is the column ``[*batch, *F]``, or in a batch with padding only the real rows,
            ``[n, *F]``. It must not change its argument.
        key: key of the column.

    Padding rows keep their values. Padding is marked by ``validity_mask``, ``("collector",
    "mask")`` or the ``mask`` of padded trajectories.

    Raises:
        TypeError: ``fn`` is not callable; on read, it does not return a tensor, or the column is
            bool or complex.
        ValueError: on read, it returns another shape.
        KeyError: on read, the column is absent.

    Cost: the cost of the function. If the batch has padding, the transform also selects the real
    rows, which waits for an accelerator.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import RewardMap
        >>> data = TensorDict({"next": {"reward": torch.tensor([[-3.0], [0.0], [9.0]])}}, [3])
        >>> RewardMap(torch.sign)(data)["next", "reward"].squeeze(-1)
        tensor([-1.,  0.,  1.])
    """

    def __init__(self, fn: Callable[[torch.Tensor], torch.Tensor], key: Any = REWARD) -> None:
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


class ExcludeTransform(Transform):
    """A transform that drops keys on read; absent keys are ignored.

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
        """Return a TensorDict without the keys; ``data`` does not change."""
        return data.exclude(*self.keys)

    def __repr__(self) -> str:
        return f"ExcludeTransform({', '.join(map(format_key, self.keys))})"


class SelectTransform(Transform):
    """A transform that keeps only the given keys on read.

    Raises:
        KeyError: on read, one of the keys is absent.

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
        """Return a TensorDict of only these keys; raise KeyError if one is absent."""
        for key in self.keys:
            require(data, key)
        return data.select(*self.keys)

    def __repr__(self) -> str:
        return f"SelectTransform({', '.join(map(format_key, self.keys))})"


class RenameTransform(Transform):
    """A transform that renames keys on read.

    Raises:
        ValueError: the counts of old and new names differ.
        KeyError: on read, a key is absent.

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
        """Return a TensorDict with the new names; ``data`` does not change."""
        # Read all values before the first name changes, because names may be swapped.
        values = [require(data, key) for key in self.in_keys]
        # Make a copy, because a new name may belong to a branch that is shared with the argument.
        renamed = dict(zip(self.out_keys, values, strict=True))
        return with_values(data.exclude(*self.in_keys), renamed)

    def __repr__(self) -> str:
        return f"RenameTransform({self.in_keys}, {self.out_keys})"


class CatTensors(Transform):
    """A transform that joins tensors along a feature dimension on read.

    Args:
        in_keys: keys of the parts, in this order.
        out_key: key of the result.
        dim: feature dimension; a negative number counts from the end.
        del_keys: whether to drop the parts.

    Raises:
        ValueError: ``in_keys`` is empty.
        KeyError: on read, a part is absent.

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
        """Return a TensorDict with the joined tensor; ``data`` does not change."""
        parts = [require(data, key) for key in self.in_keys]
        dim = self.dim if self.dim < 0 else self.dim + data.batch_dims
        joined = torch.cat(parts, dim)
        data = data.exclude(*self.in_keys) if self.del_keys else data
        return data.copy().set(self.out_key, joined)

    def __repr__(self) -> str:
        return f"CatTensors({self.in_keys}, {format_key(self.out_key)}, dim={self.dim})"


class KeepRaw(Transform):
    """A transform that copies stored values to other keys before they change.

    The transform belongs to the stage "raw". So put it before every transform that changes these
    keys.

    Args:
        keys: keys to copy; nested keys are tuples.
        under: prefix of the copies. For example, ``("next", "reward")`` is copied to
            ``(under, "next", "reward")``.

    Raises:
        ValueError: ``keys`` is not a list of at least one key.
        KeyError: on read, a key is absent, or the key of its copy exists already.

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
        """Add the copies."""
        values = require_all(data, self.keys, self)
        for key in self.keys:
            if lookup(data, self.under + key) is not None:
                raise KeyError(
                    f"KeepRaw expected no key {format_key(self.under + key)} in the batch; pass "
                    "another prefix as under="
                )
            data.set(self.under + key, values[key].clone())
        return data

    def __repr__(self) -> str:
        return f"KeepRaw([{', '.join(map(format_key, self.keys))}], {format_key(self.under)})"
