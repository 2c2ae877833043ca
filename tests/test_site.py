"""The documentation site builds without warnings, is complete, and fits every screen."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from replaykit import registry
from tests.browser import CHROMIUM, NO_CHROMIUM, Browser
from tests.rooms import ROOT, pages

pytestmark = [pytest.mark.programs, pytest.mark.timeout(900)]


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.sources: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value:
                self.anchors.add(value)
            if value and (name == "src" or (name == "href" and tag == "link")):
                self.sources.append(value)
            elif value and name == "href":
                self.links.append(value)


def _build(folder: Path) -> None:
    """Build the site from a copy of the pages, so that tests write nothing into ``docs``."""
    names = ["docs", "benchmarks/RESULTS.md", "README.md", "CHANGELOG.md", "CITATION.cff"]
    for name in [*names, "CONTRIBUTING.md", "SECURITY.md", "examples"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = ["cp", "-r", str(ROOT / name), str(folder / name)]
        subprocess.run(copy, check=True)
    for generated in ("_build", "reference", "figures", "datasets", "benchmarks"):
        subprocess.run(["rm", "-rf", str(folder / "docs" / generated)], check=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*command, str(folder / "docs"), str(folder / "html")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def site(built_once: Any) -> Path:
    return built_once("site", _build) / "html"


@pytest.fixture(scope="module")
def found(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_built(site: Path) -> None:
    docs = ROOT / "docs"
    missing = [
        page
        for page in pages()
        if not (site / page.relative_to(docs)).with_suffix(".html").exists()
    ]
    assert missing == []


def test_every_page_can_be_reached_from_the_first_page(site: Path, found: dict[Path, Page]) -> None:
    reached, waiting = set[Path](), [site / "index.html"]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        for link in found[path].links:
            target = (path.parent / unquote(urlsplit(link).path)).resolve()
            if not urlsplit(link).scheme and target in found:
                waiting.append(target)
    by_tools = {site / name for name in ("genindex.html", "search.html", "_modules/index.html")}
    assert sorted(set(found) - reached - by_tools) == []


def test_every_link_inside_the_site_leads_to_a_page_and_an_anchor(found: dict[Path, Page]) -> None:
    broken = []
    for path, page in found.items():
        if "_modules" in path.parts:
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = found[target].anchors if target in found else set()
            if not target.exists() or (
                parts.fragment and target in found and unquote(parts.fragment) not in anchors
            ):
                broken.append((path.name, link))
    assert broken == []


def test_pages_load_nothing_from_other_sites(found: dict[Path, Page]) -> None:
    assert {source for page in found.values() for source in page.sources if "//" in source} == set()


def test_links_to_other_sites_are_encrypted(found: dict[Path, Page]) -> None:
    plain = {
        link
        for page in found.values()
        for link in page.links
        if urlsplit(link).scheme not in ("", "https", "data", "mailto")
    }
    assert plain == set()


@pytest.mark.parametrize("entry", registry.ENTRIES, ids=lambda entry: entry.name)
def test_every_public_name_is_in_the_reference(
    entry: registry.Entry, found: dict[Path, Page]
) -> None:
    anchors = set[str]()
    for path, page in found.items():
        if path.parent.name == "reference":
            anchors |= page.anchors
    assert any(re.fullmatch(rf"replaykit\..*\b{entry.name}", anchor) for anchor in anchors)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(NO_CHROMIUM)
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_narrow_and_wide_windows_by_day_and_by_night(
    browser: Browser, site: Path, width: int, dark: bool
) -> None:
    wide = {}
    for path in sorted(site.rglob("*.html")):
        if "_modules" in path.parts:
            continue
        browser.open(path, width=width, dark=dark)
        if (most := browser.value("document.documentElement.scrollWidth")) > width:
            wide[path.name] = most
        shade = browser.value(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        )
        assert shade < 80 if dark else shade > 200
    assert wide == {}
