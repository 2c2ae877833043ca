"""Where the command ``replaykit`` begins: outside of the package, whose import takes a second.

Who presses Ctrl-C meanwhile gets a sentence, as later.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

__all__ = ["main"]

_SYSTEM = 6
_INTERRUPTED = 130


def main() -> int:
    """Runs the command with ``sys.argv[1:]`` and returns its exit code; see `replaykit.cli`."""
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
        from replaykit.cli import main as command
    except BaseException as error:
        if told or isinstance(error, KeyboardInterrupt):
            return _interrupted()
        if not isinstance(error, ImportError) or "--debug" in sys.argv:
            raise
        text = " ".join(str(error).split())
        print(f"replaykit: what it needs cannot be imported: {text}", file=sys.stderr)
        return _SYSTEM
    finally:
        if notes:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return _interrupted() if told else command()


def _interrupted() -> int:
    print("replaykit: interrupted: nothing was begun", file=sys.stderr)
    return _INTERRUPTED
