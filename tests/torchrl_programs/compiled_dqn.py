"""DQN whose update, with the draw and the priorities that go back, is one compiled function."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torchrl.envs import GymEnv, StepCounter, TransformedEnv


def run(rl: Any, *, compiled: bool = True) -> dict[str, list[float]]:
    torch.manual_seed(0)
    torch.compiler.reset()
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter(50))
    env.set_seed(0)
    network = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    buffer = rl.TensorDictReplayBuffer(
        storage=rl.LazyTensorStorage(500),
        sampler=rl.PrioritizedSampler(max_capacity=500, alpha=0.6, beta=0.4),
        batch_size=32,
        compilable=True,
    )

    @torch.compile(disable=not compiled)
    def update() -> torch.Tensor:
        batch = buffer.sample()
        chosen = network(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
        with torch.no_grad():
            best = target(batch["next", "observation"]).amax(-1, keepdim=True)
            alive = 1.0 - batch["next", "terminated"].float()
            expected = batch["next", "reward"] + 0.9 * alive * best
        error = (chosen - expected).squeeze(-1)
        loss = (batch["priority_weight"] * error**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        buffer.update_priority(batch["index"], error.detach().abs())
        return loss.detach()

    losses = []
    for _ in range(5):
        buffer.extend(env.rollout(40, break_when_any_done=False))
        losses += [update().item() for _ in range(10)]
        target.load_state_dict(network.state_dict())
    return {"loss": losses}
