"""Small networks that the programs share, and a step of their optimizers."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, TanhModule, TanhNormal, ValueOperator


def tanh_actor(spec: Any, size: int = 1) -> TensorDictSequential:
    """Make a deterministic policy of one action from observations of ``size`` numbers."""
    return TensorDictSequential(
        TensorDictModule(
            MLP(in_features=size, out_features=1, num_cells=[32]),
            in_keys=["observation"],
            out_keys=["param"],
        ),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=spec),
    )


def normal_actor(spec: Any, **options: Any) -> ProbabilisticActor:
    """Make a policy that draws one action from observations of one number."""
    return ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(
                MLP(in_features=1, out_features=2, num_cells=[32]), NormalParamExtractor()
            ),
            in_keys=["observation"],
            out_keys=["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        spec=spec,
        distribution_class=TanhNormal,
        **options,
    )


def critic_of(*keys: str, size: int = 1) -> ValueOperator:
    """Make a value of these keys, which have ``size`` numbers together."""
    return ValueOperator(MLP(in_features=size, out_features=1, num_cells=[32]), in_keys=list(keys))


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Take one step of an optimizer, and return the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
