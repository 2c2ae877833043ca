"""Copy rows with the rows before them, and sum rewards, in the compiled core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from replaykit import native
from replaykit._compat import TensorDict, lookup
from replaykit.storages.batch_memory import REUSED_FROM
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.storages.columns import Columns
    from replaykit.storages.row_kernels import NativeRows

Array = np.ndarray[Any, Any]


class Before(NamedTuple):
    """Rows, and for each row the first row before it that may be copied.

    The arrays are NumPy int64 ``[B]``.

    Attributes:
        element: the stored rows, as elements.
        time: the times of the rows.
        begin: for each row, the time of the first row to copy. A value below ``lowest`` is replaced
            by ``lowest``.
        lowest: the lowest time of any row to copy.
    """

    element: Array
    time: Array
    begin: Array
    lowest: int


class _Plan(NamedTuple):
    """A plan for copying some leaves.

    Attributes:
        models: empty stacks of one number of rows, as templates.
        places: for each frame, the index of its stack, and the byte of the frame in a row of this
            stack. All frames of a leaf precede the frames of the next leaf.
        strides: for each frame, the bytes from row to row in its stack.
        nbytes: bytes of all frames of a row.
    """

    models: list[torch.Tensor]
    places: list[tuple[int, int]]
    strides: list[int]
    nbytes: int


class Frames:
    """Rows and the rows before them, copied out of columns in one step.

    A frame is the value of a leaf in one row. If the row of a frame precedes the first row to copy,
    the frame is a copy of that first row, or zeros.

    Args:
        columns: the columns, on the CPU and not in mapped files.
        rows: the addresses of these columns.
    """

    def __init__(self, columns: Columns, rows: NativeRows) -> None:
        self._columns, self._rows = columns, rows
        self._plans: dict[Any, _Plan | None] = {}

    def stacks(
        self, paths: tuple[Path, ...], rows: Before, count: int, *, zero: bool
    ) -> dict[Path, torch.Tensor] | None:
        """Return ``count`` frames for each row, the oldest first: ``[B, count, *F]`` by path.

        The result is None if a leaf is missing.

        Args:
            zero: fill missing frames with zeros.
        """
        key, number = (paths, count), rows.element.shape[0]
        if key not in self._plans:
            self._plans[key] = self._plan(*key)
        plan = self._plans[key]
        if plan is None:
            return None
        self._columns.refresh_addresses()
        table, _ = self._rows.table(paths)
        if plan.models[0].shape[0] != number:
            fresh = [model.new_empty((number, *model.shape[1:])) for model in plan.models]
            plan = self._plans[key] = plan._replace(models=fresh)  # another thread may do the same
        memory, threads = self._columns.batch_memory, 1
        if number * plan.nbytes >= REUSED_FROM:
            made = [memory.new(model.shape, model.dtype) for model in plan.models]
            threads = torch.get_num_threads()
        else:
            made = [torch.empty_like(model) for model in plan.models]
        bases = [leaf.data_ptr() for leaf in made]
        to = [bases[leaf] + byte for leaf, byte in plan.places]
        table.frames(*rows, self._rows.cells, count, zero, to, plan.strides, threads)
        return dict(zip(paths, made, strict=True))

    def _plan(self, paths: tuple[Path, ...], count: int) -> _Plan | None:
        """Return a plan; None if a leaf is missing."""
        tensors = self._columns.tensors
        if not all(path in tensors for path in paths):
            return None
        leaves = [tensors[path] for path in paths]
        shapes = [leaf.shape[self._columns.ndim :] for leaf in leaves]
        sizes = [leaf.dtype.itemsize * s.numel() for leaf, s in zip(leaves, shapes, strict=True)]
        models = [
            torch.empty((1, count, *shape), dtype=leaf.dtype, device="cpu")
            for shape, leaf in zip(shapes, leaves, strict=True)
        ]
        places = [(at, j * size) for at, size in enumerate(sizes) for j in range(count)]
        strides = [count * size for size in sizes for _ in range(count)]
        return _Plan(models, places, strides, count * sum(sizes))


_MOST_BYTES = 2**20
"""Bytes of the largest batch for which one thread is enough."""


class StepsPlan(NamedTuple):
    """The rewards to sum, and the leaves to copy from the last step.

    Attributes:
        reward: the leaf to sum, with one number per row.
        flag: a leaf to read at the last step, or None.
        taken: the leaves of the batch that are replaced by the values at the last step.
        gamma: the discount of one step.
        discounts: the discounts after 1, 2, ... steps. There is one discount for each step, up to
            the largest number of steps.
    """

    reward: Path
    flag: Path | None
    taken: tuple[Path, ...]
    gamma: float
    discounts: tuple[float, ...]


class Led(NamedTuple):
    """The results of ``StepsAhead.lead``.

    Attributes:
        sums: the sums ``[B, *F]``, like the reward.
        discounts: the discount after the last step, ``[B, 1]`` in the dtype of the reward.
        used: int64 ``[B, 1]``, the number of summed steps.
        ends: int64 ``[B]``, the time of the last step.
        open: bool ``[B, 1]``, True if the flag is not set at the last step. None if the flag is not
            one bool per row.
    """

    sums: torch.Tensor
    discounts: torch.Tensor
    used: torch.Tensor
    ends: Array
    open: torch.Tensor | None


class StepsAhead:
    """A plan with the addresses of its leaves, valid until the leaves move in memory."""

    @classmethod
    def over(cls, rows: NativeRows, plan: StepsPlan) -> StepsAhead | None:
        """Return an object if the reward is one float32 or float64 per row, else None."""
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
        # Offsets of the leaves from the first leaf, if all are in the same record of a batch.
        self._offsets: list[int] | None = None
        layout = rows.batch_layout
        if layout is not None and plan.taken and all(p in layout.offsets for p in plan.taken):
            start = layout.offsets[plan.taken[0]]
            self._offsets = [layout.offsets[path] - start for path in plan.taken]
            self._first_bytes, self._stride = sizes[0], layout.stride
            self._strides = [layout.stride] * len(sizes)
        self._core = native.core.StepsAhead(
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
        """Sum the rewards from each row on, and overwrite ``StepsPlan.taken`` in a batch.

        The leaves ``StepsPlan.taken`` of the batch get their values at the last step.

        Args:
            batch: a copy of these rows, which is changed in place; None if the plan takes no leaf.
            element: the rows to start from, int64 ``[B]``.
            time: the times of the rows, int64 ``[B]``.
            last: the times of the last rows of their episodes, int64 ``[B]``.

        Returns:
            None if the batch is not a plain TensorDict, or is so large that several threads are
            faster. Nothing has changed then.

        Raises:
            IndexError: an element is not stored, or ``last`` contradicts the stored rows.
        """
        count = len(element)
        if count * self._row_bytes > _MOST_BYTES:
            return None
        found = self._addresses(batch, count)
        if found is None:
            return None
        to, strides = found
        models = self._models  # another thread may replace them
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

    def _addresses(self, batch: Any, count: int) -> tuple[list[int], list[int]] | None:
        """Return the addresses of the batch's leaves, and the strides in bytes."""
        if not self._taken:
            return [], []
        if type(batch) is not TensorDict:
            return None
        first = lookup(batch, self._taken[0])
        if type(first) is not torch.Tensor:
            return None
        # If rows are further apart than in a separate tensor, they are in records of the known
        # layout.
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
