"""Learn to reach from mixed recordings, with behaviour cloning and IQL.

The program records a two-joint arm into H5 files of RoboHive's layout: skilled, noisy and random
behaviour. Behaviour cloning (BC) imitates all of them. Implicit Q-learning (IQL) prefers the better
actions, so it must score higher. Both learn from the same batches, which loader workers make.

A second process is killed in the middle of this training. The program continues from its checkpoint
with the same losses, to the bit. `--data` takes real RoboHive files. Needs the extra `examples`.

    python examples/roboset_offline.py [--data PATH] [--seed 0] [--seconds 180] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import copy
import io
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

from replaykit import Cast, Compose, SelectTransform
from replaykit.datasets import RobosetExperienceReplay
from replaykit.testing import RoboHiveWriter

DATASET_ID = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"  # the files may hold other rows
FLOATS: Any = ["observation", "action", ("next", "observation"), ("next", "reward")]
EPISODES = {"skilled": 40, "noisy": 60, "random": 100}
HORIZON, STEP = 50, 0.04  # steps of an episode, seconds of a step
BATCH_SIZE, STEPS, SAVES, WIDTH = 256, 1_200, 5, 128
RATE, GAMMA, TARGET_RATE, EXPECTILE, TEMPERATURE, LARGEST = 1e-3, 0.95, 0.01, 0.8, 10.0, 100.0
EVALUATED, MARGIN = 200, 0.1  # episodes of an evaluation, least distance between scores


class Arms:
    """Planar arms with two joints that reach for points, moved all at once."""

    def __init__(self, number: int, draw: np.random.Generator) -> None:
        self.angle = draw.uniform(-np.pi, np.pi, (number, 2))
        self.speed = np.zeros((number, 2))
        radius, turn = draw.uniform(0.3, 0.9, number), draw.uniform(-np.pi, np.pi, number)
        self.target = radius[:, None] * np.stack([np.cos(turn), np.sin(turn)], -1)

    def observation(self) -> np.ndarray:
        """Return states ``[N, 10]``; the last two numbers are the way to the target."""
        angles = np.cumsum(self.angle, -1)
        hand = 0.5 * np.stack([np.cos(angles).sum(-1), np.sin(angles).sum(-1)], -1)
        parts = np.cos(self.angle), np.sin(self.angle), self.speed, self.target, self.target - hand
        return np.concatenate(parts, -1)

    def move(self, action: np.ndarray) -> None:
        """Accelerate to the commanded speeds ``[N, 2]`` for one step."""
        self.speed = 0.6 * self.speed + 1.6 * action.clip(-1, 1)
        self.angle = self.angle + STEP * self.speed

    def skilled(self) -> np.ndarray:
        """Return the command that moves the hands to the targets ``[N, 2]``."""
        angles = np.cumsum(self.angle, -1)
        columns = 0.5 * np.stack([-np.sin(angles), np.cos(angles)], -1)
        pull = (columns * self.observation()[:, None, -2:]).sum(-1)
        return (8 * np.stack([pull.sum(-1), pull[:, 1]], -1)).clip(-1, 1)


def play(behaviour: Any, number: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return states, actions and rewards of a policy or a named behaviour ``[N, T, ...]``."""
    draw = np.random.default_rng(seed)
    arms, action = Arms(number, draw), draw.uniform(-1, 1, (number, 2))
    seen, actions = [], []
    for _ in range(HORIZON + 1):
        seen.append(arms.observation())
        if callable(behaviour):
            action = behaviour(torch.as_tensor(seen[-1]).float()).detach().double().numpy()
        elif behaviour == "random":
            # A random command lasts some steps, so that the hands reach every place.
            changed = draw.random((number, 1)) < 0.15
            action = np.where(changed, draw.uniform(-1, 1, (number, 2)), action)
        else:
            noise = draw.normal(0, 0.6, (number, 2)) * (behaviour == "noisy")
            action = (arms.skilled() + noise).clip(-1, 1)
        actions.append(action)
        arms.move(action)
    states = np.stack(seen, 1)
    return states, np.stack(actions, 1), -np.linalg.norm(states[..., -2:], axis=-1)


def record(folder: Path, seed: int) -> None:
    """Write one H5 file per behaviour, as RoboHive's logger does."""
    folder.mkdir()
    clock, done = STEP * np.arange(HORIZON + 1), np.zeros(HORIZON + 1, dtype=bool)
    for n, (name, number) in enumerate(EPISODES.items()):
        with RoboHiveWriter(folder / f"{name}.h5") as writer:
            for states, actions, rewards in zip(*play(name, number, 10 * seed + n), strict=True):
                infos = {"rwd_dense": rewards}
                writer.add_trial(states, actions[:-1], rewards, done, clock, infos)


def layers(inputs: int, outputs: int, dropout: float = 0.0) -> nn.Sequential:
    """Return a network that normalizes its inputs and has two hidden layers."""
    first = nn.BatchNorm1d(inputs, affine=False), nn.Linear(inputs, WIDTH), nn.ReLU()
    second = nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(dropout)
    return nn.Sequential(*first, *second, nn.Linear(WIDTH, outputs))


class Learner(nn.Module):
    """A cloned policy, and an IQL policy with its critics."""

    def __init__(self, state: int, action: int) -> None:
        super().__init__()
        self.clone, self.policy = (layers(state, action, 0.05) for _ in range(2))
        self.critic, self.value = layers(state + action, 2), layers(state, 1)
        self.optimizer = torch.optim.Adam(self.parameters(), RATE)
        self.target = copy.deepcopy(self.critic)

    def update(self, batch: Any) -> list[float]:
        """Take one step of gradient descent; return its four losses."""
        seen, action, after = batch["observation"], batch["action"], batch["next"]
        pair = torch.cat([seen, action], -1)
        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                old.lerp_(new, TARGET_RATE)
            least = self.target(pair).amin(-1, keepdim=True)  # of two estimates
            future = ~after["terminated"] * self.value(after["observation"])
            wanted = after["reward"] + GAMMA * future
        # The value is an upper expectile, so it is near the value of good actions.
        advantage = least - self.value(seen)
        share = torch.where(advantage > 0, EXPECTILE, 1 - EXPECTILE)
        weight = (TEMPERATURE * advantage.detach()).exp().clamp(max=LARGEST)
        losses = [
            (self.clone(seen) - action).square().mean(),
            (weight * (self.policy(seen) - action).square()).mean(),
            (share * advantage.square()).mean(),
            (self.critic(pair) - wanted).square().sum(-1).mean(),
        ]
        self.optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        self.optimizer.step()
        return [loss.item() for loss in losses]


def train(
    folder: Path, source: Path, seed: int, steps: int, deadline: float, done: Any = None
) -> tuple[int, list[list[float]], Learner]:
    """Train, from a checkpoint if there is one; return earlier steps, losses, learner."""
    if done is not None:  # a number in which this process reports its steps; it saves checkpoints
        sys.stderr = io.StringIO()  # loader workers would report there that their learner died
    torch.set_num_threads(1)  # sums of several threads could differ in their last bits
    torch.manual_seed(seed)
    floats = Compose(SelectTransform(*FLOATS, ("next", "terminated")), Cast(torch.float32, FLOATS))
    options: Any = {"source": source, "root": folder.parent / "converted", "transform": floats}
    data = RobosetExperienceReplay(DATASET_ID, BATCH_SIZE, **options)
    learner = Learner(data["observation"].shape[1], data["action"].shape[1])
    # Forked workers read the rows without a copy. The order of batches depends on the seed alone.
    loader = data.dataloader(workers=2, steps=steps, seed=seed, multiprocessing_context="fork")
    parts: Any = (learner, learner.optimizer, loader)
    checkpoint, begin, losses = folder / "learner.pt", 0, []
    if checkpoint.exists():
        data.loads(folder / "buffer")
        begin, random, states = torch.load(checkpoint)
        torch.set_rng_state(random)  # of dropout
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    for batch in tqdm(loader, folder.name, total=steps, initial=begin, disable=done is not None):
        losses.append(learner.update(batch))
        if done is not None:
            done.value = len(losses)
            if done.value % (steps // SAVES) == 0:
                data.dumps(folder / "buffer")
                states = [part.state_dict() for part in parts]
                torch.save([done.value, torch.get_rng_state(), states], folder / "new.pt")
                (folder / "new.pt").replace(checkpoint)  # a kill leaves the old or the new file
        if time.monotonic() > deadline:
            break
    return begin, losses, learner.eval()


def scores_of(learner: Learner) -> dict[str, float]:
    """Return mean returns, scaled to 0 for random actions and 1 for skilled behaviour."""
    played = {"random": "random", "BC": learner.clone, "IQL": learner.policy, "skilled": "skilled"}
    mean = {name: play(one, EVALUATED, 12_345)[2].sum(1).mean() for name, one in played.items()}
    span = mean["skilled"] - mean["random"]
    return {name: float((one - mean["random"]) / span) for name, one in mean.items()}


def plot(path: Path, losses: Any, begin: int, again: Any, scores: dict[str, float]) -> None:
    """Save the losses of both runs, and the scores, as one PNG."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, *right = figure.subplots(1, 2 if scores else 1, squeeze=False)[0]
    for column, name in enumerate(("BC", "IQL policy")):
        left.semilogy([loss[column] for loss in losses], linewidth=0.8, label=name)
        some = range(0, len(again), 20)
        left.semilogy([begin + n for n in some], [again[n][column] for n in some], "k.", ms=3)
    left.set(title="Losses (dots: killed and continued)", xlabel="training step")
    left.legend()
    for axes in right:
        axes.bar(list(scores), list(scores.values()))
        axes.set(title="Scores", ylabel="0: random, 1: skilled")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    """Train with and without a kill. Return 0 if the goal was reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="file or folder of files in RoboHive's layout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=180, help="time limit")
    parser.add_argument("--output", type=Path, default=Path("example-output"), help="for the plot")
    options = parser.parse_args(arguments)
    begun, steps = time.monotonic(), max(SAVES, round(STEPS * min(1.0, options.seconds / 90)))
    ends = [begun + share * options.seconds for share in (0.5, 0.7, 0.9)]
    with tempfile.TemporaryDirectory() as scratch:
        killed, whole, recorded = (Path(scratch) / name for name in ("killed", "whole", "recorded"))
        if options.data is None:
            record(recorded, options.seed)
        common = (options.data or recorded, options.seed, steps)
        done = multiprocessing.Value("i", 0, lock=False)  # a kill could leave a lock taken
        process = multiprocessing.Process(target=train, args=(killed, *common, ends[0], done))
        process.start()
        while process.is_alive() and done.value <= steps / 2 and time.monotonic() < ends[0]:
            time.sleep(0.01)
        process.kill()
        process.join()
        begin, again, _ = train(killed, *common, ends[1])
        _, losses, learner = train(whole, *common, ends[2])
    print(f"killed after step {done.value}, continued from step {begin}")
    same = [one == other for one, other in zip(again, losses[begin:], strict=False)]
    good = process.exitcode == -9 and 0 < begin < steps == len(losses) == begin + len(again)
    good, scores = good and all(same), {}
    figure, goal = f"{sum(same)} of {len(same)} losses equal", "equal losses"
    if options.data is None:
        scores = scores_of(learner)
        good &= scores["BC"] >= MARGIN and scores["IQL"] >= scores["BC"] + MARGIN
        figure += f", IQL {scores['IQL']:.2f}, BC {scores['BC']:.2f}, random 0.00"
        goal += f", IQL > BC > random by {MARGIN}"
    options.output.mkdir(parents=True, exist_ok=True)
    plot(options.output / "roboset_offline.png", losses, begin, again, scores)
    print(f"roboset_offline: {'pass' if good else 'fail'} - {figure} against {goal}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
