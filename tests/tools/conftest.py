"""Shared by the tests of inspection: files, data sets and buffers of known content."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit.datasets import convert
from replaykit.datasets.families import ROBOMIMIC

LENGTHS = (5, 3, 4)


def write_robomimic(
    path: Path, lengths: tuple[int, ...] = LENGTHS, *, camera: bool = False
) -> Path:
    """Demonstrations of which every value tells where it is from."""
    draw = np.random.default_rng(len(lengths))
    with h5py.File(path, "w") as file:
        for number, steps in enumerate(lengths):
            demo = file.create_group(f"data/demo_{number}")
            demo.attrs["num_samples"] = steps
            demo["actions"] = draw.normal(size=(steps, 3))
            demo["rewards"] = draw.normal(size=steps)
            demo["dones"] = (np.arange(steps) == steps - 1).astype(np.int64) * (number != 1)
            states = draw.normal(size=(steps + 1, 4))
            demo["obs/eef"], demo["next_obs/eef"] = states[:-1], states[1:]
            if camera:
                frames = draw.integers(0, 256, (steps + 1, 12, 16, 3), np.uint8)
                demo["obs/camera_image"], demo["next_obs/camera_image"] = frames[:-1], frames[1:]
    return path


@pytest.fixture(name="write_robomimic")
def _write_robomimic() -> Callable[..., Path]:
    return write_robomimic


def write_d4rl(path: Path, rows: int = 20, ends: tuple[int, ...] = (6, 13), **more: Any) -> Path:
    """Flat arrays; the first end is a terminal, others are time-outs."""
    draw = np.random.default_rng(rows)
    with h5py.File(path, "w") as file:
        file["observations"] = draw.normal(size=(rows, 4)).astype(np.float32)
        file["next_observations"] = draw.normal(size=(rows, 4)).astype(np.float32)
        file["actions"] = draw.normal(size=(rows, 2)).astype(np.float32)
        file["rewards"] = draw.normal(size=rows).astype(np.float32)
        file["terminals"] = np.isin(np.arange(rows), ends[:1])
        file["timeouts"] = np.isin(np.arange(rows), ends[1:])
        for name, values in more.items():
            file[name.replace("__", "/")] = values
    return path


@pytest.fixture(name="write_d4rl")
def _write_d4rl() -> Callable[..., Path]:
    return write_d4rl


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A published data set of three demonstrations."""
    source = write_robomimic(tmp_path / "source.hdf5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        convert(source, ROBOMIMIC, tmp_path / "corpus", progress=False)
    return tmp_path / "corpus"


def transitions(steps: int, *, end: int = 10, seed: int = 0, **more: torch.Tensor) -> TensorDict:
    """Rows of which every ``end``-th is a terminal."""
    draw = torch.Generator().manual_seed(seed)
    done = torch.zeros(steps, 1, dtype=torch.bool)
    done[end - 1 :: end] = True
    return TensorDict(
        {
            "observation": torch.randn(steps, 3, generator=draw),
            "action": torch.randn(steps, 2, generator=draw),
            **more,
            "next": {
                "observation": torch.randn(steps, 3, generator=draw),
                "reward": torch.randn(steps, 1, generator=draw),
                "done": done,
                "terminated": done.clone(),
                "truncated": torch.zeros_like(done),
            },
        },
        [steps],
    )


@pytest.fixture(name="transitions")
def _transitions() -> Callable[..., TensorDict]:
    return transitions


def tamper(path: Path, key: str, change: Callable[[np.ndarray], Any]) -> None:
    """Changes a column, or one of the episode table, with its checksum in the manifest."""
    manifest = path / "manifest.json"
    record = json.loads(manifest.read_text())
    arrays = [*record["arrays"], *record["episode_arrays"]]
    (array,) = [a for a in arrays if "/".join(a["key"]) == key.removeprefix("table/")
                and a["file"].startswith("episodes/") == key.startswith("table/")]  # fmt: skip
    file = path / array["file"]
    values = np.fromfile(file, dtype=array["dtype"]).reshape(array["shape"])
    change(values)
    file.write_bytes(values.tobytes())
    array["crc32"] = f"{zlib.crc32(values.tobytes()):08x}"
    record.pop("crc32", None)
    manifest.write_text(json.dumps(record))


@pytest.fixture(name="tamper")
def _tamper() -> Callable[..., None]:
    return tamper
