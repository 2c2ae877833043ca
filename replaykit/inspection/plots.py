"""Plots of the page, as SVG that follows the colours of the reader's system."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.inspection.style import DAY, HOLES, plot_settings, variables

__all__ = ["grid_of", "histogram", "holes", "lines", "small_histograms", "svg_url"]

Array = npt.NDArray[Any]

# Colours that stand for what the style sheet in the picture says, by day and by night.
_STANDINS: Final = {name: f"#0102{place:02x}" for place, name in enumerate(DAY)}
_FAINT: Final = _STANDINS["faint"]
_FILL: Final = _STANDINS["accent"]
_FILL_2: Final = _STANDINS["warm"]

_MOST_BARS: Final = 60
_MOST_TICKS: Final = 8
"""Episodes up to which each has a tick."""
_MOST_JOINED: Final = 400
"""Episodes up to which a line joins them."""


def svg_url(draw: Callable[[Any], None], *, width: float, height: float) -> str:
    """Draws a figure and returns it as the URL of an SVG image, which asks for nothing.

    Args:
        draw: gets the figure.
        width, height: inches.
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
    svg = svg[svg.index("<svg") :]  # without the declaration, which names an address
    for name, colour in _STANDINS.items():
        svg = svg.replace(colour, f"var(--{name})")
    head, end, rest = svg.partition(">")
    return (head + end + f"<style>{variables()}</style>" + rest).encode()


def _margins(
    figure: Any, left: float, right: float, bottom: float, top: float, **gaps: float
) -> None:
    """Sets margins in inches. Known ones cost nothing; those that fit cost as much as the plot."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left / width, bottom / height, 1 - right / width, 1 - top / height, **gaps
    )


def _steps(axes: Any, values: Array, edges: Array) -> None:
    """Draws how often values fall between edges, as one shape."""
    axes.stairs(np.histogram(values, edges)[0], edges, fill=True, color=_FILL)
    axes.set_ylim(bottom=0)


def _bars(axes: Any, values: Array, most: int) -> None:
    """Draw how often values occur: a bar for each of few values, else at most ``most`` bins."""
    low, high = float(values.min()), float(values.max())
    whole, times = np.unique(values, return_counts=True)
    if len(whole) == 1:
        # One number needs no scale: a narrow bar under its value.
        axes.bar([0], times, width=0.5, color=_FILL)
        axes.set_xlim(-2, 2)
        axes.set_xticks([0], [f"{low:.6g}, always"])
    elif high - low < _MOST_BARS and np.array_equal(whole, np.round(whole)):
        axes.bar(whole, times, width=0.8, color=_FILL)
        axes.set_xlim(low - 1, high + 1)
        if len(whole) <= _MOST_TICKS and 10 * np.diff(whole).min() >= high - low:
            axes.set_xticks(whole)  # a tick for each of few values, far enough from one another
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        # Of few values each is a narrow bar: wide ones would join into one block.
        few = len(whole) <= _MOST_TICKS
        bins = 25 if few else int(np.clip(np.sqrt(values.size), min(10, len(whole)), most))
        _steps(axes, values, np.histogram_bin_edges(values, bins))


def histogram(values: Array, label: str) -> Callable[[Any], None]:
    """Returns what draws how often values occur, ``[N]``; what is not finite is left out."""
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
    """Returns what draws a value for each episode, ``[E]``, coloured by why it ended.

    Args:
        numbers: of the episodes, ``[E]``.
        values: of the episodes.
        label: what they are.
        ends: why the episodes ended.
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
            axes.set_xticks(numbers)  # a tick for each of few episodes, and none between them
            axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
        if terminated.any() and (~terminated).any():
            place = {"loc": "lower right", "bbox_to_anchor": (1.02, 0.98), "borderaxespad": 0}
            axes.legend(frameon=False, fontsize=8, ncols=2, handletextpad=0.1, **place)
        _margins(figure, 0.68, 0.15, 0.5, 0.3)

    return draw


def small_histograms(values: Array, names: Sequence[str]) -> Callable[[Any], None]:
    """Returns what draws how often the numbers of each column occur, ``[N, D]``, side by side."""

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
    """Returns into how many rows and columns so many small plots are put."""
    across = min(4, max(1, count))
    return -(-count // across), across


def holes(shares: Array, keys: Sequence[str], episodes: Sequence[int]) -> Callable[[Any], None]:
    """Returns what draws the share of NaN of each key in each episode, ``[K, E]``."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm

        colours = LinearSegmentedColormap.from_list("holes", HOLES)
        # Nothing is drawn where there is none, and a single NaN is still seen.
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
