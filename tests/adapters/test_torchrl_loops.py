"""TorchRL's collectors write into replaykit's buffers, and its losses take their batches.

Each program runs twice from one seed: with the buffer classes of ``torchrl.data``, and with those
of ``replaykit``. Uniform draws give the same losses to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import replaykit

FRAMES = 50
BATCHES = 6
UPDATES = 5

Make = Callable[..., Any]
Program = Callable[[Make, bool], list[float]]

pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings("ignore"),  # TorchRL's own
]


def uniform(rl: Any) -> Make:
    """Return a function that makes a buffer of uniform draws from the classes in ``rl``."""
    return lambda: rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(1_000), batch_size=32)


def prioritized() -> replaykit.TensorDictPrioritizedReplayBuffer:
    """Return a prioritized buffer of replaykit."""
    return replaykit.TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=replaykit.LazyTensorStorage(1_000), batch_size=32
    )


def require_stored(rb: Any, batch: Any) -> None:
    """Check that the errors of rows that occur once in a batch are their priorities."""
    _, place, count = batch["index"].unique(return_inverse=True, return_counts=True)
    once = count[place] == 1
    assert once.any()
    stored = rb.sampler.state_dict()["_priorities"][batch["index"][once]]
    torch.testing.assert_close(stored, batch["td_error"][once].reshape(-1).to(stored.dtype))


def learn(
    collector: Any,
    rb: Any,
    loss_module: Any,
    names: tuple[str, ...],
    rate: float,
    *,
    collected: bool,
    after_batch: Callable[[], None] = lambda: None,
) -> list[float]:
    """Collect, sample and update in turn, and return all losses.

    Args:
        collector: a collector of ``FRAMES`` steps per batch.
        rb: the buffer.
        loss_module: a loss of TorchRL with a delayed value network.
        names: the terms of the loss whose sum is minimized.
        rate: the learning rate.
        collected: whether the collector writes into ``rb``. Otherwise this loop does.
        after_batch: called after each batch of the collector.
    """
    from torchrl.objectives import SoftUpdate

    target = SoftUpdate(loss_module, tau=0.05)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=rate)
    losses = []
    for written, data in enumerate(collector, 1):
        if collected:
            assert data is None
        else:
            rb.extend(data.reshape(-1))
        assert len(rb) == FRAMES * written
        after_batch()
        for _ in range(UPDATES):
            batch = rb.sample()
            terms = loss_module(batch)
            loss = sum(terms[name] for name in names)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            target.step()
            if hasattr(rb.sampler, "beta"):
                rb.update_tensordict_priority(batch)
                require_stored(rb, batch)
            losses.append(loss.item())
        collector.update_policy_weights_()
    collector.shutdown()
    return losses


def dqn(make: Make, collected: bool) -> list[float]:
    """Train DQN on CartPole-v1."""
    from tensordict.nn import TensorDictSequential
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv
    from torchrl.modules import MLP, EGreedyModule, QValueActor
    from torchrl.objectives import DQNLoss

    torch.manual_seed(0)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_seed(0)
    policy = QValueActor(
        MLP(in_features=4, out_features=2, num_cells=[32, 32]),
        in_keys=["observation"],
        spec=env.action_spec,
    )
    explore = EGreedyModule(env.action_spec, annealing_num_steps=300, eps_init=1.0, eps_end=0.05)
    rb = make()
    collector = Collector(
        env,
        TensorDictSequential(policy, explore),
        frames_per_batch=FRAMES,
        total_frames=FRAMES * BATCHES,
        replay_buffer=rb if collected else None,
    )
    loss_module = DQNLoss(policy, loss_function="l2", delay_value=True, action_space="categorical")
    loss_module.make_value_estimator(gamma=0.98)
    return learn(
        collector,
        rb,
        loss_module,
        ("loss",),
        2e-3,
        collected=collected,
        after_batch=lambda: explore.step(FRAMES),
    )


def sac(make: Make, collected: bool) -> list[float]:
    """Train SAC on Pendulum-v1."""
    from tensordict.nn import NormalParamExtractor, TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv
    from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import SACLoss

    torch.manual_seed(0)
    env = GymEnv("Pendulum-v1")
    env.set_seed(0)
    space = env.action_spec.space
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(
                MLP(in_features=3, out_features=2, num_cells=[32, 32]), NormalParamExtractor()
            ),
            in_keys=["observation"],
            out_keys=["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        spec=env.action_spec,
        distribution_class=TanhNormal,
        distribution_kwargs={"low": space.low, "high": space.high},
    )
    critic = ValueOperator(
        MLP(in_features=4, out_features=1, num_cells=[32, 32]), in_keys=["observation", "action"]
    )
    loss_module = SACLoss(actor, critic, num_qvalue_nets=2, action_spec=env.action_spec)
    loss_module.make_value_estimator(gamma=0.99)
    rb = make()
    collector = Collector(
        env,
        actor,
        frames_per_batch=FRAMES,
        total_frames=FRAMES * BATCHES,
        replay_buffer=rb if collected else None,
    )
    names = ("loss_actor", "loss_qvalue", "loss_alpha")
    return learn(collector, rb, loss_module, names, 1e-3, collected=collected)


@pytest.mark.parametrize("collected", [False, True], ids=["extend", "replay_buffer="])
@pytest.mark.parametrize("program", [dqn, sac])
def test_losses_are_those_of_torchrl_to_the_bit(program: Program, collected: bool) -> None:
    import torchrl.data

    expected = program(uniform(torchrl.data), collected)
    found = program(uniform(replaykit), collected)
    assert len(found) == UPDATES * BATCHES
    assert len(set(found)) > UPDATES
    assert found == expected


@pytest.mark.parametrize("collected", [False, True], ids=["extend", "replay_buffer="])
@pytest.mark.parametrize("program", [dqn, sac])
def test_errors_of_a_loss_become_priorities(program: Program, collected: bool) -> None:
    """The same seed gives the same losses."""
    losses = program(prioritized, collected)
    assert len(losses) == UPDATES * BATCHES
    assert all(math.isfinite(loss) for loss in losses)
    assert losses != program(uniform(replaykit), collected)
    assert losses == program(prioritized, collected)
