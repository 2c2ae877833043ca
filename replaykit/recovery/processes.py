"""Register the processes that share a folder, their views and the changes of tables."""

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
from replaykit.recovery.recovery_folder import KEPT, LOCK, MAKING, MANIFEST, SHARED

__all__ = ["MEMBERS", "ChangeLog", "GivenViews", "ProcessRegistry", "give_up_rows", "who_uses"]

MEMBERS = "members"


class ProcessRegistry(OpenFile):
    """Says, as long as it lives, that this process uses a folder; the kernel forgets one that dies.

    A forked child is among them too, by the file that it inherits, until it lets go: what it has
    yet to open does not go with its parent.

    Args:
        path: the file that they lock; made if it is not there.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery import ProcessRegistry
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     member = ProcessRegistry(Path(folder) / "members")
        ...     nobody = ProcessRegistry.nobody(Path(folder) / "members")
        ...     member.let_go()
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
        """Whether there is such a file, and nobody uses its folder."""
        try:
            return not is_held(path)
        except OSError:
            return False


def who_uses(scratch_dir: Path, own: Path | None = None) -> str | None:
    """Returns who shares or recovers the rows in the files of a folder just now; None: nobody.

    Args:
        own: the folder beside the files that is the caller's.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery import who_uses
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(who_uses(Path(folder)))
        None
    """
    shared, kept = scratch_dir / SHARED, scratch_dir / KEPT
    if (
        shared != own
        and (shared / MEMBERS).exists()
        and not ProcessRegistry.nobody(shared / MEMBERS)
    ):
        return "processes that share its rows"
    if kept != own and kept.is_dir():
        try:
            Exclusive(kept / LOCK).let_go()
        except BlockingIOError:
            return "another process, or another storage of this one, which recovers its rows"
    return None


def give_up_rows(scratch_dir: Path, own: Path | None = None) -> None:
    """Has nobody count on the rows in the files of a folder, which will be overwritten.

    A storage that could be recovered from them is none from now on.

    Args:
        own: the folder beside the files that is the caller's.

    Raises:
        RuntimeError: somebody shares or recovers them just now. Nothing has changed then.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from replaykit.recovery import Home, give_up_rows
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     home = Home(Path(folder))
        ...     home.publish({"slots": 3})
        ...     del home
        ...     give_up_rows(Path(folder))
        ...     print(Home(Path(folder)).manifest())
        None
    """
    shared, kept = scratch_dir / SHARED, scratch_dir / KEPT
    if (
        shared != own
        and (shared / MEMBERS).exists()
        and not ProcessRegistry.nobody(shared / MEMBERS)
    ):
        raise RuntimeError(f"{scratch_dir} is in use by processes that share its rows")
    if kept == own or not kept.is_dir():
        return
    try:
        held = Exclusive(kept / LOCK)
    except BlockingIOError:
        raise RuntimeError(
            f"{scratch_dir} is in use by another process, or by another storage of this one, which "
            "recovers its rows"
        ) from None
    try:
        for name in (MANIFEST, MAKING):
            (kept / name).unlink(missing_ok=True)
        sync_directory(kept)  # before a row is overwritten
    finally:
        held.let_go()


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


_core = native.core()

Array = np.ndarray[Any, Any]

_BITS = 48
_EVERYTHING = (1 << _BITS) - 1


class ChangeLog:
    """A ring of the numbers of changed elements, for who comes later to look them up.

    How many were ever noted is for the caller to keep, where it changes together with all else:
    what was noted after that number counts for nothing.

    Args:
        numbers: int64 ``[C]``, the memory it lies in.

    Example:
        >>> import numpy as np
        >>> from replaykit.recovery import ChangeLog
        >>> log = ChangeLog(np.zeros(16, np.int64))
        >>> count = log.note(0, [(8, np.array([3, 5])), (1, None)])
        >>> log.since(0, count)
        {8: array([3, 5]), 1: None}
        >>> log.since(0, 100) is None
        True
    """

    def __init__(self, numbers: Array) -> None:
        self._numbers = numbers
        # Half of it may be overwritten by who dies before it counts.
        self._most = len(numbers) // 2

    def note(self, count: int, changes: list[tuple[int, Array | None]]) -> int:
        """Notes changed elements of tables, None for all of one; returns the new count.

        Args:
            count: how many were noted before.
            changes: number of the table, and its elements int64 ``[K]``.
        """
        if sum(1 if at is None else len(at) for _, at in changes) > self._most:
            changed = dict.fromkeys(table for table, at in changes if at is None or len(at))
            changes = [(table, None) for table in changed]
        for table, at in changes:
            found = np.array([_EVERYTHING]) if at is None else at
            first = count % len(self._numbers)
            until = first + len(found)
            if _core is not None:
                _core.log_elements(self._numbers, count, found, table << _BITS)
            elif until <= len(self._numbers):
                np.bitwise_or(found, table << _BITS, out=self._numbers[first:until])
            else:
                places = np.arange(first, until) % len(self._numbers)
                self._numbers[places] = found | (table << _BITS)
            count += len(found)
        return count

    def since(self, known: int, count: int) -> dict[int, Array | None] | None:
        """Which elements were changed since ``known`` were noted: by table, None for all of it.

        None: too many were, so that it may be all of every table.
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
