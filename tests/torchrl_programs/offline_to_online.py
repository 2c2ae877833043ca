"""Demonstrations and online rows in one batch: an ensemble of two buffers, TD3+BC style."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import Compose, DoubleToFloat, RewardScaling
from torchrl.modules import AdditiveGaussianModule
from torchrl.objectives import SoftUpdate, TD3BCLoss

from tests.torchrl_programs.networks import critic_of, descend, tanh_actor
from tests.torchrl_programs.reach import make_env
from tests.torchrl_programs.rollouts import logged


def run(rl: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    env = make_env()
    spec = env.action_spec_unbatched
    actor = tanh_actor(spec)
    critic = critic_of("observation", "action", size=2)
    loss_module = TD3BCLoss(actor, critic, action_spec=spec, alpha=1.0, delay_actor=True)
    loss_module.make_value_estimator(gamma=0.9)
    update_target = SoftUpdate(loss_module, tau=0.02)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)

    after = [("next", key) for key in ["observation", "reward", "done", "terminated"]]
    keys = ["observation", "action", *after]
    demonstrations = rl.TensorDictReplayBuffer(
        storage=rl.LazyTensorStorage(600), batch_size=32, transform=Compose(DoubleToFloat())
    )
    demonstrations.extend(logged().select(*keys))
    online = rl.TensorDictReplayBuffer(
        storage=rl.LazyTensorStorage(1000),
        batch_size=32,
        sampler=rl.SamplerWithoutReplacement(),
    )
    mixture = rl.ReplayBufferEnsemble(
        demonstrations,
        online,
        p=[0.5, 0.5],
        num_buffer_sampled=2,
        sample_from_all=False,
        batch_size=64,
        transform=RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]),
    )
    collector = Collector(
        env,
        TensorDictSequential(actor, AdditiveGaussianModule(spec, sigma_init=0.2)),
        frames_per_batch=80,
        total_frames=1200,
    )
    losses, rewards = [], []
    for data in collector:
        rewards.append(data["next", "reward"].mean().item())
        online.extend(data.reshape(-1).select(*keys))
        for _ in range(10):
            batch = mixture.sample()
            batch = batch.reshape(-1)
            assert batch.shape == (64,)
            value_loss, _ = loss_module.qvalue_loss(batch)
            actor_loss, _ = loss_module.actor_loss(batch)
            descend(optimizer, value_loss + actor_loss)
            update_target.step()
            losses.append(value_loss.item())
        collector.update_policy_weights_()
    collector.shutdown()
    assert len(mixture[0]) == 600
    return {"loss": losses, "reward": rewards}
