"""Batches to other devices: everything small in one copy, and taken apart again there.

A copy to an accelerator takes some ten microseconds before its first byte: ten columns of a small
batch take ten times that, packed they take it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from replaykit._compat import fresh_strided
from replaykit.leafwise import map_tensors

__all__ = ["pin", "to_device"]

_ALIGNMENT = 64
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
    target = torch.empty(0, device=device).device  # with the index that tensors there carry
    staged = target.type == "cuda"

    def move(block: torch.Tensor) -> torch.Tensor:
        return block.to(target, non_blocking=non_blocking)

    def stays(tensor: torch.Tensor) -> bool:
        return tensor.device == target

    return _moved(data, move, stays, device=target, pinned=staged)


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
    packed = [t for t in tensors if not stays(t) and _is_plain(t)]
    found = dict(zip(map(id, packed), _move_packed(packed, move, pinned), strict=True))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in found:
            return found[id(tensor)]
        return tensor if stays(tensor) else move(tensor)

    return map_tensors(data, place, device=device)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its bytes, and nothing follows from where it came from."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def _move_packed(tensors: list[torch.Tensor], move: _Move, pinned: bool) -> list[torch.Tensor]:
    """Moves tensors, memory by memory; those that share it share it afterwards."""
    tensors = list(tensors)
    memories: dict[tuple[torch.device, int, int], list[int]] = {}
    for place, tensor in enumerate(tensors):
        # Two arrays may begin at one address and be two memories to torch, one of them longer.
        memory = tensor.untyped_storage()
        key = (tensor.device, memory.data_ptr(), memory.nbytes())
        memories.setdefault(key, []).append(place)
    pieces: list[tuple[torch.Tensor, list[int], int]] = []
    for places in memories.values():
        spans = [_span(tensors[place]) for place in places]
        first = min(start for start, _ in spans) // _ALIGNMENT * _ALIGNMENT
        last = max(stop for _, stop in spans)
        if sum(tensors[place].nbytes for place in places) * 2 >= last - first:
            pieces.append((_bytes_of(tensors[places[0]], first, last), places, first))
        else:  # a few rows of much memory: only what is asked for
            for place in places:
                tensors[place] = tensors[place].clone(memory_format=torch.contiguous_format)
                raw = _bytes_of(tensors[place], 0, tensors[place].nbytes)
                pieces.append((raw, [place], 0))
    moved: list[Any] = [None] * len(tensors)
    small = [piece for piece in pieces if len(piece[0]) < _ALONE_BYTES]
    large = [piece for piece in pieces if len(piece[0]) >= _ALONE_BYTES]
    by_device: dict[torch.device, list[tuple[torch.Tensor, list[int], int]]] = {}
    for piece in small:
        by_device.setdefault(piece[0].device, []).append(piece)
    for source, group in by_device.items():
        blocks = [raw for raw, _, _ in group]
        offsets, size = [], 0
        for raw in blocks:
            offsets.append(size)
            size += -(-len(raw) // _ALIGNMENT) * _ALIGNMENT
        stage = torch.empty(
            size, dtype=torch.uint8, device=source, pin_memory=pinned and source.type == "cpu"
        )
        for raw, offset in zip(blocks, offsets, strict=True):
            stage[offset : offset + len(raw)].copy_(raw)
        there = move(stage)
        for (_, places, first), offset in zip(group, offsets, strict=True):
            for place in places:
                moved[place] = _like(tensors[place], there, offset - first)
    for raw, places, first in large:
        there = move(raw)
        for place in places:
            moved[place] = _like(tensors[place], there, -first)
    return moved


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of the tensor in its memory, and the one after its last."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size, offset = tensor.dtype.itemsize, int(tensor.storage_offset())
    return offset * size, (offset + reach + 1) * size


def _bytes_of(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The bytes of a tensor's memory, uint8, as a view."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    raw.set_(tensor.untyped_storage(), first, (last - first,), (1,))
    return raw


def _like(tensor: torch.Tensor, memory: torch.Tensor, shift: int) -> torch.Tensor:
    """The tensor in other memory, ``shift`` bytes further there than in its own."""
    unit = tensor.dtype.itemsize
    whole = len(memory) // unit * unit  # other tensors of the memory may have smaller values
    values = memory[:whole].view(tensor.dtype)
    offset = int(tensor.storage_offset()) + shift // unit
    return fresh_strided(values, tensor.shape, tensor.stride(), offset)
