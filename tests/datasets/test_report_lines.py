"""What people are told of a conversion: one line for each kind of finding."""

from __future__ import annotations

import warnings

import h5py
import numpy as np
import pytest

from replaykit.datasets import Policies, convert
from replaykit.datasets.engine.conversion_report import lines_of
from replaykit.datasets.families import ROBOMIMIC
from replaykit.errors import CorpusError
from replaykit.inspection import opened

SPLITS = [f"{share}_percent{part}" for share in range(10) for part in ("", "_train", "_valid")]


def write(path, demos=2, change=None):
    """Writes demonstrations of five steps; ``change`` is given each group and its number."""
    draw = np.random.default_rng(0)
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        for number in range(demos):
            demo = file.create_group(f"data/demo_{number}")
            states = draw.normal(size=(6, 3))
            demo["actions"] = draw.normal(size=(5, 2))
            demo["rewards"], demo["dones"] = np.zeros(5), np.arange(5) == 4
            demo["obs/eef"], demo["next_obs/eef"] = states[:-1], states[1:]
            if change is not None:
                change(demo, number)
    return path


@pytest.fixture
def demos(tmp_path):
    """Four demonstrations, 30 splits that name absent ones, and 12 datasets without a place."""

    def change(demo, number):
        for other in range(12):
            demo[f"other_{other:02}"] = np.zeros(5)

    path = write(tmp_path / "demo.hdf5", 4, change)
    with h5py.File(path, "a") as file:
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


def test_inspect_prints_equal_lines_for_file_and_data_set(tmp_path, demos):
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
    assert "skipped: 3, first demo.hdf5: data/demo_0: data/demo_0/actions, record 2: " in said
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


def test_datasets_that_are_left_out_of_one_episode_each_are_one_line(tmp_path):
    def change(demo, number):
        demo[f"odd{number}"] = np.zeros(5)

    data, said = told(write(tmp_path / "a.h5", 20, change), tmp_path / "data")
    assert said.count("it is no part of the layout") == 1
    assert "left out: 20, first odd0: it is no part of the layout 'robomimic' (in a.h5: " in said
    assert "also odd1 (data/demo_1), odd10 (data/demo_10), odd11 (data/demo_11) and 16 more" in said
    report = data.published.manifest.report
    assert {leaf["key"] for leaf in report["left_out"]} == {f"odd{k}" for k in range(20)}
    assert all("(in a.h5: data/demo_" in leaf["why"] for leaf in report["left_out"])
    # The manifest says the same to those that look at it later.
    (line,) = lines_of(report)
    assert said.endswith(line)


def test_keys_that_are_missing_from_different_episodes_are_one_line(tmp_path):
    def change(demo, number):
        for key in range(15):
            if number != key and (key or number != 19):
                demo[f"obs/k{key}"] = demo[f"next_obs/k{key}"] = np.arange(5.0) + key

    path = write(tmp_path / "a.h5", 20, change)
    data, said = told(path, tmp_path / "data", missing="drop")
    assert said.count("missing from") == 1
    assert "30, first next_obs/k0: missing from 2 of 20 episodes, first a.h5: data/demo_0" in said
    assert "; also next_obs/k1 (1, data/demo_1), next_obs/k10 (1, data/demo_10), " in said
    left_out = data.published.manifest.report["left_out"]
    assert len({leaf["why"] for leaf in left_out}) == 15


def test_wrong_counts_in_files_are_one_line(tmp_path):
    for number in range(6):
        path = write(tmp_path / "in" / f"{number}.h5")
        with h5py.File(path, "r+") as file:
            file["data"].attrs["total"] = 90 + number
    data, said = told(tmp_path / "in", tmp_path / "data")
    assert said.count("[V15]") == said.count("the attribute 'total' says 90 records") == 1
    assert "(6 times, first in 0.h5: data; also 1.h5: data (91), 2.h5: data (92), " in said
    assert len(data.published.manifest.report["warnings"]) == 6


def test_episodes_with_a_wrong_length_are_one_line(tmp_path):
    def change(demo, number):
        demo.attrs["num_samples"] = 70 + number

    path = write(tmp_path / "a.h5", 5, change)
    _, said = told(path, tmp_path / "data", on_invalid="keep")
    assert said.count("[V15]") == said.count("all records are kept") == 1
    assert "(5 times, first in a.h5: data/demo_0/actions; also " in said
    assert "data/demo_1/actions (71), " in said


def test_files_that_are_skipped_are_named(tmp_path):
    write(tmp_path / "in" / "0.h5")
    for number in range(1, 7):
        (tmp_path / "in" / f"{number}.h5").write_bytes(b"nope")
    _, said = told(tmp_path / "in", tmp_path / "data", on_invalid="skip")
    assert "skipped: 6, first 1.h5: the whole file: " in said
    assert said.count("the whole file") == 1
    assert said.endswith("; also 2.h5, 3.h5, 4.h5 and 2 more")


def test_skipped_episodes_of_several_files_are_named_with_their_files(tmp_path):
    def change(demo, number):
        if not number:
            demo["actions"][2] = np.nan

    for name in ("a", "b", "c"):
        write(tmp_path / "in" / f"{name}.h5", 2, change)
    _, said = told(tmp_path / "in", tmp_path / "data", on_invalid="skip")
    assert "; also b.h5: data/demo_0, c.h5: data/demo_0" in said


def test_reasons_without_a_rule_are_of_one_kind_whichever_file_they_name():
    def entry(file, why):
        return {"file": file, "name": "the whole file", "why": why}

    names = [f"{number}.h5" for number in range(3)]
    denied = [entry(name, f"[Errno 13] Permission denied: '/in/{name}'") for name in names]
    begun = [entry(n, f"it goes on in an episode that begins in x{n}, which is skipped")
             for n in names]  # fmt: skip
    lines = lines_of({"skipped": denied + begun})
    assert len(lines) == 2
    assert all(line.endswith("; also 1.h5, 2.h5") for line in lines)


def test_error_without_usable_episodes_gives_each_reason_once(tmp_path):
    def change(demo, number):
        demo["rewards" if number % 2 else "actions"][number % 5] = np.nan

    path = write(tmp_path / "a.h5", 9, change)
    with pytest.raises(CorpusError) as caught:
        told(path, tmp_path / "data", on_invalid="skip")
    said = str(caught.value)
    assert f"{path}: no episode gives a row (9 skipped): 5, first a.h5: data/demo_0: " in said
    assert said.count("the action holds NaN") == said.count("[V20]") == 1
    assert said.count("the reward holds NaN") == said.count("[V21]") == 1
    assert "; also data/demo_2, data/demo_4, data/demo_6 and 1 more" in said
    assert "the source is empty" not in said
    assert said.endswith("[V38]")


def test_a_source_is_called_empty_only_where_it_has_no_episode(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("data")
    with pytest.raises(CorpusError, match=r"\(0 skipped\); the source is empty \[V38\]$"):
        told(tmp_path / "a.h5", tmp_path / "data")
    (tmp_path / "bad").mkdir()
    for number in range(7):
        (tmp_path / "bad" / f"{number}.h5").write_bytes(b"nope")
    with pytest.raises(CorpusError, match=r"no episode gives a row.*\[V38\]$") as caught:
        told(tmp_path / "bad", tmp_path / "data", on_invalid="skip")
    assert "the source is empty" not in str(caught.value)
    assert "4.h5 and 2 more: no episode gives a row (7 skipped)" in str(caught.value)
