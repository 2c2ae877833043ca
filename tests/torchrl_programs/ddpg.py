"""DDPG as in the tutorial: rows are whole trajectories, cropped at random as they are sampled."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torchrl.collectors import Collector
from torchrl.envs import RandomCropTensorDict
from torchrl.modules import OrnsteinUhlenbeckProcessModule

from tests.torchrl_programs.networks import Learner
from tests.torchrl_programs.reach import make_env


def make_buffer(rl: Any, folder: str, prioritized: bool) -> Any:
    sampler = (
        rl.PrioritizedSampler(max_capacity=500, alpha=0.7, beta=0.5)
        if prioritized
        else rl.RandomSampler()
    )
    return rl.TensorDictReplayBuffer(
        storage=rl.LazyMemmapStorage(500, scratch_dir=folder),
        batch_size=16,
        sampler=sampler,
        pin_memory=False,
        transform=RandomCropTensorDict(5, sample_dim=1),
    )


def train(rl: Any, prioritized: bool) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    env = make_env()
    noise = OrnsteinUhlenbeckProcessModule(
        spec=env.action_spec_unbatched, annealing_num_steps=1500, eps_init=1.0, eps_end=0.05
    )
    learner = Learner(env.action_spec_unbatched, noise)
    collector = Collector(
        env,
        learner.policy,
        frames_per_batch=80,
        total_frames=2400,
        init_random_frames=800,
    )
    losses, rewards = [], []
    with tempfile.TemporaryDirectory() as folder:
        buffer = make_buffer(rl, folder, prioritized)
        for data in collector:  # [8, 10]: a row is a trajectory of ten steps
            buffer.extend(data.cpu())
            rewards.append(data["next", "reward"].mean().item())
            for _ in range(10):
                batch = buffer.sample()
                assert batch.shape == (16, 5)
                losses.append(learner.step(batch))
                if prioritized:
                    buffer.update_tensordict_priority(batch)
            noise.step(80)
            collector.update_policy_weights_()
        collector.shutdown()
        del buffer
    return losses, rewards


def run(rl: Any) -> dict[str, list[float]]:
    losses, rewards = train(rl, prioritized=False)
    prioritized_losses, prioritized_rewards = train(rl, prioritized=True)
    return {
        "loss": losses,
        "reward": rewards,
        "prioritized loss": prioritized_losses,
        "prioritized reward": prioritized_rewards,
    }
