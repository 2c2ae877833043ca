"""SVG plots of the page, in the system's light or dark colours."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_COLOURS: Final = {
    "bg": ("#f5f7f9", "#12161b"),
    "card": ("#ffffff", "#1a2027"),
    "ink": ("#1d2630", "#e6eaef"),
    "faint": ("#5d6976", "#9aa6b3"),
    "line": ("#e1e6ec", "#2b333d"),
    "accent": ("#2f6fde", "#7aa8ff"),
    "warm": ("#e07a3f", "#f0a06a"),
    "good": ("#2a9d74", "#58c79d"),
    "violet": ("#b5489a", "#d98ac4"),
    "grey": ("#8a96a3", "#8a96a3"),
    "bad": ("#b3261e", "#ff8a80"),
    "soft": ("#eef3fb", "#1f2936"),
    "warn": ("#fff6ec", "#2c2318"),
}
"""Colours for a light and a dark background, by their names in style sheets."""
DAY: Final[Mapping[str, str]] = {name: day for name, (day, _) in _COLOURS.items()}
NIGHT: Final[Mapping[str, str]] = {name: night for name, (_, night) in _COLOURS.items()}
HOLES: Final = ("#f2c9a0", "#e07a3f", "#b3261e")
"""Colours for small to large shares of NaN, readable on both backgrounds."""


def variables() -> str:
    """Return the style sheet of all colours, for light and dark systems."""

    def root(colours: Mapping[str, str]) -> str:
        return ":root{" + ";".join(f"--{name}:{value}" for name, value in colours.items()) + "}"

    night = f"@media (prefers-color-scheme:dark){{{root(NIGHT)}}}"
    return f":root{{color-scheme:light dark}}{root(DAY)}{night}\n"


def plot_settings(colours: Mapping[str, str] = DAY) -> dict[str, Any]:
    """Return settings for `matplotlib.rc_context`.

    Args:
        colours: a colour for each of the names ``card``, ``ink``, ``faint``, ``line``, ``accent``.

    Example:
        >>> from replaykit.tools.plots import DAY, plot_settings
        >>> plot_settings()["text.color"] == DAY["ink"]
        True
    """
    return {
        "font.size": 9,
        "figure.facecolor": colours["card"],
        "axes.facecolor": colours["card"],
        "text.color": colours["ink"],
        "axes.edgecolor": colours["line"],
        "axes.labelcolor": colours["faint"],
        "axes.titlecolor": colours["ink"],
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "xtick.color": colours["faint"],
        "ytick.color": colours["faint"],
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "ytick.minor.size": 0,
        "xtick.major.pad": 5,
        "ytick.major.pad": 5,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": colours["line"],
        "grid.linewidth": 0.8,
        "axes.spines.left": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "axes.formatter.limits": (-3, 5),
    }


Array = npt.NDArray[Any]

# Placeholder colours, which are replaced in the SVG text by variables of its style sheet.
_STANDINS: Final = {name: f"#0102{place:02x}" for place, name in enumerate(DAY)}
_FAINT: Final = _STANDINS["faint"]
_FILL: Final = _STANDINS["accent"]
_FILL_2: Final = _STANDINS["warm"]

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
        **plot_settings(_STANDINS),
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
    return "data:image/svg+xml;base64," + base64.b64encode(_coloured(text.getvalue())).decode()


def _coloured(svg: str) -> bytes:
    svg = svg[svg.index("<svg") :]  # without the declaration, which contains a URL
    for name, colour in _STANDINS.items():
        svg = svg.replace(colour, f"var(--{name})")
    head, end, rest = svg.partition(">")
    return (head + end + f"<style>{variables()}</style>" + rest).encode()


def _margins(
    figure: Any, left: float, right: float, bottom: float, top: float, **gaps: float
) -> None:
    """Set fixed margins in inches. Matplotlib's own layout would take as long as the plot."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - top / height, **gaps
    )


def _steps(axes: Any, values: Array, edges: Array) -> None:
    """Draw the counts of values between edges, as one shape."""
    axes.stairs(np.histogram(values, edges)[0], edges, fill=True, color=_FILL)
    axes.set_ylim(bottom=0)


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
        _steps(axes, values, np.histogram_bin_edges(values, bins))


def histogram(values: Array, label: str) -> Callable[[Any], None]:
    """Return a function that draws a histogram of the finite values of ``[N]``."""
    finite = values[np.isfinite(values)].astype(np.float64)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        if finite.size:
            _bars(axes, finite, 60)
        axes.set_xlabel(label)
        axes.set_ylabel("count")
        axes.yaxis.get_major_locator().set_params(integer=True)
        _margins(figure, 0.68, 0.15, 0.5, 0.12)

    return draw


def lines(numbers: Array, values: Array, label: str, ends: Sequence[str]) -> Callable[[Any], None]:
    """Return a function that draws a value for each episode, coloured by its end.

    Args:
        numbers: the sequence numbers of the episodes, ``[E]``.
        values: one value of each episode, ``[E]``.
        label: the label of the axis of the values.
        ends: the reason why each episode ended.
    """

    def draw(figure: Any) -> None:
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

    return draw


def small_histograms(values: Array, names: Sequence[str]) -> Callable[[Any], None]:
    """Return a function that draws a histogram of each column of ``[N, D]``."""

    def draw(figure: Any) -> None:
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

    return draw


def grid_of(count: int) -> tuple[int, int]:
    """Return the numbers of rows and columns for a grid of ``count`` small plots."""
    across = min(4, max(1, count))
    return -(-count // across), across


def holes(shares: Array, keys: Sequence[str], episodes: Sequence[int]) -> Callable[[Any], None]:
    """Return a function that draws the share of NaN per key and episode, ``[K, E]``."""

    def draw(figure: Any) -> None:
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

    return draw


def _short(key: str) -> str:
    printable = "".join(part if part.isprintable() else "?" for part in key)
    return printable if len(printable) <= 38 else f"...{printable[-35:]}"
