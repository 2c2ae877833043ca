"""Define the commands `datasets`, `download`, `convert`, `push` and `pull`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from replaykit.cli.output import Debug, Json, Output, plain, size, takes_policies
from replaykit.datasets.engine.policies import Policies, meant

__all__ = ["convert", "datasets", "download", "pull", "push"]

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


@takes_policies
def convert(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(
            help="H5 files, or folders of them; or https:// URLs.",
            metavar="FILES...",
            show_default=False,
        ),
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder of the result.", show_default=False)],
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            help="Layout of the files, or module:NAME or file.py:NAME of your own; "
            "guessed when it is not given.",
            show_default=False,
        ),
    ] = None,
    *,
    policies: Policies,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each a file at a time.")] = 1,
    force: Annotated[
        bool, typer.Option("--force", help="Convert anew, then swap.", show_default=False)
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert H5 files into a data set of transitions, complete or not at all.

    Without --layout the layout that fits is taken, and why is said.

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
        f"nothing was published at {to}, and what was there is as it was; the same command goes on "
        "with what it had not finished"
    )
    guess: Any = _guessed(output, files) if layout is None else None
    name = str(guess.layout) if layout is None else layout
    # A layout of one's own may print: stdout is for what the command itself says.
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
    tell_dataset(output, data.published, more={"guess": said})


def _guessed(output: Output, files: list[str]) -> Any:
    from replaykit.datasets.converting import paths_of
    from replaykit.inspection.layouts import TIE, guess_layout, known_layouts

    found = paths_of(files)
    guess = guess_layout(found)
    if guess.layout is None:
        raise ValueError(
            f"no layout fits {found[0]}: give one with --layout (one of "
            f"{', '.join(known_layouts())}, or one of your own); replaykit inspect {found[0]} "
            "says why each of them does not"
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
        help="Of the Hub, best given as HF_TOKEN; by default that of `hf auth login`.",
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
            help="As the Hub abbreviates it, such as cc-by-4.0; by default that of the source.",
            show_default=False,
        ),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="A tag of the card; may come again.")
    ] = None,
    private: Annotated[
        bool,
        typer.Option("--private", help="Make a new repository private.", show_default=False),
    ] = False,
    branch: Annotated[
        str | None, typer.Option("--branch", help="Instead of main.", show_default=False)
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", help="Of the commit.", show_default=False)
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
        "nothing was committed; the same command uploads only what is not there yet"
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
    output.tell_warnings()
    output.console.print(Text.assemble(("pushed: ", "bold green"), plain(url)), soft_wrap=True)


def pull(
    context: typer.Context,
    repo: Annotated[str, typer.Argument(help="owner/name on the Hub.", show_default=False)],
    revision: Annotated[
        str | None,
        typer.Option("--revision", help="Branch, tag or commit; main.", show_default=False),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            "--root",
            help="Folder of pulled data sets, instead of ~/.cache/replaykit/pulled.",
            show_default=False,
        ),
    ] = None,
    token: Token = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch a data set that was pushed to a Hub, at one commit, and verify every file.

    [bold]Examples[/bold]

      replaykit pull me/lift

      replaykit pull lab/arm --revision v2 --root data
    """
    from replaykit.datasets import pull as pulled

    output: Output = context.obj
    output.when_interrupted = (
        "whole files that were fetched are kept, and the same command fetches the others; one of "
        "more than 10 MiB that was cut goes on where it ended; nothing was published"
    )
    with output.warnings():
        data = pulled(
            repo, revision=revision, root=root, progress=output.shows_progress, token=token
        )
    tell_dataset(output, data.published, repo)
