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
from tests.datasets.families.test_robomimic import demo
from tests.datasets.families.test_robomimic import write as write_demos

SPLITS = [f"{share}_percent{part}" for share in range(10) for part in ("", "_train", "_valid")]


def write(path, demos=2, change=None):
    """Writes demonstrations of five steps; ``change`` is given each of them and its number."""
    path.parent.mkdir(exist_ok=True)
    made = {f"demo_{k}": demo(5, seed=k, success=1) for k in range(demos)}
    for number, values in enumerate(made.values()):
        if change is not None:
            change(values, number)
    return write_demos(path, made)


@pytest.fixture
def demos(tmp_path):
    """Four demonstrations, 30 splits that name absent ones, and 12 datasets without a place."""

    def change(demo, number):
        demo |= {f"other_{other:02}": np.zeros(5) for other in range(12)}

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
    for path in (demos, tmp_path / "data"):
        with opened(path) as (facts, _):
            (splits,) = [text for text in facts.warnings if "[V15]" in text]
            assert "'0_percent_train', '0_percent_valid', '1_percent' and 26 more" in splits
            assert len(facts.warnings) <= 3


def test_findings_of_different_kinds_stay_apart():
    def note(rule, text, name):
        return {"rule": rule, "text": text, "count": 1, "first": "a.h5", "name": name}

    notes = [
        note("V25", "a is out of bounds", "a"),
        note("V25", "b is odd", "b"),
        note("V27", "a is out of bounds", "a"),
        note("V25", "c is out of bounds", "c"),
    ]
    assert lines_of({"warnings": notes}) == [
        "a is out of bounds (2 times, first in a.h5; also c) [V25]",
        "b is odd (1 time, first in a.h5) [V25]",
        "a is out of bounds (1 time, first in a.h5) [V27]",
    ]
    # Reports of an earlier version have no names.
    text = "the split '{}' names 3 episodes, of which 2 are not in the data set"
    notes = [{"rule": "V15", "text": text.format(n), "count": 1, "first": "f"} for n in "ab"]
    assert len(lines_of({"warnings": notes})) == 2
    assert lines_of({}) == []


def spoiled(*numbers):
    """Return a change: actions of demonstrations of some numbers are NaN."""

    def change(demo, number):
        if number in numbers:
            demo["actions"][2] = np.nan

    return change


def lacking(demo, number):
    for key in range(15):
        if number != key and (key or number != 19):
            demo[f"obs/k{key}"] = demo[f"next_obs/k{key}"] = np.arange(5.0) + key


def files(folder, change):
    folder.mkdir()
    for number in range(7):
        change(folder / f"{number}.h5", number)
    return folder


def stale(path, number):
    with h5py.File(write(path), "r+") as file:
        file["data"].attrs["total"] = 90 + number


LINES = {
    "datasets left out of one episode each": (
        lambda path: write(path / "a.h5", 20, lambda d, n: d.update({f"odd{n}": np.zeros(5)})),
        {},
        "it is no part of the layout",
        [
            "left out: 20, first odd0: it is no part of the layout 'robomimic' (in a.h5: ",
            "also odd1 (data/demo_1), odd10 (data/demo_10), odd11 (data/demo_11) and 16 more",
        ],
        ("left_out", 20),
    ),
    "keys missing from different episodes": (
        lambda path: write(path / "a.h5", 20, lacking),
        {"missing": "drop"},
        "missing from",
        [
            "30, first next_obs/k0: missing from 2 of 20 episodes, first a.h5: data/demo_0",
            "; also next_obs/k1 (1, data/demo_1), next_obs/k10 (1, data/demo_10), ",
        ],
        ("left_out", 30),
    ),
    "wrong counts in files": (
        lambda path: files(path / "in", stale),
        {},
        "the attribute 'total' says 90 records",
        ["(7 times, first in 0.h5: data; also 1.h5: data (91), 2.h5: data (92), ", "[V15]"],
        ("warnings", 7),
    ),
    "episodes with a wrong length": (
        lambda path: write(path / "a.h5", 5, lambda d, n: d.update({"@num_samples": 70 + n})),
        {"on_invalid": "keep"},
        "all records are kept",
        ["(5 times, first in a.h5: data/demo_0/actions; also ", "data/demo_1/actions (71), "],
        ("warnings", 5),
    ),
    "files that are skipped": (
        lambda path: files(path / "in", lambda p, n: p.write_bytes(b"no") if n else write(p)),
        {"on_invalid": "skip"},
        "the whole file",
        ["skipped: 6, first 1.h5: the whole file: ", "; also 2.h5, 3.h5, 4.h5 and 2 more"],
        ("skipped", 6),
    ),
    "skipped episodes of several files": (
        lambda path: files(path / "in", lambda p, n: write(p, 2, spoiled(0))),
        {"on_invalid": "skip"},
        "[V20]",
        ["; also 1.h5: data/demo_0, 2.h5: data/demo_0"],
        ("skipped", 7),
    ),
}


@pytest.mark.parametrize("kind", LINES)
def test_findings_about_different_places_are_one_line(tmp_path, kind):
    """The manifest has all of them, and says the same to those that look at it later."""
    make, policies, once, parts, (entry, count) = LINES[kind]
    data, said = told(make(tmp_path), tmp_path / "data", **policies)
    assert said.count(once) == 1
    for part in parts:
        assert part in said
    report = data.published.manifest.report
    assert len(report[entry]) == count
    assert any(line in said for line in lines_of(report))
    if entry == "left_out":
        assert len({leaf["why"] for leaf in report[entry]}) == {20: 20, 30: 15}[count]


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
