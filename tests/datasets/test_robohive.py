"""The rules of the RoboHive trial layout, each on the smallest file that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaykit.datasets import Policies
from replaykit.datasets import convert as convert_files
from replaykit.datasets.engine.conversion import ensure_dataset
from replaykit.datasets.engine.episode_finders import natural_key
from replaykit.datasets.engine.h5 import H5Member
from replaykit.datasets.engine.layout import SourceWindow
from replaykit.datasets.engine.locations import Location, RuleFindings
from replaykit.datasets.families import ROBOHIVE, RoboHiveLayout
from replaykit.datasets.publishing import Published
from replaykit.datasets.sources import Sources
from replaykit.errors import CorpusError
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial

HERE = Location(Path("/data/a.h5"), "a.h5", "Trial3")


def convert(tmp_path: Path, named: dict[str, dict[str, Any]]) -> Published:
    path = tmp_path / "a.h5"
    with RoboHiveWriter(path, float_dtype=None) as writer:
        for name, trial in named.items():
            writer.add_trial(**trial, name=name)
    return ensure_dataset(
        tmp_path / "data", get_sources=lambda: Sources.local([path]), layout=ROBOHIVE
    )


def group(name: str, *children: str) -> H5Member:
    return H5Member(name, True, children or ("actions", "observations"))


# -- names and numbers -------------------------------------------------------------------------


def test_natural_order_of_names_with_several_numbers_and_very_long_ones():
    names = ["Trial10", "Trial0-1", "Trial2", "Trial0", "Trial1", "Trial0-0"]
    ordered = ["Trial0", "Trial0-0", "Trial0-1", "Trial1", "Trial2", "Trial10"]
    assert sorted(names, key=natural_key) == ordered
    assert natural_key("Trial" + "9" * 6000) > natural_key("Trial" + "1" * 6000)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 10**30), unique=True))
def test_natural_order_is_the_order_of_the_numbers(numbers):
    names = sorted((f"Trial{number}" for number in numbers), key=natural_key)
    assert names == [f"Trial{number}" for number in sorted(numbers)]


@given(st.lists(st.text("ab019-", max_size=6), unique=True))
def test_natural_order_is_total(names):
    ordered = sorted(names, key=natural_key)
    backwards = names[::-1]
    assert ordered == sorted(backwards, key=natural_key)
    assert len({natural_key(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    ("names", "numbers", "by_order"),
    [
        (["Trial0", "Trial1", "Trial10", "Trial2"], [0, 1, 2, 10], False),
        (["Trial60"], [60], False),
        (["Trial7", "Trial3b", "Trial5-0"], [3, 5, 7], False),
        (["Trial0-0", "Trial0-1", "Trial1-0"], [0, 1, 2], True),
        (["Trial1", "Trial01"], [0, 1], True),
        (["demo_4", "demo_2"], [0, 1], True),
        (["Trial", "Trial3"], [0, 1], True),
        (["Trial3", "trial4"], [0, 1], True),
        (["Trial99999999999999999999", "Trial1"], [0, 1], True),
    ],
)
def test_episode_is_the_number_in_the_name_where_that_is_unambiguous(names, numbers, by_order):
    """N9: no name is parsed with a fixed cast; V33: numbers are unique in a file."""
    found = ROBOHIVE.episodes.select([group(name) for name in names], HERE, ROBOHIVE.name)
    assert list(found.episodes.groups) == sorted(names, key=natural_key)
    assert found.episodes.numbers.tolist() == numbers
    assert (found.numbering is not None) == by_order
    assert found.strangers == []


def test_unusual_names_reach_rows_and_table(tmp_path):
    """N37: rewards of [T] and [T, 1] never meet in a broadcast."""
    trials = {
        "Trial0-1": make_trial(3, seed=1),
        "Trial0-0": make_trial(4),
        "Trial10": make_trial(2),
    }
    trials["Trial0-1"]["rewards"] = trials["Trial0-1"]["rewards"].reshape(3, 1)
    found = convert(tmp_path, trials)
    assert found.groups() == ["Trial0-0", "Trial0-1", "Trial10"]
    assert found.columns["episode",].tolist() == [0, 0, 0, 1, 1, 2]
    assert found.columns["next", "reward"].shape == (6, 1)
    assert found.columns["next", "reward"].flatten().tolist() == [1.0, 2, 3, 101, 102, 1]
    why = "episodes are numbered by their order, since the group names do not give each a unique"
    assert found.manifest.report["numbering"] == [{"file": "a.h5", "why": f"{why} number"}]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("FK1-v4(expert)/FK1_Knob1OnRandom_v2d-v4/seed10/FK1_trace.h5", 10),
        ("seed2/a.h5", 2),
        ("a/seed3.h5", -1),
        ("seeds/a.h5", -1),
        ("FK1_RelaxFixed_v2d-v4_60_20230506-111653_trace.h5", -1),
        ("seed99999999999999999999/a.h5", -1),
    ],
)
def test_training_seed_is_read_from_the_directory(name, seed):
    """N10: it is a fact of the episode table; the leaf `seed` is the position of the file."""
    assert ROBOHIVE.source_seed(name) == seed


# -- what the infos say of the alignment -----------------------------------------------------------


def window(arrays: dict[str, np.ndarray], memory: dict[str, Any] | None = None) -> SourceWindow:
    notes = RuleFindings()
    records = len(arrays["observations"])
    return SourceWindow(arrays, records, HERE, notes, {} if memory is None else memory)


def arrays_of(trial: dict[str, Any], shift: int = 0) -> dict[str, np.ndarray]:
    infos = trial["env_infos"]
    obs_dict = {
        f"env_infos/obs_dict/{name}": np.concatenate([values[shift:], values[-1:].repeat(shift, 0)])
        for name, values in infos["obs_dict"].items()
    }
    return {
        "observations": trial["observations"],
        "rewards": trial["rewards"],
        "env_infos/rwd_dense": infos["rwd_dense"],
        "env_infos/rwd_sparse": infos["rwd_sparse"],
        **obs_dict,
    }


def test_infos_of_the_same_state_are_accepted():
    seen = window(arrays_of(make_trial(6)))
    ROBOHIVE.examine(seen)
    # The place found is only a hint: another trial may have it elsewhere.
    swapped = make_trial(6, seed=1)
    swapped["observations"] = np.roll(swapped["observations"], 1, axis=1)
    again = window(arrays_of(swapped), seen.memory)
    ROBOHIVE.examine(again)
    assert [*seen.notes, *again.notes] == []


@pytest.mark.parametrize("memory", [{}, {"columns": {"env_infos/obs_dict/position": 0}}])
@pytest.mark.parametrize("late", [["position", "rest"], ["position"], ["rest"]])
@pytest.mark.parametrize("records", [3, 6])
def test_leaves_of_the_next_state_are_refused(records, late, memory):
    """Also beside right ones, and when an earlier trial of the file was right."""
    trial = make_trial(records)
    arrays, shifted = arrays_of(trial), arrays_of(trial, shift=1)
    for leaf in late:
        arrays[f"env_infos/obs_dict/{leaf}"] = shifted[f"env_infos/obs_dict/{leaf}"]
    said = rf"obs_dict/{late[0]}: .*describe the state after the action.*\[V51\]"
    with pytest.raises(CorpusError, match=said):
        ROBOHIVE.examine(window(arrays, dict(memory)))


def test_one_equal_number_is_no_evidence_for_the_next_state():
    """Two records with a leaf that happens to be the observation after them: not refused."""
    arrays = arrays_of(make_trial(2))
    for name in [n for n in arrays if "obs_dict" in n]:
        del arrays[name]
    arrays["env_infos/obs_dict/x"] = np.array([arrays["observations"][1, 0], 7.0])
    seen = window(arrays)
    ROBOHIVE.examine(seen)
    assert [note.rule for note in seen.notes] == ["V51"]


def test_infos_that_never_change_are_accepted_where_the_environment_stands_still():
    arrays = arrays_of(make_trial(5))
    for name in [n for n in arrays if "obs" in n]:
        arrays[name] = np.broadcast_to(arrays[name][:1], arrays[name].shape)
    ROBOHIVE.examine(window(arrays))


@pytest.mark.parametrize("kind", ["dense", "sparse", "both", "two"])
def test_report_records_reward_kind_per_file(tmp_path, kind):
    trials = {f"Trial{k}": make_trial(4, seed=k) for k in range(2)}
    for number, trial in enumerate(trials.values()):
        infos = trial["env_infos"]
        if kind == "sparse" or (kind == "two" and number):
            trial["rewards"] = infos["rwd_sparse"]
        elif kind == "both":
            infos["rwd_sparse"] = infos["rwd_dense"]
    if kind == "two":
        with pytest.raises(CorpusError, match=r"\['sparse'\] here and \['dense'\].*\[V52\]"):
            convert(tmp_path, trials)
        return
    found = convert(tmp_path, trials)
    names = ["dense", "sparse"] if kind == "both" else [kind]
    assert found.manifest.report["files"] == [{"file": "a.h5", "reward": names}]


def test_rewards_that_cannot_be_compared_are_noted():
    arrays = arrays_of(make_trial(4))
    del arrays["env_infos/rwd_dense"], arrays["env_infos/rwd_sparse"]
    seen = window(arrays)
    ROBOHIVE.examine(seen)
    assert [(note.rule, note.quiet) for note in seen.notes] == [("V52", True)]


# -- relabelled, or written after the step ---------------------------------------------------------


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
        convert_files(path, ROBOHIVE, tmp_path / "refused")
    data = convert_files(path, RELABELLED, tmp_path / "data")
    expected = (SCORES[:, 1:] + 1.0).reshape(-1, 1)
    np.testing.assert_array_equal(data[:]["next", "reward"], expected)
    np.testing.assert_array_equal(data[:]["info", "rwd_dense"], SCORES[:, :-1].reshape(-1))
    files = data.published.manifest.report["files"]
    assert [file["reward"] for file in files] == [["relabelled"]]


def test_relabelled_layout_refuses_infos_after_the_step(tmp_path):
    with pytest.raises(CorpusError, match=r"\[V51\]"):
        convert_files(_after(tmp_path / "a.h5"), RELABELLED, tmp_path / "data")


@pytest.mark.parametrize("is_done", [False, True])
def test_steps_are_read_as_they_are(tmp_path, is_done):
    path = _after(tmp_path / "a.h5", is_done=is_done)
    with pytest.raises(CorpusError, match=r'RoboHiveLayout\(infos="after"\).*\[V51\]'):
        convert_files(path, ROBOHIVE, tmp_path / "refused")
    data = convert_files(path, AFTER, tmp_path / "data")
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
        convert_files(path, AFTER, tmp_path / "data", policies=policies)


def test_steps_with_a_closing_record_are_refused(tmp_path):
    path = _after(tmp_path / "a.h5", is_done=False, tail=True)
    with pytest.raises(CorpusError, match=r"a record of NaN closes the trial.*\[V50\]"):
        convert_files(path, AFTER, tmp_path / "data")


def test_layout_names_state_their_options():
    names = {each.name for each in (ROBOHIVE, RELABELLED, AFTER)}
    assert names == {"robohive-trials", "robohive-trials-relabelled", "robohive-trials-after"}
    both = RoboHiveLayout(reward="relabelled", infos="after")
    assert both.name == "robohive-trials-relabelled-after"
    for wrong in ({"reward": "dense"}, {"infos": "now"}):
        with pytest.raises(ValueError, match="expected"):
            RoboHiveLayout(**wrong)
