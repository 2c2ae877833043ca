"""Train a DQN on stacks of frames, with each frame stored once.

The game is Catch: a ball falls and bounces off the sides, and a paddle must be below it. A single
frame does not show the direction of the ball, so the network sees stacks of four frames.

The storage holds single frames of bytes. With `dedup_next=True` it reads the next frame of a row
from the next row. `StackFrames` makes the stacks when rows are drawn, and `StackFrames.stream()`
makes the same stacks for the actor. The usual layout stores two stacks in each row, which is eight
frames. The program prints the memory of both.

    python examples/atari_frames.py [--seed 0] [--seconds 180] [--output example-output]

Needs the extra `examples`.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import nn
from tqdm import tqdm

from replaykit import Compose, LazyTensorStorage, NStep, ReplayBuffer, StackFrames, VectorSteps

GOAL, GOAL_RATIO = 0.8, 7.5
"""Mean return, of which 1 is the most; and how many times less memory than the usual layout."""
SIZE, STACK, BALLS = 84, 4, 5
"""Pixels of a side of a frame, frames of a stack, and balls of an episode."""
STACKS = StackFrames(["observation"], STACK)
ENVIRONMENTS, CAPACITY, BATCH_SIZE = 8, 20_000, 32
N_STEP, GAMMA, RATE, AVERAGING = 5, 0.95, 5e-4, 0.02
"""Steps of a return, discount, learning rate, and share of the network in a target's update."""
STEPS, FIRST_STEPS, EXPLORING, LEAST = 10_000, 100, 1_000, 0.05
"""Steps in all, steps without updates, and those in which random actions fall from 1 to LEAST."""
EVALUATE_EVERY, TRIALS, FINAL_TRIALS = 250, 16, 50


class Catch(VectorEnv[Any, Any, Any]):
    """Games of Catch that take their steps together, in ``NEXT_STEP`` mode.

    A caught ball gives a reward of 1 / BALLS, and a missed ball the negative of it. The actions
    move the paddle to the left, nowhere, or to the right.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, count: int) -> None:
        self.num_envs = count
        self.single_observation_space = spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8)
        self.single_action_space = spaces.Discrete(3)
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)
        self.ball, self.speed = np.zeros((count, 2), int), np.zeros(count, int)  # x, y; along x
        self.paddle, self.left = np.zeros(count, int), np.zeros(count, int)

    def drop(self, games: np.ndarray) -> None:
        """Begin the fall of a ball in the games of a mask."""
        count = int(games.sum())
        self.ball[games, 0] = self.np_random.integers(4, SIZE - 4, count)
        self.ball[games, 1] = 4
        self.speed[games] = self.np_random.integers(-5, 6, count)

    def draw(self) -> np.ndarray:
        """Return the frames of all games, uint8 ``[n, 1, SIZE, SIZE]``."""
        pixel = np.arange(SIZE)
        across = np.abs(pixel - self.ball[:, :1]) <= 2
        down = np.abs(pixel - self.ball[:, 1:]) <= 2
        paddle = np.abs(pixel - self.paddle[:, None]) <= 7
        frames = (down[:, :, None] & across[:, None, :]) * np.uint8(255)
        frames[:, -4:] |= (paddle * np.uint8(160))[:, None, :]
        return frames[:, None]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.begin(np.ones(self.num_envs, bool))
        return self.draw(), {}

    def begin(self, games: np.ndarray) -> None:
        """Begin new episodes in the games of a mask."""
        self.paddle[games], self.left[games] = SIZE // 2, BALLS
        self.drop(games)

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        over = self.left == 0  # these games reset now and ignore the action
        self.paddle = np.clip(self.paddle + 5 * (np.asarray(actions) - 1), 7, SIZE - 8)
        self.ball[:, 0] += self.speed
        self.ball[:, 1] += 5
        outside = (self.ball[:, 0] < 2) | (self.ball[:, 0] > SIZE - 3)
        self.speed[outside] *= -1
        self.ball[:, 0] = np.clip(self.ball[:, 0], 2, SIZE - 3)
        landed = (self.ball[:, 1] >= SIZE - 5) & ~over
        caught = np.abs(self.ball[:, 0] - self.paddle) <= 9
        reward = np.where(landed, np.where(caught, 1.0, -1.0) / BALLS, 0.0)
        self.left -= landed
        self.drop(landed)
        self.begin(over)
        ended = self.left == 0
        return self.draw(), reward, ended, np.zeros_like(ended), {}


class Network(nn.Module):
    """The values of the actions, from stacks of bytes."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(STACK, 16, 4, 2), nn.Conv2d(16, 32, 3, 2)
        head = [nn.Flatten(), nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, 3)]
        self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), *head)
        self(torch.zeros(1, STACK, SIZE, SIZE))  # sets the size of the lazy layer

    def forward(self, stacks: torch.Tensor) -> torch.Tensor:
        """Return the values for uint8 ``[B, STACK, SIZE, SIZE]``, float32 ``[B, 3]``."""
        # Every third pixel is enough for this game. Convolutions are most of the time of an update.
        return self.layers(stacks[..., ::3, ::3].float() / 255)


def act(network: nn.Module, stream: Any, frames: Any, begins: np.ndarray) -> np.ndarray:
    """Return the best actions, int64 ``[n]``; ``begins`` marks first frames of episodes."""
    rows = TensorDict({"observation": torch.as_tensor(frames)}, [len(frames)])
    with torch.no_grad():
        stacks = stream(rows, torch.as_tensor(begins))["observation"]
        return network(stacks).argmax(-1).numpy()


def evaluate(network: nn.Module, trials: int, seed: int, deadline: float) -> float:
    """Return the mean return of the greedy policy over ``trials`` episodes.

    Balls that have not landed at the deadline count as missed.
    """
    games, stream = Catch(trials), STACKS.stream()
    frames, _ = games.reset(seed=seed)
    totals, begins = np.zeros(trials), np.ones(trials, bool)
    while games.left.any() and time.monotonic() < deadline:
        frames, reward, _, _, _ = games.step(act(network, stream, frames, begins))
        totals += reward
        begins = np.zeros(trials, bool)
    return float((totals - games.left / BALLS).mean())


def update(
    network: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, rb: ReplayBuffer
) -> None:
    """Make one step of double DQN on a batch of stacks."""
    batch = rb.sample()
    last = batch["next"]  # n steps later, or at the end of the episode
    with torch.no_grad():
        best = network(last["observation"]).argmax(-1, keepdim=True)
        future = target(last["observation"]).gather(-1, best)
        wanted = last["reward"] + batch["discount"] * batch["bootstrap"] * future
    value = network(batch["observation"]).gather(-1, batch["action"])
    optimizer.zero_grad()
    nn.functional.mse_loss(value, wanted).backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
            slow.lerp_(fast, AVERAGING)


def plot(curve: list[tuple[int, float]], once: float, dense: float, path: Path) -> None:
    """Draw the greedy returns, and the memory of both layouts."""
    figure = Figure(figsize=(9, 4), layout="tight")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    left.plot([step for step, _ in curve], [mean for _, mean in curve], marker="o", markersize=3)
    left.axhline(GOAL, color="grey", linestyle="--")
    left.set(title="DQN on Catch", ylabel="mean return of the greedy policy", ylim=(-1.05, 1.05))
    left.set_xlabel(f"steps of {ENVIRONMENTS} games, one update each")
    bars = right.bar(["frames once", "two stacks"], [once / 1e6, dense / 1e6])
    right.bar_label(bars, fmt="%.0f MB")
    right.set(title=f"memory for {CAPACITY} rows", ylabel="MB", ylim=(0, 1.1 * dense / 1e6))
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """Train the agent. Return 0 if both goals were reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=180, help="budget of wall-clock time")
    parser.add_argument("--output", type=Path, default=Path("example-output"))
    options = parser.parse_args(arguments)
    started = time.monotonic()
    deadline = started + options.seconds * 0.95  # the rest is for the plot
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    draw = np.random.default_rng(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)

    steps = VectorSteps(Catch(ENVIRONMENTS))
    storage = LazyTensorStorage(CAPACITY, lane_key=steps.lane_key, dedup_next=["observation"])
    rb = ReplayBuffer(
        storage=storage,
        transform=Compose(NStep(N_STEP, GAMMA), STACKS),
        batch_size=BATCH_SIZE,
        generator=torch.Generator().manual_seed(options.seed),
    )
    network = Network()
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    stream = STACKS.stream()
    curve, mean = list[tuple[int, float]](), -1.0
    steps.reset(seed=options.seed)
    begins = np.ones(ENVIRONMENTS, bool)
    with tqdm(total=STEPS, desc="atari_frames", unit="step", mininterval=0.5) as bar:
        for step in range(1, STEPS + 1):
            best = act(network, stream, steps.observation, begins)
            random = draw.random(ENVIRONMENTS) < max(LEAST, 1 - step / EXPLORING)
            begins = steps.ended.copy()  # these games reset in the next step
            rb.extend(steps.step(np.where(random, draw.integers(3, size=ENVIRONMENTS), best)))
            if step > FIRST_STEPS:
                update(network, target, optimizer, rb)
            bar.update()
            if step % EVALUATE_EVERY == 0:
                mean = evaluate(target, TRIALS, 1_000_000 + step, deadline)
                curve.append((step, mean))
                bar.set_postfix(greedy=f"{mean:.2f}")
                if mean >= GOAL:
                    # This evaluation chose the network, so other episodes must confirm it.
                    mean = evaluate(target, FINAL_TRIALS, 2_000_000 + step, deadline)
            if mean >= GOAL or time.monotonic() > deadline:
                break

    stacked = rb.sample(256).select("observation", "action", "env", "episode", "next")
    usual = LazyTensorStorage(256)  # 256 rows with two stacks each show the memory of one
    ReplayBuffer(storage=usual).extend(stacked)
    once, dense = storage.nbytes, usual.nbytes / 256 * CAPACITY
    ratio = dense / once
    plot(curve, once, dense, options.output / "atari_frames.png")
    print(f"{CAPACITY} rows take {once / 1e6:.0f} MB with each frame stored once")
    print(f"with two stacks in each row they would take {dense / 1e6:.0f} MB")
    print(f"{time.monotonic() - started:.0f} s, {time.process_time():.0f} s of processor time")
    passed = mean >= GOAL and ratio >= GOAL_RATIO
    figures = f"mean return {mean:.2f}, memory {ratio:.2f} times less"
    word = "pass" if passed else "fail"
    print(f"atari_frames: {word} - {figures} against {GOAL}, {GOAL_RATIO} times")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
