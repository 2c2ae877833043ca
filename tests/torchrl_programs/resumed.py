"""A run that is stopped, saved and gone on with by ``dumps`` and ``loads``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from tests.torchrl_programs.networks import descend


class Run:
    """All that a training script holds."""

    def __init__(self, rl: Any) -> None:
        torch.manual_seed(0)
        self.env = TransformedEnv(
            GymEnv("CartPole-v1", categorical_action_encoding=True), StepCounter(50)
        )
        self.env.set_seed(0)
        self.policy = QValueActor(
            MLP(in_features=4, out_features=2, num_cells=[32]),
            in_keys=["observation"],
            spec=self.env.action_spec,
        )
        self.loss_module = DQNLoss(self.policy, delay_value=True, action_space="categorical")
        self.loss_module.make_value_estimator(gamma=0.9)
        self.update_target = SoftUpdate(self.loss_module, tau=0.05)
        self.optimizer = torch.optim.Adam(self.loss_module.parameters(), lr=3e-3)
        self.buffer = rl.TensorDictReplayBuffer(
            storage=rl.LazyTensorStorage(500),
            sampler=rl.RandomSampler(),
            batch_size=32,
            generator=torch.Generator().manual_seed(1),
        )

    def collect(self, frames: int) -> None:
        collector = Collector(
            self.env,
            self.policy,
            frames_per_batch=frames,
            total_frames=frames,
            init_random_frames=0,
        )
        for data in collector:
            self.buffer.extend(data)
        collector.shutdown(close_env=False)

    def learn(self, updates: int) -> list[float]:
        losses = []
        for _ in range(updates):
            loss = self.loss_module(self.buffer.sample())["loss"]
            descend(self.optimizer, loss)
            self.update_target.step()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path) -> None:
        self.buffer.dumps(folder / "buffer")
        torch.save(
            {
                "loss": self.loss_module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            },
            folder / "networks.pt",
        )

    def load(self, folder: Path) -> None:
        self.buffer.loads(folder / "buffer")
        networks = torch.load(folder / "networks.pt", weights_only=False)
        self.loss_module.load_state_dict(networks["loss"])
        self.optimizer.load_state_dict(networks["optimizer"])


def run(rl: Any) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        first = Run(rl)
        first.collect(300)
        losses = first.learn(20)
        first.save(Path(folder))
        expected = first.learn(20)

        second = Run(rl)
        second.load(Path(folder))
        assert len(second.buffer) == 300
        found = second.learn(20)
    third = Run(rl)
    third.buffer.load_state_dict(first.buffer.state_dict())
    assert (third.buffer[:]["observation"] == first.buffer[:]["observation"]).all()
    assert found == expected
    return {"loss": losses + found}
