"""Record the processes that share a folder, their views, and changes of tables."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from replaykit import native
from replaykit.filesystem import sync_directory
from replaykit.recovery.locks import Exclusive, OpenFile, is_held, open_to_lock
from replaykit.recovery.recovery_folder import (
    DESCRIPTION,
    LOCK,
    MAKING,
    MANIFEST,
    RECOVERABLE,
    SHARED,
    is_shared,
)


class ProcessRegistry(OpenFile):
    """The entry of this process among the processes that use a folder.

    The entry is a lock, which the kernel releases when the process dies. A forked child inherits
    the open file, and counts as a user until it calls ``drop``. So files that the child will open
    later outlive its parent.

    Args:
        path: the file that all users lock. It is made if it does not exist.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.processes import ProcessRegistry
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     member = ProcessRegistry(Path(folder) / "members")
        ...     nobody = ProcessRegistry.nobody(Path(folder) / "members")
        ...     member.drop()
        ...     nobody, ProcessRegistry.nobody(Path(folder) / "members")
        (False, True)
    """

    def __init__(self, path: Path) -> None:
        import fcntl

        self.process = os.getpid()
        self._fd = open_to_lock(path, os.O_CREAT)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    @staticmethod
    def nobody(path: Path) -> bool:
        """Return whether the file exists and no process uses its folder."""
        try:
            return not is_held(path)
        except OSError:
            return False


def who_uses(scratch_dir: Path, own: Path | None = None) -> str | None:
    """Return a description of the users of the rows in a folder, or None.

    Users are processes that share the rows, or a storage that recovers the rows.

    Args:
        own: the caller's recovery folder next to the files, which does not count.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.processes import who_uses
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(who_uses(Path(folder)))
        None
    """
    if _sharing(scratch_dir, own):
        return "processes that share its rows"
    recoverable = scratch_dir / RECOVERABLE
    if recoverable != own and recoverable.is_dir():
        try:
            Exclusive(recoverable / LOCK).drop()
        except BlockingIOError:
            return "another process, or another storage of this one, which recovers its rows"
    return None


def _sharing(scratch_dir: Path, own: Path | None) -> bool:
    """Return whether processes share the rows in a folder."""
    homes = [scratch_dir / name for name in (SHARED, RECOVERABLE)]
    return any(home != own and is_shared(home) for home in homes)


def give_up_rows(scratch_dir: Path, own: Path | None = None) -> None:
    """Give up the recovery of rows in a folder, whose files will be overwritten.

    From then on, no storage can be recovered from them.

    Args:
        own: the caller's recovery folder next to the files, which does not change.

    Raises:
        RuntimeError: a process or storage shares or recovers the rows. Nothing has changed then.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.processes import give_up_rows
        >>> from replaykit.recovery.recovery_folder import RecoveryFolder
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     home = RecoveryFolder(Path(folder))
        ...     home.publish({"slots": 3})
        ...     del home
        ...     give_up_rows(Path(folder))
        ...     print(RecoveryFolder(Path(folder)).manifest())
        None
    """
    if _sharing(scratch_dir, own):
        raise RuntimeError(f"{scratch_dir} is in use by processes that share its rows")
    recoverable = scratch_dir / RECOVERABLE
    if recoverable == own or not recoverable.is_dir():
        return
    try:
        held = Exclusive(recoverable / LOCK)
    except BlockingIOError:
        raise RuntimeError(
            f"{scratch_dir} is in use by another process, or by another storage of this one, which "
            "recovers its rows"
        ) from None
    try:
        for name in (MANIFEST, MAKING, DESCRIPTION):
            (recoverable / name).unlink(missing_ok=True)
        sync_directory(recoverable)  # before a row is overwritten
    finally:
        held.drop()


_PREFIX = "views-"


class GivenViews(OpenFile):
    """The entry of this process in the record of processes with views of rows.

    The entry is a locked file. The kernel releases the lock when the process dies. A forked child
    has the same views. It inherits the file, and so also holds the lock.

    Args:
        folder: the folder of all entries.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery.processes import GivenViews
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     one, other = GivenViews(Path(folder)), GivenViews(Path(folder))
        ...     one.hold()
        ...     held = other.of_others(), one.of_others()
        ...     one.drop()
        ...     held, other.of_others()
        ((True, False), False)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None

    def hold(self) -> None:
        """Record that a caller in this process will get a view.

        Raises:
            OSError: the file cannot be made.
        """
        import fcntl

        while self._path is None:
            path = self._folder / f"{_PREFIX}{uuid.uuid4().hex}"
            self._fd = open_to_lock(path, os.O_CREAT | os.O_EXCL)
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            if path.exists():  # another process may have removed it before it was locked
                self._path = path
            else:
                super().drop()

    def drop(self) -> None:
        """Record that this process has no views left, and has marked their rows."""
        super().drop()
        path = self.__dict__.get("_path")
        self._path = None
        with contextlib.suppress(OSError):
            if path is not None and not is_held(path):  # a forked child may hold it
                path.unlink()

    def __del__(self) -> None:
        # Writes to the views are not marked. If a process finds the file unlocked, it marks all
        # rows.
        super().drop()

    def of_others(self) -> bool:
        """Return whether another process has views, or had views when it died.

        This removes the files of dead processes. Cost: a listing of the folder.
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


Array = np.ndarray[Any, Any]

_BITS = 48
_EVERYTHING = (1 << _BITS) - 1


class ElementLog:
    """A ring that lists which elements changed, for processes that follow later.

    The caller commits the count of all logged numbers with its other state. Logged numbers after
    that count are ignored.

    Args:
        numbers: int64 ``[C]``, the memory of the ring.

    Attributes:
        core: the ring in the compiled core, with the counts of all logged and of all committed
            numbers, which the caller sets.

    Example:
        >>> import numpy as np
        >>> from replaykit.recovery.processes import ElementLog
        >>> log = ElementLog(np.zeros(16, np.int64))
        >>> log.append([(8, np.array([3, 5])), (1, None)])
        >>> log.since(0, log.core.count)
        {8: array([3, 5]), 1: None}
        >>> log.since(0, 100) is None
        True
    """

    def __init__(self, numbers: Array) -> None:
        self._numbers, self.core = numbers, native.core.ElementLog(numbers)
        self._most = len(numbers) // 2

    def append(self, changes: list[tuple[int, Array | None]]) -> None:
        """Log changed elements of tables.

        Args:
            changes: pairs of a table's number and its changed elements, int64 ``[K]``; None for all
                elements.
        """
        core = self.core
        if not core.has_room(sum(1 if at is None else len(at) for _, at in changes)):
            tables = [table for table, at in changes if at is None or len(at)]
            tables += self.since(core.committed, core.count) or ()
            changes, core.count = [(table, None) for table in dict.fromkeys(tables)], core.committed
        for table, at in changes:
            core.append(table, np.array([_EVERYTHING]) if at is None else at)

    def since(self, known: int, count: int) -> dict[int, Array | None] | None:
        """Return the elements that have changed since the count was ``known``, by table.

        Returns:
            For each table its changed elements, or None for all elements. If there were too many
            changes, the whole result is None. Then all elements of all tables may have changed.
        """
        if count - known > self._most:
            return None
        if known == count:
            return {}
        numbers = self._numbers[np.arange(known, count) % len(self._numbers)]
        tables, elements = numbers >> _BITS, numbers & _EVERYTHING
        found: dict[int, Array | None] = {}
        for table in dict.fromkeys(tables.tolist()):
            own = elements[tables == table]
            found[table] = None if (own == _EVERYTHING).any() else np.unique(own)
        return found
