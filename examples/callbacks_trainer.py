"""Train an agent with a trainer of callbacks, kill the training half way, and continue it.

The trainer only calls hooks. Callbacks step asynchronous environments, wait for a warm-up, draw
joint batches of demonstrations and online rows, learn, evaluate and save. The training begins in a
process that is killed with SIGKILL half way. Then new objects load the newest save and go on until
the greedy policy reaches the goal, a mean return of 475 on CartPole-v1. Needs the extra `examples`.

    python examples/callbacks_trainer.py [--seed 0] [--seconds 90] [--output example-output]
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from matplotlib.figure import Figure
from tensordict import TensorDict
from torch import multiprocessing, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from replaykit import LazyTensorStorage, NStep, ReplayBuffer, ReplayBufferEnsemble, VectorSteps
from replaykit.checkpoint import checkpoint_versions

CARTPOLE, SAME_STEP = [partial(gymnasium.make, "CartPole-v1")], AutoresetMode.SAME_STEP
GOAL, TRIALS, EVERY = 475.0, 50, 10  # an evaluation of 50 episodes and a save every 10 cycles
CYCLES, KILLED_AT, STEPS, EXPLORING, LEAST = 1_000, 45, 10, 50, 0.05
"""Most cycles, cycle of the kill, steps of a cycle, and the schedule of exploration."""
ENVIRONMENTS, CAPACITY, DEMONSTRATED, WARM_UP = 8, 50_000, 5_000, 1_000
N_STEP, GAMMA, RATE, AVERAGING, MARGIN = 3, 0.99, 1e-3, 0.99, 0.8


class Callback:
    """A part of a training. It overrides the hooks that it needs."""

    parts: tuple[Any, ...] = ()  # objects with a ``state_dict``, for saves

    def begin_training(self, trainer: Trainer) -> None:
        """Do nothing. The other hooks are ``begin_cycle``, ``update`` and ``end_cycle``."""

    begin_cycle = update = end_cycle = begin_training


class Trainer:
    """Calls the hooks of its callbacks, in their order; ``end_cycle`` in reverse order."""

    def __init__(self, callbacks: list[Callback]) -> None:
        self.callbacks, self.batch = callbacks, TensorDict()
        self.cycle, self.loaded, self.warm, self.stopped = 0, 0, True, False
        self.curve: list[tuple[int, float]] = []  # cycles and mean returns of evaluations

    def train(self, cycles: int) -> None:
        """Run the cycles up to number ``cycles``, or until a callback sets ``stopped``."""
        for callback in self.callbacks:
            callback.begin_training(self)
        for cycle in tqdm(range(self.cycle + 1, cycles + 1), unit="cycle", mininterval=0.5):
            self.cycle = cycle
            for callback in self.callbacks:
                callback.begin_cycle(self)
            for _ in range(STEPS if self.warm else 0):
                for callback in self.callbacks:
                    callback.update(self)
            for callback in reversed(self.callbacks):
                callback.end_cycle(self)
            if self.stopped:
                break


def play(steps: VectorSteps, policy: Any, random: float) -> TensorDict:
    """Take a step of each environment, with this share of random actions; return the rows."""
    with torch.no_grad():
        action = policy(torch.as_tensor(steps.observation)).argmax(-1)
    explored = torch.rand(action.shape) < random
    return steps.step(torch.where(explored, torch.randint(2, action.shape), action))


@dataclass
class Collecting(Callback):
    """Plays with the newest network, and writes the rows to a buffer."""

    steps: VectorSteps
    network: nn.Module
    rb: ReplayBuffer

    def begin_training(self, trainer: Trainer) -> None:
        self.steps.reset(seed=int(torch.randint(1_000_000, ())))

    def begin_cycle(self, trainer: Trainer) -> None:
        for _ in range(STEPS):
            rows = play(self.steps, self.network, max(LEAST, 1 - trainer.cycle / EXPLORING))
            self.rb.extend(rows)


@dataclass
class JointBatches(Callback):
    """Draws batches from demonstrations and online rows, after a warm-up of the latter."""

    mixture: ReplayBufferEnsemble

    def begin_cycle(self, trainer: Trainer) -> None:
        trainer.warm = len(self.mixture[1]) >= WARM_UP

    def update(self, trainer: Trainer) -> None:
        trainer.batch = self.mixture.sample().flatten()


class DQN(Callback):
    """Learns the values of the actions."""

    def __init__(self, network: nn.Module) -> None:
        self.network, self.optimizer = network, torch.optim.Adam(network.parameters(), RATE)
        self.target = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(AVERAGING))
        self.parts = (self.network, self.target, self.optimizer)

    def update(self, trainer: Trainer) -> None:
        batch, last = trainer.batch, trainer.batch["next"]  # n steps later
        with torch.no_grad():
            future = self.target(last["observation"]).amax(-1, keepdim=True)
            wanted = last["reward"].float() + batch["discount"] * batch["bootstrap"] * future
        values = self.network(batch["observation"])
        value = values.gather(-1, batch["action"])
        # In demonstrations, the values of other actions should be smaller by a margin.
        others = torch.arange(2) != batch["action"]
        excess = (values + MARGIN * others).amax(-1, keepdim=True) - value
        excess = excess[batch["index", "buffer_ids"] == 0].sum() / len(batch)
        self.optimizer.zero_grad()
        (nn.functional.huber_loss(value, wanted) + excess).backward()
        self.optimizer.step()
        self.target.update_parameters(self.network)


@dataclass
class Evaluating(Callback):
    """Plays first episodes with the greedy policy. Stops at the goal and at the deadline."""

    network: nn.Module
    deadline: float

    def end_cycle(self, trainer: Trainer) -> None:
        if trainer.cycle % EVERY == 0:
            steps = VectorSteps(SyncVectorEnv(CARTPOLE * TRIALS, autoreset_mode=SAME_STEP))
            steps.reset(seed=1_000_000 + trainer.cycle * TRIALS)
            totals, running = torch.zeros(TRIALS), torch.ones(TRIALS, dtype=torch.bool)
            while running.any() and time.monotonic() < self.deadline:
                last = play(steps, self.network, 0.0)["next"]
                totals += last["reward"][:, 0] * running
                running &= ~last["done"][:, 0]
            trainer.curve.append((trainer.cycle, float(totals.mean())))
            trainer.stopped = trainer.curve[-1][1] >= GOAL
        trainer.stopped |= time.monotonic() > self.deadline


@dataclass
class Saving(Callback):
    """Saves the training every few cycles, and loads the newest save at the begin."""

    folder: Path
    mixture: ReplayBufferEnsemble

    def begin_training(self, trainer: Trainer) -> None:
        self.parts = tuple(part for callback in trainer.callbacks for part in callback.parts)
        if (self.folder / "rest.pt").exists():
            version, random, cycle, curve, states = torch.load(self.folder / "rest.pt")
            self.mixture.loads(self.folder / "buffers", version=version)
            torch.set_rng_state(random)
            trainer.cycle, trainer.loaded, trainer.curve = cycle, cycle, curve
            for part, state in zip(self.parts, states, strict=True):
                part.load_state_dict(state)

    def end_cycle(self, trainer: Trainer) -> None:
        if trainer.cycle % EVERY == 0:
            self.mixture.dumps(self.folder / "buffers", keep=2)  # one for the older "rest.pt"
            version = checkpoint_versions(self.folder / "buffers")[-1]
            states = [part.state_dict() for part in self.parts]
            rest = (version, torch.get_rng_state(), trainer.cycle, trainer.curve, states)
            torch.save(rest, self.folder / "new.pt")
            os.replace(self.folder / "new.pt", self.folder / "rest.pt")


def train(folder: Path, seed: int, cycles: int, deadline: float, kill: bool = False) -> Trainer:
    """Train until a cycle or the deadline, from the newest save if there is one; then kill it."""
    if kill:
        os.setsid()  # the kill reaches this process and its environments
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    steps = VectorSteps(AsyncVectorEnv(CARTPOLE * ENVIRONMENTS, autoreset_mode=SAME_STEP))
    storage = partial(LazyTensorStorage, CAPACITY, lane_key="env")
    members = [ReplayBuffer(storage=storage, transform=NStep(N_STEP, GAMMA)) for _ in range(2)]
    mixture = ReplayBufferEnsemble(
        *members, p=[0.5, 0.5], num_buffer_sampled=8, counts="exact", batch_size=128
    )
    scripted = torch.tensor([[0.0, 0.1], [0.0, 0.3], [0.0, 2.0], [0.0, 1.0]])
    steps.reset(seed=seed)
    while len(mixture[0]) < DEMONSTRATED:
        mixture[0].extend(play(steps, lambda observation: observation @ scripted, 0.2))
    layers = (nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    network = nn.Sequential(*layers)
    callbacks = [Saving(folder, mixture), Collecting(steps, network, mixture[1])]
    callbacks += [JointBatches(mixture), DQN(network), Evaluating(network, deadline)]
    trainer = Trainer(callbacks)
    trainer.train(cycles)
    if kill:
        os.killpg(0, signal.SIGKILL)
    steps.envs.close()
    return trainer


def main(arguments: list[str] | None = None) -> int:
    """Train the agent. Return 0 if the goal was reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=90, help="budget of wall-clock time")
    parser.add_argument("--output", type=Path, default=Path("example-output"), help="for the plot")
    options = parser.parse_args(arguments)
    started, limit = time.monotonic(), options.seconds
    with tempfile.TemporaryDirectory() as name:
        first = (Path(name), options.seed, KILLED_AT, started + 0.5 * limit, True)
        process = multiprocessing.Process(target=train, args=first)
        process.start()
        process.join(0.6 * limit)
        trainer = train(Path(name), options.seed, CYCLES, started + 0.95 * limit)
    print(f"killed by signal {-(process.exitcode or 0)}, restarted at cycle {trainer.loaded}")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([at for at, _ in trainer.curve], [mean for _, mean in trainer.curve], "o-")
    axes.axhline(GOAL, color="grey", linestyle="--")
    axes.axvline(trainer.loaded, color="C1", linestyle=":")
    axes.set(title="goal (dashed), restart (dotted)", xlabel="cycles", ylabel="mean greedy return")
    options.output.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.output / "callbacks_trainer.png", dpi=120)
    final = trainer.curve[-1][1] if trainer.curve else 0.0
    good = final >= GOAL and process.exitcode == -signal.SIGKILL and trainer.loaded > 0
    word = "pass" if good else "fail"
    print(f"callbacks_trainer: {word} - mean return {final:.1f} against {GOAL:.0f}")
    return 0 if word == "pass" else 1


if __name__ == "__main__":
    raise SystemExit(main())
