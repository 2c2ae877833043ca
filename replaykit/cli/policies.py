"""The policies of a conversion as options of a command.

Names, choices and defaults are those of the fields of `Policies`; a new policy is one line of
``_HELP`` here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from enum import Enum
from functools import wraps
from typing import Annotated, Any, Final, NamedTuple, get_args, get_type_hints

import typer

from replaykit.datasets.engine.policies import Policies

__all__ = ["takes_policies"]

_HELP: Final[Mapping[str, str]] = {
    "casts": "Store one dtype as another: float64=float32.",
    "include": "Keep only this key and what is below it.",
    "exclude": "Leave out this key, such as next/info.",
    "missing": "Keys that some episodes lack.",
    "extra": "Datasets without a place.",
    "constant": "Infos that never change.",
    "all_nan": "Infos that are NaN throughout.",
    "duplicate": "Infos that repeat a column.",
    "repeated": "Next observations: all, or what rows do not repeat.",
    "unrecorded": "Last steps whose next state was not recorded.",
    "copies": "Episodes that are copies of earlier ones.",
    "on_invalid": "Episodes that break a rule.",
    "strict": "Refuse whatever would be a warning.",
}
"""What a policy is about, in the order in which help lists them."""


class _Repeatable(NamedTuple):
    """An option that may come again, each time with one word."""

    option: str
    metavar: str
    read: Callable[[list[str]], Any]


def _casts(given: list[str]) -> dict[str, str]:
    casts = {}
    for each in given:
        source, equals, target = each.partition("=")
        if not equals:
            raise ValueError(f"expected --cast as float64=float32, got {each!r}")
        casts[source] = target
    return casts


def _keys(given: list[str]) -> list[tuple[str, ...]]:
    return [tuple(each.split("/")) for each in given]


_REPEATABLE: Final[Mapping[str, _Repeatable]] = {
    "casts": _Repeatable("--cast", "A=B", _casts),
    "include": _Repeatable("--include", "KEY", _keys),
    "exclude": _Repeatable("--exclude", "KEY", _keys),
}


def takes_policies(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each policy.

    Args:
        command: has a parameter ``policies``, in whose place among the options they come.

    Returns:
        What typer sees: the command with these options, of which it makes the policies.

    Raises:
        ValueError: from the command, where an option says what there is not.
    """
    hints = get_type_hints(command, include_extras=True)
    hints.pop("policies")
    parameters = []
    for each in inspect.signature(command).parameters.values():
        if each.name == "policies":
            parameters += _options()
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(each.replace(annotation=hints[each.name], kind=kind))

    @wraps(command)
    def with_options(**given: Any) -> None:
        values = {}
        for name in _HELP:
            said = given.pop(name)
            if name not in _REPEATABLE:
                values[name] = said.value if isinstance(said, Enum) else said
            elif said:
                values[name] = _REPEATABLE[name].read(said)
        command(**given, policies=Policies(**values))

    with_options.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    with_options.__annotations__ = {
        **{each.name: each.annotation for each in parameters},
        "return": None,
    }
    return with_options


def _options() -> list[inspect.Parameter]:
    declared = {each.name: each for each in fields(Policies)}
    types = get_type_hints(Policies)
    return [_option(declared[name], types[name], about) for name, about in _HELP.items()]


def _option(policy: Field[Any], type_: Any, about: str) -> inspect.Parameter:
    annotation: Any
    default: Any = policy.default
    name = f"--{policy.name.replace('_', '-')}"
    if policy.name in _REPEATABLE:
        name, metavar, _ = _REPEATABLE[policy.name]
        annotation = Annotated[list[str] | None, typer.Option(name, help=about, metavar=metavar)]
        default = None
    elif type_ is bool:
        annotation = Annotated[bool, typer.Option(name, help=about, show_default=False)]
    else:
        # Older versions of typer know enumerations, and no literals.
        enumeration: Any = Enum
        choices = enumeration(policy.name, {each: each for each in get_args(type_)}, type=str)
        annotation = Annotated[choices, typer.Option(name, help=about)]
        default = choices(default)
    return inspect.Parameter(
        policy.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
