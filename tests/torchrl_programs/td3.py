"""TD3 on Pendulum: a uniform buffer whose rows are flat, the reward scaled on the way out."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    GymEnv,
    InitTracker,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import AdditiveGaussianModule
from torchrl.objectives import SoftUpdate, TD3Loss

from tests.torchrl_programs.networks import critic_of, descend, tanh_actor


def run(rl: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    env = TransformedEnv(
        GymEnv("Pendulum-v1"),
        Compose(InitTracker(), DoubleToFloat(), StepCounter(200), RewardSum()),
    )
    env.set_seed(0)
    actor = tanh_actor(env.action_spec, 3)
    critic = critic_of("observation", "action", size=4)
    loss_module = TD3Loss(
        actor,
        critic,
        num_qvalue_nets=2,
        action_spec=env.action_spec,
        delay_actor=True,
        delay_qvalue=True,
    )
    loss_module.make_value_estimator(gamma=0.95)
    update_target = SoftUpdate(loss_module, tau=0.02)
    critic_optimizer = torch.optim.Adam(
        list(loss_module.qvalue_network_params.flatten_keys().values()), lr=3e-3
    )
    actor_optimizer = torch.optim.Adam(
        list(loss_module.actor_network_params.flatten_keys().values()), lr=1e-3
    )
    noise = AdditiveGaussianModule(env.action_spec, sigma_init=1.0, sigma_end=0.1)
    collector = Collector(
        env,
        TensorDictSequential(actor, noise),
        frames_per_batch=100,
        total_frames=1000,
        init_random_frames=200,
    )
    buffer = rl.TensorDictReplayBuffer(
        storage=rl.LazyTensorStorage(1000),
        sampler=rl.RandomSampler(),
        writer=rl.TensorDictRoundRobinWriter(),
        transform=RewardScaling(loc=0.0, scale=0.1, in_keys=[("next", "reward")]),
        batch_size=64,
    )
    losses: list[float] = []
    for data in collector:
        buffer.extend(data.reshape(-1).exclude("truncated", "terminated"))
        for _ in range(15):
            batch = buffer.sample()
            loss, *_ = loss_module.value_loss(batch)
            descend(critic_optimizer, loss)
            losses.append(loss.item())
            if len(losses) % 2 == 0:
                actor_loss, _ = loss_module.actor_loss(batch)
                descend(actor_optimizer, actor_loss)
                update_target.step()
        noise.step(100)
        collector.update_policy_weights_()
    collector.shutdown()
    return {"loss": losses}
