"""Exports to LeRobotDataset v3, RLDS and Zarr, read by pyarrow, Pillow, zarr and replaykit."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from replaykit import LazyTensorStorage, ReplayBuffer, transition
from replaykit.adapters import to_lerobot, to_rlds, to_robomimic, to_zarr
from replaykit.datasets import convert
from replaykit.datasets.families import LEROBOT, ZARR, LeRobotLayout
from replaykit.errors import SchemaError
from tests.datasets.families.test_rlds import example, nested, records, tensor
from tests.support.refusals import refuses

zarr = pytest.importorskip("zarr", reason="zarr 3 needs Python 3.11")

LENGTHS = (9, 1, 14)
CALLS = {"lerobot": lambda *a, **k: to_lerobot(*a, fps=10, **k), "zarr": to_zarr}


def episode(length: int, random: np.random.Generator, *, side: int = 8) -> TensorDict:
    def some(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal((length + 1, *shape)).astype(np.float32))

    last = torch.arange(length) == length - 1
    pixels = random.integers(0, 256, (2, length + 1, side, side, 3), dtype=np.uint8)
    parts = {
        "state": some(3),
        "grid": some(2, 3).double(),
        "images": {"top": torch.from_numpy(pixels[0]), "low": torch.from_numpy(pixels[1])},
    }
    parts["images"]["low"] = parts["images"]["low"].permute(0, 3, 1, 2).contiguous()
    whole = TensorDict(parts, [length + 1])
    rows = transition(
        whole[:-1], some(2)[:-1], some()[:-1], whole[1:], last & (length > 5), last & (length <= 5),
        batch_size=length,
    )  # fmt: skip
    rows["next", "success"] = last.unsqueeze(1)
    return rows


@pytest.fixture
def rb() -> ReplayBuffer[Any, Any, Any, Any]:
    random = np.random.default_rng(0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    for length in LENGTHS:
        buffer.extend(episode(length, random))
    return buffer


def expected(rb: ReplayBuffer[Any, Any, Any, Any]) -> dict[tuple[str, ...], np.ndarray[Any, Any]]:
    """Return the columns that both targets store, with images as ``[N, H, W, 3]``."""
    rows = rb[:]
    low = rows["observation", "images", "low"].permute(0, 2, 3, 1)
    return {
        ("observation", "state"): rows["observation", "state"].numpy(),
        ("observation", "grid"): rows["observation", "grid"].numpy(),
        ("observation", "images", "top"): rows["observation", "images", "top"].numpy(),
        ("observation", "images", "low"): low.numpy(),
        ("action",): rows["action"].numpy(),
        **{
            ("next", name): rows["next", name].numpy().reshape(-1)
            for name in ("reward", "success", "terminated", "truncated")
        },
    }


def same(found: Any, wanted: np.ndarray[Any, Any]) -> bool:
    found = np.asarray(found)
    return (found.dtype, found.shape, found.tobytes()) == (
        wanted.dtype, wanted.shape, np.ascontiguousarray(wanted).tobytes(),
    )  # fmt: skip


def read_parquet(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read all data files as lists of Python, and return arrays of their dtypes."""
    info = json.loads((folder / "meta/info.json").read_text())
    table = pa.concat_tables(pq.read_table(f) for f in sorted(folder.glob("data/*/*.parquet")))
    found = {}
    for name in table.column_names:
        values = table[name].to_pylist()
        if info["features"][name]["dtype"] == "image":
            values = [np.asarray(Image.open(io.BytesIO(each["bytes"]))) for each in values]
            found[name] = np.stack(values)
        else:
            found[name] = np.array(values, info["features"][name]["dtype"])
    return found


def test_lerobot_files_hold_the_rows(rb, tmp_path):
    folder = to_lerobot(rb, tmp_path / "a", fps=20, task=["x", "y", "x"], robot_type="arm")
    found = read_parquet(folder)
    for key, wanted in expected(rb).items():
        assert same(found.pop(".".join(key)), wanted), key
    steps = np.concatenate([np.arange(length) for length in LENGTHS])
    assert same(found.pop("timestamp"), (steps / 20).astype(np.float32))
    assert same(found.pop("frame_index"), steps)
    assert same(found.pop("episode_index"), np.repeat(np.arange(3), LENGTHS))
    assert same(found.pop("index"), np.arange(24))
    assert same(found.pop("task_index"), np.repeat([0, 1, 0], LENGTHS))
    assert same(found.pop("next.done"), rb[:]["next", "done"].numpy().reshape(-1))
    assert not found
    info = json.loads((folder / "meta/info.json").read_text())
    assert info["features"]["observation.grid"]["shape"] == [2, 3]
    assert info["features"]["observation.images.low"] == {
        "dtype": "image", "shape": [8, 8, 3], "names": ["height", "width", "channels"],
    }  # fmt: skip
    totals = {"total_episodes": 3, "total_frames": 24, "total_tasks": 2, "fps": 20}
    assert {**info, **totals, "robot_type": "arm", "splits": {"train": "0:3"}} == info
    tasks = pq.read_table(folder / "meta/tasks.parquet")
    about = json.loads(tasks.schema.metadata[b"pandas"])
    assert tasks["task_index"].to_pylist() == [0, 1]
    assert tasks[about["index_columns"][0]].to_pylist() == ["x", "y"]


def test_lerobot_statistics_are_exact(rb, tmp_path):
    folder = to_lerobot(rb, tmp_path / "a", fps=20)
    values = read_parquet(folder)
    rows = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    stops = np.cumsum(LENGTHS).tolist()
    parts = [(json.loads((folder / "meta/stats.json").read_text()), slice(None))]
    for row, start, stop in zip(rows, [0, *stops], stops, strict=False):
        assert (row["dataset_from_index"], row["dataset_to_index"]) == (start, stop)
        stats: dict[str, Any] = {}
        for name, value in row.items():
            if name.startswith("stats/"):
                stats.setdefault(name.split("/")[1], {})[name.split("/")[2]] = value
        parts.append((stats, slice(start, stop)))
    for stats, part in parts:
        assert stats.keys() == values.keys()
        for name, said in stats.items():
            of = values[name][part].astype(np.float64)
            assert said["count"] == [len(of)]
            if of.ndim == 4:
                of, shape = of.reshape(-1, 3) / 255, (3, 1, 1)
            else:
                shape = of.shape[1:] or (1,)
            wanted = {"min": of.min(0), "max": of.max(0), "mean": of.mean(0), "std": of.std(0)}
            for percent in (1, 10, 50, 90, 99):
                wanted[f"q{percent:02d}"] = np.percentile(of, percent, axis=0)
            for kind, value in wanted.items():
                near = pytest.approx(value.reshape(shape), abs=1e-12, rel=1e-12)
                assert np.array(said[kind]) == near, (name, kind)


def test_large_lerobot_sets_have_several_files(rb, tmp_path, monkeypatch):
    monkeypatch.setattr("replaykit.adapters.lerobot_export._MB", 0)
    folder = to_lerobot(rb, tmp_path / "a", fps=20)
    assert len(list(folder.glob("data/chunk-000/*"))) == 3
    assert same(read_parquet(folder)["action"], rb[:]["action"].numpy())
    data = convert(folder, LEROBOT, tmp_path / "b")
    assert data[:]["action"].equal(rb[:]["action"])


def test_videos_of_lerobot_are_lossy_and_in_time(rb, tmp_path):
    folder = to_lerobot(rb, tmp_path / "a", fps=10, video=True)
    data = convert(folder, LeRobotLayout(video="pixels"), tmp_path / "b")
    assert data[:]["observation", "images", "top"].shape == (24, 8, 8, 3)
    assert data[:]["observation", "state"].equal(rb[:]["observation", "state"])
    for odd, message in ((7, "even sides"), (6, None)):
        buffer = ReplayBuffer(storage=LazyTensorStorage(100))
        rows = episode(6, np.random.default_rng(0), side=odd)
        grey = (torch.arange(7) * 40).view(-1, 1, 1, 1).to(torch.uint8)
        for root, part in (((), grey[:-1]), (("next",), grey[1:])):
            image = part.expand(6, odd, odd, 3).contiguous()
            rows[(*root, "observation", "images", "top")] = image
            rows[(*root, "observation", "images", "low")] = image.permute(0, 3, 1, 2)
        buffer.extend(rows)
        target = tmp_path / f"{odd}"
        if message:
            refuses(SchemaError, message, to_lerobot, buffer, target, fps=10, video=True)
            assert not target.exists()
            continue
        to_lerobot(buffer, target, fps=10, video=True)
        found = convert(target, LeRobotLayout(video="pixels"), tmp_path / "c")[:]
        near = found["observation", "images", "top"].int() - rows["observation", "images", "top"]
        assert near.abs().max() < 12  # frames are 40 levels apart, so none is another one


def arrays(store: Any) -> dict[str, Any]:
    members = zarr.open_group(store, mode="r")["data"].members(max_depth=None)
    return {name: each for name, each in members if isinstance(each, zarr.Array)}


@pytest.mark.parametrize("name", ["a.zarr", "a.zarr.zip"])
def test_zarr_arrays_hold_the_rows(name, rb, tmp_path):
    path = to_zarr(rb, tmp_path / name)
    store = zarr.storage.ZipStore(path, mode="r") if path.suffix == ".zip" else path
    group = zarr.open_group(store, mode="r")
    assert group["meta/episode_ends"][:].tolist() == [9, 10, 24]
    data = arrays(store)
    for key, wanted in expected(rb).items():
        name = "/".join(key if key == ("action",) else key[1:])
        assert same(data.pop(name)[:], wanted), key
    assert not data
    assert group["data/images/top"].chunks == (1, 8, 8, 3)


def test_rows_in_many_chunks_are_written_once(rb, tmp_path, monkeypatch):
    monkeypatch.setattr("replaykit.adapters.zarr_export._CHUNK_BYTES", 60)
    store = zarr.storage.ZipStore(to_zarr(rb, tmp_path / "a.zarr.zip"), mode="r")
    group = zarr.open_group(store, mode="r")
    assert group["data/state"].chunks == (5, 3)
    assert same(group["data/state"][:], rb[:]["observation", "state"].numpy())


@pytest.mark.parametrize(("form", "layout"), [("lerobot", LEROBOT), ("zarr", ZARR)])
def test_round_trips_keep_every_item(form, layout, rb, tmp_path):
    """Export, convert, export again: both sets of files have the same values."""
    options = {"task": ["pull", "push", "pull"]} if form == "lerobot" else {}
    first = CALLS[form](rb, tmp_path / "a", **options)
    data = convert(first, layout, tmp_path / "b")
    again = CALLS[form](data, tmp_path / "c")
    if form == "lerobot":
        one, two = read_parquet(first), read_parquet(again)
        assert one.keys() == two.keys()
        assert [name for name in one if not same(two[name], one[name])] == []
        files = [path / "meta/tasks.parquet" for path in (first, again)]
        assert pq.read_table(files[0]).equals(pq.read_table(files[1]))
    else:
        one, two = arrays(first), arrays(again)
        assert one.keys() == two.keys()
        assert [name for name in one if not same(two[name][:], one[name][:])] == []


def test_nested_keys_of_any_name_pass_through_zarr(rb, tmp_path):
    names = ("reward", "terminated", "observation", "a.b", "a\nb")
    groups = (("action", "arm"), ("truncated", "x"), ("success", "y", "z"), ("a", "b", "c"))
    keys = [*(("observation", name) for name in names), *(("observation", *g) for g in groups)]
    keys += [("action", "arm"), ("action", "hand", "left")]
    rows = rb[:].select(("next", "done"), ("next", "terminated"))
    for number, key in enumerate(keys):
        rows[key] = torch.arange(24.0).view(24, 1) + 100 * number
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    buffer.extend(rows)
    data = convert(to_zarr(buffer, tmp_path / "a"), ZARR, tmp_path / "b")[:]
    assert {key: data[key].tolist() for key in keys} == {key: rows[key].tolist() for key in keys}


@pytest.mark.parametrize(
    ("key", "names"),
    [("state", ("observation.state", "state")), ("image", ("observation.image", "img"))],
)
def test_single_observations_have_the_usual_names(key, names, rb, tmp_path):
    rows = rb[:]
    part = rows["observation", "state"] if key == "state" else rows["observation", "images", "top"]
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    bare = rows.select("action", ("next", "done"), ("next", "terminated"))
    bare["observation"] = part
    buffer.extend(bare)  # without next observations and rewards
    found = read_parquet(to_lerobot(buffer, tmp_path / "a", fps=1))
    assert same(found[names[0]], part.numpy())
    assert "next.reward" not in found
    data = zarr.open_group(to_zarr(buffer, tmp_path / "b"), mode="r")["data"]
    assert same(data[names[1]][:], part.numpy())


@pytest.mark.parametrize("form", CALLS)
def test_bad_data_is_refused(form, rb, tmp_path):
    target = CALLS[form](rb, tmp_path / "a")
    rows = rb[:]
    rows["next", "observation", "state"][3] += 1
    other = ReplayBuffer(storage=LazyTensorStorage(100))
    other.extend(rows)
    with pytest.raises(ValueError, match=r"'next', 'observation', 'state'\): in episode 0"):
        CALLS[form](other, target, overwrite=True)
    other = ReplayBuffer(storage=LazyTensorStorage(100))
    rows = rb[:].exclude(("next", "observation"))
    rows["observation", "a.b"] = rows["observation", "a/b"] = rows["action"]
    other.extend(rows)
    with pytest.raises(SchemaError, match=r"without '/'.*'(observation.)?a/b'"):
        CALLS[form](other, target, overwrite=True)
    for wrong in ({"fps": 0}, {"fps": 1.5}, {"fps": 1, "task": ["a"]}):
        with pytest.raises(ValueError, match=r"fps as an int of at least 1|each of 3 episodes"):
            to_lerobot(rb, target, overwrite=True, **wrong)
    assert sorted(os.listdir(tmp_path)) == ["a"]


@pytest.mark.parametrize(
    ("form", "name", "like", "says"),
    [
        ("zarr", ".zgroup", torch.zeros(1), "does not begin with"),
        ("zarr", "a\\b", torch.zeros(1), "without a backslash"),
        ("robomimic", ".", torch.zeros(1), "does not begin with"),
        ("lerobot", "a\0b", torch.zeros(1), "expected a name"),
        ("lerobot", "a", torch.zeros(1, 0), "at least one value"),
        ("lerobot", "a", torch.zeros(1, dtype=torch.complex64), "real numbers"),
        *((form, "a", torch.zeros(1).bfloat16(), "NumPy") for form in ("zarr", "robomimic")),
    ],
)
def test_columns_that_a_target_cannot_keep_are_refused(form, name, like, says, rb, tmp_path):
    rows = rb[:].exclude(("next", "success"))
    for root in ((), ("next",)):
        rows[(*root, "observation", name)] = like.expand(24, *like.shape).contiguous()
    other = ReplayBuffer(storage=LazyTensorStorage(100))
    other.extend(rows)
    with pytest.raises(SchemaError, match=rf"'observation', .*{says}"):
        {**CALLS, "robomimic": to_robomimic}[form](other, tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_rlds_has_the_bytes_of_an_independent_encoder(tmp_path):
    x, counts = torch.arange(8.0).reshape(4, 2), torch.tensor([-(2**40), 0, 127, 2**62])
    before, after = ({"x": x[at], "n": counts[at]} for at in (slice(3), slice(1, 4)))
    last = torch.tensor([False, False, True])
    action, reward = torch.tensor([[0.5], [2], [3]]).double(), torch.tensor([1.0, 2, 3])
    rb = ReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(transition(before, action, reward, after, last, ~last & last, batch_size=3))
    path = to_rlds(rb, tmp_path / "my-set" / "2.0.1")
    columns = {
        "action": [struct.pack("<d", each) for each in (0.5, 2, 3, 0)],
        "discount": np.array([1, 1, 0, 0], np.float32),
        "is_first": np.array([1, 0, 0, 0]),
        "is_last": np.array([0, 0, 0, 1]),
        "is_terminal": np.array([0, 0, 0, 1]),
        "observation/n": counts.numpy(),
        "observation/x": x.numpy(),
        "reward": np.array([1, 2, 3, 0], np.float32),
    }
    record = records(example({f"steps/{name}": values for name, values in columns.items()}))
    (shard,) = path.glob("my_set-train.tfrecord-00000-of-00001")
    assert shard.read_bytes() == record
    info = json.loads((path / "dataset_info.json").read_text())
    assert (info["name"], info["version"]) == ("my_set", "2.0.1")
    said = json.loads((path / "features.json").read_text())["featuresDict"]["features"]["steps"]
    parts = said["sequence"]["feature"]["featuresDict"]["features"]
    observed = nested(n=tensor("int64", 1), x=tensor("float32", 2))
    assert (parts["observation"], parts["action"]) == (
        observed, tensor("float64", 1, encoding="bytes"),
    )  # fmt: skip
