"""Collectors in two processes that write into one shared buffer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiSyncCollector
from torchrl.modules import MLP

from tests.torchrl_programs.networks import descend
from tests.torchrl_programs.reach import make_env


def run(rl: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    policy = TensorDictModule(
        MLP(in_features=1, out_features=1, num_cells=[8]),
        in_keys=["observation"],
        out_keys=["action"],
    )
    buffer = rl.ReplayBuffer(storage=rl.LazyTensorStorage(400, ndim=2), batch_size=32, shared=True)
    collector = MultiSyncCollector(
        [functools.partial(make_env, points=4)] * 2,
        policy,
        frames_per_batch=80,
        total_frames=320,
        replay_buffer=buffer,
    )
    value = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(value.parameters(), lr=1e-2)
    losses = []
    for written, nothing in enumerate(collector, 1):
        assert nothing is None
        assert buffer.write_count == 80 * written
        for _ in range(10):
            batch = buffer.sample()
            loss = (value(batch["observation"]) - batch["next", "reward"]).square().mean()
            descend(optimizer, loss)
            losses.append(loss.item())
    collector.shutdown()
    return {"loss": losses}
