"""What publishing a directory needs of the file system: room, durability, and one atomic step."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

__all__ = [
    "EarlySync",
    "NoRoomError",
    "TooManyFilesError",
    "disk_errors",
    "exchange",
    "file_limit_errors",
    "make_directory",
    "no_room",
    "private_path",
    "remove_tree",
    "require_room",
    "reserve",
    "reserve_blocks",
    "reserve_opened",
    "siblings",
    "sync_directory",
    "sync_tree",
]

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EARLY_BYTES: Final = 16 << 20
_SYNC_THREADS: Final = 8
"""File systems commit the syncs of several threads together: 2 to 10 times faster than in turn."""
_OPENED: Final = 128
"""Files that are open at once while they are synced: each group of them waits for its slowest."""
_OPENED_LEAST: Final = 16
"""As many, where the process may have no more."""
_WRITE: Final = 2
"""`sync_file_range`'s flag for beginning to write, without waiting."""


def make_directory(path: Path) -> None:
    """Makes a directory and those above it, durably; existing ones are left alone."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory)
        sync_directory(directory.parent)


def private_path(target: Path, purpose: str) -> Path:
    """Returns a new hidden path beside a target, on its file system and nobody else's."""
    return target.with_name(f".{target.name}.{purpose}-{uuid.uuid4().hex}")


def siblings(target: Path, purpose: str) -> list[Path]:
    """Returns the paths that `private_path` has made for a target and that still exist."""
    prefix = f".{target.name}.{purpose}-"
    try:
        names = os.listdir(target.parent)
    except FileNotFoundError:
        return []
    # All of the rest is the 32 digits: a target's name may itself begin like another's prefix.
    return sorted(
        target.with_name(name)
        for name in names
        if name.startswith(prefix) and _is_hex(name[len(prefix) :])
    )


def _is_hex(text: str) -> bool:
    return len(text) == 32 and all(digit in "0123456789abcdef" for digit in text)


class NoRoomError(OSError):
    """A disk, quota or limit is full; the message says for what and what to do."""


@contextmanager
def disk_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Turns "no space", "quota" and "file too large" into a sentence that a user can act on."""
    try:
        yield
    except NoRoomError:
        raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise no_room(error.errno, path, nbytes) from error


def no_room(code: int | None, path: Path, nbytes: int) -> NoRoomError:
    """Returns the error that says what could not be written, what it needs, and what to do."""
    reason = os.strerror(code or errno.ENOSPC)
    try:
        free = f"{shutil.disk_usage(_existing(path)).free:,} bytes are free there"
    except OSError:
        free = "the free space is unknown"
    return NoRoomError(
        code or errno.ENOSPC,
        f"{reason}: {nbytes:,} bytes are needed for {path}, {free}; free some space, raise the "
        "limit, or choose another directory",
        str(path),
    )


class TooManyFilesError(OSError):
    """The process or the system has no file descriptor left; the message says what to do."""


@contextmanager
def file_limit_errors(path: Path) -> Iterator[None]:
    """Turns "too many open files" into a sentence with the file, the limit and the remedy.

    Args:
        path: what the work is on; named as well, since not every library names the file.
    """
    try:
        yield
    except TooManyFilesError:
        raise
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        name = os.fsdecode(error.filename) if error.filename is not None else "a file"
        raise TooManyFilesError(
            error.errno,
            f"{os.strerror(error.errno)}: cannot open {name}, working on {path}; "
            f"{_file_limit(error.errno)}",
            str(path),
        ) from error


def _file_limit(code: int) -> str:
    if code == errno.ENFILE:
        return "the whole system has none left: end other programs, or raise fs.file-max"
    try:
        import resource
    except ImportError:  # not POSIX
        return "close some"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"this process may have {limit:,} open at once: close some, or raise it (`ulimit -n`)"


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def require_room(directory: Path, total: int, largest: int) -> None:
    """Checks, before anything is written, that files of these sizes fit.

    Raises:
        OSError: ``ENOSPC`` when the disk has not ``total`` bytes free, ``EFBIG`` when this
            process may not write a file of ``largest`` bytes.
    """
    if shutil.disk_usage(_existing(directory)).free < total:
        raise no_room(errno.ENOSPC, directory, total)
    try:
        import resource
    except ImportError:  # not POSIX: no such limit
        return
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and largest > limit:
        raise no_room(errno.EFBIG, directory, largest)


def reserve(path: Path, nbytes: int) -> None:
    """Sets aside the blocks of a file, so that a full disk is met now and not while writing.

    A mapped file without blocks would end a reader in SIGBUS. Where the file system cannot
    reserve, the file only gets its size.

    Raises:
        OSError: there is no room; names the file and what it needs.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        reserve_opened(descriptor, path, nbytes)
    finally:
        os.close(descriptor)


def reserve_opened(descriptor: int, path: Path, nbytes: int) -> None:
    """Does what `reserve` does with a file that is open for writing."""
    with disk_errors(path, nbytes):
        reserve_blocks(descriptor, nbytes)
        os.ftruncate(descriptor, nbytes)


def reserve_blocks(descriptor: int, nbytes: int) -> None:
    """Takes the blocks of an open file now; where the file system cannot, when they are written.

    Raises:
        OSError: there is no room.
    """
    if not nbytes or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


class EarlySync:
    """Makes long files durable while they are still being written; a context manager.

    The disk works while more is read and checked, so that little is left to wait for at the end.
    It replaces no sync: what has not been written yet, or is passed over because the disk is busy,
    is left to `sync_tree`. What a sync raises is raised on leaving, since the system reports a
    failed write to one sync only.

    Args:
        each: bytes of one file after which it is synced, if the disk is not busy.
    """

    def __init__(self, each: int | None = None) -> None:
        self._each = _EARLY_BYTES if each is None else each
        self._pool = ThreadPoolExecutor(2)
        self._under_way: list[Future[None]] = []
        self._waiting: dict[Path, int] = {}

    def wrote(self, path: Path, nbytes: int) -> None:
        """Notes that so many bytes were written to a file; never waits."""
        nbytes += self._waiting.get(path, 0)
        self._waiting[path] = nbytes
        if nbytes < self._each or sum(not sync.done() for sync in self._under_way) > 1:
            return
        self._waiting[path] = 0
        self._under_way = [s for s in self._under_way if not s.done() or s.exception() is not None]
        self._under_way.append(self._pool.submit(_sync_file, path))

    def __enter__(self) -> EarlySync:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if error is None:
            for sync in self._under_way:
                if not sync.cancelled():
                    sync.result()


def sync_tree(directory: Path) -> None:
    """Makes all files and directories below a directory, and itself, durable."""
    files: list[str] = []
    directories: list[str] = []
    for root, _, names in os.walk(directory):
        directories.append(root)
        files.extend(os.path.join(root, name) for name in names)
    paths = files + directories
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        first = 0
        while first < len(paths):
            some = paths[first : first + _OPENED]
            first += _sync_together(some, max(0, len(files) - first), pool)


def _sync_together(paths: Sequence[str], files: int, pool: ThreadPoolExecutor) -> int:
    """Makes files, which come first, and directories durable, all of them open meanwhile.

    Returns how many of the paths that was.
    """
    opened: list[int] = []
    try:
        _open_some(paths, opened)
        _begin_writing(opened[:files])
        # Nothing but the syncs: threads that wait for the interpreter take longer than the disk.
        shares = [range(start, len(opened), _SYNC_THREADS) for start in range(_SYNC_THREADS)]
        under_way = [pool.submit(_sync_share, opened, share) for share in shares if share]
        failed = {i: error for share in under_way for i, error in share.result()}
        for i in sorted(failed):
            if i < files:
                with disk_errors(Path(paths[i]), os.fstat(opened[i]).st_size):
                    raise failed[i]
            _check_directory_sync(failed[i])
        return len(opened)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _open_some(paths: Sequence[str], opened: list[int]) -> None:
    """Opens paths; where the process may have no more files, the first ones of them."""
    for path in paths:
        try:
            opened.append(os.open(path, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not opened:
                raise
            # Other threads of the process are to find some free.
            while len(opened) > _OPENED_LEAST:
                os.close(opened.pop())
            return


def _sync_share(opened: Sequence[int], share: Iterable[int]) -> list[tuple[int, OSError]]:
    """Syncs some of the open files; returns which failed, and how."""
    failed = []
    for i in share:
        try:
            os.fsync(opened[i])
        except OSError as error:
            failed.append((i, error))
    return failed


def _begin_writing(opened: Iterable[int]) -> None:
    """Has the disk begin with files that are synced next, all at once, where the system can.

    It makes nothing durable and reports nothing: what it leaves, and what fails, is met by a sync.
    """
    libc = ctypes.CDLL(None)
    if not sys.platform.startswith("linux") or not hasattr(libc, "sync_file_range"):
        return
    begin = libc.sync_file_range
    begin.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    for descriptor in opened:
        begin(descriptor, 0, 0, _WRITE)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with disk_errors(path, os.fstat(descriptor).st_size):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Makes the entries of a directory durable: what was created, renamed or removed in it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        _check_directory_sync(error)
    finally:
        os.close(descriptor)


def _check_directory_sync(error: OSError) -> None:
    """Raises the error of a sync of a directory, unless there is no such sync."""
    # Some network file systems know none.
    if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
        raise error


def exchange(first: Path, second: Path) -> bool:
    """Swaps two paths in one atomic step; returns whether the system can do that here."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(first), os.fsencode(second)
    at_cwd, swap = -100, 2
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(*paths, ctypes.c_uint(swap))
    elif hasattr(libc, "renameat2"):
        failed = libc.renameat2(at_cwd, paths[0], at_cwd, paths[1], ctypes.c_uint(swap))
    else:
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(second))


def remove_tree(path: Path) -> None:
    """Removes a file or directory that is only ours; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
