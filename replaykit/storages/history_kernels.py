"""Copy rows with their predecessors, and sum rewards over steps, in the compiled core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from replaykit import native
from replaykit._compat import TensorDict, lookup
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.storages.columns import Columns
    from replaykit.storages.row_kernels import NativeRows

__all__ = ["Before", "Frames", "Led", "StepsAhead", "StepsPlan"]

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


_MOST_BYTES = 2**20
"""Up to so many bytes of a batch one thread is enough."""


class StepsPlan(NamedTuple):
    """What is summed, and what is taken over from the last step.

    Attributes:
        reward: a leaf of one number a row.
        flag: a leaf that is asked at the last step; None: none.
        taken: leaves that become those of the last step.
        gamma: discount of one step.
        discounts: what follows 1, 2, ... steps; as many are summed at most.
    """

    reward: Path
    flag: Path | None
    taken: tuple[Path, ...]
    gamma: float
    discounts: tuple[float, ...]


class Led(NamedTuple):
    """``sums`` ``[B, *F]`` like the reward, ``discounts`` ``[B, 1]`` in its dtype, ``used`` int64
    ``[B, 1]``: how many steps were summed, ``ends`` int64 ``[B]``: the time of the last one, and
    ``open`` bool ``[B, 1]``: where the flag is not set there; None where it is not one bool a row.
    """

    sums: torch.Tensor
    discounts: torch.Tensor
    used: torch.Tensor
    ends: Array
    open: torch.Tensor | None


class StepsAhead:
    """A plan, with the addresses of the leaves that it reads; good until these move."""

    @classmethod
    def over(cls, rows: NativeRows, plan: StepsPlan) -> StepsAhead | None:
        """Returns it where the core can sum the reward: one float32 or float64 a row; else None."""
        reward = rows.columns.get(plan.reward)
        if reward is None or reward.dtype not in (torch.float32, torch.float64):
            return None
        return None if reward.shape[rows.ndim :].numel() != 1 else cls(rows, plan)

    def __init__(self, rows: NativeRows, plan: StepsPlan) -> None:
        tensors = [rows.columns[path] for path in plan.taken]
        sizes = [rows.sizes[path] for path in plan.taken]
        reward = rows.columns[plan.reward]
        self._taken = plan.taken
        flag, between = 0, 0
        if plan.flag is not None and plan.flag in rows.columns:
            found = rows.columns[plan.flag]
            if found.dtype is torch.bool and rows.sizes[plan.flag] == 1:
                flag, between = found.data_ptr(), rows.strides[plan.flag]
        self._flagged = bool(flag)
        self._row_bytes = sum(sizes)
        # How leaves that are read as one record lie in it, from the first one on.
        self._offsets: list[int] | None = None
        layout = rows.batch_layout
        if layout is not None and plan.taken and all(p in layout.offsets for p in plan.taken):
            start = layout.offsets[plan.taken[0]]
            self._offsets = [layout.offsets[path] - start for path in plan.taken]
            self._first_bytes, self._stride = sizes[0], layout.stride
            self._strides = [layout.stride] * len(sizes)
        self._core = native.core().StepsAhead(
            reward.data_ptr(),
            rows.strides[plan.reward],
            reward.dtype is torch.float64,
            flag,
            between,
            [tensor.data_ptr() for tensor in tensors],
            [rows.strides[path] for path in plan.taken],
            sizes,
            rows.elements,
            rows.cells,
            plan.gamma,
            plan.discounts,
        )
        self._feature, self._dtype = reward.shape[rows.ndim :], reward.dtype
        self._models = self._new(1)

    def _new(self, count: int) -> list[torch.Tensor]:
        models = [
            torch.empty((count, *self._feature), dtype=self._dtype, device="cpu"),
            torch.empty((count, 1), dtype=self._dtype, device="cpu"),
            torch.empty((count, 1), dtype=torch.int64, device="cpu"),
        ]
        if self._flagged:
            models.append(torch.empty((count, 1), dtype=torch.bool, device="cpu"))
        return models

    def lead(self, batch: Any, element: Array, time: Array, last: Array) -> Led | None:
        """Sums from elements ``[B]`` on, and overwrites the batch's leaves ``taken`` in place.

        Args:
            batch: these rows as they are stored, in memory of their own.
            time, last: int64 ``[B]``: when they are, and the newest row of their episodes.

        Returns:
            None, and nothing has changed, for a batch that is no plain TensorDict, or so large
            that several threads are worth it.

        Raises:
            IndexError: elements that there are not.
        """
        count = len(element)
        if type(batch) is not TensorDict or count * self._row_bytes > _MOST_BYTES:
            return None
        found = self._places(batch, count)
        if found is None:
            return None
        to, strides = found
        models = self._models  # another thread may exchange them
        if models[0].shape[0] != count:
            models = self._models = self._new(count)
        sums, discounts, used, *flags = map(torch.empty_like, models)
        still_open = flags[0] if flags else None
        ends = np.empty(count, np.int64)
        self._core.run(
            element,
            time,
            last,
            ends,
            sums.data_ptr(),
            discounts.data_ptr(),
            used.data_ptr(),
            0 if still_open is None else still_open.data_ptr(),
            to,
            strides,
        )
        return Led(sums, discounts, used, ends, still_open)

    def _places(self, batch: TensorDict, count: int) -> tuple[list[int], list[int]] | None:
        """Addresses of the batch's leaves, and bytes from row to row of each."""
        if not self._taken:
            return [], []
        first = lookup(batch, self._taken[0])
        if type(first) is not torch.Tensor:
            return None
        # Further apart than in a tensor of its own: the rows lie in records, as these do.
        if self._offsets is not None and count > 1:
            base, between = first.data_ptr(), first.stride(0) * first.itemsize
            if between == self._stride != self._first_bytes:
                return [base + offset for offset in self._offsets], self._strides
        leaves = [lookup(batch, path) for path in self._taken]
        if any(type(leaf) is not torch.Tensor for leaf in leaves):
            return None
        return (
            [leaf.data_ptr() for leaf in leaves],
            [leaf.stride(0) * leaf.itemsize for leaf in leaves],
        )
