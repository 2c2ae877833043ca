"""SAC: rows in memory-mapped files, priorities, batches made ahead and moved by a transform."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torchrl.collectors import Collector
from torchrl.objectives import SACLoss, SoftUpdate

from tests.torchrl_programs.networks import critic_of, descend, normal_actor
from tests.torchrl_programs.reach import make_env


def run(rl: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    env = make_env()
    actor = normal_actor(env.action_spec)
    critic = critic_of("observation", "action", size=2)
    loss_module = SACLoss(
        actor, critic, num_qvalue_nets=2, target_entropy=-1.0, action_spec=env.action_spec
    )
    loss_module.make_value_estimator(gamma=0.9)
    update_target = SoftUpdate(loss_module, tau=0.05)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=5e-3)
    collector = Collector(
        env, actor, frames_per_batch=80, total_frames=2400, init_random_frames=160
    )
    with tempfile.TemporaryDirectory() as scratch:
        buffer = rl.TensorDictPrioritizedReplayBuffer(
            alpha=0.7,
            beta=0.5,
            pin_memory=False,
            prefetch=3,
            storage=rl.LazyMemmapStorage(2000, scratch_dir=scratch),
            batch_size=64,
        )
        buffer.append_transform(lambda batch: batch.to("cpu"))
        losses, rewards = [], []
        for data in collector:
            data = data.reshape(-1)
            buffer.extend(data)
            rewards.append(data["next", "reward"].mean().item())
            for _ in range(10):
                batch = buffer.sample()
                terms = loss_module(batch)
                loss = terms["loss_actor"] + terms["loss_qvalue"] + terms["loss_alpha"]
                descend(optimizer, loss)
                update_target.step()
                buffer.update_tensordict_priority(batch)
                losses.append(loss.item())
            collector.update_policy_weights_()
        collector.shutdown()
        del buffer
    return {"loss": losses, "reward": rewards}
