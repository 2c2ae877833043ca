"""Two versions of replaykit in two processes: which one each imports, and what is compared."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import against
from benchmarks.against import Lacking, Side, compare_works
from benchmarks.builds import ROOT, BuildError, resolve
from benchmarks.contender import Mismatch
from benchmarks.setting import Setting
from benchmarks.works import WORKS
from tests.support.refusals import refuses


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return Setting(rows=1000, images=100, rounds=2, threads=1, scratch=scratch)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def package(folder: Path, source: str) -> Path:
    """Write a package of that name and source."""
    (folder / "replaykit").mkdir(parents=True)
    (folder / "replaykit" / "__init__.py").write_text(source, encoding="utf-8")
    return folder


@pytest.fixture
def sides(setting: Setting, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """This tree, and a package of the source that the test gives."""
    other = package(tmp_path / "other", request.param)
    found = Side("replaykit", setting), Side("at abc", setting, other)
    yield found
    for side in found:
        side.close()


def test_the_redirect_finds_replaykit_in_its_folder_only(tmp_path: Path) -> None:
    file = ROOT / "benchmarks" / "redirect" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("redirect", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    redirect = module.Redirect(str(package(tmp_path, "")))
    found = redirect.find_spec("replaykit")
    assert found.origin == str(tmp_path / "replaykit" / "__init__.py")
    assert redirect.find_spec("json") is None
    with pytest.raises(ModuleNotFoundError, match=r"replaykit\.native"):
        redirect.find_spec("replaykit.native", found.submodule_search_locations)


@pytest.mark.parametrize("sides", ["__version__ = '0.0.7'"], indirect=True)
def test_a_work_that_the_other_commit_lacks_is_left_out(sides: tuple[Side, Side]) -> None:
    this, other = sides
    assert other.check_package().startswith("replaykit 0.0.7")
    assert not this.check_package().startswith("replaykit 0.0.7")
    [line] = compare_works(sides, ["transitions"], 2)
    assert (line.work, line.name, line.is_met) == ("transitions", "at abc", None)
    assert line.missing is not None
    assert "cannot import name 'LazyTensorStorage'" in line.missing
    refuses(Mismatch, "KeyError", this.ask, "make", work="transitions", title="no such title")


@pytest.mark.parametrize("sides", ["import os; os._exit(3)"], indirect=True)
def test_a_process_that_ends_is_named_and_started_again(sides: tuple[Side, Side]) -> None:
    for _ in range(2):
        refuses(Lacking, "at abc: its process ended with 3", sides[1].check_package)


def test_every_contender_is_a_title_of_its_work(setting: Setting) -> None:
    for name in ("transitions", "trees", "writes", "images", "memmap_cold", "sequences", "costs"):
        work = WORKS[name]
        titles = set(work.subjects(setting))
        assert titles
        assert titles <= set(work.asked(setting))


def test_counts_are_compared_by_ratio_and_difference(setting: Setting) -> None:
    sides = Side("replaykit", setting), Side("at abc", setting)
    _, line = against._figures("add", "calls", sides, {"replaykit": [66], "at abc": [60]})
    assert (line.ratio, line.more, line.is_met) == (1.1, 6, False)
    _, line = against._figures("add", "calls", sides, {"replaykit": [63], "at abc": [60]})
    assert (line.more, line.is_met) == (3, True)
    _, line = against._figures("add", "calls", sides, {"replaykit": [2], "at abc": [0]})
    assert (line.ratio, line.more, line.is_met) == (None, 2, None)
    [line] = against._figures("add", "calls", sides, {"replaykit": [2], "at abc": []})
    assert line.missing == "only one side has this figure"


def test_paired_turns_give_median_times() -> None:
    times = against._paired([[1.0, 2.0, 90.0], [4.0, 4.0, 4.0], [3.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    assert times.rounds == [3.0, 4.0]
    assert len(times.calls) == 12


def test_absent_revision_is_named() -> None:
    refuses(BuildError, "got 'no-such-revision'", resolve, "no-such-revision")


@pytest.mark.programs
@pytest.mark.timeout(900)
def test_this_tree_is_compared_with_its_last_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        commit = resolve("HEAD")
    except BuildError as error:
        pytest.skip(f"no repository: {error}")
    file = tmp_path / "figures.json"
    works = ("calls", "transitions", "memory", "memmap_warm", "costs")
    sizes = ("--rows", "1000", "--images", "100", "--rounds", "3", "--threads", "1")
    places = ("--scratch", str(tmp_path), "--json", str(file))
    assert command.main([*works, *sizes, *places, "--against", "HEAD"]) == 0
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["against"] == {"revision": "HEAD", "commit": commit}
    assert record["left_out"] == {}
    label = f"at {commit[:9]}"
    lines = {(line["work"], line["name"]): line for line in record["lines"]}
    timed = lines["uniform sample, 1,000 rows", label]
    assert timed["low"] <= timed["ratio"] <= timed["high"]
    assert timed["at_most"] == against.AT_MOST
    counted = lines["add: Python calls", label]
    this = lines["add: Python calls", "replaykit"]
    assert counted["more"] == this["value"] - counted["value"]
    assert lines["memory of records", label]["ratio"] > 0
    assert f"{label}: replaykit " in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
