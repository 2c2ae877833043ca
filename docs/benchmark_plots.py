"""Draw the figures of ``benchmarks/RESULTS.md``: a page of the site, and the plot of the README.

``make docs`` calls ``write``. ``python docs/benchmark_plots.py --readme`` writes
``docs/speed.svg``.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final

__all__ = ["Line", "Table", "read_tables", "readme_plot", "table_plots", "write"]

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "RESULTS.md"
README_PLOT: Final = ROOT / "docs" / "speed.svg"

SUBJECT: Final = "replaykit"

ABOUT: Final = {
    "": (
        "Samples, writes, trees and memory",
        "A row has 10 leaves and 170 bytes, and a batch has 256 rows. `index_select` gathers each "
        "leaf of plain columns by one call of torch. `copy per leaf` writes each leaf by one "
        "call. The binary tree is a tree of float64 in C++. Image rows have two "
        "images of 3 x 64 x 64 bytes. Cold files are not in the page cache.",
    ),
    "sequences": (
        "Sequences",
        "Episodes have 200 rows of 218 bytes. Slices, n-step returns, stacked frames and "
        "relabelled goals are compared with a uniform sample of the same rows, and slices also "
        "with TorchRL's `SliceSampler`.",
    ),
    "checkpoints sharing": (
        "Checkpoints and shared buffers",
        "A prioritized buffer of 2 GB is saved, changed in 1 % of its rows, saved again, and "
        "loaded. `one file` writes or reads the same number of bytes as a single file. Shared "
        "buffers are compared with buffers of one process.",
    ),
    "opening": (
        "Checkpoints that are opened in place",
        "`loads(path, mmap=True)` opens a checkpoint that is not in the page cache. The time of "
        "the first batch includes the tables that grow with the rows.",
    ),
    "costs": (
        "The cost of sharing and of recovery",
        "Each buffer is compared with the same buffer without sharing or recovery.",
    ),
    "overlap": (
        "Learning while batches are made",
        "A loop samples with `prefetch=2` and computes a step that takes as long. Without any "
        "cost, the loop would take as long as the longer of the two.",
    ),
    "growing": (
        "Samples over Ray",
        "A buffer in a Ray actor returns 256 rows from a million. Its handle is compared with "
        "that of TorchRL's buffer in an actor.",
    ),
    "corpora": (
        "Conversion of corpora",
        "`convert` reads H5 files, checks them, and writes a data set. Plain h5py only reads the "
        "same arrays. `bytes as one file` only writes the columns. TorchRL reads the same RoboSet "
        "file.",
    ),
}
"""Title and introduction of each table, by the works in its command."""

README_WORKS: Final = {
    "uniform sample, 1,000,000 rows": "uniform sample: 256 of 1,000,000 rows",
    "prioritized sample + update, 1,000,000": "prioritized sample and update: 256 rows",
    "16 slices of 16, 1,000,000 rows": "sample of sequences: 16 slices of 16 rows",
    "images, 20,000 x 2 x 3x64x64": "sample of images: 256 rows of 24 KiB",
    "add 1": "write of one row",
    "extend 8": "write of 8 rows",
}
"""Titles of the works that the plot of the README shows. They were all measured on one machine."""

README_CONTENDERS: Final = {
    "replaykit": "replaykit",
    "cpprb": "cpprb",
    "TorchRL": "TorchRL",
    "index_select": "plain torch",
    "copy per leaf": "plain torch",
}
"""Names of the contenders in the plot of the README, in the order of its bars."""


# -- the file of results --------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One row of a table. Its cells are the texts of the table; an empty text is an empty cell.

    Attributes:
        value: median microseconds, or an amount in ``unit``.
        ratio: replaykit's time over the contender's; ``low`` and ``high`` bound 90 % of the rounds.
        asked: the largest ratio, or amount, that meets the target.
        missing: the note in place of figures, if the contender was left out.
    """

    work: str
    name: str
    value: str = ""
    unit: str = ""
    p99: str = ""
    ratio: str = ""
    low: str = ""
    high: str = ""
    asked: str = ""
    met: str = ""
    limit: str = ""
    missing: str = ""

    @property
    def amount(self) -> float:
        """The value as a number."""
        return float(self.value.replace(",", ""))


@dataclass(frozen=True)
class Table:
    """One table of the file: its rows, the command that made it, and the machine.

    Attributes:
        works: the names in the command, joined by spaces; empty for all works.
        busy: the share of the processors that other programs used, such as ``less than 1``.
        details: the description of the machine, if the section of the table has one.
    """

    section: str
    command: str
    machine: str
    busy: str
    details: str
    lines: tuple[Line, ...]

    @property
    def works(self) -> str:
        words = self.command.removeprefix("python -m benchmarks").split(" --")[0]
        return words.strip()

    @property
    def slug(self) -> str:
        return self.works.replace(" ", "-") or "all"

    def groups(self) -> Iterator[tuple[str, list[Line]]]:
        """Yield each work with its lines, in the order of the table."""
        for work in dict.fromkeys(line.work for line in self.lines):
            yield work, [line for line in self.lines if line.work == work]


_FENCE = re.compile(r"^```\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
_ROW = re.compile(
    r"(?P<left>.*?\S)\s+"
    r"(?:(?P<value>\d+\.\d)|(?P<number>\d[\d,]*(?:\.\d{3})?) (?P<unit>[A-Za-z][\w/]*(?: 1)?))"
    r"(?:\s+(?P<p99>\d+\.\d))?"
    r"(?:\s+(?P<ratio>\d+\.\d\d))?"
    r"(?:\s+(?P<low>\d+\.\d\d)-(?P<high>\d+\.\d\d))?"
    r"(?:\s+(?P<asked>\d+\.\d\d) (?P<met>yes|NO|-))?"
    r"(?:\s+(?P<limit>\d+\.\d% .+))?"
)
_MISSING = re.compile(r"(?P<left>.*?\S)\s+\((?P<missing>left out, see below)\)")
_WORK_WIDTH, _VALUE_END = 38, 75
"""Width of the first column of a table, and the column in which values end."""


def read_tables(text: str) -> list[Table]:
    """Return all tables of the file of results.

    Raises:
        ValueError: a row has another form, or a table has no command or no machine.
    """
    tables: list[Table] = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, body = section.split("\n", 1)
        fences = list(_FENCE.finditer(body))
        details = next((each[1] for each in fences if each[1].startswith("processor ")), "")
        before = 0
        for number, fence in enumerate(fences):
            if _is_table(fence[1]):
                after = fences[number + 1].start() if number + 1 < len(fences) else len(body)
                command, context = _command(body, before, fence.start())
                context += " " + body[fence.end() : after].strip().split("\n\n")[0]
                busy = _busy(context + fence[1])
                machine = _machine(context, details, tables)
                if not (command and machine and busy):
                    raise ValueError(
                        f"{RESULTS.name}, section {title!r}: expected the command, the machine and "
                        f"the load of each table, got {command!r}, {machine!r}, {busy!r}; state "
                        "them in the paragraph before the table"
                    )
                lines = tuple(_lines(fence[1]))
                tables.append(Table(title, command, machine, busy, details, lines))
            before = fence.end()
    return tables


def _is_table(text: str) -> bool:
    return bool(re.match(r"work +contender ", text))


def _command(body: str, begin: int, end: int) -> tuple[str, str]:
    """Return the command of a table, and the paragraph that names it."""
    pattern = re.compile(r"^`(python -m benchmarks[^`]*)`(?: and `(\w+)`)?.*?(?=\n\n)", re.M | re.S)
    found = list(pattern.finditer(body, begin, end)) or list(pattern.finditer(body, 0, end))[:1]
    if not found:
        return "", ""
    last = found[-1]
    return " ".join(filter(None, last.groups())), last[0]


def _machine(context: str, details: str, earlier: Sequence[Table]) -> str:
    """Return the machine that a paragraph names; without a name it is that of the table before."""
    words = " ".join(context.split())
    named = re.search(r"two processors of an \w+ \w+(?P<model> \(family \d+, model \d+)?", words)
    if named:
        return named[0] + (")" if named["model"] else "")
    described = re.match(r"processor (.+), processors (\d+), memory_gib (\d+),", details)
    if described:
        count = "two processors" if described[2] == "2" else f"{described[2]} processors"
        return f"{count} of an {described[1]}, {described[3]} GiB of memory"
    return earlier[-1].machine if earlier and "same machine" in words else ""


def _busy(text: str) -> str:
    found = re.search(r"other(?:s| processes) took ((?:less than )?\d+) ?%", " ".join(text.split()))
    return found[1] if found else ""


def _lines(text: str) -> Iterator[Line]:
    work = ""
    for row in text.splitlines()[2:]:
        if row.startswith("ratio: "):
            return
        if not row.strip():
            continue
        found = _ROW.fullmatch(row) or _MISSING.fullmatch(row)
        if found is None:
            raise ValueError(
                f"{RESULTS.name}: expected a row as benchmarks/report.py prints it, got {row!r}"
            )
        cells = {name: text or "" for name, text in found.groupdict().items()}
        left, number = cells.pop("left"), cells.pop("number", "")
        if number:
            cells["value"] = number
        if row[0] != " ":
            width = _WORK_WIDTH
            if row[width] != " " or row[width - 1] != " ":  # the work may be wider than its column
                end = found.end("unit") if number else found.end("value")
                width = max(width, width + end - _VALUE_END)
            work, left = left[:width].rstrip(), left[width:]
        yield Line(work, left.strip(), **cells)


# -- drawing --------------------------------------------------------------------------------------

SIZE: Final = 13  # of the text, in pixels
WIDTH: Final = 480
LABELS: Final = 132  # right end of the names of contenders
BEGIN, END = LABELS + 10, 374  # of the bars
BAR: Final = 11
EDGE: Final = 8

_NARROW, _WIDE = set("ijl.,:;'|!()[] "), set("mwMW%@µ")


def text_width(text: str, *, bold: bool = False) -> float:
    """Return more pixels than any common sans-serif font needs for a text of the plots."""
    ems = sum(0.42 if each in _NARROW else 1.0 if each in _WIDE else 0.66 for each in text)
    return ems * SIZE * (1.1 if bold else 1.0)


@dataclass(frozen=True)
class Colours:
    """Colours as they stand in the attributes of an SVG."""

    ink: str
    faint: str
    grid: str
    fast: str
    slow: str


PAGE: Final = Colours(
    ink="currentColor",
    faint="var(--color-foreground-muted)",
    grid="var(--color-background-border)",
    fast="var(--color-brand-primary)",
    slow="#e07a3f",
)
"""Colours of the page that includes the SVG, in its light and its dark theme."""

STANDALONE: Final = Colours(
    ink="var(--ink)", faint="var(--faint)", grid="var(--grid)", fast="var(--fast)",
    slow="var(--slow)",
)  # fmt: skip
"""Colours of ``_STYLE``."""

_STYLE: Final = (
    "svg{--page:#ffffff;--ink:#1f2328;--faint:#59636e;--grid:#d1d9e0;--fast:#0a66c2;--slow:#a8b3be;"
    "font-family:-apple-system,BlinkMacSystemFont,'Segoe UI',Helvetica,Arial,sans-serif}"
    "@media (prefers-color-scheme:dark){svg{--page:#0d1117;--ink:#f0f6fc;--faint:#9198a1;"
    "--grid:#3d444d;--fast:#4c9df3;--slow:#565f69}}"
)
"""Style of a file that is shown alone: it paints its own page, light or dark."""


class Canvas:
    """An SVG that grows downwards while rows are added."""

    def __init__(self, name: str, title: str, colours: Colours) -> None:
        self.name, self.title, self.colours = name, title, colours
        self.y = float(EDGE)
        self.facts: list[str] = []
        self.spans: list[tuple[float, float]] = []  # of the rows below each heading
        self._parts: list[str] = []
        self._behind: list[str] = []

    def text(
        self, x: float, y: float, text: str, *, fill: str = "", anchor: str = "start",
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Draw one line of text, centred on a height."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{fill or self.colours.ink}" text-anchor="{anchor}" '
            f'dominant-baseline="central"{weight}>{escape(text)}</text>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, *, stroke: str, width: float = 1,
        dashed: bool = False, kind: str = "", value: str = "", behind: bool = False,
    ) -> None:  # fmt: skip
        """Draw a straight line, or one behind all bars; ``kind`` and ``value`` name its meaning."""
        dash = ' stroke-dasharray="3 2"' if dashed else ""
        mark = f' class="{kind}" data-value="{escape(value)}"' if kind else ""
        (self._behind if behind else self._parts).append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" '
            f'stroke-width="{width:g}"{dash}{mark}/>'
        )

    def bar(self, x1: float, x2: float, y: float, line: Line, value: str, *, fill: str) -> None:
        """Draw the bar of a row of a table between two positions, centred on a height."""
        left, right = sorted((x1, x2))
        self._parts.append(
            f'<rect class="bar" x="{left:.2f}" y="{y - BAR / 2:g}" width="{right - left:.2f}" '
            f'height="{BAR}" fill="{fill}" data-work="{escape(line.work)}" '
            f'data-name="{escape(line.name)}" data-value="{escape(value)}"/>'
        )

    def svg(self, *, style: str = "") -> str:
        """Return the text of the file."""
        height = math.ceil(self.y + EDGE)
        ids = f"{self.name}-title", f"{self.name}-desc"
        if style:
            shape = f'width="{WIDTH * 6 // 5}" height="{height * 6 // 5}"'
            page = f'<style>{style}</style><rect width="100%" height="100%" fill="var(--page)"/>'
        else:
            shape = 'style="display:block;width:100%;min-width:330px;max-width:540px"'
            page = ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {shape} '
            f'role="img" aria-labelledby="{ids[0]} {ids[1]}" font-size="{SIZE}">'
            f'<title id="{ids[0]}">{escape(self.title)}</title>'
            f'<desc id="{ids[1]}">{escape(" ".join(self.facts))}</desc>'
            f"{page}{''.join(self._behind)}{''.join(self._parts)}</svg>\n"
        )


@dataclass(frozen=True)
class Scale:
    """A scale of numbers on the width of the bars: logarithmic, or linear from zero."""

    low: float
    high: float
    is_log: bool

    def x(self, value: float) -> float:
        """Return the position of a number."""
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = value / self.high
        return BEGIN + share * (END - BEGIN)

    def ticks(self) -> list[float]:
        """Return the numbers at the grid lines: as many as leave room for their labels."""
        for steps in ((1, 2, 5), (1, 3), (1,)):
            decades = range(math.floor(math.log10(self.high)) - 9, 9)
            found = [step * 10.0**power for power in decades for step in steps]
            if not self.is_log:
                size = next(each for each in found if self.high / each <= 5)
                return [size * number for number in range(int(self.high / size) + 1)]
            found = [each for each in found if self.low <= each <= self.high]
            gaps = [self.x(b) - self.x(a) for a, b in pairwise(found)]
            wide = max(text_width(f"{each:g}") for each in found)
            if min(gaps, default=wide + 1) > wide:
                return found
        return found


def _ratio_scale(lines: Sequence[Line]) -> Scale:
    found = [1.0]
    for line in lines:
        found += [float(each) for each in (line.ratio, line.low, line.high, line.asked) if each]
    return Scale(min(found) / 1.12, max(found) * 1.12, True)


def _amount_scale(lines: Sequence[Line]) -> Scale:
    found = [line.amount for line in lines]
    high = max([*found, *(float(line.asked) for line in lines if line.asked)])
    if max(found) > 30 * min(found):
        return Scale(10.0 ** math.floor(math.log10(min(found))), high * 1.12, True)
    return Scale(0.0, high * 1.05, False)


def time_text(microseconds: float) -> str:
    """Return a time with three digits, in the unit that suits it.

    >>> [time_text(each) for each in (0.1, 38.6, 246.4, 3477.7, 1136484.0)]
    ['0.1 µs', '38.6 µs', '246 µs', '3.48 ms', '1.14 s']
    """
    unit, size = next(
        (each for each in (("µs", 1.0), ("ms", 1e3)) if microseconds < 999.5 * each[1]), ("s", 1e6)
    )
    value = microseconds / size
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 1
    return f"{value:.{min(digits, 1 if unit == 'µs' else 2)}f} {unit}"


def _wrapped(text: str, width: float) -> list[str]:
    """Return a text in lines that fit a width."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _heading(canvas: Canvas, title: str, aside: str) -> None:
    """Draw the name of a work, and on the right or below it the times without a bar."""
    canvas.y += 8
    canvas.text(EDGE, canvas.y + 9, title, bold=True)
    room = WIDTH - 2 * EDGE - text_width(title, bold=True) - 8
    if text_width(aside) > room:
        canvas.y += 18
        canvas.text(EDGE, canvas.y + 9, aside, fill=canvas.colours.faint)
    elif aside:
        canvas.text(WIDTH - EDGE, canvas.y + 9, aside, fill=canvas.colours.faint, anchor="end")
    canvas.y += 20
    canvas.spans.append((canvas.y, canvas.y))


def _names(canvas: Canvas, name: str) -> float:
    """Draw the name of a contender, and return the height of its bar's middle."""
    lines = _wrapped(name, LABELS - EDGE)
    middle = canvas.y + 9 * len(lines)
    for number, text in enumerate(lines):
        canvas.text(LABELS, canvas.y + 9 + 17 * number, text, anchor="end")
    canvas.y += 2 + 17 * len(lines)
    canvas.spans[-1] = (canvas.spans[-1][0], canvas.y)
    return middle


def _axis(canvas: Canvas, scale: Scale, title: str) -> None:
    """Draw the axis below the rows, and its grid behind the bars, but not behind headings."""
    colours = canvas.colours
    canvas.y += 4
    for tick in scale.ticks():
        x = scale.x(tick)
        for begin, end in canvas.spans:
            canvas.line(x, begin, x, end, stroke=colours.grid, kind="tick", value=f"{tick:.6g}",
                        behind=True)  # fmt: skip
        canvas.text(x, canvas.y + 9, f"{tick:,.6g}", fill=colours.faint, anchor="middle")
    canvas.y += 19
    canvas.text(WIDTH - EDGE, canvas.y + 9, title, fill=colours.faint, anchor="end")
    canvas.y += 18


def _row(canvas: Canvas, scale: Scale, line: Line, value: str, start: float) -> None:
    """Draw one bar with its name, its number, its spread and its target."""
    colours = canvas.colours
    y = _names(canvas, line.name)
    missed = line.met == "NO"
    slow = float(value.replace(",", "")) > 1 if line.ratio else missed
    at = scale.x(float(value.replace(",", "")))
    canvas.bar(start, at, y, line, value, fill=colours.slow if slow else colours.fast)
    if line.low:
        low, high = scale.x(float(line.low)), scale.x(float(line.high))
        canvas.line(low, y, high, y, stroke=colours.ink, width=1.4, kind="spread",
                    value=f"{line.low}-{line.high}")  # fmt: skip
    if line.asked:
        x = scale.x(float(line.asked))
        canvas.line(x, y - 9, x, y + 9, stroke=colours.ink, width=1.6, dashed=True, kind="target",
                    value=line.asked)  # fmt: skip
    unit = f" {line.unit}" if line.unit and not line.ratio else ""
    label = f"{value}{unit}{', missed' if missed else ''}"
    canvas.text(END + 8, y, label, fill=colours.slow if missed else colours.ink)
    asked = f" (target {line.asked}{', missed' if missed else ''})" if line.asked else ""
    canvas.facts.append(f"{line.work}, {line.name}: {value}{unit}{asked}.")


def table_plots(table: Table) -> dict[str, str]:
    """Return the plots of a table as SVG: one of its ratios, and one for each unit of amounts.

    Every row with a ratio, and every other row with a unit, has one bar. The subject of a ratio
    stands in the heading of its work, with its time.
    """
    title = ABOUT[table.works][0]
    plots = {}
    if any(line.ratio for line in table.lines):
        plots[f"{table.slug}-ratios"] = _ratios(table, f"{title}: ratios")
    units = dict.fromkeys(line.unit for line in _with_amounts(table))
    for unit in units:
        slug = re.sub(r"\W+", "-", unit).strip("-").lower()
        name = f"{table.slug}-{slug}"
        plots[name] = _amounts(table, unit, name, f"{title}: amounts in {_unit_name(unit)}")
    return plots


def _unit_name(unit: str) -> str:
    names = {"of 1": "parts of the whole", "B": "bytes", "B/row": "bytes a row", "s": "seconds",
             "ms": "milliseconds"}  # fmt: skip
    return names.get(unit, unit)


def _with_amounts(table: Table) -> list[Line]:
    """Return the lines whose amounts are plotted: those with a unit that no ratio compares."""
    compared = {line.work for line in table.lines if line.ratio}
    return [
        line
        for line in table.lines
        if line.unit and not line.ratio and not (line.work in compared and line.name == SUBJECT)
    ]


def _ratios(table: Table, title: str) -> str:
    canvas = Canvas(f"{table.slug}-ratios", title, PAGE)
    compared = [line for line in table.lines if line.ratio]
    scale = _ratio_scale(compared)
    one = scale.x(1.0)
    canvas.text(one - 8, canvas.y + 9, "← replaykit faster", fill=PAGE.faint, anchor="end")
    canvas.text(one + 8, canvas.y + 9, "slower →", fill=PAGE.faint)
    canvas.y += 18
    for work, lines in table.groups():
        if not any(line.ratio for line in lines):
            continue
        plain = [line for line in lines if not line.ratio and line.value]
        shown = [line for line in plain if not line.unit or line.name == SUBJECT]
        _heading(canvas, work, ", ".join(f"{line.name} {_amount_text(line)}" for line in shown))
        for line in lines:
            if line.ratio:
                _row(canvas, scale, line, line.ratio, one)
            elif line.missing:
                y = _names(canvas, line.name)
                canvas.text(BEGIN, y, "not measured", fill=PAGE.faint)
                canvas.facts.append(f"{work}, {line.name}: not measured.")
    _axis(canvas, scale, "replaykit / contender, log scale")
    for begin, end in canvas.spans:
        canvas.line(one, begin, one, end, stroke=PAGE.ink, kind="one", value="1")
    return canvas.svg()


def _amount_text(line: Line) -> str:
    return f"{line.value} {line.unit}" if line.unit else time_text(line.amount)


def _amounts(table: Table, unit: str, name: str, title: str) -> str:
    canvas = Canvas(name, title, PAGE)
    lines = [line for line in _with_amounts(table) if line.unit == unit]
    scale = _amount_scale(lines)
    work = None
    for line in lines:
        if line.work != work:
            _heading(canvas, line.work, "")
        work = line.work
        _row(canvas, scale, line, line.value, BEGIN)
    kind = "log scale" if scale.is_log else "linear scale"
    _axis(canvas, scale, f"{_unit_name(unit)}, {kind}")
    return canvas.svg()


def readme_plot(tables: Sequence[Table]) -> str:
    """Return the plot of the README as a file that is legible in light and in dark surroundings.

    The bars of each work have their own linear scale, because times of different works differ by
    a factor of a hundred.

    Raises:
        ValueError: a work of the plot is in no table, or the works are not from one machine.
    """
    canvas = Canvas("speed", "Time of one call: replaykit and other libraries", STANDALONE)
    canvas.text(EDGE, canvas.y + 9, canvas.title, bold=True)
    canvas.y += 18
    note = "Median times; shorter is better. Each work has its own linear scale."
    canvas.text(EDGE, canvas.y + 9, note, fill=STANDALONE.faint)
    canvas.y += 18
    for work, title in README_WORKS.items():
        found = [
            line
            for table in tables
            for line in table.lines
            if line.work == work and line.name in README_CONTENDERS and line.value
        ]
        if not found:
            raise ValueError(f"expected the work {work!r} in {RESULTS.name}, it has none")
        scale = Scale(0.0, max(line.amount for line in found), False)
        _heading(canvas, title, "")
        order = list(README_CONTENDERS)
        for line in sorted(found, key=lambda each: order.index(each.name)):
            own = line.name == SUBJECT
            y = _names(canvas, README_CONTENDERS[line.name])
            fill = STANDALONE.fast if own else STANDALONE.slow
            canvas.bar(BEGIN, scale.x(line.amount), y, line, line.value, fill=fill)
            canvas.text(END + 8, y, time_text(line.amount), bold=own)
            shown = f"{README_CONTENDERS[line.name]} {time_text(line.amount)}"
            canvas.facts.append(f"{title}: {shown}.")
    machines = list(dict.fromkeys(table.machine for table in tables if _is_shown(table)))
    if len(machines) != 1:
        raise ValueError(f"expected the works of the README from one machine, got {machines}")
    canvas.y += 8
    machine = machines[0].split(" (")[0]
    for note in ("Plain torch reads or writes each column by one call.", f"On {machine}."):
        canvas.text(EDGE, canvas.y + 9, note, fill=STANDALONE.faint)
        canvas.y += 18
    return canvas.svg(style=_STYLE)


def _is_shown(table: Table) -> bool:
    return any(line.work in README_WORKS for line in table.lines)


# -- the page -------------------------------------------------------------------------------------

_INTRODUCTION = """# Benchmarks

These plots show all tables of `benchmarks/RESULTS.md`. `make bench` measures all works on your
machine. Times depend on the machine and the day. Ratios depend less on them, because the
contenders take turns in one process.

- A bar begins at 1.0 and ends at the ratio of replaykit's time, or memory, to the contender's. A
  bar to the left shows that replaykit takes less. The number is the median over all rounds.
- The thin line covers the middle 90 % of the rounds.
- The dashed mark is the target: the largest ratio, or amount, that is accepted. The word `missed`
  marks a target that was not met.
- A grey time next to the name of a work is the median time of a call.

{download}`RESULTS.md <../../benchmarks/RESULTS.md>` describes the method of every table, and the
reasons for missed targets.
"""


def write(folder: Path) -> None:
    """Write the page of benchmarks and its plots into a folder.

    Raises:
        RuntimeError: a table has no title, or a title has no table.
        ValueError: the file of results cannot be read.
    """
    tables = read_tables(RESULTS.read_text("utf-8"))
    if sorted(ABOUT) != sorted(table.works for table in tables):
        raise RuntimeError(
            f"expected one table for each of {list(ABOUT)}, got {[each.works for each in tables]}; "
            "edit ABOUT"
        )
    folder.mkdir(exist_ok=True)
    parts, names = [_INTRODUCTION], set[str]()
    for table in tables:
        plots = table_plots(table)
        for name, svg in plots.items():
            _update(folder / f"{name}.svg", svg)
            names.add(name)
        parts.append(_part(table, list(plots)))
    for file in folder.glob("*.svg"):
        if file.stem not in names:  # of a table that is gone
            file.unlink()
    _update(folder / "index.md", "\n".join(parts))


def _part(table: Table, plots: Sequence[str]) -> str:
    """Return the section of one table."""
    title, about = ABOUT[table.works]
    included = "\n".join(
        f'<div style="overflow-x:auto">\n\n```{{raw}} html\n:file: {name}.svg\n```\n\n</div>\n'
        for name in plots
    )
    machine = table.machine[0].upper() + table.machine[1:]
    details = ""
    if table.details:
        details = _folded("The machine in detail", f"```text\n{table.details}```")
    return (
        f"## {title}\n\n{about}\n\n"
        f"- Command: `{table.command}`\n"
        f"- Machine: {machine}. Other programs used {table.busy}\N{NO-BREAK SPACE}% of it.\n\n"
        f"{included}\n{_folded('The table', _markdown(table))}{details}"
    )


def _folded(summary: str, text: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>\n\n"


def _markdown(table: Table) -> str:
    """Return a table with the columns that are not empty."""
    lines = table.lines
    columns = {
        "work": [line.work for line in lines],
        "contender": [line.name for line in lines],
        "median": [f"{line.value} {line.unit or 'µs'}" if line.value else line.missing[:8]
                   for line in lines],
        "p99, µs": [line.p99 for line in lines],
        "ratio": [line.ratio for line in lines],
        "5-95 %": [f"{line.low}-{line.high}" if line.low else "" for line in lines],
        "target": [line.asked for line in lines],
        "met": [line.met.replace("NO", "no") for line in lines],
        "of the limit": [line.limit for line in lines],
    }  # fmt: skip
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    works = [""] + [line.work for line in lines]
    kept["work"] = ["" if a == b else b for a, b in pairwise(works)]
    rows = zip(*kept.values(), strict=True)
    align = ["---" if name in ("work", "contender", "of the limit") else "---:" for name in kept]
    head = [f"| {' | '.join(kept)} |", f"|{'|'.join(align)}|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def _update(path: Path, text: str) -> None:
    """Write a file if its text has changed, so that Sphinx reads only changed pages again."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page into ``docs/benchmarks``, or with ``--readme`` the plot of the README."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--readme", action="store_true", help="write docs/speed.svg instead")
    if parser.parse_args(arguments).readme:
        _update(README_PLOT, readme_plot(read_tables(RESULTS.read_text("utf-8"))))
    else:
        write(README_PLOT.parent / "benchmarks")


if __name__ == "__main__":
    main()
