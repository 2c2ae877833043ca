"""Rows with those before them in their lanes, copied side by side by the compiled core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.storages.columns import Columns
    from replaykit.storages.native_rows import NativeRows

__all__ = ["Before", "Frames"]

Array = np.ndarray[Any, Any]

_WIDE_BYTES = 2**20
"""From this size on frames are torch's to copy, whose threads are awake; see ``NativeRows``."""


class Before(NamedTuple):
    """Rows, and how far back one may go from them, NumPy int64 ``[B]`` each.

    Attributes:
        element: which stored rows.
        time: when they are.
        begin: when the first row is that may be taken, if not below ``lowest``.
    """

    element: Array
    time: Array
    begin: Array
    lowest: int


class _Plan(NamedTuple):
    """How some leaves are copied.

    Attributes:
        models: what is made, for one number of rows.
        features: the shape of a frame, a leaf each.
        places: for each frame of the first leaf, then of the next, which result it is in and at
            which byte of its rows.
        strides: bytes from row to row there.
        nbytes: of all frames of a row.
    """

    models: list[torch.Tensor]
    features: list[torch.Size]
    places: list[tuple[int, int]]
    strides: list[int]
    nbytes: int


class Frames:
    """Copies rows and those before them out of columns, without a copy between.

    A frame is a leaf of one row. In the place of one that lies before the first row comes that row,
    or zeros.

    Args:
        columns: whose rows; on the CPU and not in mapped files.
        rows: the way to them.
    """

    def __init__(self, columns: Columns, rows: NativeRows) -> None:
        self._columns, self._rows = columns, rows
        self._plans: dict[Any, _Plan | None] = {}

    def stacks(
        self, paths: tuple[Path, ...], rows: Before, count: int, *, zero: bool, flat: bool
    ) -> dict[Path, tuple[torch.Tensor, torch.Size]] | None:
        """Returns ``count`` frames of each row, the oldest first, in one piece.

        Args:
            zero: take zeros for what is not there.
            flat: put them along the first feature dimension.

        Returns:
            By path ``[B, count, *F]``; ``flat``: ``[B, count * F[0], *F[1:]]`` where there is such
            a dimension; and ``F``. None for what this is not for: large batches, a leaf that is not
            there.
        """
        key = paths, count, flat
        plan = self._plans.get(key, _UNKNOWN)
        if plan is None or (plan is _UNKNOWN and (plan := self._stacks(key)) is None):
            return None
        made = self._made(key, plan, rows, count, zero)
        if made is None:
            return None
        return dict(zip(paths, zip(made, plan.features, strict=True), strict=True))

    def apart(
        self, paths: tuple[Path, ...], rows: Before, count: int
    ) -> list[list[torch.Tensor]] | None:
        """Returns a list of ``count`` leaves ``[B, *F]`` for each path, the oldest frames first;
        zeros where there is none. None as ``stacks``."""
        key = paths, count
        plan = self._plans.get(key, _UNKNOWN)
        if plan is None or (plan is _UNKNOWN and (plan := self._apart(key)) is None):
            return None
        made = self._made(key, plan, rows, count, zero=True)
        if made is None:
            return None
        return [made[at : at + count] for at in range(0, len(made), count)]

    def joined(
        self, paths: tuple[Path, ...], rows: Before, count: int
    ) -> list[torch.Tensor] | None:
        """Returns ``count`` tensors ``[B, A]`` with the values of all paths next to each other, the
        oldest frames first; zeros where there is none. None as ``stacks``, and where they are not
        all of torch's default dtype."""
        key = paths, count, torch.get_default_dtype()
        plan = self._plans.get(key, _UNKNOWN)
        if plan is None or (plan is _UNKNOWN and (plan := self._joined(key)) is None):
            return None
        return self._made(key, plan, rows, count, zero=True)

    def _made(
        self, key: Any, plan: _Plan, rows: Before, count: int, zero: bool
    ) -> list[torch.Tensor] | None:
        number = rows.element.shape[0]
        if number * plan.nbytes >= _WIDE_BYTES:
            return None
        self._columns.follow_memory()
        table, _ = self._rows.table(key[0])
        if plan.models[0].shape[0] != number:
            fresh = [model.new_empty((number, *model.shape[1:])) for model in plan.models]
            plan = self._plans[key] = plan._replace(models=fresh)  # another thread may do the same
        made = [torch.empty_like(model) for model in plan.models]
        bases = [leaf.data_ptr() for leaf in made]
        to = [bases[leaf] + byte for leaf, byte in plan.places]
        table.frames(*rows, self._rows.cells, count, zero, to, plan.strides, 1)
        return made

    # -- plans --------------------------------------------------------------------------------

    def _stacks(self, key: tuple[tuple[Path, ...], int, bool]) -> _Plan | None:
        paths, count, flat = key

        def plan(shapes: list[torch.Size], dtypes: list[torch.dtype], sizes: list[int]) -> _Plan:
            models = [
                _new(_stacked(shape, count, flat), dtype)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            places = [(at, j * size) for at, size in enumerate(sizes) for j in range(count)]
            strides = [count * size for size in sizes for _ in range(count)]
            return _Plan(models, shapes, places, strides, count * sum(sizes))

        return self._planned(key, paths, plan)

    def _apart(self, key: tuple[tuple[Path, ...], int]) -> _Plan | None:
        paths, count = key

        def plan(shapes: list[torch.Size], dtypes: list[torch.dtype], sizes: list[int]) -> _Plan:
            models = [
                _new(shape, dtype)
                for shape, dtype in zip(shapes, dtypes, strict=True)
                for _ in range(count)
            ]
            strides = [size for size in sizes for _ in range(count)]
            places = [(at, 0) for at in range(len(models))]
            return _Plan(models, shapes, places, strides, count * sum(sizes))

        return self._planned(key, paths, plan)

    def _joined(self, key: tuple[tuple[Path, ...], int, torch.dtype]) -> _Plan | None:
        paths, count, dtype = key

        def plan(
            shapes: list[torch.Size], dtypes: list[torch.dtype], sizes: list[int]
        ) -> _Plan | None:
            if any(own is not dtype for own in dtypes):
                return None
            width = sum(sizes)
            models = [_new(torch.Size([width // dtype.itemsize]), dtype) for _ in range(count)]
            before = [sum(sizes[:at]) for at in range(len(sizes))]
            places = [(frame, byte) for byte in before for frame in range(count)]
            return _Plan(models, shapes, places, [width] * len(places), count * width)

        return self._planned(key, paths, plan)

    def _planned(self, key: Any, paths: tuple[Path, ...], plan: Any) -> _Plan | None:
        """Makes a plan and keeps it; None where a leaf is not there."""
        tensors, made = self._columns.tensors, None
        if all(path in tensors for path in paths):
            dtypes = [tensors[path].dtype for path in paths]
            shapes = [tensors[path].shape[self._columns.ndim :] for path in paths]
            sizes = [s.numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
            made = plan(shapes, dtypes, sizes)
        self._plans[key] = made
        return made


_UNKNOWN = _Plan([], [], [], [], 0)


def _new(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((1, *shape), dtype=dtype, device="cpu")


def _stacked(shape: torch.Size, count: int, flat: bool) -> torch.Size:
    if flat and shape:
        return torch.Size([count * shape[0], *shape[1:]])
    return torch.Size([count, *shape])
