"""Small networks that the programs share, and a step of their optimizers."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import MLP, ProbabilisticActor, TanhModule, TanhNormal, ValueOperator
from torchrl.objectives import DDPGLoss, SoftUpdate


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


class Learner:
    """A DDPG agent that is handed batches.

    Args:
        spec: spec of the actions.
        noise: what makes the actions of ``policy`` differ from those that were learnt.
    """

    def __init__(self, spec: Any, noise: Any) -> None:
        actor = tanh_actor(spec)
        critic = critic_of("observation", "action", size=2)
        self.policy = TensorDictSequential(actor, noise)
        self.loss_module = DDPGLoss(actor, critic, loss_function="smooth_l1", delay_actor=True)
        self.loss_module.make_value_estimator(gamma=0.9)
        self.update_target = SoftUpdate(self.loss_module, tau=0.05)
        networks = self.loss_module.actor_network_params, self.loss_module.value_network_params
        actor_parameters, critic_parameters = (list(n.flatten_keys().values()) for n in networks)
        self.optimizer = torch.optim.Adam(
            [{"params": actor_parameters, "lr": 1e-3}, {"params": critic_parameters}], lr=1e-2
        )

    def step(self, batch: Any) -> float:
        terms = self.loss_module(batch)
        loss = descend(self.optimizer, terms["loss_actor"] + terms["loss_value"])
        self.update_target.step()
        return loss


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    """Take one step of an optimizer, and return the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
