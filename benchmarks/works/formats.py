"""Windows of robot data: state history and action chunks, as LeRobot's loader returns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from benchmarks.contender import Contender, Subject, expect
from benchmarks.harness import ready, take_turns
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.rows import as_tensordict, make_episodes
from benchmarks.setting import Setting
from replaykit import LazyTensorStorage, ReplayBuffer, Windows

__all__ = ["asked", "run", "subjects"]

EPISODE, BATCH = 200, 64
OFFSETS = {"observation": range(-1, 1), "action": range(16)}
TORCH, ITEMS = "torch gather", "item by item"
TITLE = f"windows: history 2, chunk 16, batch {BATCH}"


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Return what is asked, by the title of a work."""
    return {TITLE: (Target(ITEMS, 1 / 20), Target(TORCH, 2.0))}


class WindowsOfKeys(Contender):
    """Episodes that return windows of observations and actions, with masks of padding."""

    def __init__(self, name: str, rows: int) -> None:
        self.name, self.rows = name, rows

    def make(self) -> None:
        self.data = as_tensordict(make_episodes(self.rows, EPISODE))
        self.columns = {key: self.data[key] for key in OFFSETS}
        if self.name == SUBJECT:
            self.buffer = ReplayBuffer(
                storage=LazyTensorStorage(self.rows), sample_unit=Windows(OFFSETS), batch_size=BATCH
            )
            self.buffer.extend(self.data)

    def gathered(self, at: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the windows of rows ``[B]``, by one gather for each key."""
        found, first = {}, (at - at % EPISODE)[..., None]
        for key, offsets in OFFSETS.items():
            wanted = at[..., None] + torch.tensor(offsets)
            near = torch.minimum(torch.maximum(wanted, first), first + EPISODE - 1)
            found[key], found[key + "_is_pad"] = self.columns[key][near], near != wanted
        return found

    def sample(self) -> Any:
        if self.name == SUBJECT:
            return self.buffer.sample()
        at = torch.randint(self.rows, (BATCH,))
        if self.name == TORCH:
            return {**self.gathered(at), "index": at}
        return {**default_collate([self.gathered(one) for one in at]), "index": at}

    def check(self) -> None:
        for _ in range(20):
            batch = self.sample()
            for key, value in self.gathered(batch["index"]).items():
                expect(value.shape[0] == BATCH and batch[key].equal(value), f"other {key}")

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.sample()


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make replaykit's contenders alone."""
    return {TITLE: Subject(lambda: WindowsOfKeys(SUBJECT, setting.rows))}


def run(setting: Setting) -> list[Line]:
    """Measure."""
    found, absent = ready(
        WindowsOfKeys(SUBJECT, setting.rows),
        [WindowsOfKeys(name, setting.rows) for name in (TORCH, ITEMS)],
    )
    times = take_turns(found, rounds=setting.rounds)
    return lines_of_turns(TITLE, times, absent, asked(setting)[TITLE])
