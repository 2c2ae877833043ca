"""Which processes have given views of rows away, which may be written to without a word."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from replaykit.recovery.open_file import OpenFile, is_held, open_to_lock

__all__ = ["GivenViews"]

_PREFIX = "views-"


class GivenViews(OpenFile):
    """Says to the others that this process has views of the rows: by a file that it has locked.

    The kernel lets go of it when the process dies; a forked child, which has the views too, holds
    the file that it inherits.

    Args:
        folder: that of all of them.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery import GivenViews
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     one, other = GivenViews(Path(folder)), GivenViews(Path(folder))
        ...     one.hold()
        ...     held = other.of_others(), one.of_others()
        ...     one.let_go()
        ...     held, other.of_others()
        ((True, False), False)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def hold(self) -> None:
        """Told that this process gives a view away: before it does.

        Raises:
            OSError: the file cannot be made.
        """
        import fcntl

        while self._path is None:
            path = self._folder / f"{_PREFIX}{uuid.uuid4().hex}"
            self._fd = open_to_lock(path, os.O_CREAT | os.O_EXCL)
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            if path.exists():  # else it was taken for that of a dead one before it was locked
                self._path = path
            else:
                super().let_go()

    def let_go(self) -> None:
        """Told that it has none any more, and has marked what was written to them."""
        super().let_go()
        path = self.__dict__.get("_path")
        self._path = None
        with contextlib.suppress(OSError):
            if path is not None and not is_held(path):  # by a child
                path.unlink()

    def __del__(self) -> None:
        # What was written to views is not marked: who finds the file free takes all for changed.
        super().let_go()

    def of_others(self) -> bool:
        """Whether another process has views, or died with some; the file of a dead one goes.

        Cost: the folder is listed.
        """
        import fcntl

        found = False
        own = None if self._path is None else self._path.name
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(_PREFIX)]
        for name in names:
            if name == own:
                continue
            found, path = True, self._folder / name
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                fd = open_to_lock(path)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                finally:
                    os.close(fd)
        return found
