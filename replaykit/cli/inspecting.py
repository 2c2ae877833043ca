"""``inspect`` and ``validate``: what lies at a path, and whether it is right."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from replaykit.cli.output import Debug, Json, Output, plain, size

__all__ = ["inspect", "validate"]


def inspect(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(
            help="A data set, a checkpoint, a buffer's folder, an H5 file, or a folder of them.",
            show_default=False,
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page with plots to this file.", show_default=False),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", help="Layout of H5 files, instead of a guess.", show_default=False
        ),
    ] = None,
    episodes: Annotated[int, typer.Option(min=0, help="How many episodes to list.")] = 10,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Take statistics of all rows, however many there are.",
            show_default=False,
        ),
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what lies at a path: keys, shapes, dtypes, statistics, episodes, returns, warnings.

    [bold]Examples[/bold]

      replaykit inspect demo.hdf5

      replaykit inspect data/lift --html lift.html

      replaykit inspect checkpoint --json
    """
    from replaykit.inspection.validation import MOST_BYTES, opened

    output: Output = context.obj
    output.when_interrupted = "nothing was changed, and no page was written"
    most = None if exact else MOST_BYTES
    with (
        output.warnings(),
        output.working("reading"),
        opened(path, layout=layout, most_bytes=most) as (facts, table),
    ):
        if html is not None:
            from replaykit.inspection.page import write_page

            write_page(html, facts, table)
    if output.as_json:
        record = facts.to_json(episodes=episodes)
        output.document({**record, "html": None if html is None else str(html)})
        return
    _tell(output, facts, episodes)
    if html is not None:
        output.console.print(Text(f"page: {plain(html)}", "bold green"), soft_wrap=True)


def _tell(output: Output, facts: Any, episodes: int) -> None:
    console = output.console
    rows = "" if facts.rows is None else f", {facts.rows:,} rows"
    console.print(
        Text.assemble((plain(facts.path), "bold"), f": {facts.kind}{rows}, {size(facts.nbytes)}"),
        soft_wrap=True,
    )
    for name, value in facts.about.items():
        console.print(Text.assemble((f"  {name}: ", "dim"), plain(value)), soft_wrap=True)
    if facts.guess is not None:
        _tell_guess(console, facts.guess)
    if facts.keys:
        console.print()
        console.print(_keys(facts.keys))
    if facts.episodes is not None:
        console.print()
        _tell_episodes(console, facts.episodes, episodes)
    for text in facts.warnings:
        console.print(Text.assemble(("warning: ", "bold yellow"), plain(text)), soft_wrap=True)


def _tell_guess(console: Any, guess: Any) -> None:
    name = guess.layout or "none fits"
    console.print(Text.assemble(("  layout: ", "dim"), (name, "bold green")))
    for reason in guess.reasons:
        console.print(Text(f"    {plain(reason)}", "dim"), soft_wrap=True)
    if guess.layout is None:
        for other, why in guess.refused.items():
            console.print(Text(f"    not {other}: {plain(why)}", "dim"), soft_wrap=True)


def _keys(keys: Any) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", overflow="fold")
    table.add_column("dtype")
    for name in ("shape", "rows", "min", "mean", "max", "std", "NaN"):
        table.add_column(name, justify="right")
    for key in keys:
        shape = "x".join(map(str, key.shape)) or "-"
        found = key.statistics
        if found is None:
            note = Text(plain(key.note or ""), "dim")
            table.add_row(plain(key.key), key.dtype, shape, f"{key.rows:,}", note)
            continue
        sampled = key.looked_at < key.rows
        numbers = [number(found.get(name)) for name in ("min", "mean", "max", "std")]
        nan = Text(f"{found['nan']:,}", "red" if found["nan"] else "dim")
        name = f"{key.key} (of {key.looked_at:,} rows)" if sampled else key.key
        table.add_row(plain(name), key.dtype, shape, f"{key.rows:,}", *numbers, nan)
    return table


def number(value: Any) -> str:
    """Returns a number for people: four digits that count."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"{value:.4g}"


def _tell_episodes(console: Any, episodes: Any, most: int) -> None:
    from replaykit.inspection.facts import counted

    summary = episodes.summary()
    ends = ", ".join(f"{count:,} {end}" for end, count in summary["ends"].items())
    console.print(Text.assemble((counted(summary["count"], "episode"), "bold"), f": {ends}"))
    spreads = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "min", "median", "mean", "max", "sum"):
        spreads.add_column(name, justify="left" if not name else "right")
    for name in ("lengths", "returns"):
        spread = summary[name]
        if spread is not None:
            values = (spread.min, spread.median, spread.mean, spread.max, spread.total)
            spreads.add_row(name, *(number(value) for value in values))
    console.print(spreads)
    records = episodes.records(most)
    if not records:
        return
    table = Table("episode", "rows", "return", "end", "where", box=None, pad_edge=False)
    for place, record in enumerate(records):
        table.add_row(
            str(place),
            f"{record['length']:,}",
            number(record["return"]),
            record["end"],
            Text(plain(record["name"] or ""), "dim"),
        )
    console.print(table)
    if len(episodes) > most:
        console.print(Text(f"... {len(episodes) - most:,} more", "dim"))


def validate(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(help="A data set, a checkpoint, or a buffer's folder.", show_default=False),
    ],
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Check every checksum, and what the files say together; exit code 1 if something is wrong.

    Of a data set: sizes, checksums, the episode table against the flags, ids, returns, and that
    what a row arrives at is what the next one begins with. Of a checkpoint: every version, every
    file. Of a buffer made with recover=True: its files and committed state.

    [bold]Examples[/bold]

      replaykit validate data/lift

      replaykit validate checkpoint --json
    """
    from replaykit.inspection.validation import validate as validated

    output: Output = context.obj
    with output.warnings(), output.progress("checking") as advance:
        findings = validated(path, advance)
    wrong = [found for found in findings if not found.ok and not found.is_warning]
    if output.as_json:
        output.document({"path": str(path), "ok": not wrong, "findings": findings})
        return 1 if wrong else 0
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("")
    table.add_column("")
    table.add_column("", overflow="fold")
    for found in findings:
        mark = Text("ok", "green")
        if not found.ok:
            mark = Text("warning", "yellow") if found.is_warning else Text("wrong", "bold red")
        table.add_row(mark, found.check, plain(found.text))
    output.console.print(table)
    verdict = f"{len(wrong)} wrong" if wrong else "all right"
    colour = "bold red" if wrong else "bold green"
    output.console.print(Text.assemble(f"{plain(path)}: ", (verdict, colour)), soft_wrap=True)
    return 1 if wrong else 0
