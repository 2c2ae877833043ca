"""Train PPO on CartPole-v1 from a buffer that is drained after every rollout.

On-policy rows are useful only while the policy that collected them is nearly the newest one. So the
collector fills the buffer, the learner draws every row in each of its passes, and `empty` drains
the buffer. `SamplerWithoutReplacement` makes the passes: one loop over the buffer returns each row
once. The program counts the draws of every row, and checks that each row was used `EPOCHS` times.

It ends when the greedy policy reaches the goal, a mean return of 475.

    python examples/ppo_drain.py [--seed 0] [--seconds 120] [--output example-output]

Needs the extra `examples`.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import nn
from tqdm import tqdm

from replaykit import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, VectorSteps

GOAL = 475.0
ENVIRONMENTS, STEPS, ROLLOUTS = 8, 64, 400
"""Environments, steps of each one in a rollout, and the most rollouts."""
EPOCHS, BATCH_SIZE = 10, 128
GAMMA, LAMBDA, CLIP, RATE = 0.98, 0.9, 0.2, 1e-3
VALUE_WEIGHT, ENTROPY_WEIGHT = 0.5, 0.0
EVALUATE_EVERY, TRIALS, FINAL_TRIALS, RECENT = 5, 20, 50, 50


class Agent(nn.Module):
    """A policy and a value of the state, as two separate networks."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(
                nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
            )
            for outputs in (2, 1)
        )

    def choose(self, observation: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw actions; return them with their log-probabilities, ``[N]`` each."""
        with torch.no_grad():
            policy = self.distribution(torch.as_tensor(observation))
            action = policy.sample()
            return action, policy.log_prob(action)

    def distribution(self, observation: torch.Tensor) -> torch.distributions.Categorical:
        """Return the distribution of the actions."""
        return torch.distributions.Categorical(logits=self.policy(observation), validate_args=False)


def make_envs(count: int) -> gymnasium.vector.VectorEnv:
    """Return CartPole environments. The step that ends an episode also resets its environment."""
    return gymnasium.make_vec(
        "CartPole-v1",
        num_envs=count,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )


def collect(steps: VectorSteps, agent: Agent) -> TensorDict:
    """Return the rows of one rollout, ``[STEPS, ENVIRONMENTS]``."""
    rows = []
    for _ in range(STEPS):
        action, log_prob = agent.choose(steps.observation)
        row = steps.step(action)  # in the mode SAME_STEP always one row of each environment
        row["log_prob"] = log_prob[:, None]
        rows.append(row)
    return torch.stack(rows)


def add_advantages(rows: TensorDict, agent: Agent) -> None:
    """Add ``advantage`` and ``value_target`` to the rows ``[T, N]`` of a rollout.

    The advantage is the sum of all later TD errors of the episode, each one discounted by
    ``GAMMA * LAMBDA`` per step: generalized advantage estimation.
    """
    last = rows["next"]
    with torch.no_grad():
        value, after = agent.value(rows["observation"]), agent.value(last["observation"])
    # A truncated episode has a future that was not played, a terminated one has none.
    error = last["reward"].float() + GAMMA * after * ~last["terminated"] - value
    goes_on = (~last["done"]).float()
    advantage = torch.zeros_like(error)
    later = torch.zeros_like(error[0])
    for step in reversed(range(len(error))):
        later = error[step] + GAMMA * LAMBDA * goes_on[step] * later
        advantage[step] = later
    rows["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    rows["value_target"] = advantage + value


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: TensorDict) -> None:
    """Make one step of PPO on a batch."""
    policy = agent.distribution(batch["observation"])
    ratio = (policy.log_prob(batch["action"][:, 0]) - batch["log_prob"][:, 0]).exp()
    advantage = batch["advantage"][:, 0]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    value_loss = nn.functional.mse_loss(agent.value(batch["observation"]), batch["value_target"])
    loss = VALUE_WEIGHT * value_loss - gain.mean() - ENTROPY_WEIGHT * policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()


def learn(agent: Agent, optimizer: torch.optim.Optimizer, rb: ReplayBuffer) -> None:
    """Use every row of the buffer ``EPOCHS`` times, then drain the buffer."""
    uses = torch.zeros(len(rb), dtype=torch.int64)
    for _ in range(EPOCHS):
        for batch in rb:  # one pass: every row once, in random order
            update(agent, optimizer, batch)
            uses += batch["index"].bincount(minlength=len(uses))
    assert (uses == EPOCHS).all(), f"expected {EPOCHS} uses of each row, got {uses.unique()}"
    rb.empty()


def evaluate(agent: Agent, trials: int, seed: int, deadline: float) -> float:
    """Return the mean return of the greedy policy over ``trials`` first episodes.

    At the deadline, episodes that have not ended count with their rewards so far.
    """
    envs = make_envs(trials)
    observation, _ = envs.reset(seed=seed)
    totals, running = np.zeros(trials), np.ones(trials, bool)
    while running.any() and time.monotonic() < deadline:
        with torch.no_grad():
            action = agent.policy(torch.as_tensor(observation)).argmax(-1).numpy()
        observation, reward, terminated, truncated, _ = envs.step(action)
        totals += reward * running
        running &= ~(terminated | truncated)
    envs.close()
    return float(totals.mean())


def main(arguments: list[str] | None = None) -> int:
    """Train the agent. Return 0 if the goal was reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120, help="budget of wall-clock time")
    parser.add_argument("--output", type=Path, default=Path("example-output"), help="for the plot")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    deadline = started + 0.95 * options.seconds  # the rest is for the plot
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)

    steps = VectorSteps(make_envs(ENVIRONMENTS))
    rb = ReplayBuffer(
        storage=LazyTensorStorage(STEPS * ENVIRONMENTS),  # room for one rollout
        sampler=SamplerWithoutReplacement(),
        batch_size=BATCH_SIZE,
        generator=torch.Generator().manual_seed(options.seed),
    )
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), RATE)
    sums, recent = np.zeros(ENVIRONMENTS), deque[float](maxlen=RECENT)
    played: list[tuple[int, float]] = []
    greedy: list[tuple[int, float]] = []
    count, final = 0, 0.0
    steps.reset(seed=options.seed)
    bar = tqdm(range(1, ROLLOUTS + 1), unit="rollout", mininterval=0.5)
    for rollout in bar:
        if time.monotonic() > deadline:
            break
        rows = collect(steps, agent)
        add_advantages(rows, agent)
        rb.extend(rows.flatten())
        learn(agent, optimizer, rb)
        optimizer.param_groups[0]["lr"] = RATE * (1 - rollout / ROLLOUTS)

        ends = rows["next", "done"][..., 0].numpy()
        for reward, end in zip(rows["next", "reward"][..., 0].numpy(), ends, strict=True):
            sums += reward
            recent.extend(sums[end].tolist())
            sums[end] = 0
        count = rollout * STEPS * ENVIRONMENTS
        if recent:
            played.append((count, float(np.mean(recent))))
        if rollout % EVALUATE_EVERY:
            continue
        mean = evaluate(agent, TRIALS, 1_000_000 + count, deadline)
        greedy.append((count, mean))
        bar.set_postfix(greedy=f"{mean:.0f}")
        if mean >= GOAL:
            # The first evaluation chose this network, so other episodes must confirm it.
            final = evaluate(agent, FINAL_TRIALS, 2_000_000 + count, deadline)
            if final >= GOAL:
                break
    bar.close()
    steps.envs.close()

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in (("collector", played), ("greedy policy", greedy)):
        if curve:
            axes.plot(*zip(*curve, strict=True), label=name)
    axes.axhline(GOAL, color="grey", linestyle="--", label="goal")
    axes.set(title="PPO on CartPole-v1", xlabel="rows", ylabel="mean return", ylim=(0, 510))
    axes.legend()
    options.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output / "ppo_drain.png", dpi=120)
    word = "pass" if final >= GOAL else "fail"
    print(f"each of {count} rows was used {EPOCHS} times")
    print(f"{time.monotonic() - started:.0f} s, {time.process_time():.0f} s of processor time")
    print(f"ppo_drain: {word} - mean return {final:.1f} against {GOAL:.0f}")
    return 0 if final >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
