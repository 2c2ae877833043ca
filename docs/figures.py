"""Draw the figures of the site as SVG, in the colours of the page.

``python docs/figures.py`` writes all of them into ``docs/figures``. The site includes them in its
pages, so they follow its light and its dark theme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

__all__ = ["FIGURES", "write"]

INK, FAINT, PAGE = "currentColor", "var(--color-foreground-muted)", "var(--color-background-hover)"
ACCENT, WARM = "var(--color-brand-primary)", "#e07a3f"
SIZE = 13  # of the text, in pixels
CELL = 44  # width of a row in a ring


class Drawing:
    """An SVG of fixed size, to which shapes are added in order."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        text: str,
        *,
        width: float = 112,
        height: float = 40,
        stroke: str = INK,
        fill: str = PAGE,
        dashed: bool = False,
    ) -> None:
        """Draw a box with text in its middle; a line break starts another line."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" '
            f'stroke="{stroke}"{dash}/>'
        )
        lines = text.split("\n")
        for number, line in enumerate(lines):
            down = y + height / 2 + (number - (len(lines) - 1) / 2) * (SIZE + 3)
            self.text(x + width / 2, down, line)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        fill: str = INK,
        anchor: str = "middle",
        mono: bool = False,
    ) -> None:
        """Draw one line of text, centred on a height."""
        font = ' font-family="var(--font-stack--monospace)"' if mono else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" fill="{fill}" text-anchor="{anchor}" '
            f'dominant-baseline="central"{font}>{escape(text)}</text>'
        )

    def arrow(
        self, points: Sequence[tuple[float, float]], *, stroke: str = INK, dashed: bool = False
    ) -> None:
        """Draw an arrow through points."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        path = " L".join(f"{x} {y}" for x, y in points)
        head = "accent" if stroke == ACCENT else "ink"
        self._parts.append(
            f'<path d="M{path}" fill="none" stroke="{stroke}" stroke-width="1.4"{dash} '
            f'marker-end="url(#{head})"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = FAINT) -> None:
        """Draw a straight line."""
        self._parts.append(f'<path d="M{x1} {y1} L{x2} {y2}" stroke="{stroke}" fill="none"/>')

    def svg(self) -> str:
        """Return the text of the file."""
        heads = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8z" '
            f'fill="{colour}"/></marker>'
            for name, colour in (("ink", INK), ("accent", ACCENT))
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'role="img" aria-label="{escape(self.title)}" font-size="{SIZE}" '
            f'style="max-width:{self.width}px;width:100%;height:auto">'
            f"<defs>{heads}</defs>{''.join(self._parts)}</svg>\n"
        )


def way_of_data() -> Drawing:
    """Draw how storage, sampler, writer and transforms make a batch."""
    out = Drawing(720, 300, "The way of data through a replay buffer")
    out.text(20, 24, "extend(rows)", anchor="start", mono=True)
    for x, name in ((20, "Transform.inv"), (172, "schema check"), (324, "rate limiter")):
        out.box(x, 44, name)
        out.arrow([(x + 112, 64), (x + 152, 64)])
    out.box(476, 44, "Writer\nchooses slots", width=124)
    out.arrow([(538, 84), (538, 122)])
    out.box(420, 122, "Storage\nrows, row ids, episodes", width=236, height=52, stroke=ACCENT)
    out.text(20, 276, "sample()", anchor="start", mono=True)
    out.arrow([(476, 174), (476, 212), (438, 212)])
    out.box(326, 192, "Sampler\nchooses rows")
    out.arrow([(326, 212), (286, 212)])
    out.box(174, 192, "collate")
    out.arrow([(174, 212), (134, 212)])
    out.box(22, 192, "transforms")
    out.arrow([(78, 232), (78, 262)])
    out.text(100, 276, "one batch, a copy", anchor="start", fill=FAINT)
    out.text(538, 196, "priorities follow writes", anchor="start", fill=FAINT)
    return out


def _rows(
    out: Drawing,
    x: float,
    y: float,
    values: Sequence[str],
    *,
    fills: Sequence[str] = (),
    dashed: Sequence[int] = (),
) -> None:
    for number, value in enumerate(values):
        fill = fills[number] if number < len(fills) else PAGE
        out.box(
            x + number * CELL,
            y,
            value,
            width=CELL - 4,
            height=32,
            fill=fill,
            dashed=number in dashed,
        )


def ring() -> Drawing:
    """Draw a ring after it has wrapped round, with its row ids and generations."""
    out = Drawing(560, 190, "A ring of eight slots after eleven writes")
    left = 150
    for number in range(8):
        out.text(left + number * CELL + 20, 26, str(number), fill=FAINT)
    out.text(20, 26, "slot (index)", anchor="start", fill=FAINT)
    out.text(20, 64, "row id", anchor="start")
    _rows(out, left, 48, ["8", "9", "10", "3", "4", "5", "6", "7"])
    out.text(20, 108, "generation", anchor="start")
    _rows(out, left, 92, ["2", "2", "2", "1", "1", "1", "1", "1"])
    seam = left + 3 * CELL - 2
    out.line(seam, 40, seam, 134, stroke=WARM)
    out.text(seam, 150, "write seam: newest row | oldest row", fill=WARM)
    out.text(
        20, 176, "An index and its generation name one row for ever.", anchor="start", fill=FAINT
    )
    return out


def windows() -> Drawing:
    """Draw episodes in a ring, and the slices of length 3 that may be drawn."""
    out = Drawing(640, 190, "Slices of length 3 from two episodes and an open one")
    left = 20
    names = ["a2", "a3", "a4", "b0", "b1", "b2", "b3", "b4", "c0", "c1"]
    _rows(out, left, 40, names)
    for end, text in ((3, "end of a"), (8, "end of b")):
        out.line(left + end * CELL - 2, 30, left + end * CELL - 2, 84, stroke=WARM)
        out.text(left + end * CELL - 2, 20, text, fill=WARM)
    for row, start in enumerate((0, 3, 4, 5)):
        y = 96 + row * 12
        out.line(left + start * CELL, y, left + (start + 3) * CELL - 4, y, stroke=ACCENT)
    out.text(480, 114, "4 starts are eligible", anchor="start", fill=ACCENT)
    out.text(
        20,
        168,
        "No window crosses an end. Rows c0 and c1 are too few for a slice of 3.",
        anchor="start",
        fill=FAINT,
    )
    return out


def padding() -> Drawing:
    """Draw what a window contains beyond the ends of its episode."""
    out = Drawing(560, 180, "A window of five steps from an episode of three")
    for row, (name, values) in enumerate(
        (
            ("default", ["", "", "", "", ""]),
            ("strict_length=False", ["b0", "b1", "b2"]),
            ("pad_output=True", ["b0", "b1", "b2", "b2", "b2"]),
        )
    ):
        y = 20 + row * 46
        out.text(20, y + 16, name, anchor="start", mono=True)
        if name == "default":
            out.text(220, y + 16, "the episode is never drawn", anchor="start", fill=FAINT)
        else:
            _rows(out, 220, y, values, dashed=(3, 4))
    out.text(
        20,
        164,
        "Dashed rows are padding: validity_mask is False there.",
        anchor="start",
        fill=FAINT,
    )
    return out


def dedup() -> Drawing:
    """Draw how next observations are stored once."""
    out = Drawing(640, 200, "Next observations are read from the following row")
    left = 150
    out.text(20, 56, "observation", anchor="start")
    _rows(out, left, 40, ["o0", "o1", "o2", "o3", "p0", "p1"])
    out.text(20, 122, "next", anchor="start")
    for number in range(6):
        x = left + number * CELL + 20
        if number in (3, 5):
            continue
        out.arrow([(x, 112), (x, 96), (x + CELL, 96), (x + CELL, 76)], stroke=ACCENT)
    _rows(out, left, 112, ["", "", "", "o4", "", "p2"], dashed=(0, 1, 2, 4))
    out.text(left + 6 * CELL + 8, 128, "overflow rows: ends only", anchor="start", fill=FAINT)
    out.text(
        20,
        176,
        "Only the last observation of an episode needs memory for itself.",
        anchor="start",
        fill=FAINT,
    )
    return out


def checkpoint() -> Drawing:
    """Draw the files of two saves that share chunks."""
    out = Drawing(640, 210, "Two saves of one directory share their chunks")
    out.box(20, 30, "manifest 1", width=120)
    out.box(20, 130, "manifest 2", width=120, stroke=ACCENT)
    for number in range(5):
        old = number < 4
        out.box(
            230 + number * 80,
            80,
            f"chunk {number}",
            width=70,
            height=34,
            stroke=INK if old else ACCENT,
        )
        x = 265 + number * 80
        if old:
            out.line(140, 50, x, 80)
        if number != 1:
            out.line(140, 150, x, 114, stroke=ACCENT)
    out.box(310, 150, "chunk 1, changed", width=130, height=34, stroke=ACCENT)
    out.line(140, 150, 310, 166, stroke=ACCENT)
    out.text(
        20,
        200,
        "A save writes changed chunks, then replaces one manifest.",
        anchor="start",
        fill=FAINT,
    )
    return out


def shards() -> Drawing:
    """Draw a draw over shards by their masses."""
    out = Drawing(640, 220, "A draw from four shards")
    out.box(20, 90, "client", width=100)
    for number, mass in enumerate((40, 10, 30, 20)):
        y = 10 + number * 50
        out.box(330, y, f"shard {number}", width=100, height=36)
        out.arrow([(120, 110), (330, y + 18)])
        out.text(445, y + 18, f"mass {mass} of 100", anchor="start", fill=FAINT)
    out.text(
        20,
        210,
        "One number per shard is enough to draw as from one big buffer.",
        anchor="start",
        fill=FAINT,
    )
    return out


FIGURES: dict[str, Callable[[], Drawing]] = {
    "way_of_data": way_of_data,
    "ring": ring,
    "windows": windows,
    "padding": padding,
    "dedup": dedup,
    "checkpoint": checkpoint,
    "shards": shards,
}


def write(folder: Path) -> None:
    """Write all figures into a folder."""
    folder.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent / "figures")
