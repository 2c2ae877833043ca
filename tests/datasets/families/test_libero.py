"""LIBERO: files that the test writes as the replay does, each row by the time it happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets.families.robomimic import LIBERO, ROBOMIMIC
from replaykit.errors import CorpusError


def write(path: Path, *lengths: int, **attributes: Any) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """Replays: states 0..T, of which the file has 0..T-1, and observations of states 1..T."""
    histories = []
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs.update({"bddl_file_name": "x.bddl", "macros_image_convention": "opengl"})
        data.attrs.update(attributes)
        for number, steps in enumerate(lengths):
            draw = np.random.default_rng(number)
            history = {
                "state": draw.normal(size=(steps + 1, 7)),
                "image": draw.integers(0, 256, (steps + 1, 4, 5, 3), np.uint8),
                "action": draw.uniform(-1, 1, (steps, 3)),
            }
            histories.append(history)
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = steps
            demo["actions"] = history["action"]
            demo["states"] = history["state"][:-1]
            demo["robot_states"] = history["state"][1:, :2]
            demo["obs/agentview_rgb"] = history["image"][1:]
            demo["obs/ee_pos"] = history["state"][1:, :3]
            demo["rewards"] = demo["dones"] = (np.arange(steps) == steps - 1).astype(np.uint8)
    return path, histories


@pytest.mark.parametrize(
    "sign",
    [
        "bddl_file_name", "bddl_file_content", "problem_info", "robot_states", "init_state",
        "init_state/dataset",
    ],
)  # fmt: skip
def test_any_single_sign_distinguishes_libero_from_robomimic(tmp_path, quietly, sign):
    """N30: read as robomimic, every observation would be one step late."""
    path, (history,) = write(tmp_path / "a.hdf5", 4)
    with h5py.File(path, "a") as file:
        data, demo = file["data"], file["data/demo_0"]
        del data.attrs["bddl_file_name"]
        if sign == "init_state":
            demo.attrs["init_state"] = history["state"][0]
        elif sign == "init_state/dataset":
            demo["init_state"] = history["state"][0]
        elif sign != "robot_states":
            data.attrs[sign] = "x"
        if sign != "robot_states":
            del demo["robot_states"]
    name = sign.split("/")[0]
    message = rf"a\.hdf5: this is no file of robomimic.*LIBERO.*it has {name} \[V04\]"
    with pytest.raises(CorpusError, match=message):
        quietly(path, ROBOMIMIC)
    data = quietly(path, LIBERO, target="libero")
    assert data.published.manifest.report["files"][0]["macros_image_convention"] == "opengl"
    rows = data[:]
    np.testing.assert_array_equal(rows["observation", "ee_pos"], history["state"][1:4, :3])
    np.testing.assert_array_equal(rows["next", "observation", "ee_pos"], history["state"][2:5, :3])
    np.testing.assert_array_equal(rows["state"], history["state"][1:4])
    np.testing.assert_array_equal(rows["action"], history["action"][1:])


def test_files_without_a_sign_are_refused(tmp_path, quietly):
    path, _ = write(tmp_path / "a.hdf5", 4)
    with h5py.File(path, "a") as file:
        del file["data/demo_0/robot_states"], file["data"].attrs["bddl_file_name"]
    with pytest.raises(CorpusError, match=r"a\.hdf5: this is no file of libero.*V04"):
        quietly(path, LIBERO)
