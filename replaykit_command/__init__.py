"""The entry point of the command ``replaykit``.

The import of replaykit takes a second. This module is outside the package, so that Ctrl-C during
the import prints a message instead of a traceback.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Sequence
from types import FrameType

__all__ = ["main", "tell"]

_SYSTEM = 6
_INTERRUPTED = 130


def main() -> int:
    """Run the command with ``sys.argv[1:]`` and return its exit code."""
    code = _run()
    # An interrupt inside `exec`, which dataclasses use, leaves a mark in the interpreter. With
    # the mark, Python would end by the signal, with another exit code. The next `exec` clears the
    # mark.
    exec("")
    return code


def _run() -> int:
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        raise KeyboardInterrupt

    # Some imported modules convert an interrupt into another error, or ignore it.
    notes = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if notes:
        signal.signal(signal.SIGINT, note)
    try:
        if not _asks_for_help(sys.argv[1:]):
            importlib.import_module("replaykit.buffer")  # torch and tensordict take a second
        from replaykit.tools.command import main as command
    except BaseException as error:
        if told or isinstance(error, KeyboardInterrupt):
            return _interrupted()
        if not isinstance(error, ImportError) or "--debug" in sys.argv:
            raise
        text = f"a required package cannot be imported: {' '.join(str(error).split())}"
        return tell(type(error).__name__, text, _SYSTEM, sys.argv)
    finally:
        if notes:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return _interrupted() if told else command()


def _asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether the command ends before it needs torch."""
    return not arguments or not {"-h", "--help", "--version"}.isdisjoint(arguments)


def tell(kind: str, text: str, code: int, arguments: Sequence[str]) -> int:
    """Print an error in the format of the command, without importing the package.

    Args:
        kind: the name of the error.
        text: one sentence.
        code: the exit code, which is returned.
        arguments: the arguments of the command. With ``--json``, the error is printed as JSON to
            stdout.

    Example:
        >>> from replaykit_command import tell
        >>> tell("ImportError", "no torch", 6, ["--json"])
        {"error": {"kind": "ImportError", "message": "no torch", "exit_code": 6}}
        6
    """
    if "--json" in arguments:
        print(json.dumps({"error": {"kind": kind, "message": text, "exit_code": code}}))
    else:
        print(f"replaykit: {text}", file=sys.stderr)
    return code


def _interrupted() -> int:
    return tell("KeyboardInterrupt", "interrupted: nothing was begun", _INTERRUPTED, sys.argv)
