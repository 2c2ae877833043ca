"""Fields of a layout on one source, and what the policies leave out: nothing goes unsaid."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import (
    ARRIVALS,
    FINAL_STATE,
    STATE_RECORDS,
    STEPS,
    Alignment,
    Field,
    Groups,
    Layout,
    Policies,
    convert,
)
from replaykit.datasets.engine.layout import Ends, Flags
from replaykit.datasets.families import D4RL, ISAACLAB, ROBOHIVE, ROBOMIMIC
from replaykit.errors import CorpusError
from replaykit.testing.robohive_files import RoboHiveWriter
from tests.datasets.families.test_robomimic import demo
from tests.datasets.families.test_robomimic import write as write_demos
from tests.datasets.trials import write_steps
from tests.support.refusals import refuses

POSE = np.arange(24.0).reshape(6, 4) ** 2
STATE = Field("pose", "observation", ("observation",), ("next", "observation"))
SCORE = Field("score", "reward", after=("next", "reward"))


def _layout(*fields: Field, **how: Any) -> Layout:
    known: dict[str, Any] = {
        "name": "arm", "version": 1, "episodes": Groups("run", having=("score",)),
        "alignment": FINAL_STATE, "clock": "score",
    }  # fmt: skip
    return Layout(**{**known, **how}, fields=fields)


def _write(path: Path, runs: int = 2, **more: Any) -> Path:
    with h5py.File(path, "w") as file:
        for run in range(runs):
            file[f"run{run}/pose"] = POSE + run
            file[f"run{run}/score"] = np.arange(5.0) + run
            for name, values in more.items():
                file[f"run{run}/{name}"] = values
    return path


@pytest.mark.parametrize("is_reversed", [False, True])
def test_state_and_shifted_action_of_one_array_are_both_made(tmp_path, is_reversed):
    action = Field("pose", "action", before=("action",), shift=1, more=1)
    fields = (action, STATE, SCORE) if is_reversed else (STATE, action, SCORE)
    data = convert(_write(tmp_path / "a.h5"), _layout(*fields), tmp_path / "data")
    rows = data[:]
    for run in range(2):
        mine = rows[rows["episode"] == run]
        np.testing.assert_array_equal(mine["observation"], POSE[:-1] + run)
        np.testing.assert_array_equal(mine["next", "observation"], POSE[1:] + run)
        np.testing.assert_array_equal(mine["action"], POSE[1:] + run)
    sources = {tuple(array.key): array.facts for array in data.published.manifest.arrays}
    assert (sources["action",]["source"], sources["action",]["shift"]) == ("pose", 1)


def test_each_field_of_one_source_has_its_own_dtype_and_shape(tmp_path):
    fields = (
        STATE,
        SCORE,
        Field("score", "info", after=("next", "seen"), dtype="float32", moment="outcome"),
        Field("score", "info", after=("next", "wide"), column=True, moment="outcome"),
    )
    rows = convert(_write(tmp_path / "a.h5"), _layout(*fields), tmp_path / "data")[:]
    expected = np.concatenate([np.arange(5.0), np.arange(5.0) + 1])
    for key, shape, dtype in (
        ("reward", (10, 1), np.float64), ("seen", (10,), np.float32), ("wide", (10, 1), np.float64),
    ):  # fmt: skip
        found = rows["next", key].numpy()
        assert (found.shape, found.dtype) == (shape, dtype)
        np.testing.assert_array_equal(found.reshape(-1), expected)


def test_groups_parts_side_by_side_and_single_paths_may_share_datasets(tmp_path):
    path = _write(tmp_path / "a.h5", runs=1, **{"obs/x": POSE[:, :2], "obs/y": POSE[:, 2:]})
    fields = (
        Field("obs/", "observation", ("observation",), ("next", "observation")),
        Field(("obs/x", "obs/y"), "observation", ("flat",), ("next", "flat")),
        Field("obs/x", "action", before=("action",), moment="state", shift=1),
        Field("obs/", "info", before=("info",)),
        SCORE,
    )
    with pytest.warns(UserWarning, match="left out.*pose: it is no part"):
        rows = convert(path, _layout(*fields), tmp_path / "data")[:]
    np.testing.assert_array_equal(rows["observation", "y"], POSE[:5, 2:])
    np.testing.assert_array_equal(rows["info", "y"], POSE[:5, 2:])
    np.testing.assert_array_equal(rows["flat"], POSE[:5])
    np.testing.assert_array_equal(rows["action"], POSE[1:, :2])


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize(
    ("required", "optional"),
    [
        (SCORE, Field("score", "info", after=("next", "copy"), moment="outcome", required=False)),
        (STATE, Field("pose", "info", before=("copy",), more=1, required=False)),
        (
            Field("g/x", "info", before=("x",), moment="outcome"),
            Field("g/", "info", before=("copy",), moment="outcome", required=False),
        ),
    ],
)
def test_a_required_and_an_optional_field_share_values(tmp_path, required, optional, is_reversed):
    # A group takes what a field before it takes only where it comes first.
    is_group_first = is_reversed or optional.is_group
    pair = [optional, required] if is_group_first else [required, optional]
    others = [each for each in (STATE, SCORE) if each is not required]
    path = _write(tmp_path / "a.h5", **{"g/x": np.arange(5.0), "g/y": np.arange(5.0) + 1})
    layout = _layout(*pair, *others)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if optional.is_group else "ignore")  # g/ may be foreign
        data = convert(path, layout, tmp_path / "data")
    why = {each["key"]: each["why"] for each in data.published.manifest.report["left_out"]}
    assert required.name not in why
    rows = data[:]
    if required is SCORE:
        np.testing.assert_array_equal(rows["next", "copy"], rows["next", "reward"][:, 0])
    elif required is STATE:
        np.testing.assert_array_equal(rows["copy"], rows["observation"])
    else:
        np.testing.assert_array_equal(rows["copy", "x"], rows["x"])
        np.testing.assert_array_equal(rows["copy", "y"], rows["x"] + 1)


def test_all_nan_optional_field_of_a_required_source_is_left_out(tmp_path):
    path = _write(tmp_path / "a.h5", x=np.full(5, np.nan))
    fields = (
        Field("x", "info", before=("x",), moment="outcome"),
        Field("x", "info", before=("copy",), moment="outcome", required=False),
    )  # fmt: skip
    with pytest.warns(UserWarning, match="left out: x: it is NaN throughout"):
        rows = convert(path, _layout(STATE, SCORE, *fields), tmp_path / "data")[:]
    assert rows["x"].isnan().all()
    assert "copy" not in rows


@pytest.mark.filterwarnings("ignore:.*it is no part of the layout:UserWarning")
def test_ends_of_one_source_are_both_set(tmp_path):
    score = np.array([0.0, 0.0, 0.0, 0.0, 3.0])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for run, scores in enumerate((score, np.zeros(5))):
            file[f"run{run}/pose"], file[f"run{run}/score"] = POSE + run, scores
            file[f"run{run}/end"], file[f"run{run}/last"] = np.arange(5) == 4, np.arange(6) == 5
    seen = Field("score", "info", before=("seen",), moment="outcome")
    data = convert(
        tmp_path / "a.h5", _layout(SCORE, seen, STATE, Field("score", "terminated")),
        tmp_path / "data",
    )  # fmt: skip
    rows, both = data[:], np.concatenate([score, np.zeros(5)])
    np.testing.assert_array_equal(rows["next", "reward"][:, 0], both)
    np.testing.assert_array_equal(rows["seen"], both)
    np.testing.assert_array_equal(rows["next", "terminated"][:, 0], both != 0)
    np.testing.assert_array_equal(rows["next", "truncated"][:, 0], np.arange(10) == 9)
    ends = (Field("end", "terminated"), Field("end", "truncated"))
    rows = convert(tmp_path / "a.h5", _layout(STATE, SCORE, *ends), tmp_path / "ends")[:]
    for name in ("terminated", "truncated"):
        assert rows["next", name][:, 0].nonzero().flatten().tolist() == [4, 9]
    # An end of states belongs to the state after a row.
    state = Field("last", "terminated", moment="state")
    data = convert(tmp_path / "a.h5", _layout(STATE, SCORE, state), tmp_path / "states")
    assert data.episode_table["length"].tolist() == [5, 5]
    assert data.episode_table["terminated"].all()


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("last", [3, 4])
def test_ends_from_one_source_keep_separate_shifts(tmp_path, last, is_reversed):
    end = np.arange(5) == last
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["run0/pose"], file["run0/score"], file["run0/end"] = POSE[:5], np.arange(5.0), end
    # Row t takes record t + 1 of outcomes, and record t with a shift of -1.
    pair = [Field("end", "terminated", held=True), Field("end", "truncated", shift=-1)]
    layout = _layout(STATE, SCORE, *pair[:: -1 if is_reversed else 1], alignment=STATE_RECORDS)
    rows = convert(tmp_path / "a.h5", layout, tmp_path / "data")[:]
    assert len(rows) == 4
    terminated, truncated = end[1:][-1], end[:-1][-1]
    assert (last == 4, last == 3) == (terminated, truncated)
    assert bool(rows["next", "terminated"][-1]) == terminated
    assert bool(rows["next", "truncated"][-1]) == truncated
    assert not rows["next", "done"][:-1].any()


@pytest.mark.parametrize("more", [None, 1])
def test_an_end_of_a_later_record_is_that_of_its_row(tmp_path, more):
    end = np.arange(6 if more else 5) == (5 if more else 4)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for run in range(3):
            file[f"run{run}/pose"], file[f"run{run}/score"] = POSE + run, np.arange(5.0)
            file[f"run{run}/end"] = end if run != 1 else np.zeros_like(end)
    layout = _layout(STATE, SCORE, Field("end", "terminated", shift=1, more=more))
    data = convert(tmp_path / "a.h5", layout, tmp_path / "data")
    # A row exists where its end was recorded.
    assert data.episode_table["length"].tolist() == [5 if more else 4] * 3
    assert data.episode_table["terminated"].tolist() == [True, False, True]


@dataclass(frozen=True, kw_only=True)
class _Own(Layout):
    """Says itself why episodes end, of two fields of one source."""

    def flags(self, ends: Mapping[str, Ends], *rest: Any) -> Flags:
        assert sorted(ends) == ["end", "end#3"]
        return Flags(ends["end"].last, ends["end#3"].last)


def test_layout_that_defines_episode_ends_sees_each_field(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["run0/pose"], file["run0/score"] = POSE[:5], np.arange(5.0)
        file["run0/end"] = np.arange(5) == 3
    fields = (STATE, SCORE, Field("end", "terminated"), Field("end", "truncated", shift=-1))
    layout = _Own(
        name="arm", version=1, episodes=Groups("run", having=("score",)), alignment=STATE_RECORDS,
        clock="score", fields=fields,
    )  # fmt: skip
    data = convert(tmp_path / "a.h5", layout, tmp_path / "data")
    assert data.episode_table["terminated"].tolist() == [False]


def _carries(source: str, *key: str, **how: Any) -> Field:
    return Field(source, "info", before=key, moment="outcome", **how)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (_carries("g/x", "a"), _carries("g/y", "a"), r"'g/x' and 'g/y' fill the key \('a',\)"),
        (_carries("g/x", "a"), _carries("g/x", "a"), r"'g/x' and 'g/x' fill the key"),
        (_carries("g/x", "a"), _carries("g/y", "a", "b"), "'g/x' and 'g/y' fill .*below one an"),
        (_carries("g/y", "a", "b"), _carries("g/x", "a"), "'g/y' and 'g/x' fill .*below one an"),
        (_carries("g/x", "observation", "x"), SCORE, "'pose' and 'g/x' fill"),
        (_carries("g/", "a", "b"), _carries("h/x", "a"), "'g/' and 'h/x' fill"),
        (_carries("g/", "a"), _carries("h/x", "a"), "'g/' and 'h/x' fill"),
        (_carries("g/x", "a", required=False), _carries("g/y", "a"), "'g/x' and 'g/y' fill"),
        (Field("x", "info", ("a",), ("a",)), SCORE, "'x' and 'x' fill the key"),
        (_carries("g/x", "episode"), SCORE, r"'g/x' fills \('episode',\), but every data set"),
        (_carries("g/x", "next"), SCORE, "'g/x' fills .*but every data set"),
        (_carries("g/", "done"), SCORE, "'g/' fills .*but every data set"),
        (_carries("g/x", "a", shift=-1), SCORE, "row 0 would take record -1 of the field 'g/x'"),
        (Field("e", "truncated", shift=-1), SCORE, "row 0 would take record -1 of the field 'e'"),
    ],
)
def test_colliding_keys_are_an_error_at_declaration(one, other, said):
    others = [other] if other is SCORE else [SCORE, other]
    with pytest.raises(ValueError, match=f"layout 'arm': .*{said}"):
        _layout(STATE, one, *others)


def test_one_of_two_fields_may_take_a_key(tmp_path):
    more = {"g/x": np.arange(5.0), "h/x/y": np.arange(5.0), "new": np.arange(5.0) + 1}
    path = _write(tmp_path / "a.h5", **more)
    pair = [_carries(name, "a", required=False) for name in ("old", "new")]
    with pytest.warns(UserWarning, match="left out"):
        rows = convert(path, _layout(STATE, SCORE, *pair), tmp_path / "data")[:]
    np.testing.assert_array_equal(rows["a"][:5], np.arange(5.0) + 1)
    groups = [_carries(name, "a") for name in ("g/", "h/")]
    said = r"a\.h5: .*'g/x' fills the column \('a', 'x'\), and 'h/x/y' the column .* below it.*V10"
    with pytest.raises(CorpusError, match=said):
        convert(path, _layout(STATE, SCORE, *groups), tmp_path / "other")


def test_fields_that_make_no_sense_are_errors_at_declaration():
    images = Field("obs/camera/", "info", ("camera",))
    whole, states = Field("/", "info", ("info",)), Field("obs/", "observation", ("observation",))
    said = r"'obs/camera/' gets nothing.*put 'obs/camera/' first"
    refuses(ValueError, said, _layout, states, images)
    refuses(ValueError, "gets nothing", _layout, whole, states)
    said = "takes the role 'reward', got 'info'"
    refuses(ValueError, said, Field, "score", "info", after=("next", "reward"))
    said = r"'x': expected role as one of \('observation', "
    refuses(ValueError, said, Field, "x", "observatoin", ("info",))
    said = "expected moment as one of"
    refuses(ValueError, said, Field, "x", "info", ("info",), moment="tomorrow")
    said = "a successor has the key"
    refuses(ValueError, said, Field, "x", "info", ("info",), moment="successor")


def test_a_custom_alignment_takes_other_records(tmp_path):
    own = Alignment("own", extra=2, action=1, outcome=0)
    path = _write(tmp_path / "a.h5", runs=1, torque=np.arange(6.0)[:, None])
    with h5py.File(path, "a") as file:
        del file["run0/pose"]
        file["run0/pose"] = np.arange(7.0)[:, None]
    fields = (STATE, SCORE, Field("torque", "action", before=("action",), more=1))
    rows = convert(path, _layout(*fields, alignment=own), tmp_path / "data")[:]
    assert rows["observation"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert rows["action"].flatten().tolist() == [1, 2, 3, 4, 5]
    assert rows["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 4]


def test_a_layout_that_overrides_the_old_name_of_a_method_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Old(type(ROBOMIMIC)):
        def beside(self, location):
            return {"seed": 1}

    with pytest.raises(TypeError, match="Old: expected sidecar_facts, got beside"):
        Old(**vars(_layout(STATE, SCORE)))


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 1, 1)])
@pytest.mark.parametrize("alignment", [FINAL_STATE, STEPS, ARRIVALS])
def test_rewards_have_one_trailing_dimension(tmp_path, column, shape, alignment):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["run0/score"] = np.arange(5.0).reshape(shape)
        file["run0/pose"] = POSE if alignment is FINAL_STATE else POSE[:5]
    score = replace(SCORE, column=column)
    data = convert(tmp_path / "a.h5", _layout(STATE, score, alignment=alignment), tmp_path / "data")
    assert data[:]["next", "reward"].shape == (len(data), 1)
    assert data[:]["next", "done"].shape == (len(data), 1)


def _robohive(path: Path, *, late: int = 0, reward: float = 0.0) -> Path:
    """Trials whose infos are of the record, or of one later; rewards may be others."""
    rng = np.random.default_rng(0)
    with RoboHiveWriter(path) as writer:
        for _ in range(2):
            states = rng.normal(size=(6 + late, 3))
            scores = rng.normal(size=6)
            writer.add_trial(
                states[:6], rng.normal(size=(5, 2)), scores + reward, np.zeros(6, bool),
                np.arange(6.0), env_infos={
                    "obs_dict/qpos": states[late : late + 6], "rwd_dense": scores,
                },
            )  # fmt: skip
    return path


STATES = ["observation", ("next", "observation")]
INFOS = ["info", ("next", "info")]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("fault", "rule"), [({"late": 1}, "V51"), ({"reward": 1.0}, "V52")])
@pytest.mark.parametrize(
    "left_out",
    [
        {},
        {"exclude": INFOS},
        {"exclude": STATES},
        {"exclude": [*STATES, *INFOS, ("next", "reward")]},
        {"include": ["action"]},
        {"include": [("next", "reward")]},
    ],
)
def test_excluded_columns_still_reveal_late_records_and_foreign_rewards(
    tmp_path, left_out, fault, rule, strict
):
    path = _robohive(tmp_path / "a.h5", **fault)
    policies = Policies(**left_out, strict=strict)
    with pytest.raises(CorpusError, match=rf"\[{rule}\]"):
        convert(path, ROBOHIVE, tmp_path / "data", policies=policies)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("strict", [False, True])
def test_excluded_isaac_lab_observations_still_reveal_late_records(tmp_path, strict):
    actions = np.random.default_rng(0).normal(size=(6, 2))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data/demo_0/actions"] = actions
        file["data/demo_0/obs/actions"] = actions  # that of the same record
        file["data/demo_0/obs/joints"] = np.arange(12.0).reshape(6, 2)
    policies = Policies(exclude=["observation", ("next", "observation")], strict=strict)
    with pytest.raises(CorpusError, match=r"\[V51\]"):
        convert(tmp_path / "a.h5", ISAACLAB, tmp_path / "data", policies=policies)


@pytest.mark.parametrize("key", ["observation", ("next", "observation")])
def test_steps_without_a_comparison_are_reported_as_unverified(tmp_path, key):
    # Rows of two episodes are mixed, which only both sides tell.
    states = np.arange(6.0)[:, None]
    ends = {"terminals": np.zeros(6, bool), "timeouts": np.arange(6) == 5}
    more = {"observations": states, "next_observations": states[::-1].copy(), **ends}
    path = write_steps(tmp_path / "a.h5", 6, **more)
    policies = Policies(exclude=[key])
    name = key if isinstance(key, str) else "/".join(key)
    said = f"{name} left out by the policies, so that it is unverified whether steps arrive"
    with pytest.warns(UserWarning, match=said):
        data = convert(path, D4RL, tmp_path / "data", policies=policies)
    assert any(said in each["text"] for each in data.published.manifest.report["warnings"])
    with pytest.raises(CorpusError, match=said):
        convert(path, D4RL, tmp_path / "strict", policies=replace(policies, strict=True))


P, NEXT_P = ("observation", "p"), ("next", "observation", "p")


@pytest.mark.parametrize(
    ("left_out", "names"),
    [
        ({"exclude": [NEXT_P]}, "next/observation/p"),
        ({"exclude": [P]}, "observation/p"),
        ({"exclude": [P, NEXT_P]}, "next/observation/p, observation/p"),
        ({"exclude": ["observation", "next"]}, "next/observation/p, observation/p"),
        ({"include": [("next", "reward")]}, "next/observation/p, observation/p"),
        ({"include": ["observation"]}, "next/observation/p"),
    ],
)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_steps_of_groups_are_compared_or_reported_as_unverified(
    tmp_path, left_out, names, is_wrong
):
    demos = {f"demo_{k}": demo(5, seed=k) for k in range(2)}
    for values in demos.values():
        values["obs/p"], values["next_obs/p"] = (values.pop(f"{at}/position") for at in SIDES)
        del values["obs/image"], values["next_obs/image"]
        if is_wrong:
            values["next_obs/p"] = values["next_obs/p"][::-1].copy()
    path, strict = write_demos(tmp_path / "a.h5", demos), Policies(strict=True)
    if is_wrong:
        with pytest.raises(CorpusError, match=r"\[V22\]"):
            convert(path, ROBOMIMIC, tmp_path / "whole")
    else:
        assert len(convert(path, ROBOMIMIC, tmp_path / "whole", policies=strict)) == 10
    said = f"{names} left out by the policies, so that it is unverified whether steps arrive"
    policies = Policies(**left_out)
    with pytest.warns(UserWarning, match=said):
        data = convert(path, ROBOMIMIC, tmp_path / "data", policies=policies)
    (note,) = data.published.manifest.report["warnings"]
    assert (note["rule"], note["count"]) == ("V22", 1)
    with pytest.raises(CorpusError, match=said):
        convert(path, ROBOMIMIC, tmp_path / "strict", policies=replace(policies, strict=True))
    assert not (tmp_path / "strict").exists()


SIDES = ("obs", "next_obs")


@pytest.mark.parametrize("copies", ["layout", "keep", "drop", "error"])
def test_equal_actions_without_observations_are_not_called_copies(tmp_path, copies):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for run in range(2):  # one action throughout, but other states
            file[f"run{run}/pose"], file[f"run{run}/score"] = POSE + run, np.full(5, 1.0 + run)
            file[f"run{run}/torque"] = np.ones((5, 1))
    layout = _layout(STATE, Field("torque", "action", before=("action",)), SCORE)
    policies = Policies(exclude=["observation", ("next", "observation")], copies=copies)
    if copies in ("layout", "keep"):
        data = convert(tmp_path / "a.h5", layout, tmp_path / "data", policies=policies)
        assert data[:]["next", "reward"][:, 0].tolist() == [1.0] * 5 + [2.0] * 5
        assert data.published.manifest.report["duplicates"] == []
    else:
        with pytest.raises(ValueError, match="copies of episodes cannot be recognized"):
            convert(tmp_path / "a.h5", layout, tmp_path / "data", policies=policies)
    whole = convert(tmp_path / "a.h5", layout, tmp_path / "w", policies=Policies(copies="error"))
    assert len(whole) == 10
