"""An HTML page with plots that shows the data at a path."""

from __future__ import annotations

import base64
import errno
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit._version import __version__
from replaykit.filesystem import replace_file
from replaykit.tools.facts import (
    KEY_COLUMNS,
    Column,
    EpisodeFacts,
    Facts,
    KeyFacts,
    Table,
    blocks,
    counted,
    details,
    episode_texts,
    evenly,
    key_texts,
    number,
    size,
)

Array = npt.NDArray[Any]

_MOST_LISTED: Final = 25
_MOST_BYTES: Final = 8 << 20
"""Number of bytes of one key that are read for a plot."""
_MOST_VALUES: Final = 200_000
_MOST_POINTS: Final = 2_000
_MOST_ACTIONS: Final = 24
"""Number of elements of an action that are shown, in one plot each."""
_MOST_EPISODES: Final = 60
_MOST_KEYS: Final = 40
_ROWS_OF_CELL: Final = 32
_STRIPS: Final = 3
_FRAMES: Final = 8
_HEIGHT: Final = 112
_GAP: Final = 3
_END_COLOURS: Final = {
    "terminated": "warm",
    "truncated": "accent",
    "open": "grey",
    "cut": "violet",
}


@dataclass(frozen=True)
class Picture:
    """A plot or frames of an episode: title, a note on the data, and the URL of the image.

    Attributes:
        wide: True for a plot that takes the whole width.
        size: width and height of frames in pixels.
    """

    title: str
    note: str
    url: str
    wide: bool = False
    size: tuple[int, int] | None = None


def write_page(target: Path, facts: Facts, table: Table) -> None:
    """Write the page to a file, completely or not at all.

    Raises:
        OSError: the page cannot be written, or would replace a file that is not HTML. The message
            names the file.
    """
    if target.exists() and target.suffix.lower() not in (".html", ".htm"):
        raise FileExistsError(
            errno.EEXIST,
            "expected a new file, or one that ends in .html, for the page; got an existing one",
            str(target),
        )
    text = make_page(facts, table)
    try:
        replace_file(target, text.encode("utf-8", "backslashreplace").decode(), durable=False)
    except OSError as error:
        raise OSError(
            error.errno, f"the page cannot be written: {error.strerror}", str(target)
        ) from None


def make_page(facts: Facts, table: Table) -> str:
    """Return the page as one HTML text that embeds all images.

    If the data is large, only rows at even intervals are read, and the page shows the count of
    these rows.

    Cost: some tens of MiB and some seconds, whatever the size of the data.

    Args:
        facts: the first result of `opened`.
        table: the second result of `opened`, which must still be open.
    """
    import jinja2

    plots = list(_plots(facts, table))
    map_of_holes = _holes(table)
    floats = len(_floats(table))
    summary, spreads, episodes = None, [], []
    if facts.episodes is not None and len(facts.episodes):
        summary = facts.episodes.summary()
        episodes = episode_texts(facts.episodes, _MOST_LISTED)
        spreads = [("rows, median", summary["lengths"], summary["lengths"].median)]
        if (returns := summary["returns"]) is not None:
            spreads.append(("return, mean", returns, returns.mean))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    return template.render(
        facts=facts,
        name=facts.path.rstrip("/").rpartition("/")[2] or facts.path,
        version=__version__,
        colours=variables(),
        end_colours=_END_COLOURS,
        summary=summary,
        spreads=spreads,
        details=details(facts),
        plots=plots if map_of_holes is None else [*plots, map_of_holes],
        hole_note=counted(floats, "key") + " of floating point"
        if floats and map_of_holes is None
        else None,
        strips=list(_strips(table)),
        key_columns=KEY_COLUMNS,
        keys=[(key.key, _notes(key), key_texts(key)) for key in facts.keys],
        episodes=episodes,
        is_named=any(row[-1] for row in episodes),
        counted=counted,
        number=number,
        size=size,
    )


def _notes(key: KeyFacts) -> list[str]:
    notes = [note for note in (key.source and f"from {key.source}", key.note) if note]
    if key.statistics is not None and key.looked_at < key.rows:
        notes.append(f"statistics of {key.looked_at:,} rows, taken evenly")
    return notes


def _plot(
    title: str, note: str, draw: Callable[[Any], None], *, wide: bool = False, height: float = 2.9
) -> Picture:
    width = 9.4 if wide else 4.6  # inches, for letters of one size
    return Picture(title, note, svg_url(draw, width=width, height=height), wide)


def _plots(facts: Facts, table: Table) -> Iterator[Picture]:
    if facts.episodes is not None and len(facts.episodes):
        yield from _of_episodes(facts.episodes)
    for key in table.rewards:
        values, note = _values(table.columns[key])
        yield _plot("Reward", f"{key}, {note}", partial(histogram, values.reshape(-1), "reward"))
    yield from _of_actions(table)
    if table.priorities is not None and len(table.priorities):
        note = _of(len(table.priorities), table.prioritized, "row")
        draw = partial(histogram, table.priorities, "priority")
        yield _plot("Priority", f"as they were set, {note}", draw)


def _of_episodes(episodes: EpisodeFacts) -> Iterator[Picture]:
    at = evenly(np.arange(len(episodes)), _MOST_POINTS)
    ends = [episodes.ends[i] for i in at]
    note = _of(len(at), len(episodes), "episode")
    all_of_them = f"of {counted(len(episodes), 'episode')}"
    for title, label, values in (
        ("Return", "return", episodes.returns),
        ("Length", "rows", episodes.lengths),
    ):
        if values is not None:
            draw = partial(lines, at, values[at], label, ends)
            yield _plot(f"{title} of each episode", note, draw)
            yield _plot(f"{title}s", all_of_them, partial(histogram, values, label))


def _of_actions(table: Table) -> Iterator[Picture]:
    for key in table.actions:
        column = table.columns[key]
        if column.dtype.kind not in "fiub":
            continue
        values, note = _values(column)
        parts = values.reshape(len(values), int(np.prod(column.shape)))
        if parts.shape[1] == 0:
            continue
        shown = min(parts.shape[1], _MOST_ACTIONS)
        more = f"; {shown} of {parts.shape[1]} numbers" if shown < parts.shape[1] else ""
        yield _plot(
            "Action" if len(table.actions) == 1 else f"Action {key.rpartition('/')[2]}",
            f"{key}, {note}{more}",
            partial(small_histograms, parts[:, :shown], [f"[{place}]" for place in range(shown)]),
            wide=shown > 2,
            height=0.35 + 1.35 * grid_of(shown)[0] if shown > 2 else 2.9,
        )


def _values(column: Column) -> tuple[Array, str]:
    """Return values of a column for a plot, and a note on the number of rows."""
    found = list(blocks(column, _MOST_BYTES))
    values = np.concatenate(found) if found else np.empty((0, *column.shape), column.dtype)
    width = max(1, int(np.prod(column.shape)))
    values = evenly(values, max(1, _MOST_VALUES // width))
    return values, _of(len(values), column.rows, "row")


def _of(looked_at: int, total: int, noun: str) -> str:
    if looked_at < total:
        return f"{looked_at:,} of {total:,} {noun}s, taken evenly"
    return f"all {counted(total, noun)}"


def _floats(table: Table) -> list[str]:
    return [key for key, column in table.columns.items() if column.dtype.kind == "f"]


def _holes(table: Table) -> Picture | None:
    """Return a map of the share of NaN in each key and episode; ``None`` if there is no NaN."""
    keys = _floats(table)
    if not keys or not table.episodes:
        return None
    episodes = evenly(np.arange(table.episodes), _MOST_EPISODES).tolist()
    shares = np.zeros((len(keys), len(episodes)))
    # The outer loop is over episodes, so each file of a folder is opened only once.
    for place, episode in enumerate(episodes):
        for row, key in enumerate(keys):
            values = table.columns[key].episode(episode, _ROWS_OF_CELL)
            if values.size:
                shares[row, place] = np.isnan(values).mean()
    some = np.flatnonzero(shares.any(axis=1))
    if not some.size:
        return None
    listed = some[np.argsort(-shares[some].sum(axis=1), kind="stable")][:_MOST_KEYS]
    note = (
        f"{len(some)} of {len(keys)} keys have any; {_of(len(episodes), table.episodes, 'episode')}"
        f", at most {_ROWS_OF_CELL} rows of each"
    )
    draw = partial(holes, shares[listed], [keys[row] for row in listed], episodes)
    height = 1.3 + 0.22 * len(listed)
    return _plot("Where values are NaN", note, draw, wide=True, height=height)


def _strips(table: Table) -> Iterator[Picture]:
    for key in table.images():
        for episode in evenly(np.arange(table.episodes), _STRIPS).tolist():
            found = strip(table.columns[key], episode, _FRAMES)
            if found is not None:
                note = f"episode {episode}, frames taken evenly"
                yield Picture(key, note, found[0], size=found[1:])


def strip(column: Column, episode: int, frames: int) -> tuple[str, int, int] | None:
    """Return frames of an episode as one image: its URL, width and height.

    The frames are taken at even intervals. The result is ``None`` if the episode has no frames.
    """
    from PIL import Image

    found = column.episode(episode, frames)
    if not len(found):
        return None
    pictures = [Image.fromarray(_as_picture(frame)) for frame in found[:frames]]
    scale = _HEIGHT / pictures[0].height
    size = (max(1, round(pictures[0].width * scale)), _HEIGHT)
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR
    pictures = [picture.convert("RGB").resize(size, how) for picture in pictures]
    width = len(pictures) * (size[0] + _GAP) - _GAP
    whole = Image.new("RGB", (width, _HEIGHT), (128, 128, 128))
    for place, picture in enumerate(pictures):
        whole.paste(picture, (place * (size[0] + _GAP), 0))
    data = io.BytesIO()
    whole.save(data, "JPEG", quality=85)
    url = "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
    return url, width, _HEIGHT


def _as_picture(frame: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if frame.ndim == 3 and frame.shape[-1] not in (1, 3, 4):
        frame = np.moveaxis(frame, 0, -1)  # channels first
    if frame.ndim == 3 and frame.shape[-1] == 1:
        frame = frame[..., 0]
    return np.ascontiguousarray(frame, np.uint8)


DAY: Final[Mapping[str, str]] = {
    "bg": "#f5f7f9",
    "card": "#ffffff",
    "ink": "#1d2630",
    "faint": "#5d6976",
    "line": "#e1e6ec",
    "accent": "#2f6fde",
    "warm": "#e07a3f",
    "good": "#2a9d74",
    "violet": "#b5489a",
    "grey": "#8a96a3",
    "bad": "#b3261e",
    "soft": "#eef3fb",
    "warn": "#fff6ec",
}
"""Colours by their names in style sheets."""
HOLES: Final = ("#f2c9a0", "#e07a3f", "#b3261e")
"""Colours for small to large shares of NaN."""


def variables() -> str:
    """Return the style sheet of all colours."""
    return ":root{" + ";".join(f"--{name}:{value}" for name, value in DAY.items()) + "}\n"


def plot_settings() -> dict[str, Any]:
    """Return settings for `matplotlib.rc_context`.

    Example:
        >>> from replaykit.tools.page import DAY, plot_settings
        >>> plot_settings()["text.color"] == DAY["ink"]
        True
    """
    return {
        "font.size": 9,
        "figure.facecolor": DAY["card"],
        "axes.facecolor": DAY["card"],
        "text.color": DAY["ink"],
        "axes.edgecolor": DAY["line"],
        "axes.labelcolor": DAY["faint"],
        "axes.titlecolor": DAY["ink"],
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "xtick.color": DAY["faint"],
        "ytick.color": DAY["faint"],
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "xtick.major.pad": 5,
        "ytick.major.pad": 5,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": DAY["line"],
        "grid.linewidth": 0.8,
        "axes.spines.left": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-3, 5),
    }


_FAINT: Final = DAY["faint"]
_FILL: Final = DAY["accent"]
_FILL_2: Final = DAY["warm"]

_MOST_BARS: Final = 60
_MOST_TICKS: Final = 8
"""Greatest number of values for which each value has a tick."""
_MOST_JOINED: Final = 400
"""Greatest number of episodes for which a line joins the points."""


def svg_url(draw: Callable[[Any], None], *, width: float, height: float) -> str:
    """Draw a figure and return it as the ``data:`` URL of an SVG image.

    Args:
        draw: a function that draws into the figure.
        width, height: the size in inches.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: Any = {
        **plot_settings(),
        "svg.hashsalt": "replaykit",
        "svg.fonttype": "path",
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        draw(figure)
        for axes in figure.axes:
            axes.patch.set_alpha(0)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]  # without the declaration, which contains a URL
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _margins(
    figure: Any, left: float, right: float, bottom: float, top: float, **gaps: float
) -> None:
    """Set fixed margins in inches. Matplotlib's own layout would take as long as the plot."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - top / height, **gaps
    )


def _bars(axes: Any, values: Array, most: int) -> None:
    """Draw the counts of values, as one bar per value or in at most ``most`` bins."""
    low, high = float(values.min()), float(values.max())
    whole, times = np.unique(values, return_counts=True)
    if len(whole) == 1:
        # One number needs no scale, so a narrow bar is drawn above its value.
        axes.bar([0], times, width=0.5, color=_FILL)
        axes.set_xlim(-2, 2)
        axes.set_xticks([0], [f"{low:.6g}, always"])
    elif high - low < _MOST_BARS and np.array_equal(whole, np.round(whole)):
        axes.bar(whole, times, width=0.8, color=_FILL)
        axes.set_xlim(low - 1, high + 1)
        if len(whole) <= _MOST_TICKS and 10 * np.diff(whole).min() >= high - low:
            axes.set_xticks(whole)
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        # Few values get narrow bars, because wide bars would merge into one block.
        few = len(whole) <= _MOST_TICKS
        bins = 25 if few else int(np.clip(np.sqrt(values.size), min(10, len(whole)), most))
        axes.stairs(*np.histogram(values, bins), fill=True, color=_FILL)
        axes.set_ylim(bottom=0)


def histogram(values: Array, label: str, figure: Any) -> None:
    """Draw a histogram of the finite values of ``[N]``."""
    finite = values[np.isfinite(values)].astype(np.float64)
    axes = figure.subplots()
    if finite.size:
        _bars(axes, finite, 60)
    axes.set_xlabel(label)
    axes.set_ylabel("count")
    axes.yaxis.get_major_locator().set_params(integer=True)
    _margins(figure, 0.68, 0.15, 0.5, 0.12)


def lines(numbers: Array, values: Array, label: str, ends: Sequence[str], figure: Any) -> None:
    """Draw a value for each episode, coloured by its end.

    Args:
        numbers: the sequence numbers of the episodes, ``[E]``.
        values: one value of each episode, ``[E]``.
        label: the label of the axis of the values.
        ends: the reason why each episode ended.
    """
    axes = figure.subplots()
    terminated = np.array([end.startswith("terminated") for end in ends], np.bool_)
    size = float(np.clip(400 / max(1, len(values)), 3, 22))
    for chosen, colour, name in (
        (terminated, _FILL_2, "terminated"),
        (~terminated, _FILL, "not terminated"),
    ):
        if chosen.any():
            x, y = numbers[chosen], values[chosen]
            axes.scatter(x, y, s=size, color=colour, label=name, linewidths=0)
    if 1 < len(values) <= _MOST_JOINED:
        axes.plot(numbers, values, color=_FAINT, linewidth=0.5, alpha=0.6, zorder=0)
    axes.set_xlabel("episode")
    axes.set_ylabel(label)
    if 0 < len(values) <= _MOST_TICKS:
        axes.set_xticks(numbers)
        axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    else:
        axes.xaxis.get_major_locator().set_params(integer=True)
    if terminated.any() and (~terminated).any():
        place = {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98), "borderaxespad": 0}
        axes.legend(frameon=False, fontsize=8, ncols=2, handletextpad=0.1, **place)
    _margins(figure, 0.68, 0.15, 0.5, 0.3)


def small_histograms(values: Array, names: Sequence[str], figure: Any) -> None:
    """Draw a histogram of each column of ``[N, D]``."""
    down, across = grid_of(len(names))
    grid = figure.subplots(down, across, squeeze=False).reshape(-1)
    for axes, name, column in zip(grid, names, values.T, strict=False):
        finite = column[np.isfinite(column)]
        if finite.size:
            _bars(axes, finite.astype(np.float64), 32)
        axes.set_title(name, fontsize=8, fontweight="normal", pad=3)
        axes.tick_params(labelsize=7)
        if len(np.unique(finite)) > 1:
            axes.locator_params(axis="x", nbins=4)
        axes.locator_params(axis="y", nbins=3, integer=True)
    for axes in grid[len(names) :]:
        axes.set_visible(False)
    _margins(figure, 0.45, 0.12, 0.25, 0.25, wspace=0.26, hspace=0.42)


def grid_of(count: int) -> tuple[int, int]:
    """Return the numbers of rows and columns for a grid of ``count`` small plots."""
    across = min(4, max(1, count))
    return -(-count // across), across


def holes(shares: Array, keys: Sequence[str], episodes: Sequence[int], figure: Any) -> None:
    """Draw the share of NaN per key and episode, ``[K, E]``."""
    axes = figure.subplots()
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colours = LinearSegmentedColormap.from_list("holes", HOLES)
    # Cells without NaN stay blank. The power norm makes a single NaN visible.
    image = axes.imshow(
        np.ma.masked_equal(shares, 0),
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        norm=PowerNorm(0.4, 0, 1),
    )
    names = [_short(key) for key in keys]
    axes.set_yticks(range(len(keys)), names, fontsize=8)
    count = len(episodes) if len(episodes) <= 15 else 8
    ticks = np.unique(np.linspace(0, len(episodes) - 1, count).round().astype(int))
    axes.set_xticks(ticks, [str(episodes[tick]) for tick in ticks])
    axes.set_xlabel("episode")
    axes.set_yticks(np.arange(len(keys) + 1) - 0.5, minor=True)
    axes.grid(False)
    axes.grid(True, which="minor", axis="y")
    axes.spines["bottom"].set_visible(False)
    _margins(figure, 0.3 + 0.067 * max(map(len, names)), 0.5, 0.5, 0.12)
    bar = figure.colorbar(image, ax=axes, fraction=0.025, pad=0.02)
    marks = [0.01, 0.1, 0.5, 1] if len(keys) > 4 else [0.01, 1]
    bar.ax.set_yticks(marks, [f"{100 * mark:g} %" for mark in marks])
    bar.outline.set_visible(False)


def _short(key: str) -> str:
    printable = "".join(part if part.isprintable() else "?" for part in key)
    return printable if len(printable) <= 38 else f"...{printable[-35:]}"
