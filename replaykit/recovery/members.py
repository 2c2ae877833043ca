"""Which processes have a folder open."""

from __future__ import annotations

import os
from pathlib import Path

from replaykit.recovery.open_file import OpenFile, is_held, open_to_lock

__all__ = ["Members"]


class Members(OpenFile):
    """Says, as long as it lives, that this process uses a folder; the kernel forgets one that dies.

    A forked child is among them too, by the file that it inherits, until it lets go: what it has
    yet to open does not go with its parent.

    Args:
        path: the file that they lock; made if it is not there.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery import Members
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     member = Members(Path(folder) / "members")
        ...     nobody = Members.nobody(Path(folder) / "members")
        ...     member.let_go()
        ...     nobody, Members.nobody(Path(folder) / "members")
        (False, True)
    """

    def __init__(self, path: Path) -> None:
        import fcntl

        self.process = os.getpid()
        self._fd = open_to_lock(path, os.O_CREAT)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    @staticmethod
    def nobody(path: Path) -> bool:
        """Whether there is such a file, and nobody uses its folder."""
        try:
            return not is_held(path)
        except OSError:
            return False
