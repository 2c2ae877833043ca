"""Conversion of trials to rows, compared value by value with what h5py reads."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.publishing import verify_published
from replaykit.datasets.sources import Sources
from replaykit.testing.robohive_files import make_trial
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted, convert, quietly, write

ROBOSET = CORPORA["roboset"]
NAN_LEAVES = [
    "env_infos/proprio_dict",
    "env_infos/state/act",
    "env_infos/state/mocap_pos",
    "env_infos/state/mocap_quat",
]


@pytest.mark.pitfall("DS1")
@pytest.mark.pitfall("DS2")
@pytest.mark.parametrize("copies", [1, 2])
def test_every_value_of_the_sample_is_that_of_h5py(sample, tmp_path, copies):
    """N6: the same trial names in two files are twenty episodes, in order of the paths."""
    files = [tmp_path / f"seed{k}" / "trace.h5" for k in range(copies)]
    for file in files:
        file.parent.mkdir()
        shutil.copy(sample, file)
    with pytest.warns(UserWarning, match="left out") as caught:
        found = convert(tmp_path / "data", *reversed(files))
    (said,) = [str(each.message) for each in caught]
    assert all(leaf in said for leaf in NAN_LEAVES)
    assert ("10 episodes with the observations" in said) is (copies == 2)
    check(ROBOSET, files, found)
    assert_ted(found)
    report = found.manifest.report
    assert [entry["key"] for entry in report["left_out"]] == NAN_LEAVES
    assert report["warnings"] == []
    assert [entry["reward"] for entry in report["files"]] == [["dense"]] * copies
    seeds = [-1] if copies == 1 else [0, 1]  # of the folders that the names of files keep
    assert found.episodes["source_seed"].tolist() == [seed for seed in seeds for _ in range(10)]
    assert report["duplicates"][:1] == [
        {"episode": ["seed1/trace.h5", "Trial0"], "same_as": ["seed0/trace.h5", "Trial0"]}
    ] * (copies - 1)
    # The figures of the file.
    columns, total = found.columns, -416.28576943 * copies
    assert (found.rows, len(found.episodes)) == (500 * copies, 10 * copies)
    assert (columns["observation",].shape[1], columns["action",].shape[1]) == (63, 9)
    assert not columns["action",].isnan().any()
    assert float(columns["next", "reward"].sum()) == pytest.approx(total, abs=1e-7)
    assert float(found.episodes["return"].sum()) == pytest.approx(total, abs=1e-7)
    assert not (columns["next", "reward"] == -0.8709224161685798).any()
    assert not columns["next", "terminated"].any()
    assert columns["next", "truncated"].sum() == 10 * copies
    assert columns["time",][1] - columns["time",][0] == pytest.approx(0.08)
    assert found.groups() == [f"Trial{k}" for k in range(10)] * copies


@pytest.mark.pitfall("DS8")
def test_every_value_of_written_trials(tmp_path):
    """N4, N5: early ends, time limits, two records, and trials without a closing record."""
    untailed = [make_trial(5, seed=5 + k, terminated=k == 1) | {"tail": False} for k in range(3)]
    for trial in untailed:
        trial["actions"] = np.concatenate([trial["actions"], [[0.5, 0.25]]])
    files = [
        write(tmp_path / "a.h5", make_trial(2, seed=3, terminated=True), make_trial(9, seed=4)),
        write(tmp_path / "b.h5", make_trial(6, seed=1), make_trial(3, seed=2, terminated=True)),
        write(tmp_path / "c.h5", *untailed),
    ]
    found = convert(tmp_path / "data", files[1], files[0], files[2])
    check(ROBOSET, files, found)
    assert_ted(found)
    table = found.episodes
    assert table["length"].tolist() == [1, 8, 5, 2, 4, 4, 4]
    assert table["seed"].tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert table["terminated"].tolist() == [True, False, False, True, False, True, False]
    assert table["truncated"].tolist() == [False, True, True, False, True, True, True]
    returns = [301.0, sum(range(401, 409)), 515.0, 403.0, 2010.0, 2410.0, 2810.0]
    assert table["return"].tolist() == returns
    notes = {(note["rule"], note["first"]) for note in found.manifest.report["warnings"]}
    assert ("V50", "c.h5: Trial0") in notes


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes_shapes_and_names_are_kept(tmp_path, dtype):
    trial = make_trial(5, infos=False)
    for name in ("observations", "actions", "rewards", "time"):
        trial[name] = trial[name].astype(dtype)
    image = np.random.default_rng(0).integers(0, 256, (5, 24, 42, 3), np.uint8)
    trial["env_infos"] = {
        "small": np.arange(5, dtype=np.int8),
        "wide": np.arange(5, dtype=np.int64) << 40,
        "depth": np.arange(5, dtype=np.uint16),
        "wave": np.arange(5) * 1j,
        "big_endian": np.arange(5, dtype=">i4"),
        "flag": np.array([True, False, True, True, False]),
        "nothing": np.zeros((5, 0), np.float32),
        "visual_dict": {"rgb:left_cam:240x424:2d": image, "d:left 50%": image[..., 0]},
    }
    path = write(tmp_path / "a.h5", trial)
    found = quietly(tmp_path / "data", path)
    check(ROBOSET, path, found)
    assert found.manifest.report["left_out"] == []
    reported = {note["text"].split()[0] for note in found.manifest.report["warnings"]}
    floats = {"observations", "actions", "rewards", "time"} if dtype == np.float16 else set()
    assert {name for name in reported if name != "neither"} == floats | {"env_infos/small"}
    loaded = TensorDict.load_memmap(tmp_path / "data")
    key = ("next", "info", "visual_dict", "rgb:left_cam:240x424:2d")
    assert torch.equal(loaded[key], torch.from_numpy(image[1:]))


@pytest.mark.pitfall("DS11")
def test_result_is_readable_by_tensordict(tmp_path):
    found = convert(
        tmp_path / "data", write(tmp_path / "a.h5", make_trial(5), make_trial(3, seed=1))
    )
    data, loaded = found.tensordict(), TensorDict.load_memmap(tmp_path / "data")
    assert loaded.batch_size == found.batch_size == (6,)
    assert set(loaded.keys(True, True)) == {k if len(k) > 1 else k[0] for k in found.columns}
    for key, column in found.columns.items():
        assert torch.equal(loaded[key], column), key
        assert loaded[key].dtype == column.dtype
    for key in ("info", "next", ("next", "info"), ("info", "obs_dict")):
        assert data[key].batch_size == (6,)
    assert data[1:3]["info", "obs_dict", "rest"].shape == (2, 3)
    assert (data == loaded).all()
    table = TensorDict.load_memmap(tmp_path / "data" / "episodes")
    assert torch.equal(table["start"], found.episodes["start"])


@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 30])
@pytest.mark.parametrize("chunks", [None, (7,)])
def test_block_size_does_not_change_the_result(tmp_path, block_bytes, chunks):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for name, trial in {"Trial0": make_trial(23, seed=1), "Trial1": make_trial(9)}.items():
            infos = trial.pop("env_infos")
            trial["actions"] = np.vstack([trial["actions"], [[np.nan] * 2]])
            trial |= {f"env_infos/obs_dict/{k}": v for k, v in infos["obs_dict"].items()}
            trial["env_infos/rwd_dense"] = trial["rewards"]
            trial["env_infos/nan"] = np.full(len(trial["time"]), np.nan)
            for key, value in trial.items():
                size = None if chunks is None else (min(*chunks, len(value)), *value.shape[1:])
                file.create_dataset(f"{name}/{key}", data=value, chunks=size)
    found = quietly(tmp_path / "data", path, options=ConvertOptions(block_bytes=block_bytes))
    check(ROBOSET, path, found)
    verify_published(tmp_path / "data")
    assert [entry["key"] for entry in found.manifest.report["left_out"]] == ["env_infos/nan"]


def test_manifest_describes_the_files(tmp_path):
    path = write(tmp_path / "seed7" / "a.h5", make_trial(5))
    sources = replace(Sources.local([path]), origin={"kind": "hub", "commit": "c" * 40})
    convert(tmp_path / "data", get_sources=lambda: sources, identity={"dataset_id": "x"})
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert (manifest["format"], manifest["format_version"]) == ("replaykit-dataset", 1)
    assert manifest["converter"] == {"name": "robohive-trials", "version": 1}
    assert manifest["identity"]["dataset_id"] == "x"
    assert manifest["source"]["origin"] == {"kind": "hub", "commit": "c" * 40}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["source"]["files"] == [
        {"name": "a.h5", "size": path.stat().st_size, "sha256": digest}
    ]
    assert (manifest["rows"], manifest["episodes"]) == (4, 1)
    reward = next(array for array in manifest["arrays"] if array["key"] == ["next", "reward"])
    assert reward["shape"] == [4, 1]
    assert (reward["dtype"], reward["nbytes"]) == ("float64", 32)
    assert (reward["source"], reward["shift"]) == ("rewards", 1)
    for array in [*manifest["arrays"], *manifest["episode_arrays"]]:
        assert (tmp_path / "data" / array["file"]).stat().st_size == array["nbytes"]
    verify_published(tmp_path / "data")
