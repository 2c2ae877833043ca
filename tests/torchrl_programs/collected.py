"""Collectors that write into the buffer: in turn, in a thread of their own, step by step."""

from __future__ import annotations

import time
from typing import Any

import torch
from torchrl.collectors import Collector
from torchrl.modules import AdditiveGaussianModule

from tests.torchrl_programs.networks import Learner
from tests.torchrl_programs.reach import make_env


def make_learner(env: Any) -> Learner:
    spec = env.action_spec_unbatched
    return Learner(spec, AdditiveGaussianModule(spec, sigma_init=0.3, sigma_end=0.3))


def in_turn(rl: Any) -> list[float]:
    """The collector yields nothing: it writes, then the learner samples."""
    torch.manual_seed(0)
    env = make_env()
    learner = make_learner(env)
    buffer = rl.ReplayBuffer(storage=rl.LazyTensorStorage(1000, ndim=2), batch_size=64)
    collector = Collector(
        env, learner.policy, frames_per_batch=80, total_frames=800, replay_buffer=buffer
    )
    losses = []
    for written, nothing in enumerate(collector, 1):
        assert nothing is None
        assert len(buffer) == min(80 * written, 1000)
        losses += [learner.step(buffer.sample()) for _ in range(5)]
        collector.update_policy_weights_()
    collector.shutdown()
    return losses


def in_a_thread(rl: Any) -> list[float]:
    """``collector.start()`` writes in the background while the learner samples."""
    torch.manual_seed(0)
    env = make_env()
    learner = make_learner(env)
    buffer = rl.ReplayBuffer(storage=rl.LazyTensorStorage(1000, ndim=2), batch_size=64)
    collector = Collector(
        env, learner.policy, frames_per_batch=40, total_frames=2000, replay_buffer=buffer
    )
    collector.start()
    while buffer.write_count < 80:
        time.sleep(0.01)
    losses = [learner.step(buffer.sample()) for _ in range(50)]
    collector.async_shutdown()
    assert buffer.write_count >= 80
    return losses


def step_by_step(rl: Any) -> list[float]:
    """``extend_buffer=False``: each step of the environment is added by ``add``."""
    torch.manual_seed(0)
    env = make_env(points=1)
    learner = make_learner(env)
    buffer = rl.ReplayBuffer(storage=rl.LazyTensorStorage(200), batch_size=16)
    collector = Collector(
        env,
        learner.policy,
        frames_per_batch=50,
        total_frames=100,
        replay_buffer=buffer,
        extend_buffer=False,
    )
    losses = []
    for _ in collector:
        losses += [learner.step(buffer.sample()) for _ in range(5)]
    collector.shutdown()
    assert len(buffer) == 100
    return losses


def run(rl: Any) -> dict[str, list[float]]:
    return {
        "in turn": in_turn(rl),
        "in a thread": in_a_thread(rl),
        "step by step": step_by_step(rl),
    }
