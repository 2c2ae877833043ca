"""RoboSet on real robots: files that the test writes, with the defects of the published ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from replaykit.datasets import Policies, RobosetExperienceReplay
from replaykit.datasets.families import ROBOHIVE, ROBOSET_REAL
from replaykit.errors import CorpusError
from tests.datasets.mutated.corpora import CORPORA
from tests.datasets.mutated.running import check
from tests.datasets.trials import assert_ted, write_file


def trial(frames: int, *, seed: int = 0, flat: bool = False, **more: Any) -> dict[str, Any]:
    """``flat``: the gripper has one number a frame, not a row of one."""
    draw = np.random.default_rng(seed)

    def half(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float16)

    one = () if flat else (1,)
    values = {
        "data/time": np.arange(frames, dtype=np.float64) + 1.6e9,
        "data/ctrl_arm": half(frames, 7),
        "data/ctrl_ee": half(frames, *one),
        "data/qp_arm": half(frames, 7),
        "data/qp_ee": half(frames, *one),
        "data/rgb_left": draw.integers(0, 256, (frames, 6, 8, 3), np.uint8),
        "derived/pose_ee": half(frames, 6),
        "config/solved": np.ones(1, np.float16),
    }
    values["data/ctrl_arm"][-1] = np.nan
    values["data/ctrl_ee"][-1] = np.nan
    return {**values, **more}


def write(path: Path, *trials: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for number, values in enumerate(trials):
            for name, value in values.items():
                if value is not None:
                    file[f"Trial{number}/{name}"] = value
    return path


def test_every_row_is_that_of_the_file(tmp_path, quietly):
    path = write(tmp_path / "a.h5", trial(5), trial(4, seed=1, flat=True))
    data = quietly(path, ROBOSET_REAL)
    check(CORPORA["roboset-real"], path, data.published)
    assert_ted(data.published)


def test_copies_are_reported(tmp_path, quietly):
    """The splitter of the published sets gave all even trials of a file the same content."""
    path = write(tmp_path / "a.h5", trial(4), trial(4, seed=1), trial(4), trial(3, seed=2))
    data = quietly(path, ROBOSET_REAL)
    report = data.published.manifest.report
    why = "it has the observations and actions of a.h5: Trial0 [V36]"
    assert report["skipped"] == [{"file": "a.h5", "name": "Trial2", "why": why}]
    assert report["duplicates"] == []
    assert data.episode_table["episode"].tolist() == [0, 1, 3]


def test_trials_with_holes_are_named_and_can_be_left_out(tmp_path, quietly):
    """N28: rows that contain NaN are never deleted one by one."""
    bad = trial(5, seed=1)
    bad["data/ctrl_arm"][2, 3] = np.nan
    path = write(tmp_path / "a.h5", trial(4), bad, trial(3, seed=2))
    with pytest.raises(CorpusError, match=r"Trial1/data/.*, record 2: .*NaN"):
        quietly(path, ROBOSET_REAL)
    data = quietly(path, ROBOSET_REAL, policies=Policies(on_invalid="skip"))
    assert_ted(data.published)
    assert data.episode_table["episode"].tolist() == [0, 2]


@pytest.mark.filterwarnings("ignore:.*V14:UserWarning")
def test_the_class_takes_files_of_real_robots(tmp_path, quietly):
    """By what is in them, or by the layout that is given."""
    path = write(tmp_path / "a.h5", trial(5), trial(4, seed=1))
    wanted = quietly(path, ROBOSET_REAL)
    options = {"root": tmp_path / "root", "source": path}
    for layout in (None, ROBOSET_REAL, None):
        data = RobosetExperienceReplay("teleoperation/mine", 4, layout=layout, **options)
        assert (data[:] == wanted[:]).all()
        assert data.published.manifest.converter["name"] == "roboset-real"
    assert set(data[:].keys(True, True)) == set(wanted[:].keys(True, True))
    assert data.sample()["observation", "rgb_left"].shape == (4, 6, 8, 3)
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
    for path in paths:
        write(path, trial(5)) if "real" in path.name else write_file(path, 4)
    with pytest.raises(CorpusError, match=rf"{paths[1].name}: no trial of the layout .*V04"):
        RobosetExperienceReplay("mine", 2, root=tmp_path / "root", source=paths)
    assert not (tmp_path / "root" / "mine").exists()
