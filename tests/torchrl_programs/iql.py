"""IQL on logged rows: passes without repetition, double precision turned to single on the way."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import Bounded
from torchrl.envs import DoubleToFloat, RewardScaling
from torchrl.objectives import IQLLoss, SoftUpdate

from tests.torchrl_programs.networks import critic_of, descend, normal_actor
from tests.torchrl_programs.rollouts import logged


def run(rl: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    actor = normal_actor(Bounded(-1.0, 1.0, (1,)))
    qvalue = critic_of("observation", "action", size=2)
    value = critic_of("observation")
    loss_module = IQLLoss(
        actor, qvalue, value_network=value, temperature=5.0, expectile=0.8, loss_function="l2"
    )
    loss_module.make_value_estimator(gamma=0.9)
    update_target = SoftUpdate(loss_module, tau=0.02)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-3)

    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        buffer = rl.TensorDictReplayBuffer(
            storage=rl.LazyMemmapStorage(600, scratch_dir=folder),
            sampler=rl.SamplerWithoutReplacement(drop_last=True),
            batch_size=64,
        )
        buffer.extend(logged())
        buffer.append_transform(DoubleToFloat())
        buffer.append_transform(RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]))
        for _ in range(200):
            batch = buffer.sample()
            assert batch["observation"].dtype == torch.float32
            terms = loss_module(batch)
            loss = terms["loss_actor"] + terms["loss_qvalue"] + terms["loss_value"]
            descend(optimizer, loss)
            update_target.step()
            losses.append(loss.item())
        del buffer
    with torch.no_grad():
        at = TensorDict({"observation": torch.tensor([[-0.8], [0.8]])}, [2])
        left, right = actor.get_dist(at).deterministic_sample.flatten().tolist()
    return {"loss": losses, "pull": [left - right]}
