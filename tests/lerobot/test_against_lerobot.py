"""Each item equals that of LeRobot's own class; run by ``make test-lerobot``.

The wheels of torchvision need CUDA, so a stand-in has the one transform that LeRobot calls. Frames
of LeRobot are decoded by PyAV here, because its decoders need torchvision or torchcodec.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("lerobot") is None:
    pytest.skip("needs the package lerobot: make test-lerobot", allow_module_level=True)

from replaykit import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement, Windows
from replaykit.adapters import to_lerobot
from replaykit.datasets import CorpusExperienceReplay, convert
from replaykit.datasets.families import LEROBOT, LEROBOT_PIXELS
from replaykit.inspection import repair, validate
from replaykit.testing import make_lerobot
from tests.adapters.test_table_exports import LENGTHS, episode
from tests.datasets.families.lerobot_reader import frames_of
from tests.datasets.families.test_seeded_faults import REAL, real

TOLERANCE_S = 1e-4


class ToTensor:
    """The transform of this name, for images of bytes."""

    def __call__(self, image: Any) -> torch.Tensor:
        return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def lerobot() -> Any:
    """The module of LeRobot's class, with frames decoded by PyAV."""
    importlib.import_module("datasets")  # looks for torchvision itself
    torchvision, transforms = types.ModuleType("torchvision"), types.ModuleType("transforms")
    vars(transforms).update(ToTensor=ToTensor, Compose=lambda each: each[0])
    vars(torchvision).update(transforms=transforms)
    sys.modules["torchvision"], sys.modules["torchvision.transforms"] = torchvision, transforms
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        from lerobot.datasets import lerobot_dataset

        patch.setattr(lerobot_dataset, "decode_video_frames", decoded)
        yield lerobot_dataset


def decoded(path: Any, timestamps: Any, tolerance_s: float, *_: Any) -> torch.Tensor:
    """Return the frames nearest to timestamps, float32 ``[n, C, H, W]``."""
    seconds, pixels = frames_of(Path(path))
    apart = np.abs(seconds[:, None] - np.asarray(timestamps))
    assert (apart.min(0) < tolerance_s).all()
    found = torch.from_numpy(pixels[apart.argmin(0)])
    return found.permute(0, 3, 1, 2).float() / 255


def record(lerobot: Any, folder: Path, *, use_videos: bool = True) -> None:
    """Let LeRobot record three episodes of a camera, with a reward and two tasks."""
    features = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "observation.images.top": {
            "dtype": "video" if use_videos else "image",
            "shape": (64, 96, 3),
            "names": ["height", "width", "channels"],
        },
        "action": {"dtype": "float32", "shape": (2,), "names": None},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    }
    data = lerobot.LeRobotDataset.create(
        "me/made", 10, features, root=folder, use_videos=use_videos, vcodec="h264"
    )
    random = np.random.default_rng(0)
    ramp = np.add.outer(np.arange(64), np.arange(96))
    for length in (6, 3, 8):
        for at in range(length):
            pixels = np.stack([ramp + 20 * at, ramp * 2, ramp + 70], -1) % 256
            data.add_frame({
                "observation.state": random.normal(size=3).astype(np.float32),
                "observation.images.top": pixels.astype(np.uint8),
                "action": random.normal(size=2).astype(np.float32),
                "next.reward": np.array([at], np.float32),
                "next.done": np.array([at == length - 1]),
                "task": "push" if length > 3 else "pull",
            })  # fmt: skip
        data.save_episode()
    data.finalize()


def check_items(data: Any, theirs: Any, info: dict[str, Any], step: int = 1) -> None:
    """Compare each item of a data set with that of LeRobot's class."""
    assert len(data) == len(theirs)
    names = [name for name in info["features"] if name not in ("index", "next.done")]
    for at in range(0, len(theirs), step):
        row, item = data[at], theirs[at]
        for name in names:
            found, expected = row[tuple(name.split("."))], item[name]
            if info["features"][name]["dtype"] in ("video", "image"):
                found = found.permute(2, 0, 1).float() / 255
            assert found.dtype == expected.dtype, name
            assert torch.equal(found.reshape(expected.shape), expected), (at, name)
        if "next.done" in info["features"]:
            assert bool(row["next", "terminated"]) == bool(item["next.done"])
        assert (
            data.published.manifest.report["about"]["tasks"][str(int(row["task_index"]))]
            == (item["task"])
        )


@pytest.mark.parametrize("layout", [LEROBOT, LEROBOT_PIXELS], ids=lambda layout: layout.video)
@pytest.mark.parametrize("kind", ["videos", "images", "ours"])
def test_items_of_recorded_sets(lerobot: Any, kind: str, layout: Any, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    if kind == "ours":
        make_lerobot(folder, [5, 7, 6], cameras=["top", "wrist"])
    else:
        record(lerobot, folder, use_videos=kind == "videos")
    assert [found.text for found in validate(folder) if not found.ok] == []
    data = convert(folder, layout, tmp_path / "data")
    theirs = lerobot.LeRobotDataset("me/made", root=folder)
    check_items(data, theirs, json.loads((folder / "meta/info.json").read_text()))


def test_windows_are_those_of_delta_timestamps(lerobot: Any, tmp_path: Path) -> None:
    make_lerobot(tmp_path / "set", [5, 7, 1, 6], cameras=["top"])
    wanted = {
        "observation.state": [-0.1, 0.0],
        "observation.images.top": [0.0, -0.2],
        "action": [step / 10 for step in range(4)],
        "timestamp": [-0.4],
    }
    theirs = lerobot.LeRobotDataset("me/made", root=tmp_path / "set", delta_timestamps=wanted)
    convert(tmp_path / "set", LEROBOT, tmp_path / "data")
    sampler, unit = SamplerWithoutReplacement(shuffle=False), Windows(wanted, "seconds")
    data = CorpusExperienceReplay(tmp_path / "data", 19, sampler=sampler, sample_unit=unit)
    for row, item in zip(data.sample(), theirs, strict=True):
        for name in wanted:
            key = tuple(name.split("."))
            found, expected = row[key], item[name]
            if name == "observation.images.top":
                found = found.permute(0, 3, 1, 2).float() / 255
            assert torch.equal(found.reshape(expected.shape), expected), name
            assert torch.equal(row[(*key[:-1], f"{key[-1]}_is_pad")], item[f"{name}_is_pad"])


def test_repaired_sets_open_in_lerobot(lerobot: Any, tmp_path: Path) -> None:
    record(lerobot, tmp_path / "set")
    info = tmp_path / "set/meta/info.json"
    said = json.loads(info.read_text())
    info.write_text(json.dumps({**said, "total_frames": 3, "total_episodes": 1}))
    assert repair(tmp_path / "set")
    theirs = lerobot.LeRobotDataset("me/made", root=tmp_path / "set")
    assert (theirs.num_frames, theirs.num_episodes) == (17, 3)
    check_items(convert(tmp_path / "set", LEROBOT, tmp_path / "data"), theirs, said)


@pytest.mark.filterwarnings("ignore:.*V74:UserWarning")  # of statistics that LeRobot wrote
def test_converted_real_set(lerobot: Any, tmp_path: Path) -> None:
    """LeRobot's converter makes version 3.0 of the real set, whose episodes must be the same."""
    if not REAL.is_dir():
        pytest.skip(f"sample folder {REAL} not present")
    from lerobot.datasets.v30 import convert_dataset_v21_to_v30 as converter

    # A whole set of the two episodes that have a video, with numbers from 0 on.
    old = tmp_path / "me/old"
    real(old)
    first_version = convert(old, LEROBOT, tmp_path / "v21")
    rows = first_version[torch.arange(0, 736, 9)]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("snapshot_download", "HfApi"):
            patch.setattr(converter, name, lambda *_, **__: None, raising=False)
        converter.convert_dataset("me/old", root=tmp_path, push_to_hub=False)
    theirs = lerobot.LeRobotDataset("me/old", root=old)
    data = convert(old, LEROBOT, tmp_path / "v30")
    said = json.loads((old / "meta/info.json").read_text())
    assert said["codebase_version"] == "v3.0"
    assert (rows.exclude("seed") == data[torch.arange(0, 736, 9)].exclude("seed")).all()
    check_items(data, theirs, said, step=53)


@pytest.mark.parametrize("video", [False, True])
def test_an_export_of_replaykit_has_equal_items(video, lerobot, tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(100))
    random = np.random.default_rng(0)
    for length in LENGTHS:
        rb.extend(episode(length, random))
    tasks = ["push", "pull", "push"]
    folder = to_lerobot(rb, tmp_path / "set", fps=10, task=tasks, video=video)
    dataset = lerobot.LeRobotDataset("me/set", root=folder)
    rows = rb[:]
    assert (len(dataset), dataset.num_episodes, dataset.fps) == (len(rows), 3, 10)
    number = np.repeat(np.arange(3), LENGTHS)
    for at, row in enumerate(rows):
        item = dataset[at]
        assert item["task"] == tasks[number[at]]
        assert item["episode_index"] == number[at]
        for name in ("observation.state", "observation.grid", "action"):
            assert item[name].equal(row[tuple(name.split("."))])
        for name in ("reward", "done", "terminated", "truncated", "success"):
            assert item[f"next.{name}"] == row["next", name]
        for name, order in (("top", (2, 0, 1)), ("low", (0, 1, 2))):
            found = item[f"observation.images.{name}"]
            wanted = row["observation", "images", name].permute(*order) / 255
            assert found.shape == wanted.shape
            assert video or found.equal(wanted)
    windows = {"observation.state": [-0.1, 0.0], "action": [step / 10 for step in range(4)]}
    item = lerobot.LeRobotDataset("me/set", root=folder, delta_timestamps=windows)[8]
    assert item["action_is_pad"].tolist() == [False, True, True, True]
    assert item["observation.state"].equal(rows["observation", "state"][7:9])
    channels = rows["observation", "images", "top"].double().flatten(0, 2) / 255
    mean = dataset.meta.stats["observation.images.top"]["mean"]
    assert np.allclose(mean.reshape(3), channels.mean(0))
    assert lerobot.aggregate_stats([dataset.meta.stats])["action"]["count"] == [len(rows)]
