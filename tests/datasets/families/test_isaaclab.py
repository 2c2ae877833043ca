"""Isaac Lab: files that the test writes as the recorder does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import Policies
from replaykit.datasets.families.robomimic import ISAACLAB
from replaykit.errors import CorpusError
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted

ARM, CUBE = "articulation/robot/joint_position", "rigid_object/cube/root_pose"


def write(
    path: Path, demos: dict[str, tuple[int, bool | None]]
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Demos by name: steps, and whether they say that they succeeded."""
    histories = {}
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        total = sum(steps for steps, _ in demos.values())
        data.attrs.update({"total": total, "env_args": "{}"})
        for number, (name, (steps, success)) in enumerate(demos.items()):
            draw = np.random.default_rng(number)
            history = {
                "arm": draw.normal(size=(steps + 1, 3)).astype(np.float32),
                "cube": draw.normal(size=(steps + 1, 7)).astype(np.float32),
                "action": draw.uniform(-1, 1, (steps, 2)).astype(np.float32),
            }
            histories[name] = history
            demo = data.create_group(name)
            demo.attrs["num_samples"] = steps
            if success is not None:
                demo.attrs["success"] = success
            demo["actions"] = history["action"]
            demo["obs/joint_pos"] = history["arm"][:-1]
            demo["obs/actions"] = np.concatenate([np.zeros((1, 2), "f4"), history["action"][:-1]])
            demo["obs/datagen_info/eef_pose/arm"] = history["arm"][:-1] * 2
            for key, values in ((ARM, history["arm"]), (CUBE, history["cube"])):
                demo[f"states/{key}"] = values[1:]
                demo[f"initial_state/{key}"] = values[:1]
    return path, histories


@pytest.mark.parametrize("success", [True, False, None])
def test_every_row_is_that_of_the_file(tmp_path, quietly, success):
    path, histories = write(tmp_path / "a.hdf5", {"demo_7": (4, success), "demo_12": (3, False)})
    data = quietly(path, ISAACLAB)
    check(CORPORA["isaaclab"], path, data.published)
    assert_ted(data.published)
    rows, count = data[:], 4 if success else 3
    assert data.episode_table["length"].tolist() == [count, 2]
    assert data.episode_table["success"].tolist() == [-1 if success is None else success, 0]
    assert data.published.manifest.report["left_out"] == []
    # The states are those before and after the action, and the first one is stored apart.
    arm = histories["demo_7"]["arm"]
    np.testing.assert_array_equal(rows[("state", *ARM.split("/"))][:count], arm[:count])
    np.testing.assert_array_equal(rows[("next", "state", *ARM.split("/"))][:count], arm[1:][:count])


def test_solved_demonstration_without_its_last_row_ends_truncated(tmp_path, quietly):
    path, _ = write(tmp_path / "a.hdf5", {"demo_0": (4, True)})
    data = quietly(path, ISAACLAB, policies=Policies(unrecorded="drop"))
    assert_ted(data.published)
    assert data.episode_table["length"].tolist() == [3]
    assert data.episode_table["truncated"].tolist() == [True]
    assert data.episode_table["terminated"].tolist() == [False]


@pytest.mark.parametrize(
    ("shift", "said"), [(0, "is the action of the same record"), (1, "is neither")]
)
def test_observations_of_another_time_are_refused(tmp_path, quietly, shift, said):
    """Recordings of real robots reuse the layout with another alignment."""
    path, histories = write(tmp_path / "a.hdf5", {"demo_0": (5, True)})
    with h5py.File(path, "a") as file:
        values = np.roll(histories["demo_0"]["action"], -shift, axis=0)
        file["data/demo_0/obs/actions"][...] = values
    with pytest.raises(CorpusError, match=rf"data/demo_0/obs/actions: .*{said}.*V51"):
        quietly(path, ISAACLAB)


@pytest.mark.parametrize(
    ("said", "success"),
    [
        ("False", 0), ("True", 1), (np.bytes_(b"false"), 0), ("0", 0), (np.float32(0), 0),
        (np.array([1]), 1), (np.uint8(1), 1),
    ],
)  # fmt: skip
def test_success_in_every_form_it_is_stored_in(tmp_path, quietly, said, success):
    """A text is not empty, and would be true whatever it says: a false "terminated"."""
    path, _ = write(tmp_path / "a.hdf5", {"demo_0": (4, None)})
    with h5py.File(path, "a") as file:
        file["data/demo_0"].attrs["success"] = said
    data = quietly(path, ISAACLAB)
    assert data.episode_table["success"].tolist() == [success]
    assert data.episode_table["terminated"].tolist() == [bool(success)]
    assert data.episode_table["length"].tolist() == [3 + success]


@pytest.mark.parametrize("said", ["maybe", "", 2, -1, 0.5, np.nan, np.array([1, 0])])
def test_success_other_than_true_or_false_is_an_error(tmp_path, quietly, said):
    path, _ = write(tmp_path / "a.hdf5", {"demo_0": (4, True), "demo_1": (3, None)})
    with h5py.File(path, "a") as file:
        file["data/demo_1"].attrs["success"] = said
    message = r"a\.hdf5: data/demo_1/success: is .*, expected true or false.*V30"
    with pytest.raises(CorpusError, match=message):
        quietly(path, ISAACLAB)
    data = quietly(path, ISAACLAB, policies=Policies(on_invalid="skip"))
    assert data.published.groups() == ["data/demo_0"]


@pytest.mark.parametrize("bare", ["demo_0", "demo_1"])
@pytest.mark.parametrize("missing", ["pad", "drop"])
def test_demonstrations_with_and_without_states_keep_their_own_states(
    tmp_path, quietly, bare, missing
):
    """Each demonstration has its states with the first one before them, whichever lacks them."""
    path, histories = write(tmp_path / "a.hdf5", {"demo_0": (4, True), "demo_1": (5, True)})
    with h5py.File(path, "a") as file:
        del file[f"data/{bare}/states"], file[f"data/{bare}/initial_state"]
    data = quietly(path, ISAACLAB, policies=Policies(missing=missing))
    assert data.episode_table["length"].tolist() == [4, 5]
    rows, key = data[:], ("state", *ARM.split("/"))
    joined = np.concatenate([histories[name]["arm"][:-1] for name in histories])
    np.testing.assert_array_equal(rows["observation", "joint_pos"], joined)
    if missing == "drop":
        assert key not in data.published.columns
        return
    here = slice(4, 9) if bare == "demo_0" else slice(0, 4)
    arm = histories["demo_1" if bare == "demo_0" else "demo_0"]["arm"]
    np.testing.assert_array_equal(rows[key][here], arm[:-1])
    np.testing.assert_array_equal(rows[("next", *key)][here], arm[1:])
    present = rows[("present", *key)].tolist()
    assert present == [t in range(*here.indices(9)) for t in range(9)]


def test_alignment_that_nothing_confirms_is_reported(tmp_path, quietly):
    path, _ = write(tmp_path / "a.hdf5", {"demo_0": (4, True), "demo_1": (5, True)})
    assert quietly(path, ISAACLAB, target="with").published.manifest.report["warnings"] == []
    with h5py.File(path, "a") as file:
        for name in ("demo_0", "demo_1"):
            del file[f"data/{name}/obs/actions"]
    notes = quietly(path, ISAACLAB).published.manifest.report["warnings"]
    assert [(note["rule"], note["count"], note["first"]) for note in notes] == [
        ("V51", 2, "a.hdf5: data/demo_0")
    ]
    assert "without obs/actions nothing confirms" in notes[0]["text"]


def test_missing_first_state_is_named_or_skipped(tmp_path, quietly):
    for demos, rule in (({"demo_1": (4, True)}, ".*missing.*V12"), ({"demo_0": (4, True)}, ".*V")):
        path, _ = write(tmp_path / "a.hdf5", demos | {"demo_1": (3, True)})
        with h5py.File(path, "a") as file:
            del file[f"data/demo_1/initial_state/{CUBE}"]
        said = rf"a\.hdf5: data/demo_1/initial_state/{CUBE}: {rule}"
        with pytest.raises(CorpusError, match=said):
            quietly(path, ISAACLAB)
    data = quietly(path, ISAACLAB, policies=Policies(on_invalid="skip"))
    assert data.published.groups() == ["data/demo_0"]


def test_file_with_states_as_one_array_is_refused(tmp_path, quietly):
    path, _ = write(tmp_path / "a.hdf5", {"demo_0": (4, True)})
    with h5py.File(path, "a") as file:
        del file["data/demo_0/states"]
        file["data/demo_0/states"] = np.zeros((4, 9))
    with pytest.raises(CorpusError, match=r"a\.hdf5: this is no file of isaaclab.*V04"):
        quietly(path, ISAACLAB)
