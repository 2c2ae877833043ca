"""A task that is learned in a second: move eight points on lines to the origin."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, RewardSum, StepCounter, TransformedEnv


class Reach(EnvBase):
    """Points between -1 and 1; the reward is minus the distance to 0 after the step."""

    def __init__(self, points: int = 8) -> None:
        super().__init__(batch_size=[points])
        shape = torch.Size([points, 1])
        self.observation_spec = Composite(observation=Unbounded(shape), shape=[points])
        self.action_spec = Bounded(-1.0, 1.0, shape)
        self.reward_spec = Unbounded(shape)
        self.done_spec = Composite(
            done=Binary(shape=shape, dtype=torch.bool),
            terminated=Binary(shape=shape, dtype=torch.bool),
            shape=[points],
        )
        self._generator = torch.Generator().manual_seed(0)

    def _reset(self, tensordict: TensorDict | None = None, **_: Any) -> TensorDict:
        start = torch.rand(*self.batch_size, 1, generator=self._generator) * 2 - 1
        return TensorDict({"observation": start}, self.batch_size)

    def _step(self, tensordict: TensorDict) -> TensorDict:
        position = tensordict["observation"] + 0.3 * tensordict["action"].clamp(-1, 1)
        position = position.clamp(-1, 1)
        ended = torch.zeros(*self.batch_size, 1, dtype=torch.bool)
        return TensorDict(
            {
                "observation": position,
                "reward": -position.abs(),
                "done": ended,
                "terminated": ended.clone(),
            },
            self.batch_size,
        )

    def _set_seed(self, seed: int | None) -> None:
        self._generator.manual_seed(seed or 0)


def make_env(max_steps: int = 10, points: int = 8) -> TransformedEnv:
    """Make the environment with the transforms that nearly all programs use."""
    return TransformedEnv(
        Reach(points), Compose(InitTracker(), StepCounter(max_steps), RewardSum())
    )
