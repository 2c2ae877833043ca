"""Plots of the benchmarks show the numbers of ``benchmarks/RESULTS.md``, and can be read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from PIL import ImageFont

from tests.rooms import ROOT, load_script
from tests.support.refusals import refuses

RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8")
SVG = "{http://www.w3.org/2000/svg}"


plots = load_script("benchmark_plots")
TABLES = plots.read_tables(RESULTS)
PLOTS = {name: svg for table in TABLES for name, svg in plots.table_plots(table).items()}
ALL = {**PLOTS, "speed": (ROOT / "docs" / "speed.svg").read_text("utf-8")}


# -- the numbers ----------------------------------------------------------------------------------


class Expected(NamedTuple):
    """A number of a table that a plot should show, and the text of its row."""

    row: str
    text: str


def blocks() -> list[list[list[str]]]:
    """Return the groups of rows of each table, read without the code under test."""
    tables = []
    for fence in re.findall(r"^```\n(work .*?)^```$", RESULTS, re.DOTALL | re.MULTILINE):
        body = fence.split("\nratio: ")[0].splitlines()[2:]
        groups: list[list[str]] = [[]]
        for row in body:
            if row.strip():
                groups[-1].append(row)
            else:
                groups.append([])
        tables.append([group for group in groups if group])
    return tables


def ratio_of(row: str) -> str | None:
    found = re.search(r" (\d+\.\d\d) +(?:\d+\.\d\d-\d|\d+\.\d\d (?:yes|NO|-)$)", row)
    return found[1] if found else None


def amount_of(row: str) -> tuple[str, str] | None:
    found = re.search(r" ([\d,]+\.\d{3}) (B/row|MB|ms|s|B|of 1)(?: |$)", row)
    return (found[1], found[2]) if found else None


def expected_bars(groups: list[list[str]]) -> tuple[list[Expected], dict[str, list[Expected]]]:
    """Return the ratios of a table, and its other amounts by unit, in the order of the rows."""
    ratios, amounts = list[Expected](), dict[str, list[Expected]]()
    for group in groups:
        has_ratio = any(ratio_of(row) for row in group)
        for row in group:
            text = " ".join(row.split())
            if found := ratio_of(row):
                ratios.append(Expected(text, found))
            elif (amount := amount_of(row)) and not (has_ratio and row == group[0]):
                amounts.setdefault(amount[1], []).append(Expected(text, amount[0]))
    return ratios, amounts


def bars(svg: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter() if each.get("class") == "bar"]


def test_every_table_of_the_results_is_read() -> None:
    assert len(TABLES) == len(blocks()) >= 8
    rows = [sum(len(group) for group in groups) for groups in blocks()]
    assert [len(table.lines) for table in TABLES] == rows


@pytest.mark.parametrize("number", range(len(TABLES)), ids=[table.slug for table in TABLES])
def test_bars_of_a_table_have_its_numbers_and_names(number: int) -> None:
    ratios, amounts = expected_bars(blocks()[number])
    found = list(plots.table_plots(TABLES[number]).values())
    assert len(found) == bool(ratios) + len(amounts) > 0
    for svg, expected in zip(
        found, [*([ratios] if ratios else []), *amounts.values()], strict=True
    ):
        drawn = bars(svg)
        assert [each.get("data-value") for each in drawn] == [each.text for each in expected]
        for bar, (row, _) in zip(drawn, expected, strict=True):
            assert row.removeprefix(f"{bar.get('data-work')} ").startswith(
                f"{bar.get('data-name')} "
            )


@pytest.mark.parametrize("name", PLOTS)
def test_bars_are_as_long_as_their_numbers_on_the_scale(name: str) -> None:
    root = ElementTree.fromstring(PLOTS[name])
    ticks = {
        float(str(each.get("data-value"))): float(str(each.get("x1")))
        for each in root.iter()
        if each.get("class") == "tick"
    }
    texts = ["".join(each.itertext()) for each in root.iter(f"{SVG}text")]
    shape: Callable[[float], float] = math.log if texts[-1].endswith("log scale") else float
    (a, at_a), (b, at_b) = min(ticks.items()), max(ticks.items())

    def x(value: float) -> float:
        return at_a + (shape(value) - shape(a)) / (shape(b) - shape(a)) * (at_b - at_a)

    for bar in bars(PLOTS[name]):
        value = float(str(bar.get("data-value")).replace(",", ""))
        left = float(str(bar.get("x")))
        right = left + float(str(bar.get("width")))
        begin = x(1.0) if name.endswith("-ratios") else float(plots.BEGIN)
        assert (left, right) == pytest.approx(tuple(sorted((begin, x(value)))), abs=0.1)
    for mark in root.iter(f"{SVG}line"):
        if mark.get("class") in ("one", "target"):
            at = x(float(str(mark.get("data-value"))))
            assert float(str(mark.get("x1"))) == pytest.approx(at, abs=0.1)
        if mark.get("class") == "spread":
            low, high = map(float, str(mark.get("data-value")).split("-"))
            ends = float(str(mark.get("x1"))), float(str(mark.get("x2")))
            assert ends == pytest.approx((x(low), x(high)), abs=0.1)


def test_plots_of_ratios_have_the_line_at_one() -> None:
    named = [name for name in PLOTS if name.endswith("-ratios")]
    assert len(named) >= 6
    for name in named:
        groups = {bar.get("data-work") for bar in bars(PLOTS[name])}
        assert PLOTS[name].count('class="one"') == len(groups)


def test_missed_targets_are_marked() -> None:
    rows = [row for table in blocks() for group in table for row in group]
    missed = sum(row.endswith(" NO") or " NO " in row for row in rows)
    assert sum(svg.count(", missed</text>") for svg in PLOTS.values()) == missed > 0


def test_plot_of_the_readme_is_that_of_the_results() -> None:
    assert ALL["speed"] == plots.readme_plot(TABLES), "run python docs/benchmark_plots.py --readme"


def test_plot_of_the_readme_compares_times_of_the_results() -> None:
    rows = [" ".join(row.split()) for table in blocks() for group in table for row in group]
    by_work: dict[str, dict[str, tuple[float, float]]] = {}
    for bar in bars(ALL["speed"]):
        work, name, value = (str(bar.get(f"data-{key}")) for key in ("work", "name", "value"))
        assert any(row.endswith(f"{name} {value}") or f"{name} {value} " in row for row in rows)
        by_work.setdefault(work, {})[name] = (float(value), float(str(bar.get("width"))))
    assert 5 <= len(by_work) <= 6
    assert {"TorchRL", "cpprb", "replaykit"} <= {name for each in by_work.values() for name in each}
    for found in by_work.values():
        assert len(found) > 1
        time, width = max(found.values())
        for each, length in found.values():
            assert length == pytest.approx(width * each / time, abs=0.1)


# -- legibility -----------------------------------------------------------------------------------


def font(bold: bool) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which is wider than the other sans-serif fonts that browsers choose."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, 100)


class Box(NamedTuple):
    name: str
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def boxes(svg: str) -> Iterator[Box]:
    """Yield the places of all texts and bars."""
    fonts = {bold: font(bold) for bold in (False, True)}
    for each in ElementTree.fromstring(svg).iter():
        if each.tag == f"{SVG}text":
            text = "".join(each.itertext())
            wide = fonts[each.get("font-weight") == "600"].getlength(text) * plots.SIZE / 100
            x, y = float(str(each.get("x"))), float(str(each.get("y")))
            left = (
                x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[str(each.get("text-anchor"))]
            )
            yield Box(text, left, y - 7, left + wide, y + 7)
        elif each.get("class") == "bar":
            x, y, width = (float(str(each.get(key))) for key in ("x", "y", "width"))
            yield Box(f"bar {each.get('data-name')}", x, y, x + width, y + plots.BAR)


@pytest.mark.parametrize("name", ALL)
def test_texts_neither_overlap_nor_leave_the_picture(name: str) -> None:
    found = list(boxes(ALL[name]))
    width, height = map(float, str(ElementTree.fromstring(ALL[name]).get("viewBox")).split()[2:])
    assert [
        box.name
        for box in found
        if box.left < 0 or box.top < 0 or box.right > width or box.bottom > height
    ] == []
    assert [(a.name, b.name) for a, b in combinations(found, 2) if a.meets(b)] == []


@pytest.mark.parametrize("text", ["replaykit", "1,000,000 rows", "MWmw@%µ", "il.,:' ()", "Größe"])
@pytest.mark.parametrize("bold", [False, True])
def test_texts_are_narrower_than_their_estimate(text: str, bold: bool) -> None:
    wide = font(bold).getlength(text) * plots.SIZE / 100
    assert wide <= plots.text_width(text, bold=bold) < 2 * wide


@pytest.mark.parametrize("name", ALL)
def test_plots_have_a_title_and_a_description_with_every_bar(name: str) -> None:
    root = ElementTree.fromstring(ALL[name])
    assert root.get("role") == "img"
    ids = {each.get("id"): each for each in root.iter() if each.get("id")}
    title, description = (ids[each] for each in str(root.get("aria-labelledby")).split())
    assert (title.tag, description.tag) == (f"{SVG}title", f"{SVG}desc")
    assert title.text
    shown = str(description.text)
    for bar in bars(ALL[name]):
        if name != "speed":
            assert f"{bar.get('data-name')}: {bar.get('data-value')}" in shown


def test_plot_of_the_readme_has_colours_for_light_and_dark() -> None:
    style = ElementTree.fromstring(ALL["speed"]).find(f"{SVG}style")
    assert style is not None
    assert style.text is not None
    light, dark = style.text.split("@media (prefers-color-scheme:dark)")
    named = set(re.findall(r"var\((--\w+)\)", ALL["speed"]))
    assert named == {"--page", "--ink", "--faint", "--fast", "--slow"}
    for colours in (light, dark):
        values = dict(re.findall(r"(--\w+):(#\w{6})", colours))
        assert named <= set(values)
        assert contrast(values["--ink"], values["--page"]) >= 7
        assert contrast(values["--faint"], values["--page"]) >= 4.5
        assert contrast(values["--fast"], values["--page"]) >= 3


def contrast(a: str, b: str) -> float:
    """Return the ratio of contrast of two colours, as WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((light(a), light(b)))
    return (high + 0.05) / (low + 0.05)


# -- the page -------------------------------------------------------------------------------------


def test_page_has_every_plot_number_command_and_machine(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "old-ratios.svg").write_text("<svg/>", "utf-8")
    plots.write(folder)
    page = (folder / "index.md").read_text("utf-8")
    included = re.findall(r"^:file: (\S+)\.svg$", page, re.MULTILINE)
    assert included == list(PLOTS)
    assert {path.stem for path in folder.glob("*.svg")} == set(PLOTS)
    for name in PLOTS:
        assert (folder / f"{name}.svg").read_text("utf-8") == PLOTS[name]
    assert page.count("<summary>The table</summary>") == len(TABLES)
    assert page.count("- Command: `python -m benchmarks") == len(TABLES)
    assert len(re.findall(r"^- Machine: Two processors of an [AI]", page, re.M)) == len(TABLES)
    cells = set(re.split(r"\s*\|\s*", page))
    for table in blocks():
        for row in (row for group in table for row in group):
            numbers = re.findall(r"(?<= )\d+\.\d{2}(?= |$)|\d+\.\d\d-\d+\.\d\d", row)
            assert set(numbers) <= cells


def test_page_is_not_written_again_without_changes(tmp_path: Path) -> None:
    plots.write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    plots.write(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_commands_of_the_tables_name_works() -> None:
    from benchmarks.works import WORKS

    named = [work for table in TABLES for work in table.works.split()]
    assert len(named) >= 7
    assert set(named) <= set(WORKS)


def test_tables_without_a_title_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(plots.ABOUT, "costs")
    refuses(RuntimeError, "edit ABOUT", plots.write, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("118.5     184.1   0.31", "118.5     184.1   0,31", "expected a row as"),
        ("`python -m benchmarks overlap`: a loop", "A loop", "section 'Learning"),
        ("others took 1 % of them. The step", "quiet. The step", "section 'Learning"),
    ],
)
def test_results_of_another_form_are_refused(old: str, new: str, error: str) -> None:
    assert RESULTS.count(old) == 1
    refuses(ValueError, error, plots.read_tables, RESULTS.replace(old, new))


def test_readme_refuses_works_that_were_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plots.README_WORKS, "extend 9", "write of 9 rows")
    refuses(ValueError, "'extend 9'", plots.readme_plot, TABLES)


def test_machines_are_those_that_the_results_name() -> None:
    by_works = {table.works: (table.machine, table.busy) for table in TABLES}
    assert by_works[""] == by_works["sequences"]
    assert by_works[""][0].startswith("two processors of an AMD EPYC")
    assert by_works["costs"] == (by_works["checkpoints sharing"][0], "less than 1")
    assert by_works["growing"] == ("two processors of an Intel Xeon", "22")
