"""Files about the project: its citation, changelog, templates and workflows."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import replaykit
from tests.rooms import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
FORMS = [
    path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").iterdir()) if path.stem != "config"
]
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))

CITATION_KEYS = {
    "abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi",
    "identifiers", "keywords", "license", "license-url", "message", "preferred-citation",
    "references", "repository", "repository-artifact", "repository-code", "title", "type", "url",
    "version",
}  # fmt: skip
"""All keys of version 1.2.0 of the Citation File Format."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def loaded(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(path)["jobs"].values() for step in job["steps"]]


# -- the citation ---------------------------------------------------------------------------------


def test_citation_is_of_this_version() -> None:
    found = loaded(ROOT / "CITATION.cff")
    assert found["version"] == replaykit.__version__
    assert found["authors"] == [{"name": "The replaykit authors"}]
    assert found["license"] == "MIT"
    assert text_of("LICENSE").startswith("MIT License")


def test_citation_has_the_form_of_its_format() -> None:
    found = loaded(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(found) <= CITATION_KEYS
    assert found["cff-version"] == "1.2.0"
    assert found["type"] == "software"
    assert all(isinstance(each, str) for each in [found["title"], *found["keywords"]])
    assert len(set(found["keywords"])) == len(found["keywords"]) > 0


# -- the changelog --------------------------------------------------------------------------------

KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def sections() -> list[tuple[str, str, str]]:
    """Return name, date and text of each section."""
    parts = re.split(r"^## (.*)\n", text_of("CHANGELOG.md"), flags=re.MULTILINE)
    found = []
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        form = re.fullmatch(r"\[(Unreleased|\d+\.\d+\.\d+)\](?: - (\d{4}-\d\d-\d\d))?", heading)
        assert form is not None, heading
        found.append((form[1], form[2] or "", text))
    return found


def test_headings_of_the_changelog_are_versions_with_dates_newest_first() -> None:
    found = sections()
    assert text_of("CHANGELOG.md").startswith("# Changelog\n\n")
    released = [(name, date) for name, date, _ in found if name != "Unreleased"]
    assert [name for name, _, _ in found][len(found) - len(released) :] == [
        name for name, _ in released
    ]
    assert len(found) - len(released) <= 1
    assert all(not date for name, date, _ in found if name == "Unreleased")
    dates = [datetime.date.fromisoformat(date) for _, date in released]
    versions = [tuple(map(int, name.split("."))) for name, _ in released]
    assert dates == sorted(dates, reverse=True)
    assert versions == sorted(set(versions), reverse=True)
    assert released[0][0] == replaykit.__version__


def test_sections_of_the_changelog_list_kinds_of_changes_in_order() -> None:
    for name, _, text in sections():
        kinds = re.findall(r"^### (.*)$", text, re.MULTILINE)
        assert kinds, name
        assert kinds == [kind for kind in KINDS if kind in kinds]
        assert not re.search(r"^#{4,} ", text, re.MULTILINE)
        for part in re.split(r"^### .*\n", text, flags=re.MULTILINE)[1:]:
            assert re.fullmatch(r"\n(?:- \S.*\n(?:  \S.*\n)*)+\n?", part), (name, part[:80])


def test_date_of_the_citation_is_that_of_the_changelog() -> None:
    dates = {name: date for name, date, _ in sections()}
    assert str(loaded(ROOT / "CITATION.cff")["date-released"]) == dates[replaykit.__version__]


# -- templates of issues --------------------------------------------------------------------------


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_templates_of_issues_are_forms(path: Path) -> None:
    form = loaded(path)
    assert {"name", "description", "body"} <= set(form)
    assert set(form) <= {"name", "description", "title", "labels", "body"}
    asked = [each for each in form["body"] if each["type"] != "markdown"]
    ids = [each["id"] for each in asked]
    labels = [each["attributes"]["label"] for each in asked]
    assert len(set(ids)) == len(ids) >= 3
    assert len(set(labels)) == len(labels)
    assert all(re.fullmatch(r"[\w-]+", each) for each in ids)
    assert any(each.get("validations", {}).get("required") for each in asked)
    for each in form["body"]:
        assert set(each) <= {"type", "id", "attributes", "validations"}
        needed = {
            "markdown": "value",
            "textarea": "label",
            "input": "label",
            "checkboxes": "options",
        }
        assert each["attributes"].get(needed[each["type"]])
    for name in re.findall(r"`([\w./]+\.md)`", path.read_text("utf-8")):
        assert (ROOT / name).exists()


def test_there_are_templates_for_bugs_and_features() -> None:
    assert {path.name for path in FORMS} == {"bug_report.yml", "feature_request.yml"}
    assert loaded(ROOT / ".github/ISSUE_TEMPLATE/config.yml") == {"blank_issues_enabled": False}


def test_programs_of_the_bug_report_run(capsys: pytest.CaptureFixture[str]) -> None:
    form = loaded(ROOT / ".github/ISSUE_TEMPLATE/bug_report.yml")
    by_id = {each.get("id"): each["attributes"] for each in form["body"]}
    versions = re.search(r'python -c "(.*)"', by_id["versions"]["description"])
    assert versions is not None
    exec(versions[1], {})
    assert replaykit.__version__ in capsys.readouterr().out.split()
    exec(by_id["program"]["placeholder"], {})
    assert "observation" in capsys.readouterr().out


# -- workflows ------------------------------------------------------------------------------------


def test_there_are_workflows_for_tests_wheels_and_the_site() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "docs.yml", "wheels.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_have_triggers_limits_and_few_permissions(path: Path) -> None:
    found = loaded(path)
    assert found["name"] == path.stem
    triggers = found[True]  # YAML 1.1 reads the key `on` as true
    assert {"pull_request", "push"} <= set(triggers)
    assert found["permissions"] == {"contents": "read"}
    for job in found["jobs"].values():
        assert job["timeout-minutes"] <= 360
        assert "permissions" not in job
        assert job["runs-on"] in ("ubuntu-latest", "${{ matrix.system }}")
        assert job.get("needs") in (None, *found["jobs"])
        matrix = job.get("strategy", {}).get("matrix", {})
        used = set(re.findall(r"matrix\.(\w+)", str(job)))
        assert used == set(matrix)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_major_version(path: Path) -> None:
    used = [step["uses"] for step in steps_of(path) if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"actions/[\w-]+@v\d+", name)] == []
    assert all(("uses" in step) != ("run" in step) for step in steps_of(path))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_name_existing_targets_and_files(path: Path) -> None:
    commands = "\n".join(step["run"] for step in steps_of(path) if "run" in step)
    assert set(re.findall(r"^\s*make ([a-z-]+)", commands, re.MULTILINE)) <= TARGETS
    for name in re.findall(r"^\s*(\.?[\w-]+/[\w/.-]+)", commands, re.MULTILINE):
        assert (ROOT / name).exists()
    listed = loaded(path)[True]["pull_request"] or {}
    for name in listed.get("paths", ()):
        assert list(ROOT.glob(name)), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_name_no_secret_no_host_and_no_machine(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(r"secrets\.|://|index-url", text)
    assert not re.search(r"(?<![\w.})])/[a-z]+/", text)  # a path from the root of a machine


def test_checks_run_on_the_oldest_python_and_a_new_one() -> None:
    (job,) = loaded(ROOT / ".github/workflows/ci.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == ["3.10", "3.13"]
    assert 'requires-python = ">=3.10"' in text_of("pyproject.toml")
    assert job["steps"][-1]["run"] == ".ci/run"


def test_site_is_uploaded_from_the_folder_that_make_docs_writes() -> None:
    upload = steps_of(ROOT / ".github/workflows/docs.yml")[-1]
    assert upload["with"]["path"] == "docs/_build"
    assert " docs docs/_build" in text_of("Makefile")


def test_smoke_test_of_the_wheels_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = steps_of(ROOT / ".github/workflows/wheels.yml")[-1]["run"]
    program = re.search(r"cat > smoke\.py <<'PY'\n(.*)^PY$", script, re.DOTALL | re.MULTILINE)
    assert program is not None
    monkeypatch.chdir(tmp_path)
    exec(program[1], {})
    assert (tmp_path / "checkpoint").is_dir()


def test_wheels_are_built_for_each_python_without_a_stable_interface() -> None:
    settings = text_of("pyproject.toml")
    found = re.search(r"\[tool\.cibuildwheel\]\nbuild = \[(.*)\]", settings)
    assert found is not None
    versions = re.findall(r"cp3(\d+)-\*", found[1])
    assert versions == ["10", "11", "12"]
    assert f'wheel.py-api = "cp3{versions[-1]}"' in settings
    assert f'requires-python = ">=3.{versions[0]}"' in settings


# -- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_root_pages_exist(page: str) -> None:
    links = re.findall(r"\]\((?!https:)([^)]+)\)", text_of(page))
    assert links
    for link in links:
        name, _, anchor = link.partition("#")
        at = ROOT / (name or page)
        assert at.exists(), link
        target = "" if at.is_dir() else at.read_text(encoding="utf-8")
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target, re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
            assert anchor in anchors | set(re.findall(r'<a id="([\w-]+)">', target)), link


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_make_targets_tools_and_files_of_the_root_pages_exist(page: str) -> None:
    text = text_of(page)
    assert set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)(?=[` ])", code_of(text))) <= TARGETS
    for name in re.findall(r"python -m ((?:tests|benchmarks)[\w.]*)", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    for name in re.findall(r"\b((?:docs|tests|replaykit|benchmarks)/[\w./]+\.\w+)", code_of(text)):
        assert (ROOT / name).exists(), name


def code_of(text: str) -> str:
    return "\n".join(re.findall(r"```\n.*?```|`[^`\n]+`", text, re.DOTALL))


def test_supported_version_is_this_one() -> None:
    rows = re.findall(r"^\| ([\d.]+) \| yes \|$", text_of("SECURITY.md"), re.MULTILINE)
    assert rows == [replaykit.__version__.rpartition(".")[0]]
