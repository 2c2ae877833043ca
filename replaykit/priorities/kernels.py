"""Which kernel serves a tree: a compiled one, or the one in torch."""

from __future__ import annotations

import os
from typing import Any

import torch

from replaykit import native
from replaykit.priorities.layout import Levels
from replaykit.priorities.operations import Operation

__all__ = ["available_kernels", "chosen_kernel", "native_view"]

_VARIABLE = "REPLAYKIT_TREE"


def available_kernels() -> list[str]:
    """Names of the kernels that trees on this machine's CPU can use, the fastest first.

    Example:
        >>> from replaykit.priorities.kernels import available_kernels
        >>> available_kernels()[-1]
        'torch'
    """
    core = native.core()
    return [*([] if core is None else core.tree_kernels()), "torch"]


def chosen_kernel(device: torch.device) -> str:
    """The name of the kernel for a tree on that device.

    The environment variable ``REPLAYKIT_TREE`` (``avx512``, ``portable`` or ``torch``) overrides
    the choice for the CPU; RuntimeError where it names one that this machine cannot use.
    """
    if device.type != "cpu":
        return "torch"
    there = available_kernels()
    wanted = os.environ.get(_VARIABLE, "").strip().lower()
    if not wanted:
        return there[0]
    if wanted not in there:
        raise RuntimeError(
            f"expected {_VARIABLE} to name a kernel that this machine can use, one of "
            f"{', '.join(there)}, got {wanted}"
        )
    return wanted


def native_view(
    name: str,
    operation: Operation,
    levels: Levels,
    leaves: torch.Tensor,
    nodes: torch.Tensor,
) -> Any:
    """The compiled kernel over that memory, which the caller keeps alive."""
    return native.core().SegmentTree(
        operation.name,
        operation.leaf == torch.float64,
        name,
        leaves.data_ptr(),
        nodes.data_ptr(),
        levels.capacity,
    )
