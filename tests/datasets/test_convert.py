"""Conversion of trials to rows, compared value by value with what h5py reads."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit.datasets import BaseDatasetExperienceReplay
from replaykit.datasets import convert as engine
from replaykit.datasets.convert import ConvertOptions, ensure_dataset
from replaykit.datasets.opened import Published
from replaykit.datasets.publish import open_published, verify_published
from replaykit.datasets.robohive import ROBOHIVE
from replaykit.datasets.sources import SourceFile, Sources
from replaykit.errors import CorpusError
from replaykit.testing.robohive import RoboHiveWriter, make_trial

SAMPLE = Path(__file__).parents[2] / "../shared/data/robohive/fk1_random_policy_trace.h5"
SAMPLE_SHA256 = "cb7a813a94d88c8e1b0b3a769c810bee8008fc96801d26ce0bfc5fd72bdafe1d"


def convert(target: Path, *files: Path, **options: Any) -> Published:
    return ensure_dataset(
        target, get_sources=lambda: Sources.local(files), layout=ROBOHIVE, **options
    )


def quietly(target: Path, *files: Path, **options: Any) -> Published:
    """Converts files of which it is known that something is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return convert(target, *files, **options)


def write(path: Path, *trials: dict[str, Any], **names: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with RoboHiveWriter(path, float_dtype=None) as writer:
        for trial in trials:
            writer.add_trial(**trial)
    return path


@pytest.fixture
def sample() -> Path:
    if not SAMPLE.exists():
        pytest.skip(f"sample file {SAMPLE} not present")
    if hashlib.sha256(SAMPLE.read_bytes()).hexdigest() != SAMPLE_SHA256:
        pytest.skip(f"sample file {SAMPLE} has another sha256")
    return SAMPLE


def read_rows(files: list[Path], leaves: list[str]) -> dict[tuple[str, ...], np.ndarray]:
    """The rows of trials, one at a time, straight from the alignment table of the layout."""
    rows: dict[tuple[str, ...], list[Any]] = {}

    def put(value: Any, *key: str) -> None:
        rows.setdefault(key, []).append(value)

    for seed, path in enumerate(sorted(files, key=str)):
        with h5py.File(path) as file:
            numbers = sorted(int(re.fullmatch(r"Trial(\d+)", name)[1]) for name in file)
            for number in numbers:
                trial = {leaf: file[f"Trial{number}/{leaf}"][...] for leaf in leaves}
                records = len(trial["actions"])
                tailed = bool(np.isnan(trial["actions"][records - 1]).all())
                for t in range(records - 1):
                    last = t == records - 2
                    done = bool(trial["done"][t + 1])
                    put(trial["observations"][t], "observation")
                    put(trial["actions"][t], "action")
                    put(trial["time"][t], "time")
                    put(trial["observations"][t + 1], "next", "observation")
                    put([trial["rewards"][t + 1]], "next", "reward")
                    put([done], "next", "terminated")
                    put([last and not (done and tailed)], "next", "truncated")
                    put([last or done], "next", "done")
                    put(seed, "seed")
                    put(number, "episode")
                    for flag in ("done", "terminated", "truncated"):
                        put([False], flag)
                    for leaf in leaves:
                        if leaf.startswith("env_infos/"):
                            key = leaf.split("/")[1:]
                            put(trial[leaf][t], "info", *key)
                            put(trial[leaf][t + 1], "next", "info", *key)
    return {key: np.stack([np.asarray(value) for value in found]) for key, found in rows.items()}


def leaf_paths(path: Path) -> list[str]:
    found: list[str] = []
    with h5py.File(path) as file:
        group = file[next(iter(file))]
        group.visititems(lambda n, o: found.append(n) if isinstance(o, h5py.Dataset) else None)
    return found


def assert_equal(found: Published, expected: dict[tuple[str, ...], np.ndarray]) -> None:
    """Same keys, and for each the same shape, dtype and bytes."""
    assert found.columns.keys() == expected.keys()
    for key, column in found.columns.items():
        ours, theirs = column.numpy(), expected[key]
        assert ours.shape == theirs.shape, key
        assert ours.dtype == theirs.dtype, key
        assert ours.tobytes() == theirs.tobytes(), key


def assert_ted(found: Published) -> None:
    """The invariants T1 to T9 of a table of transitions."""
    data = found.tensordict()
    done, terminated, truncated = (
        data["next", name].squeeze(-1) for name in ("done", "terminated", "truncated")
    )
    assert torch.equal(done, terminated | truncated)
    for name in ("done", "terminated", "truncated"):
        assert data[name].shape == (found.rows, 1)
        assert not data[name].any()
    assert ("reward",) not in found.columns
    ids = torch.stack([data["seed"], data["episode"]], 1)
    starts, lengths = found.episodes["start"], found.episodes["length"]
    assert starts.tolist() == [0, *np.cumsum(lengths.numpy())[:-1]]
    assert int(lengths.sum()) == found.rows
    assert done.nonzero().flatten().tolist() == (starts + lengths - 1).tolist()
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        rows = slice(start, start + length)
        assert len(ids[rows].unique(dim=0)) == 1
        assert torch.equal(data["next", "observation"][rows][:-1], data["observation"][rows][1:])
    assert len(ids.unique(dim=0)) == len(starts)
    assert data["next"].batch_size == data.batch_size
    if ("info", "time") in found.columns:
        assert data["info"].batch_size == data.batch_size
        assert data["next", "info"].batch_size == data.batch_size


# -- the sample ----------------------------------------------------------------------------------


NAN_LEAVES = [
    "env_infos/proprio_dict",
    "env_infos/state/act",
    "env_infos/state/mocap_pos",
    "env_infos/state/mocap_quat",
]


@pytest.mark.pitfall("DS1")
@pytest.mark.pitfall("DS2")
def test_every_value_of_the_sample_is_the_source_value(sample, tmp_path):
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


def test_figures_of_the_sample(sample, tmp_path):
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
def test_two_files_keep_their_episodes_apart(sample, tmp_path):
    """N6: the same trial names in two files are twenty episodes, in order of the paths."""
    files = [tmp_path / "seed0" / "trace.h5", tmp_path / "seed1" / "trace.h5"]
    for file in files:
        file.parent.mkdir()
        shutil.copy(sample, file)
    with pytest.warns(UserWarning, match="10 episodes have the observations"):
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


def test_every_value_of_written_trials(tmp_path):
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
def test_action_is_the_one_that_led_to_the_next_observation(tmp_path):
    found = convert(
        tmp_path / "data", write(tmp_path / "a.h5", make_trial(30), make_trial(4, seed=1))
    )
    moved = found.columns["observation",][:, :2] + found.columns["action",]
    assert torch.equal(moved, found.columns["next", "observation"][:, :2])


def test_last_next_observation_is_the_final_one(tmp_path):
    """N2, N32: neither zeros nor the first observation of the next episode."""
    trials = [make_trial(4, seed=1), make_trial(5, seed=2)]
    found = convert(tmp_path / "data", write(tmp_path / "a.h5", *trials))
    for trial, row in zip(trials, (2, 6), strict=True):
        final = torch.from_numpy(trial["observations"][-1])
        assert torch.equal(found.columns["next", "observation"][row], final)


@pytest.mark.pitfall("DS9")
def test_trials_come_in_natural_order(tmp_path):
    path = write(tmp_path / "a.h5", *(make_trial(3, seed=k) for k in range(12)))
    with h5py.File(path) as file:
        assert list(file)[2] == "Trial10"
    found = convert(tmp_path / "data", path)
    assert found.columns["episode",].tolist() == [k for k in range(12) for _ in range(2)]
    assert found.groups() == [f"Trial{k}" for k in range(12)]
    assert found.columns["next", "reward"][::2, 0].tolist() == [100.0 * k + 1 for k in range(12)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes_are_kept(tmp_path, dtype):
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


def test_images_and_keys_with_colons(tmp_path):
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


def test_result_is_readable_by_tensordict(tmp_path):
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
def test_nested_tensordicts_have_the_batch_size_of_the_root(tmp_path):
    found = convert(tmp_path / "data", write(tmp_path / "a.h5", make_trial(5)))
    data = found.tensordict()
    for key in ("info", "next", ("next", "info"), ("info", "obs_dict")):
        assert data[key].batch_size == (4,)
    assert data[1:3]["info", "obs_dict", "rest"].shape == (2, 3)


@pytest.mark.parametrize("block_bytes", [1, 64, 1000, 4096, 1 << 30])
@pytest.mark.parametrize("chunks", [None, (7,), (1,)])
def test_block_size_does_not_change_the_result(tmp_path, block_bytes, chunks):
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


def test_converting_twice_gives_the_same_bytes(tmp_path):
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


def test_manifest_says_what_the_files_are(tmp_path):
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


# -- what is refused, left out, skipped ------------------------------------------------------------


def edited(change: Callable[[dict[str, Any]], Any], records: int = 5) -> dict[str, Any]:
    trial = make_trial(records, seed=9)
    change(trial)
    return trial


def put(*path: str, at: Any, value: float) -> Callable[[dict[str, Any]], None]:
    def change(trial: dict[str, Any]) -> None:
        for name in path:
            trial[name][at] = value

    return change


def to(name: str, make: Callable[[np.ndarray], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda trial: trial.update({name: make(trial[name])})


def no_closing_row(trial: dict[str, Any]) -> None:
    trial.update(actions=np.vstack([trial["actions"], [[0.0, np.nan]]]), tail=False)


def nan_reward(trial: dict[str, Any]) -> None:
    trial["rewards"][3] = np.nan
    trial["env_infos"]["rwd_dense"] = trial["rewards"]


def infos_after_the_step(trial: dict[str, Any]) -> None:
    after = np.roll(trial["observations"][:, :2], -1, axis=0)
    trial["env_infos"]["obs_dict"] = {"position": after}


# What is done to a trial of five records: the place that the message names, and the rule.
REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "no observations": (to("observations", lambda _: None), "observations", "V12"),
    "no rewards": (to("rewards", lambda _: None), "rewards", "V12"),
    "no done": (to("done", lambda _: None), "done", "V12"),
    "no time": (to("time", lambda _: None), "time", "V12"),
    "short observations": (to("observations", lambda x: x[:-1]), "observations", "V11"),
    "long rewards": (to("rewards", lambda x: np.append(x, 0.0)), "rewards", "V11"),
    "short info": (lambda t: t["env_infos"].update(x=np.ones(3)), "env_infos/x", "V11"),
    "info of two entries": (lambda t: t["env_infos"].update(x=np.ones(2)), "env_infos/x", "V11"),
    "reward of one entry": (to("rewards", lambda x: x[:1]), "rewards", "V11"),
    "other observation width": (to("observations", lambda x: x[:, :-1]), "observations", "V10"),
    "other observation dtype": (to("observations", np.float32), "observations", "V10"),
    "other action width": (to("actions", lambda x: x[:, :1]), "actions", "V10"),
    "other action dtype": (to("actions", np.float32), "actions", "V10"),
    "two rewards": (to("rewards", lambda x: np.stack([x, x], 1)), "rewards", "V10"),
    "text time": (to("time", lambda x: np.array([b"a"] * 5)), "time", "V10"),
    "NaN action": (put("actions", at=(2, 1), value=np.nan), "actions, record 2", "V20"),
    "infinite action": (put("actions", at=(3, 0), value=np.inf), "actions, record 3", "V20"),
    "action row of NaN": (put("actions", at=1, value=np.nan), "actions, record 1", "V20"),
    "partly NaN last action": (no_closing_row, "actions, record 4", "V50"),
    "NaN observation": (
        put("observations", at=(4, 0), value=np.nan),
        "observations, record 4",
        "V21",
    ),
    "NaN reward": (nan_reward, "rewards, record 3", "V21"),
    "NaN done": (to("done", lambda _: np.array([0, 0, 0, 0, np.nan])), "done, record 4", "V30"),
    "done in the middle": (put("done", at=2, value=True), "done, record 2", "V53"),
    "foreign rewards": (to("rewards", lambda x: x + 1), "rewards", "V52"),
    "infos after the step": (infos_after_the_step, "env_infos/obs_dict/position", "V51"),
}


@pytest.mark.pitfall("DS10")
@pytest.mark.pitfall("DS13")
@pytest.mark.parametrize("fault", REFUSED)
def test_trial_that_breaks_a_rule_is_named_and_nothing_is_left(tmp_path, fault):
    change, key, rule = REFUSED[fault]
    good = write(tmp_path / "a.h5", make_trial(5), make_trial(4, seed=1))
    bad = write(tmp_path / "b.h5", make_trial(4, seed=2), edited(change))
    with pytest.raises(CorpusError) as caught:
        convert(tmp_path / "data", good, bad)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert message.startswith(f"{bad}: Trial1/{key}")
    assert message.endswith(f"[{rule}]")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".data.lock", "a.h5", "b.h5"]


def test_group_in_place_of_an_array_is_named(tmp_path):
    path = write(tmp_path / "a.h5", make_trial(4, infos=False))
    with h5py.File(path, "a") as file:
        del file["Trial0/rewards"]
        file["Trial0/rewards/dense"] = np.zeros(4)
    with pytest.raises(CorpusError, match=r"Trial0/rewards: .*is a group"):
        convert(tmp_path / "data", path)


def test_required_array_in_another_file_is_not_followed(tmp_path):
    other = write(tmp_path / "b.h5", make_trial(4, infos=False))
    path = write(tmp_path / "a.h5", make_trial(4, infos=False))
    with h5py.File(path, "a") as file:
        del file["Trial0/observations"]
        file["Trial0/observations"] = h5py.ExternalLink(other.name, "/Trial0/observations")
    with pytest.raises(CorpusError, match=r"Trial0/observations: .*link out of this file \[V10\]"):
        convert(tmp_path / "data", path)


def test_file_of_another_layout_is_refused_with_its_root_keys(tmp_path):
    path = tmp_path / "d4rl.h5"
    with h5py.File(path, "w") as file:
        file["observations"] = np.zeros((4, 2))
        file["actions"] = np.zeros((4, 2))
    with pytest.raises(CorpusError, match=r"robohive-trials.*'actions', 'observations'.*V04"):
        convert(tmp_path / "data", path)


def test_no_source_file_and_no_row_are_refused(tmp_path):
    with pytest.raises(CorpusError, match="V05"):
        convert(tmp_path / "data")
    path = write(tmp_path / "a.h5", make_trial(1), make_trial(1))
    with pytest.raises(CorpusError, match=r"no episode gives a row \(2 skipped\).*V38") as caught:
        convert(tmp_path / "data", path)
    assert str(path) in str(caught.value)


def test_file_of_another_size_than_expected_is_refused(tmp_path):
    path = write(tmp_path / "a.h5", make_trial(3))
    sources = Sources((SourceFile(path, "a.h5", 12, "0" * 64),))
    with pytest.raises(CorpusError, match=r"expected 12; fetch it again \[V02\]"):
        ensure_dataset(tmp_path / "data", get_sources=lambda: sources, layout=ROBOHIVE)


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 24])
def test_one_value_for_a_whole_trial_is_that_of_all_its_rows(tmp_path, block_bytes):
    """a.3, V11: the writer stores a scalar of a trial as an array of length 1."""

    def infos(seed: int, records: int) -> dict[str, Any]:
        trial = make_trial(records, seed=seed)
        trial["env_infos"] |= {
            "solved_once": seed == 1,
            "camera": np.full((1, 2, 3), seed, np.uint8),
            "void": np.full(1, np.nan),
            "half": np.array([np.nan if seed else 2.5]),
            "mixed": np.full(1 if seed else records, 1.0),
        }
        trial["env_infos"]["obs_dict"]["goal"] = np.array([4.0 + seed])
        return trial

    path = write(tmp_path / "a.h5", infos(0, 4), infos(1, 6), make_trial(1) | infos(2, 1))
    with h5py.File(path, "a") as file:
        for k in range(3):
            file[f"Trial{k}/env_infos/scalar"] = np.int16(7 + k)
            file[f"Trial{k}/env_infos/mass"] = np.float32(k) if k else np.full(1, k, np.float32)
    with pytest.warns(UserWarning, match="left out") as caught:
        found = convert(tmp_path / "data", path, options=ConvertOptions(block_bytes=block_bytes))
    assert "env_infos/void: it is NaN throughout" in str(caught[0].message)
    assert "env_infos/mixed: it has" in str(caught[0].message)
    assert "one value, of shape [] and dtype float64" in str(caught[0].message)
    lengths = [3, 5]
    expected = {
        ("solved_once",): np.array([False, True]),
        ("camera",): np.stack([np.full((2, 3), k, np.uint8) for k in range(2)]),
        ("half",): np.array([2.5, np.nan]),
        ("obs_dict", "goal"): np.array([4.0, 5.0]),
        ("scalar",): np.array([7, 8], np.int16),
        ("mass",): np.array([0, 1], np.float32),
    }
    for key, values in expected.items():
        for above in (("info",), ("next", "info")):
            column = found.columns[(*above, *key)].numpy()
            np.testing.assert_array_equal(column, np.repeat(values, lengths, axis=0), str(key))
            assert column.dtype == values.dtype
    assert ("info", "mixed") not in found.columns
    facts = {array.key: array.facts for array in found.manifest.arrays}
    assert facts["info", "scalar"]["one_per_episode"] is True
    assert "one_per_episode" not in facts["info", "time"]
    assert_ted(found)
    verify_published(tmp_path / "data")


@pytest.mark.parametrize("width", [3, 20_000])
def test_leaf_that_is_nan_only_at_first_is_kept(tmp_path, width):
    """Also one that is too large to be read in one go for this question."""
    trial = make_trial(5, infos=False)
    late, never = np.full((5, width), np.nan), np.full((5, width), np.nan)
    late[3, 1] = 2.0
    trial["env_infos"] = {"late": late, "never": never}
    with pytest.warns(UserWarning, match="env_infos/never: it is NaN throughout"):
        found = convert(tmp_path / "data", write(tmp_path / "a.h5", trial))
    assert {key for key in found.columns if key[0] == "info"} == {("info", "late")}
    np.testing.assert_array_equal(found.columns["info", "late"], late[:-1])


@pytest.mark.pitfall("DS10")
def test_leaves_that_not_all_trials_share_are_left_out_with_one_warning(tmp_path):
    """N8, N36, N38: the schema is that of all trials of all files, and says what it lacks."""

    def infos(**leaves: Any) -> dict[str, Any]:
        return make_trial(4, infos=False) | {"env_infos": {"kept": np.zeros(4), **leaves}}

    first = infos(
        early=np.ones(4), kind=np.ones(4), shape=np.ones((4, 2)), dtype=np.ones(4),
        nan=np.full(4, np.nan), half=np.full(4, np.nan), text=np.array([b"x"] * 4),
        device=np.ones(4), deep={"both": np.ones(4), "one": np.ones(4)},
    )  # fmt: skip
    second = infos(
        kind={"inner": np.ones(4)}, shape=np.ones((4, 3)), dtype=np.ones(4, np.float32),
        nan=np.full(4, np.nan), half=np.arange(4.0), text=np.array([b"x"] * 4),
        device=np.ones(4), deep={"both": np.ones(4)}, late=np.ones(4),
    )  # fmt: skip
    files = [write(tmp_path / "a.h5", first, first), write(tmp_path / "b.h5", second)]
    with pytest.warns(UserWarning, match="left out") as caught:
        found = convert(tmp_path / "data", *files)
    why = {entry["key"]: entry["why"] for entry in found.manifest.report["left_out"]}
    expected = {
        "early": "missing from 1 of 3 episodes, first b.h5: Trial0",
        "kind": "an array in some episodes and a group in others",
        "kind/inner": "an array in some episodes and a group in others",
        "shape": "shape [T, 2]",
        "dtype": "float32",
        "nan": "NaN throughout",
        "text": "text",
        "device": "reserved",
        "deep/one": "missing from 1 of 3",
        "late": "missing from 2 of 3",
    }
    assert why.keys() == {f"env_infos/{key}" for key in expected}
    for key, said in expected.items():
        assert said in why[f"env_infos/{key}"], key
    assert len(caught) == 1
    assert all(f"env_infos/{key}" in str(caught[0].message) for key in expected)
    kept = {key[1:] for key in found.columns if key[0] == "info"}
    assert kept == {("kept",), ("half",), ("deep", "both")}
    assert found.columns["info", "half"][-3:].tolist() == [0.0, 1.0, 2.0]


def test_arrays_beside_the_known_ones_are_left_out_and_listed(tmp_path):
    trial = make_trial(4, infos=False) | {"extra": {"config": {"solved": 1.0}, "user": np.ones(4)}}
    with pytest.warns(UserWarning, match="config/solved.*user"):
        found = convert(tmp_path / "data", write(tmp_path / "a.h5", trial))
    assert "info" not in {key[0] for key in found.columns}
    assert len(found.columns) == 13


def test_trial_of_one_record_is_skipped_and_listed(tmp_path):
    trials = [make_trial(4), make_trial(1, seed=1), make_trial(3, seed=2)]
    del trials[1]["env_infos"]["rwd_sparse"]  # of a trial that gives no row nothing is required
    with pytest.warns(UserWarning, match=r"skipped: a.h5: Trial1: it has 1 record,"):
        found = convert(tmp_path / "data", write(tmp_path / "a.h5", *trials))
    assert found.columns["episode",].tolist() == [0, 0, 0, 2, 2]
    assert ("info", "rwd_sparse") in found.columns
    assert_ted(found)


def test_root_members_that_are_no_trials_are_listed(tmp_path):
    path = tmp_path / "a.h5"
    with RoboHiveWriter(path) as writer:
        writer.add_trial(**make_trial(3))
        writer.add_member("notes", np.arange(3))
        writer.add_member("Trial5", {"observations": np.zeros((3, 2))})
    with pytest.warns(UserWarning, match="Trial5: it is a group without 'actions'; .*notes: it is"):
        found = convert(tmp_path / "data", path)
    assert len(found.manifest.report["skipped"]) == 2
    assert found.rows == 2


def test_trial_that_is_a_link_is_called_one(tmp_path):
    path = write(tmp_path / "a.h5", make_trial(3))
    with h5py.File(path, "a") as file:
        file["Trial1"] = h5py.SoftLink("/Trial0")
    with pytest.warns(UserWarning, match="Trial1: it is a link by name, .*copy what it leads to"):
        assert convert(tmp_path / "data", path).rows == 2


def test_trace_with_compressed_paths_says_what_to_do(tmp_path):
    """a.3: observations are empty; their order is not in the file, so nobody can rebuild them."""
    trial = make_trial(4)
    trial["observations"] = np.zeros((0,))
    path = write(tmp_path / "a.h5", make_trial(3), trial)
    with pytest.raises(CorpusError, match=r"Trial1/observations: has 0 records.*V11") as caught:
        convert(tmp_path / "data", path)
    assert "path compression" in str(caught.value)
    assert "write observations from env_infos/obs_dict" in str(caught.value)


def test_warning_points_to_the_line_of_the_caller(tmp_path):
    """Not into the package, however deep in it the conversion was called."""
    path = write(tmp_path / "a.h5", make_trial(3), make_trial(1, seed=1))

    class Mine(BaseDatasetExperienceReplay):
        available_datasets = ["all"]  # noqa: RUF012
        corpus = "mine"
        layout = ROBOHIVE

        def sources(self):
            return Sources.local([path])

    line = sys._getframe().f_lineno
    with pytest.warns(UserWarning, match="skipped") as caught:
        Mine("all", 2, root=tmp_path / "root", prefetch=1)
    assert (caught[0].filename, caught[0].lineno) == (__file__, line + 2)
    with pytest.warns(UserWarning, match="skipped") as caught:
        ensure_dataset(tmp_path / "x", get_sources=lambda: Sources.local([path]), layout=ROBOHIVE)
    assert (caught[0].filename, caught[0].lineno) == (__file__, line + 5)


def test_infos_logged_by_reference_are_dropped_everywhere(tmp_path):
    """a.5: every obs_dict leaf constant while the observation changes."""
    aliased = make_trial(5, seed=1)
    for name, values in aliased["env_infos"]["obs_dict"].items():
        aliased["env_infos"]["obs_dict"][name] = np.broadcast_to(values[-1:], values.shape)
    path = write(tmp_path / "a.h5", make_trial(4), aliased)
    with pytest.warns(UserWarning, match="logged by reference") as caught:
        found = convert(tmp_path / "data", path)
    assert len(caught) == 1
    assert not [key for key in found.columns if "info" in key]
    required = ["observations", "actions", "rewards", "done", "time"]
    assert_equal(found, read_rows([path], required))
    assert not [path for path in (tmp_path / "data").rglob("*") if "info" in path.name]
    left_out = found.manifest.report["left_out"]
    assert len(left_out) == 9
    assert all("a.h5: Trial1" in entry["why"] for entry in left_out)
    assert sorted(TensorDict.load_memmap(tmp_path / "data").keys()) == sorted(
        {key[0] for key in found.columns}
    )


def test_values_that_are_odd_are_counted_in_the_manifest(tmp_path):
    trials = [make_trial(4, seed=k) for k in range(3)]
    trials[1]["time"] = np.array([0.0, 1.0, 1.0, 0.5])
    trials[2]["time"] = np.array([0.0, -1.0, 2.0, 3.0])
    for name, values in trials[2]["env_infos"]["obs_dict"].items():
        trials[2]["env_infos"]["obs_dict"][name] = np.exp(values)
    with pytest.warns(UserWarning, match="does not increase strictly"):
        found = convert(tmp_path / "data", write(tmp_path / "a.h5", *trials))
    notes = {note["rule"]: note for note in found.manifest.report["warnings"]}
    assert notes["V27"]["count"] == 2
    assert notes["V27"]["first"] == "a.h5: Trial1/time, record 2"
    assert notes["V51"]["first"] == "a.h5: Trial2"


# -- the engine ----------------------------------------------------------------------------------


def test_progress_bar_is_shown_on_request_only(tmp_path, capfd):
    path = write(tmp_path / "a.h5", make_trial(4))
    convert(tmp_path / "quiet", path)
    assert capfd.readouterr().err == ""
    convert(tmp_path / "told", path, progress=True)
    assert "converting: 100%" in capfd.readouterr().err


def test_source_that_changes_meanwhile_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", make_trial(4))
    original = engine.RowWriter.finish

    def touch(self):
        with path.open("ab") as file:
            file.write(b"x")
        original(self)

    monkeypatch.setattr(engine.RowWriter, "finish", touch)
    with pytest.raises(CorpusError, match="changed while it was converted"):
        convert(tmp_path / "data", path)
    assert not (tmp_path / "data").exists()


def test_stored_value_that_differs_is_found(tmp_path, monkeypatch):
    """V60: rows are read back; here the disk returns another byte."""
    path = write(tmp_path / "a.h5", make_trial(4))
    real = engine.create_columns.__globals__["os"].pread
    monkeypatch.setattr("os.pread", lambda *args: bytes(b ^ 1 for b in real(*args)))
    with pytest.raises(OSError, match=r"not stored as it was written \[V60\]"):
        convert(tmp_path / "data", path)
    assert not (tmp_path / "data").exists()


def test_opening_needs_no_h5py_and_no_source(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", make_trial(4))
    convert(tmp_path / "data", path)
    path.unlink()
    monkeypatch.setitem(sys.modules, "h5py", None)

    def fail() -> Sources:
        raise AssertionError("sources were asked for")

    assert ensure_dataset(tmp_path / "data", get_sources=fail, layout=ROBOHIVE).rows == 3
    assert open_published(tmp_path / "data").rows == 3


PEAK = """
import sys
from pathlib import Path
import h5py, huggingface_hub, tqdm, filelock, torch, tensordict
from replaykit.datasets.convert import ConvertOptions, ensure_dataset
from replaykit.datasets.robohive import ROBOHIVE
from replaykit.datasets.sources import Sources
def peak():
    return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM"))
small, large, work = map(Path, sys.argv[1:4])
def convert(path):
    sources = Sources.local([path])
    ensure_dataset(work / path.stem, get_sources=lambda: sources, layout=ROBOHIVE,
                   options=ConvertOptions(block_bytes=1 << 20))
convert(small)
before = peak()
convert(large)
print(peak() - before)
"""


@pytest.mark.pitfall("DS15")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_does_not_grow_with_the_corpus(tmp_path):
    """64 MB of source, 128 MB of columns, 8 MB of slack: blocks of 1 MiB and the episode list."""
    write(tmp_path / "small.h5", make_trial(50))
    with RoboHiveWriter(tmp_path / "large.h5") as writer:
        for seed in range(8):
            trial = make_trial(40, seed=seed, infos=False)
            # One trial alone is 8 times the block.
            trial["env_infos"] = {"image": np.full((40, 200_000), seed, np.uint8)}
            writer.add_trial(**trial)
    command = [
        sys.executable,
        "-c",
        PEAK,
        *(str(tmp_path / n) for n in ("small.h5", "large.h5", "")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * 1024
    data = open_published(tmp_path / "large")
    assert data.columns["info", "image"].shape == (8 * 39, 200_000)
    assert data.columns["next", "info", "image"][::39, 7].tolist() == list(range(8))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_does_not_grow_with_the_length_of_an_episode(tmp_path):
    """One trial of two million records, of 13 bytes each: ids and flags alone are 38 MB."""
    records = 2_000_000
    write(tmp_path / "small.h5", make_trial(50))
    with h5py.File(tmp_path / "large.h5", "w") as file:
        for name in ("observations", "actions"):
            file[f"Trial0/{name}"] = np.zeros((records, 1), np.float16)
        file["Trial0/actions"][-1] = np.nan
        file["Trial0/rewards"] = np.zeros(records, np.float32)
        file["Trial0/time"] = np.arange(records, dtype=np.float32)
        file["Trial0/done"] = np.arange(records) == records - 1
        file["Trial0/env_infos/goal"] = np.ones(1, np.float16)
    arguments = [str(tmp_path / name) for name in ("small.h5", "large.h5", "")]
    command = [sys.executable, "-W", "ignore", "-c", PEAK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * 1024
    data = open_published(tmp_path / "large")
    assert data.columns["next", "done"].flatten().nonzero().flatten().tolist() == [records - 2]
    assert data.columns["next", "terminated"][-1]
    assert data.columns["info", "goal"].sum(dtype=torch.float64) == records - 1
    verify_published(tmp_path / "large")


@contextmanager
def limited(what: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@pytest.mark.parametrize("limit", [50, 1000, 2000, 3000])
def test_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, limit):
    """A limit on the file size stands for the full disk.

    The columns of the 49 rows need up to 2352 bytes, the manifest more. With the check in advance
    switched off, the columns themselves meet the limit, when they are made or reserved.
    """
    path = write(tmp_path / "a.h5", make_trial(50))
    target = tmp_path / "here" / "data"
    for look_ahead in (True, False):
        if not look_ahead:
            monkeypatch.setattr("replaykit.datasets.columns.require_room", lambda *_: None)
        with limited(resource.RLIMIT_FSIZE, limit), pytest.raises(OSError) as caught:
            convert(target, path)
        assert caught.value.errno == errno.EFBIG
        message = str(caught.value)
        assert "bytes are needed for" in message
        assert "choose another directory" in message
        assert str(target.parent) in message
        assert [p.name for p in target.parent.iterdir()] == [".data.lock"]


def test_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", make_trial(5))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=100))
    monkeypatch.setattr("os.pwrite", None)
    with pytest.raises(OSError, match=r"bytes are needed for .*100 bytes are free"):
        convert(tmp_path / "data", path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".data.lock", "a.h5"]


@pytest.mark.pitfall("DS15")
@pytest.mark.parametrize(("tries", "times"), [(3, 10), pytest.param(12, 4, marks=pytest.mark.long)])
def test_conversion_keeps_up_with_plain_reading(tmp_path, tries, times):
    """N14: 20 times slower was seen. Four times is promised for compressed files, as RoboSet's are
    (see the benchmark); ten is asked where a busy machine must not fail the test. The best of
    several tries counts."""
    path = write(tmp_path / "a.h5", *(make_trial(200, seed=k, widths=(60, 9)) for k in range(12)))
    leaves, plain, converted = leaf_paths(path), [], []
    sources = Sources.local([path])
    for _ in range(tries):
        begin = time.perf_counter()
        with h5py.File(path) as file:
            values = [trial[leaf][...] for trial in file.values() for leaf in leaves]
        middle = time.perf_counter()
        ensure_dataset(tmp_path / "data", get_sources=lambda: sources, layout=ROBOHIVE, force=True)
        plain.append(middle - begin)
        converted.append(time.perf_counter() - middle)
    assert len(values) == 12 * len(leaves)
    assert min(converted) < times * min(plain)


@pytest.mark.parametrize("bad", [0, -1])
def test_block_of_no_bytes_is_refused(bad):
    with pytest.raises(ValueError, match=f"block_bytes >= 1, got {bad}"):
        ConvertOptions(block_bytes=bad)
