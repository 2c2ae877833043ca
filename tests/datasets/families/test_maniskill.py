"""ManiSkill: each row against what h5py reads, and files with the traps of the family."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

from replaykit.datasets.families.robomimic import MANISKILL
from replaykit.errors import CorpusError
from tests.datasets.families.test_traps import edit
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted

CORPUS = CORPORA["maniskill"]


def test_recorder_that_was_closed_early_and_success_in_the_middle(tmp_path, quietly):
    path = CORPUS.write(tmp_path)
    edit(path, "truncated", np.zeros_like)
    edit(path, "success", lambda values: np.arange(len(values)) == 1)
    data = quietly(path, MANISKILL)
    check(CORPUS, path, data.published)
    assert_ted(data.published)
    assert data[:]["observation", "depth"].numpy().dtype == np.uint16
    # No flag, so truncated; success ends nothing.
    assert data.episode_table["length"].tolist() == [3, 4]
    assert data.episode_table["truncated"].tolist() == [True, True]
    assert data[:]["next", "success"].flatten().nonzero().flatten().tolist() == [1, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"episode_id": 0, "elapsed_steps": 5}, r"traj_0/actions: has 3 records.*says 5 .*V15"),
        ({"episode_id": 3}, r"traj_0: trajectory\.json has no episode of the id 0.*V15"),
        ("[1, 2", r"trajectory\.json, which describes it, cannot be read.*V04"),
    ],
)
def test_json_that_contradicts_the_arrays_is_an_error(tmp_path, quietly, text, message):
    path = CORPUS.write(tmp_path)
    said = text if isinstance(text, str) else json.dumps({"episodes": [text]})
    path.with_suffix(".json").write_text(said)
    with pytest.raises(CorpusError, match=message):
        quietly(path, MANISKILL)


def test_states_stand_for_observations_that_were_not_recorded(tmp_path, quietly):
    path = CORPUS.write(tmp_path)
    with h5py.File(path, "a") as file:
        del file["traj_0/obs"], file["traj_2/obs"]
        cube = file["traj_0/env_states/actors/cube"][()]
    data = quietly(path, MANISKILL)
    check(CORPUS, path, data.published)
    assert_ted(data.published)
    np.testing.assert_array_equal(data[:]["observation", "actors", "cube"][:3], cube[:-1])
    with h5py.File(path, "a") as file:
        del file["traj_0/env_states"], file["traj_2/env_states"]
    with pytest.raises(CorpusError, match=r"traj_0: there are neither observations.*V12"):
        quietly(path, MANISKILL, "other")
