"""Train double DQN on CartPole-v1 with priorities and 3-step returns.

The sampler is the only difference between the two curves of the plot. `PrioritizedSampler` prefers
rows with a large error. Each draw has a `priority_weight`, which corrects the loss for this
preference. `LinearScheduler` raises the exponent of the weights to 1 during the training.

The program trains with priorities until the greedy policy reaches the goal, a mean return of 475.
Then it trains with uniform draws for the same number of steps, if there is time left.

    python examples/dqn_prioritized.py [--sampler both] [--seed 0] [--seconds 180]
                                       [--output example-output]

Needs the extra `examples`.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

from replaykit import (
    LazyTensorStorage,
    LinearScheduler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    VectorSteps,
)

GOAL = 475.0
ENVIRONMENTS, CAPACITY, BATCH_SIZE = 8, 50_000, 128
N_STEP, GAMMA, RATE, AVERAGING = 3, 0.99, 1e-3, 0.02
"""Steps of a return, discount, learning rate, and share of the network in a target's update."""
ALPHA, BETA, EPS = 0.6, 0.4, 1e-3
STEPS, FIRST_STEPS, EXPLORING, LEAST = 12_000, 50, 2_000, 0.3
"""Most steps of all environments, steps without updates, and the schedule of exploration.

The share of random actions falls from 1 towards 0 within ``EXPLORING`` steps, and stops at
``LEAST``. With fewer random actions most rows show one drift of the cart, and learning stalls.
"""
SCALES = (1.0, 1.0, 12.0, 1.5)
"""Factors of the observation: the position reaches 2.4, but the angle only 0.2."""
EVALUATE_EVERY, TRIALS, FINAL_TRIALS = 50, 20, 50


class Curve(NamedTuple):
    """The greedy returns of one training: after how many steps, and the last mean return."""

    steps: list[int]
    returns: list[float]
    final: float


class Network(nn.Module):
    """The values of both actions, ``[B, 2]``."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Buffer(torch.tensor(SCALES))
        self.layers = nn.Sequential(
            nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
        )

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """Return the values for observations ``[B, 4]``."""
        return self.layers(observation * self.scales)


def make_envs(count: int) -> gymnasium.vector.VectorEnv:
    """Return CartPole environments; each one resets in the step after the end of its episode."""
    return gymnasium.make_vec(
        "CartPole-v1",
        num_envs=count,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.NEXT_STEP},
    )


def greedy(network: nn.Module, observation: np.ndarray) -> np.ndarray:
    """Return the best action of each environment, int64 ``[n]``."""
    with torch.no_grad():
        return network(torch.as_tensor(observation)).argmax(-1).numpy()


def evaluate(network: nn.Module, trials: int, seed: int, deadline: float) -> float:
    """Return the mean return of the greedy policy over ``trials`` first episodes.

    At the deadline, episodes that have not ended count with their rewards so far.
    """
    envs = make_envs(trials)
    observation, _ = envs.reset(seed=seed)
    totals, running = np.zeros(trials), np.ones(trials, bool)
    while running.any() and time.monotonic() < deadline:
        observation, reward, terminated, truncated, _ = envs.step(greedy(network, observation))
        totals += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    return float(totals.mean())


def update(
    network: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, rb: ReplayBuffer
) -> None:
    """Make one step of double DQN on a batch, and set the priorities of its rows."""
    batch = rb.sample()
    last = batch["next"]  # n steps later, or at the end of the episode
    with torch.no_grad():
        best = network(last["observation"]).argmax(-1, keepdim=True)
        future = target(last["observation"]).gather(-1, best)
        wanted = last["reward"] + batch["discount"] * batch["bootstrap"] * future
    error = wanted - network(batch["observation"]).gather(-1, batch["action"])
    losses = error.square().squeeze(-1)
    if "priority_weight" in batch.keys():  # noqa: SIM118  Iteration over a TensorDict is by row.
        losses = losses * batch["priority_weight"]
    optimizer.zero_grad()
    losses.mean().backward()
    nn.utils.clip_grad_norm_(network.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
            slow.lerp_(fast, AVERAGING)
    batch["td_error"] = error.detach().abs()
    rb.update_tensordict_priority(batch)  # uniform draws ignore priorities


def train(name: str, steps_limit: int, seed: int, stop: bool, deadline: float) -> Curve:
    """Train one agent until the goal (if ``stop``), the limit of steps or the deadline."""
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    steps = VectorSteps(make_envs(ENVIRONMENTS))
    prioritized = PrioritizedSampler(alpha=ALPHA, beta=BETA, eps=EPS)
    schedule = LinearScheduler(prioritized, "beta", final_value=1.0, num_steps=STEPS)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, lane_key=steps.lane_key),
        sampler=prioritized if name == "prioritized" else RandomSampler(),
        transform=NStep(N_STEP, GAMMA),
        batch_size=BATCH_SIZE,
        generator=torch.Generator().manual_seed(seed),
    )
    network = Network()
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    curve, mean = Curve([], [], 0.0), 0.0
    steps.reset(seed=seed)
    with tqdm(total=steps_limit, desc=name, unit="step", mininterval=0.5) as bar:
        for step in range(1, steps_limit + 1):
            random = draw.random(ENVIRONMENTS) < max(LEAST, 1 - step / EXPLORING)
            action = np.where(
                random, draw.integers(2, size=ENVIRONMENTS), greedy(network, steps.observation)
            )
            rows = steps.step(action)
            # 1 for every step is the same task as -1 for a fall, whose values need no warm-up.
            rows["next", "reward"] = -rows["next", "terminated"].float()
            rb.extend(rows)
            if step > FIRST_STEPS:
                update(network, target, optimizer, rb)
                schedule.step()
            bar.update()
            if step % EVALUATE_EVERY == 0:
                mean = evaluate(target, TRIALS, 1_000_000 + step * TRIALS, deadline)
                curve.steps.append(step)
                curve.returns.append(mean)
                bar.set_postfix(greedy=f"{mean:.0f}")
                if mean >= GOAL:
                    # This evaluation chose the network, so other episodes must confirm it.
                    mean = evaluate(target, FINAL_TRIALS, 2_000_000 + step * TRIALS, deadline)
            if (stop and mean >= GOAL) or time.monotonic() > deadline:
                break
    steps.envs.close()
    return curve._replace(final=mean)


def plot(curves: dict[str, Curve], path: Path) -> None:
    """Draw the greedy returns of all trainings."""
    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(curve.steps, curve.returns, marker="o", markersize=3, label=name)
    axes.axhline(GOAL, color="grey", linestyle="--", label="goal")
    axes.set(
        title="Double DQN on CartPole-v1",
        xlabel=f"steps of {ENVIRONMENTS} environments, one update each",
        ylabel="mean return of the greedy policy",
        ylim=(0, 510),
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """Train the agents. Return 0 if the goal was reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sampler", choices=["prioritized", "uniform", "both"], default="both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=180, help="budget of wall-clock time")
    parser.add_argument("--output", type=Path, default=Path("example-output"))
    options = parser.parse_args(arguments)
    started = time.monotonic()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    deadline = started + options.seconds * 0.95  # the rest is for the plot

    first = "uniform" if options.sampler == "uniform" else "prioritized"
    curves = {first: train(first, STEPS, options.seed, True, deadline)}
    reached = curves[first].final
    if options.sampler == "both":
        same = max(curves[first].steps, default=0)
        curves["uniform"] = train("uniform", same, options.seed, False, deadline)
    plot(curves, options.output / "dqn_prioritized.png")
    print(f"{time.monotonic() - started:.0f} s, {time.process_time():.0f} s of processor time")
    word = "pass" if reached >= GOAL else "fail"
    print(f"dqn_prioritized: {word} - mean return {reached:.1f} against {GOAL:.0f}")
    return 0 if reached >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
