"""How records lie in tensor storages: one tensor a leaf, and rows in and out of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from replaykit.schema import Schema
from replaykit.storages.indexing import ravel
from replaykit.structure import Path

__all__ = ["Columns", "carried"]

_NATIVE = frozenset(
    {
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.complex128,
    }
)  # fmt: skip
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a view of its bytes as a dtype that every torch operation knows."""
    if tensor.dtype in _NATIVE:
        return tensor
    return tensor.view(_CARRIERS[tensor.dtype.itemsize])


class Columns:
    """One tensor of shape ``[slots, *lanes, *F]`` per leaf of a schema.

    ``gather`` returns fresh memory, ``view`` returns views. Slots are not checked against what is
    stored: the caller has done so.
    """

    def __init__(self, schema: Schema, tensors: Mapping[Path, torch.Tensor], ndim: int) -> None:
        self.schema = schema
        self.tensors = dict(tensors)
        self.ndim = ndim
        first = next(iter(self.tensors.values()))
        self.slots = first.shape[0]
        self.lanes = first.shape[1:ndim]
        self.device = first.device

    def __getitem__(self, path: Path) -> torch.Tensor:
        return self.tensors[path]

    def gather(self, index: torch.Tensor) -> dict[Path, torch.Tensor]:
        """Copies the rows at slots ``[B]`` (coordinates ``[B, ndim]``) out: leaves ``[B, *F]``."""
        index = index.to(self.device)
        if self.ndim > 1:
            return self._gather_cells(index)
        return {
            path: carried(column).index_select(0, index).view(column.dtype)
            for path, column in self.tensors.items()
        }

    def _gather_cells(self, index: torch.Tensor) -> dict[Path, torch.Tensor]:
        flat = ravel(index, self.lanes)
        cells = {}
        for path, column in self.tensors.items():
            source = carried(column)
            if source.is_contiguous():
                rows = source.view(-1, *source.shape[self.ndim :]).index_select(0, flat)
            else:
                rows = source[tuple(index.unbind(-1))]
            cells[path] = rows.view(column.dtype)
        return cells

    def view(self, stop: int, index: Any = None) -> dict[Path, torch.Tensor]:
        """Indexes the first ``stop`` slots: views, except where torch itself has to copy."""
        return {
            path: column[:stop]
            if index is None
            else carried(column[:stop])[index].view(column.dtype)
            for path, column in self.tensors.items()
        }

    def scatter(
        self,
        slots: torch.Tensor,
        leaves: Mapping[Path, torch.Tensor],
        kept: torch.Tensor | slice,
    ) -> None:
        """Writes rows ``kept`` of the leaves to distinct slots ``[K]`` of dimension 0.

        An interrupt from the keyboard is passed on after the last column, never between two.
        """
        if not len(slots):
            return
        try:
            self._scatter(slots, leaves, kept)
        except KeyboardInterrupt:
            self._scatter(slots, leaves, kept)
            raise

    def _scatter(
        self,
        slots: torch.Tensor,
        leaves: Mapping[Path, torch.Tensor],
        kept: torch.Tensor | slice,
    ) -> None:
        runs = _runs(slots)
        if runs is None:
            slots = slots.to(self.device)
        for path, column in self.tensors.items():
            target, source = carried(column), carried(leaves[path])[kept]
            if runs is None:
                target[slots] = source.to(self.device)
                continue
            for first, start, stop in runs:
                target[first : first + stop - start].copy_(source[start:stop])


def _runs(slots: torch.Tensor) -> list[tuple[int, int, int]] | None:
    """Splits slots into at most two rising runs ``(first slot, start, stop)``; None if there are
    more. What a ring writes is one run, or two around its end."""
    count = len(slots)
    if count == 1:
        return [(int(slots[0]), 0, 1)]
    breaks = (slots.diff() != 1).nonzero().flatten().tolist()
    if len(breaks) > 1:
        return None
    bounds = [0, *(b + 1 for b in breaks), count]
    return [(int(slots[a]), a, b) for a, b in itertools.pairwise(bounds)]
