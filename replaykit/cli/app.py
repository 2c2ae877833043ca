"""The command as typer knows it: one file for each group of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from replaykit._version import __version__
from replaykit.cli import converting, inspecting, listing, sharing

__all__ = ["app"]

app = typer.Typer(
    name="replaykit",
    help=(
        "Data sets and replay buffers on disk: fetch, convert, look into, check and share them.\n\n"
        "Exit codes: 0 done, 1 validate found something wrong, 2 a wrong option, 3 data that is "
        "refused, 4 something is not there, 5 the network, 6 the system, 130 interrupted."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"replaykit {__version__}")
        raise typer.Exit


@app.callback()
def _replaykit(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and end.",
            callback=_version,
            is_eager=True,
            show_default=False,
        ),
    ] = False,
) -> None:
    """Takes the options that come before the command."""


app.command("datasets")(listing.datasets)
app.command("download")(listing.download)
app.command("convert")(converting.convert)
app.command("inspect")(inspecting.inspect)
app.command("validate")(inspecting.validate)
app.command("push")(sharing.push)
app.command("pull")(sharing.pull)
