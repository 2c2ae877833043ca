"""The registry of public names, and everything that follows from it."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import replaykit
from replaykit import registry
from replaykit.buffer.source import draws_single_rows
from replaykit.datasets import BaseDatasetExperienceReplay, Layout
from replaykit.distributed.shard_config import LAWS, law_of
from replaykit.samplers import PrioritizedSampler, RandomSampler, Sampler
from tests.generated import ROOT, TABLES, generated, with_tables

PACKAGE = Path(replaykit.__file__).parent
GENERATED = dict(generated())


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_files_are_up_to_date(path: Path) -> None:
    """To bring them up to date: ``python -m tests.generated``."""
    assert path.read_text("utf-8") == GENERATED[path]


def test_every_table_stands_in_one_page() -> None:
    pages = "".join(GENERATED.values())
    found = re.findall(r"^<!-- table: (.*) -->$", pages, re.MULTILINE)
    assert sorted(found) == sorted(TABLES)


def test_tables_gain_new_rows_and_lose_old_ones() -> None:
    page = with_tables(
        "<!-- table: laws -->\n| sampler | mass |\n|---|---|\n"
        "| `SliceSampler` | kept text |\n| `OldSampler` | gone |\n<!-- end -->"
    )
    assert page.count("\n| `") == len(LAWS)
    assert "| `SliceSampler` | kept text |" in page
    assert "OldSampler" not in page


# -- entries --------------------------------------------------------------------------------------


def test_names_are_listed_once() -> None:
    names = [entry.name for entry in registry.ENTRIES]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("entry", registry.ENTRIES, ids=lambda entry: entry.name)
def test_every_entry_names_a_value_of_its_module(entry: registry.Entry) -> None:
    value = registry.load(entry)
    if isinstance(value, type):
        assert value.__module__.startswith(f"replaykit.{entry.module}".rpartition(".")[0])
    for package in registry.ROOMS:
        if entry.name in registry.exports(package):
            assert getattr(importlib.import_module(package), entry.name) is value


@pytest.mark.parametrize("package", registry.ROOMS)
def test_rooms_export_the_names_of_the_registry(package: str) -> None:
    room = importlib.import_module(package)
    assert room.__all__ == dir(room) == sorted(registry.exports(package))
    assert room.__all__
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Zoo'"):
        room.Zoo  # noqa: B018


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def test_no_corpus_family_is_left_out() -> None:
    for path in (PACKAGE / "datasets" / "families").glob("*.py"):
        module = importlib.import_module(f"replaykit.datasets.families.{path.stem}")
        for name, value in list(vars(module).items()):
            if isinstance(value, Layout):
                assert registry.exports("replaykit.datasets.families")[name].kind == "layout"
    families = {registry.load(entry) for entry in registry.of_kind("family")}
    named = {
        each
        for each in _subclasses(BaseDatasetExperienceReplay)
        if "corpus" in vars(each) and each.__module__.startswith("replaykit.")
    }
    assert families == named


# -- classes of users -----------------------------------------------------------------------------


class RandomSampler2(RandomSampler):
    """A sampler of a user; its name is changed below."""


RandomSampler2.__name__ = RandomSampler2.__qualname__ = "RandomSampler"
RandomSampler2.__module__ = "replaykit.samplers.uniform"


def test_an_entry_is_found_for_exactly_its_class() -> None:
    entry = registry.entry_of(RandomSampler)
    assert entry is not None
    assert entry.single_rows
    assert registry.entry_of(RandomSampler2) is None
    assert registry.entry_of(Sampler) == registry.exports("replaykit")["Sampler"]
    assert registry.entry_of(type("Other", (PrioritizedSampler,), {})) is None


def test_a_subclass_of_a_user_is_no_sampler_of_the_package() -> None:
    assert draws_single_rows(RandomSampler(), None)
    assert not draws_single_rows(RandomSampler2(), None)
    with pytest.raises(
        ValueError,
        match="expected a RandomSampler, SliceSampler, PrioritizedSampler or "
        "PrioritizedSliceSampler for shards, whose draws are independent, got a RandomSampler",
    ):
        law_of(RandomSampler2())


def test_every_law_belongs_to_a_sampler() -> None:
    named = [entry.law for entry in registry.ENTRIES if entry.law is not None]
    assert sorted(named) == sorted(LAWS)
    assert {entry.kind for entry in registry.ENTRIES if entry.law or entry.single_rows} == {
        "sampler"
    }


# -- places ---------------------------------------------------------------------------------------


def _mentions(path: Path) -> Iterator[str]:
    """Yield identifiers and whole strings of a module; docstrings are sentences."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        found: Any = None
        if isinstance(node, ast.Name):
            found = node.id
        elif isinstance(node, ast.Attribute):
            found = node.attr
        elif isinstance(node, ast.alias):
            found = node.name
        elif isinstance(node, ast.Constant):
            found = node.value
        if isinstance(found, str):
            yield found


FREE = [
    *(
        "SliceSamplerWithoutReplacement",
        "PrioritizedSliceSampler",
        "StalenessAwareSampler",
        "LaneWriter",
    ),
    *("TensorDictMaxValueWriter", "LazyStackStorage", "ImageScale", "RewardMap", "Cast"),
    *(entry.name for entry in registry.of_kind("family")),
]
"""Names that no other code of the package needs, as those of new parts will be."""


def test_a_part_stands_in_its_own_file_and_the_registry() -> None:
    own = {
        entry.name: PACKAGE / f"{entry.module.replace('.', '/')}.py" for entry in registry.ENTRIES
    }
    places: dict[str, set[Path]] = {name: set() for name in FREE}
    for path in PACKAGE.rglob("*.py"):
        for name in places.keys() & set(_mentions(path)):
            places[name].add(path)
    for name, found in places.items():
        assert found - {own[name]} == {PACKAGE / "registry.py"}, name


# -- moved names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("old", registry.MOVED)
def test_old_name_works_and_warns_of_the_new_name(old: str) -> None:
    package, _, name = old.rpartition(".")
    new = registry.MOVED[old]
    expected = re.escape(f"{old} is deprecated and works for one more release; use {new}")
    namespace: dict[str, Any] = {}
    with pytest.warns(DeprecationWarning, match=expected) as caught:
        exec(f"from {package} import {name}", namespace)
    assert {each.filename for each in caught} == {"<string>"}
    assert namespace[name] is getattr(replaykit, new.removeprefix("replaykit."))
    assert name not in importlib.import_module(package).__all__


def test_the_changelog_lists_moved_names() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert [old for old in registry.MOVED if f"`{old}`" not in text] == []


@pytest.mark.parametrize(
    ("made", "old", "new"),
    [
        (replaykit.RandomSampler, "tells", "info_keys"),
        (replaykit.Transition, "tells", "info_keys"),
        (lambda: replaykit.LazyTensorStorage(3), "kept_beside", "overflow_rows"),
        (lambda: replaykit.ListStorage(3), "look", "poll"),
    ],
)
def test_renamed_attribute_works_and_warns_of_the_new_name(made: Any, old: str, new: str) -> None:
    part = made()
    name = type(part).__name__
    expected = f"{name}.{old} is deprecated and works for one more release; use {name}.{new}"
    with pytest.warns(DeprecationWarning, match=re.escape(expected)) as caught:
        found = getattr(part, old)
    assert caught[0].filename == __file__
    assert found == getattr(part, new)
    assert f"{old}`" in (ROOT / "CHANGELOG.md").read_text("utf-8")
