"""Episodes that are left out after all have been written: what stays is as if they had not been."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDict

from replaykit.datasets import Policies, convert
from replaykit.datasets.engine import conversion
from replaykit.datasets.families.robohive import ROBOHIVE
from replaykit.datasets.publishing import verify_published
from replaykit.errors import CorpusError
from replaykit.testing.robohive_files import RoboHiveWriter, make_trial
from tests.datasets.converted import files_of


def trials() -> dict[int, dict[str, Any]]:
    """Seven trials of 2 to 8 rows, with a column whose rows are larger than a page."""
    found = {}
    for k in range(7):
        found[k] = make_trial(k + 3, seed=k, terminated=k % 2 == 0)
        wide = np.random.default_rng(k).integers(0, 256, (k + 3, 9_000), np.uint8)
        found[k]["env_infos"]["wide"] = wide
    return found


def write(path: Path, wanted: dict[int, dict[str, Any]]) -> Path:
    path.parent.mkdir()
    with RoboHiveWriter(path) as writer:
        for k, trial in wanted.items():
            writer.add_trial(**trial, name=f"Trial{k}")
    return path


def check_kept(folder: Path, left: Any, trials: dict[int, dict[str, Any]], *kept: int) -> None:
    """The data set is that of some of the trials."""
    source = write(folder / "good/a.h5", {k: trials[k] for k in kept})
    check(folder, left, convert(source, ROBOHIVE, folder / "wanted"))


def columns_of(folder: Path) -> dict[str, bytes]:
    """All files but the manifest and what tensordict says of shapes."""
    return {name: data for name, data in files_of(folder).items() if not name.endswith(".json")}


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """How often the rows were written, each with how many episodes there were."""
    found: list[int] = []
    write_files = conversion.write_files

    def counted(plan: Any, *args: Any, **options: Any) -> Any:
        found.append(len(plan.episodes))
        return write_files(plan, *args, **options)

    monkeypatch.setattr(conversion, "write_files", counted)
    return found


def skipping(path: Path, target: Path, **policies: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return convert(path, ROBOHIVE, target, policies=Policies(**policies))


def check(folder: Path, left: Any, wanted: Any) -> None:
    """The same bytes, statistics, table and description."""
    assert columns_of(folder / "left") == columns_of(folder / "wanted")
    verify_published(folder / "left")
    assert (left.episode_table == wanted.episode_table).all()
    assert (TensorDict.load_memmap(folder / "left") == wanted[:]).all()
    theirs = {array.key: array for array in wanted.published.manifest.arrays}
    for array in left.published.manifest.arrays:
        other = theirs.pop(array.key)
        assert (array.shape, array.dtype, array.crc32) == (other.shape, other.dtype, other.crc32)
        ours, said = array.facts["statistics"], other.facts["statistics"]
        for name, value in said.items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-9, atol=1e-12)
    assert not theirs


@pytest.mark.parametrize("bad", [(0,), (3,), (6,), (1, 2), (0, 6), (0, 2, 4), (0, 1, 2, 3, 4, 5)])
def test_bad_episodes_are_removed_and_sources_are_read_once(tmp_path, passes, bad):
    """C10: at the cost of a scan, and of moving the rows that stay."""
    all_of_them = trials()
    for k in bad:
        all_of_them[k]["actions"][1, 0] = np.nan
    path = write(tmp_path / "all/a.h5", all_of_them)
    left = skipping(path, tmp_path / "left", on_invalid="skip")
    assert passes == [7]
    check_kept(tmp_path, left, all_of_them, *(set(range(7)) - set(bad)))
    skipped = left.published.manifest.report["skipped"]
    assert [entry["name"] for entry in skipped] == [f"Trial{k}" for k in bad]


def test_columns_excluded_only_by_a_bad_episode_are_restored(tmp_path, passes):
    """Without it the schema is another one: then all is written again."""
    all_of_them = trials()
    del all_of_them[3]["env_infos"]["wide"]
    all_of_them[3]["actions"][1, 0] = np.nan
    path = write(tmp_path / "all/a.h5", all_of_them)
    left = skipping(path, tmp_path / "left", on_invalid="skip")
    assert passes == [7, 6]
    check_kept(tmp_path, left, all_of_them, 0, 1, 2, 4, 5, 6)


@pytest.mark.parametrize("choice", ["keep", "drop", "error"])
def test_copies_of_episodes_are_kept_left_out_or_refused(tmp_path, passes, choice):
    """V36: the first of each is the one that stays."""
    all_of_them = trials()
    all_of_them |= {4: all_of_them[1], 5: all_of_them[0], 6: all_of_them[1]}
    path = write(tmp_path / "all/a.h5", all_of_them)
    if choice == "error":
        with pytest.raises(CorpusError, match=r"a\.h5: Trial4: .* of a\.h5: Trial1 \[V36\]"):
            skipping(path, tmp_path / "left", copies=choice)
        assert not (tmp_path / "left").exists()
        return
    left = skipping(path, tmp_path / "left", copies=choice)
    report = left.published.manifest.report
    assert passes == [7]
    if choice == "keep":
        assert [entry["episode"][1] for entry in report["duplicates"]] == [
            "Trial4", "Trial5", "Trial6",
        ]  # fmt: skip
        assert len(left.episode_table["start"]) == 7
        return
    check_kept(tmp_path, left, all_of_them, *range(4))
    assert [entry["name"] for entry in report["skipped"]] == ["Trial4", "Trial5", "Trial6"]


def test_copies_and_bad_episodes_at_once(tmp_path, passes):
    """A bad copy is bad, whatever it is a copy of."""
    all_of_them = trials()
    all_of_them[2]["actions"][1, 0] = np.nan
    all_of_them |= {4: all_of_them[2], 5: all_of_them[0]}
    path = write(tmp_path / "all/a.h5", all_of_them)
    left = skipping(path, tmp_path / "left", on_invalid="skip", copies="drop")
    assert passes == [7]
    check_kept(tmp_path, left, all_of_them, 0, 1, 3, 6)


def test_good_copies_of_a_bad_episode_are_copies_of_each_other(tmp_path):
    """Rewards do not count for being a copy, and may be what is wrong with one of three."""
    all_of_them = trials()
    all_of_them |= {7: all_of_them[0], 8: all_of_them[0]}
    rewards = all_of_them[0]["rewards"].copy()
    rewards[1] = np.nan
    all_of_them[0] = {**all_of_them[0], "rewards": rewards}
    path = write(tmp_path / "all/a.h5", all_of_them)
    with pytest.raises(CorpusError, match=r"Trial8: it has the observations .*Trial7 \[V36\]"):
        skipping(path, tmp_path / "error", on_invalid="skip", copies="error")
    left = skipping(path, tmp_path / "left", on_invalid="skip", copies="drop")
    check_kept(tmp_path, left, all_of_them, *range(1, 8))
