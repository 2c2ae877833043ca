"""``datasets`` and ``download``: which data sets there are, and having them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from replaykit.cli.known_sizes import KNOWN_SIZES
from replaykit.cli.output import Debug, Json, Output, plain, size

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
    """Returns the classes of the corpus families by the name of the family."""
    import replaykit.datasets as package
    from replaykit.datasets import BaseDatasetExperienceReplay

    found = (getattr(package, name) for name in package.__all__)
    return {
        thing.corpus: thing
        for thing in found
        if isinstance(thing, type)
        and issubclass(thing, BaseDatasetExperienceReplay)
        and hasattr(thing, "corpus")
    }


def datasets(
    context: typer.Context,
    family: Annotated[
        str | None, typer.Argument(help="Only the ids of this family.", show_default=False)
    ] = None,
    root: Root = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the families of data sets, their ids, and which of them are on this machine.

    [bold]Examples[/bold]

      replaykit datasets

      replaykit datasets robomimic
    """
    output: Output = context.obj
    known = families()
    if family is not None and family not in known:
        raise ValueError(f"expected a family as one of {sorted(known)}, got {family!r}")
    records = []
    for name in sorted(known) if family is None else [family]:
        kind = known[name]
        ids = [*kind.available_datasets]
        ids += [each for each in KNOWN_SIZES.get(name, {}) if each not in ids]
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
    table = Table("family", "id", "size", "here", box=None, pad_edge=False, header_style="bold")
    for record in records:
        for each in record["datasets"]:
            about = "-" if each["bytes"] is None else size(each["bytes"])
            here = Text("yes", "green") if each["path"] else Text("")
            table.add_row(record["family"], f"{record['family']}:{each['id']}", about, here)
        if record["other_ids"]:
            note = f"{record['family']}:... any id; {record['from']}"
            table.add_row(record["family"], Text(note, "dim"), "", "")
    output.console.print(table)


def _origin(kind: Any) -> str:
    where = getattr(kind, "repository", None) or getattr(kind, "owner", None)
    return f"the Hub, {where}" if where else "files of your own"


def _record(kind: Any, family: str, dataset_id: str, root: Path | None) -> dict[str, Any]:
    from replaykit.datasets.manifest import MANIFEST_NAME

    home = Path.home() / ".cache" / "replaykit" / kind.corpus if root is None else root
    path = home / dataset_id
    is_here = (path / MANIFEST_NAME).is_file()
    return {
        "id": dataset_id,
        "name": f"{family}:{dataset_id}",
        "bytes": KNOWN_SIZES.get(family, {}).get(dataset_id),
        "path": str(path) if is_here else None,
    }


def download(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="ID", help="A data set as family:id.")],
    root: Root = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Fetch and convert anew, then swap.", show_default=False),
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch a data set, verify it, and convert it once.

    What was fetched stays in the cache of the Hub's client, so that a download that was cut off
    goes on where it was.

    [bold]Examples[/bold]

      replaykit download robomimic:lift/ph/low_dim

      replaykit download minari:D4RL/door/human-v2 --root data
    """
    from replaykit.datasets import load_dataset

    output: Output = context.obj
    output.when_interrupted = (
        "what was fetched is kept, and the same command goes on from there; nothing was published"
    )
    with output.warnings():
        data = load_dataset(name, 1, root=root, download="force" if force else True)
    published = data.published
    tell_dataset(output, published, name)


def tell_dataset(output: Output, published: Any, name: str | None = None) -> None:
    """Says which data set is there now."""
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
