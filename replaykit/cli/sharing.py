"""``push`` and ``pull``: data sets on a Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from replaykit.cli.listing import tell_dataset
from replaykit.cli.output import Debug, Json, Output, plain

__all__ = ["pull", "push"]

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
