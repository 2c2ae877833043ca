"""Small published files: each row against what h5py reads, bit for bit, and what reports say."""

from __future__ import annotations

import shutil

import h5py
import numpy as np
import pytest

from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted

# By file: its family, the lengths of its episodes, and the sum of its rewards.
SAMPLES = {
    "d4rl/hopper_medium-v2.hdf5": ("d4rl-v2", [470, 441], 2877.9146),
    "d4rl/hopper_medium_replay-v1.hdf5": ("d4rl-v2", [40, 9], 48.2459452),
    "d4rl/hopper_medium.hdf5": ("d4rl-v0", [211, 313], 1720.0251),
    "d4rl/door-human-v1.hdf5": ("d4rl-v0", [299, 299], 730.6188),
    "robomimic/robomimic_ph_lift_low_dim.hdf5": ("robomimic", [59, 58], 10.0),
    "robosuite/panda_lift.hdf5": ("robosuite", [411], 0.0),
    "maniskill/rlboilerplate_trajectory.h5": ("maniskill", [50, 50], 2.1808),
    "minari_generated/cartpole/random-v0/data/main_data.hdf5": (
        "minari", [30, 25, 18, 31, 13], 117.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_every_row_of_a_sample_is_that_of_h5py(shared, quietly, name):
    """N15: the arrays are the data, not a template of it."""
    family, lengths, total = SAMPLES[name]
    path = shared(name)
    data = quietly(path, CORPORA[family].layout)
    check(CORPORA[family], path, data.published)
    assert_ted(data.published)
    assert data.episode_table["length"].tolist() == lengths
    rewards = data[:]["next"].get("reward", np.zeros(1))
    assert float(rewards.sum()) == pytest.approx(total, abs=1e-3)
    left_out = {e["key"]: e["why"] for e in data.published.manifest.report["left_out"]}
    # In this release they are one repeated row.
    lacking = ["infos/qpos", "infos/qvel"] if name == "d4rl/hopper_medium_replay-v1.hdf5" else []
    assert sorted(left_out) == lacking
    assert all("not recorded" in why for why in left_out.values())


def test_success_and_splits_of_the_robomimic_sample(shared, quietly):
    path = shared("robomimic/robomimic_ph_lift_low_dim.hdf5")
    data = quietly(path, CORPORA["robomimic"].layout)
    assert data[:]["next", "success"].nonzero()[:, 0].tolist() == [*range(54, 59), *range(112, 117)]
    report = data.published.manifest.report
    assert (report["splits"]["train"], report["splits"]["valid"]) == ([1], [0])
    assert len(report["splits"]) == 8
    said = next(note for note in report["warnings"] if "'train'" in note["text"])
    assert said["count"] == 179


@pytest.mark.parametrize("with_json", [True, False])
def test_descriptions_of_samples_are_in_the_report(shared, quietly, tmp_path, with_json):
    path = shared("robosuite/panda_lift.hdf5")
    with h5py.File(path) as file:
        env_info = file["data"].attrs["env_info"]
    (said,) = quietly(path, CORPORA["robosuite"].layout, "lift").published.manifest.report["files"]
    assert said["env_info"] == env_info
    path = shared("minari_generated/cartpole/random-v0/data/main_data.hdf5")
    data = quietly(path, CORPORA["minari"].layout, "cartpole")
    assert data.episode_table["source_seed"].tolist() == [100, 101, 102, 103, 104]
    assert data.published.manifest.report["files"][0]["dataset_id"] == "cartpole/random-v0"
    origin = shared("maniskill/rlboilerplate_trajectory.h5")
    path = tmp_path / origin.name
    shutil.copy(origin, path)
    if with_json:
        shutil.copy(origin.with_suffix(".json"), path.with_suffix(".json"))
    data = quietly(path, CORPORA["maniskill"].layout)
    check(CORPORA["maniskill"], path, data.published)
    for name in ("source_seed", "success"):
        assert data.episode_table[name].tolist() == [0 if with_json else -1] * 2
    report = data.published.manifest.report["files"]
    assert (report[0]["env_id"] == "PickCube-v1") if with_json else report == []
