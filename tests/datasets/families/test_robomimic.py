"""robomimic, robosuite and LIBERO: rows, files with their traps, and what tells them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import Policies
from replaykit.datasets.families.robomimic import LIBERO, ROBOMIMIC, ROBOSUITE, RobosuiteLayout
from replaykit.errors import CorpusError
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted


def demo(steps: int, *, seed: int = 0, success: int = 0, **more: Any) -> dict[str, Any]:
    """A demonstration whose last ``success`` steps are successful."""
    draw = np.random.default_rng(seed)
    position = draw.normal(size=(steps + 1, 3))
    image = draw.integers(0, 256, (steps + 1, 4, 5, 3), np.uint8)
    done = (np.arange(steps) >= steps - success).astype(np.int64)
    return {
        "obs/position": position[:-1],
        "obs/image": image[:-1],
        "next_obs/position": position[1:].copy(),
        "next_obs/image": image[1:],
        "actions": draw.uniform(-1, 1, (steps, 2)),
        "states": draw.normal(size=(steps, 4)),
        "rewards": done.astype(np.float64),
        "dones": done,
        **more,
    }


def write(path: Path, demos: dict[str, dict[str, Any]], **masks: list[str]) -> Path:
    with h5py.File(path, "w") as file:
        steps = [
            values["states" if values["actions"] is None else "actions"]
            for values in demos.values()
        ]
        file.create_group("data").attrs["total"] = sum(map(len, steps))
        for name, values in demos.items():
            group = file["data"].create_group(name)
            for key, value in values.items():
                if key.startswith("@"):
                    group.attrs[key[1:]] = value
                elif value is not None:
                    group[key] = value
        for name, listed in masks.items():
            file[f"mask/{name}"] = np.array(listed, "S8")
    return path


def test_missing_next_observations_drop_rows_without_a_known_outcome(tmp_path, quietly):
    lacking = {"next_obs/position": None, "next_obs/image": None}
    one, two = demo(4, success=1, **lacking), demo(5, seed=1, **lacking)
    data = quietly(write(tmp_path / "a.hdf5", {"demo_0": one, "demo_1": two}), ROBOMIMIC)
    assert_ted(data.published)
    assert data.episode_table["length"].tolist() == [4, 4]
    assert data[:]["next", "observed"].flatten().tolist() == [True] * 3 + [False] + [True] * 4
    assert data.episode_table["terminated"].tolist() == [True, False]


def test_next_observation_that_is_not_the_next_one_is_named(tmp_path, quietly):
    values = demo(5)
    values["next_obs/position"][2] += 1
    path = write(tmp_path / "a.hdf5", {"demo_0": demo(3, seed=1), "demo_1": values})
    message = r"data/demo_1/next\.observation\.position, record 2: .*V22"
    with pytest.raises(CorpusError, match=message):
        quietly(path, ROBOMIMIC)
    data = quietly(path, ROBOMIMIC, policies=Policies(on_invalid="skip"))
    assert data.published.groups() == ["data/demo_0"]


@pytest.mark.parametrize(
    ("missing", "keys"), [("drop", {"position"}), ("pad", {"position", "image"})]
)
def test_key_that_some_demonstrations_lack(tmp_path, quietly, missing, keys):
    lacking = {"obs/image": None, "next_obs/image": None}
    full = demo(3)
    path = write(tmp_path / "a.hdf5", {"demo_0": full, "demo_1": demo(4, seed=1, **lacking)})
    # The key is asked for, whichever demonstration has it.
    demos = {"demo_0": demo(3, **lacking), "demo_1": demo(4, seed=1)}
    for file, lacks in ((path, 1), (write(tmp_path / "b.hdf5", demos), 0)):
        said = rf"data/demo_{lacks}/(next_)?obs/image: the key is missing.*V12"
        with pytest.raises(CorpusError, match=said):
            quietly(file, ROBOMIMIC)
    data = quietly(path, ROBOMIMIC, policies=Policies(missing=missing))
    rows = data[:]
    assert set(rows["observation"].keys()) == keys
    if missing == "pad":
        assert rows["present", "observation", "image"].tolist() == [True] * 3 + [False] * 4
        np.testing.assert_array_equal(rows["observation", "image"][:3], full["obs/image"])
        assert not rows["observation", "image"][3:].any()
        assert not rows["next", "observation", "image"][3:].any()
    else:
        left_out = {e["key"]: e["why"] for e in data.published.manifest.report["left_out"]}
        assert "missing from 1 of 2 episodes" in left_out["obs/image"]


@pytest.mark.parametrize("lone", ["obs/force", "next_obs/force"])
def test_observation_without_the_next_one_is_named(tmp_path, quietly, lone):
    """Rows would start from a key that they never arrive at, or the other way round."""
    path = write(tmp_path / "a.hdf5", {"demo_0": demo(3, **{lone: np.ones((3, 1))})})
    other = {"obs/force": "next_obs/force", "next_obs/force": "obs/force"}[lone]
    said = f"data/demo_0/{other}: the key is missing, but {lone} is there"
    with pytest.raises(CorpusError, match=rf"a\.hdf5: {said} \[V12\]"):
        quietly(path, ROBOMIMIC)
    data = quietly(path, ROBOMIMIC, policies=Policies(missing="drop"))
    (note,) = data.published.manifest.report["warnings"]
    assert (note["rule"], note["count"]) == ("V12", 1)
    there = ("observation", "force") if lone == "obs/force" else ("next", "observation", "force")
    data = quietly(path, ROBOMIMIC, "less", policies=Policies(exclude=[there]))
    assert data.published.manifest.report["warnings"] == []
    none = Policies(exclude=["observation", ("next", "observation")])
    (note,) = quietly(path, ROBOMIMIC, "none", policies=none).published.manifest.report["warnings"]
    assert note["rule"] == "V22"
    assert "it is unverified whether steps arrive" in note["text"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"states": None, "states/articulation/arm": np.zeros((3, 2))}, "Isaac Lab"),
        ({"initial_state/x": np.zeros((1, 2))}, "Isaac Lab"),
    ],
)
def test_similar_files_of_other_layouts_are_refused(tmp_path, quietly, more, said):
    """N30: there the observations are those after the action."""
    path = write(tmp_path / "a.hdf5", {"demo_0": demo(3, **more)})
    with pytest.raises(CorpusError, match=rf"a\.hdf5: this is no file of robomimic.*{said}.*V04"):
        quietly(path, ROBOMIMIC)


def raw(steps: int, **more: Any) -> dict[str, Any]:
    draw = np.random.default_rng(steps)
    return {"states": draw.normal(size=(steps, 4)), "actions": draw.normal(size=(steps, 2)), **more}


def test_raw_and_robomimic_layouts_refuse_each_others_files(tmp_path, quietly):
    raw_file = write(tmp_path / "raw.hdf5", {"demo_1": raw(4)})
    full = write(tmp_path / "full.hdf5", {"demo_1": demo(4)})
    with pytest.raises(CorpusError, match=r"raw\.hdf5: .*robosuite's raw demonstrations.*V04"):
        quietly(raw_file, ROBOMIMIC)
    with pytest.raises(CorpusError, match=r"full\.hdf5: .*one with observations.*V04"):
        quietly(full, ROBOSUITE)
    assert len(quietly(raw_file, ROBOSUITE)) == 3


def test_controls_of_old_releases_are_named_by_the_caller(tmp_path, quietly):
    values = raw(4, actions=None)
    values["joint_velocities"] = np.arange(8.0).reshape(4, 2)
    values["gripper_actuations"] = np.arange(4.0)[:, None]
    values["right_dpos"] = np.zeros((4, 0))
    path = write(tmp_path / "a.hdf5", {"demo_1": values})
    with pytest.raises(CorpusError, match=r"no 'actions'; they hold 'gripper_actuations', .*V12"):
        quietly(path, ROBOSUITE)
    layout = RobosuiteLayout(actions=("joint_velocities", "gripper_actuations"))
    data = quietly(path, layout)
    joined = np.concatenate([values["joint_velocities"], values["gripper_actuations"]], 1)
    np.testing.assert_array_equal(data[:]["action"], joined[:3])
    left_out = {entry["key"] for entry in data.published.manifest.report["left_out"]}
    assert left_out == {"right_dpos"}


@pytest.mark.parametrize(
    "sign",
    [
        "bddl_file_name", "bddl_file_content", "problem_info", "robot_states", "init_state",
        "init_state/dataset",
    ],
)  # fmt: skip
def test_any_single_sign_distinguishes_libero_from_robomimic(tmp_path, quietly, sign):
    """N30: read as robomimic, every observation would be one step late."""
    path = CORPORA["libero"].write(tmp_path)
    with h5py.File(path, "a") as file:
        data, demos = file["data"], list(file["data"].values())
        data.attrs["macros_image_convention"] = "opengl"
        del data.attrs["bddl_file_name"]
        for demo in demos:
            if sign == "init_state":
                demo.attrs["init_state"] = np.zeros(3)
            elif sign == "init_state/dataset":
                demo["init_state"] = np.zeros(3)
            elif sign != "robot_states":
                data.attrs[sign] = "x"
            if sign != "robot_states":
                del demo["robot_states"]
        images, actions = demos[0]["obs/rgb"][()], demos[0]["actions"][()]
    name = sign.split("/")[0]
    message = rf"task_demo\.hdf5: this is no file of robomimic.*LIBERO.*it has {name} \[V04\]"
    with pytest.raises(CorpusError, match=message):
        quietly(path, ROBOMIMIC)
    data = quietly(path, LIBERO, target="libero")
    assert_ted(data.published)
    assert data.published.manifest.report["files"][0]["macros_image_convention"] == "opengl"
    if sign == "robot_states":
        check(CORPORA["libero"], path, data.published)
    # What a row starts from was recorded with the row before.
    assert data.episode_table["length"].tolist() == [3, 4]
    np.testing.assert_array_equal(data[:]["observation", "rgb"][:3], images[:-1])
    np.testing.assert_array_equal(data[:]["next", "observation", "rgb"][:3], images[1:])
    np.testing.assert_array_equal(data[:]["action"][:3], actions[1:])


def test_files_without_a_sign_are_refused(tmp_path, quietly):
    path = CORPORA["libero"].write(tmp_path)
    with h5py.File(path, "a") as file:
        del file["data"].attrs["bddl_file_name"]
        for demo in file["data"].values():
            del demo["robot_states"]
    with pytest.raises(CorpusError, match=r"task_demo\.hdf5: this is no file of libero.*V04"):
        quietly(path, LIBERO)
