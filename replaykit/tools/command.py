"""The command ``replaykit``; needs the extra ``cli``.

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

import sys
from collections.abc import Sequence

from replaykit_command import tell

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, print errors to stderr, and return the exit code.

    Args:
        arguments: the arguments after the name of the command, by default ``sys.argv[1:]``.

    Example:
        >>> from replaykit.tools.command import main
        >>> main(["validate", "no-such-folder", "--json"])
        {"error": {"kind": "FileNotFoundError", "message": "no-such-folder is not there",
        "exit_code": 4}}
        4
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        import click  # noqa: F401
        import rich  # noqa: F401

        from replaykit.tools.app import run
    except ImportError as error:
        if error.name not in ("click", "rich"):
            raise
        text = (
            f"the command needs {error.name}, which is not installed: pip install 'replaykit[cli]'"
        )
        return tell(type(error).__name__, text, 6, given)
    except KeyboardInterrupt:  # the imports are slow
        return tell("KeyboardInterrupt", "interrupted: nothing was begun", 130, given)
    return run(given)
