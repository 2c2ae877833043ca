"""DQN on CartPole: rows drawn uniformly, and with the priorities and n-step returns of Rainbow."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    GymEnv,
    InitTracker,
    MultiStepTransform,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

import replaykit
from tests.torchrl_programs.networks import descend


def make_buffer(rl: Any, prioritized: bool) -> Any:
    if prioritized:
        return rl.TensorDictPrioritizedReplayBuffer(
            alpha=0.6,
            beta=0.4,
            eps=1e-6,
            storage=rl.LazyTensorStorage(2000),
            batch_size=64,
            priority_key="td_error",
            transform=MultiStepTransform(n_steps=3, gamma=0.98),
        )
    return rl.TensorDictReplayBuffer(
        pin_memory=False,
        storage=rl.LazyTensorStorage(max_size=10_000, device="cpu"),
        sampler=rl.RandomSampler(),
        writer=rl.TensorDictRoundRobinWriter(),
        batch_size=64,
    )


def check_stored(buffer: Any, batch: Any) -> None:
    """Check that the errors of rows that occur once in a batch are their priorities."""
    _, place, count = batch["index"].unique(return_inverse=True, return_counts=True)
    once = count[place] == 1
    assert once.any()
    stored = buffer.sampler.state_dict()["_priorities"][batch["index"][once]]
    torch.testing.assert_close(stored, batch["td_error"][once].reshape(-1).to(stored.dtype))


def train(rl: Any, prioritized: bool) -> tuple[list[float], list[float]]:
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
    buffer = make_buffer(rl, prioritized)
    if prioritized:
        annealing = rl.LinearScheduler(buffer, "beta", final_value=1.0, num_steps=500)
    loss_module = DQNLoss(
        policy,
        loss_function="l2",
        delay_value=True,
        double_dqn=prioritized,
        action_space="categorical",
    )
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
            batch = buffer.sample()
            loss = loss_module(batch)["loss"]
            descend(optimizer, loss)
            update_target.step()
            losses.append(loss.item())
            if prioritized:
                buffer.update_tensordict_priority(batch)
                if rl is replaykit:
                    check_stored(buffer, batch)
                annealing.step()
        collector.update_policy_weights_()
    collector.shutdown()
    if prioritized:
        assert buffer.sampler.beta == 1.0
    return losses, returns


def run(rl: Any) -> dict[str, list[float]]:
    losses, returns = train(rl, prioritized=False)
    prioritized_losses, prioritized_returns = train(rl, prioritized=True)
    return {
        "loss": losses,
        "return": returns,
        "prioritized loss": prioritized_losses,
        "prioritized return": prioritized_returns,
    }
