"""What conversion leaves out, skips, finds odd or refuses: columns, warnings, errors, reports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pytest
from tensordict import TensorDict

from replaykit.datasets import BaseDatasetExperienceReplay, Policies
from replaykit.datasets.engine.conversion import ConvertOptions, ensure_dataset
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import verify_published
from replaykit.datasets.sources import SourceFile, Sources
from replaykit.errors import CorpusError
from replaykit.testing.robohive_files import make_trial
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted, convert, names, quietly, with_repeated_infos, write


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


def test_root_members_that_give_no_rows_are_listed(tmp_path):
    trials = [make_trial(4), make_trial(1, seed=1), make_trial(3, seed=2)]
    del trials[1]["env_infos"]["rwd_sparse"]  # of a trial that gives no row nothing is required
    path = write(tmp_path / "a.h5", *trials)
    with h5py.File(path, "a") as file:
        file["notes"] = np.arange(3)
        file["Trial5/observations"] = np.zeros((3, 2))
        file["Trial6"] = h5py.SoftLink("/Trial0")
        file["Trial7"] = h5py.ExternalLink("b.h5", "/Trial0")
    with pytest.warns(UserWarning, match="skipped") as caught:
        found = convert(tmp_path / "data", path)
    said = str(caught[0].message)
    for part in (
        "Trial1: it has 1 record,",
        "Trial5: it is a group without 'actions'",
        "Trial6: it is a link by name, ",
        "copy its target",
        "Trial7",
        "notes: it is",
    ):
        assert part in said
    assert len(found.manifest.report["skipped"]) == 5
    assert found.columns["episode",].tolist() == [0, 0, 0, 2, 2]
    assert ("info", "rwd_sparse") in found.columns
    assert_ted(found)


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
    path = write(tmp_path / "a.h5", make_trial(4), with_repeated_infos(make_trial(5, seed=1)))
    with pytest.warns(UserWarning, match="logged by reference") as caught:
        found = convert(tmp_path / "data", path)
    assert len(caught) == 1
    assert not [key for key in found.columns if "info" in key]
    check(CORPORA["roboset"], path, found)
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


# -- refusals --------------------------------------------------------------------------------------


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
    assert names(tmp_path) == [".data.lock", "a.h5", "b.h5"]
    skip = ConvertOptions(policies=Policies(on_invalid="skip"))
    left = quietly(tmp_path / "data", good, bad, options=skip)
    assert left.episodes["length"].tolist() == [4, 3, 3]
    assert [entry["name"] for entry in left.manifest.report["skipped"]] == ["Trial1"]


def test_no_source_file_and_no_row_are_refused(tmp_path):
    with pytest.raises(CorpusError, match="V05"):
        convert(tmp_path / "data")
    path = write(tmp_path / "a.h5", make_trial(1), make_trial(1))
    with pytest.raises(CorpusError, match=r"a\.h5.*no episode gives a row \(2 skipped\).*V38"):
        convert(tmp_path / "data", path)
    sources = Sources((SourceFile(path, "a.h5", 12, "0" * 64),))
    with pytest.raises(CorpusError, match=r"expected 12; fetch it again \[V02\]"):
        convert(tmp_path / "data", get_sources=lambda: sources)


def test_compressed_paths_error_gives_advice(tmp_path):
    """a.3: observations are empty; their order is not in the file, so nobody can rebuild them."""
    trial = make_trial(4)
    trial["observations"] = np.zeros((0,))
    path = write(tmp_path / "a.h5", make_trial(3), trial)
    with pytest.raises(CorpusError, match=r"Trial1/observations: has 0 records.*V11") as caught:
        convert(tmp_path / "data", path)
    assert "path compression" in str(caught.value)
    assert "write observations from env_infos/obs_dict" in str(caught.value)
