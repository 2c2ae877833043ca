"""Several processes convert as one does: the same bytes, the same manifest, the same errors."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

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


def odd_times(tmp_path: Path) -> list[Path]:
    """Five files of different sizes; one has odd times, one a trial without a row."""
    trials = [[make_trial(20 + 7 * k, seed=10 * k + j) for j in range(k + 1)] for k in range(5)]
    trials[1][0]["time"][3] = 0.0
    trials[3][1]["time"][5] = 0.0
    trials[2].append(make_trial(1))
    return [write(tmp_path / f"{k}.h5", *each) for k, each in enumerate(trials)]


def bad_trials(tmp_path: Path) -> list[Path]:
    bad = with_nan_action(make_trial(6, seed=1))
    trials = [(make_trial(5, seed=k), bad, make_trial(4, seed=9 + k)) for k in range(3)]
    return [write(tmp_path / f"{k}.h5", *each) for k, each in enumerate(trials)]


def unusable_infos(tmp_path: Path) -> list[Path]:
    trials = make_trial(4), with_repeated_infos(make_trial(5, seed=1))
    return [write(tmp_path / f"{k}.h5", trial) for k, trial in enumerate(trials)]


@pytest.fixture
def files(tmp_path):
    return odd_times(tmp_path)


@pytest.mark.parametrize(
    ("make", "workers", "start", "message"),
    [
        *[(odd_times, n, "fork", "first in 1.h5: Trial0/time, record 3") for n in (2, 3, 9)],
        (odd_times, 2, "forkserver", "first in 1.h5: Trial0/time, record 3"),
        pytest.param(odd_times, 2, "spawn", "first in 1.h5", marks=pytest.mark.long),
        (bad_trials, 2, "fork", r"skipped: .*0\.h5: Trial1: .*V20"),
        (unusable_infos, 2, "fork", "logged by reference"),
    ],
)
def test_result_does_not_depend_on_the_number_of_workers(
    tmp_path, make, workers, start, message, method
):
    """V62, N35: byte for byte, and the manifest but for when and where it was made."""
    method(start)
    files, policies = make(tmp_path), Policies(on_invalid="skip")
    with pytest.warns(UserWarning, match=message):
        one = convert(files, ROBOHIVE, tmp_path / "one", policies=policies)
    with pytest.warns(UserWarning, match=message):
        several = convert(
            files[::-1], ROBOHIVE, tmp_path / "several", workers=workers, policies=policies
        )
    assert content(tmp_path / "one") == content(tmp_path / "several")
    assert one.published.manifest.content_id() == several.published.manifest.content_id()
    has_infos = any("info" in key for key in several.published.columns)
    assert has_infos == (make is not unusable_infos)
    if make is bad_trials:
        assert one.episode_table["episode"].tolist() == [0, 2] * 3
    verify_published(tmp_path / "several")


def test_error_of_a_worker_is_the_error(tmp_path, files):
    path = write(tmp_path / "z.h5", with_nan_action(make_trial(6)))
    before = multiprocessing.active_children()
    with pytest.raises(CorpusError, match=r"z\.h5: Trial0/actions, record 2: .*V20"):
        convert([*files, path], ROBOHIVE, tmp_path / "data", workers=2)
    assert not (tmp_path / "data").exists()
    assert multiprocessing.active_children() == before
    with pytest.raises(ValueError, match="workers >= 1, got 0"):
        convert(files, ROBOHIVE, tmp_path / "data", workers=0)


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
