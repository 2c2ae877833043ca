"""The commands, and the exit codes and messages of their errors."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from replaykit._version import __version__
from replaykit.cli import commands
from replaykit.cli.output import Output, sentence, write_no_more
from replaykit.errors import CheckpointError, CorpusError, DownloadError, UploadError

__all__ = ["app", "exit_code_of", "run"]

app = typer.Typer(
    name="replaykit",
    help=(
        "Fetch, convert, inspect, validate and share data sets and replay buffers on disk.\n\n"
        "Exit codes: 0 success, 1 validate found an error, 2 wrong option, 3 refused data, "
        "4 not found, 5 network failure, 6 system failure, 70 fault of replaykit, "
        "130 interrupted."
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
            help="Print the version and exit.",
            callback=_version,
            is_eager=True,
            show_default=False,
        ),
    ] = False,
) -> None:
    """Accept the options that precede the command."""


app.command("datasets")(commands.datasets)
app.command("download")(commands.download)
app.command("convert")(commands.convert)
app.command("inspect")(commands.inspect)
app.command("validate")(commands.validate)
app.command("push")(commands.push)
app.command("pull")(commands.pull)


_USAGE: Final = 2
_INTERNAL: Final = 70
_INTERRUPTED: Final = 130


def run(arguments: Sequence[str]) -> int:
    """Run the command; see `replaykit.cli.main`."""
    output = Output(as_json="--json" in arguments)
    debug = "--debug" in arguments
    code: object = 0
    try:
        if not set(arguments) - {"--json", "--debug"}:
            code = _USAGE
            if output.as_json:
                text = "no command was given; replaykit --help lists them"
                output.error("UsageError", text, _USAGE)
            else:
                app(["--help"], prog_name="replaykit", standalone_mode=False)
            return _USAGE
        code = app(list(arguments), prog_name="replaykit", standalone_mode=False, obj=output)
        if code == _INTERRUPTED:  # some versions of typer raise an error instead
            raise KeyboardInterrupt
        code = code if isinstance(code, int) else 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (KeyboardInterrupt, typer.Abort):
        text = f"interrupted: {output.when_interrupted}"
        output.error("KeyboardInterrupt", text, _INTERRUPTED)
        return _INTERRUPTED
    except (BrokenPipeError, SystemExit) as error:
        # The console that prints the help exits the program if the reader closes the pipe.
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        write_no_more(sys.stdout)
        return code if isinstance(code, int) else 0
    except Exception as error:
        # Errors of the option parser are recognized by their attributes. Their class belongs to
        # typer or click, depending on the version of typer.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _usage(output, error)
        code = exit_code_of(error)
        if debug:
            traceback.print_exc()
        text = sentence(error)
        if code == _INTERNAL:
            text = (
                f"a fault of replaykit itself: {type(error).__name__}: {text}; run it again with "
                "--debug and report the traceback"
            )
        output.error(type(error).__name__, text, code)
        return code


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of an error; see `replaykit.cli`.

    Example:
        >>> from replaykit.cli.app import exit_code_of
        >>> exit_code_of(FileNotFoundError()), exit_code_of(KeyError())
        (4, 70)
    """
    if isinstance(error, (DownloadError, UploadError)):
        return 5
    if isinstance(error, FileNotFoundError):
        return 4
    if isinstance(error, (CorpusError, CheckpointError)):
        return 3
    if isinstance(error, (ConnectionError, TimeoutError)):
        return 5
    if isinstance(error, OSError):
        return 5 if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH) else 6
    if isinstance(error, (ImportError, MemoryError)):
        return 6
    if isinstance(error, (ValueError, RuntimeError)):
        return 3
    return _INTERNAL


def _usage(output: Output, error: Any) -> int:
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "replaykit"
    text = " ".join(error.format_message().split()).rstrip(".")
    output.error("UsageError", f"{text}; {where} --help says what there is", _USAGE)
    return _USAGE
