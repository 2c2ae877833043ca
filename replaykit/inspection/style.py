"""Colours and lettering that the page, its plots and the demo's picture share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["DAY", "HOLES", "NIGHT", "plot_settings", "variables"]

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
"""Colours on a light ground, by the names that style sheets use."""
NIGHT: Final[Mapping[str, str]] = {
    "bg": "#12161b",
    "card": "#1a2027",
    "ink": "#e6eaef",
    "faint": "#9aa6b3",
    "line": "#2b333d",
    "accent": "#7aa8ff",
    "warm": "#f0a06a",
    "good": "#58c79d",
    "violet": "#d98ac4",
    "grey": "#8a96a3",
    "bad": "#ff8a80",
    "soft": "#1f2936",
    "warn": "#2c2318",
}
"""The same names on a dark ground."""
HOLES: Final = ("#f2c9a0", "#e07a3f", "#b3261e")
"""From few values that are NaN to all; readable on both grounds."""


def variables() -> str:
    """Return the style sheet that sets every colour, light or dark as the system asks."""

    def root(colours: Mapping[str, str]) -> str:
        return ":root{" + ";".join(f"--{name}:{value}" for name, value in colours.items()) + "}"

    night = f"@media (prefers-color-scheme:dark){{{root(NIGHT)}}}"
    return f":root{{color-scheme:light dark}}{root(DAY)}{night}\n"


def plot_settings(colours: Mapping[str, str] = DAY) -> dict[str, Any]:
    """Return settings for `matplotlib.rc_context`.

    Args:
        colours: a colour for each of the names ``card``, ``ink``, ``faint``, ``line``, ``accent``.

    Example:
        >>> from replaykit.inspection.style import DAY, plot_settings
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
