"""Train soft actor-critic in a maze with a sparse reward, with and without hindsight.

Each episode starts in one corner of the maze and has another goal. The reward is 1 at the goal
and 0 at all other places. Random moves hardly ever reach a goal, so these rewards teach nothing.
`HindsightGoal` replaces the goals of most drawn rows by places that the same episode reached
later, and computes the rewards for the new goals.

Eight mazes run side by side. Their rows are interleaved, and the storage separates their streams
by its `lane_key`. So no row gets a goal from another maze.

The program trains with relabelling until the agent reaches 90 % of the goals. Then it trains a new
agent without relabelling for the same number of steps. That agent must reach at most 20 %.

    python examples/sac_hindsight.py [--seed 0] [--seconds 300] [--output example-output]

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
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import nn
from tqdm import tqdm

from replaykit import HindsightGoal, LazyTensorStorage, ReplayBuffer

GOAL, MOST_WITHOUT = 0.9, 0.2
MAZE = """
    #######
    #S#...#
    #o#.#.#
    #o#.#.#
    #o#.#.#
    #ooo#.#
    #######
"""
"""S: the start. Dots: the cells of goals. o: free cells without goals, because they are near."""
STRIDE, RADIUS, TIME_LIMIT = 0.5, 0.15, 80
"""Longest move along an axis and radius of a goal, in cells, and most steps of an episode."""
ENVIRONMENTS, CAPACITY, BATCH_SIZE, RELABELLED = 8, 100_000, 256, 0.8
GAMMA, RATE, AVERAGING, ENTROPY = 0.98, 2e-3, 0.03, -2.0
"""Discount, learning rate, share of a critic in its target's update, and wanted entropy."""
STEPS, FIRST_ROWS, EVALUATE_EVERY, TRIALS, FINAL_TRIALS = 8_000, 1_600, 250, 100, 300


def reached(achieved_goal: torch.Tensor, desired_goal: torch.Tensor) -> torch.Tensor:
    """Return whether places are at their goals, bool ``[n, 1]``."""
    return (achieved_goal - desired_goal).norm(dim=-1, keepdim=True) < RADIUS


def reward(achieved_goal: torch.Tensor, desired_goal: torch.Tensor) -> torch.Tensor:
    """Return 1 for places at their goals and 0 for others, float32 ``[n, 1]``."""
    return reached(achieved_goal, desired_goal).float()


class Mazes:
    """Point mazes that take their steps together. Places are rows and columns, in cells."""

    def __init__(self, count: int, seed: int) -> None:
        cells = np.array([list(line) for line in MAZE.split()])
        self.free = cells != "#"
        self.starts, self.goals = np.argwhere(cells == "S"), np.argwhere(cells == ".")
        self.draw = np.random.default_rng(seed)
        self.place, self.goal = np.zeros((2, count, 2), np.float32)
        self.time = np.zeros(count, np.int64)
        self.begin(np.ones(count, bool))

    def begin(self, over: np.ndarray) -> None:
        """Begin new episodes in the mazes of a mask, bool ``[n]``."""
        for places, cells in ((self.place, self.starts), (self.goal, self.goals)):
            corners = self.draw.choice(cells, over.sum())
            places[over] = corners + self.draw.uniform(0.1, 0.9, corners.shape)
        self.time[over] = 0

    def observe(self) -> dict[str, torch.Tensor]:
        """Return copies of places and goals, float32 ``[n, 2]`` each."""
        place, goal = torch.tensor(self.place), torch.tensor(self.goal)
        return {"achieved_goal": place, "desired_goal": goal}

    def step(self, action: torch.Tensor) -> dict[str, torch.Tensor]:
        """Move points by actions in [-1, 1], and return observations, rewards and flags."""
        for axis in (0, 1):
            moved = self.place.copy()
            moved[:, axis] += STRIDE * action[:, axis].numpy()
            # A wall stops the move along this axis.
            free = self.free[tuple(moved.astype(np.int64).T)]
            self.place[free] = moved[free]
        self.time += 1
        after = self.observe()
        end, late = reached(**after), torch.from_numpy(self.time == TIME_LIMIT)[:, None]
        return {**after, "reward": reward(**after), "terminated": end, "done": end | late}


def make_network(inputs: int, outputs: int) -> nn.Sequential:
    """Return a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs)
    )


def inputs_of(rows: Any) -> torch.Tensor:
    """Return places and goals as inputs of a network, ``[n, 4]``, centred at 0."""
    return torch.cat([rows["achieved_goal"], rows["desired_goal"]], -1) - 3.5


class Agent:
    """Soft actor-critic with two critics and an automatic temperature."""

    def __init__(self) -> None:
        self.actor = make_network(4, 4)
        self.critics = nn.ModuleList([make_network(6, 1), make_network(6, 1)])
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = torch.tensor(-4.0, requires_grad=True)
        learned = [*self.actor.parameters(), self.log_alpha]
        self.actor_optimizer = torch.optim.Adam(learned, lr=RATE, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=RATE, fused=True)

    def act(self, rows: Any, greedy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions ``[n, 2]`` and the logarithms of their densities ``[n, 1]``."""
        mean, log_scale = self.actor(inputs_of(rows)).chunk(2, -1)
        log_scale = log_scale.clamp(-5, 2)
        noise = torch.zeros_like(mean) if greedy else torch.randn_like(mean)
        action = (mean + noise * log_scale.exp()).tanh()
        # The density of a normal number, divided by the slope of tanh.
        density = -(noise.square() + np.log(2 * np.pi)) / 2 - log_scale
        density = density - (1 - action.square() + 1e-6).log()
        return action, density.sum(-1, keepdim=True)

    @staticmethod
    def values(critics: nn.ModuleList, rows: Any, action: torch.Tensor) -> torch.Tensor:
        """Return the values of actions by both critics, ``[n, 2]``."""
        inputs = torch.cat([inputs_of(rows), action], -1)
        return torch.cat([critic(inputs) for critic in critics], -1)

    def learn(self, batch: TensorDict) -> None:
        """Make one step of the critics, the actor, the temperature and the targets."""
        after, alpha = batch["next"], self.log_alpha.exp()
        with torch.no_grad():
            action, density = self.act(after)
            future = self.values(self.targets, after, action).amin(-1, True) - alpha * density
            wanted = after["reward"] + GAMMA * ~after["terminated"] * future
        error = self.values(self.critics, batch, batch["action"]) - wanted
        self.critic_optimizer.zero_grad()
        error.square().mean().backward()
        self.critic_optimizer.step()

        action, density = self.act(batch)
        value = self.values(self.critics, batch, action).amin(-1, True)
        loss = (alpha.detach() * density - value).mean()
        loss = loss - alpha * (density.detach().mean() + ENTROPY)  # raises a low entropy
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        for slow, fast in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
            slow.data.lerp_(fast.data, AVERAGING)


@torch.no_grad()
def evaluate(agent: Agent, trials: int, seed: int) -> float:
    """Return the share of episodes in which the greedy policy reaches the goal."""
    mazes, found = Mazes(trials, seed), torch.zeros(trials, 1, dtype=torch.bool)
    for _ in range(TIME_LIMIT):
        found |= mazes.step(agent.act(mazes.observe(), greedy=True)[0])["terminated"]
    return float(found.float().mean())


def train(p: float, most: int, seed: int, deadline: float) -> tuple[list[float], float]:
    """Return the success after each ``EVALUATE_EVERY`` steps, and of the last agent.

    The training ends after ``most`` evaluations, at the deadline, or with relabelling at the goal.
    """
    torch.manual_seed(seed)
    mazes, agent, lanes = Mazes(ENVIRONMENTS, seed), Agent(), torch.arange(ENVIRONMENTS)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, lane_key="env"),
        transform=HindsightGoal(p, reward_fn=reward, terminated_fn=reached, check="error"),
        batch_size=BATCH_SIZE,
        generator=torch.Generator().manual_seed(seed),
    )
    curve: list[float] = []
    with tqdm(total=most * EVALUATE_EVERY, desc=f"p={p:g}", unit="step", mininterval=0.5) as bar:
        while len(curve) < most and time.monotonic() < deadline:
            before = mazes.observe()
            action = agent.act(before)[0].detach()
            after = mazes.step(action)
            row = {"env": lanes, **before, "action": action, "next": after}
            rb.extend(TensorDict(row, [ENVIRONMENTS]))
            mazes.begin(after["done"].squeeze(-1).numpy())
            if len(rb) > FIRST_ROWS:
                agent.learn(rb.sample())
            bar.update()
            if bar.n % EVALUATE_EVERY:
                continue
            curve.append(evaluate(agent, TRIALS, 1_000_000 + len(curve)))
            bar.set_postfix(success=f"{curve[-1]:.2f}")
            goals = 2_000_000 + len(curve)  # other goals must confirm an agent that was chosen
            if p and curve[-1] >= GOAL and evaluate(agent, FINAL_TRIALS, goals) >= GOAL:
                break
    return curve, evaluate(agent, FINAL_TRIALS, 2_000_000 + len(curve))


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Draw the success of both agents."""
    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot(title="SAC in a maze with a sparse reward", ylim=(-0.05, 1.05))
    for name, curve in curves.items():
        steps = EVALUATE_EVERY * np.arange(1, len(curve) + 1)
        axes.plot(steps, curve, marker="o", markersize=3, label=name)
    axes.axhline(GOAL, color="grey", linestyle="--", label="goal with relabelling")
    axes.axhline(MOST_WITHOUT, color="grey", linestyle=":", label="bound without relabelling")
    axes.set(xlabel="steps of all mazes, one update each", ylabel="share of goals reached")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """Train both agents. Return 0 if both successes are as expected, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="budget of wall-clock time")
    parser.add_argument("--output", type=Path, default=Path("example-output"))
    options = parser.parse_args(arguments)
    started = time.monotonic()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)

    half = options.seconds * 0.48  # the rest is for the plot and the last evaluations
    curve, share = train(RELABELLED, STEPS // EVALUATE_EVERY, options.seed, started + half)
    plain, without = train(0.0, len(curve), options.seed, started + 2 * half)
    plot({"with relabelling": curve, "without": plain}, options.output / "sac_hindsight.png")
    print(f"{time.monotonic() - started:.0f} s, {time.process_time():.0f} s of processor time")
    good = share >= GOAL and without <= MOST_WITHOUT and len(plain) == len(curve)
    print(
        f"sac_hindsight: {'pass' if good else 'fail'} - success {share:.2f} against {GOAL:.2f}, "
        f"without relabelling {without:.2f} against at most {MOST_WITHOUT:.2f}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
