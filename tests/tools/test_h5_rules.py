"""`inspect` of an H5 file says what `convert` would refuse, and where columns come from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import Layout, Policies, convert
from replaykit.datasets.families import ISAACLAB, ROBOHIVE
from replaykit.errors import CorpusError
from replaykit.inspection import layout_named, opened
from replaykit.testing.robohive_files import RoboHiveWriter
from replaykit.tools import source_facts

REFUSED = "a conversion would be refused: "


def _robohive(path: Path, *, late: int = 0, **wrong: Any) -> None:
    rng = np.random.default_rng(0)
    with RoboHiveWriter(path) as writer:
        for trial in range(3):
            states, scores = rng.normal(size=(6 + late, 3)), rng.normal(size=6)
            said: dict[str, Any] = {
                "observations": states[:6], "actions": rng.normal(size=(5, 2)), "rewards": scores,
                "done": np.zeros(6, bool), "time": np.arange(6.0),
                "env_infos": {"obs_dict/qpos": states[late : late + 6], "rwd_dense": scores},
            }  # fmt: skip
            if trial == 1:
                for key, (at, value) in wrong.items():
                    said[key] = said[key].copy()
                    said[key][at] = value
            writer.add_trial(**said)


def _isaaclab(path: Path, *, is_after: bool = False) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name in ("demo_0", "demo_1"):
            poses, actions = rng.normal(size=(7, 3)), rng.normal(size=(6, 2))
            seen = actions if is_after else np.concatenate([np.zeros((1, 2)), actions[:-1]])
            demo = file.create_group(f"data/{name}")
            demo["actions"], demo["obs/actions"], demo["obs/pose"] = actions, seen, poses[:-1]
            demo["states/arm/pose"], demo["initial_state/arm/pose"] = poses[1:], poses[:1]


def _flat(path: Path) -> None:
    with h5py.File(path, "w") as file:
        states = np.random.default_rng(0).normal(size=(13, 3))
        file["observations"], file["next_observations"] = states[:12], states[1:][::-1].copy()
        file["actions"], file["rewards"] = np.ones((12, 1)), np.ones(12)
        file["terminals"], file["timeouts"] = np.zeros(12, bool), np.arange(12) == 11


FILES: dict[str, tuple[str, Callable[[Path], None], str | None]] = {
    "right": ("robohive-trials", _robohive, None),
    "observation": (
        "robohive-trials", lambda path: _robohive(path, observations=(2, np.nan)), "V21",
    ),
    "action": ("robohive-trials", lambda path: _robohive(path, actions=(2, np.nan)), "V20"),
    "reward": ("robohive-trials", lambda path: _robohive(path, rewards=(2, 7.0)), "V52"),
    "done": ("robohive-trials", lambda path: _robohive(path, done=(2, True)), "V53"),
    "infos after": ("robohive-trials", lambda path: _robohive(path, late=1), "V51"),
    "isaaclab": ("isaaclab", _isaaclab, None),
    "isaaclab after": ("isaaclab", lambda path: _isaaclab(path, is_after=True), "V51"),
    "mixed rows": ("d4rl", _flat, "V22"),
}  # fmt: skip


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inspect_warns_with_the_error_text_of_convert(tmp_path, monkeypatch, name, is_whole):
    layout, write, rule = FILES[name]
    if not is_whole:
        monkeypatch.setattr(source_facts, "_WHOLE_BYTES", 0)
    path = tmp_path / "a.h5"
    write(path)
    refusal = None
    try:
        convert(path, layout_named(layout), tmp_path / "data")
    except CorpusError as error:
        refusal = str(error)
    assert (refusal is None) == (rule is None)
    with opened(path, layout=layout) as (facts, _):
        said = [text for text in facts.warnings if text.startswith(REFUSED)]
        limited = any("checks all" in text for text in facts.warnings)
    if is_whole or rule not in (None, "V21", "V22"):
        # Of a second rule that is broken once the first one is left out there is a second text.
        assert [text.removeprefix(REFUSED) for text in said[:1]] == ([refusal] if refusal else [])
    assert limited is (facts.episodes is not None and not is_whole)
    # Of the flat file no episode is left: what is shown then is of actions and rewards.
    partial = any("a conversion of all keys is refused" in text for text in facts.warnings)
    assert partial is (is_whole and name == "mixed rows")
    if not is_whole:
        with opened(path, layout=layout, most_bytes=None) as (facts, _):
            said = [text for text in facts.warnings if text.startswith(REFUSED)]
            assert [text.removeprefix(REFUSED) for text in said[:1]] == (
                [refusal] if refusal else []
            )


def test_valid_episodes_are_listed_after_a_skipped_one(tmp_path):
    _robohive(tmp_path / "a.h5", observations=(2, np.nan))
    with opened(tmp_path / "a.h5") as (facts, _):
        assert facts.episodes.lengths.tolist() == [5, 5]
        assert any(text.startswith("skipped: a.h5: Trial1: ") for text in facts.warnings)


@pytest.mark.parametrize("name", ["right", "isaaclab"])
@pytest.mark.parametrize("repeated", ["keep", "once"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_labels_name_the_record_that_a_row_takes(tmp_path, name, repeated):
    layout: Layout = {"right": ROBOHIVE, "isaaclab": ISAACLAB}[name]
    path = tmp_path / "a.h5"
    FILES[name][1](path)
    data = convert(path, layout, tmp_path / "data", policies=Policies(repeated=repeated))
    rows = data[:]
    with opened(tmp_path / "data") as (facts, _), h5py.File(path) as file:
        labels = {key.key: key.source for key in facts.keys if "[t" in str(key.source)}
        above = "data/demo_{}" if name == "isaaclab" else "Trial{}"
        checked = 0
        for key, label in labels.items():
            source, shift = re.fullmatch(r"(.+)\[t([+-]\d+)?\]", label).groups()
            for episode in range(2):
                mine = rows[rows["episode"] == episode][tuple(key.split("/"))].numpy()
                values = file[above.format(episode)][source][...]
                for t in range(len(mine)):
                    if t + int(shift or 0) >= 0:
                        expected = values[t + int(shift or 0)].reshape(mine[t].shape)
                        np.testing.assert_array_equal(mine[t], expected)
                        checked += 1
    assert checked > 50
    if name == "isaaclab":
        assert labels["state/arm/pose"] == "states/arm/pose[t-1]"
        assert labels["next/state/arm/pose"] == "states/arm/pose[t]"
