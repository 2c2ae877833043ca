"""The page as HTML. Whatever comes from a file is escaped here, and nowhere else."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from replaykit._version import __version__
from replaykit.inspection.facts import Facts, KeyFacts
from replaykit.inspection.style import variables
from replaykit.inspection.words import counted

if TYPE_CHECKING:
    from replaykit.inspection.page import Plot, Strip

__all__ = ["page_of"]

_MOST_WARNINGS: Final = 50
_MOST_OPEN: Final = 3
"""Warnings up to which their list is unfolded."""
_MOST_EPISODES: Final = 25

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
    """Returns the whole page.

    Args:
        facts: what is known.
        plots: the pictures, in order.
        hole_note: what has no NaN, if anything was looked at and has none.
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
        f"<footer>Made by replaykit {_text(__version__)}. Where a plot or a row of the table says "
        "so, it is of rows that lie evenly in the data; else of all.</footer>"
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
    records = list(episodes.records(_MOST_EPISODES))
    named = any(each["name"] for each in records)
    rows = []
    for place, each in enumerate(records):
        name = f'<td class="text">{_text(each["name"] or "")}</td>' if named else ""
        rows.append(
            f"<tr><td>{place}</td><td>{each['length']:,}</td><td>{_number(each['return'])}</td>"
            f"<td>{_text(each['end'])}</td>{name}</tr>"
        )
    where = '<th class="text">where</th>' if named else ""
    more = len(episodes) - _MOST_EPISODES
    note = f'<p class="note">and {more:,} more</p>' if more > 0 else ""
    return (
        '<h2>Episodes</h2><div class="table"><table id="episodes"><thead><tr><th>episode</th>'
        f"<th>rows</th><th>return</th><th>end</th>{where}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )
