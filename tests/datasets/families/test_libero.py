"""LIBERO: what distinguishes its files, which are read one record later than robomimic's."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from replaykit.datasets.families.robomimic import LIBERO, ROBOMIMIC
from replaykit.errors import CorpusError
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted

CORPUS = CORPORA["libero"]


@pytest.mark.parametrize(
    "sign",
    [
        "bddl_file_name", "bddl_file_content", "problem_info", "robot_states", "init_state",
        "init_state/dataset",
    ],
)  # fmt: skip
def test_any_single_sign_distinguishes_libero_from_robomimic(tmp_path, quietly, sign):
    """N30: read as robomimic, every observation would be one step late."""
    path = CORPUS.write(tmp_path)
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
        check(CORPUS, path, data.published)
    # What a row starts from was recorded with the row before.
    assert data.episode_table["length"].tolist() == [3, 4]
    np.testing.assert_array_equal(data[:]["observation", "rgb"][:3], images[:-1])
    np.testing.assert_array_equal(data[:]["next", "observation", "rgb"][:3], images[1:])
    np.testing.assert_array_equal(data[:]["action"][:3], actions[1:])


def test_files_without_a_sign_are_refused(tmp_path, quietly):
    path = CORPUS.write(tmp_path)
    with h5py.File(path, "a") as file:
        del file["data"].attrs["bddl_file_name"]
        for demo in file["data"].values():
            del demo["robot_states"]
    with pytest.raises(CorpusError, match=r"task_demo\.hdf5: this is no file of libero.*V04"):
        quietly(path, LIBERO)
