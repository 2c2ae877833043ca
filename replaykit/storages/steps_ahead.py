"""Sums of rewards over several steps, by the compiled core: one call a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from replaykit import native
from replaykit._compat import TensorDict, lookup
from replaykit.structure import Path

if TYPE_CHECKING:
    from replaykit.storages.native_rows import NativeRows

__all__ = ["Led", "StepsAhead", "StepsPlan"]

Array = np.ndarray[Any, Any]

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
