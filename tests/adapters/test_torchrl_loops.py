"""TorchRL's collectors write into replaykit's buffers, and its losses take their batches.

A DQN program runs from one seed with the buffer classes of ``torchrl.data``, and with those of
``replaykit``. Uniform draws give the same losses to the bit. ``tests/torchrl_programs`` has other
algorithms.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import replaykit

FRAMES = 50
BATCHES = 6
UPDATES = 5

pytestmark = [
    pytest.mark.programs,
    pytest.mark.filterwarnings("ignore"),  # TorchRL's own
]


@pytest.mark.parametrize("collected", [False, True], ids=["extend", "replay_buffer="])
def test_losses_are_those_of_torchrl_to_the_bit(collected: bool) -> None:
    import torchrl.data

    found = dqn(replaykit, collected)
    assert len(found) == UPDATES * BATCHES
    assert len(set(found)) > UPDATES
    assert found == dqn(torchrl.data, collected)


def dqn(rl: Any, collected: bool) -> list[float]:
    """Train DQN on CartPole-v1, and return all losses.

    With ``collected`` the collector writes into the buffer; otherwise the loop does.
    """
    from tensordict.nn import TensorDictSequential
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv
    from torchrl.modules import MLP, EGreedyModule, QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate

    torch.manual_seed(0)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_seed(0)
    policy = QValueActor(
        MLP(in_features=4, out_features=2, num_cells=[32, 32]),
        in_keys=["observation"],
        spec=env.action_spec,
    )
    explore = EGreedyModule(env.action_spec, annealing_num_steps=300, eps_init=1.0, eps_end=0.05)
    rb = rl.TensorDictReplayBuffer(storage=rl.LazyTensorStorage(1_000), batch_size=32)
    collector = Collector(
        env,
        TensorDictSequential(policy, explore),
        frames_per_batch=FRAMES,
        total_frames=FRAMES * BATCHES,
        replay_buffer=rb if collected else None,
    )
    loss_module = DQNLoss(policy, loss_function="l2", delay_value=True, action_space="categorical")
    loss_module.make_value_estimator(gamma=0.98)
    target = SoftUpdate(loss_module, tau=0.05)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=2e-3)
    losses = []
    for written, data in enumerate(collector, 1):
        if collected:
            assert data is None
        else:
            rb.extend(data.reshape(-1))
        assert len(rb) == FRAMES * written
        explore.step(FRAMES)
        for _ in range(UPDATES):
            loss = loss_module(rb.sample())["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            target.step()
            losses.append(loss.item())
        collector.update_policy_weights_()
    collector.shutdown()
    return losses
