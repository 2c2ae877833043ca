"""``datasets`` and ``download``: which data sets there are, and having them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from replaykit.cli.output import Debug, Json, Output, plain, size
from replaykit.cli.policies import takes_policies
from replaykit.datasets.engine.nearest import meant
from replaykit.datasets.engine.policies import Policies

__all__ = ["datasets", "download"]

Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        help="Folder of converted data sets, instead of ~/.cache/replaykit/<family>.",
        show_default=False,
    ),
]


def families() -> dict[str, Any]:
    """Return the classes of the corpus families by the name of the family."""
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
    """List the families of data sets; of one family its ids, sizes, and those on this machine.

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
            own = "" if record["from"].startswith("the Hub") else ", or files of your own"
            note = f"{record['family']}:... any id; {record['from']}{own if ids else ''}"
            table.add_row(record["family"], Text(note, "dim"), "", "")
    output.console.print(table)


def _by_family(records: list[dict[str, Any]]) -> Table:
    """Make a table of a row for each family: ids, bytes known, those here, origin, an example."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("family", "ids", "here", "size", "from", "example"):
        is_count = name in ("ids", "here", "size")
        table.add_column(name, justify="right" if is_count else "left", no_wrap=is_count)
    for record in records:
        ids = record["datasets"]
        known = [each["bytes"] for each in ids if each["bytes"] is not None]
        count = f"{len(ids):,}{'+' * record['other_ids']}" if ids else "any"
        here = sum(each["path"] is not None for each in ids)
        example = ids[0]["name"] if ids else f"{record['family']}:<name of your own>"
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
    places = {kind.remote(each).place for each in kind.available_datasets[:1]}
    return next(iter(places), "files of your own")


def _record(kind: Any, family: str, dataset_id: str, root: Path | None) -> dict[str, Any]:
    from replaykit.datasets.manifest import MANIFEST_NAME

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


@takes_policies
def download(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="ID", help="A data set as family:id.")],
    root: Root = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Fetch and convert anew, then swap.", show_default=False),
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each converts a file.")] = 1,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="Another layout than the family's: a name, or module:NAME or file.py:NAME.",
            show_default=False,
        ),
    ] = None,
    *,
    policies: Policies,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be fetched, and fetch nothing."),
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch a data set, verify it, and convert it once.

    Whole files that were fetched stay in the cache of the Hub's client, or in that of plain
    downloads. One that was cut off goes on where it ended, if the server lets it; of a Hub's, one
    of more than 10 MiB.

    [bold]Examples[/bold]

      replaykit download robomimic:lift/ph/low_dim

      replaykit download minari:D4RL/door/human-v2 --root data

      replaykit download d4rl:hopper-medium-v2 --cast float64=float32 --repeated once

      replaykit download d4rl:hopper-medium-v2 --dry-run
    """
    from replaykit.datasets import load_dataset, plan
    from replaykit.inspection.layouts import layout_named

    output: Output = context.obj
    with redirect_stdout(sys.stderr):  # a layout of one's own may print
        rules = None if layout is None else layout_named(layout)
    if dry_run:
        _tell_plan(output, plan(name, root=root))
        return
    output.when_interrupted = (
        "what was fetched is kept, and the same command fetches the rest; a file of a Hub below "
        "10 MiB that was cut begins again; nothing was published"
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
    tell_dataset(output, published, name)


def _tell_plan(output: Output, found: Any) -> None:
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


def tell_dataset(
    output: Output,
    published: Any,
    name: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Says which data set is there now; ``more`` is for the JSON document alone."""
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
    output.tell_warnings()
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
