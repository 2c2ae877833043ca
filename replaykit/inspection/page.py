"""An HTML page that shows the data at a path."""

from __future__ import annotations

import base64
import errno
import html
import io
import math
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from replaykit._version import __version__
from replaykit.inspection.facts import (
    Column,
    EpisodeFacts,
    Facts,
    KeyFacts,
    Table,
    blocks,
    counted,
    evenly,
)
from replaykit.inspection.plots import (
    grid_of,
    histogram,
    holes,
    lines,
    small_histograms,
    svg_url,
    variables,
)

__all__ = ["Plot", "Strip", "make_page", "page_of", "strip", "write_page"]

_MOST_WARNINGS: Final = 50
_MOST_OPEN: Final = 3
"""Longest list of warnings that is shown unfolded."""
_MOST_LISTED: Final = 25

_STYLE: Final = (
    variables()
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 56px}
header{margin-bottom:22px}
h1{font-size:25px;line-height:1.25;margin:6px 0 2px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:36px 0 12px;letter-spacing:-.005em}
h3{font-size:14px;margin:0 0 1px}
p{margin:0 0 8px}
.path{color:var(--faint);font:12.5px/1.4 ui-monospace,Menlo,Consolas,monospace;
overflow-wrap:anywhere}
.kind{display:inline-block;padding:2px 10px;border-radius:999px;background:var(--soft);
color:var(--accent);font-size:12px;font-weight:600}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.card,figure,.table,.box{background:var(--card);border:1px solid var(--line);border-radius:12px}
.card{padding:13px 16px}
.card b{display:block;font-size:22px;line-height:1.25;font-weight:650;
font-variant-numeric:tabular-nums;letter-spacing:-.01em}
.card span{color:var(--faint);font-size:12.5px}
.ends{display:flex;height:10px;border-radius:5px;overflow:hidden;margin:12px 0 8px;gap:2px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;color:var(--faint);font-size:13px}
.dot{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:6px}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,360px),1fr));gap:14px;
grid-auto-flow:dense}
figure{margin:0;min-width:0;padding:14px 14px 10px}
figure.wide{grid-column:1/-1}
figure.wide img{min-width:620px}
figure img{display:block;width:100%;height:auto;margin-top:8px}
figcaption{overflow-wrap:anywhere}
.note{color:var(--faint);font-size:12.5px;overflow-wrap:anywhere}
.after{margin-top:10px}
.box{padding:14px 16px}
.warn{background:var(--warn)}
summary{cursor:pointer;font-weight:600}summary+ul{margin-top:8px}
.warn li{margin:5px 0;overflow-wrap:anywhere}
.warn ul,.box ul{margin:0;padding-left:20px}
.table{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;text-align:right;white-space:nowrap;border-top:1px solid var(--line)}
th{color:var(--faint);font-weight:600;font-size:12px;border-top:0}
th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere;
min-width:170px}
th.text,td.text{text-align:left}
td.text{min-width:140px;white-space:normal;color:var(--faint);overflow-wrap:anywhere}
td code{font:12.5px ui-monospace,Menlo,Consolas,monospace}
td .note{display:block}
.bad{color:var(--bad);font-weight:600}
.zero{color:var(--faint)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 18px;margin:0;font-size:13.5px}
dt{color:var(--faint)}
dd{margin:0;overflow-wrap:anywhere}
.strips{display:grid;gap:14px;grid-template-columns:minmax(0,1fr)}
.film{overflow-x:auto}
.strips .film{margin-top:8px}
.strips img{width:auto;max-width:none;border-radius:6px;margin:0}
footer{margin-top:40px;color:var(--faint);font-size:12.5px}
@media (max-width:560px){main{padding:20px 12px 40px}h1{font-size:21px}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:8px}}
"""
)
_ENDS: Final = {
    "terminated": "warm",
    "truncated": "accent",
    "open": "grey",
    "cut": "violet",
}


def page_of(
    facts: Facts, plots: Sequence[Plot], hole_note: str | None, strips: Sequence[Strip]
) -> str:
    """Return the HTML text of the page.

    Args:
        facts: the information about the path.
        plots: the plots, in order.
        hole_note: a text that names the data in which no NaN was found; ``None`` otherwise.
        strips: frames of episodes.
    """
    name = facts.path.rstrip("/").rpartition("/")[2] or facts.path
    parts = [
        f'<header><span class="kind">{_text(facts.kind)}</span><h1>{_text(name)}</h1>'
        f'<div class="path">{_text(facts.path)}</div></header>',
        _cards(facts),
        _warnings(facts),
        _about(facts),
    ]
    if plots:
        parts.append(f'<h2>Plots</h2><div class="plots">{"".join(map(_plot, plots))}</div>')
    if hole_note:
        parts.append(
            f'<p class="note after" id="no-nan">No NaN was found in {_text(hole_note)}.</p>'
        )
    if strips:
        shown = "".join(_strip(each) for each in strips)
        parts.append(f'<h2>Images</h2><div class="strips">{shown}</div>')
    parts += [_keys(facts.keys), _episodes(facts)]
    parts.append(
        f"<footer>Made by replaykit {_text(__version__)}. Plots and table rows show all rows of "
        "the data, or a sample at even intervals if they say so.</footer>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{_text(name)} - replaykit</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _number(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def _cards(facts: Facts) -> str:
    cards = []
    if facts.rows is not None:
        cards.append((f"{facts.rows:,}", "rows"))
    ends = ""
    if facts.episodes is not None and len(facts.episodes):
        summary = facts.episodes.summary()
        lengths, returns = summary["lengths"], summary["returns"]
        number, noun = counted(summary["count"], "episode").split()
        cards.append((number, noun))
        cards.append((_number(lengths.median), f"rows, median ({_number(lengths.min)} to "
                      f"{_number(lengths.max)})"))  # fmt: skip
        if returns is not None:
            cards.append((_number(returns.mean), f"return, mean ({_number(returns.min)} to "
                          f"{_number(returns.max)})"))  # fmt: skip
        ends = _ends(summary["ends"], summary["count"])
    cards.append((_size(facts.nbytes), "on disk"))
    cards.append((str(len(facts.keys)), "keys"))
    shown = "".join(f'<div class="card"><b>{_text(a)}</b><span>{_text(b)}</span></div>'
                    for a, b in cards)  # fmt: skip
    return f'<div class="cards">{shown}</div>{ends}'


def _ends(counts: dict[str, int], total: int) -> str:
    bars, names = [], []
    for end, count in counts.items():
        colour = f"var(--{_ENDS.get(end, 'good')})"
        bars.append(f'<div style="flex:{count};background:{colour}"></div>')
        names.append(f'<span><i class="dot" style="background:{colour}"></i>{_text(end)}: '
                     f"{count:,} ({100 * count / total:.3g} %)</span>")  # fmt: skip
    return (
        f'<div class="ends">{"".join(bars)}</div><div class="legend">'
        f"<span>Why episodes end:</span>{''.join(names)}</div>"
    )


def _warnings(facts: Facts) -> str:
    if not facts.warnings:
        return ""
    shown = "".join(f"<li>{_text(text)}</li>" for text in facts.warnings[:_MOST_WARNINGS])
    more = len(facts.warnings) - _MOST_WARNINGS
    if more > 0:
        shown += f"<li>and {more} more</li>"
    count = len(facts.warnings)
    is_open = " open" if count <= _MOST_OPEN else ""
    return (
        f'<h2>Warnings</h2><details class="box warn"{is_open}><summary>{count:,} '
        f"warning{'s' * (count != 1)}</summary><ul>{shown}</ul></details>"
    )


def _about(facts: Facts) -> str:
    rows = [f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.about.items()]
    guess = facts.guess
    if guess is not None:
        reasons = "".join(f"<li>{_text(reason)}</li>" for reason in guess.reasons)
        if guess.layout is None:
            reasons = "".join(
                f"<li>not {_text(name)}: {_text(why)}</li>" for name, why in guess.refused.items()
            )
        rows.append(
            f"<dt>layout</dt><dd>{_text(guess.layout or 'none fits')}<ul>{reasons}</ul></dd>"
        )
    if not rows:
        return ""
    return f'<h2>About</h2><div class="box"><dl>{"".join(rows)}</dl></div>'


def _plot(plot: Plot) -> str:
    return (
        f"<figure{' class=wide' if plot.wide else ''}><figcaption><h3>{_text(plot.title)}</h3>"
        f'<div class="note">{_text(plot.note)}</div></figcaption>'
        f'<div class="film"><img alt="{_text(plot.title)}" src="{plot.url}"></div></figure>'
    )


def _strip(each: Strip) -> str:
    return (
        f"<figure><figcaption><h3>{_text(each.key)}</h3>"
        f'<div class="note">{_text(each.note)}</div></figcaption><div class="film">'
        f'<img alt="{_text(each.key)}" width="{each.width}" height="{each.height}" '
        f'src="{each.url}"></div></figure>'
    )


def _keys(keys: Sequence[KeyFacts]) -> str:
    if not keys:
        return ""
    names = ("key", "dtype", "shape", "rows", "min", "mean", "max", "std", "NaN")
    heads = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(_key(key) for key in keys)
    return (
        f'<h2>Keys</h2><div class="table"><table id="keys"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _key(key: KeyFacts) -> str:
    notes = [note for note in (key.source and f"from {key.source}", key.note) if note]
    found = key.statistics
    if found is not None and key.looked_at < key.rows:
        notes.append(f"statistics of {key.looked_at:,} rows, taken evenly")
    about = "".join(f'<span class="note">{_text(note)}</span>' for note in notes)
    shape = "×".join(map(str, key.shape)) or "-"
    cells = f"<td><code>{_text(key.key)}</code>{about}</td><td>{_text(key.dtype)}</td>"
    cells += f"<td>{shape}</td><td>{key.rows:,}</td>"
    if found is None:
        return f"<tr>{cells}{'<td>-</td>' * 5}</tr>"
    cells += "".join(
        f"<td>{_number(found.get(name))}</td>" for name in ("min", "mean", "max", "std")
    )
    style = "bad" if found["nan"] else "zero"
    return f'<tr>{cells}<td class="{style}">{found["nan"]:,}</td></tr>'


def _episodes(facts: Facts) -> str:
    episodes = facts.episodes
    if episodes is None or not len(episodes):
        return ""
    records = list(episodes.records(_MOST_LISTED))
    named = any(each["name"] for each in records)
    rows = []
    for place, each in enumerate(records):
        name = f'<td class="text">{_text(each["name"] or "")}</td>' if named else ""
        rows.append(
            f"<tr><td>{place}</td><td>{each['length']:,}</td><td>{_number(each['return'])}</td>"
            f"<td>{_text(each['end'])}</td>{name}</tr>"
        )
    where = '<th class="text">where</th>' if named else ""
    more = len(episodes) - _MOST_LISTED
    note = f'<p class="note">and {more:,} more</p>' if more > 0 else ""
    return (
        '<h2>Episodes</h2><div class="table"><table id="episodes"><thead><tr><th>episode</th>'
        f"<th>rows</th><th>return</th><th>end</th>{where}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


_HEIGHT: Final = 112
_GAP: Final = 3


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


Array = npt.NDArray[Any]

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
_HOLES: Final = "Where values are NaN"
_FRAMES: Final = 8


@dataclass(frozen=True)
class Plot:
    """A plot of the page, with a title, a note on the data, and the URL of the image."""

    title: str
    note: str
    url: str
    wide: bool = False


@dataclass(frozen=True)
class Strip:
    """Frames of an episode, with key, note, and the URL and size of the image."""

    key: str
    note: str
    url: str
    width: int
    height: int


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
        draft.write_text(text, encoding="utf-8")
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
    """Return values of a column for a plot, and a note on the number of rows."""
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
    """Return the share of NaN in each key and episode; ``None`` if there is no NaN."""
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
    return shares[listed], [keys[row] for row in listed], episodes, note


def _strips(table: Table) -> Iterator[Strip]:
    episodes = evenly(np.arange(table.episodes), _STRIPS).tolist()
    for key in table.images():
        for episode in episodes:
            found = strip(table.columns[key], episode, _FRAMES)
            if found is not None:
                url, width, height = found
                yield Strip(key, f"episode {episode}, frames taken evenly", url, width, height)
