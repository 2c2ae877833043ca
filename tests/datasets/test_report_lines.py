"""What people are told of a conversion: one line for each kind of finding."""

from __future__ import annotations

import warnings

import h5py
import numpy as np
import pytest

from replaykit.datasets import Policies, convert
from replaykit.datasets.engine.report import lines_of
from replaykit.datasets.families import ROBOMIMIC
from replaykit.inspection import opened

SPLITS = [f"{share}_percent{part}" for share in range(10) for part in ("", "_train", "_valid")]


@pytest.fixture
def demos(tmp_path):
    """Four demonstrations, 30 splits that name absent ones, and 12 datasets without a place."""
    path = tmp_path / "demo.hdf5"
    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in range(4):
            demo = file.create_group(f"data/demo_{number}")
            demo["actions"] = draw.normal(size=(5, 2))
            demo["rewards"], demo["dones"] = np.zeros(5), np.arange(5) == 4
            states = draw.normal(size=(6, 3))
            demo["obs/eef"], demo["next_obs/eef"] = states[:-1], states[1:]
            for other in range(12):
                demo[f"other_{other:02}"] = np.zeros(5)
        for name in SPLITS:
            file[f"mask/{name}"] = np.array([b"demo_0", b"demo_77", b"demo_78"])
    return path


def told(path, target, **policies):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = convert(path, ROBOMIMIC, target, policies=Policies(**policies), progress=False)
    (warning,) = caught
    return data, str(warning.message)


def test_findings_of_one_kind_are_one_line(tmp_path, demos):
    data, said = told(demos, tmp_path / "data")
    assert said.count("names episodes that are not in the data set") == 1
    assert "(60 times, first in demo.hdf5; also " in said
    assert "'0_percent_train', '0_percent_valid', '1_percent' and 26 more) [V15]" in said
    assert said.count("other_") == 4
    assert "other_00, other_01, other_02, other_03 and 8 more: " in said
    # All of it is in the manifest, by name and with its own count.
    notes = data.published.manifest.report["warnings"]
    assert {note["name"]: note["count"] for note in notes} == {repr(name): 2 for name in SPLITS}
    assert len(data.published.manifest.report["left_out"]) == 12


def test_inspect_says_the_same_lines_of_the_file_and_of_the_data_set(tmp_path, demos):
    told(demos, tmp_path / "data")
    for path in (demos, tmp_path / "data"):
        with opened(path) as (facts, _):
            (splits,) = [text for text in facts.warnings if "[V15]" in text]
            assert "'0_percent_train', '0_percent_valid', '1_percent' and 26 more" in splits
            assert len(facts.warnings) <= 3


def test_episodes_that_are_skipped_for_one_rule_are_one_line(tmp_path, demos):
    with h5py.File(demos, "r+") as file:
        for number in (0, 2, 3):
            file[f"data/demo_{number}/actions"][2] = np.nan
        del file["mask"]
    data, said = told(demos, tmp_path / "data", on_invalid="skip")
    assert len(data) == 5
    assert said.count("[V20]") == 1
    assert "skipped: 3, first demo.hdf5: data/demo_0: " in said
    assert "; also data/demo_2, data/demo_3" in said
    assert len(data.published.manifest.report["skipped"]) == 3


def test_findings_of_different_kinds_stay_apart():
    def note(rule, text, name):
        return {"rule": rule, "text": text, "count": 1, "first": "a.h5", "name": name}

    report = {
        "warnings": [
            note("V25", "a is out of bounds", "a"),
            note("V25", "b is odd", "b"),
            note("V27", "a is out of bounds", "a"),
            note("V25", "c is out of bounds", "c"),
        ]
    }
    assert lines_of(report) == [
        "a is out of bounds (2 times, first in a.h5; also c) [V25]",
        "b is odd (1 time, first in a.h5) [V25]",
        "a is out of bounds (1 time, first in a.h5) [V27]",
    ]


def test_a_report_of_an_earlier_version_has_no_names():
    text = "the split '{}' names 3 episodes, of which 2 are not in the data set"
    notes = [{"rule": "V15", "text": text.format(n), "count": 1, "first": "f"} for n in "ab"]
    assert len(lines_of({"warnings": notes})) == 2
    assert lines_of({}) == []
