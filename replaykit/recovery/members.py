"""Which processes have a folder open."""

from __future__ import annotations

import os
from pathlib import Path

from replaykit.recovery.open_file import OpenFile

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
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    @staticmethod
    def nobody(path: Path) -> bool:
        """Whether there is such a file, and nobody uses its folder."""
        import fcntl

        try:
            fd = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True
