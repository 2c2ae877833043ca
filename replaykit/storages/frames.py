"""Rows with those before them in their lanes, copied side by side by the compiled core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.storages.columns import Columns
    from replaykit.storages.native_rows import NativeRows

__all__ = ["Frames"]

Array = np.ndarray[Any, Any]

_MODEL_BYTES = 2**18
"""Up to this size results are kept as models of the next ones: half the time of describing them."""

_WIDE_BYTES = 2**20
"""From this size on frames are torch's to copy, whose threads are awake; see ``NativeRows``."""


class Frames:
    """Copies rows and those before them out of columns, without a copy between.

    A frame is a leaf of one row. Rows are elements; ``reach`` says how many rows lie before one in
    its lane that may be taken: in the place of an earlier one comes the first of them, or zeros.

    Args:
        columns: whose rows; on the CPU and not in mapped files.
        rows: the way to them.
    """

    def __init__(self, columns: Columns, rows: NativeRows) -> None:
        self._tensors, self._ndim, self._rows = columns.tensors, columns.ndim, rows
        self._models: dict[Any, list[torch.Tensor]] = {}
        self._known: dict[tuple[Path, ...], list[tuple[torch.Size, torch.dtype, int]] | None] = {}

    def stacks(
        self,
        paths: tuple[Path, ...],
        elements: Array,
        reach: Array,
        count: int,
        *,
        zero: bool,
        flat: bool,
    ) -> dict[Path, tuple[torch.Tensor, torch.Size]] | None:
        """Returns ``count`` frames of each element, the oldest first, in one piece.

        Args:
            elements: int64 ``[B]``, of stored rows.
            reach: int64 ``[B]``.
            zero: take zeros for what is not there.
            flat: put them along the first feature dimension.

        Returns:
            By path ``[B, count, *F]``; ``flat``: ``[B, count * F[0], *F[1:]]`` where there is such
            a dimension; and ``F``. None for what this is not for: large batches, a leaf that is not
            there.
        """
        known = self._leaves(paths, len(elements) * count)
        if known is None:
            return None
        leaves = self._fresh(
            ("stack", paths, count, flat),
            len(elements),
            [(_stacked(shape, count, flat), dtype) for shape, dtype, _ in known],
        )
        found, to, strides = {}, [], []
        for path, leaf, (shape, _, nbytes) in zip(paths, leaves, known, strict=True):
            found[path] = leaf, shape
            base = leaf.data_ptr()
            to += [base + frame * nbytes for frame in range(count)]
            strides += [count * nbytes] * count
        self._rows.frames(paths, elements, reach, to, strides, zero=zero)
        return found

    def apart(
        self, paths: tuple[Path, ...], elements: Array, reach: Array, count: int
    ) -> list[list[torch.Tensor]] | None:
        """Returns a list of ``count`` leaves ``[B, *F]`` for each path, the oldest frames first;
        zeros where there is none. None as ``stacks``."""
        known = self._leaves(paths, len(elements) * count)
        if known is None:
            return None
        leaves = self._fresh(
            ("apart", paths, count),
            len(elements),
            [(shape, dtype) for shape, dtype, _ in known for _ in range(count)],
        )
        to = [leaf.data_ptr() for leaf in leaves]
        strides = [nbytes for _, _, nbytes in known for _ in range(count)]
        self._rows.frames(paths, elements, reach, to, strides, zero=True)
        return [leaves[at : at + count] for at in range(0, len(leaves), count)]

    def joined(
        self, paths: tuple[Path, ...], elements: Array, reach: Array, count: int
    ) -> list[torch.Tensor] | None:
        """Returns ``count`` tensors ``[B, A]`` with the values of all paths next to each other, the
        oldest frames first; zeros where there is none. None as ``stacks``, and where they are not
        all of torch's default dtype."""
        known = self._leaves(paths, len(elements) * count)
        if known is None:
            return None
        dtype = torch.get_default_dtype()
        if any(own is not dtype for _, own, _ in known):
            return None
        width = sum(nbytes for _, _, nbytes in known)
        shape = torch.Size([width // dtype.itemsize])
        made = self._fresh(("joined", paths, count, dtype), len(elements), [(shape, dtype)] * count)
        bases, before = [leaf.data_ptr() for leaf in made], 0
        to: list[int] = []
        for _, _, nbytes in known:
            to += [base + before for base in bases]
            before += nbytes
        self._rows.frames(paths, elements, reach, to, [width] * len(to), zero=True)
        return made

    def _leaves(
        self, paths: tuple[Path, ...], frames: int
    ) -> list[tuple[torch.Size, torch.dtype, int]] | None:
        """Shape, dtype and bytes of a frame of each path; None where this is not for them."""
        if paths not in self._known:
            self._known[paths] = None
            if all(path in self._tensors for path in paths):
                self._known[paths] = [self._described(self._tensors[path]) for path in paths]
        known = self._known[paths]
        if known is None or frames * sum(nbytes for _, _, nbytes in known) >= _WIDE_BYTES:
            return None
        return known

    def _described(self, tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, int]:
        shape = tensor.shape[self._ndim :]
        return shape, tensor.dtype, shape.numel() * tensor.dtype.itemsize

    def _fresh(
        self, key: Any, rows: int, leaves: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> list[torch.Tensor]:
        models = self._models.get(key)  # another thread may exchange them
        if models is None or len(models[0]) != rows:
            models = [
                torch.empty((rows, *shape), dtype=dtype, device="cpu") for shape, dtype in leaves
            ]
            if sum(model.nbytes for model in models) <= _MODEL_BYTES:
                self._models[key] = models
        return [torch.empty_like(model) for model in models]


def _stacked(shape: torch.Size, count: int, flat: bool) -> torch.Size:
    if flat and shape:
        return torch.Size([count * shape[0], *shape[1:]])
    return torch.Size([count, *shape])
