"""What a caller decides: casts, keys, columns that say nothing of their own, and what is told."""

from __future__ import annotations

import json
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from replaykit.datasets import Field, Policies, convert
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import verify_published
from replaykit.errors import CorpusError
from replaykit.testing.robohive_files import make_trial
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import arm_layout, quietly, write_file, write_source
from tests.datasets.trials import write as write_trials

ARM = arm_layout(
    "arm",
    Field("log/", "info", ("info",), ("next", "info"), required=False),
)


def write(path, *runs, joints=None, **logs):
    with h5py.File(path, "w") as file:
        for number, steps in enumerate(runs):
            draw, states = np.random.default_rng(number), steps + 1
            drawn = draw.normal(size=(states, 2))
            file[f"run{number}/joints"] = drawn if joints is None else joints(number, states)
            file[f"run{number}/torque"] = draw.normal(size=(steps, 1)).astype(np.float32)
            file[f"run{number}/score"] = np.arange(steps)
            for name, make in logs.items():
                file[f"run{number}/log/{name}"] = make(number, states)
    return path


def run(tmp_path, path, **policies):
    return convert(path, ARM, tmp_path / "data", policies=Policies(**policies))


def test_casts_are_to_the_nearest_value_and_noted(tmp_path):
    path = write(tmp_path / "a.h5", 4, 3)
    data = run(tmp_path, path, casts={"float64": "float32", "int64": np.float64})
    rows = data[:]
    with h5py.File(path) as file:
        joints = np.concatenate([file[f"run{k}/joints"][:-1] for k in range(2)])
    assert rows["observation"].dtype == torch.float32
    np.testing.assert_array_equal(rows["observation"], joints.astype(np.float32))
    assert rows["action"].dtype == torch.float32
    assert rows["next", "reward"].dtype == torch.float64
    facts = {array.key: array.facts for array in data.published.manifest.arrays}
    assert facts["observation",]["source_dtype"] == "float64"
    assert "source_dtype" not in facts["action",]


@pytest.mark.filterwarnings("ignore:.*the loggers' default:UserWarning")
@pytest.mark.parametrize(
    ("source", "value", "target"),
    [
        ("float64", 1e300, "float32"),
        ("float64", 300, "uint8"),
        ("float64", 0.5, "int32"),
        ("float64", 0.5, "bool"),
        ("int64", -1, "uint64"),
        ("int8", -1, "uint8"),
        ("int8", -1, "uint16"),
        ("uint8", 200, "int8"),
        ("uint64", 2**63, "int64"),
        ("int64", 70_000, "float16"),
        ("complex64", 1j, "float32"),
        ("complex64", 0.5, "int16"),
        ("float16", np.nan, "int32"),
    ],
)
def test_no_number_changes_its_sign_or_is_lost_in_a_cast(tmp_path, source, value, target):
    """Cast back, some of them are what they were."""

    def column(bad):
        return lambda k, n: np.array([1] * (n - 1) + [value if bad and k else 1], source)

    joints = {} if source != "float64" else {"joints": lambda k, n: np.ones((n, 2))}
    path = write(tmp_path / "good.h5", 4, 3, x=column(False), **joints)
    data = convert(path, ARM, tmp_path / "cast", policies=Policies(casts={source: target}))
    found = data.published.columns["info", "x"]
    assert found.dtype == getattr(torch, target)
    assert found.tolist() == [1, 1, 1, 1, 1, 1, 1]
    path = write(tmp_path / "bad.h5", 4, 3, x=column(True), **joints)
    with pytest.raises(CorpusError, match=rf"run1/log/x, record 3: .*does not fit {target}.*V10"):
        run(tmp_path, path, casts={source: target})


def test_include_and_exclude_take_keys_with_all_below(tmp_path):
    logs = {"x": lambda k, n: np.arange(n), "y": lambda k, n: np.arange(n) * 2}
    path = write(tmp_path / "a.h5", 4, **logs)
    always = {"done", "terminated", "truncated", "episode", "seed", "next"}
    data = run(tmp_path, path, exclude=["info", ("next", "info", "y")])
    assert set(data[:].keys()) == always | {"observation", "action"}
    assert set(data[:]["next", "info"].keys()) == {"x"}
    policies = Policies(include=["observation", ("next", "reward")])
    data = convert(path, ARM, tmp_path / "less", policies=policies)
    assert set(data[:].keys()) == always | {"observation"}
    assert set(data[:]["next"].keys()) == {"reward", "done", "terminated", "truncated"}


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (
            {"include": ["obervation", "action"]},
            r"include: 'obervation' matches nothing in the files \(meant: 'observation'.*\?\); "
            r"expected it among the keys action, done, .*info/void, info/x, .*next/observation",
        ),
        ({"include": ["action", ("info", "z")]}, "include: 'info/z' matches nothing"),
        (
            {"exclude": ["info", ("next", "info", "w")]},
            "exclude: 'next/info/w' matches nothing .*among the keys action, info/void, info/x,",
        ),
        ({"exclude": [("next", "observed")]}, "exclude: 'next/observed' matches nothing"),
        (
            {"casts": {"float64": "float32", "float16": "float32"}},
            "casts: 'float16' matches nothing .*among the dtypes float32, float64, int64",
        ),
    ],
)
def test_entries_without_a_match_are_refused_before_any_write(
    tmp_path, monkeypatch, policies, message
):
    logs = {"x": lambda k, n: np.arange(n), "void": lambda k, n: np.full(n, np.nan)}
    path = write(tmp_path / "a.h5", 4, 3, **logs)
    monkeypatch.setattr("replaykit.datasets.engine.conversion.create_columns", pytest.fail)
    with pytest.raises(ValueError, match=message) as caught:
        run(tmp_path, path, **policies)
    assert not isinstance(caught.value, CorpusError)  # the files are all right
    assert [each.name for each in tmp_path.iterdir() if not each.name.startswith(".")] == ["a.h5"]


def test_policy_entries_accept_left_out_and_partial_columns(tmp_path):
    logs = {"x": lambda k, n: np.arange(n), "void": lambda k, n: np.full(n, np.nan)}
    path = write(tmp_path / "a.h5", 4, 3, **logs)
    with h5py.File(path, "a") as file:
        file["run1/log/late"] = np.arange(4, dtype=np.int16)
        file["run1/joints"][1, 0] = np.nan
    with pytest.warns(UserWarning, match="is NaN throughout"):
        data = run(
            tmp_path, path, exclude=[("info", "void"), ("next", "info", "late")],
            include=["info", ("next", "info"), ("next", "done"), "episode", "observation"],
            casts={"int16": "int32"}, on_invalid="skip",
        )  # fmt: skip
    assert len(data) == 4  # the second episode, which alone has that key and dtype, is skipped
    assert set(data[:]["info"].keys()) == {"x"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("key", ["observation", "action", ("next", "reward"), "time", "info"])
def test_excluded_column_changes_no_other_column(tmp_path, key):
    """Layouts look at values that are not stored: the last action says how a trial was closed."""
    path = write_source(tmp_path / "a.h5")
    whole = convert(path, ROBOHIVE, tmp_path / "whole")
    part = convert(path, ROBOHIVE, tmp_path / "part", policies=Policies(exclude=[key]))
    columns = part.published.columns
    gone = (key,) if isinstance(key, str) else key
    assert whole.published.columns.keys() - columns.keys() == {
        known for known in whole.published.columns if known[: len(gone)] == gone
    }
    for name, column in columns.items():
        assert column.equal(whole.published.columns[name]), name
    for name in ("start", "length", "terminated", "truncated", "return"):
        if name == "return" and gone == ("next", "reward"):
            assert part.episode_table[name].isnan().all()  # which is not a sum of zero
            continue
        assert part.episode_table[name].equal(whole.episode_table[name])


def test_uninformative_columns_are_dropped_and_recorded(tmp_path):
    """V13, N38: by all episodes, and never what is not an info."""
    logs = {
        "mass": lambda k, n: np.full((n, 2), 1.5),
        "index": lambda k, n: np.arange(n),
        "same": lambda k, n: np.arange(n),
        "once_same": lambda k, n: np.arange(n) + k,
        "phase": lambda k, n: np.full(n, 2 * k + 1),
    }
    path = write(tmp_path / "a.h5", 4, 3, **logs)
    with h5py.File(path, "a") as file:
        for k in range(2):
            file[f"run{k}/score"][...] = 0
    data = run(tmp_path, path, constant="drop", duplicate="drop")
    rows = data[:]
    assert set(rows["info"].keys()) == {"index", "once_same", "phase"}
    assert set(rows["next", "info"].keys()) == {"index", "once_same"}
    assert not rows["next", "reward"].any()
    removed = {tuple(e["key"]): e for e in data.published.manifest.report["removed"]}
    assert removed["info", "mass"]["value"] == [1.5, 1.5]
    assert removed["info", "same"]["same_as"] == ["info", "index"]
    assert removed["next", "info", "phase"]["same_as"] == ["info", "phase"]
    assert len(removed) == 5
    verify_published(tmp_path / "data")
    loaded = TensorDict.load_memmap(tmp_path / "data")
    assert set(loaded["info"].keys()) == {"index", "once_same", "phase"}
    assert (loaded == rows).all()


def test_wide_constants_are_dropped_and_kept_ones_are_reported(tmp_path):
    wide = np.random.default_rng(0).normal(size=(22, 4))
    logs = {
        "body_quat": lambda k, n: np.broadcast_to(wide, (n, 22, 4)),
        "most": lambda k, n: np.full((n, 4096), 0.5),
        "photo": lambda k, n: np.full((n, 4097), 7, np.uint8),
        "part": lambda k, n: np.tile([1.0, np.nan], (n, 1)),
        "moving": lambda k, n: np.broadcast_to(wide + k, (n, 22, 4)),
    }
    path = write(tmp_path / "a.h5", 4, 3, **logs)
    with pytest.warns(UserWarning, match="V13") as caught:
        data = run(tmp_path, path, constant="drop")
    assert set(data[:]["info"].keys()) == {"photo", "part", "moving"}
    removed = {tuple(e["key"]): e["value"] for e in data.published.manifest.report["removed"]}
    assert removed.keys() == {
        (*at, name) for at in (("info",), ("next", "info")) for name in ("body_quat", "most")
    }
    np.testing.assert_array_equal(removed["next", "info", "body_quat"], wide)
    (said,) = [str(each.message) for each in caught]
    assert "info/photo is constant and kept as a column: its 4,097 numbers are more" in said
    assert "info/part is constant and kept as a column: JSON has no number for NaN" in said
    assert "also next/info/part)" in said
    verify_published(tmp_path / "data")


def test_default_policies_keep_constants_and_drop_nan_leaves(tmp_path):
    """V14: columns of NaN are absent, not of low precision."""
    logs = {"mass": lambda k, n: np.full(n, 1.5), "void": lambda k, n: np.full(n, np.nan, "f2")}
    path = write(tmp_path / "a.h5", 4, 3, **logs)
    with pytest.warns(UserWarning, match="log/void: it is NaN throughout") as warned:
        data = run(tmp_path, path)
    assert set(data[:]["info"].keys()) == {"mass"}
    assert "V14" not in str(warned[0].message)
    assert data.published.manifest.report["warnings"] == []
    with pytest.warns(UserWarning, match="V14"):
        data = convert(path, ARM, tmp_path / "all", policies=Policies(all_nan="keep"))
    assert set(data[:]["info"].keys()) == {"mass", "void"}
    assert data[:]["info", "void"].isnan().all()


def test_datasets_without_a_field_are_reported_or_refused(tmp_path):
    path = write(tmp_path / "a.h5", 4)
    with h5py.File(path, "a") as file:
        file["run0/camera"] = np.zeros((5, 2))
    with pytest.warns(UserWarning, match="camera: it is no part of the layout 'arm'"):
        run(tmp_path, path)
    with pytest.raises(CorpusError, match=r"run0/camera: it is no part of the layout 'arm'.*V10"):
        convert(path, ARM, tmp_path / "strict", policies=Policies(extra="error"))


def test_optional_keys_that_are_missing(tmp_path):
    path = write(tmp_path / "a.h5", 4, 3)
    with h5py.File(path, "a") as file:
        file["run1/log/late"] = np.arange(4.0)
    with pytest.warns(UserWarning, match="log/late: missing from 1 of 2 episodes"):
        run(tmp_path, path)
    with pytest.raises(CorpusError, match=r"run0/log/late: the key is missing, but .*run1 has it"):
        convert(path, ARM, tmp_path / "strict", policies=Policies(missing="error"))
    data = convert(path, ARM, tmp_path / "padded", policies=Policies(missing="pad"))
    assert data[:]["info", "late"].tolist() == [0, 0, 0, 0, 0, 1, 2]
    assert data[:]["next", "info", "late"].tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert data[:]["present", "info", "late"].tolist() == [False] * 4 + [True] * 3


def test_statistics_are_those_of_the_columns(tmp_path):
    trials = [make_trial(40 + k, seed=k) for k in range(3)]
    for trial in trials:
        at = np.arange(len(trial["rewards"]))
        trial["env_infos"] |= {
            "half": np.where(at % 3, np.nan, 1e6 + at),
            "infinite": np.where(at == 5, np.inf, 1.0),
        }
    found = quietly(tmp_path / "data", write_trials(tmp_path / "a.h5", *trials))
    check(CORPORA["roboset"], tmp_path / "a.h5", found)  # which compares them with NumPy's
    assert found.manifest.report["rules"]["alignment"]["name"] == "state-records"
    said = {array.key: array.facts["statistics"] for array in found.manifest.arrays}
    infinite = said["info", "infinite"]
    assert (infinite["min"], infinite["max"], infinite["mean"]) == (1.0, None, None)
    json.loads((tmp_path / "data/manifest.json").read_text(), parse_constant=pytest.fail)


def test_same_files_layout_and_policies_are_converted_once(tmp_path):
    path = write(tmp_path / "a.h5", 4)
    first = run(tmp_path, path)
    made = first.published.manifest.made
    assert run(tmp_path, path).published.manifest.made == made
    with pytest.raises(RuntimeError, match=r"other policies; pass force=True.*differ: policies$"):
        run(tmp_path, path, casts={"float64": "float32"})
    held = (*ARM.fields, Field("fallen", "terminated", held=True, required=False))
    # The layout has the same name and version.
    with pytest.raises(RuntimeError, match=r"with another layout or other .*differ: rules$"):
        convert(path, replace(ARM, fields=held), tmp_path / "data")
    write(path, 5)
    with pytest.raises(RuntimeError, match="whose files is"):
        run(tmp_path, path)
    assert len(convert(path, ARM, tmp_path / "data", force=True)) == 5


@pytest.mark.parametrize("force", [False, True])
def test_data_set_never_replaces_its_source_files(tmp_path, force):
    """D10: with force, a data set at the place of the new one goes, and nothing else."""
    (tmp_path / "in/deep").mkdir(parents=True)
    path = write(tmp_path / "in/deep/a.h5", 3)
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "in", target_is_directory=True)
    for dest in (tmp_path / "in", tmp_path / "in/deep", path, tmp_path / "link"):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            convert(path, ARM, dest, force=force)
        if force:
            assert "only data sets are replaced" in str(caught.value)
        assert path.read_bytes() == before
        assert [each.name for each in dest.parent.glob("*tmp-*")] == []
    assert len(convert(path, ARM, tmp_path / "in/deep/data", force=force)) == 3
    # Nor does the name of a column make a source a part of a data set.
    (tmp_path / "own").mkdir()
    named = path.rename(tmp_path / "own/a.memmap")
    said = f"own: expected a directory without source files.*{named} is in it"
    with pytest.raises(ValueError, match=said):
        convert(named, ARM, tmp_path / "own", force=True)
    assert named.read_bytes() == before


def test_folder_is_searched_and_an_empty_one_is_refused(tmp_path):
    (tmp_path / "in/deep").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no file below it ends in \.h5"):
        convert(tmp_path / "in", ARM, tmp_path / "data")
    write(tmp_path / "in/deep/b.hdf5", 3)
    write(tmp_path / "in/a.h5", 2)
    (tmp_path / "in/notes.txt").write_text("no corpus")
    data = convert(tmp_path / "in", ARM, tmp_path / "data")
    names = [file["name"] for file in data.published.manifest.source["files"]]
    assert names == ["a.h5", "deep/b.hdf5"]
    assert data.episode_table["length"].tolist() == [2, 3]


def test_files_that_cannot_be_opened_are_skipped_by_name(tmp_path):
    """C10: not HDF5, cut short, of another layout, not to be read."""
    (tmp_path / "in").mkdir()
    good = [write_file(tmp_path / f"in/{k}.h5", 4, seed=k) for k in (0, 5)]
    (tmp_path / "in/1.h5").write_text("<html>no such file</html>")
    (tmp_path / "in/2.h5").write_bytes(good[0].read_bytes()[:2000])
    with h5py.File(tmp_path / "in/3.h5", "w") as file:
        file["observations"] = np.zeros(3)
    with pytest.raises(CorpusError, match=r"1\.h5: not an HDF5 file but an HTML page"):
        convert(tmp_path / "in", ROBOHIVE, tmp_path / "data")
    with pytest.warns(UserWarning, match=r"skipped: 1\.h5: the whole file: .*HTML.*2\.h5.*3\.h5"):
        data = convert(
            tmp_path / "in", ROBOHIVE, tmp_path / "data", policies=Policies(on_invalid="skip")
        )
    skipped = {e["file"]: e for e in data.published.manifest.report["skipped"]}
    assert {entry["name"] for entry in skipped.values()} == {"the whole file"}
    assert "cannot be read" in skipped["2.h5"]["why"]
    assert "[V04]" in skipped["3.h5"]["why"]
    assert data.episode_table["seed"].tolist() == [0, 4]
    assert len(data) == 6
    bad = [tmp_path / f"in/{k}.h5" for k in (1, 2, 3)]
    with pytest.raises(CorpusError, match=r"no episode gives a row \(3 skipped\).*V38"):
        convert(bad, ROBOHIVE, tmp_path / "none", policies=Policies(on_invalid="skip"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"constant": "maybe"}, r"constant as one of \('keep', 'drop'\), got 'maybe'"),
        ({"on_invalid": "ignore"}, "on_invalid as one of"),
        ({"casts": {"float64": "text"}}, "casts from NumPy dtypes to dtypes of torch"),
        ({"casts": {"float64": "datetime64[s]"}}, "casts from NumPy dtypes to dtypes of torch"),
        ({"exclude": "info"}, "exclude as a list of keys, got 'info'"),
        ({"include": [()]}, "include as a list of keys"),
        ({"exclude": [("next", "done")]}, "exclude without flags and ids"),
        ({"strict": "yes"}, "expected strict as a bool, got 'yes'"),
    ],
)
def test_invalid_policies_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Policies(**arguments)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_logger_default_dtypes_are_reported(tmp_path, dtype):
    """V14: digits are lost in them, and counters wrap."""
    path = write(tmp_path / "a.h5", 4, force=lambda _, n: np.arange(n).astype(dtype))
    text = f"log/force is stored as {dtype}, the loggers' default, and kept so"
    with pytest.warns(UserWarning, match=rf"{text} \(1 time, .*run0.*\) \[V14\]"):
        data = run(tmp_path, path)
    assert data[:]["info", "force"].dtype == getattr(torch, dtype)
    notes = data.published.manifest.report["warnings"]
    assert [(note["rule"], note["text"]) for note in notes] == [("V14", text)]
    with pytest.raises(CorpusError, match=rf"refused, since policies are strict: {text}"):
        convert(path, ARM, tmp_path / "strict", policies=Policies(strict=True))
    assert not (tmp_path / "strict").exists()


def test_strict_policies_accept_files_without_warnings(tmp_path):
    path = write(tmp_path / "a.h5", 4, 3)
    data = run(tmp_path, path, strict=True)
    assert data.published.manifest.options["policies"]["strict"] is True
    assert len(data) == 7
    # Another data set than one that would have been made with warnings.
    with pytest.raises(RuntimeError, match="policies"):
        run(tmp_path, path)
    with h5py.File(path, "a") as file:
        file["notes"] = np.zeros(3)
    with pytest.raises(CorpusError, match=r"a\.h5: refused.* strict: skipped: a\.h5: notes: it is"):
        convert(path, ARM, tmp_path / "more", policies=Policies(strict=True))
