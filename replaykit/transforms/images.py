"""Images: stored as bytes, read as floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from replaykit._compat import lookup
from replaykit.ted import Key, format_key, unravel
from replaykit.transforms.values import (
    ValueTransform,
    as_number,
    check_range,
    keep_padding,
    real_rows,
    require_tensor,
)

__all__ = ["ImageScale"]

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
