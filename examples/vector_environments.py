"""Train double DQN on CartPole-v1 with a vector environment and 3-step returns.

`VectorSteps` makes rows from steps, in every autoreset mode. The storage separates the streams of
the environments by its `lane_key`. So no 3-step return crosses the end of an episode or mixes two
environments. The program ends when the mean return of the last 50 episodes reaches the goal.

    python examples/vector_environments.py [--goal 150] [--mode NextStep] [--environments 8]
                                           [--steps 6000] [--seed 0]

Needs the extra `examples`.
"""

from __future__ import annotations

import argparse
import copy
from collections import deque

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import nn

from replaykit import LazyTensorStorage, NStep, ReplayBuffer, VectorSteps

CAPACITY, BATCH_SIZE = 50_000, 64
N_STEP, GAMMA, RATE = 3, 0.99, 2e-3
FIRST_STEPS, EXPLORING, LEAST = 50, 300, 0.05
"""Number of steps without updates, and the schedule of exploration.

The share of random actions falls from 1 to ``LEAST`` within ``EXPLORING`` steps.
"""
TARGET_EVERY, RECENT = 25, 50


def make_network() -> nn.Sequential:
    """Return a network for the values of both actions."""
    return nn.Sequential(
        nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


def main(arguments: list[str] | None = None) -> int:
    """Train the agent. Return 0 if the goal was reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--goal", type=float, default=150)
    parser.add_argument(
        "--mode", choices=[mode.value for mode in AutoresetMode], default="NextStep"
    )
    parser.add_argument("--environments", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    draw = np.random.default_rng(options.seed)

    envs = gymnasium.make_vec(
        "CartPole-v1",
        num_envs=options.environments,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode(options.mode)},
    )
    steps = VectorSteps(envs)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, lane_key=steps.lane_key),
        transform=NStep(N_STEP, GAMMA),
        batch_size=BATCH_SIZE,
        generator=torch.Generator().manual_seed(options.seed),
    )
    network = make_network()
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)

    returns: deque[float] = deque(maxlen=RECENT)
    totals = np.zeros(options.environments)
    steps.reset(seed=options.seed)
    for step in range(options.steps):
        if steps.autoreset == "disabled" and steps.ended.any():
            steps.reset(options={"reset_mask": steps.ended})
        with torch.no_grad():
            action = network(torch.as_tensor(steps.observation)).argmax(-1).numpy()
        random = draw.random(options.environments) < max(LEAST, 1 - step / EXPLORING)
        action = np.where(random, draw.integers(2, size=options.environments), action)
        rows = steps.step(action)
        rb.extend(rows)

        lanes = rows["env"].numpy()
        totals[lanes] += rows["next", "reward"][:, 0].numpy()
        over = lanes[rows["next", "done"][:, 0].numpy()]
        returns.extend(totals[over].tolist())
        totals[over] = 0
        if len(returns) == RECENT and np.mean(returns) >= options.goal:
            break
        if step < FIRST_STEPS:
            continue

        batch = rb.sample()
        last = batch["next"]
        with torch.no_grad():
            best = network(last["observation"]).argmax(-1, keepdim=True)
            future = target(last["observation"]).gather(-1, best)
            future[last["terminated"]] = 0.0
            wanted = last["reward"] + batch["discount"] * future
        value = network(batch["observation"]).gather(-1, batch["action"])
        loss = nn.functional.smooth_l1_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % TARGET_EVERY == 0:
            target.load_state_dict(network.state_dict())
    envs.close()
    mean = float(np.mean(returns)) if returns else 0.0
    print(f"{len(rb)} rows, {len(rb.episodes)} episodes, mean return of the last ones {mean:.0f}")
    return 0 if mean >= options.goal else 1


if __name__ == "__main__":
    raise SystemExit(main())
