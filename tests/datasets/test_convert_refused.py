"""Files and trials that break a rule: conversion names them and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from replaykit.datasets import Policies
from replaykit.datasets.engine.conversion import ConvertOptions
from replaykit.datasets.sources import SourceFile, Sources
from replaykit.errors import CorpusError
from replaykit.testing.robohive_files import make_trial
from tests.datasets.trials import convert, names, quietly, write


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
