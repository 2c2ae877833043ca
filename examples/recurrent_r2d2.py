"""Learn a partially observed task with a recurrent agent, from collectors in Ray actors.

The agent sees the places of cart and pole, but not their velocities, so it needs a memory. As in
R2D2 (Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning"):

- Collectors in Ray actors store the state of their recurrent network with each row.
- A `Sequence` makes a window from each row that a `PrioritizedSampler` draws.
- The learner starts from the stored state of a window. It first runs some burn-in rows without a
  loss, because an older network computed the stored state.
- The priority of a window mixes the largest and the mean TD error of its rows.

The program ends when the greedy policy reaches the goal, a mean return of 100. Linear policies
without a memory reach about 50.

    python examples/recurrent_r2d2.py [--seed 0] [--seconds 150] [--output example-output]

Needs the extras `ray` and `examples`.
"""

from __future__ import annotations

import argparse
import copy
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import nn
from tqdm import tqdm

from replaykit import (
    LazyTensorStorage,
    NStep,
    PrioritizedSampler,
    RayReplayBuffer,
    Sequence,
    VectorSteps,
)

GOAL = 100.0
UNITS, CAPACITY, WINDOWS = 64, 100_000, 32
BURN_IN, LENGTH, N_STEP = 8, 16, 3
"""Rows before the anchor, rows to learn from, and rows after them for the values of next states."""
ALPHA, BETA, ETA = 0.9, 0.6, 0.9
"""Exponents of priorities and weights, and share of the largest TD error in a priority."""
GAMMA, RATE, AVERAGING = 0.98, 2e-3, 0.02
COLLECTORS, ENVIRONMENTS, STEPS, UPDATES, ROUNDS = 2, 4, 50, 25, 1_000
"""Collectors, their environments, steps and updates of a round, and most rounds."""
FIRST_STEPS, EVALUATE_EVERY, TRIALS = 250, 5, 50


class Positions(gymnasium.ObservationWrapper):
    """A CartPole whose observation is the place and the angle, both from about -1 to 1."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Return place and angle, float32 ``[2]``."""
        return observation[[0, 2]] / np.array([2.4, 0.21], np.float32)


def make_envs(count: int) -> SyncVectorEnv:
    """Return environments. The step that ends an episode also resets its environment."""
    make = [lambda: Positions(gymnasium.make("CartPole-v1"))] * count
    return SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)


class Agent(nn.Module):
    """A recurrent network for the values of both actions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, UNITS)
        self.cell = nn.GRUCell(UNITS, UNITS)
        self.head = nn.Sequential(nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Linear(UNITS, 2))

    def step(self, observation: Any, state: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
        """Return the best action of each environment, and the next states ``[N, UNITS]``."""
        with torch.no_grad():
            state = self.cell(torch.relu(self.encoder(torch.as_tensor(observation))), state)
            return self.head(state).argmax(-1).numpy(), state

    def unroll(self, rows: TensorDict, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values ``[B, T, 2]`` of rows ``[B, T]``, and the last state ``[B, UNITS]``."""
        seen = torch.relu(self.encoder(rows["observation"]))
        states = []
        for step in range(rows.shape[1]):
            # Rows that only fill a gap at the begin or end of an episode do not change the state.
            valid = rows["validity_mask"][:, step, None]
            state = torch.where(valid, self.cell(seen[:, step], state), state)
            states.append(state)
        return self.head(torch.stack(states, 1)), state


class Collector:
    """A player of several environments that writes its rows to the buffer."""

    def __init__(self, number: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.draw = np.random.default_rng([seed, number])
        lanes = number * ENVIRONMENTS + np.arange(ENVIRONMENTS)
        # Each environment explores with another probability, from 0.4 to 0.004.
        self.random = 0.4 ** (1 + 5 * lanes / (COLLECTORS * ENVIRONMENTS - 1))
        self.steps = VectorSteps(make_envs(ENVIRONMENTS), first_lane=int(lanes[0]))
        self.steps.reset(seed=seed + int(lanes[0]))
        self.agent, self.state = Agent(), torch.zeros(ENVIRONMENTS, UNITS)

    def play(self, buffer: Any, weights: dict[str, torch.Tensor], steps: int) -> int:
        """Take ``steps`` steps of each environment, write the rows, and return their number."""
        self.agent.load_state_dict(weights)
        rows = []
        for _ in range(steps):
            before = self.state
            action, self.state = self.agent.step(self.steps.observation, before)
            random = self.draw.random(ENVIRONMENTS) < self.random
            action = np.where(random, self.draw.integers(2, size=ENVIRONMENTS), action)
            row = self.steps.step(action)
            row["state"] = before
            rows.append(row)
            self.state = self.state * torch.as_tensor(~self.steps.ended)[:, None]
        buffer.extend(torch.cat(rows))
        return steps * ENVIRONMENTS


def learn(agent: Agent, target: Agent, optimizer: torch.optim.Optimizer, buffer: Any) -> None:
    """Make one step of double DQN on windows, and set the priorities of their anchors."""
    batch = buffer.sample().reshape(WINDOWS, BURN_IN + LENGTH + N_STEP)
    burn_in, rows, used = batch[:, :BURN_IN], batch[:, BURN_IN:], batch[:, BURN_IN:-N_STEP]
    with torch.no_grad():
        _, state = agent.unroll(burn_in, burn_in["state"][:, 0])
        _, target_state = target.unroll(burn_in, burn_in["state"][:, 0])
        target_values, _ = target.unroll(rows, target_state)
    values, _ = agent.unroll(rows, state)

    # The next state of an n-step return is the observation of a later row of the same window.
    later = torch.arange(LENGTH)[:, None] + used["steps_used"]
    with torch.no_grad():
        future = target_values.gather(-1, values.argmax(-1, keepdim=True)).gather(1, later)
        wanted = used["next", "reward"].float() + used["discount"] * used["bootstrap"] * future
    error = (wanted - values[:, :LENGTH].gather(-1, used["action"])).squeeze(-1)
    # No row follows the last row of a truncated episode, so its target is unknown.
    known = rows["validity_mask"].gather(1, later[..., 0]) | ~used["bootstrap"][..., 0]
    mask = used["validity_mask"] & known
    count = mask.sum(1).clamp(min=1)
    losses = nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none") * mask
    optimizer.zero_grad()
    (used["priority_weight"][:, 0] * losses.sum(1) / count).mean().backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), agent.parameters(), strict=True):
            slow.lerp_(fast, AVERAGING)
    errors = error.detach().abs() * mask
    priority = ETA * errors.amax(1) + (1 - ETA) * errors.sum(1) / count
    anchors = used[:, 0]
    generation = anchors["anchor_generation"]  # so that rows written meanwhile keep theirs
    buffer.update_priority(anchors["anchor_index"], priority, generation=generation)


def evaluate(agent: Agent, seed: int, deadline: float) -> float:
    """Return the mean return of the greedy policy over first episodes, cut off at the deadline."""
    steps, state = VectorSteps(make_envs(TRIALS)), torch.zeros(TRIALS, UNITS)
    steps.reset(seed=seed)
    totals, running = torch.zeros(TRIALS, 1), torch.ones(TRIALS, 1, dtype=torch.bool)
    while running.any() and time.monotonic() < deadline:
        action, state = agent.step(steps.observation, state)
        last = steps.step(action)["next"]
        totals += last["reward"] * running
        running &= ~last["done"]
    return float(totals.mean())


def train(buffer: Any, collectors: list[Any], seed: int, deadline: float) -> list[Any]:
    """Learn until the goal or the deadline; return row counts and mean returns of evaluations."""
    torch.manual_seed(seed)
    agent = Agent()
    target, optimizer = copy.deepcopy(agent), torch.optim.Adam(agent.parameters(), RATE)
    client = buffer.client()  # a handle that can be pickled
    curve, count = [], 0
    for number in tqdm(range(ROUNDS + 1), unit="round", mininterval=0.5):
        weights, steps = ray.put(agent.state_dict()), STEPS if number else FIRST_STEPS
        playing = [each.play.remote(client, weights, steps) for each in collectors]
        for _ in range(UPDATES if number else 0):
            if time.monotonic() < deadline:
                learn(agent, target, optimizer, buffer)
        left = max(0.0, deadline - time.monotonic())
        ready, late = ray.wait(playing, num_returns=COLLECTORS, timeout=left)
        if late:
            break
        count += sum(ray.get(ready))
        if number and number % EVALUATE_EVERY == 0:
            curve.append((count, evaluate(agent, 1_000_000 + count, deadline)))
            if curve[-1][1] >= GOAL:
                break
    return curve


def main(arguments: list[str] | None = None) -> int:
    """Train the agent. Return 0 if the goal was reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=150, help="budget of wall-clock time")
    parser.add_argument("--output", type=Path, default=Path("example-output"), help="for the plot")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    torch.set_num_threads(1)
    ray.init(include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    kind: Any = ray.remote(num_cpus=0)(Collector)
    # The processes of collectors and buffer start at the same time.
    collectors = [kind.remote(number, options.seed) for number in range(COLLECTORS)]
    with RayReplayBuffer(
        storage=partial(LazyTensorStorage, CAPACITY, lane_key="env"),
        sampler=partial(PrioritizedSampler, alpha=ALPHA, beta=BETA),
        sample_unit=Sequence(LENGTH, burn_in=BURN_IN, bootstrap=N_STEP),
        transform_factory=partial(NStep, N_STEP, GAMMA),
        batch_size=WINDOWS,
        generator=torch.Generator().manual_seed(options.seed),
        remote_config={"num_cpus": 0},
    ) as buffer:
        deadline = started + 0.9 * options.seconds  # the rest is for the plot and the ends
        curve = train(buffer, collectors, options.seed, deadline)
        for collector in collectors:
            ray.kill(collector)

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([rows for rows, _ in curve], [mean for _, mean in curve], "o-", label="greedy policy")
    axes.axhline(GOAL, color="grey", linestyle="--", label="goal")
    axes.set(title="R2D2 on CartPole without velocities", xlabel="rows", ylabel="mean return")
    axes.legend()
    options.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output / "recurrent_r2d2.png", dpi=120)
    final = curve[-1][1] if curve else 0.0
    word = "pass" if final >= GOAL else "fail"
    print(f"recurrent_r2d2: {word} - mean return {final:.1f} against {GOAL:.0f}")
    return 0 if final >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
