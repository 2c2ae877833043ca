"""Files of RoboHive's layout that were relabelled, or written after the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from replaykit.datasets import Policies, convert
from replaykit.datasets.families import ROBOHIVE, RoboHiveLayout
from replaykit.errors import CorpusError
from replaykit.testing.robohive_files import RoboHiveWriter

RELABELLED = RoboHiveLayout(reward="relabelled")
AFTER = RoboHiveLayout(infos="after")
STATES = np.random.default_rng(0).normal(size=(2, 7, 3))
ACTIONS = np.random.default_rng(1).normal(size=(2, 6, 2))
SCORES = np.random.default_rng(2).normal(size=(2, 7))


def _state_records(path: Path, shift: float = 0.0) -> Path:
    with RoboHiveWriter(path) as writer:
        for states, actions, scores in zip(STATES, ACTIONS, SCORES, strict=True):
            infos = {"obs_dict/qpos": states, "rwd_dense": scores}
            writer.add_trial(
                states, actions, scores + shift, np.arange(7) == 6, np.arange(7.0), infos
            )
    return path


def _after(path: Path, *, is_done: bool = True, tail: bool = False) -> Path:
    """Steps: what a record holds but for observation and action is of the state it led to."""
    with RoboHiveWriter(path) as writer:
        for states, actions, scores in zip(STATES, ACTIONS, SCORES, strict=True):
            infos = {"obs_dict/qpos": states[1:], "rwd_dense": scores[1:]}
            writer.add_trial(
                states[:6], actions[:5] if tail else actions, scores[1:],
                (np.arange(6) == 5) & is_done, np.arange(6.0), infos, tail=tail,
            )  # fmt: skip
    return path


def test_relabelled_rewards_belong_to_the_next_state(tmp_path):
    path = _state_records(tmp_path / "a.h5", shift=1.0)
    with pytest.raises(CorpusError, match=r'RoboHiveLayout\(reward="relabelled"\).*\[V52\]'):
        convert(path, ROBOHIVE, tmp_path / "refused")
    data = convert(path, RELABELLED, tmp_path / "data")
    expected = (SCORES[:, 1:] + 1.0).reshape(-1, 1)
    np.testing.assert_array_equal(data[:]["next", "reward"], expected)
    np.testing.assert_array_equal(data[:]["info", "rwd_dense"], SCORES[:, :-1].reshape(-1))
    files = data.published.manifest.report["files"]
    assert [file["reward"] for file in files] == [["relabelled"]]


def test_relabelled_layout_refuses_infos_after_the_step(tmp_path):
    with pytest.raises(CorpusError, match=r"\[V51\]"):
        convert(_after(tmp_path / "a.h5"), RELABELLED, tmp_path / "data")


@pytest.mark.parametrize("is_done", [False, True])
def test_steps_are_read_as_they_are(tmp_path, is_done):
    path = _after(tmp_path / "a.h5", is_done=is_done)
    with pytest.raises(CorpusError, match=r'RoboHiveLayout\(infos="after"\).*\[V51\]'):
        convert(path, ROBOHIVE, tmp_path / "refused")
    data = convert(path, AFTER, tmp_path / "data")
    rows, count = data[:], 6 if is_done else 5
    assert len(data) == 2 * count
    for episode in range(2):
        mine = rows[rows["episode"] == episode]
        states, arrived = STATES[episode], STATES[episode, 1 : count + 1]
        np.testing.assert_array_equal(mine["observation"], states[:count])
        np.testing.assert_array_equal(mine["action"], ACTIONS[episode, :count])
        np.testing.assert_array_equal(mine["next", "reward"][:, 0], SCORES[episode, 1 : count + 1])
        np.testing.assert_array_equal(mine["next", "info", "obs_dict", "qpos"], arrived)
        np.testing.assert_array_equal(mine["next", "observation"][:5], states[1:6])
        assert "info" not in mine
        ends = mine["next", "terminated"][:, 0].tolist()
        assert ends == [False] * (count - 1) + [is_done]
        assert mine["next", "truncated"][-1].item() is not is_done
        if is_done:  # the observation of the last state was not recorded
            assert mine["next", "observed"][:, 0].tolist() == [True] * 5 + [False]


def test_records_of_states_are_not_taken_for_steps(tmp_path):
    path = _state_records(tmp_path / "a.h5")
    policies = Policies(unrecorded="drop")
    with pytest.raises(CorpusError, match=r"describe the state of their record.*\[V51\]"):
        convert(path, AFTER, tmp_path / "data", policies=policies)


def test_steps_with_a_closing_record_are_refused(tmp_path):
    path = _after(tmp_path / "a.h5", is_done=False, tail=True)
    with pytest.raises(CorpusError, match=r"a record of NaN closes the trial.*\[V50\]"):
        convert(path, AFTER, tmp_path / "data")


def test_layout_names_state_their_options():
    names = {each.name for each in (ROBOHIVE, RELABELLED, AFTER)}
    assert names == {"robohive-trials", "robohive-trials-relabelled", "robohive-trials-after"}
    both = RoboHiveLayout(reward="relabelled", infos="after")
    assert both.name == "robohive-trials-relabelled-after"
    for wrong in ({"reward": "dense"}, {"infos": "now"}):
        with pytest.raises(ValueError, match="expected"):
            RoboHiveLayout(**wrong)
