"""Many tensors as one block of bytes, and taken apart again where the block has gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from replaykit._compat import fresh_strided

__all__ = ["Packing", "Piece", "View", "bytes_of", "is_plain", "pieces_of", "view_in"]

ALIGNMENT = 64
"""Bytes: no value is larger, and so each piece begins where its values may begin."""


class View(NamedTuple):
    """A tensor as a part of a block: ``offset`` counts values of its dtype."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor in a block, uint8 ``[n]``, without a copy."""
        unit = self.dtype.itemsize
        whole = len(block) // unit * unit  # other tensors of the block may have smaller values
        memory = block[:whole].view(self.dtype)
        return fresh_strided([memory], [(0, self.shape, self.stride, self.offset)])[0]


class Piece(NamedTuple):
    """Bytes of one memory, uint8 ``[n]``: those from its byte ``first`` on, in which the tensors
    at ``places`` of a list lie."""

    raw: torch.Tensor
    places: list[int]
    first: int


class Packing:
    """Tensors laid one after the other in a block of bytes.

    Those that are views of one memory stay views of one another. They have to be plain
    (`is_plain`) and are not changed; the block is written by ``fill`` only.

    Args:
        tensors: on any device, all on one.
        pieces: what ``pieces_of`` has found of them, or some of it; None: all.

    Attributes:
        nbytes: size of the block.
        views: by place in ``tensors``.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], pieces: Sequence[Piece] | None = None
    ) -> None:
        if pieces is None:
            tensors = list(tensors)
            pieces = pieces_of(tensors)
        self._pieces = pieces
        self._offsets: list[int] = []
        self.nbytes = 0
        self.views: dict[int, View] = {}
        for piece in pieces:
            for place in piece.places:
                self.views[place] = view_in(tensors[place], self.nbytes - piece.first)
            self._offsets.append(self.nbytes)
            self.nbytes += -(-len(piece.raw) // ALIGNMENT) * ALIGNMENT

    def fill(self, block: torch.Tensor) -> None:
        """Copies the bytes into a block, uint8, of at least ``nbytes``."""
        for piece, offset in zip(self._pieces, self._offsets, strict=True):
            block[offset : offset + len(piece.raw)].copy_(piece.raw)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its bytes, and nothing follows from where it came from."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def pieces_of(tensors: list[torch.Tensor]) -> list[Piece]:
    """The memories of tensors, each with those that are views of it.

    Of a memory of which they are a small part each of them is a piece of its own: a contiguous
    copy, which takes its place in the list.
    """
    memories: dict[tuple[torch.device, int, int], list[int]] = {}
    for place, tensor in enumerate(tensors):
        # Two arrays may begin at one address and be two memories to torch, one of them longer.
        memory = tensor.untyped_storage()
        key = (tensor.device, memory.data_ptr(), memory.nbytes())
        memories.setdefault(key, []).append(place)
    pieces = []
    for places in memories.values():
        spans = [_span(tensors[place]) for place in places]
        first = min(start for start, _ in spans) // ALIGNMENT * ALIGNMENT
        last = max(stop for _, stop in spans)
        if sum(tensors[place].nbytes for place in places) * 2 >= last - first:
            pieces.append(Piece(bytes_of(tensors[places[0]], first, last), places, first))
            continue
        for place in places:
            tensors[place] = tensors[place].clone(memory_format=torch.contiguous_format)
            raw = bytes_of(tensors[place], 0, tensors[place].nbytes)
            pieces.append(Piece(raw, [place], 0))
    return pieces


def view_in(tensor: torch.Tensor, shift: int) -> View:
    """The tensor in another memory, ``shift`` bytes further there than in its own."""
    offset = int(tensor.storage_offset()) + shift // tensor.dtype.itemsize
    return View(tensor.dtype, tensor.shape, tensor.stride(), offset)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of the tensor in its memory, and the one after its last."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size, offset = tensor.dtype.itemsize, int(tensor.storage_offset())
    return offset * size, (offset + reach + 1) * size


def bytes_of(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """The bytes of a tensor's memory, uint8, as a view."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    raw.set_(tensor.untyped_storage(), first, (last - first,), (1,))
    return raw
