"""The policies of a conversion as options of a command."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from replaykit.datasets import Policies

__all__ = [
    "AllNan",
    "Cast",
    "Constant",
    "Copies",
    "CopiesOf",
    "Duplicate",
    "Exclude",
    "Extra",
    "ExtraKeys",
    "Include",
    "Invalid",
    "Kept",
    "Missing",
    "MissingKeys",
    "OnInvalid",
    "Repeated",
    "RepeatedKeys",
    "Strict",
    "Unrecorded",
    "UnrecordedEnds",
    "policies_of",
]


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


Cast = Annotated[
    list[str] | None,
    typer.Option("--cast", help="Store one dtype as another: float64=float32.", metavar="A=B"),
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", help="Keep only this key and what is below it.", metavar="KEY"),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", help="Leave out this key, such as next/info.", metavar="KEY"),
]
MissingKeys = Annotated[Missing, typer.Option("--missing", help="Keys that some episodes lack.")]
ExtraKeys = Annotated[Extra, typer.Option("--extra", help="Datasets without a place.")]
Constant = Annotated[Kept, typer.Option("--constant", help="Infos that never change.")]
AllNan = Annotated[Kept, typer.Option("--all-nan", help="Infos that are NaN throughout.")]
Duplicate = Annotated[Kept, typer.Option("--duplicate", help="Infos that repeat a column.")]
RepeatedKeys = Annotated[
    Repeated,
    typer.Option("--repeated", help="Next observations: all, or what rows do not repeat."),
]
UnrecordedEnds = Annotated[
    Unrecorded,
    typer.Option("--unrecorded", help="Last steps whose next state was not recorded."),
]
CopiesOf = Annotated[
    Copies, typer.Option("--copies", help="Episodes that are copies of earlier ones.")
]
Invalid = Annotated[OnInvalid, typer.Option("--on-invalid", help="Episodes that break a rule.")]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Refuse whatever would be a warning.", show_default=False),
]


def policies_of(
    cast: list[str] | None,
    include: list[str] | None,
    exclude: list[str] | None,
    missing: Missing,
    extra: Extra,
    constant: Kept,
    all_nan: Kept,
    duplicate: Kept,
    repeated: Repeated,
    unrecorded: Unrecorded,
    copies: Copies,
    on_invalid: OnInvalid,
    strict: bool,
) -> Policies:
    """Returns the policies that the options say.

    Raises:
        ValueError: an option says what there is not.
    """
    from replaykit.datasets import Policies

    return Policies(
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
        strict=strict,
    )


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
