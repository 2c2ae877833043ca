"""The command ``replaykit``; needs the extra ``cli``.

Exit codes: 0 done; 1 ``validate`` found something wrong; 2 a wrong option or argument; 3 data that
is refused, or no data set; 4 something is not there; 5 the network or a Hub; 6 the system: no room,
no permission, a package that is not installed; 70 a fault of replaykit itself; 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from replaykit_command import tell

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; what it says goes to stdout, errors to stderr.

    Args:
        arguments: those behind the name of the command; ``sys.argv[1:]``.

    Example:
        >>> from replaykit.cli import main
        >>> main(["validate", "no-such-folder", "--json"])
        {"error": {"kind": "FileNotFoundError", "message": "no-such-folder is not there",
        "exit_code": 4}}
        4
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        text = (
            f"the command needs {error.name}, which is not installed: pip install 'replaykit[cli]'"
        )
        return tell(type(error).__name__, text, 6, given)
    except KeyboardInterrupt:
        return _interrupted(given)
    try:
        from replaykit.cli.app import run
    except KeyboardInterrupt:
        return _interrupted(given)
    return run(given)


def _interrupted(given: Sequence[str]) -> int:
    """What is imported takes a while: who goes away meanwhile need not see of what."""
    return tell("KeyboardInterrupt", "interrupted: nothing was begun", 130, given)
