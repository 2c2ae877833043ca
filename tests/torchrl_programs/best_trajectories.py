"""Imitation of the best trajectories so far, which a writer keeps by their return."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.collectors import Collector

from tests.torchrl_programs.networks import descend, normal_actor
from tests.torchrl_programs.reach import make_env


def run(rl: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    env = make_env(points=16)
    actor = normal_actor(env.action_spec_unbatched)
    optimizer = torch.optim.Adam(actor.parameters(), lr=5e-3)
    buffer = rl.TensorDictReplayBuffer(
        storage=rl.LazyTensorStorage(32),
        writer=rl.TensorDictMaxValueWriter(rank_key="return", reduction="sum"),
        sampler=rl.SamplerWithoutReplacement(drop_last=True),
        batch_size=16,
    )
    collector = Collector(env, actor, frames_per_batch=160, total_frames=3200)
    losses, least = [], []
    for data in collector:  # [16, 10]: whole episodes
        data = data.select("observation", "action", ("next", "reward"))
        start = data["observation"][:, :1].abs()
        data["return"] = data["next", "reward"] + 0.4 * start  # the sum over time is the rank
        data.batch_size = [16]
        buffer.extend(data)
        least.append(buffer[:]["return"].sum((1, 2)).min().item())
        for batch in buffer:
            distribution = actor.get_dist(batch)
            loss = -distribution.log_prob(batch["action"].clamp(-0.99, 0.99)).mean()
            descend(optimizer, loss)
            losses.append(loss.item())
    collector.shutdown()
    assert least[1:] == sorted(least[1:])
    return {"loss": losses, "least return kept": least}
