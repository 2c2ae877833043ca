"""LeRobot's data sets: their conversion, and windows of their rows."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from benchmarks.contender import Contender, Subject, expect
from benchmarks.harness import ready, take_turns
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.setting import Setting
from replaykit import Windows
from replaykit.datasets import CorpusExperienceReplay, convert
from replaykit.datasets.families import LEROBOT
from replaykit.testing import make_lerobot

__all__ = ["asked", "run", "subjects"]

EPISODE, BATCH, FPS, WIDTH = 400, 64, 30, 26
PYARROW, LEROBOT_DATASET = "pyarrow", "LeRobotDataset"
CONVERSION = "conversion of a LeRobot data set"
WINDOWS = f"windows of a LeRobot data set: history 2, chunk 16, batch {BATCH}"
OFFSETS = {"observation.state": [-1, 0], "action": list(range(16))}


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Return what is asked, by the title of a work."""
    return {CONVERSION: (Target(PYARROW, 2.0),), WINDOWS: (Target(LEROBOT_DATASET, 1 / 20),)}


class LeRobotFolder(Contender):
    """A data set of version 3.0 without cameras, and a folder for results."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.episodes = name, max(2, setting.rows // EPISODE // 4)
        self._folder = Path(tempfile.mkdtemp(dir=setting.scratch))
        self.source, self.target = self._folder / "set", self._folder / "data"

    def make(self) -> None:
        rows = self.episodes * EPISODE
        random = np.random.default_rng(0)
        wide = random.normal(size=(2, rows, WIDTH)).astype(np.float32)
        more = {"observation.wide": wide[0], "action.wide": wide[1]}
        self.columns = make_lerobot(
            self.source, [EPISODE] * self.episodes, fps=FPS, cameras=[], more=more, per_file=200
        )

    def __del__(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class Conversion(LeRobotFolder):
    """Converts the folder, or only reads its Parquet files."""

    def work(self) -> Any:
        if self.name == SUBJECT:
            shutil.rmtree(self.target, ignore_errors=True)
            return convert(self.source, LEROBOT, self.target, progress=False)
        import pyarrow.parquet as parquet

        files = sorted((self.source / "data").rglob("*.parquet"))
        return [parquet.read_table(path) for path in files]

    def check(self) -> None:
        found = self.work()
        rows = len(found) if self.name == SUBJECT else sum(len(table) for table in found)
        expect(rows == self.episodes * EPISODE, "other rows")

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.work()


class WindowsOfLeRobot(LeRobotFolder):
    """Windows of states and actions, of the converted data set or by LeRobot's own class."""

    def make(self) -> None:
        super().make()
        if self.name == SUBJECT:
            data = convert(self.source, LEROBOT, self.target, progress=False)
            self.data: Any = CorpusExperienceReplay(
                data.published, BATCH, sample_unit=Windows(OFFSETS)
            )
            return
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        seconds = {key: [step / FPS for step in steps] for key, steps in OFFSETS.items()}
        self.data = LeRobotDataset("me/set", root=self.source, delta_timestamps=seconds)

    def sample(self) -> Any:
        if self.name == SUBJECT:
            batch = self.data.sample()
            return {key: batch[tuple(key.split("."))] for key in OFFSETS} | {
                "index": batch["index"]
            }
        at = torch.randint(self.episodes * EPISODE, (BATCH,))
        return default_collate([self.data[int(one)] for one in at])

    def check(self) -> None:
        batch = self.sample()
        at = batch["index"].numpy()
        first = at - at % EPISODE
        for key, offsets in OFFSETS.items():
            wanted = np.clip(at[:, None] + offsets, first[:, None], first[:, None] + EPISODE - 1)
            expect(np.array_equal(batch[key], self.columns[key][wanted]), f"other {key}")

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.sample()


_KINDS: dict[str, tuple[type[LeRobotFolder], str]] = {
    CONVERSION: (Conversion, PYARROW),
    WINDOWS: (WindowsOfLeRobot, LEROBOT_DATASET),
}


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make replaykit's contenders alone."""

    def made(kind: type[LeRobotFolder]) -> Callable[[], Contender]:
        return lambda: kind(SUBJECT, setting)

    return {title: Subject(made(kind), 1) for title, (kind, _) in _KINDS.items()}


def run(setting: Setting) -> list[Line]:
    """Measure."""
    lines = []
    for title, (kind, other) in _KINDS.items():
        found, absent = ready(kind(SUBJECT, setting), [kind(other, setting)])
        times = take_turns(found, rounds=min(setting.rounds, 20), calls=1)
        lines += lines_of_turns(title, times, absent, asked(setting)[title])
    return lines
