"""Windows of robot data, as the loaders of LeRobot and of diffusion policy return them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from benchmarks.contender import Contender, Subject, Unavailable, expect
from benchmarks.harness import ready, take_turns
from benchmarks.report import SUBJECT, Line, Target, lines_of_turns
from benchmarks.rows import as_tensordict, make_episodes
from benchmarks.setting import Setting
from replaykit import LazyTensorStorage, ReplayBuffer, Windows
from replaykit.datasets import CorpusExperienceReplay, convert
from replaykit.datasets.families import ZARR

__all__ = ["asked", "run", "subjects"]

EPISODE, BATCH = 200, 64
OFFSETS = {"observation": range(-1, 1), "action": range(16)}
TORCH, ITEMS = "torch gather", "item by item"
TITLE = f"windows: history 2, chunk 16, batch {BATCH}"
POLICY, IMAGES = "diffusion policy", "images of Zarr: history 2, chunk 16, batch 64"
SPANS = {"img": (-1, 1), "action": (-1, 15)}
"""First offset and end of the windows of each array."""


def asked(setting: Setting) -> dict[str, tuple[Target, ...]]:
    """Return what is asked, by the title of a work."""
    return {
        TITLE: (Target(ITEMS, 1 / 20), Target(TORCH, 2.0)),
        IMAGES: (Target(POLICY, 1 / 3),),
    }


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


class WindowsOfZarr(Contender):
    """Windows of images and actions, converted, or read from Zarr for each item.

    The latter is the sampler of diffusion policy: it reads the rows of a window that are in its
    episode, and repeats the first and the last one outside. A DataLoader stacks the items.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.rows = name, max(2, setting.images // EPISODE) * EPISODE
        self._folder = Path(tempfile.mkdtemp(dir=setting.scratch))

    def make(self) -> None:
        try:
            import zarr
        except ImportError as error:
            raise Unavailable(str(error)) from error
        random = np.random.default_rng(0)
        path = self._folder / "set.zarr"
        self.arrays: dict[str, Any] = {
            "img": random.integers(0, 8, (self.rows, 96, 96, 3), dtype=np.uint8),
            "action": random.standard_normal((self.rows, 7)).astype(np.float32),
        }
        group = zarr.create_group(path, zarr_format=2)
        for name, values in self.arrays.items():
            chunks = (1 if name == "img" else EPISODE, *values.shape[1:])
            config = {"write_empty_chunks": True}
            made = group.create_array(
                f"data/{name}", shape=values.shape, dtype=values.dtype, chunks=chunks, config=config
            )
            made[:] = values
        ends = np.arange(EPISODE, self.rows + 1, EPISODE)
        group.create_array("meta/episode_ends", data=ends)
        if self.name == SUBJECT:
            data = convert(path, ZARR, self._folder / "data", progress=False)
            keys = {"img": ("observation", "img"), "action": "action"}
            unit = Windows({keys[name]: range(*span) for name, span in SPANS.items()})
            self.buffer = CorpusExperienceReplay(data.published, BATCH, sample_unit=unit)
        else:
            self.stored: dict[str, Any] = dict(zarr.open_group(path, mode="r")["data"].arrays())

    def item(self, at: int) -> dict[str, Any]:
        """Return the windows of one row."""
        found: dict[str, Any] = {}
        start = at - at % EPISODE
        for name, (before, after) in SPANS.items():
            first, stop = max(start, at + before), min(start + EPISODE, at + after)
            values = self.stored[name][first:stop]
            padding = [(first - at - before, at + after - stop), *[(0, 0)] * (values.ndim - 1)]
            found[name] = torch.from_numpy(np.pad(values, padding, "edge"))
        return found

    def sample(self) -> tuple[Any, dict[str, Any]]:
        if self.name == SUBJECT:
            batch = self.buffer.sample()
            images = batch["observation", "img"]
            return batch["index"], {"img": images, "action": batch["action"]}
        at = torch.randint(self.rows, (BATCH,))
        return at, default_collate([self.item(one) for one in at.tolist()])

    def check(self) -> None:
        at, batch = self.sample()
        first = (at.numpy() - at.numpy() % EPISODE)[:, None]
        for name, (before, after) in SPANS.items():
            wanted = at.numpy()[:, None] + np.arange(before, after)
            near = wanted.clip(first, first + EPISODE - 1)
            expect(np.array_equal(batch[name], self.arrays[name][near]), f"other {name}")

    def timed(self) -> Callable[[Any], Any]:
        return lambda _: self.sample()

    def __del__(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def subjects(setting: Setting) -> dict[str, Subject]:
    """Return how to make replaykit's contenders alone."""
    return {
        TITLE: Subject(lambda: WindowsOfKeys(SUBJECT, setting.rows)),
        IMAGES: Subject(lambda: WindowsOfZarr(SUBJECT, setting)),
    }


def run(setting: Setting) -> list[Line]:
    """Measure."""
    found, absent = ready(
        WindowsOfKeys(SUBJECT, setting.rows),
        [WindowsOfKeys(name, setting.rows) for name in (TORCH, ITEMS)],
    )
    times = take_turns(found, rounds=setting.rounds)
    lines = lines_of_turns(TITLE, times, absent, asked(setting)[TITLE])
    found, absent = ready(WindowsOfZarr(SUBJECT, setting), [WindowsOfZarr(POLICY, setting)])
    times = take_turns(found, rounds=min(3, setting.rounds), calls=2)
    return [*lines, *lines_of_turns(IMAGES, times, absent, asked(setting)[IMAGES])]
