"""Isaac Lab: files that the test writes as the recorder does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import Policies
from replaykit.datasets.families.robomimic import ISAACLAB
from replaykit.errors import CorpusError
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted

CORPUS, ARM = CORPORA["isaaclab"], "articulation/robot/pos"


def edited(folder: Path, change: Callable[[Any, Any], object]) -> Path:
    """Write two demonstrations, and change them; the first one succeeded."""
    path = CORPUS.write(folder)
    with h5py.File(path, "a") as file:
        change(*file["data"].values())
    return path


def attribute(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda one, two: one.attrs.__setitem__(name, value)


def test_unknown_success_is_none_and_no_array_is_left_out(tmp_path, quietly):
    path = edited(tmp_path, lambda one, two: one.attrs.__delitem__("success"))
    data = quietly(path, ISAACLAB)
    check(CORPUS, path, data.published)
    assert_ted(data.published)
    assert data.episode_table["length"].tolist() == [3, 2]
    assert data.episode_table["success"].tolist() == [-1, 0]
    assert data.published.manifest.report["left_out"] == []


def test_solved_demonstration_without_its_last_row_ends_truncated(tmp_path, quietly):
    data = quietly(CORPUS.write(tmp_path), ISAACLAB, policies=Policies(unrecorded="drop"))
    assert_ted(data.published)
    assert data.episode_table["length"].tolist() == [3, 2]
    assert data.episode_table["truncated"].tolist() == [True, True]
    assert data.episode_table["terminated"].tolist() == [False, False]


@pytest.mark.parametrize(
    ("shift", "said"), [(0, "is the action of the same record"), (1, "is neither")]
)
def test_observations_of_another_time_are_refused(tmp_path, quietly, shift, said):
    """Recordings of real robots reuse the layout with another alignment."""

    def late(one: Any, two: Any) -> None:
        one["obs/actions"][...] = np.roll(one["actions"][()], -shift, axis=0)

    with pytest.raises(CorpusError, match=rf"data/demo_0/obs/actions: .*{said}.*V51"):
        quietly(edited(tmp_path, late), ISAACLAB)


@pytest.mark.parametrize(
    ("said", "success"),
    [
        ("False", 0), ("True", 1), (np.bytes_(b"false"), 0), ("0", 0), (np.float32(0), 0),
        (np.array([1]), 1), (np.uint8(1), 1),
    ],
)  # fmt: skip
def test_success_in_every_form_it_is_stored_in(tmp_path, quietly, said, success):
    """A text is not empty, and would be true whatever it says: a false "terminated"."""
    data = quietly(edited(tmp_path, attribute("success", said)), ISAACLAB)
    assert data.episode_table["success"].tolist() == [success, 0]
    assert data.episode_table["terminated"].tolist() == [bool(success), False]
    assert data.episode_table["length"].tolist() == [3 + success, 2]


@pytest.mark.parametrize("said", ["maybe", "", 2, -1, 0.5, np.nan, np.array([1, 0])])
def test_success_other_than_true_or_false_is_an_error(tmp_path, quietly, said):
    path = edited(tmp_path, attribute("success", said))
    message = r"dataset\.hdf5: data/demo_0/success: is .*, expected true or false.*V30"
    with pytest.raises(CorpusError, match=message):
        quietly(path, ISAACLAB)
    data = quietly(path, ISAACLAB, policies=Policies(on_invalid="skip"))
    assert data.published.groups() == ["data/demo_3"]


@pytest.mark.parametrize("bare", [0, 1])
@pytest.mark.parametrize("missing", ["pad", "drop"])
def test_demonstrations_with_and_without_states_keep_their_own_states(
    tmp_path, quietly, bare, missing
):
    arms = []

    def strip(*demos: Any) -> None:
        for demo in demos:
            parts = (demo[f"{root}/{ARM}"][()] for root in ("initial_state", "states"))
            arms.append(np.concatenate(list(parts)))
        del demos[bare]["states"], demos[bare]["initial_state"]

    data = quietly(edited(tmp_path, strip), ISAACLAB, policies=Policies(missing=missing))
    assert data.episode_table["length"].tolist() == [4, 2]
    rows, key = data[:], ("state", *ARM.split("/"))
    joined = np.concatenate([arms[0][:4], arms[1][:2]])
    np.testing.assert_array_equal(rows["observation", "joint_pos"], joined)
    if missing == "drop":
        assert key not in data.published.columns
        return
    here = slice(4, 6) if bare == 0 else slice(0, 4)
    count = here.stop - here.start
    np.testing.assert_array_equal(rows[key][here], arms[1 - bare][:count])
    np.testing.assert_array_equal(rows[("next", *key)][here], arms[1 - bare][1:][:count])
    present = rows[("present", *key)].tolist()
    assert present == [t in range(*here.indices(6)) for t in range(6)]


def test_alignment_that_nothing_confirms_is_reported(tmp_path, quietly):
    def without_actions(*demos: Any) -> None:
        for demo in demos:
            del demo["obs/actions"]

    notes = quietly(edited(tmp_path, without_actions), ISAACLAB, "less").published.manifest.report[
        "warnings"
    ]
    assert [(note["rule"], note["count"], note["first"]) for note in notes] == [
        ("V15", 1, "dataset.hdf5: data"),
        ("V51", 2, "dataset.hdf5: data/demo_0"),
    ]
    assert "without obs/actions nothing confirms" in notes[1]["text"]


@pytest.mark.parametrize("is_alone", [True, False])
def test_missing_first_state_is_named_or_skipped(tmp_path, quietly, is_alone):
    def without_first(one: Any, two: Any) -> None:
        del two[f"initial_state/{ARM}"]
        if is_alone:
            del one.parent["demo_0"]

    path = edited(tmp_path, without_first)
    message = rf"hdf5: data/demo_3/initial_state/{ARM}: .*missing.*\[V12\]$"
    with pytest.raises(CorpusError, match=message):
        quietly(path, ISAACLAB)
    if not is_alone:
        data = quietly(path, ISAACLAB, policies=Policies(on_invalid="skip"))
        assert data.published.groups() == ["data/demo_0"]


def test_file_with_states_as_one_array_is_refused(tmp_path, quietly):
    def as_array(one: Any, two: Any) -> None:
        del one["states"]
        one["states"] = np.zeros((4, 9))

    with pytest.raises(CorpusError, match=r"dataset\.hdf5: this is no file of isaaclab.*V04"):
        quietly(edited(tmp_path, as_array), ISAACLAB)
