"""Where the command ``replaykit`` begins: outside of the package, which takes a second to import.

Who presses Ctrl-C meanwhile gets a sentence, as later.
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
    """Runs the command with ``sys.argv[1:]`` and returns its exit code; see `replaykit.cli`."""
    code = _run()
    # An interrupt out of source that was compiled as it ran, as that of dataclasses is, leaves a
    # mark by which Python ends by the signal, whatever the code; the next source takes it away.
    exec("")
    return code


def _run() -> int:
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)
        raise KeyboardInterrupt

    # Not everything that is imported lets an interrupt through: some make another error of it, or
    # nothing at all.
    notes = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if notes:
        signal.signal(signal.SIGINT, note)
    try:
        if not _asks_for_help(sys.argv[1:]):
            importlib.import_module("replaykit.buffer")  # torch and tensordict: what takes a second
        from replaykit.cli import main as command
    except BaseException as error:
        if told or isinstance(error, KeyboardInterrupt):
            return _interrupted()
        if not isinstance(error, ImportError) or "--debug" in sys.argv:
            raise
        text = f"what it needs cannot be imported: {' '.join(str(error).split())}"
        return tell(type(error).__name__, text, _SYSTEM, sys.argv)
    finally:
        if notes:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return _interrupted() if told else command()


def _asks_for_help(arguments: Sequence[str]) -> bool:
    """Says whether a command ends before it needs torch."""
    return not arguments or not {"-h", "--help", "--version"}.isdisjoint(arguments)


def tell(kind: str, text: str, code: int, arguments: Sequence[str]) -> int:
    """Says an error as the command does, before what it says things with is there.

    Args:
        kind: the name of the error.
        text: one sentence.
        code: the exit code, which is returned.
        arguments: of the command; with ``--json`` the error is a JSON document on stdout.

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
