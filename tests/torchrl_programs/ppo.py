"""PPO: rows are passed over without repetition, with advantages beside them or written back."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.collectors import Collector
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.torchrl_programs.networks import critic_of, normal_actor
from tests.torchrl_programs.reach import make_env


def train(rl: Any, written_back: bool) -> tuple[list[float], list[float], list[float]]:
    """Rows of the collector go into an empty buffer; or the collector fills the buffer."""
    torch.manual_seed(0)
    env = make_env(points=16)
    spec = env.action_spec_unbatched
    actor = normal_actor(
        spec,
        distribution_kwargs={"low": spec.space.low, "high": spec.space.high},
        return_log_prob=True,
    )
    critic = critic_of("observation")
    advantage = GAE(gamma=0.9, lmbda=0.9, value_network=critic, average_gae=True)
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=1e-3)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)
    buffer = rl.TensorDictReplayBuffer(
        storage=rl.LazyTensorStorage(320, ndim=2 if written_back else 1),
        sampler=rl.SamplerWithoutReplacement(drop_last=not written_back),
        batch_size=64,
    )
    options = {"replay_buffer": buffer, "extend_buffer": True} if written_back else {}
    collector = Collector(env, actor, frames_per_batch=320, total_frames=4800, **options)

    losses, rewards, values = [], [], []
    for data in collector:
        for _ in range(4):
            if written_back:
                data = buffer[:]  # [16, 20]: a row is an environment
            with torch.no_grad():
                data = advantage(data)
            if written_back:
                buffer.write_all(data)
            else:
                buffer.empty()
                buffer.extend(data.reshape(-1))
            for batch in buffer:
                assert batch.shape == (64,)
                terms = loss_module(batch)
                loss = terms["loss_objective"] + terms["loss_entropy"] + terms["loss_critic"]
                loss.backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        rewards.append(data["next", "reward"].mean().item())
        values.append(buffer["value_target"].mean().item())
        collector.update_policy_weights_()
    collector.shutdown()
    return losses, rewards, values


def run(rl: Any) -> dict[str, list[float]]:
    losses, rewards, values = train(rl, written_back=False)
    later_losses, later_rewards, later_values = train(rl, written_back=True)
    return {
        "loss": losses,
        "reward": rewards,
        "value": values,
        "written back loss": later_losses,
        "written back reward": later_rewards,
        "written back value": later_values,
    }
