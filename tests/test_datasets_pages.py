"""The pages of the data sets cover all families, and their statistics come from real files."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h5py
import numpy as np
import numpy.typing as npt
import pytest

import replaykit.datasets
from replaykit import registry
from tests.rooms import ROOT, load_script
from tests.support.refusals import refuses

SHARED = ROOT.parent / "shared" / "data"


pages = load_script("datasets_pages")
STATISTICS: dict[str, list[dict[str, Any]]] = json.loads(pages.STATISTICS.read_text("utf-8"))
FILES = [(family, entry) for family, files in STATISTICS.items() for entry in files]
families = pages.families
FAMILIES = sorted(families())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "datasets"
    pages.write(folder)
    return folder


# -- pages ----------------------------------------------------------------------------------------


def test_every_family_of_the_registry_has_facts_and_a_page(written: Path) -> None:
    assert {path.stem for path in written.glob("*.md")} == {*families(), "index"}
    assert set(pages.FACTS) == set(families())
    index = (written / "index.md").read_text("utf-8")
    assert [name for name in families() if f"({name}.md)" not in index] == []


def test_every_layout_of_the_registry_belongs_to_one_family() -> None:
    listed = [name for names in pages.LAYOUTS.values() for name in names]
    assert sorted(listed) == sorted(entry.name for entry in registry.of_kind("layout"))


def test_a_family_without_facts_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(pages.FACTS, "aloha")
    refuses(RuntimeError, r"\['aloha'\] have none", pages.write, tmp_path / "datasets")
    assert not (tmp_path / "datasets").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_stated_with_their_source_or_as_unknown(family: str) -> None:
    facts = pages.FACTS[family]
    for fact in (facts.contents, facts.size, facts.licence, facts.citation):
        is_open = fact.text.startswith((pages.UNKNOWN, "that of your files"))
        assert fact.source or is_open, fact
    assert facts.homepage.startswith("https://")
    assert facts.arrays_source or family in STATISTICS


@pytest.mark.parametrize("family", FAMILIES)
def test_licences_agree_with_the_classes(family: str) -> None:
    known = families()[family].license
    text = pages.FACTS[family].licence.text.lower().replace(" ", "-")
    assert known is None or text.startswith(known)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_page_has_all_its_sections(family: str, written: Path) -> None:
    page = (written / f"{family}.md").read_text("utf-8")
    titles = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert titles == [
        "Load", "Alignment", "Columns and statistics", "Size, licence, citation", "Known ids",
    ]  # fmt: skip
    assert [name for name in families()[family].available_datasets if f"`{name}`" not in page] == []
    is_measured = family in STATISTICS
    assert ("No file of this family was measured" in page) != is_measured


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_a_page_names_the_records_of_a_row(family: str, written: Path) -> None:
    page = (written / f"{family}.md").read_text("utf-8")
    for layout in pages._layouts(family).values():
        assert f"alignment `{layout.alignment.name}`" in page
        for entry in layout.fields:
            for target in entry.targets(layout.alignment, entry.sources[0]):
                record = f"record *t + {target.offset}*" if target.offset else "record *t*"
                assert re.search(rf"\| `{'/'.join(target.key)}\S* \| {re.escape(record)}", page)


@pytest.mark.parametrize("family", FAMILIES)
def test_snippets_compile_and_use_names_that_exist(family: str) -> None:
    tree = ast.parse(pages.snippet(family))
    imported = [each for each in tree.body if isinstance(each, ast.ImportFrom)]
    names = [name.name for each in imported for name in each.names]
    assert names == [families()[family].__name__]
    assert all(hasattr(replaykit.datasets, name) for name in names)
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    ids = [
        call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)
    ]
    hosted = families()[family].available_datasets
    assert [name for name in ids if name != "my/data" and name not in hosted] == []
    assert len(ids) == 1 + bool(hosted)


def test_writing_again_changes_no_file(written: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in written.iterdir()}
    pages.write(written)
    assert {path: path.stat().st_mtime_ns for path in written.iterdir()} == before


# -- plots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "entry"), FILES, ids=[entry["file"] for _, entry in FILES])
def test_a_plot_is_reproducible_and_in_the_colours_of_the_page(
    family: str, entry: dict[str, Any]
) -> None:
    svg = pages.plot(entry, family)
    assert svg == pages.plot(entry, family)
    root = ElementTree.fromstring(svg)
    ids = [value for each in root.iter() if (value := each.get("id")) is not None]
    assert all(name.startswith(f"{family}-") for name in ids)
    assert len(ids) == len(set(ids))
    assert "<metadata>" not in svg
    assert "#ffffff" not in svg
    drawn = set(re.findall(r": (#[0-9a-f]{6})\b", svg))
    assert drawn == set()
    assert "currentColor" in svg


def test_many_episodes_become_a_histogram() -> None:
    entry = {"file": "a.h5", "lengths": [1, 2, 3] * 40, "returns": None, "actions": None}
    svg = pages.plot(entry, "many")
    assert ">episodes<" in svg
    assert svg.count("currentColor") > 0
    few = pages.plot({**entry, "lengths": [1, 2, 3]}, "few")
    assert ">episodes<" not in few


# -- statistics -----------------------------------------------------------------------------------


def test_every_measured_file_states_its_origin() -> None:
    assert sorted(pages.ORIGINS) == sorted(entry["file"] for _, entry in FILES)


@pytest.mark.parametrize(("family", "entry"), FILES, ids=[entry["file"] for _, entry in FILES])
def test_counts_of_a_measured_file_agree(family: str, entry: dict[str, Any], written: Path) -> None:
    assert sum(entry["lengths"]) == entry["rows"]
    assert sum(entry["ends"].values()) == len(entry["lengths"])
    assert entry["layout"] in pages._layout_names()[family]
    page = (written / f"{family}.md").read_text("utf-8")
    assert f"`{entry['file']}`, {entry['bytes']:,} bytes" in page
    assert f"{entry['rows']:,} row" in page


def _shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"sample file {path} not present")
    entry = next(entry for _, entry in FILES if entry["file"] == name)
    if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        pytest.skip(f"sample file {path} has another sha256")
    return path


def _assert_column(entry: dict[str, Any], key: str, values: npt.NDArray[Any]) -> None:
    column = next(each for each in entry["columns"] if each["key"] == key)
    assert (column["dtype"], column["shape"]) == (values.dtype.name, list(values.shape[1:]))
    wide = values.astype(np.float64)
    found = [column[name] for name in ("min", "mean", "max", "std")]
    expected = [wide.min(), wide.mean(), wide.max(), wide.std()]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)


def test_statistics_of_d4rl_are_those_of_the_file() -> None:
    name = "d4rl/hopper_medium-v2.hdf5"
    entry = next(entry for entry in STATISTICS["d4rl"] if entry["file"] == name)
    with h5py.File(_shared(name)) as file:
        arrays = {key: file[key][...] for key in file if isinstance(file[key], h5py.Dataset)}
    ends = np.flatnonzero(arrays["terminals"] | arrays["timeouts"]) + 1
    starts = np.concatenate([[0], ends[:-1]])
    rewards = arrays["rewards"].astype(np.float64)
    assert entry["bytes"] == (SHARED / name).stat().st_size
    assert entry["lengths"] == (ends - starts).tolist()
    returns = [rewards[first:stop].sum() for first, stop in zip(starts, ends, strict=True)]
    np.testing.assert_allclose(entry["returns"], returns, rtol=1e-5)
    assert entry["ends"] == {"terminated": int(arrays["terminals"].sum())}
    _assert_column(entry, "observation", arrays["observations"])
    _assert_column(entry, "next/observation", arrays["next_observations"])
    _assert_column(entry, "action", arrays["actions"])
    _assert_column(entry, "next/reward", arrays["rewards"][:, None])
    quantiles = np.quantile(
        arrays["actions"].astype(np.float64), (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1), axis=0
    )
    np.testing.assert_allclose(entry["actions"], quantiles.T, rtol=1e-5, atol=1e-8)


def test_statistics_of_roboset_are_those_of_the_file() -> None:
    [entry] = STATISTICS["roboset"]
    with h5py.File(_shared(entry["file"])) as file:
        trials = [file[f"Trial{number}"] for number in range(10)]
        states = [trial["observations"][...] for trial in trials]
        actions = np.concatenate([trial["actions"][:-1] for trial in trials])
        rewards = [trial["rewards"][1:] for trial in trials]
    assert entry["lengths"] == [len(each) - 1 for each in states]
    np.testing.assert_allclose(entry["returns"], [each.sum() for each in rewards], rtol=1e-5)
    _assert_column(entry, "observation", np.concatenate([each[:-1] for each in states]))
    _assert_column(entry, "next/observation", np.concatenate([each[1:] for each in states]))
    _assert_column(entry, "action", actions)
    _assert_column(entry, "next/reward", np.concatenate(rewards)[:, None])


def test_measuring_reads_the_files_below_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    actions = np.linspace(-1, 1, 10)[:, None]
    with h5py.File(tmp_path / "mine" / "steps.hdf5", "w") as file:
        file["observations"], file["actions"] = np.arange(30.0).reshape(10, 3), actions
        file["rewards"], file["terminals"] = np.ones(10), np.isin(np.arange(10), (3, 9))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.zeros(3)
    [entry] = pages.measure(tmp_path)["d4rl"]
    assert entry["file"] == "mine/steps.hdf5"
    assert (entry["rows"], entry["lengths"], entry["returns"]) == (10, [4, 6], [4.0, 6.0])
    assert entry["ends"] == {"terminated": 2}
    assert (entry["actions"][0][0], entry["actions"][0][-1]) == (-1.0, 1.0)
    _assert_column(entry, "observation", np.arange(30.0).reshape(10, 3))
    assert "left out: other.h5: no layout fits" in capsys.readouterr().err


def test_a_folder_without_h5_files_is_an_error(tmp_path: Path) -> None:
    refuses(FileNotFoundError, "expected H5 files below it, found none", pages.measure, tmp_path)


@pytest.mark.filterwarnings("default::UserWarning")  # columns that a conversion leaves out
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("roboset", "robohive/fk1_random_policy_trace.h5"),
        ("d4rl", "d4rl/hopper_medium-v2.hdf5"),
        ("minari", "minari_generated/cartpole/random-v0/data/main_data.hdf5"),
        ("robomimic", "robomimic/robomimic_ph_lift_low_dim.hdf5"),
        ("maniskill", "maniskill/rlboilerplate_trajectory.h5"),
    ],
)
def test_snippet_reads_a_real_file(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part of the snippet that reads local files runs as it stands on the page."""
    path = _shared(name)
    snippet = pages.snippet(family)
    own = next(line for line in snippet.splitlines() if line.startswith("own = "))
    source = tmp_path / own.partition('source="')[2].partition('"')[0]
    source.symlink_to(path)
    for extra in path.parent.glob("*.json"):  # descriptions that belong next to the file
        stem = source.stem if extra.stem == path.stem else extra.stem
        (tmp_path / f"{stem}.json").symlink_to(extra)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    names: dict[str, Any] = {}
    exec(compile(snippet.splitlines()[0] + "\n" + own, f"page of {family}", "exec"), names)
    assert len(names["own"].sample()) == 256
