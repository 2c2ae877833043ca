"""The commands for data sets of corpora, and for inspection and validation of paths."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from replaykit.cli.output import Debug, Json, Output, add_policy_options, plain, size
from replaykit.datasets.engine.policies import Policies, meant

__all__ = ["convert", "datasets", "download", "inspect", "pull", "push", "validate"]


Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        help="Folder of converted data sets; default ~/.cache/replaykit/<family>.",
        show_default=False,
    ),
]


def families() -> dict[str, Any]:
    """Return the corpus classes by family name, sorted."""
    from replaykit.datasets.families import catalogue

    return dict(sorted(catalogue.families().items()))


def datasets(
    context: typer.Context,
    family: Annotated[
        str | None, typer.Argument(help="Only the ids of this family.", show_default=False)
    ] = None,
    root: Root = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the families of data sets, or the ids, sizes and local copies of one family.

    [bold]Examples[/bold]

      replaykit datasets

      replaykit datasets robomimic
    """
    output: Output = context.obj
    known = families()
    if family is not None and family not in known:
        near = meant(family, known)
        raise ValueError(f"expected a family as one of {sorted(known)}, got {family!r}{near}")
    records = []
    for name in sorted(known) if family is None else [family]:
        kind = known[name]
        ids = [*kind.available_datasets]
        records.append(
            {
                "family": name,
                "class": kind.__name__,
                "from": _origin(kind),
                "other_ids": bool(kind.any_id),
                "datasets": [_record(kind, name, each, root) for each in ids],
            }
        )
    if output.as_json:
        output.document({"families": records})
        return
    if family is None:
        output.console.print(_by_family(records))
        output.console.print(Text("replaykit datasets FAMILY lists the ids of one", "dim"))
        return
    table = Table("family", "id", "size", "here", box=None, pad_edge=False, header_style="bold")
    for record in records:
        for each in record["datasets"]:
            about = "-" if each["bytes"] is None else size(each["bytes"])
            here = Text("yes", "green") if each["path"] else Text("")
            table.add_row(record["family"], f"{record['family']}:{each['id']}", about, here)
        if record["other_ids"]:
            own = "" if record["from"].startswith("the Hub") else ", or your own files"
            note = f"{record['family']}:... any id; {record['from']}{own if ids else ''}"
            table.add_row(record["family"], Text(note, "dim"), "", "")
    output.console.print(table)


def _by_family(records: list[dict[str, Any]]) -> Table:
    """Return a table with one row for each family."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("family", "ids", "here", "size", "from", "example"):
        is_count = name in ("ids", "here", "size")
        table.add_column(name, justify="right" if is_count else "left", no_wrap=is_count)
    for record in records:
        ids = record["datasets"]
        known = [each["bytes"] for each in ids if each["bytes"] is not None]
        count = f"{len(ids):,}{'+' * record['other_ids']}" if ids else "any"
        here = sum(each["path"] is not None for each in ids)
        example = ids[0]["name"] if ids else f"{record['family']}:<your name>"
        table.add_row(
            record["family"],
            count,
            Text(f"{here:,}" if here else "-", "green" if here else "dim"),
            size(sum(known)) if known and len(known) == len(ids) else "-",
            Text(plain(record["from"])),
            Text(example, "dim"),
        )
    return table


def _origin(kind: Any) -> str:
    where = getattr(kind, "repository", None) or getattr(kind, "owner", None)
    if where:
        return f"the Hub, {where}"
    places = {kind.remote(each).location for each in kind.available_datasets[:1]}
    return next(iter(places), "your own files")


def _record(kind: Any, family: str, dataset_id: str, root: Path | None) -> dict[str, Any]:
    from replaykit.datasets.dataset_manifest import MANIFEST_NAME

    home = Path.home() / ".cache" / "replaykit" / kind.corpus if root is None else root
    path = home / dataset_id
    remote = kind.remote(dataset_id)
    is_here = (path / MANIFEST_NAME).is_file()
    return {
        "id": dataset_id,
        "name": f"{family}:{dataset_id}",
        "bytes": None if remote is None else remote.known_bytes,
        "path": str(path) if is_here else None,
    }


@add_policy_options
def download(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="ID", help="A data set as family:id.")],
    root: Root = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Fetch and convert again, then replace the old copy.",
            show_default=False,
        ),
    ] = False,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that convert, one file at a time each.")
    ] = 1,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="Layout of the files: a name, module:NAME or file.py:NAME; default the family's.",
            show_default=False,
        ),
    ] = None,
    *,
    policies: Policies,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="List the files to fetch, without fetching them."),
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch a data set, verify it, and convert it once.

    Complete files stay in the cache of the Hub's client or of web downloads. A repeated command
    continues an interrupted file if the server allows it. A file of a Hub continues only if it has
    more than 10 MiB.

    [bold]Examples[/bold]

      replaykit download robomimic:lift/ph/low_dim

      replaykit download minari:D4RL/door/human-v2 --root data

      replaykit download d4rl:hopper-medium-v2 --cast float64=float32 --repeated once

      replaykit download d4rl:hopper-medium-v2 --dry-run
    """
    from replaykit.datasets import load_dataset, plan
    from replaykit.inspection.layouts import layout_named

    output: Output = context.obj
    with redirect_stdout(sys.stderr):  # the module of a custom layout may print
        rules = None if layout is None else layout_named(layout)
    if dry_run:
        _print_plan(output, plan(name, root=root))
        return
    output.when_interrupted = (
        "fetched files are kept, and the same command fetches the rest; an interrupted file of a "
        "Hub below 10 MiB begins again; nothing was published"
    )
    with output.warnings():
        data = load_dataset(
            name,
            1,
            root=root,
            download="force" if force else True,
            policies=policies,
            layout=rules,
            workers=workers,
        )
    published = data.published
    print_dataset(output, published, name)


def _print_plan(output: Output, found: Any) -> None:
    record = {
        "name": found.name,
        "origin": dict(found.origin),
        "files": [
            {"name": file.name, "bytes": file.size, "is_cached": file.is_cached}
            for file in found.files
        ],
        "bytes": found.nbytes,
        "missing_bytes": found.missing_bytes,
        "free_bytes": found.free_bytes,
        "cache": str(found.cache),
        "path": str(found.target),
        "is_converted": found.is_converted,
    }
    if output.as_json:
        output.document(record)
        return
    table = Table("file", "size", "here", box=None, pad_edge=False, header_style="bold")
    for file in found.files:
        about = "-" if file.size is None else size(file.size)
        table.add_row(Text(plain(file.name)), about, Text("yes" if file.is_cached else "", "green"))
    output.console.print(table)
    ending = "is there already" if found.is_converted else "would be made"
    output.console.print(
        Text(
            plain(
                f"{size(found.missing_bytes)} of {size(found.nbytes)} would be fetched to "
                f"{found.cache} ({size(found.free_bytes)} free); {found.target} {ending}"
            )
        ),
        soft_wrap=True,
    )


def print_dataset(
    output: Output,
    published: Any,
    name: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Print a summary of a published data set. ``more`` is for JSON output only."""
    manifest = published.manifest
    record = {
        "name": name,
        "path": str(published.path),
        "layout": manifest.converter["name"],
        "rows": int(published.episodes["length"].sum()),
        "episodes": manifest.episodes,
        "bytes": sum(nbytes for _, nbytes, _ in manifest.files()),
        "content": manifest.content_id(),
        "warnings": output.warned,
        **(more or {}),
    }
    if output.as_json:
        output.document(record)
        return
    output.print_warnings()
    output.console.print(
        Text(
            plain(
                f"{record['path']}: {record['rows']:,} rows in {record['episodes']:,} "
                f"episode{'s' * (record['episodes'] != 1)}, {size(record['bytes'])}, "
                f"layout {record['layout']}"
            )
        ),
        soft_wrap=True,
    )


@add_policy_options
def convert(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            help="H5 files, folders of H5 files, or https:// URLs.",
            metavar="FILES...",
            show_default=False,
        ),
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder of the result.", show_default=False)],
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="Layout of the files: a name, or a custom one as module:NAME or file.py:NAME; "
            "guessed if not given.",
            show_default=False,
        ),
    ] = None,
    *,
    policies: Policies,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of processes; each converts one file after another.")
    ] = 1,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Convert again, then replace the old data set.", show_default=False
        ),
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert H5 files into a data set of transitions, completely or not at all.

    Without --layout, the command uses the layout that fits, and prints the reasons.

    [bold]Examples[/bold]

      replaykit convert demo.hdf5 --layout robomimic --to data/lift

      replaykit convert episodes/ --to data/aloha --cast float64=float32 --workers 4

      replaykit convert https://example.org/hopper.hdf5 --layout d4rl --to data/hopper

      replaykit convert run.h5 --layout my_layouts.py:ARM --to data/arm --on-invalid skip
    """
    from replaykit.datasets import convert as converted
    from replaykit.inspection.layouts import layout_named

    output: Output = context.obj
    output.when_interrupted = (
        f"nothing was published at {to}, and nothing there was changed; the same command "
        "continues the conversion"
    )
    guess: Any = _guessed(output, files) if layout is None else None
    name = str(guess.layout) if layout is None else layout
    # A custom layout may print, but stdout is reserved for the output of the command.
    with output.warnings(), redirect_stdout(sys.stderr):
        data = converted(
            files,
            layout_named(name),
            to,
            policies=policies,
            workers=workers,
            force=force,
            progress=output.shows_progress,
        )
    said = None if guess is None else {"layout": guess.layout, "reasons": guess.reasons}
    print_dataset(output, data.published, more={"guess": said})


def _guessed(output: Output, files: list[str]) -> Any:
    from replaykit.datasets.converting import paths_of
    from replaykit.inspection.layouts import TIE, guess_layout, known_layouts

    found = paths_of(files)
    guess = guess_layout(found)
    if guess.layout is None:
        raise ValueError(
            f"no layout fits {found[0]}: give one with --layout (one of "
            f"{', '.join(known_layouts())}, or a custom one); replaykit inspect {found[0]} "
            "gives the reason for each of them"
        )
    if not output.as_json:
        tied = [reason for reason in guess.reasons[3:] if reason.startswith(TIE)]
        why = "; ".join([*guess.reasons[:3], *tied])
        output.stderr.print(
            Text.assemble(("layout ", "bold"), (guess.layout, "bold green"), plain(f": {why}")),
            soft_wrap=True,
        )
    return guess


Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="HF_TOKEN",
        help="Token of the Hub; better set HF_TOKEN; default the token of `hf auth login`.",
        show_default=False,
    ),
]


def push(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="A converted data set.", show_default=False)],
    repo: Annotated[str, typer.Argument(help="owner/name on the Hub.", show_default=False)],
    license: Annotated[
        str | None,
        typer.Option(
            "--license",
            help="License in the Hub's notation, such as cc-by-4.0; default the source's license.",
            show_default=False,
        ),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="A tag of the card; may be repeated.")
    ] = None,
    private: Annotated[
        bool,
        typer.Option("--private", help="Make a new repository private.", show_default=False),
    ] = False,
    branch: Annotated[
        str | None, typer.Option("--branch", help="Branch; default main.", show_default=False)
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", help="Commit message.", show_default=False)
    ] = None,
    token: Token = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a data set and upload it to a Hub, with a card, in one commit.

    [bold]Examples[/bold]

      replaykit push data/lift me/lift --license mit

      replaykit push data/arm lab/arm --license cc-by-4.0 --tag robotics --private
    """
    from replaykit.datasets import push as pushed

    output: Output = context.obj
    output.when_interrupted = (
        "nothing was committed; the same command uploads only the missing files"
    )
    with output.warnings(), output.working("pushing"):
        url = pushed(
            path,
            repo,
            license=license,
            tags=tag or [],
            private=private,
            revision=branch,
            token=token,
            message=message,
        )
    if output.as_json:
        output.document({"path": str(path), "repository": repo, "url": url})
        return
    output.print_warnings()
    output.console.print(Text.assemble(("pushed: ", "bold green"), plain(url)), soft_wrap=True)


def pull(
    context: typer.Context,
    repo: Annotated[str, typer.Argument(help="owner/name on the Hub.", show_default=False)],
    revision: Annotated[
        str | None,
        typer.Option("--revision", help="Branch, tag or commit; default main.", show_default=False),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            "--root",
            help="Folder of pulled data sets; default ~/.cache/replaykit/pulled.",
            show_default=False,
        ),
    ] = None,
    token: Token = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch a pushed data set from a Hub, at one commit, and verify every file.

    [bold]Examples[/bold]

      replaykit pull me/lift

      replaykit pull lab/arm --revision v2 --root data
    """
    from replaykit.datasets import pull as pulled

    output: Output = context.obj
    output.when_interrupted = (
        "complete files are kept, and the same command fetches the others; an interrupted file of "
        "more than 10 MiB continues where it ended; nothing was published"
    )
    with output.warnings():
        data = pulled(
            repo, revision=revision, root=root, progress=output.shows_progress, token=token
        )
    print_dataset(output, data.published, repo)


def inspect(
    context: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(
            help="A data set, a checkpoint, a buffer's folder, an H5 file or a folder of H5 files.",
            show_default=False,
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write an HTML page with plots to this file.", show_default=False
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", help="Layout of H5 files; default a guess.", show_default=False),
    ] = None,
    episodes: Annotated[int, typer.Option(min=0, help="Number of episodes to list.")] = 10,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Compute statistics over all rows, also of large data.",
            show_default=False,
        ),
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a path's keys, shapes, dtypes, statistics, episodes and warnings.

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
    _print(output, facts, episodes)
    if html is not None:
        output.console.print(Text(f"page: {plain(html)}", "bold green"), soft_wrap=True)


def _print(output: Output, facts: Any, episodes: int) -> None:
    console = output.console
    rows = "" if facts.rows is None else f", {facts.rows:,} rows"
    console.print(
        Text.assemble((plain(facts.path), "bold"), f": {facts.kind}{rows}, {size(facts.nbytes)}"),
        soft_wrap=True,
    )
    for name, value in facts.about.items():
        console.print(Text.assemble((f"  {name}: ", "dim"), plain(value)), soft_wrap=True)
    if facts.guess is not None:
        _print_guess(console, facts.guess)
    if facts.keys:
        console.print()
        console.print(_keys(facts.keys))
    if facts.episodes is not None:
        console.print()
        _print_episodes(console, facts.episodes, episodes)
    for text in facts.warnings:
        console.print(Text.assemble(("warning: ", "bold yellow"), plain(text)), soft_wrap=True)


def _print_guess(console: Any, guess: Any) -> None:
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
    """Return a number as text with four significant digits."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return f"{value:.4g}"


def _print_episodes(console: Any, episodes: Any, most: int) -> None:
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
    """Verify all checksums, and check that the files agree. Errors give exit code 1.

    Of a data set, the command checks sizes, checksums, ids, returns, and the episode table against
    the flags. It also checks that each row's next observation is the observation of the next row.
    Of a checkpoint, it checks every file of every version. Of a buffer made with recover=True, it
    checks the files and the committed state.

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
