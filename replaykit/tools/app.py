"""The run of a command: its output, exit code, errors, and policies as options."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import IO, Any, Final, get_args, get_type_hints

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from replaykit.datasets.engine.policies import Policies
from replaykit.errors import CheckpointError, CorpusError, DownloadError, UploadError

_USAGE: Final = 2
_INTERNAL: Final = 70
_INTERRUPTED: Final = 130
_EXIT_CODES: Final[tuple[tuple[int, tuple[type[Exception], ...]], ...]] = (
    (5, (DownloadError, UploadError)),
    (4, (FileNotFoundError,)),
    (3, (CorpusError, CheckpointError)),
    (5, (ConnectionError, TimeoutError)),
    (6, (OSError, ImportError, MemoryError)),
    (3, (ValueError, RuntimeError)),
)
"""Exit codes by kinds of errors. The first entry that fits counts."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; see `replaykit_command.main`."""
    from replaykit.tools.commands import app  # commands need the output below

    output = Output(as_json="--json" in arguments)
    is_empty = not set(arguments) - {"--json", "--debug"}
    code: object = _USAGE if is_empty else 0
    try:
        if is_empty and output.as_json:
            raise click.UsageError("no command was given")
        given = ["--help"] if is_empty else list(arguments)
        try:
            with app.make_context("replaykit", given, obj=output) as context:
                code = app.invoke(context)
        except click.exceptions.Exit as end:  # of --help and --version
            code = _USAGE if is_empty else end.exit_code
        code = code if isinstance(code, int) else 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (KeyboardInterrupt, click.Abort):
        text = f"interrupted: {output.when_interrupted}"
        return output.error("KeyboardInterrupt", text, _INTERRUPTED)
    except BrokenPipeError:
        write_no_more(sys.stdout)
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        where = "replaykit" if error.ctx is None else error.ctx.command_path
        text = " ".join(error.format_message().split()).rstrip(".")
        return output.error("UsageError", f"{text}; {where} --help says what there is", _USAGE)
    except Exception as error:
        code = exit_code_of(error)
        if "--debug" in arguments:
            traceback.print_exc()
        text = sentence(error)
        if code == _INTERNAL:
            text = (
                f"a fault of replaykit itself: {type(error).__name__}: {text}; run it again with "
                "--debug and report the traceback"
            )
        return output.error(type(error).__name__, text, code)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of an error; see `replaykit_command`.

    Example:
        >>> from replaykit.tools.app import exit_code_of
        >>> exit_code_of(FileNotFoundError()), exit_code_of(KeyError())
        (4, 70)
    """
    if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return 5
    return next((code for code, kinds in _EXIT_CODES if isinstance(error, kinds)), _INTERNAL)


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


def sheet(*names: str, right: Collection[str] = (), **settings: Any) -> Table:
    """Return an empty table without lines; columns named in ``right`` are for numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", **settings)
    for name in names:
        is_number = name in right
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    return table


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

    def line(self, *parts: str | tuple[str, str], to_stderr: bool = False) -> None:
        """Print one line of texts, which may have a style; it is safe to print any text."""
        shown = [
            plain(part) if isinstance(part, str) else (plain(part[0]), part[1]) for part in parts
        ]
        console = self.stderr if to_stderr else self.console
        console.print(Text.assemble(*shown), soft_wrap=True)

    def document(self, value: Mapping[str, Any]) -> None:
        """Print the JSON document."""
        from replaykit.tools.facts import to_json

        text = json.dumps(to_json(value), allow_nan=False)
        try:
            print(text, flush=True)
        except BrokenPipeError:
            write_no_more(sys.stdout)

    def result(self, record: Mapping[str, Any], *parts: str | tuple[str, str]) -> None:
        """Print the result of a command: the JSON document, or warnings and one line of texts."""
        if self.as_json:
            self.document(record)
        else:
            self.print_warnings()
            self.line(*parts)

    def error(self, kind: str, text: str, code: int) -> int:
        """Print an error as one sentence, and return the exit code."""
        if self.as_json:
            self.document({"error": {"kind": kind, "message": text, "exit_code": code}})
        else:
            self.line(("replaykit: ", "bold red"), text, to_stderr=True)
        return code

    def print_warnings(self) -> None:
        """Print the collected warnings as readable text."""
        for text in self.warned:
            self.line(("warning: ", "bold yellow"), text, to_stderr=True)

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
    def progress(self, title: str) -> Iterator[Callable[[int], object]]:
        """Show the number of processed bytes, and yield the function that adds to it."""
        hidden = not self.shows_progress
        with tqdm(desc=title, unit="B", unit_scale=True, leave=False, disable=hidden) as bar:
            yield bar.update


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


def _casts(given: tuple[str, ...]) -> dict[str, str]:
    casts = {}
    for each in given:
        source, equals, target = each.partition("=")
        if not equals:
            raise ValueError(f"expected --cast as float64=float32, got {each!r}")
        casts[source] = target
    return casts


def _keys(given: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [tuple(each.split("/")) for each in given]


_REPEATABLE: Final[Mapping[str, tuple[str, str, Callable[[tuple[str, ...]], Any]]]] = {
    "casts": ("--cast", "A=B", _casts),
    "include": ("--include", "KEY", _keys),
    "exclude": ("--exclude", "KEY", _keys),
}
"""Option, placeholder and reader of the policies that take several values."""


def policy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option for each policy.

    The command gets all of them as its argument ``policies``. It raises ValueError if an option
    has an unknown value.
    """

    @wraps(command)
    def with_policies(*args: Any, **given: Any) -> Any:
        values = {name: value for name in _HELP if (value := given.pop(name))}
        for name in _REPEATABLE.keys() & values.keys():
            values[name] = _REPEATABLE[name][2](values[name])
        return command(*args, policies=Policies(**values), **given)

    declared = {policy.name: policy for policy in fields(Policies)}
    types = get_type_hints(Policies)
    decorated: Callable[..., Any] = with_policies
    for name, about in reversed([*_HELP.items()]):  # the last decorator is the first option
        settings: dict[str, Any] = {"help": about, "default": declared[name].default}
        option = f"--{name.replace('_', '-')}"
        if name in _REPEATABLE:
            option, metavar, _ = _REPEATABLE[name]
            settings = {"help": about, "multiple": True, "metavar": metavar}
        elif types[name] is bool:
            settings["is_flag"] = True
        else:
            settings["type"] = click.Choice(get_args(types[name]))
        decorated = click.option(option, name, **settings)(decorated)
    return decorated
