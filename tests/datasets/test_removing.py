"""Episodes that are left out after all have been written: what stays is as if they had not been."""

from __future__ import annotations

import warnings
from collections.abc import Callable
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


Trials = dict[int, dict[str, Any]]


def spoiled(*bad: int) -> Callable[[Trials], None]:
    def change(trials: Trials) -> None:
        for k in bad:
            trials[k]["actions"][1, 0] = np.nan

    return change


def spoiled_and_incomplete(trials: Trials) -> None:
    del trials[3]["env_infos"]["wide"]
    spoiled(3)(trials)


def copied(trials: Trials) -> None:
    trials |= {4: trials[1], 5: trials[0], 6: trials[1]}


def spoiled_and_copied(trials: Trials) -> None:
    """A bad copy is bad, whatever it is a copy of."""
    spoiled(2)(trials)
    trials |= {4: trials[2], 5: trials[0]}


def copied_and_spoiled(trials: Trials) -> None:
    """Rewards do not count for being a copy, and may be what is wrong with one of three."""
    trials |= {7: trials[0], 8: trials[0]}
    rewards = trials[0]["rewards"].copy()
    rewards[1] = np.nan
    trials[0] = {**trials[0], "rewards": rewards}


SKIP, DROP = {"on_invalid": "skip"}, {"copies": "drop"}
ALL = frozenset(range(7))


@pytest.mark.parametrize(
    ("change", "policies", "kept", "written"),
    [
        *[
            (spoiled(*bad), SKIP, ALL - set(bad), [7])
            for bad in ((0,), (3,), (6,), (1, 2), (0, 6), (0, 2, 4), (0, 1, 2, 3, 4, 5))
        ],
        # Without the bad episode the schema is another one: then all is written again.
        (spoiled_and_incomplete, SKIP, ALL - {3}, [7, 6]),
        (copied, DROP, range(4), [7]),
        (spoiled_and_copied, SKIP | DROP, (0, 1, 3, 6), [7]),
        (copied_and_spoiled, SKIP | DROP, range(1, 8), [9]),
    ],
)
def test_episodes_are_removed_and_sources_are_read_once(
    tmp_path, passes, change, policies, kept, written
):
    """C10, V36: at the cost of a scan, and of moving the rows that stay."""
    all_of_them = trials()
    change(all_of_them)
    path = write(tmp_path / "all/a.h5", all_of_them)
    left = skipping(path, tmp_path / "left", **policies)
    assert passes == written
    skipped = left.published.manifest.report["skipped"]
    assert {entry["name"] for entry in skipped} == {
        f"Trial{k}" for k in all_of_them.keys() - set(kept)
    }
    check_kept(tmp_path, left, all_of_them, *sorted(kept))


def test_copies_are_kept_and_named_by_default_or_refused(tmp_path):
    all_of_them = trials()
    copied(all_of_them)
    path = write(tmp_path / "all/a.h5", all_of_them)
    with pytest.raises(CorpusError, match=r"a\.h5: Trial4: .* of a\.h5: Trial1 \[V36\]"):
        skipping(path, tmp_path / "left", copies="error")
    assert not (tmp_path / "left").exists()
    left = skipping(path, tmp_path / "left", copies="keep")
    duplicates = left.published.manifest.report["duplicates"]
    assert [entry["episode"][1] for entry in duplicates] == ["Trial4", "Trial5", "Trial6"]
    assert len(left.episode_table["start"]) == 7


def test_good_copies_of_a_bad_episode_are_copies_of_each_other(tmp_path):
    all_of_them = trials()
    copied_and_spoiled(all_of_them)
    path = write(tmp_path / "all/a.h5", all_of_them)
    with pytest.raises(CorpusError, match=r"Trial8: it has the observations .*Trial7 \[V36\]"):
        skipping(path, tmp_path / "error", on_invalid="skip", copies="error")
