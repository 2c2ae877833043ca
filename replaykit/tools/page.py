"""An HTML page that shows the data at a path."""

from __future__ import annotations

import base64
import errno
import io
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit._version import __version__
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
from replaykit.tools.plots import (
    grid_of,
    histogram,
    holes,
    lines,
    small_histograms,
    svg_url,
    variables,
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
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(draft, target)
    except OSError as error:
        raise OSError(
            error.errno, f"the page cannot be written: {error.strerror}", str(target)
        ) from None
    finally:
        draft.unlink(missing_ok=True)


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
        yield _plot("Reward", f"{key}, {note}", histogram(values.reshape(-1), "reward"))
    yield from _of_actions(table)
    if table.priorities is not None and len(table.priorities):
        note = _of(len(table.priorities), table.prioritized, "row")
        draw = histogram(table.priorities, "priority")
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
            draw = lines(at, values[at], label, ends)
            yield _plot(f"{title} of each episode", note, draw)
            yield _plot(f"{title}s", all_of_them, histogram(values, label))


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
            small_histograms(
                parts[:, :shown].astype(np.float64), [f"[{place}]" for place in range(shown)]
            ),
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
    draw = holes(shares[listed], [keys[row] for row in listed], episodes)
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
