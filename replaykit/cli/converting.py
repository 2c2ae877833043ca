"""``convert``: H5 files to a data set of transitions."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from replaykit.cli.listing import tell_dataset
from replaykit.cli.output import Debug, Json, Output, plain
from replaykit.cli.policies import takes_policies
from replaykit.datasets.engine.policies import Policies

__all__ = ["convert"]


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
