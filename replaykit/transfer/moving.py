"""Batches to other devices: everything small in one copy, and taken apart again there.

A copy to an accelerator takes some ten microseconds before its first byte: ten columns of a small
batch take ten times that, packed they take it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from replaykit.leafwise import map_tensors
from replaykit.transfer.packing import Packing, Piece, is_plain, pieces_of, view_in

__all__ = ["device_named", "pin", "to_device"]

_ALONE_BYTES = 2**20
"""Larger pieces move alone: putting them beside the others first would cost more than a copy."""

_Move = Callable[[torch.Tensor], torch.Tensor]


def to_device(data: Any, device: Any, *, non_blocking: bool = False) -> Any:
    """Moves a batch to a device; its small tensors go in one copy.

    Args:
        data: a TensorDict, tensorclass, tensor, or pytree of them, as ``sample`` returns them.
        device: where to.
        non_blocking: do not wait for copies from pinned memory, as ``Tensor.to``.

    Returns:
        The same container with the same values, shapes, dtypes and strides on the device. Tensors
        that were views of one allocation are so again, except small parts of a large one: these
        are moved without the rest, and contiguous. What lies on the device already is the
        same object. Objects that are no tensors stay.

    Cost: one copy for all tensors below 1 MiB, one for each larger one.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, to_device
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
        >>> rows = {"x": torch.arange(9.0), "y": torch.arange(9)}
        >>> _ = rb.extend(TensorDict(rows, [9]))
        >>> batch = to_device(rb.sample(), "cuda" if torch.cuda.is_available() else "cpu")
        >>> bool((batch["x"] == batch["y"]).all())
        True
    """
    target = device_named(device)
    staged = target.type == "cuda"

    def move(block: torch.Tensor) -> torch.Tensor:
        return block.to(target, non_blocking=non_blocking)

    def stays(tensor: torch.Tensor) -> bool:
        return tensor.device == target

    return _moved(data, move, stays, device=target, pinned=staged)


def device_named(device: Any) -> torch.device:
    """Returns a device with its index, as tensors that are made there carry it.

    Raises:
        ValueError: there is none of that name here. TypeError: it is no name of one.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"expected device as one that torch has here, got {device!r}: {reason}"
        ) from None


def pin(data: Any) -> Any:
    """Returns a batch in pinned memory: its small tensors in one allocation.

    Tensors on other devices than the CPU stay.
    """

    def stays(tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu" or tensor.is_pinned()

    return _moved(data, torch.Tensor.pin_memory, stays, device=None, pinned=False)


def _moved(
    data: Any,
    move: _Move,
    stays: Callable[[torch.Tensor], bool],
    *,
    device: torch.device | None,
    pinned: bool,
) -> Any:
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(data, note)
    packed = [t for t in tensors if not stays(t) and is_plain(t)]
    found = dict(zip(map(id, packed), _move_packed(packed, move, pinned), strict=True))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in found:
            return found[id(tensor)]
        return tensor if stays(tensor) else move(tensor)

    return map_tensors(data, place, device=device)


def _move_packed(tensors: list[torch.Tensor], move: _Move, pinned: bool) -> list[torch.Tensor]:
    """Moves tensors, memory by memory; those that share it share it afterwards."""
    tensors = list(tensors)
    pieces = pieces_of(tensors)
    moved: list[Any] = [None] * len(tensors)
    small: dict[torch.device, list[Piece]] = {}
    for piece in pieces:
        if len(piece.raw) < _ALONE_BYTES:
            small.setdefault(piece.raw.device, []).append(piece)
            continue
        there = move(piece.raw)
        for place in piece.places:
            moved[place] = view_in(tensors[place], -piece.first).of(there)
    for source, group in small.items():
        packing = Packing(tensors, group)
        stage = torch.empty(
            packing.nbytes,
            dtype=torch.uint8,
            device=source,
            pin_memory=pinned and source.type == "cpu",
        )
        packing.fill(stage)
        there = move(stage)
        for place, view in packing.views.items():
            moved[place] = view.of(there)
    return moved
