"""DQN on CartPole: rows drawn uniformly."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import Compose, GymEnv, InitTracker, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from tests.torchrl_programs.networks import descend


def run(rl: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    env = TransformedEnv(
        GymEnv("CartPole-v1", categorical_action_encoding=True),
        Compose(InitTracker(), RewardSum(), StepCounter(200)),
    )
    env.set_seed(0)
    policy = QValueActor(
        MLP(in_features=4, out_features=2, num_cells=[64, 64]),
        in_keys=["observation"],
        spec=env.action_spec,
    )
    explore = EGreedyModule(env.action_spec, annealing_num_steps=1500, eps_init=1.0, eps_end=0.05)
    collector = Collector(
        env,
        TensorDictSequential(policy, explore),
        frames_per_batch=100,
        total_frames=4000,
        init_random_frames=500,
    )
    buffer = rl.TensorDictReplayBuffer(
        pin_memory=False,
        storage=rl.LazyTensorStorage(max_size=10_000, device="cpu"),
        batch_size=64,
    )
    loss_module = DQNLoss(policy, loss_function="l2", delay_value=True, action_space="categorical")
    loss_module.make_value_estimator(gamma=0.98)
    update_target = SoftUpdate(loss_module, tau=0.05)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=2e-3)

    losses, returns = [], []
    for data in collector:
        data = data.reshape(-1)
        buffer.extend(data)
        explore.step(data.numel())
        finished = data["next", "done"].squeeze(-1)
        returns += data["next", "episode_reward"][finished].flatten().tolist()
        if len(buffer) < 500:
            continue
        for _ in range(20):
            loss = loss_module(buffer.sample())["loss"]
            descend(optimizer, loss)
            update_target.step()
            losses.append(loss.item())
        collector.update_policy_weights_()
    collector.shutdown()
    return {"loss": losses, "return": returns}
