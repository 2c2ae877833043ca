"""Train double DQN on CartPole-v1 with a buffer in a Ray actor.

Ray actors play with the newest policy and write their transitions to the buffer. Meanwhile this
process, the learner, samples from the buffer. It requests the next batches in advance. The program
ends when the greedy policy reaches the goal.

    python examples/actor_learner.py [--goal 400] [--seconds 300] [--actors 2] [--seed 0]

Needs the extras `ray` and `examples`.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import deque
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from rich.console import Console
from tensordict import TensorDict
from torch import nn

from replaykit import LazyTensorStorage, RayReplayBuffer, RayReplayBufferClient

ENVIRONMENT = "CartPole-v1"
CAPACITY, BATCH_SIZE, UNDER_WAY = 100_000, 64, 4
STEPS, UPDATES = 128, 128
"""Steps of an actor with one policy, and updates of the learner meanwhile."""
FIRST_STEPS = 1_000
EXPLORING, LEAST = 8_000, 0.04
"""Steps over which the share of random actions falls from 1, and its final value."""
GAMMA, RATE, TARGET_EVERY = 0.99, 2e-3, 20
EVALUATED = 20
"""Number of episodes for the mean return of the greedy policy."""

console = Console()


def make_network() -> nn.Sequential:
    """Return a network from the four observed numbers to the values of both actions."""
    return nn.Sequential(
        nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


class Actor:
    """A player of one environment that writes its transitions to the buffer."""

    def __init__(self, buffer: RayReplayBufferClient, seed: int) -> None:
        torch.set_num_threads(1)
        self.buffer = buffer
        self.draw = np.random.default_rng(seed)
        self.environment = gymnasium.make(ENVIRONMENT)
        self.observation, _ = self.environment.reset(seed=seed)
        self.network = make_network()

    def play(self, weights: dict[str, torch.Tensor], steps: int, random: float) -> int:
        """Take ``steps`` steps, write their rows, and return the number of steps.

        An action is random with probability ``random``.
        """
        self.network.load_state_dict(weights)
        rows: dict[str, list[Any]] = {name: [] for name in ("o", "a", "n", "r", "t", "e")}
        for _ in range(steps):
            if self.draw.random() < random:
                action = int(self.draw.integers(2))
            else:
                with torch.no_grad():
                    action = int(self.network(torch.from_numpy(self.observation)).argmax())
            after, reward, terminated, truncated, _ = self.environment.step(action)
            values = (self.observation, action, after, float(reward), terminated, truncated)
            for column, value in zip(rows.values(), values, strict=True):
                column.append(value)
            self.observation = self.environment.reset()[0] if terminated or truncated else after
        ends = {
            name: torch.tensor(rows[key])[:, None]
            for name, key in (("terminated", "t"), ("truncated", "e"))
        }
        self.buffer.extend(
            TensorDict(
                {
                    "observation": torch.from_numpy(np.stack(rows["o"])),
                    "action": torch.tensor(rows["a"])[:, None],
                    "next": {
                        "observation": torch.from_numpy(np.stack(rows["n"])),
                        "reward": torch.tensor(rows["r"])[:, None],
                        **ends,
                        "done": ends["terminated"] | ends["truncated"],
                    },
                },
                [steps],
            )
        )
        return steps

    def evaluate(self, weights: dict[str, torch.Tensor], episodes: int) -> float:
        """Return the mean return of the greedy policy in a separate environment."""
        self.network.load_state_dict(weights)
        returns = []
        environment = gymnasium.make(ENVIRONMENT)
        for episode in range(episodes):
            observation, _ = environment.reset(seed=10_000 + episode)
            total, ended = 0.0, False
            while not ended:
                with torch.no_grad():
                    action = int(self.network(torch.from_numpy(observation)).argmax())
                observation, reward, terminated, truncated, _ = environment.step(action)
                total, ended = total + float(reward), terminated or truncated
            returns.append(total)
        environment.close()
        return float(np.mean(returns))


class Learner:
    """A double DQN agent."""

    def __init__(self) -> None:
        self.network = make_network()
        self.target = copy.deepcopy(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=RATE)
        self.updates = 0

    def update(self, batch: TensorDict) -> None:
        """Take one step of gradient descent on a batch."""
        after = batch["next", "observation"]
        with torch.no_grad():
            best = self.network(after).argmax(-1, keepdim=True)
            future = self.target(after).gather(-1, best)
            future[batch["next", "terminated"]] = 0.0
            wanted = batch["next", "reward"] + GAMMA * future
        value = self.network(batch["observation"]).gather(-1, batch["action"])
        loss = nn.functional.smooth_l1_loss(value, wanted)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 10.0)
        self.optimizer.step()
        self.updates += 1
        if self.updates % TARGET_EVERY == 0:
            self.target.load_state_dict(self.network.state_dict())

    def weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights of the policy for the actors."""
        return {name: value.clone() for name, value in self.network.state_dict().items()}


def main() -> int:
    """Train the agent. Return 0 if the goal was reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--goal", type=float, default=400.0, help="mean return to reach")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit")
    parser.add_argument("--actors", type=int, default=2, help="number of processes that play")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    begun = time.monotonic()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    with RayReplayBuffer(
        storage=partial(LazyTensorStorage, CAPACITY),
        batch_size=BATCH_SIZE,
        generator=torch.Generator().manual_seed(options.seed),
        remote_config={"num_cpus": 0},
    ) as buffer:
        best = train(buffer, options, begun)
    seconds = time.monotonic() - begun
    console.print(f"mean return {best:.0f} after {seconds:.0f} s")
    return int(best < options.goal)


def train(buffer: RayReplayBuffer, options: argparse.Namespace, begun: float) -> float:
    """Play and learn until the goal or the time limit; return the best mean."""
    kind: Any = ray.remote(num_cpus=0)(Actor)
    actors = [kind.remote(buffer.client(), options.seed + n) for n in range(options.actors)]
    judge = kind.remote(buffer.client(), options.seed)
    learner, batches = Learner(), buffer.client(prefetch=UNDER_WAY)
    weights = ray.put(learner.weights())
    ray.get([actor.play.remote(weights, FIRST_STEPS, 1.0) for actor in actors])
    steps = FIRST_STEPS * len(actors)
    playing = deque(actor.play.remote(weights, STEPS, 1.0) for actor in actors)
    judged, best, told = None, 0.0, 0.0
    while best < options.goal and time.monotonic() - begun < options.seconds:
        for _ in range(UPDATES):
            learner.update(batches.sample())
        weights = ray.put(learner.weights())
        random = max(LEAST, 1.0 - steps / EXPLORING)
        # The actors played this round with older weights while this process learned.
        steps += sum(ray.get(list(playing)))
        playing = deque(actor.play.remote(weights, STEPS, random) for actor in actors)
        if judged is not None and ray.wait([judged], timeout=0)[0]:
            mean, judged = ray.get(judged), None
            best = max(best, mean)
            if time.monotonic() - told > 5:
                told = time.monotonic()
                console.print(f"{told - begun:4.0f} s, {steps} steps: mean return {mean:.0f}")
        if judged is None:
            judged = judge.evaluate.remote(weights, EVALUATED)
    ray.wait(list(playing), num_returns=len(playing))  # their last rows still go to the buffer
    return best


if __name__ == "__main__":
    raise SystemExit(main())
