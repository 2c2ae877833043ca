"""Conversion of trials to rows, compared value by value with what h5py reads."""

from __future__ import annotations

import hashlib
import json
import shutil

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import verify_published
from replaykit.datasets.sources import Sources
from replaykit.testing.robohive_files import make_trial

SAMPLE_SHA256 = "cb7a813a94d88c8e1b0b3a769c810bee8008fc96801d26ce0bfc5fd72bdafe1d"


# -- the sample ----------------------------------------------------------------------------------


NAN_LEAVES = [
    "env_infos/proprio_dict",
    "env_infos/state/act",
    "env_infos/state/mocap_pos",
    "env_infos/state/mocap_quat",
]


@pytest.mark.pitfall("DS1")
@pytest.mark.pitfall("DS2")
def test_every_value_of_the_sample_is_the_source_value(
    sample, tmp_path, convert, read_rows, leaf_paths, assert_equal, assert_ted
):
    with pytest.warns(UserWarning, match="left out") as caught:
        found = convert(tmp_path / "data", sample)
    assert len(caught) == 1
    assert all(leaf in str(caught[0].message) for leaf in NAN_LEAVES)
    assert [entry["key"] for entry in found.manifest.report["left_out"]] == NAN_LEAVES
    assert found.manifest.report["warnings"] == []
    assert found.manifest.report["files"] == [{"file": sample.name, "reward": ["dense"]}]
    leaves = [leaf for leaf in leaf_paths(sample) if leaf not in NAN_LEAVES]
    assert len(leaves) == 32
    assert_equal(found, read_rows([sample], leaves))
    assert_ted(found)


def test_figures_of_the_sample(sample, tmp_path, quietly):
    found = quietly(tmp_path / "data", sample)
    columns = found.columns
    assert (found.rows, len(found.episodes)) == (500, 10)
    assert columns["observation",].shape == (500, 63)
    assert columns["action",].shape == (500, 9)
    assert not columns["action",].isnan().any()
    assert float(columns["next", "reward"].sum()) == pytest.approx(-416.28576943, abs=1e-8)
    assert float(found.episodes["return"].sum()) == pytest.approx(-416.28576943, abs=1e-8)
    assert not (columns["next", "reward"] == -0.8709224161685798).any()
    assert columns["next", "terminated"].sum() == 0
    assert columns["next", "truncated"].sum() == 10
    assert columns["next", "done"].sum() == 10
    assert columns["time",][1] - columns["time",][0] == pytest.approx(0.08)
    assert found.groups() == [f"Trial{k}" for k in range(10)]
    assert found.episodes["truncated"].all()
    assert not found.episodes["terminated"].any()


@pytest.mark.pitfall("DS2")
def test_two_files_keep_their_episodes_apart(
    sample, tmp_path, convert, read_rows, leaf_paths, assert_equal, assert_ted
):
    """N6: the same trial names in two files are twenty episodes, in order of the paths."""
    files = [tmp_path / "seed0" / "trace.h5", tmp_path / "seed1" / "trace.h5"]
    for file in files:
        file.parent.mkdir()
        shutil.copy(sample, file)
    with pytest.warns(UserWarning, match="10 episodes with the observations"):
        found = convert(tmp_path / "data", *reversed(files))
    leaves = [leaf for leaf in leaf_paths(sample) if leaf not in NAN_LEAVES]
    assert_equal(found, read_rows(files, leaves))
    assert_ted(found)
    assert found.episodes["source_seed"].tolist() == [0] * 10 + [1] * 10
    assert found.manifest.report["duplicates"][0] == {
        "episode": ["seed1/trace.h5", "Trial0"],
        "same_as": ["seed0/trace.h5", "Trial0"],
    }
    assert found.manifest.source["files"] == [
        {"name": f"seed{k}/trace.h5", "size": sample.stat().st_size, "sha256": SAMPLE_SHA256}
        for k in range(2)
    ]


# -- files in the same layout --------------------------------------------------------------------


def test_every_value_of_written_trials(
    tmp_path, convert, write, read_rows, leaf_paths, assert_equal, assert_ted
):
    """Early termination, time limits, two records, and a file without a closing record."""
    files = [
        write(tmp_path / "b.h5", make_trial(6, seed=1), make_trial(3, seed=2, terminated=True)),
        write(tmp_path / "a.h5", make_trial(2, seed=3, terminated=True), make_trial(9, seed=4)),
    ]
    untailed = make_trial(5, seed=5) | {"tail": False}
    untailed["actions"] = np.concatenate([untailed["actions"], [[0.5, 0.25]]])
    files.append(write(tmp_path / "c.h5", untailed))
    found = convert(tmp_path / "data", *files)
    assert_equal(found, read_rows(files, leaf_paths(files[0])))
    assert_ted(found)
    assert found.episodes["length"].tolist() == [1, 8, 5, 2, 4]
    assert found.episodes["seed"].tolist() == [0, 0, 1, 1, 2]
    assert found.episodes["terminated"].tolist() == [True, False, False, True, False]
    assert found.episodes["truncated"].tolist() == [False, True, True, False, True]
    returns = [301.0, sum(range(401, 409)), 515.0, 403.0, 2010.0]
    assert found.episodes["return"].tolist() == returns


@pytest.mark.pitfall("DS8")
def test_action_is_the_one_that_led_to_the_next_observation(tmp_path, convert, write):
    found = convert(
        tmp_path / "data", write(tmp_path / "a.h5", make_trial(30), make_trial(4, seed=1))
    )
    moved = found.columns["observation",][:, :2] + found.columns["action",]
    assert torch.equal(moved, found.columns["next", "observation"][:, :2])


def test_last_next_observation_is_the_final_one(tmp_path, convert, write):
    """N2, N32: neither zeros nor the first observation of the next episode."""
    trials = [make_trial(4, seed=1), make_trial(5, seed=2)]
    found = convert(tmp_path / "data", write(tmp_path / "a.h5", *trials))
    for trial, row in zip(trials, (2, 6), strict=True):
        final = torch.from_numpy(trial["observations"][-1])
        assert torch.equal(found.columns["next", "observation"][row], final)


@pytest.mark.pitfall("DS9")
def test_trials_come_in_natural_order(tmp_path, convert, write):
    path = write(tmp_path / "a.h5", *(make_trial(3, seed=k) for k in range(12)))
    with h5py.File(path) as file:
        assert list(file)[2] == "Trial10"
    found = convert(tmp_path / "data", path)
    assert found.columns["episode",].tolist() == [k for k in range(12) for _ in range(2)]
    assert found.groups() == [f"Trial{k}" for k in range(12)]
    assert found.columns["next", "reward"][::2, 0].tolist() == [100.0 * k + 1 for k in range(12)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes_are_kept(tmp_path, dtype, quietly, write, read_rows, leaf_paths, assert_equal):
    trial = make_trial(5, infos=False)
    for name in ("observations", "actions", "rewards", "time"):
        trial[name] = trial[name].astype(dtype)
    trial["env_infos"] = {
        "small": np.arange(5, dtype=np.int8),
        "wide": np.arange(5, dtype=np.int64) << 40,
        "pixels": np.arange(5 * 12, dtype=np.uint8).reshape(5, 2, 2, 3),
        "depth": np.arange(5, dtype=np.uint16),
        "wave": np.arange(5) * 1j,
        "big_endian": np.arange(5, dtype=">i4"),
        "flag": np.array([True, False, True, True, False]),
        "nothing": np.zeros((5, 0), np.float32),
    }
    path = write(tmp_path / "a.h5", trial)
    found = quietly(tmp_path / "data", path)
    expected = read_rows([path], leaf_paths(path))
    for key in (("info", "big_endian"), ("next", "info", "big_endian")):
        expected[key] = expected[key].astype("=i4")
    assert_equal(found, expected)
    reported = {note["text"].split()[0] for note in found.manifest.report["warnings"]}
    floats = {"observations", "actions", "rewards", "time"} if dtype == np.float16 else set()
    assert {name for name in reported if name != "neither"} == floats | {"env_infos/small"}


def test_images_and_keys_with_colons(tmp_path, convert, write, read_rows, leaf_paths, assert_equal):
    trial = make_trial(4)
    image = np.random.default_rng(0).integers(0, 256, (4, 24, 42, 3), np.uint8)
    trial["env_infos"]["visual_dict"] = {
        "rgb:left_cam:240x424:2d": image,
        "d:left 50%": image[..., 0],
    }
    path = write(tmp_path / "a.h5", trial)
    found = convert(tmp_path / "data", path)
    assert_equal(found, read_rows([path], leaf_paths(path)))
    loaded = TensorDict.load_memmap(tmp_path / "data")
    key = ("next", "info", "visual_dict", "rgb:left_cam:240x424:2d")
    assert torch.equal(loaded[key], torch.from_numpy(image[1:]))


def test_result_is_readable_by_tensordict(tmp_path, convert, write):
    found = convert(
        tmp_path / "data", write(tmp_path / "a.h5", make_trial(5), make_trial(3, seed=1))
    )
    loaded = TensorDict.load_memmap(tmp_path / "data")
    assert loaded.batch_size == found.batch_size == (6,)
    assert set(loaded.keys(True, True)) == {k if len(k) > 1 else k[0] for k in found.columns}
    for key, column in found.columns.items():
        assert torch.equal(loaded[key], column), key
        assert loaded[key].dtype == column.dtype
    assert (found.tensordict() == loaded).all()
    table = TensorDict.load_memmap(tmp_path / "data" / "episodes")
    assert torch.equal(table["start"], found.episodes["start"])


@pytest.mark.pitfall("DS11")
def test_nested_tensordicts_have_the_batch_size_of_the_root(tmp_path, convert, write):
    found = convert(tmp_path / "data", write(tmp_path / "a.h5", make_trial(5)))
    data = found.tensordict()
    for key in ("info", "next", ("next", "info"), ("info", "obs_dict")):
        assert data[key].batch_size == (4,)
    assert data[1:3]["info", "obs_dict", "rest"].shape == (2, 3)


@pytest.mark.parametrize("block_bytes", [1, 64, 1000, 4096, 1 << 30])
@pytest.mark.parametrize("chunks", [None, (7,), (1,)])
def test_block_size_does_not_change_the_result(
    tmp_path, block_bytes, chunks, quietly, read_rows, leaf_paths, assert_equal
):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for name, trial in {"Trial0": make_trial(23, seed=1), "Trial1": make_trial(9)}.items():
            trial["actions"] = np.vstack([trial["actions"], [[np.nan] * 2]])
            flat = {k: v for k, v in trial.items() if k != "env_infos"}
            flat |= {
                f"env_infos/obs_dict/{k}": v for k, v in trial["env_infos"]["obs_dict"].items()
            }
            flat |= {
                "env_infos/rwd_dense": trial["rewards"],
                "env_infos/nan": np.full(len(trial["time"]), np.nan),
            }
            for key, value in flat.items():
                size = None if chunks is None else (min(*chunks, len(value)), *value.shape[1:])
                file.create_dataset(f"{name}/{key}", data=value, chunks=size)
    found = quietly(tmp_path / "data", path, options=ConvertOptions(block_bytes=block_bytes))
    leaves = [leaf for leaf in leaf_paths(path) if leaf != "env_infos/nan"]
    assert_equal(found, read_rows([path], leaves))
    assert [entry["key"] for entry in found.manifest.report["left_out"]] == ["env_infos/nan"]


def test_converting_twice_gives_the_same_bytes(tmp_path, convert, write):
    """V62: arrays byte for byte, manifest but for time and host, in whatever order files come."""
    files = [
        write(tmp_path / name, make_trial(5, seed=k)) for k, name in enumerate(("a.h5", "b.h5"))
    ]
    first = convert(tmp_path / "one", *files)
    second = convert(tmp_path / "two", *reversed(files))
    assert first.manifest.content_id() == second.manifest.content_id()
    names = [name for name, _, _ in first.manifest.files()]
    assert len(names) > 20
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_manifest_describes_the_files(tmp_path, write):
    path = write(tmp_path / "seed7" / "a.h5", make_trial(5))
    sources = Sources.local([path], origin={"kind": "hub", "commit": "c" * 40})
    ensure_dataset(
        tmp_path / "data",
        get_sources=lambda: sources,
        layout=ROBOHIVE,
        identity={"dataset_id": "x"},
    )
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
