"""LeRobot's data sets: their conversion, and windows of their rows."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, RandomSampler, default_collate

from benchmarks.contender import Contender, Subject, expect
from benchmarks.harness import ready, take_turns
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.setting import Setting
from replaykit import Windows
from replaykit.datasets import CorpusExperienceReplay, convert
from replaykit.datasets.families import LEROBOT, LEROBOT_PIXELS, LeRobotLayout
from replaykit.testing import make_lerobot

__all__ = ["asked", "run", "subjects"]

EPISODE, BATCH, FPS, WIDTH, STEPS = 400, 64, 30, 26, 32
PYARROW, LEROBOT_DATASET = "pyarrow", "LeRobotDataset"
CONVERSION = "conversion of a LeRobot data set"
WINDOWS = f"windows of a LeRobot data set: history 2, chunk 16, batch {BATCH}"
OFFSETS = {"observation.state": [-1, 0], "action": list(range(16))}
CAMERA = "observation.images.top"
SHADES = 4
"""Greatest difference of a pixel between two decoders; frames of a video differ by 37."""


@dataclass(frozen=True)
class Windowing:
    """How windows are read: a layout if there is a camera, and the count of worker processes."""

    asked: float
    layout: LeRobotLayout | None = None
    workers: int = 0


WINDOWINGS = {
    WINDOWS: Windowing(1 / 20),
    f"{WINDOWS}, video, 4 workers": Windowing(1 / 3, LEROBOT, workers=4),
    f"{WINDOWS}, converted pixels": Windowing(1 / 20, LEROBOT_PIXELS),
}


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Return what is asked, by the title of a work."""
    windows = {title: (Target(LEROBOT_DATASET, of.asked),) for title, of in WINDOWINGS.items()}
    return {CONVERSION: (Target(PYARROW, 2.0),), **windows}


def lerobot_class() -> Any:
    """Return LeRobot's own class.

    Where its decoder, torchcodec, is not installed, PyAV decodes in its place, with open files kept
    as torchcodec's are. Where torchvision cannot be imported, a stand-in has its one transform.

    Raises:
        ImportError: LeRobot is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    importlib.import_module("datasets")  # looks for torchvision itself
    importlib.import_module("lerobot")
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError):  # its wheels may need CUDA
        torchvision, transforms = ModuleType("torchvision"), ModuleType("torchvision.transforms")
        vars(transforms).update(ToTensor=object, Compose=lambda each: each[0])
        vars(torchvision).update(transforms=transforms)
        sys.modules |= {"torchvision": torchvision, "torchvision.transforms": transforms}
    from lerobot.datasets import lerobot_dataset

    if find_spec("torchcodec") is None:
        lerobot_dataset.decode_video_frames = decoded
    return lerobot_dataset.LeRobotDataset


def decoded(path: Any, timestamps: list[float], *_: Any) -> torch.Tensor:
    """Return the frames nearest to timestamps, float32 ``[n, C, H, W]``, as LeRobot does.

    The file is searched for the key frame before the first one, and read up to the last one.
    """
    container = _opened(str(path), os.getpid())
    stream = container.streams.video[0]
    container.seek(int(min(timestamps) / stream.time_base), stream=stream)
    seconds, frames = [], []
    for frame in container.decode(stream):
        seconds.append(frame.time)
        frames.append(frame)
        if frame.time >= max(timestamps):
            break
    nearest = np.abs(np.subtract.outer(seconds, timestamps)).argmin(0)
    found = np.stack([frames[at].to_ndarray(format="rgb24") for at in nearest])
    return torch.from_numpy(found).permute(0, 3, 1, 2).float() / 255


@lru_cache(16)
def _opened(path: str, process: int) -> Any:
    import av

    return av.open(path)


class LeRobotFolder(Contender):
    """A data set of version 3.0, and a folder for results."""

    cameras: tuple[str, ...] = ()

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
            self.source,
            [EPISODE] * self.episodes,
            fps=FPS,
            cameras=self.cameras,
            more=more,
            per_file=200,
        )

    def __del__(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class Conversion(LeRobotFolder):
    """Converts the folder, or only reads its Parquet files."""

    def work(self) -> Any:
        if self.name == SUBJECT:
            return convert(self.source, LEROBOT, self.target, progress=False)
        import pyarrow.parquet as parquet

        files = sorted((self.source / "data").rglob("*.parquet"))
        return [parquet.read_table(path) for path in files]

    def check(self) -> None:
        found = self.work()
        rows = len(found) if self.name == SUBJECT else sum(len(table) for table in found)
        expect(rows == self.episodes * EPISODE, "other rows")

    def inputs(self, calls: int) -> Iterable[Any]:
        for _ in range(calls):
            shutil.rmtree(self.target, ignore_errors=True)
            yield None

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.work()


class WindowsOfLeRobot(LeRobotFolder):
    """Windows of states and actions, of the converted data set or by LeRobot's own class.

    With a camera, each row also has the frame of its time. With workers, both have a ``DataLoader``
    that goes on with its processes, and its first batch is made before the timer starts. It ends
    with the last timed batch, so that no process works while another contender is timed.
    """

    def __init__(self, name: str, setting: Setting, of: Windowing) -> None:
        super().__init__(name, setting)
        self._of = of
        if of.layout is not None:
            self.cameras = ("top",)
            self.episodes = max(2, setting.images // EPISODE)
        self.data: Any = None
        self._loader: Any = None
        self._batches: Iterator[Any] = iter(())

    def make(self) -> None:
        lerobot = None if self.name == SUBJECT else lerobot_class()
        super().make()
        if lerobot is None:
            self._make_subject()
        else:
            seconds = {key: [step / FPS for step in steps] for key, steps in OFFSETS.items()}
            self.data = lerobot("me/set", root=self.source, delta_timestamps=seconds)
            if self._of.workers:
                drawn = RandomSampler(self.data, replacement=True, num_samples=BATCH * (STEPS + 1))
                self._loader = DataLoader(
                    self.data,
                    BATCH,
                    sampler=drawn,
                    num_workers=self._of.workers,
                    persistent_workers=True,
                )
        if self.cameras:
            self.frames = np.concatenate(
                [_frames_of(path) for path in sorted(self.source.rglob("*.mp4"))]
            )

    def _make_subject(self) -> None:
        data = convert(self.source, self._of.layout or LEROBOT, self.target, progress=False)
        keys: dict[str, Any] = {**OFFSETS, **({CAMERA: [0]} if self.cameras else {})}
        self.data = CorpusExperienceReplay(data.published, BATCH, sample_unit=Windows(keys))
        if self._of.workers:
            self._loader = self.data.dataloader(
                workers=self._of.workers, steps=STEPS + 1, persistent_workers=True
            )

    def inputs(self, calls: int) -> Iterable[Any]:
        if self._loader is not None:
            self._batches = iter(self._loader)
            next(self._batches)
        return [None] * calls

    def sample(self) -> Any:
        """Return the next batch."""
        if self._loader is not None:
            return next(self._batches)
        if self.name == SUBJECT:
            return self.data.sample()
        at = torch.randint(self.episodes * EPISODE, (BATCH,))
        return default_collate([self.data[int(one)] for one in at])

    def check(self) -> None:
        self.inputs(1)
        batch = self.sample()
        if self.name == SUBJECT:
            names = [*OFFSETS, *([CAMERA] if self.cameras else [])]
            batch = {name: batch[tuple(name.split("."))] for name in names} | {
                "index": batch["index"]
            }
        at = batch["index"].numpy()
        first = at - at % EPISODE
        for key, offsets in OFFSETS.items():
            wanted = np.clip(at[:, None] + offsets, first[:, None], first[:, None] + EPISODE - 1)
            expect(np.array_equal(batch[key], self.columns[key][wanted]), f"other {key}")
        if self.cameras:
            found = batch[CAMERA]
            if self.name != SUBJECT:
                found = found.mul(255).round().movedim(1, -1)
            apart = np.abs(found.numpy().reshape(len(at), *self.frames.shape[1:]) - self.frames[at])
            expect(apart.max() <= SHADES, "other frames")

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.sample()


def _frames_of(path: Path) -> npt.NDArray[np.int16]:
    """Return all frames of a video in order, ``[n, H, W, C]``."""
    import av

    with av.open(str(path)) as container:
        return np.stack(
            [f.to_ndarray(format="rgb24") for f in container.decode(video=0)], dtype=np.int16
        )


def _made(title: str) -> Callable[[str, Setting], Contender]:
    """Return how to make the contenders of a work."""
    if title == CONVERSION:
        return Conversion
    return lambda name, setting: WindowsOfLeRobot(name, setting, WINDOWINGS[title])


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make replaykit's contenders alone."""

    def of(title: str) -> Subject:
        calls = STEPS if title in WINDOWINGS and WINDOWINGS[title].workers else 1
        return Subject(lambda: _made(title)(SUBJECT, setting), calls)

    return {title: of(title) for title in asked(setting)}


def run(setting: Setting) -> list[Line]:
    """Measure."""
    lines = []
    for title, (target,) in asked(setting).items():
        make, calls = _made(title), subjects(setting)[title].calls
        found, absent = ready(make(SUBJECT, setting), [make(target.other, setting)])
        rounds = min(setting.rounds, 5 if calls > 1 else 20)
        times = take_turns(found, rounds=rounds, calls=calls)
        lines += lines_of_turns(title, times, absent, [target])
    return lines
