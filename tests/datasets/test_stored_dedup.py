"""Next observations that are not stored: the same rows as where they are, from half the bytes."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaykit import SliceSampler
from replaykit.datasets import Policies, convert, pull, push
from replaykit.datasets import open as open_dataset
from replaykit.datasets.dataset_passes import ensure_split
from replaykit.datasets.families import D4RL, ROBOHIVE
from replaykit.datasets.publishing import verify_published
from replaykit.testing.robohive_files import make_trial
from replaykit.tools.source_facts import corpus_facts
from replaykit.tools.validation import ted_findings
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.test_publish import edit
from tests.datasets.trials import write, write_file, write_steps
from tests.support import LoopbackHub


def made(path: Path, layout: Any, target: Path, **policies: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return convert(path, layout, target, policies=Policies(**policies))


def same(one: Any, other: Any) -> None:
    """The same keys, shapes, dtypes and bits."""
    keys = set(one.keys(True, True))
    assert keys == set(other.keys(True, True))
    for key in keys:
        ours, theirs = one[key], other[key]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), key
        assert ours.numpy().tobytes() == theirs.numpy().tobytes(), key


@pytest.fixture(params=["roboset", "d4rl-v0", "maniskill", "isaaclab"])
def both(request, tmp_path):
    """A corpus of a family as it is by default, and with repeated columns stored once."""
    corpus = CORPORA[request.param]
    (tmp_path / "files").mkdir()
    path = corpus.write(tmp_path / "files")
    return [
        made(path, corpus.layout, tmp_path / repeated, repeated=repeated)
        for repeated in ("keep", "once")
    ]


def test_deduplicated_rows_equal_full_rows(tmp_path, both):
    keep, once = both
    finals = once.published.finals
    assert finals
    assert not finals.keys() & once.published.columns.keys()
    assert finals.keys() | once.published.columns.keys() == keep.published.columns.keys()
    same(once[:], keep[:])
    same(once.published.tensordict(), keep.published.tensordict())
    for index in (0, len(keep) - 1, slice(1, 5), torch.tensor([3, 0, 3, 1]), [2, 1]):
        same(once[index], keep[index])
    verify_published(tmp_path / "once")
    statistics = {array.key: array.facts for array in keep.published.manifest.arrays}
    manifest = once.published.manifest
    for array in (*manifest.arrays, *manifest.finals):
        assert array.facts == statistics[array.key]
    for data, version in zip(both, (1, 2), strict=True):
        said = json.loads((data.published.path / "manifest.json").read_text())
        assert said["format_version"] == version
    splits = [ensure_split(tmp_path / n, tmp_path / f"{n}-split") for n in ("keep", "once")]
    assert splits[1].finals == {}
    same(splits[1].tensordict(), splits[0].tensordict())


@pytest.mark.parametrize("episodes", [[0], slice(1, None), [0, -1]])
def test_rows_of_chosen_episodes_are_the_same(tmp_path, both, episodes):
    count = len(both[0].episode_table["start"])
    if isinstance(episodes, list):
        episodes = [count - 1 if e < 0 else e for e in episodes]
    keep, once = (open_dataset(tmp_path / name, episodes=episodes) for name in ("keep", "once"))
    same(once[:], keep[:])
    again = pickle.loads(pickle.dumps(once.storage))
    same(again[:], keep[:])


def test_batches_and_slices_are_the_same(tmp_path, both):
    keep, once = (
        open_dataset(
            tmp_path / name,
            batch_size=8,
            sampler=SliceSampler(slice_len=2),
            generator=torch.Generator().manual_seed(3),
        )
        for name in ("keep", "once")
    )
    for _ in range(5):
        same(once.sample(), keep.sample())


def test_edits_stay_in_the_open_data_set(tmp_path, both):
    """An edit of an observation leaves what the row before arrived at as it was."""
    keep, once = both
    before = open_dataset(tmp_path / "keep")[:]
    for data in both:
        data[:2] = data[:2].apply(torch.zeros_like)
    same(once[:], keep[:])
    same(open_dataset(tmp_path / "once")[:], before)
    again = pickle.loads(pickle.dumps(once.storage))
    same(again[:], keep[:])


def test_images_take_half_the_room(tmp_path):
    trial = make_trial(40, infos=False)
    trial["observations"] = np.random.default_rng(0).normal(size=(40, 5000))
    path, sizes = write(tmp_path / "a.h5", trial), {}
    for repeated in ("keep", "once"):
        made(path, ROBOHIVE, tmp_path / repeated, repeated=repeated)
        files = (tmp_path / repeated).rglob("*.memmap")
        sizes[repeated] = sum(path.stat().st_size for path in files)
    assert sizes["once"] < 0.53 * sizes["keep"]


def test_next_observations_that_are_others_are_stored(tmp_path):
    """A source that stores them beside may have others: nothing is lost then."""
    states = np.eye(6)
    after = np.roll(states, -1, 0)
    after[2] = 7.0
    path = write_steps(tmp_path / "a.hdf5", 6, observations=states, next_observations=after)
    data = made(path, D4RL, tmp_path / "data", repeated="once", on_invalid="keep")
    assert data.published.finals == {}
    assert data[2]["next", "observation"].tolist() == [7.0] * 6


FAULTS = {
    "missing": lambda folder, file: file.unlink(),
    "short": lambda folder, file: file.write_bytes(file.read_bytes()[:-1]),
    "root": lambda folder, file: edit(
        folder, lambda said: said["finals"][0].update(key=["next", "nothing"])
    ),
    "version": lambda folder, file: edit(folder, lambda said: said.update(format_version=99)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_data_set_is_refused(tmp_path, fault):
    path, folder = write_file(tmp_path / "a.h5", 5), tmp_path / "data"
    made(path, ROBOHIVE, folder, repeated="once")
    FAULTS[fault](folder, folder / "finals/next/observation.memmap")
    with pytest.raises(RuntimeError, match="is not a complete data set"):
        open_dataset(folder)


@pytest.mark.parametrize("both", ["maniskill"], indirect=True)
def test_validate_inspect_push_and_pull_support_deduplication(tmp_path, both, point_client_at):
    keep, once = both
    findings = ted_findings(once.published, lambda count: None)
    assert all(finding.ok or finding.is_warning for finding in findings)
    keys = {facts.key for facts in corpus_facts(tmp_path / "once")[0].keys}
    assert keys == {"/".join(key) for key in keep.published.columns}
    with LoopbackHub({}) as hub:
        point_client_at(hub)
        push(tmp_path / "once", "me/once", license="mit", token="any")
        pulled = pull("me/once", root=tmp_path / "pulled")
        same(pulled[:], keep[:])
