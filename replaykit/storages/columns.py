"""How records lie in tensor storages: one tensor a leaf, and rows in and out of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from replaykit.schema import Schema
from replaykit.storages.indexing import ravel
from replaykit.structure import Path
from replaykit.ted import format_key

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
        self._overlapping = [p for p, tensor in self.tensors.items() if _overlaps(tensor)]
        memory = [tensor.untyped_storage() for tensor in self.tensors.values()]
        self._memory = {storage.data_ptr() for storage in memory}
        self._from = min(self._memory)
        self._to = max(storage.data_ptr() + storage.nbytes() for storage in memory)

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
        self.check_writable()
        runs = _runs(slots)
        if runs is None:
            slots = slots.to(self.device)
        # All values are at hand, in memory of their own, before the first one is written: what can
        # fail, fails here, and rows that are views of these columns are not overwritten on the way.
        sources = {path: self.own(_picked(leaves[path], kept)) for path in self.tensors}
        try:
            self._scatter(slots, runs, sources)
        except KeyboardInterrupt:
            self._scatter(slots, runs, sources)
            raise

    def check_writable(self) -> None:
        """Raises RuntimeError where rows of a wrapped tensor share memory: one write would change
        several of them."""
        if self._overlapping:
            key = format_key(self._overlapping[0] or ("(root)",))
            raise RuntimeError(
                f"expected rows with memory of their own, got an expanded or overlapping tensor "
                f"under {key}; clone() it to write to it"
            )

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the values on the columns' device, copied if they lie in the columns' memory."""
        # Most values lie elsewhere altogether, which is ten times cheaper to tell.
        near = self._from <= values.data_ptr() < self._to
        if near and values.untyped_storage().data_ptr() in self._memory:
            return values.clone()
        return values if values.device == self.device else values.to(self.device)

    def _scatter(
        self,
        slots: torch.Tensor,
        runs: list[tuple[int, int, int]] | None,
        sources: Mapping[Path, torch.Tensor],
    ) -> None:
        for path, column in self.tensors.items():
            target, source = carried(column), sources[path]
            if runs is None:
                target[slots] = source
                continue
            for first, start, stop in runs:
                rows = source if len(runs) == 1 else source[start:stop]
                target[first : first + stop - start].copy_(rows)


def _overlaps(tensor: torch.Tensor) -> bool:
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


def _picked(rows: Any, kept: torch.Tensor | slice) -> torch.Tensor:
    if isinstance(rows, torch.Tensor):
        whole = isinstance(kept, slice) and kept.start in (None, 0) and kept.stop is None
        return carried(rows) if whole else carried(rows)[kept]
    return carried(rows[kept])  # rows in files


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
