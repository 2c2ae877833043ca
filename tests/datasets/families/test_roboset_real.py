"""RoboSet on real robots: files that the test writes, with the defects of the published ones."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from replaykit.datasets import Policies, RobosetExperienceReplay
from replaykit.datasets.families import ROBOHIVE, ROBOSET_REAL
from replaykit.errors import CorpusError
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted, write_file

CORPUS = CORPORA["roboset-real"]


def test_every_row_is_that_of_the_file(tmp_path, quietly):
    path = CORPUS.write(tmp_path)
    with h5py.File(path, "a") as file:  # one number a frame, not a row of one
        hand = file["Trial1/data/ctrl_ee"][:, 0]
        del file["Trial1/data/ctrl_ee"]
        file["Trial1/data/ctrl_ee"], file["Trial1/data/qp_ee"] = hand, np.arange(3.0)
        file["Trial0/data/qp_ee"] = np.arange(4.0)[:, None]
    data = quietly(path, ROBOSET_REAL)
    check(CORPUS, path, data.published)
    assert_ted(data.published)


def test_copies_are_reported(tmp_path, quietly):
    """The splitter of the published sets gave all even trials of a file the same content."""
    path = CORPUS.write(tmp_path)
    with h5py.File(path, "a") as file:
        file.copy("Trial0", "Trial2")
    data = quietly(path, ROBOSET_REAL)
    report = data.published.manifest.report
    why = "it has the observations and actions of robot.h5: Trial0 [V36]"
    assert report["skipped"] == [{"file": "robot.h5", "name": "Trial2", "why": why}]
    assert report["duplicates"] == []
    assert data.episode_table["episode"].tolist() == [0, 1]


def test_trials_with_holes_are_named_and_can_be_left_out(tmp_path, quietly):
    """N28: rows that contain NaN are never deleted one by one."""
    path = CORPUS.write(tmp_path)
    with h5py.File(path, "a") as file:
        file["Trial0/data/ctrl_arm"][2, 1] = np.nan
    with pytest.raises(CorpusError, match=r"Trial0/data/.*, record 2: .*NaN"):
        quietly(path, ROBOSET_REAL)
    data = quietly(path, ROBOSET_REAL, policies=Policies(on_invalid="skip"))
    assert_ted(data.published)
    assert data.episode_table["episode"].tolist() == [1]


@pytest.mark.filterwarnings("ignore:.*V14:UserWarning")
def test_the_class_takes_files_of_real_robots(tmp_path, quietly):
    path = CORPUS.write(tmp_path)
    wanted = quietly(path, ROBOSET_REAL)
    options = {"root": tmp_path / "root", "source": path}
    for layout in (None, ROBOSET_REAL, None):
        data = RobosetExperienceReplay("teleoperation/mine", 4, layout=layout, **options)
        assert (data[:] == wanted[:]).all()
        assert data.published.manifest.converter["name"] == "roboset-real"
    assert set(data[:].keys(True, True)) == set(wanted[:].keys(True, True))
    assert data.sample()["observation", "rgb_top"].shape == (4, 2, 2, 3)
    assert data.episode_table["truncated"].all()
    # Nothing was rewarded, which is not a reward of zero.
    assert data.episode_table["return"].isnan().all()


def test_the_class_takes_files_of_the_simulation_as_such(tmp_path):
    path = write_file(tmp_path / "a.h5", 4)
    options = {"root": tmp_path / "root", "source": path}
    assert RobosetExperienceReplay("mine", 2, **options).layout is ROBOHIVE
    (tmp_path / "none.h5").write_bytes(b"text")
    with pytest.raises(CorpusError, match=r"none\.h5"):
        RobosetExperienceReplay("other", 2, root=tmp_path / "root", source=tmp_path / "none.h5")


@pytest.mark.parametrize("order", [("sim", "real"), ("real", "sim")])
def test_files_of_both_kinds_are_refused_by_name(tmp_path, order):
    """Whichever comes first says what is expected: none is left out as if it were empty."""
    paths = [tmp_path / f"{number}_{kind}.h5" for number, kind in enumerate(order)]
    CORPUS.write(tmp_path).rename(paths[order.index("real")])
    write_file(paths[order.index("sim")], 4)
    with pytest.raises(CorpusError, match=rf"{paths[1].name}: no trial of the layout .*V04"):
        RobosetExperienceReplay("mine", 2, root=tmp_path / "root", source=paths)
    assert not (tmp_path / "root" / "mine").exists()
