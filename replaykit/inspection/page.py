"""One page that shows what lies at a path: plots, tables, pictures; it needs nothing else."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit.inspection.facts import EpisodeFacts, Facts
from replaykit.inspection.markup import page_of
from replaykit.inspection.plots import (
    grid_of,
    histogram,
    holes,
    lines,
    small_histograms,
    svg_url,
)
from replaykit.inspection.strips import strip
from replaykit.inspection.table import Column, Table, blocks, evenly
from replaykit.inspection.words import counted

__all__ = ["Plot", "Strip", "make_page", "write_page"]

Array = npt.NDArray[Any]

_MOST_BYTES: Final = 8 << 20
"""Of one key that are read for a plot."""
_MOST_VALUES: Final = 200_000
_MOST_POINTS: Final = 2_000
_MOST_ACTIONS: Final = 24
"""Numbers of an action that are shown, a plot each."""
_MOST_EPISODES: Final = 60
_MOST_KEYS: Final = 40
_ROWS_OF_CELL: Final = 32
_STRIPS: Final = 3
_HOLES: Final = "Where values are NaN"
_FRAMES: Final = 8


@dataclass(frozen=True)
class Plot:
    """A picture of the page: title, what it is made from, URL of the image."""

    title: str
    note: str
    url: str
    wide: bool = False


@dataclass(frozen=True)
class Strip:
    """Frames of an episode: key, words, URL, width, height."""

    key: str
    note: str
    url: str
    width: int
    height: int


def write_page(target: Path, facts: Facts, table: Table) -> None:
    """Writes the page, complete or not at all.

    Raises:
        OSError: it cannot be written, or would replace a file that is no page; names the file.
    """
    if target.exists() and target.suffix.lower() not in (".html", ".htm"):
        raise FileExistsError(
            errno.EEXIST,
            "expected a new file, or one that ends in .html, for the page; got one that is there",
            str(target),
        )
    text = make_page(facts, table)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, target)
    except OSError as error:
        raise OSError(
            error.errno, f"the page cannot be written: {error.strerror}", str(target)
        ) from None
    finally:
        draft.unlink(missing_ok=True)


def make_page(facts: Facts, table: Table) -> str:
    """Returns the page as HTML that asks for nothing: pictures are part of it.

    Of large data rows are read that lie evenly, and the page says how many. Memory: some tens of
    MiB; time: some seconds, whatever the size of the data.

    Args:
        facts: of what lies there.
        table: its rows, as `opened` gave it, still open.
    """
    plots = list(_plots(facts, table))
    none = None
    if not any(plot.title == _HOLES for plot in plots):
        count = len(_floats(table))
        none = f"{count} key{'s' * (count != 1)} of floating point" if count else None
    return page_of(facts, plots, none, list(_strips(table)))


def _plots(facts: Facts, table: Table) -> Iterator[Plot]:
    if facts.episodes is not None and len(facts.episodes):
        yield from _of_episodes(facts.episodes)
    for key in table.rewards:
        values, note = _values(table.columns[key])
        yield Plot(
            "Reward", f"{key}, {note}", svg_url(histogram(values, "reward"), width=4.6, height=2.9)
        )
    yield from _of_actions(table)
    if table.priorities is not None and len(table.priorities):
        shown = table.priorities
        note = _of(len(shown), table.prioritized, "row")
        yield Plot(
            "Priority", f"as they were set, {note}",
            svg_url(histogram(shown, "priority"), width=4.6, height=2.9),
        )  # fmt: skip
    found = _holes(table)
    if found is not None:
        shares, keys, episodes, note = found
        height = 1.3 + 0.22 * len(keys)
        yield Plot(
            _HOLES, note,
            svg_url(holes(shares, keys, episodes), width=9.4, height=height), wide=True,
        )  # fmt: skip


def _of_episodes(episodes: EpisodeFacts) -> Iterator[Plot]:
    at = evenly(np.arange(len(episodes)), _MOST_POINTS)
    ends = [episodes.ends[i] for i in at]
    note = _of(len(at), len(episodes), "episode")
    series = [("Return", "return", episodes.returns), ("Length", "rows", episodes.lengths)]
    for title, label, values in series:
        if values is None:
            continue
        yield Plot(
            f"{title} of each episode", note,
            svg_url(lines(at, values[at], label, ends), width=4.6, height=2.9),
        )  # fmt: skip
        yield Plot(
            f"{title}s", f"of {counted(len(episodes), 'episode')}",
            svg_url(histogram(values, label), width=4.6, height=2.9),
        )  # fmt: skip


def _of_actions(table: Table) -> Iterator[Plot]:
    for key in table.actions:
        column = table.columns[key]
        if column.dtype.kind not in "fiub":
            continue
        values, note = _values(column, flat=False)
        parts = values.reshape(len(values), -1)
        if parts.shape[1] == 0:
            continue
        shown = min(parts.shape[1], _MOST_ACTIONS)
        down, wide = grid_of(shown)[0], shown > 2
        more = f"; {shown} of {parts.shape[1]} numbers" if shown < parts.shape[1] else ""
        draw = small_histograms(
            parts[:, :shown].astype(np.float64), [f"[{number}]" for number in range(shown)]
        )
        yield Plot(
            "Action" if len(table.actions) == 1 else f"Action {key.rpartition('/')[2]}",
            f"{key}, {note}{more}",
            svg_url(draw, width=9.4 if wide else 4.6, height=0.35 + 1.35 * down if wide else 2.9),
            wide=wide,
        )


def _values(column: Column, *, flat: bool = True) -> tuple[Array, str]:
    """Returns values of a column for a plot, and of how many rows they are."""
    found = list(blocks(column, _MOST_BYTES))
    values = np.concatenate(found) if found else np.empty((0, *column.shape), column.dtype)
    width = max(1, int(np.prod(column.shape)))
    values = evenly(values, max(1, _MOST_VALUES // width))
    note = _of(len(values), column.rows, "row")
    return (values.reshape(-1) if flat else values), note


def _of(looked_at: int, total: int, noun: str) -> str:
    if looked_at < total:
        return f"{looked_at:,} of {total:,} {noun}s, taken evenly"
    return f"all {counted(total, noun)}"


def _floats(table: Table) -> list[str]:
    return [key for key, column in table.columns.items() if column.dtype.kind == "f"]


def _holes(table: Table) -> tuple[Array, list[str], list[int], str] | None:
    """Returns the share of NaN of keys in episodes; ``None`` where there is no NaN."""
    keys = _floats(table)
    if not keys or not table.episodes:
        return None
    episodes = evenly(np.arange(table.episodes), _MOST_EPISODES).tolist()
    shares = np.zeros((len(keys), len(episodes)))
    # Episode by episode: the files of a folder are opened once each.
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
    return shares[listed], [keys[row] for row in listed], episodes, note


def _strips(table: Table) -> Iterator[Strip]:
    episodes = evenly(np.arange(table.episodes), _STRIPS).tolist()
    for key in table.images():
        for episode in episodes:
            found = strip(table.columns[key], episode, _FRAMES)
            if found is not None:
                url, width, height = found
                yield Strip(key, f"episode {episode}, frames taken evenly", url, width, height)
