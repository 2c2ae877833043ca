"""PPO on CartPole: each batch of rows is passed over several times without repetition."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


def run(rl: Any) -> dict[str, list[float]]:
    torch.manual_seed(0)
    env = TransformedEnv(
        GymEnv("CartPole-v1", categorical_action_encoding=True),
        Compose(RewardSum(), StepCounter(200)),
    )
    env.set_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(
            MLP(in_features=4, out_features=2, num_cells=[64]),
            in_keys=["observation"],
            out_keys=["logits"],
        ),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(
        MLP(in_features=4, out_features=1, num_cells=[64]), in_keys=["observation"]
    )
    advantage = GAE(gamma=0.98, lmbda=0.95, value_network=critic, average_gae=True)
    loss_module = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-3)
    collector = Collector(env, actor, frames_per_batch=512, total_frames=4096)
    buffer = rl.TensorDictReplayBuffer(
        storage=rl.LazyTensorStorage(512),
        sampler=rl.SamplerWithoutReplacement(drop_last=True),
        batch_size=64,
    )

    losses, returns = [], []
    for data in collector:
        finished = data["next", "done"].squeeze(-1)
        returns += data["next", "episode_reward"][finished].flatten().tolist()
        for _ in range(4):
            with torch.no_grad():
                data = advantage(data)
            buffer.empty()
            buffer.extend(data.reshape(-1))
            for batch in buffer:
                terms = loss_module(batch)
                loss = sum(term for name, term in terms.items() if name.startswith("loss_"))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        collector.update_policy_weights_()
    collector.shutdown()
    return {"loss": losses, "return": returns}
