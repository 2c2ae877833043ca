"""Give columns of different data sets the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from replaykit._compat import lookup
from replaykit.declared import Positive, read_value
from replaykit.structure import Path
from replaykit.ted import format_key, unravel
from replaykit.transforms.batch_values import ValueTransform, require_tensor


class Pad(ValueTransform):
    """A transform that pads columns to a common width, and adds columns that a data set lacks.

    The members of a mixture need equal keys, shapes and dtypes. As a transform of each member,
    ``Pad`` appends zeros to the last dimension of a column. A mask, bool ``[B, width]``, is True at
    the numbers that were there. Its key is the key with the suffix ``_mask``.

    Args:
        widths: for each key, the size of its last dimension. Or a tensor with the shape and dtype
            of a row: if the key is absent, its column becomes zeros, and its mask False.

    Raises:
        TypeError: ``widths`` is not a mapping, or a width is neither an int nor a tensor.
        ValueError: a width is below 1, or a tensor has no dimension; on read, a row is wider, has
            no dimension, or differs from the tensor in another dimension or in its dtype.
        KeyError: on read, a key with a width is absent.

    Cost: one copy of each column that is padded.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import Pad
        >>> pad = Pad({"action": 3, "wrist": torch.zeros(2, 2, dtype=torch.uint8)})
        >>> batch = pad(TensorDict({"action": torch.ones(1, 2)}, [1]))
        >>> batch["action"], batch["action_mask"]
        (tensor([[1., 1., 0.]]), tensor([[ True,  True, False]]))
        >>> batch["wrist"].shape, batch["wrist_mask"]
        (torch.Size([1, 2, 2]), tensor([[False, False]]))
    """

    def __init__(self, widths: Mapping[Any, int | torch.Tensor]) -> None:
        if not isinstance(widths, Mapping):
            raise TypeError(f"widths: expected a mapping of keys to widths, got {widths!r}")
        self.widths: dict[Path, int | torch.Tensor] = {}
        for key, width in widths.items():
            name = f"key {key!r}: width"
            if isinstance(width, torch.Tensor):
                if not width.ndim:
                    raise ValueError(f"{name}: expected a tensor with dimensions, got {width!r}")
            elif type(width) is not int:
                raise TypeError(f"{name}: expected an int or a tensor, got {width!r}")
            else:
                read_value(Positive, width, name)
            self.widths[unravel(key)] = width

    def forward(self, data: Any) -> Any:
        """Return a TensorDict with padded columns and masks; ``data`` does not change."""
        made = data.copy()
        for key, width in self.widths.items():
            if isinstance(width, torch.Tensor) and lookup(data, key) is None:
                device = next(iter(data.values(True, True))).device
                shape = (*data.batch_size, *width.shape[:-1], 0)
                old = torch.zeros(shape, dtype=width.dtype, device=device)
            else:
                old = require_tensor(data, key)
            new, size = self._padded(old, data.batch_dims, key, width), old.shape[-1]
            made.set(key, new)
            mask = torch.arange(new.shape[-1], device=new.device) < size
            made.set(
                (*key[:-1], f"{key[-1]}_mask"), mask.expand(*data.batch_size, len(mask)).clone()
            )
        return made

    def _padded(
        self, old: torch.Tensor, dims: int, key: Path, width: int | torch.Tensor
    ) -> torch.Tensor:
        row = old.shape[dims:]
        wanted = width.shape if isinstance(width, torch.Tensor) else (*row[:-1], width)
        fits = bool(row) and row[:-1] == wanted[:-1] and row[-1] <= wanted[-1]
        if not fits or (isinstance(width, torch.Tensor) and old.dtype is not width.dtype):
            kind = f"{width.dtype} " if isinstance(width, torch.Tensor) else ""
            raise ValueError(
                f"key {format_key(key)}: expected rows of at most {kind}{list(wanted)}, got "
                f"{old.dtype} {list(row)}"
            )
        if row == wanted:
            return old
        return torch.nn.functional.pad(old, (0, wanted[-1] - row[-1]))

    def __repr__(self) -> str:
        said = (
            f"{format_key(key)}: {list(width.shape) if isinstance(width, torch.Tensor) else width}"
            for key, width in self.widths.items()
        )
        return f"Pad({{{', '.join(said)}}})"
