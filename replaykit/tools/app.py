"""The run of a command: its options, output, exit code, and the messages of its errors."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import click

from replaykit.errors import CheckpointError, CorpusError, DownloadError, UploadError
from replaykit.tools.commands import app
from replaykit.tools.output import Output, sentence, write_no_more

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
