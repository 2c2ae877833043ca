"""Layouts by name, of the package and of one's own, and why one was guessed."""

from __future__ import annotations

import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest

from replaykit.inspection import guess_layout, known_layouts, layout_named
from tests.support.refusals import refuses

OWN = """
from replaykit.datasets import STEPS, Field, Groups, Layout

ARM = Layout(
    name="arm", version=1, episodes=Groups("run", having=("torque",)), alignment=STEPS,
    clock="torque",
    fields=(
        Field("joints", "observation", ("observation",), ("next", "observation")),
        Field("torque", "action", before=("action",)),
    ),
)
OTHER = 3
"""


def test_a_layout_of_one_s_own_is_loaded_from_a_file(tmp_path):
    (tmp_path / "own_layouts.py").write_text(OWN)
    assert layout_named(f"{tmp_path}/own_layouts.py:ARM").name == "arm"
    with pytest.raises(ValueError, match=r"to be a replaykit\.datasets\.Layout, got 3"):
        layout_named(f"{tmp_path}/own_layouts.py:OTHER")
    with pytest.raises(FileNotFoundError, match=r"absent\.py is not there"):
        layout_named(f"{tmp_path}/absent.py:ARM")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def", "SyntaxError: invalid syntax"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_fails_as_it_runs_is_named_and_leaves_nothing(tmp_path, text, why):
    (tmp_path / "failing.py").write_text(text)
    with pytest.raises(ImportError, match=rf"failing\.py cannot be loaded: {why}"):
        layout_named(f"{tmp_path}/failing.py:ARM")
    assert "replaykit_layouts_failing" not in sys.modules


def test_an_unknown_name_lists_those_there_are():
    refuses(ValueError, r"'aloha'.*got 'atari'", layout_named, "atari")
    for half in (":", ":ARM", "own.py:"):
        refuses(ValueError, rf"module:NAME .* got '{half}'", layout_named, half)
    assert {"aloha", "d4rl", "robomimic", "libero"} <= known_layouts().keys()
    assert all(layout_named(name) is layout for name, layout in known_layouts().items())


def test_guess_lists_its_reasons(tmp_path, write_robomimic):
    path = write_robomimic(tmp_path / "a.hdf5")
    guess = guess_layout([path])
    assert guess.layout == "robomimic"
    assert guess.reasons[0] == "3 episodes at the paths of the layout: data/demo_0 ... data/demo_2"
    assert guess.reasons[1] == "12 records of 'actions' make 12 rows"
    assert "reward: rewards" in guess.reasons
    assert set(guess.refused) == set(known_layouts()) - {"robomimic"}
    assert "but one" not in guess.refused["d4rl"]


def test_the_layout_that_leaves_the_least_out_is_taken(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["observations"], file["actions"] = np.eye(3), np.ones((3, 1))
        file["rewards"], file["terminals"] = np.ones(3), np.arange(3) == 2
        file["timeouts"], file["metadata/policy"] = np.zeros(3, bool), np.ones((9, 9))
    assert guess_layout([tmp_path / "a.h5"]).layout == "d4rl"


def test_an_empty_file_is_of_its_layout_with_a_problem(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("observations", "actions", "rewards"):
            file[name] = np.zeros(0, np.float32)
        file["terminals"] = np.zeros(0, bool)
    guess = guess_layout([tmp_path / "a.h5"])
    assert guess.layout == "d4rl"
    assert "[V38]" in guess.problem


def test_guess_explains_a_tie(tmp_path, monkeypatch, write_robomimic):
    path = write_robomimic(tmp_path / "a.hdf5")
    twin = replace(known_layouts()["robomimic"], name="another")
    both = {"robomimic": known_layouts()["robomimic"], "another": twin}
    monkeypatch.setattr("replaykit.tools.layouts.known_layouts", lambda: both)
    guess = guess_layout([path])
    assert guess.layout == "another"
    assert guess.reasons[-1] == (
        "a tie with robomimic, which leaves out as many: another is the first by name; give "
        "robomimic as the layout if it is that"
    )
    assert not any("leaves out more" in reason for reason in guess.reasons)
