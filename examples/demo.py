"""Record a corpus, train a policy on it, and save and load the buffer.

Everything runs on this machine. The demo rolls out a gymnasium environment and records it in the
RoboHive H5 layout, or takes your file. Then it takes the steps of a user: convert, sample, train,
save, load.

    python examples/demo.py [--data FILE.h5] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

from replaykit import ImmutableDatasetWriter, LazyMemmapStorage, RandomSampler, ReplayBuffer
from replaykit.datasets import RobosetExperienceReplay
from replaykit.errors import CorpusError
from replaykit.testing import RoboHiveWriter
from replaykit.tools.page import DAY, plot_settings

DATASET_ID = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"
ENVIRONMENT = "MountainCarContinuous-v0"
FILES, TRIALS, MAX_STEPS = 2, 12, 130
BATCH_SIZE, TRAIN_STEPS = 256, 400
COMPARED = 20
BLUE, WARM = DAY["accent"], DAY["warm"]

console = Console()


def progress_bar() -> Progress:
    """Return a progress bar with the same columns for every stage."""
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def record(path: Path, seed: int, advance: object) -> None:
    """Roll out a noisy expert and write the trials as RoboHive does.

    Record t has state t, its reward and its done flag. The last record has the final state.
    """
    import gymnasium

    environment = gymnasium.make(ENVIRONMENT, max_episode_steps=MAX_STEPS)
    draw = np.random.default_rng(seed)
    with RoboHiveWriter(path) as writer:
        for trial in range(TRIALS):
            state, _ = environment.reset(seed=1000 * seed + trial)
            states, actions, rewards, done = [state], [], [0.0], [False]
            strength = draw.uniform(0.5, 1.0)
            truncated = False
            while not (done[-1] or truncated):
                # Push in the direction of motion. Behaviour cloning averages the noise away.
                push = strength * np.sign(states[-1][1]) + draw.normal(0, 0.2)
                action = np.clip([push], -1, 1).astype(np.float32)
                state, reward, terminated, truncated, _ = environment.step(action)
                states.append(state)
                actions.append(action)
                rewards.append(float(reward))
                done.append(bool(terminated))
            observations = np.asarray(states, dtype=np.float64)
            clock = np.arange(len(states)) * 0.02
            writer.add_trial(
                observations=observations,
                actions=np.asarray(actions, dtype=np.float64),
                rewards=np.asarray(rewards),
                done=np.asarray(done),
                time=clock,
                env_infos={
                    "time": clock,
                    "done": np.asarray(done),
                    "solved": np.asarray(done),
                    "rwd_dense": np.asarray(rewards),
                    "rwd_sparse": np.asarray(done, dtype=np.float64),
                    "obs_dict": {"position": observations[:, :1], "velocity": observations[:, 1:]},
                },
            )
            advance()  # type: ignore[operator]
    environment.close()


def corpus(data: Path | None, folder: Path) -> list[Path]:
    """Return the files to convert: the user's file, or recorded ones."""
    if data is not None:
        return [data]
    files = []
    with progress_bar() as bar:
        task = bar.add_task("recording", total=FILES * TRIALS)
        for seed in range(FILES):
            path = folder / f"seed{seed}.h5"
            record(path, seed, lambda: bar.advance(task))
            files.append(path)
    return files


@dataclass
class Episodes:
    """The return and length of every episode."""

    returns: list[float]
    lengths: list[int]


def episodes_of(data: RobosetExperienceReplay) -> Episodes:
    """Return the sum of rewards and the number of rows of each episode."""
    reward = data["next", "reward"].flatten().double()
    ends = data["next", "done"].flatten().nonzero().flatten() + 1
    lengths = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype)).tolist()
    return Episodes([float(part.sum()) for part in reward.split(lengths)], lengths)


def flat(values: torch.Tensor) -> torch.Tensor:
    """Return the values of each row as one vector, also for images."""
    return values.flatten(1).float()


def train(data: ReplayBuffer) -> list[float]:
    """Clone the recorded behaviour with a small network; return all losses."""
    observation = flat(data["observation"])
    mean, scale = observation.mean(0), observation.std(0).clamp(min=1e-6)
    widths = observation.shape[1], flat(data["action"]).shape[1]
    policy = nn.Sequential(
        nn.Linear(widths[0], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, widths[1])
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    losses = []
    with progress_bar() as bar:
        task = bar.add_task("training", total=TRAIN_STEPS)
        for _ in range(TRAIN_STEPS):
            batch = data.sample()
            guess = policy((flat(batch["observation"]) - mean) / scale)
            loss = nn.functional.mse_loss(guess, flat(batch["action"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            bar.advance(task)
    return losses


def sampling_rate(data: ReplayBuffer, batches: int = 200) -> float:
    """Return the number of sampled batches per second."""
    start = time.perf_counter()
    for _ in range(batches):
        data.sample()
    return batches / (time.perf_counter() - start)


def same_batches(data: ReplayBuffer, restored: ReplayBuffer) -> bool:
    """Return whether the next batches of both buffers are equal to the bit."""
    for _ in range(COMPARED):
        left, right = data.sample(), restored.sample()
        keys = set(left.keys(True, True))
        if keys != set(right.keys(True, True)):
            return False
        if not all(left[key].equal(right[key]) for key in keys):
            return False
    return True


def size_of(folder: Path) -> int:
    """Return the size of all files in a folder in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def plot(path: Path, source: str, episodes: Episodes, losses: list[float]) -> None:
    """Save returns, lengths and losses as one PNG, styled as ``inspect --html``."""
    matplotlib.use("Agg")
    settings: Any = plot_settings()
    with matplotlib.rc_context(settings):
        draw(path, source, episodes, losses)


def draw(path: Path, source: str, episodes: Episodes, losses: list[float]) -> None:
    """Plot with the current matplotlib settings."""
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    figure.suptitle(source, x=0.01, ha="left", weight="bold")
    axes[0].hist(episodes.returns, bins=min(20, max(5, len(episodes.returns))), color=BLUE)
    axes[0].yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes[0].set(title="Returns", xlabel="sum of rewards", ylabel="episodes")
    axes[1].bar(range(len(episodes.lengths)), episodes.lengths, color=BLUE)
    axes[1].set(title="Length of each episode", xlabel="episode", ylabel="steps")
    axes[1].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    width = min(20, len(losses))
    smooth = np.convolve(losses, np.full(width, 1 / width), mode="valid")
    axes[2].semilogy(losses, color=WARM, linewidth=0.6, alpha=0.4)
    axes[2].semilogy(np.arange(len(smooth)) + width - 1, smooth, color=WARM)
    axes[2].yaxis.set_minor_formatter(ticker.NullFormatter())
    axes[2].set(title="Behaviour cloning", xlabel="training step", ylabel="loss (MSE)")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def summary(
    data: RobosetExperienceReplay,
    episodes: Episodes,
    losses: list[float],
    rate: float,
    sizes: tuple[int, int, int],
    equal: bool,
) -> Table:
    """Return the table that the demo prints at its end."""
    table = Table(title="replaykit demo", show_header=False)
    returns = episodes.returns
    mean = sum(returns) / len(returns)
    table.add_row("rows", f"{len(data):,}")
    table.add_row("episodes", f"{len(returns)} ({min(episodes.lengths)} to "
                              f"{max(episodes.lengths)} steps)")  # fmt: skip
    table.add_row("returns", f"mean {mean:.2f}, {min(returns):.2f} to {max(returns):.2f}")
    table.add_row("sampling", f"{rate:,.0f} batches/s of {BATCH_SIZE} rows")
    for name, size in zip(("source files", "converted", "saved buffer"), sizes, strict=True):
        table.add_row(name, f"{size / 2**20:.2f} MiB")
    start, end = np.mean(losses[:20]), np.mean(losses[-20:])
    table.add_row("cloning loss", f"{start:.4f} at first, {end:.4f} at last")
    same = "the same as without saving" if equal else "DIFFERENT from those without saving"
    table.add_row(f"{COMPARED} batches after loading", same)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="an H5 file in the RoboHive layout")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for results")
    arguments = parser.parse_args()
    if arguments.data is not None and not arguments.data.is_file():
        parser.error(f"there is no file {arguments.data}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    picture = (arguments.out / "demo.png").resolve()
    picture.unlink(missing_ok=True)  # from an earlier run

    with tempfile.TemporaryDirectory(prefix="replaykit-demo-") as scratch:
        work = Path(scratch)
        files = corpus(arguments.data, work)
        source = f"{ENVIRONMENT}, {FILES} seeds" if arguments.data is None else arguments.data.name
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                data = RobosetExperienceReplay(
                    DATASET_ID,
                    batch_size=BATCH_SIZE,
                    root=work / "roboset",
                    source=files,
                    generator=torch.Generator().manual_seed(0),
                )
            except CorpusError as error:
                console.print(str(error), style="red", markup=False, soft_wrap=True)
                return 1
        for warning in caught:
            console.print(f"note: {warning.message}", style="yellow", markup=False)
        console.print(f"converted {len(data):,} rows of {source}")

        episodes = episodes_of(data)
        losses = train(data)
        rate = sampling_rate(data)

        saved = arguments.out / "buffer"
        data.dumps(saved)
        restored = ReplayBuffer(
            storage=LazyMemmapStorage(len(data)),
            sampler=RandomSampler(),
            writer=ImmutableDatasetWriter(),
            batch_size=BATCH_SIZE,
        )
        restored.loads(saved)
        equal = same_batches(data, restored)
        sizes = (
            sum(path.stat().st_size for path in files),
            size_of(data.data_path),
            size_of(saved),
        )
        console.print(summary(data, episodes, losses, rate, sizes, equal))
        plot(picture, source, episodes, losses)
        console.print(f"picture: {picture}", soft_wrap=True)
    if not equal:
        console.print("the loaded buffer draws other batches than the saved one", style="red")
        return 1
    if np.mean(losses[-20:]) >= np.mean(losses[:20]):
        # The recorded behaviour can be learned, but a user's file may hold random actions.
        console.print("the loss did not fall", style="red")
        return int(arguments.data is None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
