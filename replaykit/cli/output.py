"""Output of commands as text or JSON, and the options for policies."""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from functools import wraps
from typing import IO, Annotated, Any, Final, NamedTuple, get_args, get_type_hints

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from replaykit.datasets.engine.policies import Policies

__all__ = [
    "Debug",
    "Json",
    "Output",
    "add_policy_options",
    "plain",
    "sentence",
    "size",
    "write_no_more",
]

Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document, also for errors.", show_default=False),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", show_default=False)
]


_WIDE: Final = 240


def write_no_more(stream: IO[str] | None) -> None:
    """Discard further output to a closed pipe.

    A reader such as `head` may end early. Python then prints no error at its exit.
    """
    if stream is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Console(Console):
    """A console that ignores a closed pipe, so that the command can return its exit code."""

    def on_broken_pipe(self) -> None:
        write_no_more(sys.stderr if self.stderr else sys.stdout)


@dataclass
class Output:
    """The output of one run of a command, stored as the context's object.

    Attributes:
        as_json: True to print one JSON document on stdout, and nothing else.
        when_interrupted: the message after an interrupt: the state of the work, and the way to
            continue it.
        warned: the warnings so far.
    """

    as_json: bool = False
    when_interrupted: str = "nothing was changed"
    warned: list[str] = field(default_factory=list)

    @property
    def console(self) -> Console:
        """The console on stdout for readable text. It wraps lines only on a terminal."""
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        return _Console(markup=False, highlight=False, width=None if is_terminal else _WIDE)

    @property
    def stderr(self) -> Console:
        """The console for progress, warnings and errors."""
        return _Console(stderr=True, markup=False, highlight=False)

    def document(self, value: Mapping[str, Any]) -> None:
        """Print the JSON document."""
        from replaykit.inspection.facts import to_json

        text = json.dumps(to_json(value), allow_nan=False)
        try:
            print(text, flush=True)
        except BrokenPipeError:
            write_no_more(sys.stdout)

    def error(self, kind: str, text: str, code: int) -> None:
        """Print an error as one sentence."""
        if self.as_json:
            self.document({"error": {"kind": kind, "message": text, "exit_code": code}})
            return
        console = self.stderr
        console.print(Text.assemble(("replaykit: ", "bold red"), plain(text)), soft_wrap=True)

    def print_warnings(self) -> None:
        """Print the collected warnings as readable text."""
        for text in self.warned:
            self.stderr.print(
                Text.assemble(("warning: ", "bold yellow"), plain(text)), soft_wrap=True
            )

    @contextmanager
    def warnings(self) -> Iterator[list[str]]:
        """Collect the warnings of the block."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            warnings.simplefilter("always", UserWarning)
            try:
                yield self.warned
            finally:
                self.warned += [
                    str(each.message) for each in caught if issubclass(each.category, UserWarning)
                ]

    @property
    def shows_progress(self) -> bool:
        """Return whether progress is shown: on a terminal, unless the output is JSON."""
        return not self.as_json and sys.stderr is not None and sys.stderr.isatty()

    @contextmanager
    def working(self, title: str) -> Iterator[None]:
        """Show a spinner while the block runs."""
        if not self.shows_progress:
            yield
            return
        with self.stderr.status(title):
            yield

    @contextmanager
    def progress(self, title: str, total: int | None = None) -> Iterator[Callable[[int], object]]:
        """Show a bar of processed bytes, and yield the function that adds bytes to it."""
        if not self.shows_progress:
            yield lambda nbytes: None
            return
        bar = BarColumn() if total else SpinnerColumn()
        with Progress(
            TextColumn("{task.description}"),
            bar,
            DownloadColumn(),
            TimeElapsedColumn(),
            console=self.stderr,
            transient=True,
        ) as shown:
            task = shown.add_task(title, total=total)
            yield lambda nbytes: shown.advance(task, nbytes)


def plain(value: object) -> str:
    """Return a text that is safe to print, without added lines or colours."""
    text = str(value)
    return "".join(part if part.isprintable() else repr(part)[1:-1] for part in text)


def sentence(error: BaseException) -> str:
    """Return the message of an error on one line."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return plain(f"{error.filename}: {error.strerror}")
    if isinstance(error, KeyError) and error.args:
        return plain(error.args[0])
    return plain(" ".join(str(error).split())) or type(error).__name__


def size(nbytes: int | None) -> str:
    """Return a number of bytes as readable text.

    Example:
        >>> from replaykit.cli.output import size
        >>> size(999), size(18548952)
        ('999 B', '18.5 MB')
    """
    if nbytes is None:
        return "-"
    value, unit = float(nbytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


_HELP: Final[Mapping[str, str]] = {
    "casts": "Store one dtype as another: float64=float32.",
    "include": "Keep only this key and the keys below it.",
    "exclude": "Leave out this key, such as next/info.",
    "missing": "Keys that some episodes lack.",
    "extra": "Datasets that the layout does not name.",
    "constant": "Info keys whose value never changes.",
    "all_nan": "Info keys that contain only NaN.",
    "duplicate": "Info keys that repeat a column.",
    "repeated": "Store all next observations, or only those that no row has as its observation.",
    "unrecorded": "Last steps whose next state was not recorded.",
    "copies": "Episodes that are copies of earlier ones.",
    "on_invalid": "Episodes that break a rule.",
    "strict": "Raise an error instead of any warning.",
}
"""The help texts of the policies, in the order of the help."""


class _Repeatable(NamedTuple):
    """An option that may be repeated, with one value each time."""

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


def add_policy_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each policy.

    Args:
        command: a function with a parameter ``policies``, which the options replace.

    Returns:
        The command for typer, which builds the policies from these options.

    Raises:
        ValueError: from the command, if an option has an unknown value.
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
        # Older versions of typer accept enumerations, but no literals.
        enumeration: Any = Enum
        choices = enumeration(policy.name, {each: each for each in get_args(type_)}, type=str)
        annotation = Annotated[choices, typer.Option(name, help=about)]
        default = choices(default)
    return inspect.Parameter(
        policy.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
