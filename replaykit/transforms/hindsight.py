"""Goals replaced, when a batch is read, by what was achieved later."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from replaykit._compat import lookup
from replaykit.structure import Path
from replaykit.ted import Key, format_key, unravel
from replaykit.transforms.batches import set_all
from replaykit.transforms.goals import (
    distance_rewards,
    later_goals,
    relabel_batch,
    relabel_later,
    relabelled,
)
from replaykit.transforms.history import Around, HistoryTransform, Surroundings, as_tensor_like
from replaykit.transforms.values import as_number

__all__ = ["HindsightGoal"]

Array = np.ndarray[Any, Any]
GoalFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_REWARD: Final[Key] = ("next", "reward")
_TERMINATED: Final[Key] = ("next", "terminated")
_TRUNCATED: Final[Key] = ("next", "truncated")
_DONE: Final[Key] = ("next", "done")
_STRATEGIES: Final = ("future", "final", "episode", "random")


@dataclass
class _Relabelled:
    """Which rows of a batch get another goal, bool ``[B]``, and these, ``[B, *G]``; whether the
    batch has them already."""

    rows: Array
    achieved: torch.Tensor | Array
    done: bool = False

    @property
    def goals(self) -> torch.Tensor:
        """The goals as a tensor, which not every batch asks for."""
        given = self.achieved
        return given if isinstance(given, torch.Tensor) else torch.from_numpy(given)


class HindsightGoal(HistoryTransform):
    """Pretends that what was achieved later had been the goal: hindsight experience replay.

    Each window of a batch (each row, where there are no windows) is chosen with probability ``p``.
    For a chosen one a stored row is drawn; what was achieved there, ``("next", achieved)``, becomes
    ``goal`` and ``("next", goal)``, and the reward is computed anew from the row's own
    ``("next", achieved)`` and the new goal. Rows that are not chosen, and padding, stay bit for
    bit. What is stored never changes.

    A window that crosses episodes is relabelled as far as the episode of its first real row goes.
    Transforms after this one that read other rows (``NStep``, ``PreviousStep``, ``StackFrames``)
    see those of the same episode with the new goal and reward too: so it belongs before them.
    Returns that were stored (``ReturnToGo``) are those of the old goals.

    Args:
        p: probability, in [0, 1]; 0 changes nothing.
        strategy: which row tells the new goal. "future": uniform over what comes from the row on to
            the end of its episode, both included (while that is open: its newest row); "final":
            that end; "episode": uniform over what is stored of the episode; "random": uniform over
            all stored rows (after a ``TrajectoryTransform``: over the episodes of the batch).
        achieved: key of what the state achieved, ``[*G]`` a row; read under ``next``.
        goal: key of the goal, ``[*G]``; written also under ``next``.
        reward_fn: takes what was achieved and the goals, ``[n, *G]`` each, and returns rewards in
            the shape in which they are stored, ``[n, 1]``; it must leave both as they are. It is
            called with whole batches, also of rows that keep their reward. None: 0 where the
            Euclidean distance is below 0.05, else -1.
        terminated_fn: likewise, bool; rewrites ``("next", "terminated")`` and ``("next", "done")``.
            None: the flags stay.
        scope: "window": one goal for a window, achieved at its last row or later; "step": a goal of
            its own for each row.
        check: "warn" or "error" compares the rewards of rows that are not chosen with ``reward_fn``
            (by ``torch.isclose``): one that is not what the environment computes is found out.

    Raises:
        TypeError: functions that cannot be called, or ``p`` no number.
        ValueError: a probability outside [0, 1], an unknown ``strategy``, ``scope`` or ``check``;
            on read: a function that returns another shape, what was achieved has another shape
            than the goal, or rewards differ under ``check="error"``.
        KeyError: on read, where ``goal``, ``("next", goal)``, ``("next", achieved)``,
            ``("next", "reward")``, or with ``terminated_fn`` ``("next", "terminated")``, is absent.

    Cost: one read of ``achieved`` for each row, and the functions. Randomness: the buffer's
    generator. Source: Andrychowicz et al., "Hindsight Experience Replay", 2017, section 4.5.

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
        self.p = as_number("p", p)
        if not 0 <= self.p <= 1:
            raise ValueError(f"p: expected a probability in [0, 1], got {self.p}")
        _one_of("strategy", strategy, _STRATEGIES)
        _one_of("scope", scope, ("window", "step"))
        if check is not None:
            _one_of("check", check, ("warn", "error"))
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
        written: set[Path] = {*self._goals, _REWARD}
        needed: list[Path] = [*self._goals, self.achieved, _REWARD]
        if terminated_fn is not None:
            # `truncated` stays, but `done` follows from it, also where a sampler marks it.
            written |= {_TERMINATED, _DONE, _TRUNCATED}
            needed.append(_TERMINATED)
        self._needed = tuple(needed)
        self._by_distance = reward_fn is None and terminated_fn is None and check is None
        # Keys of which none is nested, and rewards that the core can compute.
        plain = self._by_distance and len(self.goal) == 1 and len(self.achieved) == 2
        self._flat = (self.achieved[1], self.goal[0]) if plain else None
        self.changes = frozenset(written)
        self.relabel_keys = (self.achieved,)
        if terminated_fn is not None:
            self.relabel_keys += (_TERMINATED,)

    # -- which rows, and where their goals come from --------------------------------------------

    def fetch(self, around: Surroundings) -> _Relabelled | None:
        """Chooses windows and reads what was achieved where their goals come from."""
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
        """The same for rows that are windows of their own, by the core; None where it cannot."""
        if self.strategy == "random" or around.relabels:
            return None
        column = around.column(self.achieved)
        if column is None:
            return None
        low = around.first if self.strategy == "episode" else around.time
        low = around.last if self.strategy == "final" else low
        if self._flat is not None and around.rows is not None:
            done = relabel_later(both, low, around.last, self.p, column, around.rows, *self._flat)
            if done is not None:
                return _Relabelled(*done, True)
        found = later_goals(both, low, around.last, self.p, column)
        return None if found is None else _Relabelled(*found)

    def _windows(self, around: Surroundings) -> tuple[Array, Array, Array]:
        """Of every row: whether it is relabelled, from which row on goals of the future come, and
        its draw, a number of [0, 1)."""
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
        # Rows of other episodes get no goal; theirs is only a place that can be read.
        return rows, np.where(same, latest[group], around.time), draws[group]

    def _targets(self, around: Surroundings, low: Array, draws: Array) -> tuple[Array, Array]:
        """Time and lane of the row that tells the goal, for every row of the batch."""
        if self.strategy == "final":
            return around.last, around.lane
        if self.strategy == "random":
            stored = around.stored()
            return around.any_rows(np.minimum((draws * stored).astype(np.int64), stored - 1))
        if self.strategy == "episode":
            low = around.first
        further = around.last - low
        return low + np.minimum((draws * (further + 1)).astype(np.int64), further), around.lane

    # -- new goals, rewards and flags -----------------------------------------------------------

    def apply(self, data: Any, fetched: _Relabelled | None, around: Surroundings) -> Any:
        """Returns the batch with new goals, rewards and, with ``terminated_fn``, flags."""
        if fetched is None and (self.check is None or not len(around)):
            return data
        if fetched is not None and (fetched.done or self._quickly(data, fetched)):
            return data
        leaves = self._own(data)
        if fetched is None:
            rows, goals = np.zeros(len(around), bool), leaves[self.goal]
        else:
            rows, goals = fetched.rows, self._as_goals(fetched.goals, leaves[self.goal])
        if self._by_distance and fetched is not None:
            found = relabelled(rows, goals, leaves, self.achieved, self._goals, _REWARD)
            if found is not None:
                set_all(data, found)
                return data
        where = torch.from_numpy(rows).to(goals.device)
        new, rewards = self._relabelled(leaves, where, goals)
        if self.check is not None:
            self._compare(rewards, leaves[_REWARD], rows, around.mask)
        if fetched is not None:
            set_all(data, new)
        return data

    def _quickly(self, data: Any, fetched: _Relabelled) -> bool:
        keys = self._flat
        return keys is not None and relabel_batch(data, fetched.rows, fetched.goals, *keys)

    def _own(self, data: Any) -> dict[Path, torch.Tensor]:
        """Leaves of a batch that are needed; KeyError where one is absent."""
        leaves = {key: lookup(data, key) for key in self._needed}
        missing = [format_key(key) for key, leaf in leaves.items() if leaf is None]
        if missing:
            raise KeyError(
                f"HindsightGoal expected the keys {', '.join(missing)}, got a batch without"
            )
        if self.terminated_fn is not None:
            for key in (_DONE, _TRUNCATED):
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
        """Gives other rows of its episode the goal of the row that asked for them."""
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
        """New leaves ``[n, *F]`` of those that there are, and what the rewards would be."""
        new: dict[Path, torch.Tensor] = {}
        rewards = None
        own = goals
        for key in self._goals:
            if key in leaves:
                new[key] = _where(rows, goals, leaves[key])
        if self.goal in new:
            own = new[self.goal]  # rows that are not chosen keep the goal that they were after
        if _REWARD in leaves:
            old = leaves[_REWARD]
            rewards = self._rewards(leaves[self.achieved], own, old)
            new[_REWARD] = _where(rows, rewards, old)
        if self.terminated_fn is not None and _TERMINATED in leaves:
            old = leaves[_TERMINATED]
            found = self.terminated_fn(leaves[self.achieved], own)
            ended = _checked("terminated_fn", found, old).to(torch.bool)
            new[_TERMINATED] = _where(rows, ended, old)
            if _DONE in leaves:
                # What ended without being terminated was truncated, whether that is stored or not.
                cut = leaves.get(_TRUNCATED)
                cut = leaves[_DONE] & ~old if cut is None else cut
                new[_DONE] = _where(rows, ended | cut, leaves[_DONE])
        return new, rewards

    def _rewards(
        self, achieved: torch.Tensor, goal: torch.Tensor, old: torch.Tensor
    ) -> torch.Tensor:
        if self.reward_fn is not None:
            return _checked("reward_fn", self.reward_fn(achieved, goal), old).to(old.dtype)
        if old.shape[1:].numel() != 1:
            raise ValueError(
                f"expected one reward a row, got shape {list(old.shape)}; give a reward_fn"
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
            f"reward_fn: expected the stored rewards for the goals of old, got others in "
            f"{int(wrong.sum())} of {int((~rows).sum())} rows that kept theirs; row {at} has "
            f"{stored[at].tolist()} stored, the function gives {rewards[at].tolist()}"
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
    return torch.where(rows.view(-1, *[1] * (old.ndim - 1)) if old.ndim > 1 else rows, new, old)


def _checked(name: str, found: Any, old: torch.Tensor) -> torch.Tensor:
    """What a user's function returned; TypeError or ValueError where it does not fit."""
    if not isinstance(found, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(found).__name__}")
    if found.shape != old.shape:
        raise ValueError(
            f"{name}: expected shape {list(old.shape)}, as it is stored, got {list(found.shape)}"
        )
    return found


def _root_key(name: str, key: Any) -> Key:
    path = unravel(key)
    if path[0] == "next":
        raise ValueError(
            f"{name}: expected the key as it is outside of 'next', got {format_key(path)}"
        )
    return path


def _one_of(name: str, given: Any, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {given!r}")
