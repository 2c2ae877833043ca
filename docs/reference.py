"""Write the pages of the API reference: one page for each kind of public name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tensordict import is_tensorclass

from replaykit import registry
from replaykit.registry import Entry

__all__ = ["write"]

_PAGES: Final = {
    "buffers": ("Buffers", ("buffer", "buffer part", "function", "constant")),
    "storages": ("Storages", ("storage",)),
    "samplers": ("Samplers", ("sampler", "measure", "sample unit", "scheduler")),
    "writers": ("Writers", ("writer", "evictor")),
    "transforms": ("Transforms", ("transform", "transform part")),
    "ensembles": ("Ensembles", ("ensemble",)),
    "processes": ("Buffers in other processes", ("remote", "shards")),
    "feeds": ("Feeds", ("feed", "trajectory source")),
    "environments": ("Environments", ("environment",)),
    "adapters": ("Adapters", ("adapter",)),
    "trees": ("Segment trees", ("segment tree",)),
    "data_sets": ("Data sets", ("data set", "family", "conversion")),
    "layouts": ("Layouts of corpora", ("layout class", "layout", "table layout")),
    "base_classes": ("Base classes", ("base",)),
}
"""File name, title and kinds of each page. Together they have all kinds of the registry."""

_INHERITED: Final = ("buffer", "ensemble", "remote", "shards", "data set")
"""Kinds whose classes are composed of private parts: the methods of these parts are listed."""


def write(folder: Path) -> None:
    """Write all pages into a folder, and an index of them.

    Raises:
        RuntimeError: a kind of the registry has no page.
    """
    known = {kind for _, kinds in _PAGES.values() for kind in kinds}
    if missing := {entry.kind for entry in registry.ENTRIES} - known:
        raise RuntimeError(f"expected a page of the reference for every kind, {missing} have none")
    folder.mkdir(exist_ok=True)
    for name, (title, kinds) in _PAGES.items():
        parts = [f"# {title}", *(_part(each) for kind in kinds for each in registry.of_kind(kind))]
        _update(folder / f"{name}.md", "\n\n".join(parts) + "\n")
    listed = "\n".join(_PAGES)
    _update(
        folder / "index.md",
        "# Reference\n\nEvery public name, with its example.\n\n"
        f"```{{toctree}}\n:maxdepth: 2\n\n{listed}\n```\n",
    )


def _part(entry: Entry) -> str:
    """Return the section of one name."""
    value, packages = registry.load(entry), ("replaykit", *registry.ROOMS)
    package = next(each for each in packages if entry.name in registry.exports(each))
    full = f"{package}.{entry.name}"
    options = ["   :members:"]
    if isinstance(value, type):
        directive = "autoexception" if issubclass(value, BaseException) else "autoclass"
        if is_tensorclass(value):  # its methods are those of TensorDict
            options = []
        elif entry.kind in _INHERITED:
            options.append("   :inherited-members: Generic, ABC, object, dict")
    elif callable(value):
        directive, options = "autofunction", []
    else:
        full = f"replaykit.{entry.module}.{entry.name}"
        directive, options = "autodata", ["   :no-value:"]
    lines = [f"## `{entry.name}`", "", "```{eval-rst}", f".. {directive}:: {full}", *options, "```"]
    return "\n".join(lines)


def _update(path: Path, text: str) -> None:
    """Write a file if its text has changed, so that Sphinx reads only changed pages again."""
    if not path.exists() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")
