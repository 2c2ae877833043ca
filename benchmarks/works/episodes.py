"""Writing whole episodes to full buffers, and draws of windows that follow draw counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.contender import Contender, expect
from benchmarks.harness import ready, take_turns
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.rows import as_tensordict, make_episodes
from benchmarks.setting import BATCH, Setting
from replaykit import Coverage, EpisodeWriter, LazyTensorStorage, ReplayBuffer, SliceSampler

__all__ = ["asked", "run"]

ROWS, STORED = 200, 1_000
SHORT, EPISODES, LENGTH = 10, 100_000, 8
LAW_BATCHES = 100
RING, KEYED, PLAIN = "ring", "ring with lane key", "plain slices"
WRITE = f"write an episode of {ROWS} rows, ring full"
DRAW = f"sample {BATCH} rows in windows of {LENGTH}, {EPISODES:,} episodes"


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Return what is asked, by the title of a work."""
    return {WRITE: (Target(RING, 1.5),), DRAW: (Target(PLAIN, 1.3),)}


class Writing(Contender):
    """A full buffer that takes one whole episode in each call."""

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self) -> None:
        key = None if self.name == RING else "id"
        writer = EpisodeWriter() if self.name == SUBJECT else None
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(ROWS * STORED, lane_key=key), writer=writer
        )
        self.rows = as_tensordict(make_episodes(20 * ROWS, ROWS)).split(ROWS)
        self.written = 0
        for rows in self.inputs(STORED + 1):
            self.buffer.extend(rows)

    def check(self) -> None:
        expect(len(self.buffer) == ROWS * STORED, f"holds {len(self.buffer)} rows")
        (rows,) = self.inputs(1)
        index = self.buffer.extend(rows)
        expect(bool((self.buffer[index] == rows).all()), "other rows are stored")
        lengths = self.buffer.episodes.lengths
        expect(bool((lengths == ROWS).all()) and len(lengths) == STORED, "episodes are torn")
        stored = self.buffer["id"].unique()
        newest = torch.arange(self.written - STORED, self.written)
        expect(bool((stored == newest).all()), "other episodes than the oldest have left")

    def inputs(self, calls: int) -> Iterable[Any]:
        for _ in range(calls):
            rows = self.rows[self.written % len(self.rows)]
            rows["id"] = torch.full((ROWS,), self.written)
            self.written += 1
            yield rows

    def timed(self) -> Callable[[Any], Any]:
        return lambda rows: self.buffer.extend(rows)


class Drawing(Contender):
    """A buffer of many short episodes."""

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self) -> None:
        measure: Any = "window" if self.name == PLAIN else Coverage(1.0)
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(SHORT * EPISODES),
            sampler=SliceSampler(slice_len=LENGTH, measure=measure),
            batch_size=BATCH,
            generator=torch.Generator().manual_seed(0),
        )
        self.buffer.extend(as_tensordict(make_episodes(SHORT * EPISODES, SHORT)))

    def check(self) -> None:
        index = self.buffer.sample()["index"].reshape(-1, LENGTH)
        expect(bool((index.diff() == 1).all()), "windows have gaps")
        expect(bool((index // SHORT == index[:, :1] // SHORT).all()), "windows cross episodes")
        # Few episodes are drawn twice, so both laws draw each window with the same probability.
        drawn = torch.cat([self.buffer.sample()["index"][::LENGTH] for _ in range(LAW_BATCHES)])
        for number, values in ((drawn % SHORT, SHORT - LENGTH + 1), (drawn % 700 // SHORT, 70)):
            counts = torch.bincount(number, minlength=values)
            mean = len(drawn) / values
            fair = len(counts) == values and (counts - mean).abs().max() < 5 * mean**0.5
            expect(bool(fair), f"windows are drawn {counts.tolist()} times")

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.buffer.sample()


def run(setting: Setting) -> list[Line]:
    """Measure."""
    lines = []
    for title, kind, others in ((WRITE, Writing, (RING, KEYED)), (DRAW, Drawing, (PLAIN,))):
        found, absent = ready(kind(SUBJECT), [kind(name) for name in others])
        times = take_turns(found, rounds=setting.rounds)
        lines += lines_of_turns(title, times, absent, asked(setting)[title])
    return lines
