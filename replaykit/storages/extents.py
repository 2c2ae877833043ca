"""Which memory the values of a tensor take."""

from __future__ import annotations

import torch

__all__ = ["overlaps", "reach"]


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two places of the tensor may be one in memory."""
    if not tensor.numel():
        return False
    needed = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < needed:
                return True
            needed = stride * size
    return False


def reach(tensor: torch.Tensor) -> int:
    """Bytes of its memory up to the tensor's last value."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.dtype.itemsize
