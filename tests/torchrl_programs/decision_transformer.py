"""A decision transformer's data line: returns to go, cropped trajectories, normalised states."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors.utils import split_trajectories
from torchrl.data import Bounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    ExcludeTransform,
    ObservationNorm,
    RandomCropTensorDict,
    RenameTransform,
    Reward2GoTransform,
    RewardScaling,
)
from torchrl.modules import ProbabilisticActor, TanhDelta
from torchrl.objectives import DTLoss

from tests.torchrl_programs.networks import descend
from tests.torchrl_programs.rollouts import logged


class Reader(nn.Module):
    """One causal layer of attention over (return to go, state, action before)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.attend = nn.TransformerEncoderLayer(
            width, nhead=2, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(width, 1)

    def forward(
        self, state: torch.Tensor, action: torch.Tensor, to_go: torch.Tensor
    ) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(action[..., :1, :]), action[..., :-1, :]], -2)
        inputs = self.embed(torch.cat([to_go, state, before], -1))
        steps = inputs.shape[-2]
        mask = torch.ones(steps, steps, dtype=torch.bool).triu(1)
        return self.head(self.attend(inputs, src_mask=mask))


def make_buffer(rl: Any) -> Any:
    to_go = Reward2GoTransform(
        gamma=1.0, in_keys=[("next", "reward")], out_keys=[("next", "return_to_go")]
    )
    trajectories = split_trajectories(logged(), trajectory_key=("collector", "traj_ids"))
    trajectories = to_go.inv(trajectories)
    trajectories["return_to_go"] = trajectories["next", "return_to_go"]
    buffer = rl.TensorDictReplayBuffer(
        storage=rl.TensorStorage(trajectories),
        sampler=rl.RandomSampler(),
        writer=rl.ImmutableDatasetWriter(),
        batch_size=32,
    )
    states = buffer[:]["observation"].flatten(0, -2)
    for transform in [
        RandomCropTensorDict(sub_seq_len=5, sample_dim=-1),
        RewardScaling(loc=0, scale=0.1, in_keys=["return_to_go"], standard_normal=False),
        DoubleToFloat(),
        RenameTransform(
            in_keys=["action", "observation", "return_to_go"],
            out_keys=["action_cat", "observation_cat", "return_to_go_cat"],
        ),
        ExcludeTransform(("next", "observation"), ("collector", "traj_ids")),
    ]:
        buffer.append_transform(transform)
    buffer.append_transform(
        Compose(
            ObservationNorm(
                loc=states.mean(0).float(),
                scale=states.std(0).float(),
                in_keys=["observation_cat"],
                standard_normal=True,
            )
        )
    )
    return buffer


def run(rl: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    buffer = make_buffer(rl)
    actor = ProbabilisticActor(
        TensorDictModule(
            Reader(),
            in_keys=["observation_cat", "action_cat", "return_to_go_cat"],
            out_keys=["param"],
        ),
        in_keys=["param"],
        out_keys=["action"],
        spec=Bounded(-1.0, 1.0, (1,)),
        distribution_class=TanhDelta,
        distribution_kwargs={"low": -1.0, "high": 1.0},
    )
    loss_module = DTLoss(actor, loss_function="l2")
    loss_module.set_keys(action_target="action_cat")
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=2e-3)
    losses = []
    for _ in range(60):
        batch = buffer.sample()
        loss = loss_module(batch)["loss"]
        descend(optimizer, loss)
        losses.append(loss.item())
    return {"loss": losses}
