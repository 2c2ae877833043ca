"""Replace goals by goals that were achieved later, and recompute rewards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from replaykit import native
from replaykit._compat import TensorDict, fields_of, lookup
from replaykit.keywords import as_share, one_of
from replaykit.structure import Path
from replaykit.ted import DONE, REWARD, TERMINATED, TRUNCATED, Key, format_key, unravel
from replaykit.transforms.batch_values import set_all
from replaykit.transforms.history import (
    Around,
    HistoryTransform,
    Surroundings,
    as_tensor_like,
    over_features,
    require_all,
)

Array = np.ndarray[Any, Any]
Leaves = Sequence[torch.Tensor]

REACHED = 0.05
"""A goal is reached if the achieved goal is closer than this distance."""

_NUMBERS = {torch.float32: np.float32, torch.float64: np.float64}


def distance_rewards(achieved: torch.Tensor, goal: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return 0 for rows that reached the goal, and -1 for other rows.

    The result has the shape and dtype of ``old``, one number per row. Squares are summed in float64
    from the first number to the last, as in the compiled core.

    Example:
        >>> import torch
        >>> from replaykit.transforms.hindsight import distance_rewards
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
    """Choose rows in the compiled core, and return them with goals achieved later.

    Args:
        draws: float64 ``[2, B]`` in [0, 1). A row is chosen if its first number is below ``p``. The
            second number selects one of the times ``low .. last``, both included.
        low, last: int64 ``[B]``, times of stored rows.
        column: the achieved goals, ``[slots, G]``; the row of a time is in slot ``time % slots``.

    Returns:
        The chosen rows, bool ``[B]``, and goals ``[B, G]`` for all rows. None if the core
        does not support the column. The core supports float32 and float64 on the CPU.

    Cost: one pass. For a batch of 256 rows, NumPy takes three times as long to choose the rows and
    then read them.

    Example:
        >>> import numpy as np, torch
        >>> from replaykit.transforms.hindsight import later_goals
        >>> draws, low = np.array([[0.9, 0.1], [0.0, 0.5]]), np.array([4, 5])
        >>> found = later_goals(draws, low, low + 1, 0.8, torch.arange(4.0).unsqueeze(1))
        >>> found is None or (found[0].tolist(), found[1].tolist()) == ([False, True], [[0], [2]])
        True
    """
    memory = _memory(column)
    if memory is None:
        return None
    size, width = draws.shape[1], column.shape[1]
    # NumPy allocates in a fifth of the time of torch.
    rows, goals = np.empty(size, bool), np.empty((size, width), _NUMBERS[column.dtype])
    native.core.later_goals(draws, low, last, p, *memory, rows, goals)
    return rows, goals


def _memory(column: torch.Tensor) -> tuple[int, int, int] | None:
    """Return the address of a column, its row stride in bytes, and its number of rows."""
    if column.ndim != 2 or not column.is_cpu or column.dtype not in _NUMBERS:
        return None
    (slots, width), (across, along) = column.shape, column.stride()
    if not slots or (along != 1 and width > 1):
        return None
    return column.data_ptr(), across * column.dtype.itemsize, slots


def relabel_rows(rows: Array, goals: Array, leaves: Leaves) -> bool:
    """Set goals and rewards in the chosen rows of leaves, in the compiled core.

    The core supports float32 or float64 vectors on the CPU, with one reward of the same dtype per
    row.

    Args:
        rows: bool ``[B]``, True at chosen rows.
        goals: the new goals, ``[B, G]``, contiguous.
        leaves: achieved goals, goals, next goals and rewards of a batch. All but the first are
            changed in place.

    Returns:
        False if the core does not support the leaves, which are then unchanged.

    Cost: one pass. For a batch of 256 rows, the call takes a third of the time of the same work in
    torch.
    """
    places = _addresses(leaves, goals)
    if places is None:
        return False
    native.core.relabel(rows, goals, REACHED, *places)
    return True


def _plain_leaves(data: Any, achieved: str, goal: str) -> Leaves | None:
    """Return the leaves of a batch for ``relabel_rows``.

    The result is None if a part is missing, or is not a plain TensorDict or tensor.
    """
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
    return leaves  # type: ignore[return-value]


def _addresses(leaves: Leaves, goals: Array) -> list[int] | None:
    """Return address and row stride in bytes of each leaf: three goals and a reward."""
    old = leaves[3]
    dtype = old.dtype
    if goals.ndim != 2 or _NUMBERS.get(dtype) is not goals.dtype.type:
        return None
    shape, item = goals.shape, dtype.itemsize
    size, width = shape
    places: list[int] = []
    for leaf in leaves[:3]:
        if leaf.dtype is not dtype or not leaf.is_cpu or leaf.shape != shape:
            return None
        across, along = leaf.stride()
        if along != 1 and width > 1:
            return None
        places += (leaf.data_ptr(), across * item)
    if not old.is_cpu or old.numel() != size or old.ndim > 2:
        return None
    places += (old.data_ptr(), old.stride(0) * item)
    return places


GoalFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_STRATEGIES: Final = ("future", "final", "episode", "random")


@dataclass
class _Relabelled:
    """The rows of a batch that get new goals, and these goals.

    Attributes:
        rows: bool ``[B]``, True at the rows that get new goals.
        achieved: the new goals, ``[B, *G]``.
        done: whether the batch already has the new goals.
    """

    rows: Array
    achieved: torch.Tensor | Array
    done: bool = False

    @property
    def goals(self) -> torch.Tensor:
        """The goals as a tensor, converted only if a batch needs it."""
        given = self.achieved
        return given if isinstance(given, torch.Tensor) else torch.from_numpy(given)


class HindsightGoal(HistoryTransform):
    """A transform that replaces goals by goals achieved later (hindsight replay).

    The transform chooses each window of a batch with probability ``p``. In a batch without windows
    it chooses each row. For a chosen window it draws a stored row. The goal that was achieved in
    that row, ``("next", achieved)``, becomes ``goal`` and ``("next", goal)`` of the window. The
    transform then recomputes the reward of each row of the window, from the row's ``("next",
    achieved)`` and the new goal. Other rows and padding do not change. Stored rows never change.

    If a window crosses episodes, only the rows in the episode of its first real row change. Later
    transforms that read other rows (``NStep``, ``PreviousStep``, ``StackFrames``) also read the new
    goals and rewards of the episode's other rows. So put this transform before these transforms.
    Stored returns (``ReturnToGo``) still belong to the old goals.

    Args:
        p: probability, in [0, 1]; 0 changes nothing.
        strategy: the stored row that the new goal comes from. "future": uniform over the rows from
            the row itself to the end of its episode, both included. In an open episode the end is
            the newest row. "final": the end of the episode. "episode": uniform over the stored rows
            of the episode. "random": uniform over all stored rows; after a ``TrajectoryTransform``,
            over the rows in the episodes of the batch.
        achieved: key of the achieved goal, ``[*G]`` per row; read under ``next``.
        goal: key of the goal, ``[*G]``; also written under ``next``.
        reward_fn: function of achieved goals and goals, ``[n, *G]`` each, that returns rewards in
            their stored shape, ``[n, 1]``. It must not change its arguments. The arguments are
            whole batches, so they include rows that keep their reward. None: the reward is 0 if the
            Euclidean distance is below 0.05, else -1.
        terminated_fn: function of the same arguments that returns bool. Its result replaces
            ``("next", "terminated")`` and changes ``("next", "done")``. None: the flags do not
            change.
        scope: "window": one goal for all rows of a window, achieved at its last row or later.
            "step": a separate goal for each row.
        check: "warn" or "error": compare the stored rewards of rows that are not chosen with the
            results of ``reward_fn`` (by ``torch.isclose``). This detects a ``reward_fn`` that
            differs from the environment.

    Raises:
        TypeError: a function is not callable, or ``p`` is not a number.
        ValueError: ``p`` is outside [0, 1], or ``strategy``, ``scope`` or ``check`` is unknown;
            on read: a function returns another shape, achieved goals and goals differ in shape, or
            rewards differ under ``check="error"``.
        KeyError: on read, ``goal``, ``("next", goal)``, ``("next", achieved)``,
            ``("next", "reward")``, or with ``terminated_fn`` ``("next", "terminated")``, is absent.

    All random numbers come from the buffer's generator.

    Cost: one read of ``achieved`` per row, and the calls of the functions.

    Source: Andrychowicz et al., "Hindsight Experience Replay", 2017, section 4.5.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import HindsightGoal, LazyTensorStorage, ReplayBuffer
        >>> at = torch.arange(4.0).unsqueeze(-1)
        >>> end = torch.tensor([[False], [False], [False], [True]])
        >>> rows = TensorDict({
        ...     "achieved_goal": at, "desired_goal": torch.full((4, 1), 9.0),
        ...     "next": {"achieved_goal": at + 1, "desired_goal": torch.full((4, 1), 9.0),
        ...              "reward": torch.full((4, 1), -1.0), "done": end}}, [4])
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=4,
        ...                   transform=HindsightGoal(p=1.0, strategy="final"))
        >>> _ = rb.extend(rows)
        >>> rb[:]["desired_goal"].squeeze(-1), rb[:]["next", "reward"].squeeze(-1)
        (tensor([4., 4., 4., 4.]), tensor([-1., -1., -1., 0.]))
    """

    stage = "relabel"
    relabels = True

    def __init__(
        self,
        p: float = 0.8,
        strategy: str = "future",
        achieved: Any = "achieved_goal",
        goal: Any = "desired_goal",
        reward_fn: GoalFunction | None = None,
        terminated_fn: GoalFunction | None = None,
        scope: str = "window",
        check: str | None = None,
    ) -> None:
        self.p = as_share("p", p)
        one_of("strategy", strategy, _STRATEGIES)
        one_of("scope", scope, ("window", "step"))
        if check is not None:
            one_of("check", check, ("warn", "error"))
        for name, function in (("reward_fn", reward_fn), ("terminated_fn", terminated_fn)):
            if function is not None and not callable(function):
                raise TypeError(f"{name}: expected a function of achieved and goal, got {function}")
        self.strategy, self.scope, self.check = strategy, scope, check
        self.achieved: Key = ("next", *_root_key("achieved", achieved))
        self.goal = _root_key("goal", goal)
        if self.achieved == ("next", *self.goal):
            raise ValueError(
                f"expected different keys for achieved and goal, got {format_key(self.goal)}"
            )
        self.reward_fn, self.terminated_fn = reward_fn, terminated_fn
        self._goals: tuple[Path, Path] = (self.goal, ("next", *self.goal))
        written: set[Path] = {*self._goals, REWARD}
        needed: list[Path] = [*self._goals, self.achieved, REWARD]
        if terminated_fn is not None:
            # `done` is computed from `truncated`, which a sampler may set at the end of a window.
            written |= {TERMINATED, DONE, TRUNCATED}
            needed.append(TERMINATED)
        self._needed = tuple(needed)
        self._by_distance = reward_fn is None and terminated_fn is None and check is None
        # The core supports only keys without nesting, and the default rewards.
        plain = self._by_distance and len(self.goal) == 1 and len(self.achieved) == 2
        self._flat = (self.achieved[1], self.goal[0]) if plain else None
        self.changes = frozenset(written)
        self.relabel_keys = (self.achieved,)
        if terminated_fn is not None:
            self.relabel_keys += (TERMINATED,)

    # -- rows and their new goals ---------------------------------------------------------------

    def fetch(self, around: Surroundings) -> _Relabelled | None:
        """Choose windows, and read the achieved goals that become their new goals."""
        if not self.p or not len(around):
            return None
        if around.alone and around.mask is None:
            both = around.uniform(2, len(around))
            found = self._at_once(around, both)
            if found is not None:
                return found
            rows, low, draws = both[0] < self.p, around.time, both[1]
        else:
            rows, low, draws = self._windows(around)
        time, lane = self._targets(around, low, draws)
        read = around.fetch([self.achieved], time, lane)
        return _Relabelled(rows, around.seen(read)[self.achieved])

    def _at_once(self, around: Surroundings, both: Array) -> _Relabelled | None:
        """Do the same in the compiled core, for a batch without windows.

        Return None if the core does not support the batch.
        """
        if self.strategy == "random" or around.relabels:
            return None
        column = around.column(self.achieved)
        if column is None:
            return None
        low = self._earliest(around, around.time)
        found = later_goals(both, low, around.last, self.p, column)
        if found is None:
            return None
        leaves = None if self._flat is None else _plain_leaves(around.rows, *self._flat)
        done = leaves is not None and relabel_rows(*found, leaves)
        return _Relabelled(*found, done)

    def _windows(self, around: Surroundings) -> tuple[Array, Array, Array]:
        """Return rows to relabel, earliest times of future goals, and draws, ``[B]`` each.

        A draw is a number in [0, 1).
        """
        size = len(around)
        real = np.ones(size, bool) if around.mask is None else around.mask
        _, first, group = np.unique(around.window, return_index=True, return_inverse=True)
        group = group.reshape(-1)
        anchor = np.full(len(first), size)
        at = np.nonzero(real)[0]
        np.minimum.at(anchor, group[at], at)
        chances, draws = around.uniform(2, len(first))
        chosen = (chances < self.p) & (anchor < size)
        anchor = np.minimum(anchor, size - 1)
        own = anchor[group]
        same = real & (around.begin == around.begin[own]) & (around.lane == around.lane[own])
        rows = same & chosen[group]
        if self.scope == "step":
            return rows, around.time, around.uniform(size)
        latest = around.time[anchor].copy()
        np.maximum.at(latest, group[same], around.time[same])
        # Rows of other episodes get no goal. Their own time is used as a valid time to read.
        return rows, np.where(same, latest[group], around.time), draws[group]

    def _targets(self, around: Surroundings, low: Array, draws: Array) -> tuple[Array, Array]:
        """Return time and lane of the row from which each row's new goal comes."""
        if self.strategy == "random":
            stored = around.stored()
            return around.any_rows(np.minimum((draws * stored).astype(np.int64), stored - 1))
        low = self._earliest(around, low)
        further = around.last - low
        return low + np.minimum((draws * (further + 1)).astype(np.int64), further), around.lane

    def _earliest(self, around: Surroundings, low: Array) -> Array:
        """Return the earliest times of new goals; ``low`` are those of future goals."""
        return {"episode": around.first, "final": around.last}.get(self.strategy, low)

    # -- new goals, rewards and flags -----------------------------------------------------------

    def apply(self, data: Any, fetched: _Relabelled | None, around: Surroundings) -> Any:
        """Return the batch with new goals, rewards and, with ``terminated_fn``, flags."""
        if fetched is None and (self.check is None or not len(around)):
            return data
        if fetched is not None and fetched.done:
            return data
        leaves = self._own(data)
        if fetched is None:
            rows, goals = np.zeros(len(around), bool), leaves[self.goal]
        else:
            rows, goals = fetched.rows, self._as_goals(fetched.goals, leaves[self.goal])
        if self._by_distance and fetched is not None and goals.is_cpu and goals.is_contiguous():
            new = {key: leaves[key].clone() for key in (*self._goals, REWARD)}
            if relabel_rows(rows, goals.numpy(), [leaves[self.achieved], *new.values()]):
                set_all(data, new)
                return data
        where = torch.from_numpy(rows).to(goals.device)
        new, rewards = self._relabelled(leaves, where, goals)
        if self.check is not None:
            self._compare(rewards, leaves[REWARD], rows, around.mask)
        if fetched is not None:
            set_all(data, new)
        return data

    def _own(self, data: Any) -> dict[Path, torch.Tensor]:
        """Return the needed leaves of a batch. Raises KeyError if a leaf is absent."""
        leaves = dict(require_all(data, self._needed, self))
        if self.terminated_fn is not None:
            for key in (DONE, TRUNCATED):
                flag = lookup(data, key)
                if flag is not None:
                    leaves[key] = flag
        return leaves

    def relabel(
        self,
        leaves: dict[Path, torch.Tensor],
        where: Around,
        fetched: _Relabelled | None,
        around: Surroundings,
    ) -> dict[Path, torch.Tensor]:
        """Give fetched rows the goal of the batch row for which they were fetched."""
        if fetched is None:
            return leaves
        shape = where.time.shape
        size, more = shape[0], [1] * (len(shape) - 1)

        def own(values: Array) -> Array:
            return values.reshape(size, *more)

        rows = own(fetched.rows) & (where.lane == own(around.lane))
        rows &= (where.time >= own(around.first)) & (where.time <= own(around.last))
        goals = fetched.goals
        features = goals.shape[1:]
        goals = goals.view(size, *more, *features).expand(*shape, *features)
        flat = {key: leaf.flatten(0, len(shape) - 1) for key, leaf in leaves.items()}
        goals = goals.reshape(-1, *features)
        like = next((flat[key] for key in self._goals if key in flat), None)
        if like is not None:
            goals = self._as_goals(goals, like)
        new, _ = self._relabelled(flat, as_tensor_like(rows.reshape(-1), goals), goals)
        return {**leaves, **{key: new[key].view(leaves[key].shape) for key in new}}

    def _relabelled(
        self, leaves: dict[Path, torch.Tensor], rows: torch.Tensor, goals: torch.Tensor
    ) -> tuple[dict[Path, torch.Tensor], torch.Tensor | None]:
        """Return the changed leaves ``[n, *F]``, and the rewards of all rows."""
        new: dict[Path, torch.Tensor] = {}
        rewards = None
        own = goals
        for key in self._goals:
            if key in leaves:
                new[key] = _where(rows, goals, leaves[key])
        if self.goal in new:
            own = new[self.goal]  # rows that are not chosen keep their goal
        if REWARD in leaves:
            old = leaves[REWARD]
            rewards = self._rewards(leaves[self.achieved], own, old)
            new[REWARD] = _where(rows, rewards, old)
        if self.terminated_fn is not None and TERMINATED in leaves:
            old = leaves[TERMINATED]
            found = self.terminated_fn(leaves[self.achieved], own)
            ended = _checked("terminated_fn", found, old).to(torch.bool)
            new[TERMINATED] = _where(rows, ended, old)
            if DONE in leaves:
                # An episode that ended without termination was truncated, even without the flag.
                cut = leaves.get(TRUNCATED)
                cut = leaves[DONE] & ~old if cut is None else cut
                new[DONE] = _where(rows, ended | cut, leaves[DONE])
        return new, rewards

    def _rewards(
        self, achieved: torch.Tensor, goal: torch.Tensor, old: torch.Tensor
    ) -> torch.Tensor:
        if self.reward_fn is not None:
            return _checked("reward_fn", self.reward_fn(achieved, goal), old).to(old.dtype)
        if old.shape[1:].numel() != 1:
            raise ValueError(
                f"expected one reward per row, got shape {list(old.shape)}; pass a reward_fn"
            )
        return distance_rewards(achieved, goal, old)

    def _as_goals(self, achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        if achieved.shape[1:] != goal.shape[1:]:
            raise ValueError(
                f"expected {format_key(self.achieved)} in the shape of {format_key(self.goal)}, "
                f"{list(goal.shape[1:])} a row, got {list(achieved.shape[1:])}"
            )
        return achieved if achieved.dtype == goal.dtype else achieved.to(goal.dtype)

    def _compare(
        self, rewards: torch.Tensor | None, stored: torch.Tensor, rows: Array, mask: Array | None
    ) -> None:
        assert rewards is not None
        differs = ~torch.isclose(rewards, stored, equal_nan=True).flatten(1).all(1)
        wrong = differs.cpu().numpy() & ~rows
        if mask is not None:
            wrong &= mask
        if not wrong.any():
            return
        at = int(np.nonzero(wrong)[0][0])
        text = (
            f"reward_fn: expected the stored rewards for the stored goals, got others in "
            f"{int(wrong.sum())} of {int((~rows).sum())} rows that keep their goal; row {at} has "
            f"{stored[at].tolist()} stored, the function returns {rewards[at].tolist()}"
        )
        if self.check == "error":
            raise ValueError(text)
        warnings.warn(text, stacklevel=2)

    def __repr__(self) -> str:
        scope = "" if self.scope == "window" else f", scope={self.scope!r}"
        return (
            f"HindsightGoal(p={self.p:g}, strategy={self.strategy!r}, "
            f"achieved={format_key(self.achieved[1:])}, goal={format_key(self.goal)}{scope})"
        )


def _where(rows: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return torch.where(over_features(rows, old), new, old)


def _checked(name: str, found: Any, old: torch.Tensor) -> torch.Tensor:
    """Return a user function's result. TypeError or ValueError if it does not fit."""
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(found).__name__}")
    if found.shape != old.shape:
        raise ValueError(
            f"{name}: expected the stored shape {list(old.shape)}, got {list(found.shape)}"
        )
    return found


def _root_key(name: str, key: Any) -> Key:
    path = unravel(key)
    if path[0] == "next":
        raise ValueError(f"{name}: expected the key outside of 'next', got {format_key(path)}")
    return path
