"""The command ``replaykit``; needs the extra ``cli``.

The import of replaykit takes a second. This module is outside the package, so that Ctrl-C during
the import prints a message instead of a traceback.

Exit codes:

- 0: the command succeeded.
- 1: ``validate`` found an error.
- 2: an option or argument is wrong.
- 3: the data was refused, or is not a data set.
- 4: a file, data set or repository does not exist.
- 5: the network or a Hub failed.
- 6: the system failed: disk space, permissions, or a package that is not installed.
- 70: replaykit itself has a fault.
- 130: the command was interrupted.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Sequence
from types import FrameType

__all__ = ["main"]

_SYSTEM = 6
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, print errors to stderr, and return the exit code.

    Args:
        arguments: the arguments after the name of the command, by default ``sys.argv[1:]``.

    Example:
        >>> from replaykit_command import main
        >>> main(["validate", "no-such-folder", "--json"])
        {"error": {"kind": "FileNotFoundError", "message": "no-such-folder is not there",
        "exit_code": 4}}
        4
    """
    code = _run(sys.argv[1:] if arguments is None else list(arguments))
    # An interrupt inside `exec`, which dataclasses use, leaves a mark in the interpreter. With
    # the mark, Python would end by the signal, with another exit code. The next `exec` clears the
    # mark.
    exec("")
    return code


def _run(arguments: Sequence[str]) -> int:
    interrupts: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    # Some imported modules convert an interrupt into another error, or ignore it.
    notes = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if notes:
        signal.signal(signal.SIGINT, note)
    try:
        # Help needs neither torch nor tensordict, which take a second.
        if arguments and {"-h", "--help", "--version"}.isdisjoint(arguments):
            importlib.import_module("replaykit.buffer")
        from replaykit.tools.app import run
    except BaseException as error:
        if interrupts or isinstance(error, KeyboardInterrupt):
            return _interrupted(arguments)
        if not isinstance(error, ImportError) or "--debug" in arguments:
            raise
        text = f"a required package cannot be imported: {' '.join(str(error).split())}"
        if error.name in ("click", "rich"):
            text = (
                f"the command needs {error.name}, which is not installed: "
                "pip install 'replaykit[cli]'"
            )
        return _report(type(error).__name__, text, _SYSTEM, arguments)
    finally:
        if notes:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return _interrupted(arguments) if interrupts else run(arguments)


def _interrupted(arguments: Sequence[str]) -> int:
    text = "interrupted: nothing was begun"
    return _report("KeyboardInterrupt", text, _INTERRUPTED, arguments)


def _report(kind: str, text: str, code: int, arguments: Sequence[str]) -> int:
    """Print an error in the format of the command, without importing the package."""
    if "--json" in arguments:
        print(json.dumps({"error": {"kind": kind, "message": text, "exit_code": code}}))
    else:
        print(f"replaykit: {text}", file=sys.stderr)
    return code
