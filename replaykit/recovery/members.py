"""Which processes have a folder open, and what they count on in it."""

from __future__ import annotations

import os
from pathlib import Path

from replaykit.filesystem import sync_directory
from replaykit.recovery.exclusive import Exclusive
from replaykit.recovery.home import KEPT, LOCK, MAKING, SHARED
from replaykit.recovery.manifest import MANIFEST
from replaykit.recovery.open_file import OpenFile, is_held, open_to_lock

__all__ = ["MEMBERS", "Members", "give_up_rows", "who_uses"]

MEMBERS = "members"


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
    if shared != own and (shared / MEMBERS).exists() and not Members.nobody(shared / MEMBERS):
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
    if shared != own and (shared / MEMBERS).exists() and not Members.nobody(shared / MEMBERS):
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
