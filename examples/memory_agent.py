"""Learn a task that needs memory, with a recurrent agent and collectors in other processes.

A key is visible only in the first cell of a corridor. Its colour names the one door at the end that
it opens. Two collector processes play and write whole episodes to a shared buffer. The learner, a
recurrent double DQN agent, draws whole episodes, padded to one length, with the action and reward
of the previous step. Half way the program kills one collector, and training goes on.

The same training without memory resets the recurrent state at each step. It can only guess a door.

    python examples/memory_agent.py [--seed 0] [--seconds 240] [--output FOLDER]

Needs the extra `examples`.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import multiprocessing, nn
from tqdm import tqdm

from replaykit import LazyTensorStorage, PreviousStep, RateLimiter, ReplayBuffer, SliceSampler
from replaykit.errors import RateLimiterTimeout

DOORS, CORRIDOR, LIMIT = 4, 5, 16
"""Number of doors, steps from the key to the doors, and the longest episode."""
WALK, ACTIONS, NUMBERS = 0, 1 + DOORS, CORRIDOR + 1 + DOORS
"""The action that walks, the number of actions, and the length of an observation."""
COLLECTORS, GAMES = 2, 16
CAPACITY, EPISODES, UPDATES, UNITS = 200_000, 32, 1_500, 64
SAMPLES_PER_ROW, FIRST_ROWS = 12, 2_000
RATE, GAMMA, TARGET_EVERY, PUBLISH_EVERY = 2e-3, 0.9, 25, 10
EVALUATE_EVERY, EVALUATED = 100, 1_000
WITH, WITHOUT = 2 / 3, 1 / 3
"""The least last return with memory, and the largest return of all evaluations without memory."""


class KeyToDoor:
    """Several games at once. Each has a corridor that leads from a key to the doors."""

    def __init__(self, games: int) -> None:
        self.key = torch.randint(DOORS, (games,))
        self.place = torch.zeros(games, dtype=torch.int64)

    def observation(self) -> torch.Tensor:
        """Return the place, and the key if it is visible there, as zeros and ones ``[N, 10]``."""
        key = nn.functional.one_hot(self.key, DOORS) * (self.place == 0)[:, None]
        return torch.cat([nn.functional.one_hot(self.place, CORRIDOR + 1), key], -1).float()

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Walk or open a door; return reward and end of each game, ``[N]``."""
        opened = (self.place == CORRIDOR) & (action != WALK)
        reward = (opened & (action == 1 + self.key)).float()
        self.place = (self.place + (action == WALK)).clamp(max=CORRIDOR)
        return reward, opened


class Agent(nn.Module):
    """A recurrent network from observations to values of the actions."""

    def __init__(self, memory: bool) -> None:
        super().__init__()
        self.memory = memory
        self.encoder = nn.Linear(NUMBERS + 1 + ACTIONS, UNITS)
        self.recurrent = nn.GRU(UNITS, UNITS, batch_first=True)
        self.head = nn.Linear(UNITS, ACTIONS)

    def forward(self, seen: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Return values ``[K, T, ACTIONS]`` of inputs ``[K, T, ...]``, and the last state."""
        steps = torch.relu(self.encoder(seen))
        if self.memory:
            steps, state = self.recurrent(steps, state)
        else:  # each step is the first of a sequence
            steps = self.recurrent(steps.flatten(0, 1)[:, None])[0].reshape(steps.shape)
        return self.head(steps), state


def play(agent: Agent, games: int, random: torch.Tensor) -> TensorDict:
    """Play games to their ends; return the rows of one episode after another.

    Game n takes a random action with probability ``random[n]``.
    """
    task, state = KeyToDoor(games), None
    previous, going = torch.zeros(games, 1 + ACTIONS), torch.ones(games, dtype=torch.bool)
    steps, played = [], []
    for number in range(LIMIT):
        observation = task.observation()
        with torch.no_grad():
            values, state = agent(torch.cat([observation, previous], -1)[:, None], state)
        explored = torch.rand(games) < random
        action = torch.where(explored, torch.randint(ACTIONS, (games,)), values[:, 0].argmax(-1))
        reward, over = task.step(action)
        over |= number == LIMIT - 1
        after = {"reward": reward[:, None], "done": over[:, None]}
        row = {"observation": observation, "action": action, "next": after}
        steps.append(TensorDict(row, [games]))
        played.append(going)
        going = going & ~over
        previous = torch.cat([reward[:, None], nn.functional.one_hot(action, ACTIONS)], -1)
    return torch.stack(steps, 1)[torch.stack(played, 1)]


def evaluate(agent: Agent) -> float:
    """Return the mean return of the greedy policy."""
    rows = play(agent, EVALUATED, torch.zeros(EVALUATED))
    return float(rows["next", "reward"].sum() / EVALUATED)


def collect(buffer: ReplayBuffer, agent: Agent, seed: int) -> None:
    """Play with the agent's newest weights, and write the episodes, until killed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random = 0.5 ** torch.linspace(1, 6, GAMES)
    while True:
        # One call writes whole episodes: a kill leaves all of their rows in the buffer, or none.
        buffer.extend(play(agent, GAMES, random))


def learn(agent: Agent, target: Agent, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Take one step of gradient descent on padded episodes ``[K, T]``."""
    seen = torch.cat([batch["observation"], batch["previous_step"]], -1)
    values, last = agent(seen)[0], batch["next"]
    with torch.no_grad():
        future = target(seen)[0].gather(-1, values.argmax(-1, keepdim=True))
        future = torch.cat([future[:, 1:], future[:, :1]], 1)  # of the next step, if any
        wanted = last["reward"] + GAMMA * ~last["done"] * future
    value = values.gather(-1, batch["action"][..., None])
    mask = batch["collector", "mask"].reshape(value.shape)
    loss = (nn.functional.smooth_l1_loss(value, wanted, reduction="none") * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@dataclass
class Course:
    """The evaluations of a training, and numbers of updates and rows at the kill."""

    updates: list[int] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    killed_at: int = 0
    rows_at_kill: int = 0
    rows_at_end: int = 0


def train(memory: bool, seed: int, deadline: float) -> Course:
    """Train an agent, and kill a collector half way."""
    torch.manual_seed(seed)
    half = (time.monotonic() + deadline) / 2
    agent = Agent(memory)
    target, acting = copy.deepcopy(agent), copy.deepcopy(agent).share_memory()
    optimizer = torch.optim.Adam(agent.parameters(), RATE)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=SliceSampler(slice_len=LIMIT, pad="right", flat=False),
        transform=PreviousStep(concat=True, num_actions=ACTIONS),
        batch_size=EPISODES * LIMIT,
        generator=torch.Generator().manual_seed(seed),
        # Collectors and learner wait for each other, so the curve does not depend on their speeds.
        rate_limiter=RateLimiter(SAMPLES_PER_ROW, FIRST_ROWS, 2 * SAMPLES_PER_ROW * GAMES * LIMIT),
        shared=True,
    )
    collectors = [
        multiprocessing.Process(target=collect, args=(buffer, acting, 100 * seed + n), daemon=True)
        for n in range(COLLECTORS)
    ]
    for collector in collectors:
        collector.start()
    course = Course([0], [evaluate(agent)])
    for update in tqdm(range(1, UPDATES + 1), "with memory" if memory else "without memory"):
        try:
            batch = buffer.sample(timeout=max(0.0, deadline - time.monotonic()))
        except RateLimiterTimeout:
            break
        learn(agent, target, optimizer, batch)
        if update % TARGET_EVERY == 0:
            target.load_state_dict(agent.state_dict())
        if update % PUBLISH_EVERY == 0:
            acting.load_state_dict(agent.state_dict())
        if not course.killed_at and (update >= UPDATES / 2 or time.monotonic() > half):
            course.killed_at = update
            course.rows_at_kill = buffer.write_count if collectors[0].is_alive() else 0
            collectors[0].kill()
            collectors[0].join()
        late = time.monotonic() > deadline
        if late or update % EVALUATE_EVERY == 0:
            course.updates.append(update)
            course.returns.append(evaluate(agent))
        if late:
            break
    course.rows_at_end = buffer.write_count
    for collector in collectors:
        collector.kill()
        collector.join()
    return course


def plot(path: Path, courses: dict[str, Course]) -> None:
    """Save the mean returns of both trainings as one PNG."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, course in courses.items():
        line = axes.plot(course.updates, course.returns, label=name)[0]
        axes.axvline(course.killed_at, color=line.get_color(), linestyle="--")
    for goal in (WITH, WITHOUT):
        axes.axhline(goal, color="grey", linestyle=":")
    axes.set(xlabel="updates", ylabel="mean return", title="Dashed: a kill. Dotted: the goals.")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """Train with and without memory. Return 0 if the goal was reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=240, help="time limit")
    parser.add_argument("--output", type=Path, default=Path("example-output"), help="for the plot")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begun = time.monotonic()
    courses, good = {}, True
    for name, share in (("with memory", 0.45), ("without memory", 0.9)):
        deadline = begun + share * options.seconds
        courses[name] = course = train(name == "with memory", options.seed, deadline)
        print(f"{name}: {course.rows_at_kill} rows at the kill, {course.rows_at_end} at the end")
        good &= 0 < course.rows_at_kill < course.rows_at_end
    last, best = courses["with memory"].returns[-1], max(courses["without memory"].returns)
    good &= last >= WITH and best <= WITHOUT
    good &= courses["with memory"].updates == courses["without memory"].updates
    options.output.mkdir(parents=True, exist_ok=True)
    plot(options.output / "memory_agent.png", courses)
    print(
        f"memory_agent: {'pass' if good else 'fail'} - return {last:.2f} with memory, {best:.2f} "
        f"without against at least {WITH:.2f}, at most {WITHOUT:.2f}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
