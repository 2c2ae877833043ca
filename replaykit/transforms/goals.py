"""Rewards for new goals where the user gives no function: by the compiled core, and by torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from replaykit import native
from replaykit._compat import TensorDict, fields_of, put_all
from replaykit.structure import Path

__all__ = [
    "REACHED",
    "distance_rewards",
    "later_goals",
    "relabel_batch",
    "relabel_later",
    "relabelled",
]

Array = np.ndarray[Any, Any]
Leaves = Sequence[torch.Tensor]

REACHED = 0.05
"""Goals that are closer than this, in Euclidean distance, are reached."""

_NUMBERS = {torch.float32: np.float32, torch.float64: np.float64}
_core = native.core()


def distance_rewards(achieved: torch.Tensor, goal: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """0 where the goal was reached, else -1, in shape and dtype of ``old`` (one number a row).

    Distances are summed in float64, one number after the other, as the core does.

    Example:
        >>> import torch
        >>> from replaykit.transforms.goals import distance_rewards
        >>> goal = torch.tensor([[1.0, 1.0], [1.0, 1.1]])
        >>> distance_rewards(torch.ones(2, 2), goal, torch.zeros(2, 1)).flatten()
        tensor([ 0., -1.])
    """
    if not len(old):
        return torch.zeros_like(old)
    apart = achieved.flatten(1).to(torch.float64) - goal.flatten(1).to(torch.float64)
    if not apart.shape[1]:
        return torch.zeros_like(old)
    near = apart.square_().cumsum(1)[:, -1] < REACHED * REACHED
    return (near.to(old.dtype) - 1).view(old.shape)


def later_goals(
    draws: Array, low: Array, last: Array, p: float, column: torch.Tensor
) -> tuple[Array, Array] | None:
    """Which rows get another goal, and what was achieved at times drawn for them, by the core.

    Args:
        draws: float64 ``[2, B]`` of [0, 1): a row is chosen where the first is below ``p``; of the
            times ``low .. last``, both included, the second takes one.
        low, last: int64 ``[B]``, times of stored rows.
        column: what was achieved, ``[slots, G]``; the row of a time lies in slot ``time % slots``.

    Returns:
        Rows, bool ``[B]``, and goals ``[B, G]``, of all rows; None where the core is missing or
        does not know such a column: it takes float32 and float64 on the CPU.

    Cost: one pass; a third of what NumPy and a read of the rows take for a batch of 256.

    Example:
        >>> import numpy as np, torch
        >>> from replaykit.transforms.goals import later_goals
        >>> draws, low = np.array([[0.9, 0.1], [0.0, 0.5]]), np.array([4, 5])
        >>> found = later_goals(draws, low, low + 1, 0.8, torch.arange(4.0).unsqueeze(1))
        >>> found is None or (found[0].tolist(), found[1].tolist()) == ([False, True], [[0], [2]])
        True
    """
    if _core is None:
        return None
    memory = _memory(column)
    if memory is None:
        return None
    rows, goals = _empty(draws, column)
    _core.later_goals(draws, low, last, p, *memory, rows, goals)
    return rows, goals


def relabel_later(
    draws: Array,
    low: Array,
    last: Array,
    p: float,
    column: torch.Tensor,
    data: Any,
    achieved: str,
    goal: str,
) -> tuple[Array, Array] | None:
    """What ``later_goals`` and ``relabel_batch`` do, written over the leaves of a batch ``[B]``.

    Their memory must be their own: that of a batch that nobody else has seen.

    Returns:
        What ``later_goals`` does; None, and nothing has changed, where one of them cannot.
    """
    if _core is None:
        return None
    memory = _memory(column)
    found = None if memory is None else _branches(data, achieved, goal)
    if found is None or memory is None:
        return None
    leaves, dtype = found[2], column.dtype
    places = _places(leaves, dtype, torch.Size((draws.shape[1], column.shape[1])))
    if places is None:
        return None
    rows, goals = _empty(draws, column)
    _core.relabel_later(
        draws,
        low,
        last,
        p,
        *memory,
        rows,
        goals,
        REACHED,
        *places,
    )
    return rows, goals


def _memory(column: torch.Tensor) -> tuple[int, int, int] | None:
    """Address, bytes from row to row, and rows."""
    if column.ndim != 2 or not column.is_cpu or column.dtype not in _NUMBERS:
        return None
    (slots, width), (across, along) = column.shape, column.stride()
    if not slots or (along != 1 and width > 1):
        return None
    return column.data_ptr(), across * column.dtype.itemsize, slots


def _empty(draws: Array, column: torch.Tensor) -> tuple[Array, Array]:
    # By NumPy, which takes memory in a fifth of the time.
    size = draws.shape[1]
    return np.empty(size, bool), np.empty((size, column.shape[1]), _NUMBERS[column.dtype])


def relabel_batch(data: Any, rows: Array, fresh: torch.Tensor, achieved: str, goal: str) -> bool:
    """Gives the chosen rows of a batch ``[B]`` fresh goals and the rewards for them, by the core.

    For plain TensorDicts and leaves at their top and under ``next``: what ``relabelled`` does, in
    half the time of looking leaves up and setting them one by one.

    Returns:
        False, and nothing has changed, where this is not such a batch.
    """
    found = None if _core is None else _branches(data, achieved, goal)
    if found is None:
        return False
    data, after, leaves = found
    batch, device = fresh.shape[:1], fresh.device
    for part in (data, after):
        if part.is_locked or part.batch_size != batch or part.device not in (None, device):
            return False
    new = _relabelled(rows, fresh, leaves)
    if new is None:
        return False
    put_all(data, {goal: new[0]})
    put_all(after, {goal: new[1], "reward": new[2]})
    return True


def _branches(data: Any, achieved: str, goal: str) -> tuple[TensorDict, TensorDict, Leaves] | None:
    """A batch, what it has under ``next``, and the leaves: what was achieved, the goal, the next
    goal and the reward; None where one is missing or no plain TensorDict or tensor."""
    if type(data) is not TensorDict:
        return None
    fields = fields_of(data)
    after: Any = fields.get("next")
    if type(after) is not TensorDict:
        return None
    inner = fields_of(after)
    leaves = (inner.get(achieved), fields.get(goal), inner.get(goal), inner.get("reward"))
    for leaf in leaves:
        if type(leaf) is not torch.Tensor:
            return None
    return data, after, leaves  # type: ignore[return-value]


def relabelled(
    rows: Array,
    fresh: torch.Tensor,
    leaves: Mapping[Path, torch.Tensor],
    achieved: Path,
    goals: tuple[Path, Path],
    reward: Path,
) -> dict[Path, torch.Tensor] | None:
    """Goals and rewards of a batch ``[n]`` whose chosen rows get fresh goals, by the core.

    Args:
        rows: NumPy bool ``[n]``, which are chosen.
        fresh: ``[n, G]``, in one piece.
        leaves: of the batch: what was achieved, both goals, rewards.
        achieved, goals, reward: their keys.

    Returns:
        New leaves by key; None where the core is missing or does not know such leaves: it takes
        float32 or float64 vectors on the CPU and one reward a row of the same dtype.

    Cost: one pass; a third of what torch takes for a batch of 256.
    """
    if _core is None:
        return None
    new = _relabelled(rows, fresh, [leaves[key] for key in (achieved, *goals, reward)])
    return None if new is None else dict(zip((*goals, reward), new, strict=True))


def _relabelled(
    rows: Array, fresh: torch.Tensor, leaves: Leaves
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The new ones of goal, next goal and reward, which follow what was achieved in ``leaves``."""
    dtype, shape = fresh.dtype, fresh.shape
    if len(shape) != 2 or dtype not in _NUMBERS or not fresh.is_cpu or not fresh.is_contiguous():
        return None
    places = _places(leaves, dtype, shape)
    if places is None:
        return None
    old = leaves[3]
    goal, next_goal = torch.empty_like(fresh), torch.empty_like(fresh)
    reward = torch.empty(old.shape, dtype=dtype, device="cpu")
    _core.relabel(
        dtype is torch.float64,
        rows,
        *shape,
        REACHED,
        fresh.data_ptr(),
        *places,
        goal.data_ptr(),
        next_goal.data_ptr(),
        reward.data_ptr(),
    )
    return goal, next_goal, reward


def _places(leaves: Leaves, dtype: torch.dtype, shape: torch.Size) -> list[int] | None:
    """Address and bytes from row to row of each leaf; three of a shape and one number a row."""
    (size, width), item = shape, dtype.itemsize
    places: list[int] = []
    for leaf in leaves[:3]:
        if leaf.dtype is not dtype or not leaf.is_cpu or leaf.shape != shape:
            return None
        across, along = leaf.stride()
        if along != 1 and width > 1:
            return None
        places += (leaf.data_ptr(), across * item)
    old = leaves[3]
    if old.dtype is not dtype or not old.is_cpu or old.numel() != size or old.ndim > 2:
        return None
    places += (old.data_ptr(), old.stride(0) * item)
    return places
