"""Define TorchRL's buffer for hindsight replay, over the transform's choice of goals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from replaykit.buffer.buffer_variants import TensorDictReplayBuffer
from replaykit.buffer.components import DataT, SamplerT, StorageT, WriterT, as_chain
from replaykit.ted import DONE, REWARD, format_key, unravel
from replaykit.transforms import Compose, HindsightGoal
from replaykit.transforms.batch_values import as_share
from replaykit.transforms.history import Surroundings, require


class _FirstRowsGoal(HindsightGoal):
    """New goals for the first rows of a batch, whose rewards a function of the rows returns."""

    relabels = False  # the function needs whole rows, so it cannot change those of later transforms

    def __init__(
        self, share: float, strategy: str, goal: Any, achieved: Any, reward: Any, reward_fn: Any
    ) -> None:
        super().__init__(share, strategy, scope="step")
        self.achieved, self.goal, self.reward = map(unravel, (achieved, goal, reward))
        self.row_rewards = reward_fn
        self.changes = frozenset({self.goal, ("next", *self.goal), self.reward})
        self.relabel_keys = ()

    def fetch(self, around: Surroundings) -> Any:
        count = int(len(around) * self.p)
        if not count:
            return None
        time, lane = self._targets(around, around.time, around.uniform(len(around)))
        return count, around.seen(around.fetch([self.achieved], time, lane))[self.achieved]

    def apply(self, data: Any, fetched: Any, around: Surroundings) -> Any:
        require(data, [self.goal, self.achieved], self)
        if fetched is None:
            return data
        count, goals = fetched
        part, both = data[:count].clone(), (self.goal, ("next", *self.goal))
        keys = [key for key in both if data.get(key, None) is not None]
        for key in keys:
            part.get(key).copy_(goals[:count])
        reward = part.get(self.reward)
        reward.copy_(torch.as_tensor(self.row_rewards(part)).reshape(reward.shape))
        for key in (*keys, self.reward):
            value = data.get(key).clone()
            value[:count] = part.get(key)
            data.set(key, value)
        return data


class HERReplayBuffer(TensorDictReplayBuffer[DataT, StorageT, SamplerT, WriterT]):
    """A TensorDictReplayBuffer with hindsight goals, as TorchRL has it.

    The first ``int(her_ratio * B)`` rows of a batch get a goal that was achieved in a stored row of
    their episode, at the row itself or later. ``reward_fn`` computes their rewards. Stored rows do
    not change. The transform `HindsightGoal` has more options, and changes rows that n-step sums
    read.

    Args:
        reward_fn: a function of a TensorDict ``[n]``, which has the new goals. It returns rewards
            ``[n, 1]`` or ``[n]``.
        her_ratio: share of rows that get new goals, in [0, 1].
        strategy: "future", "final", "episode" or "random", as for `HindsightGoal`.
        goal_key: key of the goal. ``("next", goal_key)`` gets the same goal if it is stored.
        achieved_goal_key: key of the goal that a row has achieved.
        reward_key: key of the reward.
        end_key: must be ``("next", "done")``. The storage finds episodes by its episode index.
        sampler: chooses the rows; by default ``RandomSampler()``.
        transform: transforms that run after the goals are replaced.
        kwargs: other arguments of TensorDictReplayBuffer.

    Raises:
        ValueError: ``her_ratio`` is outside [0, 1], ``strategy`` is unknown, or ``end_key`` is
            another key.
        TypeError: ``reward_fn`` cannot be called.
        KeyError: when a batch is read, a goal is absent.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit import HERReplayBuffer, LazyTensorStorage
        >>> def reward_fn(rows):
        ...     return (rows["achieved_goal"] == rows["desired_goal"]).float()
        >>> rb = HERReplayBuffer(reward_fn, her_ratio=0.5, storage=LazyTensorStorage(100),
        ...                      strategy="final", batch_size=4)
        >>> _ = rb.extend(TensorDict({
        ...     "achieved_goal": torch.arange(3.0)[:, None],
        ...     "desired_goal": torch.full((3, 1), 9.0),
        ...     "next": {"reward": torch.zeros(3, 1), "done": torch.tensor([[0], [0], [1]]).bool()},
        ... }, [3]))
        >>> rb.sample()["desired_goal"].flatten()
        tensor([2., 2., 9., 9.])
    """

    def __init__(
        self,
        reward_fn: Callable[[Any], torch.Tensor],
        *,
        her_ratio: float = 0.8,
        strategy: str = "future",
        goal_key: Any = "desired_goal",
        achieved_goal_key: Any = "achieved_goal",
        reward_key: Any = REWARD,
        end_key: Any = DONE,
        sampler: SamplerT | Callable[[], SamplerT] | None = None,
        transform: Any = None,
        **kwargs: Any,
    ) -> None:
        if not callable(reward_fn):
            raise TypeError(f"expected reward_fn as a function, got {type(reward_fn).__name__}")
        if unravel(end_key) != DONE:
            raise ValueError(
                f"expected end_key as {format_key(DONE)}, by which the storage finds the ends of "
                f"episodes, got {end_key!r}"
            )
        goals = _FirstRowsGoal(
            as_share("her_ratio", her_ratio),
            str(getattr(strategy, "value", strategy)),
            goal_key,
            achieved_goal_key,
            reward_key,
            reward_fn,
        )
        super().__init__(sampler=sampler, transform=Compose(goals, *as_chain(transform)), **kwargs)
        self.reward_fn, self.her_ratio, self.strategy = reward_fn, goals.p, goals.strategy
