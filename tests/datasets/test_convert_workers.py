"""Several processes convert as one does: the same bytes, the same manifest, the same errors."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator

import pytest

from replaykit.datasets import Policies, convert
from replaykit.datasets.engine.row_writer import RowWriter
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import verify_published
from replaykit.errors import CorpusError
from replaykit.testing.robohive_files import make_trial
from tests.datasets.converted import content
from tests.datasets.trials import with_nan_action, with_repeated_infos, write


@pytest.fixture(autouse=True)
def method() -> Iterator[Callable[[str], None]]:
    """Processes are forked, whatever others have made the default; or as the test says."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield lambda name: multiprocessing.set_start_method(name, force=True)
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def files(tmp_path):
    """Five files of different sizes; one has odd times, one a trial without a row."""
    trials = [[make_trial(20 + 7 * k, seed=10 * k + j) for j in range(k + 1)] for k in range(5)]
    trials[1][0]["time"][3] = 0.0
    trials[3][1]["time"][5] = 0.0
    trials[2].append(make_trial(1))
    return [write(tmp_path / f"{k}.h5", *each) for k, each in enumerate(trials)]


@pytest.mark.parametrize(
    ("workers", "start"),
    [
        *[(2, "fork"), (3, "fork"), (9, "fork"), (2, "forkserver")],
        pytest.param(2, "spawn", marks=pytest.mark.long),
    ],
)
def test_result_does_not_depend_on_the_number_of_workers(tmp_path, files, workers, start, method):
    """V62, N35: byte for byte, and the manifest but for when and where it was made."""
    method(start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        one = convert(files, ROBOHIVE, tmp_path / "one")
        several = convert(files[::-1], ROBOHIVE, tmp_path / "several", workers=workers)
    assert content(tmp_path / "one") == content(tmp_path / "several")
    assert one.published.manifest.content_id() == several.published.manifest.content_id()
    note = one.published.manifest.report["warnings"][0]
    assert (note["rule"], note["count"], note["first"]) == ("V27", 2, "1.h5: Trial0/time, record 3")
    verify_published(tmp_path / "several")


def test_skipped_episodes_are_the_same_for_workers(tmp_path):
    bad = with_nan_action(make_trial(6, seed=1))
    paths = [
        write(tmp_path / f"{k}.h5", make_trial(5, seed=k), bad, make_trial(4, seed=9 + k))
        for k in range(3)
    ]
    policies = Policies(on_invalid="skip")
    with pytest.warns(UserWarning, match=r"skipped: .*0\.h5: Trial1: .*V20"):
        one = convert(paths, ROBOHIVE, tmp_path / "one", policies=policies)
    with pytest.warns(UserWarning, match="skipped"):
        convert(paths, ROBOHIVE, tmp_path / "several", policies=policies, workers=2)
    assert one.episode_table["episode"].tolist() == [0, 2] * 3
    assert content(tmp_path / "one") == content(tmp_path / "several")


def test_error_of_a_worker_is_the_error(tmp_path, files):
    path = write(tmp_path / "z.h5", with_nan_action(make_trial(6)))
    before = multiprocessing.active_children()
    with pytest.raises(CorpusError, match=r"z\.h5: Trial0/actions, record 2: .*V20"):
        convert([*files, path], ROBOHIVE, tmp_path / "data", workers=2)
    assert not (tmp_path / "data").exists()
    assert multiprocessing.active_children() == before


def test_field_that_a_worker_finds_unusable_is_left_out_everywhere(tmp_path):
    trials = make_trial(4), with_repeated_infos(make_trial(5, seed=1))
    paths = [write(tmp_path / f"{k}.h5", trial) for k, trial in enumerate(trials)]
    with pytest.warns(UserWarning, match="logged by reference"):
        data = convert(paths, ROBOHIVE, tmp_path / "data", workers=2)
    assert not [key for key in data.published.columns if "info" in key]


def test_worker_that_is_killed_leaves_nothing(tmp_path, files, monkeypatch):
    here, finish = os.getpid(), RowWriter.finish

    def die(self: RowWriter) -> None:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(self)

    monkeypatch.setattr(RowWriter, "finish", die)
    with pytest.raises(RuntimeError, match="a worker died before it was done, by signal SIGKILL"):
        convert(files, ROBOHIVE, tmp_path / "data", workers=2)
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != ".h5") == [".data.lock"]


def test_no_worker_is_refused(tmp_path, files):
    with pytest.raises(ValueError, match="workers >= 1, got 0"):
        convert(files, ROBOHIVE, tmp_path / "data", workers=0)
