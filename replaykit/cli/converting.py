"""``convert``: H5 files to a data set of transitions."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from replaykit.cli.listing import tell_dataset
from replaykit.cli.output import Debug, Json, Output, plain

__all__ = ["convert"]


class Missing(str, Enum):
    """What is done with keys that some episodes lack."""

    layout = "layout"
    error = "error"
    drop = "drop"
    pad = "pad"


class Extra(str, Enum):
    """What is done with datasets that the layout has no place for."""

    drop = "drop"
    error = "error"


class Kept(str, Enum):
    """Whether columns of infos stay."""

    keep = "keep"
    drop = "drop"


class Unrecorded(str, Enum):
    """When the last step of an episode stays where the state after it was not recorded."""

    terminated = "terminated"
    drop = "drop"
    keep = "keep"


class Repeated(str, Enum):
    """How columns that repeat those of the following row are stored."""

    keep = "keep"
    once = "once"


class Copies(str, Enum):
    """What is done with episodes that are copies of earlier ones."""

    layout = "layout"
    keep = "keep"
    drop = "drop"
    error = "error"


class OnInvalid(str, Enum):
    """What is done with episodes that break a rule."""

    error = "error"
    skip = "skip"
    keep = "keep"


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
    cast: Annotated[
        list[str] | None,
        typer.Option("--cast", help="Store one dtype as another: float64=float32.", metavar="A=B"),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Keep only this key and what is below it.", metavar="KEY"),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="Leave out this key, such as next/info.", metavar="KEY"),
    ] = None,
    missing: Annotated[
        Missing, typer.Option(help="Keys that some episodes lack.")
    ] = Missing.layout,
    extra: Annotated[Extra, typer.Option(help="Datasets without a place.")] = Extra.drop,
    constant: Annotated[Kept, typer.Option(help="Infos that never change.")] = Kept.keep,
    all_nan: Annotated[Kept, typer.Option(help="Infos that are NaN throughout.")] = Kept.drop,
    duplicate: Annotated[Kept, typer.Option(help="Infos that repeat a column.")] = Kept.keep,
    repeated: Annotated[
        Repeated, typer.Option(help="Next observations: all, or what rows do not repeat.")
    ] = Repeated.keep,
    unrecorded: Annotated[
        Unrecorded, typer.Option(help="Last steps whose next state was not recorded.")
    ] = Unrecorded.terminated,
    copies: Annotated[
        Copies, typer.Option(help="Episodes that are copies of earlier ones.")
    ] = Copies.layout,
    on_invalid: Annotated[
        OnInvalid, typer.Option(help="Episodes that break a rule.")
    ] = OnInvalid.error,
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
    from replaykit.datasets import Policies
    from replaykit.datasets import convert as converted
    from replaykit.inspection.layouts import layout_named

    output: Output = context.obj
    policies = Policies(
        missing=missing.value,
        extra=extra.value,
        casts=_casts(cast or []),
        constant=constant.value,
        all_nan=all_nan.value,
        duplicate=duplicate.value,
        include=None if not include else [_key(each) for each in include],
        exclude=[_key(each) for each in exclude or []],
        repeated=repeated.value,
        unrecorded=unrecorded.value,
        copies=copies.value,
        on_invalid=on_invalid.value,
    )
    output.when_interrupted = (
        f"nothing was published at {to}, and what was there is as it was; the same command "
        "converts it"
    )
    guess: Any = _guessed(output, files) if layout is None else None
    name = str(guess.layout) if layout is None else layout
    with output.warnings():
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


def _casts(given: list[str]) -> dict[str, str]:
    casts = {}
    for each in given:
        source, equals, target = each.partition("=")
        if not equals:
            raise ValueError(f"expected --cast as float64=float32, got {each!r}")
        casts[source] = target
    return casts


def _key(text: str) -> tuple[str, ...]:
    return tuple(text.split("/"))


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
