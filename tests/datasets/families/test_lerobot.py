"""LeRobot's data sets: each item is that of the files, and files that are wrong are refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch

from replaykit import (
    ImageScale,
    LeRobotExperienceReplay,
    SliceSampler,
    Windows,
)
from replaykit.datasets import Policies, convert, load_dataset
from replaykit.datasets import open as open_dataset
from replaykit.datasets.encoded_frames import FrameFiles, video_index
from replaykit.datasets.families import (
    LEROBOT,
    LEROBOT_JPEG,
    LEROBOT_PIXELS,
    LeRobotLayout,
)
from replaykit.errors import CorpusError
from replaykit.inspection import opened, repair, validate
from replaykit.testing import make_lerobot
from replaykit.testing.lerobot_sets import write_video
from replaykit_command import main
from tests.datasets.converted import content
from tests.datasets.families.lerobot_reader import (
    EPISODES,
    edit_json,
    edit_table,
    frames_of,
    items_of,
    mutate,
)
from tests.datasets.families.test_seeded_faults import KINDS, REAL, Change, of_episode

VERSIONS = ("v2.1", "v3.0")
LENGTHS = [5, 7, 1, 6]
TOP = ("observation", "images", "top")
END = "dataset_to_index"


@pytest.fixture(scope="module", params=VERSIONS)
def sound(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set without faults, with a reward, ends and two cameras."""
    folder: Path = tmp_path_factory.mktemp("sound") / "set"
    total = sum(LENGTHS)
    ends = np.cumsum(LENGTHS) - 1
    more = {
        "next.reward": np.arange(total, dtype=np.float32),
        "next.done": np.isin(np.arange(total), ends[::2]),
        "observation.force.left": np.ones((total, 2, 3), np.float64),
    }
    make_lerobot(folder, LENGTHS, version=request.param, cameras=["top", "wrist"], more=more)
    return folder


@pytest.fixture
def copied(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def check_items(data: Any, items: dict[str, np.ndarray], *, exact: bool = True) -> None:
    """Compare all rows with items by LeRobot's names."""
    rows = data[:]
    assert len(data) == len(items["index"])
    for name, expected in items.items():
        if name in ("index", "next.done"):
            continue
        found = rows[tuple(name.split("."))].numpy()
        found = found.reshape(expected.shape)
        if exact or "images" not in name:
            assert np.array_equal(found, expected.astype(found.dtype)), name
        else:
            assert np.abs(found.astype(int) - expected).mean() < 8, name


@pytest.mark.parametrize("layout", [LEROBOT, LEROBOT_PIXELS, LEROBOT_JPEG], ids=lambda x: x.video)
def test_each_item_is_that_of_the_files(sound: Path, layout: LeRobotLayout, tmp_path: Path) -> None:
    data = convert(sound, layout, tmp_path / "data")
    items = items_of(sound)
    check_items(data, items, exact=layout.video != "jpeg")
    rows, ends = data[:]["next"], np.cumsum(LENGTHS) - 1
    assert np.flatnonzero(rows["terminated"].numpy()).tolist() == ends[::2].tolist()
    assert np.flatnonzero(rows["truncated"].numpy()).tolist() == ends[1::2].tolist()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    assert torch.equal(data[order][TOP], data[:][TOP][order])
    assert all(found.ok for found in validate(tmp_path / "data"))

    assert ("observation", "images", "top") in data.storage.require().schema.leaves
    keys = set(data.statistics().keys(True))
    assert (TOP in keys) == (layout.video == "pixels")


def test_a_data_set_stays_whole_without_its_source(copied: Path, tmp_path: Path) -> None:
    convert(copied, LEROBOT, tmp_path / "data")
    items = items_of(copied)
    shutil.rmtree(copied)
    check_items(open_dataset(tmp_path / "data"), items)
    file = next((tmp_path / "data").rglob("*.attached"))
    file.unlink()
    with pytest.raises(RuntimeError, match=f"{file.name} is missing"):
        open_dataset(tmp_path / "data")


def test_every_class_and_loader_decodes(sound: Path, tmp_path: Path) -> None:
    items = items_of(sound)["observation.images.top"]
    data = LeRobotExperienceReplay(
        "me/set",
        4,
        source=sound,
        root=tmp_path,
        sampler=SliceSampler(slice_len=2),
        transform=ImageScale(0, 1, keys=[TOP]),
        prefetch=2,
    )
    assert data.tasks == ["push the block", "pull the block"]
    for batch in (data.sample(), *data.dataloader(workers=2, steps=4, seed=1)):
        expected = items[batch["index"].numpy()] / np.float32(255)
        assert np.allclose(batch[TOP].numpy(), expected, atol=1e-6)
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again[3:9][TOP], data[3:9][TOP])
    windows = Windows({TOP: [-0.1, 0.0], ("action",): [0.0, 0.1]}, unit="seconds")
    batch = open_dataset(tmp_path / "me/set", 6, transform=windows).sample()
    at = batch["index"].numpy()
    starts = np.repeat(np.cumsum([0, *LENGTHS[:-1]]), LENGTHS)[at]
    assert np.array_equal(batch[TOP].numpy(), items[np.stack([np.maximum(at - 1, starts), at], 1)])
    split = LeRobotExperienceReplay("me/set", 2, source=sound, root=tmp_path, split_trajs=True)
    rows = split[:]
    assert np.array_equal(rows[TOP][rows["mask"]].numpy(), items)
    assert not rows[TOP][~rows["mask"]].any()
    stored = split.preprocess(lambda row: row.select(TOP), num_workers=0, dest=tmp_path / "made")
    assert torch.equal(stored[:][TOP], rows[TOP])


def test_threads_share_a_bounded_number_of_videos(tmp_path: Path) -> None:
    make_lerobot(tmp_path / "set", [2] * 20, version="v2.1")
    data = convert(tmp_path / "set", LEROBOT, tmp_path / "data")
    expected = data[:][TOP]
    orders = [torch.randperm(40, generator=torch.Generator().manual_seed(n)) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for order, batch in zip(orders, pool.map(data.__getitem__, orders), strict=True):
            assert torch.equal(batch[TOP], expected[order])
    links = (os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
             if os.path.islink(f"/proc/self/fd/{name}"))  # fmt: skip
    assert sum(str(tmp_path) in link and ".attached" in link for link in links) <= 16


def test_images_of_parquet_files_stay_as_they_are(tmp_path: Path) -> None:
    import io

    from PIL import Image

    folder, key = tmp_path / "set", "observation.images.hand"
    make_lerobot(folder, [3, 2], cameras=[])
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 6, 3), np.uint8)
    path = next((folder / "data").rglob("*.parquet"))
    encoded = []
    for each in pixels:
        file = io.BytesIO()
        Image.fromarray(each).save(file, "PNG")
        encoded.append({"bytes": file.getvalue(), "path": "x.png"})
    parquet.write_table(parquet.read_table(path).append_column(key, pyarrow.array(encoded)), path)
    facts = {"dtype": "image", "shape": [8, 6, 3], "names": ["height", "width", "channels"]}
    edit_json(folder / "meta/info.json", lambda info: info["features"].update({key: facts}))
    for layout in (LEROBOT, LEROBOT_PIXELS):
        data = convert(folder, layout, tmp_path / layout.name)
        assert np.array_equal(data[:][tuple(key.split("."))].numpy(), pixels)
        assert all(found.ok for found in validate(tmp_path / layout.name))
    sound = encoded[3]["bytes"]
    depth = io.BytesIO()
    Image.fromarray(np.zeros((8, 6), np.uint16)).save(depth, "PNG")
    for wrong, layout, rule in (
        (sound[:50], LEROBOT_PIXELS, "V03"),
        (sound[:20], LEROBOT, "V03"),
        (depth.getvalue(), LEROBOT, r"I;16 \[8, 6, 1\].*V10"),
    ):
        encoded[3]["bytes"] = wrong
        edit_table(path, lambda rows: [row.update({key: new}) for row, new in
                                       zip(rows, encoded, strict=True)] and None)  # fmt: skip
        with pytest.raises(CorpusError, match=rf"episode_1.*record 0.*{rule}"):
            convert(folder, layout, tmp_path / "bad")


CODECS = {
    "libx264": {"x264-params": "open-gop=1:bframes=3:keyint=8"},
    "mpeg4": {"g": "12", "bf": "2"},
    "libvpx-vp9": {"g": "16"},
}


@pytest.mark.parametrize("codec", CODECS)
def test_frames_of_any_codec_are_exact_in_any_order(codec: str, tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options=CODECS[codec])
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.codec_context.thread_count = 1
        for at in range(40):
            pixels = np.full((32, 48, 3), 6 * at, np.uint8)
            pixels[at % 32] = 255
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", threads=1)))
        container.mux(stream.encode(None))
    _, expected = frames_of(path)
    times, files = video_index(path).times, FrameFiles([path])
    rng = np.random.default_rng(0)
    for _ in range(40):
        wanted = np.sort(rng.choice(40, rng.integers(1, 6), replace=False))
        found = np.empty((len(wanted), 32, 48, 3), np.uint8)
        files.read_videos(np.stack([np.ones_like(wanted), times[wanted], 0 * wanted], 1), found)
        assert np.array_equal(found, expected[wanted])


@pytest.mark.parametrize("layout", [LEROBOT, LEROBOT_PIXELS], ids=lambda x: x.video)
def test_real_data_set(layout: LeRobotLayout, tmp_path: Path) -> None:
    if not REAL.is_dir():
        pytest.skip(f"sample folder {REAL} not present")
    with pytest.raises(CorpusError, match=r"episode_000000\.parquet is missing.*\[V71\]"):
        convert(REAL, layout, tmp_path / "data")
    assert not (tmp_path / "data").exists()
    policies = Policies(on_invalid="skip")
    with pytest.warns(UserWarning, match=r"97, first .*episode_000003.mp4 is missing.*\[V73\]"):
        data = convert(REAL, layout, tmp_path / "data", policies=policies)
    assert data.episode_table["episode"].tolist() == [1, 2]
    if layout is LEROBOT:
        check_items(data, items_of(REAL, episodes=(1, 2)))
    else:
        name = "videos/chunk-000/observation.images.cam_high/episode_000002.mp4"
        _, pixels = frames_of(REAL / name)
        rows = data.published.columns["observation", "images", "cam_high"][393:]
        assert np.array_equal(rows.numpy(), pixels)


@pytest.mark.parametrize("damage", ["none", "a bad episode", "a changed row", "a cut file"])
@pytest.mark.parametrize("layout", [LEROBOT_PIXELS, LEROBOT_JPEG], ids=lambda x: x.video)
@pytest.mark.filterwarnings("ignore:.*skipped")
def test_interrupted_conversions_decode_no_stored_episode_again(
    layout: LeRobotLayout, damage: str, copied: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    decoded = 0
    last = 1_000

    def read(self: Any, *arguments: Any, inner: Any = FrameFiles.read_videos) -> None:
        nonlocal decoded
        if decoded == last:
            raise KeyboardInterrupt
        decoded += 1
        inner(self, *arguments)

    def run(name: str) -> None:
        convert(copied, layout, tmp_path / name, policies=Policies(on_invalid="skip"))

    monkeypatch.setattr(FrameFiles, "read_videos", read)
    if damage == "a bad episode":  # all rows are written again without it
        edit_table(sorted(copied.glob("data/*/*.parquet"))[-1],
                   lambda rows: rows[-1].update(action=[np.nan, 0.0]))  # fmt: skip
    run("whole")
    total, decoded = decoded, 0
    for left in (5, 2):
        last = total - left
        with pytest.raises(KeyboardInterrupt):
            run("data")
    (draft,) = tmp_path.glob(".data.tmp-*")
    files = sorted((*draft.rglob("top.memmap"), *draft.rglob("*.attached")))
    if damage == "a changed row":
        files[-1].write_bytes(bytes([files[-1].read_bytes()[0] ^ 1]) + files[-1].read_bytes()[1:])
    elif damage == "a cut file":
        os.truncate(files[0], 1)
    last = 1_000
    before, decoded = decoded, 0
    run("data")
    assert (decoded == total - before) == (damage in ("none", "a bad episode"))
    assert content(tmp_path / "data") == content(tmp_path / "whole")


def test_hub(sound: Path, tmp_path: Path, fetched: Any) -> None:
    data = fetched("lerobot:me/set", "me/set", sound)
    check_items(data, items_of(sound))
    assert "README.md" not in str(data.published.manifest.source)
    with pytest.raises(FileNotFoundError, match="names no repository"):
        load_dataset("lerobot:set", 4, root=tmp_path)


# -- faults ---------------------------------------------------------------------------------------

Fault = Callable[[Path], object]


def seeded(kind: str | Change) -> Fault:
    """Return a fault of a kind at a random place."""
    change = KINDS[kind][1] if isinstance(kind, str) else kind
    return lambda folder: change(random.Random(0), folder)


def of_frames(name: str, value: Any, file: int = -1) -> Fault:
    """Return a fault that sets a value in the second row of a Parquet file."""
    return lambda folder: edit_table(
        sorted((folder / "data").rglob("*.parquet"))[file],
        lambda rows: rows[1].update({name: value}),
    )


def of_info(change: Callable[[Any], Any]) -> Fault:
    return lambda folder: edit_json(folder / "meta/info.json", change)


def of_feature(name: str, **facts: Any) -> Fault:
    return of_info(lambda info: info["features"][name].update(facts))


def of_video(change: Callable[[Path], Any]) -> Fault:
    return lambda folder: change(sorted((folder / "videos").rglob("*.mp4"))[0])


def longer_video(path: Path) -> None:
    write_video(path, len(frames_of(path)[0]) + 1, 10, 0)


def lost_episodes(folder: Path) -> None:
    path = folder / "meta/episodes.jsonl"
    (path if path.exists() else folder / EPISODES).unlink()


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "length": (seeded("length"), "V70", r"\d"),
    "huge length": (
        seeded(of_episode(lambda rng, each: each.update(length=10**13))), "V70", "10000000000000"
    ),
    "huge width": (
        of_info(lambda info: info.update(data_path="{episode_index:99999}{file_index:99999}")),
        "V04", "expected the fields",
    ),
    "splits": (of_info(lambda info: info.update(splits=[1, 2])), "V04", "splits is"),
    "object": (of_feature("action", dtype="O"), "V04", "no dtype object"),
    "channels": (of_feature(".".join(TOP), shape=[32, 48, 4]), "V04", "4 channels"),
    "deep JSON": (
        lambda folder: (folder / "meta/info.json").write_text("[" * 99_999), "V03", "recursion"
    ),
    "missing row": (seeded("lost frame"), "V70", "parquet"),
    "missing data": (seeded("lost data"), "V71", "missing"),
    "frame_index": (seeded("frame_index"), "V71", r"frame_index is -?\d+, expected"),
    "index": (seeded("index"), "V71", r"index is -?\d+, expected"),
    "episode_index": (seeded("episode_index"), "V71|V70", "metadata gives|lie apart|expected"),
    "timestamp": (seeded("timestamp"), "V72", r"is [+-]\d+\.\d{6} s from"),
    "NaN timestamp": (of_frames("timestamp", float("nan")), "V72", "nan"),
    "task_index": (seeded("unknown task"), "V75", r"task_index is \d"),
    "another task": (seeded("tasks"), "V75", "dance"),
    "missing video": (seeded("lost video"), "V73", "mp4"),
    "longer video": (of_video(longer_video), "V73", "frames, expected"),
    "slower video": (
        of_video(lambda path: write_video(path, len(frames_of(path)[0]), 9, 0)), "V73", "s off"
    ),
    "no video": (of_video(lambda path: path.write_bytes(b"video")), "V03", "mp4"),
    "NaN action": (seeded("NaN action"), "V20", "action, record"),
    "infinite state": (seeded("infinite state"), "V21", "observation.state, record"),
    "early end": (seeded("early end"), "V31", "next.done, record 0"),
    "missing column": (seeded("lost column"), "V10|V12", "parquet"),
    "dtype": (of_feature("action", dtype="float64"), "V10", "float64"),
    "shape": (of_feature("action", shape=[3]), "V10", r"\(2,\)"),
    "huge shape": (
        of_feature("action", shape=[10**14]), "V10", "action: one value has 400,000,000,000,000 by"
    ),
    "video shape": (of_feature(".".join(TOP), shape=[9, 9, 3]), "V10", "32 x 48"),
    "fps": (of_info(lambda info: info.update(fps=0)), "V04", "frames per second"),
    "version": (of_info(lambda info: info.update(codebase_version="v9")), "V04", "v9"),
    "no tasks": (
        lambda folder: next((folder / "meta").glob("tasks.*")).unlink(), "V05", "tasks"
    ),
    "no episodes": (lost_episodes, "V05", "meta/episodes"),
    "list of totals": (
        lambda folder: (folder / "meta/stats.json").write_text("[]"), "V04", "stats.json: .*list"
    ),
}  # fmt: skip
"""Name of a fault: how it is made, its rule, and a part of the message."""


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused_with_file_and_rule(name: str, copied: Path, tmp_path: Path) -> None:
    fault, rule, text = FAULTS[name]
    fault(copied)
    with pytest.raises(CorpusError, match=rf"(?s)({text}).*\[({rule})\]") as caught:
        convert(copied, LEROBOT, tmp_path / "data")
    assert str(copied) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir() if "lock" not in path.name) == ["copy"]
    assert any(re.search(rule, found.text) for found in validate(copied) if not found.ok)
    if rule in ("V20", "V21", "V31", "V72", "V73", "V75"):  # the fault of one episode
        with pytest.warns(UserWarning, match=rf"skipped: .*\[{rule}\]"):
            data = convert(copied, LEROBOT, tmp_path / "data", policies=Policies(on_invalid="skip"))
        lengths = data.episode_table["length"].tolist()
        assert 0 < len(lengths) < len(LENGTHS)
        assert all(found.ok for found in validate(tmp_path / "data"))


def test_one_pass_finds_the_faults_of_all_episodes(tmp_path: Path) -> None:
    make_lerobot(tmp_path / "set", [4, 3, 2, 5, 4], cameras=[], version="v2.1")
    faults = {0: ("action", "V20"), 2: ("observation.state", "V21"), 3: ("timestamp", "V72")}
    for file, (name, _) in faults.items():
        width = {"action": 2, "observation.state": 3}.get(name)
        value = [np.inf] * width if width else 9.0
        of_frames(name, value, file=file)(tmp_path / "set")
    sorted((tmp_path / "set/data").rglob("*.parquet"))[4].write_bytes(b"no")
    faults[4] = ("file", "V10")
    texts = [each.text for each in validate(tmp_path / "set") if each.check == "rules"]
    for file, (name, rule) in faults.items():
        assert sum(f"{file}.parquet" in each and rule in each for each in texts) == 1, (name, texts)
    with pytest.warns(UserWarning, match=r"skipped: .*episode_4"):
        data = convert(
            tmp_path / "set", LEROBOT, tmp_path / "data", policies=Policies(on_invalid="skip")
        )
    assert data.episode_table["episode"].tolist() == [1]


def test_wrong_statistics_are_reported(copied: Path, tmp_path: Path) -> None:
    wrong = {**json.loads((copied / "meta/stats.json").read_text())["action"], "mean": [7.0, 7.0]}
    edit_json(copied / "meta/stats.json", lambda stats: stats.update(action=wrong))
    with pytest.warns(UserWarning, match=r"mean of action is stated as 7, .*\[V74\]"):
        convert(copied, LEROBOT, tmp_path / "data")
    with pytest.raises(CorpusError, match=r"strict.*\[V74\]"):
        convert(copied, LEROBOT, tmp_path / "strict", policies=Policies(strict=True))


def test_statistics_of_wide_episodes_are_compared_in_groups(tmp_path: Path) -> None:
    wide = np.random.default_rng(0).normal(size=(60, 8192)).astype(np.float32)
    make_lerobot(
        tmp_path / "set", [10] * 6, cameras=[], more={"observation.wide": wide}, per_file=6
    )
    convert(tmp_path / "set", LEROBOT, tmp_path / "sound", policies=Policies(strict=True))

    def spoil(rows: Any) -> None:
        rows[4]["stats/observation.wide/std"][7] = 5.0

    edit_table(tmp_path / "set" / EPISODES, spoil)
    with pytest.warns(
        UserWarning, match=r"std of observation.wide is .* 5, .* episode_4\) \[V74\]"
    ):
        convert(tmp_path / "set", LEROBOT, tmp_path / "data")


@pytest.mark.parametrize(
    "faults",
    [
        [seeded("length")],
        [of_info(lambda info: info.update(total_frames=1, total_episodes=9))],
        [seeded("statistic")],
        [
            seeded(of_episode(lambda rng, each: each.update({END: 3} if END in each else {}))),
            seeded("length"),
            seeded("statistic"),
        ],
    ],
)
def test_repair_derives_metadata(faults: list[Fault], copied: Path, sound: Path) -> None:
    for fault in faults:
        fault(copied)
    assert not all(found.ok for found in validate(copied))
    assert repair(str(copied))
    assert all(found.ok for found in validate(copied))
    assert repair(copied) == []
    for path in sound.rglob("*"):
        if path.is_file() and "meta" not in path.parts:
            assert (copied / path.relative_to(sound)).read_bytes() == path.read_bytes()
    expected, found = items_of(sound), items_of(copied)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("name", ["timestamp", "missing video", "longer video", "no video"])
def test_repair_changes_nothing_if_a_fault_remains(name: str, copied: Path) -> None:
    FAULTS[name][0](copied)
    for frames in (sum(LENGTHS), 1):
        of_info(lambda info, frames=frames: info.update(total_frames=frames))(copied)
        before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
        with pytest.raises(CorpusError, match=FAULTS[name][1]):
            repair(copied)
        assert {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "name", [name for name, (_, rule, _) in FAULTS.items() if rule in ("V04", "V05")]
)
def test_repair_refuses_metadata_that_it_cannot_read(name: str, copied: Path) -> None:
    fault, rule, text = FAULTS[name]
    fault(copied)
    with pytest.raises(CorpusError, match=rf"{copied}/.*({text}).*{rule}"):
        repair(copied)


def test_a_set_of_version_2_needs_chunks_and_listed_episodes(tmp_path: Path) -> None:
    make_lerobot(tmp_path / "set", [3, 2], version="v2.1", cameras=[])
    (tmp_path / "set/meta/episodes.jsonl").write_text("")
    with pytest.raises(CorpusError, match=r"no episode with frames is listed \[V38\]"):
        repair(tmp_path / "set")
    of_info(lambda info: info.update(chunks_size=0))(tmp_path / "set")
    with pytest.raises(CorpusError, match=r"info.json: .*chunks_size is 0, expected at least 1"):
        convert(tmp_path / "set", LEROBOT, tmp_path / "data")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_list_that_lost_episodes_is_never_repaired(version: str, tmp_path: Path) -> None:
    make_lerobot(tmp_path / "set", [3, 2, 4], version=version, cameras=[], per_file=1)
    lists = "meta/episodes.jsonl" if version == "v2.1" else EPISODES
    path = tmp_path / "set" / lists
    (edit_json if version == "v2.1" else edit_table)(path, lambda rows: rows.pop())
    before = path.read_bytes()
    with pytest.raises(CorpusError, match=r"02\.parquet: the metadata lists no episode.*\[V71\]"):
        repair(tmp_path / "set")
    assert path.read_bytes() == before
    with pytest.warns(UserWarning, match=r"lists no episode of this file .*\[V71\]"):
        assert len(convert(tmp_path / "set", LEROBOT, tmp_path / "data")) == 5


def test_episodes_never_share_frames_of_a_video(tmp_path: Path) -> None:
    make_lerobot(tmp_path / "set", [5, 7, 6, 4])
    place = "videos/observation.images.top"
    edit_table(tmp_path / "set" / EPISODES, lambda rows: rows[1].update(
        {f"{place}/from_timestamp": 0.2, f"{place}/to_timestamp": 0.9}
    ))  # fmt: skip
    with pytest.raises(CorpusError, match=r"file-000.mp4: .*episodes 0 and 1 overlap.*\[V73\]"):
        convert(tmp_path / "set", LEROBOT, tmp_path / "data")
    with pytest.warns(UserWarning, match=r"V73"):
        data = convert(
            tmp_path / "set", LEROBOT, tmp_path / "data", policies=Policies(on_invalid="skip")
        )
    assert data.episode_table["episode"].tolist() == [2, 3]
    assert repair(tmp_path / "set")
    data = convert(tmp_path / "set", LEROBOT, tmp_path / "data", force=True)
    check_items(data, items_of(tmp_path / "set"))


def test_episodes_of_several_files_may_alternate(tmp_path: Path) -> None:
    make_lerobot(tmp_path / "set", [3, 2, 4], cameras=[], per_file=1)
    expected = items_of(tmp_path / "set")
    first, _, last = sorted((tmp_path / "set/data").rglob("*.parquet"))
    parquet.write_table(pyarrow.concat_tables(map(parquet.read_table, (first, last))), first)
    last.unlink()
    path = sorted((tmp_path / "set/meta/episodes").rglob("*.parquet"))[-1]
    edit_table(path, lambda rows: rows[-1].update({"data/file_index": 0}))
    check_items(convert(tmp_path / "set", LEROBOT, tmp_path / "data"), expected)


def test_texts_may_hold_any_character(tmp_path: Path) -> None:
    make_lerobot(tmp_path / "set", [3, 2], version="v2.1", cameras=[])
    for name in ("tasks", "episodes"):
        path = tmp_path / "set/meta" / f"{name}.jsonl"
        path.write_text(path.read_text().replace("push the", "poussé\u2028\x85 le"), "utf-8")
    edit_json(tmp_path / "set/meta/info.json", lambda info: info.update(total_frames=1))
    assert repair(tmp_path / "set")
    data = LeRobotExperienceReplay("a/set", 2, source=tmp_path / "set", root=tmp_path / "root")
    assert data.tasks == ["poussé\u2028\x85 le block", "pull the block"]


def test_packets_that_edits_remove_are_no_frames(tmp_path: Path) -> None:
    path, cut = tmp_path / "a.mp4", tmp_path / "cut.mp4"
    write_video(path, 12, 10, 0)
    with av.open(str(path)) as old, av.open(str(cut), "w") as new:
        source = old.streams.video[0]
        stream = new.add_stream_from_template(source)
        for packet in old.demux(source):
            if packet.dts is not None:
                packet.pts, packet.dts, packet.stream = packet.pts - 3000, packet.dts - 3000, stream
                new.mux(packet)
    np.testing.assert_allclose(video_index(cut).seconds, frames_of(cut)[0])


def test_facts_of_a_folder(sound: Path) -> None:
    with opened(sound) as (facts, _):
        assert (facts.kind, facts.rows) == ("table", sum(LENGTHS))
        assert facts.episodes is not None
        assert facts.episodes.lengths.tolist() == LENGTHS
        assert facts.about["images"] == "observation.images.top, observation.images.wrist"
        assert "push the block" in facts.about["tasks"]


# -- mutated sets ---------------------------------------------------------------------------------


MUTATIONS = [
    pytest.param(seed, marks=[pytest.mark.long] if seed >= 24 else []) for seed in range(500)
]


@pytest.mark.parametrize("seed", MUTATIONS)
def test_mutated_sets_are_refused_or_right(seed: int, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    more = {"next.reward": np.ones(9, np.float32)}
    make_lerobot(folder, [4, 3, 2], version=VERSIONS[seed % 2], more=more)
    what = mutate(folder, seed)
    data = refusal = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            data = convert(folder, LEROBOT, tmp_path / "data")
            rows = data[:]
        except (CorpusError, FileNotFoundError) as error:
            refusal = str(error)
    if refusal is not None:
        assert re.search(r"\[V\d\d\]", refusal), (what, refusal)
        assert str(tmp_path) in refusal, (what, refusal)
        try:
            right = not repair(folder) or all(found.ok for found in validate(folder))
        except (CorpusError, ValueError) as error:
            right = bool(re.search(r"\[V\d\d\]|with a LeRobot data set", str(error)))
        assert right, what
        return
    check_items(data, items_of(folder))
    assert torch.isfinite(rows["observation", "state"]).all(), what


def test_commands_convert_inspect_validate_and_repair(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> tuple[int, Any]:
        code = main([*map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, said = run("convert", copied, "--to", tmp_path / "data")
    assert (code, said["layout"], said["rows"]) == (0, "lerobot", sum(LENGTHS))
    code, said = run("convert", copied, "--to", tmp_path / "px", "--layout", "lerobot-pixels")
    assert (code, said["layout"]) == (0, "lerobot-pixels")
    (facts,) = [key for key in run("inspect", tmp_path / "data")[1]["keys"] if "top" in key["key"]]
    assert (facts["dtype"], facts["shape"]) == ("uint8", [32, 48, 3]), facts
    code, said = run("inspect", copied)
    assert (code, said["kind"], said["rows"]) == (0, "table", sum(LENGTHS))
    of_info(lambda info: info.update(total_frames=1))(copied)
    assert run("validate", copied)[0] == 1
    code, said = run("repair", copied)
    assert (code, said["changes"]) == (0, ["meta/info.json: total_frames is 19, not 1"])
    assert run("validate", copied)[0] == 0
    FAULTS["timestamp"][0](copied)
    of_info(lambda info: info.update(total_frames=1))(copied)
    code, said = run("repair", copied)
    assert (code, said["error"]["message"][-5:]) == (3, "[V72]")
