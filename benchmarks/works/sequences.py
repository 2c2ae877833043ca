"""Slices of episodes, and transforms that read the rows around, from a full buffer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.contender import Contender, Subject, Unavailable, expect
from benchmarks.harness import ready, take_turns
from benchmarks.holders import CHUNK, TorchRL
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns, missing_lines
from benchmarks.rows import Leaves, as_tensordict, make_episodes, row_count, take_rows
from benchmarks.setting import BATCH, Setting
from replaykit import (
    HindsightGoal,
    LazyTensorStorage,
    NStep,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    StackFrames,
    TensorStorage,
)

__all__ = ["EPISODE", "Slices", "asked", "run", "sliced", "subjects"]

SLICES, LENGTH = 16, 16
EPISODE = 200
LARGER = 300
"""How many times the rows the larger index has."""

UNIFORM = "uniform 256"
PLAIN = "slices"
SMALLER = "index of the rows"
BARE = "without index"

TRANSFORMS = {
    "n-step 5": lambda: NStep(5, 0.99),
    "4 frames": lambda: StackFrames(["observation"], 4),
    "hindsight": lambda: HindsightGoal(
        0.8, "future", achieved="achieved_goal", goal="desired_goal"
    ),
}


def _titles(setting: Setting) -> dict[str, tuple[Target, ...]]:
    rows = f"{setting.rows:,}"
    return {
        f"16 slices of 16, {rows} rows": (Target(UNIFORM, 3.0), Target("TorchRL", 1 / 15)),
        "extend 8, 16 slices of 16": (Target("TorchRL", 1 / 20),),
        f"draw 16 of 16, {setting.rows * LARGER:,} rows": (Target(SMALLER, 1.3),),
        "extend 1,000": (Target(BARE, 1.3),),
        "prioritized slices": (Target(PLAIN, 2.0),),
        **{name: (Target(UNIFORM, 3.0),) for name in TRANSFORMS},
    }


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Returns what is asked, by the title of a work."""
    return {**_titles(setting), **dict.fromkeys(_index_titles(setting), ())}


class Slices(Contender):
    """A full buffer of episodes that returns slices of them, or rows."""

    def __init__(self, name: str, leaves: Leaves, sampler: Any, transform: Any = None) -> None:
        self.name = name
        self.leaves = leaves
        self.rows = row_count(leaves)
        self.sampler, self.transform = sampler, transform

    def new_buffer(self) -> Any:
        return ReplayBuffer(
            storage=LazyTensorStorage(self.rows),
            sampler=self.sampler(),
            transform=None if self.transform is None else self.transform(),
            batch_size=BATCH,
        )

    def make(self) -> None:
        self.buffer = self.new_buffer()
        data = as_tensordict(self.leaves)
        for start in range(0, self.rows, CHUNK):
            self.buffer.extend(data[start : start + CHUNK])

    def index(self, batch: Any) -> torch.Tensor:
        index = batch["index"]
        return index[0] if isinstance(index, tuple) else index.reshape(-1)

    def check(self) -> None:
        """Rows are those that the index names, in slices of rows that follow each other."""
        expect(len(self.buffer) == self.rows, f"holds {len(self.buffer)} rows of {self.rows}")
        for _ in range(20):
            batch = self.buffer.sample()
            index = self.index(batch)
            expect(len(index) == BATCH, f"a batch of {len(index)}")
            if self.transform is None:
                for key in (("observation",), ("next", "reward")):
                    stored = self.leaves[key][index]
                    expect(batch[key].equal(stored), f"{key} is not what was written")
            if self.sliced:
                parts = index.view(SLICES, LENGTH)
                expect(bool((parts.diff(dim=1) == 1).all()), "slices have gaps")
                episodes = torch.div(parts, EPISODE, rounding_mode="floor")
                expect(bool((episodes == episodes[:, :1]).all()), "slices cross episodes")
            elif self.transform is not None:
                self.check_transform(batch, index)

    @property
    def sliced(self) -> bool:
        return self.sampler is not RandomSampler

    def check_transform(self, batch: Any, index: torch.Tensor) -> None:
        last = torch.div(index, EPISODE, rounding_mode="floor") * EPISODE + EPISODE - 1
        first = last - EPISODE + 1
        if batch.get("steps_used", None) is not None:
            count = (last - index + 1).clamp(max=5)
            rewards = self.leaves["next", "reward"][:, 0]
            total = torch.zeros(len(index))
            for k in range(5):
                later = rewards[(index + k).clamp(max=self.rows - 1)]
                total += torch.where(k < count, 0.99**k * later, 0)
            expect(torch.allclose(batch["next", "reward"][:, 0], total, rtol=1e-4), "other sums")
        elif batch["observation"].shape[-1] == 4 * self.leaves[("observation",)].shape[-1]:
            frames = [torch.maximum(index - k, first) for k in (3, 2, 1, 0)]
            stack = torch.cat([self.leaves[("observation",)][at] for at in frames], -1)
            expect(batch["observation"].equal(stack), "other frames")
        else:
            goal = self.leaves["next", "achieved_goal"]
            new = batch["desired_goal"]
            changed = (new != self.leaves[("desired_goal",)][index]).any(-1)
            share = changed.float().mean().item()
            expect(0.6 < share < 0.95, f"{share:.2f} of the goals were changed")
            for at in changed.nonzero()[:8, 0].tolist():
                later = goal[int(index[at]) : int(last[at]) + 1]
                expect(bool((later == new[at]).all(-1).any()), "a goal that was not achieved later")

    def timed(self) -> Callable[[Any], Any]:
        sample = self.buffer.sample
        return lambda _: sample()


class TorchRLSlices(Slices):
    """TorchRL's SliceSampler, as it comes."""

    def new_buffer(self) -> Any:
        TorchRL.quiet()
        from torchrl.data import LazyTensorStorage as Storage
        from torchrl.data import SliceSampler as Sampler
        from torchrl.data import TensorDictReplayBuffer

        return TensorDictReplayBuffer(
            storage=Storage(self.rows),
            sampler=Sampler(num_slices=SLICES, end_key=("next", "done"), strict_length=True),
            batch_size=BATCH,
        )


class Growing(Contender):
    """The same, where every sample follows a write of 8 rows to the full ring."""

    def __init__(self, inner: Slices) -> None:
        self.inner, self.name = inner, inner.name

    def make(self) -> None:
        if not hasattr(self.inner, "buffer"):
            self.inner.make()
        data = take_rows(self.inner.leaves, 0, 8 * EPISODE)
        self.fresh = [
            as_tensordict(take_rows(data, start, 8)) for start in range(0, row_count(data), 8)
        ]
        self.at = 0

    def check(self) -> None:
        self.inner.check()

    def inputs(self, calls: int) -> Iterable[Any]:
        self.at += calls
        return [self.fresh[(self.at + i) % len(self.fresh)] for i in range(calls)]

    def timed(self) -> Callable[[Any], Any]:
        extend, sample = self.inner.buffer.extend, self.inner.buffer.sample

        def work(rows: Any) -> Any:
            extend(rows)
            return sample()

        return work


class Drawing(Contender):
    """Draws the index of 16 slices of 16; nothing is read."""

    def __init__(self, name: str, rows: int) -> None:
        self.name, self.rows = name, rows

    def make(self) -> None:
        self.storage = LazyTensorStorage(self.rows)
        buffer = ReplayBuffer(storage=self.storage)
        done = torch.zeros(10_000_000, 1, dtype=torch.bool)
        done[EPISODE - 1 :: EPISODE] = True
        for start in range(0, self.rows, len(done)):
            part = done[: min(len(done), self.rows - start)]
            buffer.extend(TensorDict({"next": {"done": part}}, [len(part)]))
        self.buffer = buffer
        self.sampler = SliceSampler(num_slices=SLICES)

    def check(self) -> None:
        expect(len(self.storage) == self.rows, f"holds {len(self.storage)} rows of {self.rows}")
        spread = []
        for _ in range(200):
            index, _ = self.sampler.sample(self.storage, BATCH)
            parts = index.view(SLICES, LENGTH)
            expect(bool((parts.diff(dim=1) == 1).all()), "slices have gaps")
            expect(bool((parts[:, 0] % EPISODE <= EPISODE - LENGTH).all()), "they cross episodes")
            spread.append(parts[:, 0].double().mean() / self.rows)
        mean = torch.stack(spread).mean().item()
        expect(0.46 < mean < 0.54, f"slices lie at {mean:.2f} of the rows in the mean")

    def timed(self) -> Callable[[Any], Any]:
        sample, storage = self.sampler.sample, self.storage
        return lambda _: sample(storage, BATCH)


class Extending(Contender):
    """A full buffer that takes 1,000 rows."""

    def __init__(self, name: str, leaves: Leaves, *, indexed: bool) -> None:
        self.name, self.leaves, self.indexed = name, leaves, indexed
        self.rows = row_count(leaves)

    def make(self) -> None:
        self.storage = LazyTensorStorage(self.rows)
        self.buffer = ReplayBuffer(storage=self.storage)
        if not self.indexed:
            self.storage.indexes.append = lambda rows, number: None  # type: ignore
        data = as_tensordict(self.leaves)
        for start in range(0, self.rows, CHUNK):
            self.buffer.extend(data[start : start + CHUNK])
        count = min(1000, self.rows)
        fresh = [take_rows(self.leaves, start, count) for start in (0, self.rows - count)]
        self.fresh = [as_tensordict(leaves) for leaves in fresh]

    def check(self) -> None:
        expect(len(self.buffer) == self.rows, f"holds {len(self.buffer)} rows of {self.rows}")
        if self.indexed:
            episodes = len(self.storage.episodes.table().lane)
            expect(episodes == -(-self.rows // EPISODE), f"knows {episodes} episodes")

    def inputs(self, calls: int) -> Iterable[Any]:
        return [self.fresh[i % 2] for i in range(calls)]

    def timed(self) -> Callable[[Any], Any]:
        return self.buffer.extend


def _index_lines(setting: Setting) -> list[Line]:
    """What it costs to index a data set at once, in seconds and in bytes a row."""
    from replaykit.episodes import WINDOWS, CountLaw

    rows = setting.rows * 10
    built, one_row, usual = _index_titles(setting)
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[EPISODE - 1 :: EPISODE] = True
    best = float("inf")
    for _ in range(3):
        storage = TensorStorage(TensorDict({"next": {"done": done}}, [rows]))
        start = time.perf_counter()
        index = storage.episodes
        best = min(best, time.perf_counter() - start)
    law = CountLaw.strict(LENGTH)
    windows = int(index.totals(law, WINDOWS).sum())
    whole, rest = divmod(rows, EPISODE)
    wanted = whole * (EPISODE - LENGTH + 1) + max(0, rest - LENGTH + 1)
    expect(windows == wanted, f"knows {windows} windows of {wanted}")
    lines = [Line(built, "replaykit", best, "s", at_most=2.0)]
    lines.append(Line(usual, "replaykit", index.nbytes() / rows, "B", at_most=24.0))
    storage = TensorStorage(TensorDict({"next": {"done": torch.ones_like(done)}}, [rows]))
    single = storage.episodes
    expect(int(single.totals(CountLaw.strict(1), WINDOWS).sum()) == rows, "misses windows")
    lines.append(Line(one_row, "replaykit", single.nbytes() / rows, "B", at_most=24.0))
    return lines


def _index_titles(setting: Setting) -> tuple[str, str, str]:
    rows = setting.rows * 10
    return f"index of {rows:,} rows", "a row, episodes of 1", f"a row, episodes of {EPISODE}"


def _measured(
    setting: Setting, title: str, subject: Contender, others: Sequence[Contender], rounds: int = 0
) -> list[Line]:
    targets = _titles(setting)[title]
    try:
        found, absent = ready(subject, others)
    except Unavailable as error:
        return missing_lines(title, targets, str(error))
    times = take_turns(found, rounds=rounds or setting.rounds)
    return lines_of_turns(title, times, absent, targets)


def sliced() -> SliceSampler:
    """Return the sampler of 16 slices."""
    return SliceSampler(num_slices=SLICES)


def _prioritized() -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(alpha=0.6, beta=0.4, num_slices=SLICES)


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make the contenders of this work, by title."""
    slices, growing, drawing, extending, prioritized = list(_titles(setting))[:5]

    def filled(sampler: Any, transform: Any = None) -> Slices:
        return Slices(SUBJECT, make_episodes(setting.rows, EPISODE), sampler, transform)

    def extended() -> Extending:
        return Extending(SUBJECT, make_episodes(setting.rows, EPISODE), indexed=True)

    return {
        slices: Subject(lambda: filled(sliced)),
        growing: Subject(lambda: Growing(filled(sliced))),
        drawing: Subject(lambda: Drawing(SUBJECT, setting.rows * LARGER)),
        extending: Subject(extended),
        prioritized: Subject(lambda: filled(_prioritized)),
        **{
            title: Subject(partial(filled, RandomSampler, transform))
            for title, transform in TRANSFORMS.items()
        },
    }


def run(setting: Setting) -> list[Line]:
    """Measures."""
    titles = list(_titles(setting))
    leaves = make_episodes(setting.rows, EPISODE)
    own = Slices("replaykit", leaves, sliced)
    uniform = Slices(UNIFORM, leaves, RandomSampler)
    theirs = TorchRLSlices("TorchRL", leaves, None)
    # The slow one would take most of the time.
    rounds = max(1, setting.rounds // 2)
    lines = _measured(setting, titles[0], own, [uniform, theirs], rounds)
    lines += _measured(setting, titles[1], Growing(own), [Growing(theirs)], rounds)
    del theirs
    lines += _measured(
        setting,
        titles[2],
        Drawing("replaykit", setting.rows * LARGER),
        [Drawing(SMALLER, setting.rows)],
    )
    lines += _measured(
        setting,
        titles[3],
        Extending("replaykit", leaves, indexed=True),
        [Extending(BARE, leaves, indexed=False)],
    )
    prioritized = Slices("replaykit", leaves, _prioritized)
    lines += _measured(setting, titles[4], prioritized, [Slices(PLAIN, leaves, sliced)])
    for title, transform in TRANSFORMS.items():
        subject = Slices("replaykit", leaves, RandomSampler, transform)
        lines += _measured(setting, title, subject, [uniform])
    return lines + _index_lines(setting)
