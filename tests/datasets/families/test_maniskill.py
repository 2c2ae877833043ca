"""ManiSkill: each row against what h5py reads, and files with the traps of the family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets.families.robomimic import MANISKILL
from replaykit.errors import CorpusError
from tests.datasets.trials import assert_ted


def trajectory(steps: int, *, seed: int = 0, **more: Any) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "obs/agent/qpos": draw.normal(size=(steps + 1, 3)).astype(np.float32),
        "obs/sensor_data/cam/depth": draw.integers(0, 1 << 16, (steps + 1, 4, 5, 1), np.uint16),
        "env_states/actors/cube": draw.normal(size=(steps + 1, 13)).astype(np.float32),
        "actions": draw.uniform(-1, 1, (steps, 2)).astype(np.float32),
        "terminated": np.zeros(steps, np.bool_),
        "truncated": np.zeros(steps, np.bool_),
        "success": np.arange(steps) == steps // 2,
        **more,
    }


def write(path: Path, trajectories: dict[str, dict[str, Any]]) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in trajectories.items():
            for key, value in values.items():
                if value is not None:
                    file[f"{name}/{key}"] = value
    return path


def test_nested_observations_depth_and_success_in_the_middle(tmp_path, quietly):
    values = trajectory(6)
    data = quietly(write(tmp_path / "a.h5", {"traj_0": values}), MANISKILL)
    assert_ted(data.published)
    rows = data[:]
    depth = values["obs/sensor_data/cam/depth"]
    assert (
        rows["observation", "sensor_data", "cam", "depth"].numpy().tobytes() == depth[:-1].tobytes()
    )
    following = rows["next", "observation", "sensor_data", "cam", "depth"].numpy()
    assert following.tobytes() == depth[1:].tobytes()
    assert following.dtype == np.uint16
    # A recorder that was closed early: no flag, so truncated; success ends nothing.
    assert data.episode_table["truncated"].tolist() == [True]
    assert rows["next", "success"].flatten().tolist() == [t == 3 for t in range(6)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"episode_id": 0, "elapsed_steps": 5}, r"traj_0/actions: has 4 records.*says 5 .*V15"),
        ({"episode_id": 3, "elapsed_steps": 4}, r"traj_0: a\.json has no episode of the id 0.*V15"),
        ("[1, 2", r"a\.json, which describes it, cannot be read.*V04"),
    ],
)
def test_json_that_contradicts_the_arrays_is_an_error(tmp_path, quietly, text, message):
    path = write(tmp_path / "a.h5", {"traj_0": trajectory(4)})
    said = text if isinstance(text, str) else json.dumps({"episodes": [text]})
    path.with_suffix(".json").write_text(said)
    with pytest.raises(CorpusError, match=message):
        quietly(path, MANISKILL)


def test_states_stand_for_observations_that_were_not_recorded(tmp_path, quietly):
    lacking = {"obs/agent/qpos": None, "obs/sensor_data/cam/depth": None}
    values = trajectory(4, **lacking)
    path = write(tmp_path / "a.h5", {"traj_0": values})
    data = quietly(path, MANISKILL)
    assert_ted(data.published)
    cube = values["env_states/actors/cube"]
    np.testing.assert_array_equal(data[:]["observation", "actors", "cube"], cube[:-1])
    values["env_states/actors/cube"] = None
    with pytest.raises(CorpusError, match=r"traj_0: there are neither observations.*V12"):
        quietly(write(tmp_path / "b.h5", {"traj_0": values}), MANISKILL, "other")
