"""README, docs and CHANGELOG say what is so."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import replaykit
from replaykit.testing import RoboHiveWriter, make_trial
from tests.rooms import SITE_FOLDERS, core_files, modules, pages
from tests.support import LoopbackHub

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *(str(page.relative_to(ROOT)) for page in pages()),
]
CORPUS = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"


def text_of(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)


def _marks(page: str, block: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a block. Those of guides and those that start processes are programs."""
    whole = page.startswith(("docs/guides/", "docs/coming_from/"))
    starts = "__main__" in block or "RayReplayBuffer(" in block
    return (pytest.mark.programs,) if whole or starts else ()


EXAMPLES = [
    pytest.param(page, number, marks=_marks(page, block))
    for page in PAGES
    for number, block in enumerate(blocks(page))
]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The RoboSet repository with one file, and a home and a working directory of its own."""
    import huggingface_hub
    import huggingface_hub.constants

    # Read from the environment when the client was imported, which another test may have done.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    recorded = tmp_path / "recorded.h5"
    with RoboHiveWriter(recorded) as writer:
        for seed in range(3):
            writer.add_trial(**make_trial(30, seed=seed))
    files = {f"{CORPUS}/seed0/trace.h5": recorded}
    with LoopbackHub({"jdvakil/RoboSet_Sim": files}) as hub:
        for name, value in hub.env(tmp_path / "hf").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.chdir(tmp_path)
        yield
        huggingface_hub.close_session()


@pytest.mark.pitfall("RD12")
@pytest.mark.filterwarnings("default::UserWarning")  # what a conversion has to say
@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_an_example_runs(
    page: str, number: int, corpus: None, request: pytest.FixtureRequest
) -> None:
    if "RayReplayBuffer(" in blocks(page)[number]:
        request.getfixturevalue("ray_cluster")
    if "__main__" in blocks(page)[number]:  # processes that it starts import it
        Path("example.py").write_text(blocks(page)[number], "utf-8")
        subprocess.run([sys.executable, "example.py"], check=True, timeout=300)
        return
    code = compile(blocks(page)[number], f"{page}, example {number}", "exec")
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    names: dict[str, object] = {}
    torch.set_num_threads(1)  # small networks are slow with several, if other tests run too
    try:
        exec(code, names)
    finally:
        torch.set_num_threads(threads)
    for name, value in names.items():
        if name in ("rb", "data"):
            assert len(value) > 0  # type: ignore[arg-type]
    torch.set_rng_state(state)


def test_the_readme_has_examples() -> None:
    assert len(blocks("README.md")) >= 2


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_of_pages_point_to_existing_files(page: str) -> None:
    folder = (ROOT / page).parent
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!https?:)([^)#]+)", prose)
    written_later = [(ROOT / "docs" / name).resolve() for name in SITE_FOLDERS]
    assert [
        link
        for link in links
        if not (folder / link).exists()
        and not any((folder / link).resolve().is_relative_to(each) for each in written_later)
    ] == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_and_files_that_pages_name_exist(page: str) -> None:
    made = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text_of(page))) <= made
    named = re.findall(
        r"`((?:docs|benchmarks|examples|csrc|tests|replaykit)/[\w./-]+)`", text_of(page)
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", ["docs/buffer.md", "CHANGELOG.md"])
def test_names_of_classes_exist(page: str) -> None:
    import replaykit.adapters
    import replaykit.datasets

    known = {*dir(replaykit), *dir(replaykit.datasets), *dir(replaykit.adapters)}
    named = re.findall(
        r"`(\w+(?:Storage|Sampler|Writer|ReplayBuffer|ExperienceReplay))\b", text_of(page)
    )
    assert named
    assert [name for name in named if name not in known] == []


def test_the_page_of_the_command_names_every_policy() -> None:
    from replaykit.datasets import Policies

    names = ["cast" if each.name == "casts" else each.name for each in fields(Policies)]
    page = text_of("docs/command.md")
    assert [name for name in names if f"`--{name.replace('_', '-')}" not in page] == []


def test_the_page_of_the_installation_lists_every_extra_of_users() -> None:
    extras = text_of("pyproject.toml").split("[project.optional-dependencies]")[1].split("\n[")[0]
    page = text_of("docs/start/install.md")
    given = set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE)) - {"test", "docs", "bench"}
    assert given == {name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
                     for name in re.findall(r"`(\w+)`", row)}  # fmt: skip


def test_the_changelog_begins_with_this_version() -> None:
    """Changes that no version has yet may come first."""
    found = re.findall(r"^## \[(\S+)\]", text_of("CHANGELOG.md"), re.MULTILINE)
    assert found[found[0] == "Unreleased"] == replaykit.__version__


def test_rooms_of_the_design_are_those_on_disk() -> None:
    tree = text_of("docs/design.md")
    listed = set(re.findall(r"^      (\w+)(?:\.py|/)\s", tree, re.MULTILINE))
    package = ROOT / "replaykit"
    there = {
        path.stem
        for path in package.iterdir()
        if (path.suffix == ".py" and path.stem not in ("__init__", "_version"))
        or (path / "__init__.py").exists()
    }
    assert listed == there


def test_table_of_decisions_names_definitions_in_its_files() -> None:
    table = re.findall(
        r"^\| the [^|]+\|([^|]+)\|([^|]+)\|$", text_of("docs/design.md"), re.MULTILINE
    )
    assert len(table) >= 15
    for files, names in table:
        defined = set[str]()
        for file in re.findall(r"`([^`]+)`", files):
            for node in ast.parse(text_of(f"replaykit/{file}")).body:
                if isinstance(node, ast.AnnAssign):
                    defined.add(ast.unparse(node.target))
                elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                    inner = node.body if isinstance(node, ast.ClassDef) else []
                    methods = [each.name for each in inner if isinstance(each, ast.FunctionDef)]
                    defined |= {node.name, *(f"{node.name}.{method}" for method in methods)}
        assert set(re.findall(r"`([^`]+)`", names)) <= defined


ROOM_PAGES = [page for page in PAGES if page.startswith("docs/rooms/")]
CODE = [*core_files(), *(path for paths in modules().values() for path in paths)]
BY_PATTERN = ("_version", "__", "bindings", "tree")
FILES = [p.name for d in ("csrc", "docs", "replaykit", "tests") for p in (ROOT / d).rglob("*.*")]
FILES += [path.name for path in ROOT.glob("*/*")] + [path.name for path in ROOT.glob("*.*")]
OF_OTHERS = ("CHANGELOG", "docs/coming_from/", "docs/torchrl.md")
"""Pages that also name what is gone, or belongs to other libraries."""


@functools.cache
def known_names() -> set[str]:
    """The words and file names of the code, and names of other libraries that pages mention."""
    code = "".join(path.read_text("utf-8") for path in [*CODE, *ROOT.glob("tests/*.py")])
    others = {"DistributedSampler", "MultiStepTransform", "max_restarts", "max_task_retries"}
    stems = {Path(name).stem for name in FILES}
    return others.union(FILES, stems, re.findall(r"\w+", code), re.findall(r"\w+\.\w+", code))


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(OF_OTHERS)])
def test_pages_name_files_and_code_that_exist(page: str) -> None:
    prose, *rest = re.split(r"^```.*?$", text_of(page), flags=re.MULTILINE)
    shown = set(re.findall(r"[\w.]+|\w+", "".join(rest[::2])))
    named = set(re.findall(r"`(?:[\w.]+/)*([\w.]+)(?:\(\))?`", prose + "".join(rest[1::2])))
    files = {name for name in named if re.search(r"\.(py|h|cpp|md|json|txt)$", name)}
    words = {word for name in named - files for word in re.findall(r"[a-zA-Z_]\w+", name)}
    assert (files | words) - shown - known_names() == set()


def test_pages_of_rooms_list_every_file() -> None:
    text = "".join(map(text_of, ["docs/design.md", *ROOM_PAGES]))
    names = {path.name for path in CODE if not path.name.startswith(BY_PATTERN)}
    assert {name for name in names if name not in text} == set()


def test_every_guarantee_names_an_existing_test() -> None:
    named, file = 0, ""
    for found in re.findall(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`", text_of("docs/guarantees.md")):
        file, function = found[0] or file, found[1]
        if not (found[0] or function):
            continue
        text = (ROOT / file).read_text("utf-8")
        assert not function or f"\ndef {function}(" in text, (file, function)
        named += 1
    rows = [row for row in text_of("docs/guarantees.md").splitlines() if row.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| fault ")]
    assert len(rows) > 5
    assert named >= len(rows)
    assert all("`tests/" in row for row in rows)
