"""A recurrent DQN: an LSTM learns from slices of trajectories."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    GymEnv,
    InitTracker,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
)
from torchrl.modules import MLP, EGreedyModule, LSTMModule, QValueModule, set_recurrent_mode
from torchrl.objectives import DQNLoss, SoftUpdate

from tests.torchrl_programs.networks import descend


def make_buffers(rl: Any) -> dict[str, Any]:
    """Make the usual ways to give an LSTM sequences."""
    return {
        "trajectory id": rl.TensorDictReplayBuffer(
            storage=rl.LazyTensorStorage(2000),
            sampler=rl.SliceSampler(
                slice_len=8, traj_key=("collector", "traj_ids"), strict_length=True
            ),
            batch_size=64,
        ),
        "end of episode": rl.TensorDictReplayBuffer(
            storage=rl.LazyTensorStorage(2000),
            sampler=rl.SliceSampler(
                num_slices=8, end_key=("next", "done"), cache_values=True, strict_length=False
            ),
            batch_size=64,
        ),
        "without replacement": rl.TensorDictReplayBuffer(
            storage=rl.LazyTensorStorage(2000),
            sampler=rl.SliceSamplerWithoutReplacement(
                num_slices=4, traj_key=("collector", "traj_ids"), strict_length=False
            ),
            batch_size=32,
        ),
        "rows of sequences": rl.TensorDictReplayBuffer(
            storage=rl.LazyMemmapStorage(100), batch_size=4, prefetch=2
        ),
    }


def run(rl: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    env = TransformedEnv(
        GymEnv("CartPole-v1"), Compose(InitTracker(), StepCounter(100), RewardSum())
    )
    env.set_seed(0)
    lstm = LSTMModule(
        input_size=4,
        hidden_size=16,
        in_keys=["observation", "recurrent_h", "recurrent_c"],
        out_keys=["embed", ("next", "recurrent_h"), ("next", "recurrent_c")],
    )
    env.append_transform(lstm.make_tensordict_primer())
    assert isinstance(env.transform[-1], TensorDictPrimer)
    policy = TensorDictSequential(
        lstm,
        TensorDictModule(
            MLP(in_features=16, out_features=2, num_cells=[16]),
            in_keys=["embed"],
            out_keys=["action_value"],
        ),
        QValueModule(spec=env.action_spec),
    )
    explore = TensorDictSequential(
        policy, EGreedyModule(env.action_spec, annealing_num_steps=600, eps_init=0.5)
    )
    loss_module = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    loss_module.make_value_estimator(gamma=0.95)
    update_target = SoftUpdate(loss_module, tau=0.05)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    collector = Collector(env, explore, frames_per_batch=80, total_frames=800)
    buffers = make_buffers(rl)
    losses: dict[str, list[float]] = {name: [] for name in buffers}
    for data in collector:
        for name, buffer in buffers.items():
            if name == "rows of sequences":
                buffer.extend(data.unsqueeze(0).to_tensordict().cpu())
            else:
                buffer.extend(data)
            for _ in range(2):
                batch = buffer.sample()
                if name == "trajectory id":
                    batch = batch.reshape(-1, 8)
                    ids = batch["collector", "traj_ids"]
                    assert (ids == ids[:, :1]).all()
                    assert (batch["step_count"].diff(dim=1) == 1).all()
                with set_recurrent_mode(True):
                    loss = loss_module(batch)["loss"]
                descend(optimizer, loss)
                update_target.step()
                losses[name].append(loss.item())
    collector.shutdown()
    return losses
