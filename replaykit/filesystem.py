"""Check free space, write files durably and atomically, and map files.

Before Python 3.13, ``mmap`` of Python keeps a file descriptor for each mapping. A data set of 80
columns would hold 80 of the 1024 descriptors that a process usually has. So the mappings here call
``mmap`` of the C library, which keeps none. Only `map_common` uses the ``mmap`` of Python for
mappings smaller than a large page.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import shutil
import sys
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EARLY_BYTES: Final = 16 << 20
_SYNC_THREADS: Final = 8
"""Number of sync threads. File systems merge their syncs, 2 to 10 times faster."""
_OPENED: Final = 128
"""Number of files open at once in a sync. Each group waits for its slowest file."""
_OPENED_LEAST: Final = 16
"""Size of such a group if the process runs out of descriptors."""
_WRITE: Final = 2
"""The flag of `sync_file_range` that starts writing without waiting."""


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, durably."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(directory)
        sync_directory(directory.parent)


def private_path(target: Path, purpose: str) -> Path:
    """Return a unique hidden path in the directory of a target, on its file system."""
    return target.with_name(f".{target.name}.{purpose}-{uuid.uuid4().hex}")


def siblings(target: Path, purpose: str) -> list[Path]:
    """Return the existing paths that `private_path` made for a target."""
    prefix = f".{target.name}.{purpose}-"
    try:
        names = os.listdir(target.parent)
    except FileNotFoundError:
        return []
    # Requires exactly 32 digits after the prefix, because another target's name may begin with it.
    return sorted(
        target.with_name(name)
        for name in names
        if name.startswith(prefix) and re.fullmatch("[0-9a-f]{32}", name[len(prefix) :])
    )


class NoRoomError(OSError):
    """A disk, quota or size limit is exhausted; the message names a remedy."""


@contextmanager
def disk_errors(path: Path, nbytes: int) -> Iterator[None]:
    """Convert "no space", "quota" and "file too large" errors to a `NoRoomError`."""
    try:
        yield
    except NoRoomError:
        raise
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise no_room(error.errno, path, nbytes) from error


def no_room(code: int | None, path: Path, nbytes: int) -> NoRoomError:
    """Return an error with the path, the needed and free bytes, and a remedy."""
    reason = os.strerror(code or errno.ENOSPC)
    try:
        free = f"{free_bytes(path):,} bytes are free there"
    except OSError:
        free = "the free space is unknown"
    return NoRoomError(
        code or errno.ENOSPC,
        f"{reason}: {nbytes:,} bytes are needed for {path}, {free}; free some space, raise the "
        "limit, or choose another directory",
        str(path),
    )


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist."""
    return shutil.disk_usage(existing(path)).free


def existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def require_room(directory: Path, total: int, largest: int) -> None:
    """Check before a write that files of these sizes fit.

    Raises:
        OSError: with ``ENOSPC`` if fewer than ``total`` bytes are free on the disk. With ``EFBIG``
            if this process may not write a file of ``largest`` bytes.
    """
    if free_bytes(directory) < total:
        raise no_room(errno.ENOSPC, directory, total)
    try:
        import resource
    except ImportError:  # no such limit outside POSIX
        return
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and largest > limit:
        raise no_room(errno.EFBIG, directory, largest)


def reserve(path: Path, nbytes: int) -> None:
    """Reserve the blocks of a file, so that a full disk raises an error at once.

    On a full disk, access to a mapped file without blocks would end the process with SIGBUS. If the
    file system cannot reserve blocks, the function only sets the file's size.

    Raises:
        OSError: the disk has no room; the error names the file and its size.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        reserve_opened(descriptor, path, nbytes)
    finally:
        os.close(descriptor)


def reserve_opened(descriptor: int, path: Path, nbytes: int) -> None:
    """Reserve the blocks of a file opened for writing; see `reserve`."""
    with disk_errors(path, nbytes):
        reserve_blocks(descriptor, nbytes)
        os.ftruncate(descriptor, nbytes)


def reserve_blocks(descriptor: int, nbytes: int) -> None:
    """Allocate the blocks of an open file, if the file system supports it.

    Raises:
        OSError: the disk has no room.
    """
    if not nbytes or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


class EarlySync:
    """A context manager that syncs long files while they are being written.

    The disk works while the caller reads and checks further data, so the final sync takes less
    time. `sync_tree` is still needed. `sync_tree` syncs bytes that are written later, and bytes
    that were skipped because the disk was busy. The system reports a failed write only once, so
    `sync_tree` would miss an error that an early sync has already received. Therefore the exit of
    the context raises that error.

    Args:
        each: number of bytes after which a file is synced, if the disk is not busy.
    """

    def __init__(self, each: int | None = None) -> None:
        self._each = _EARLY_BYTES if each is None else each
        self._pool = ThreadPoolExecutor(2)
        self._under_way: list[Future[None]] = []
        self._waiting: dict[Path, int] = {}
        self._lock = Lock()

    def wrote(self, path: Path, nbytes: int) -> None:
        """Report that ``nbytes`` bytes were written to a file; never waits for a disk."""
        with self._lock:  # several threads may write
            nbytes += self._waiting.get(path, 0)
            self._waiting[path] = nbytes
            if nbytes < self._each or sum(not sync.done() for sync in self._under_way) > 1:
                return
            self._waiting[path] = 0
            self._under_way = [
                s for s in self._under_way if not s.done() or s.exception() is not None
            ]
            self._under_way.append(self._pool.submit(sync_file, path))

    def __enter__(self) -> EarlySync:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if error is None:
            for sync in self._under_way:
                if not sync.cancelled():
                    sync.result()


def sync_tree(directory: Path) -> None:
    """Sync a directory and all files and directories below it."""
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
    """Sync as many paths as can be open at once, files before directories.

    Returns the number of synced paths.
    """
    opened: list[int] = []
    try:
        _open_some(paths, opened)
        _begin_writing(opened[:files])
        # The threads only sync, because a wait for the interpreter lock would take longer than the
        # disk.
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
    """Open paths, or only the first ones if the process has too few descriptors."""
    for path in paths:
        try:
            opened.append(os.open(path, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not opened:
                raise
            # Leaves some descriptors for the other threads of the process.
            while len(opened) > _OPENED_LEAST:
                os.close(opened.pop())
            return


def _sync_share(opened: Sequence[int], share: Iterable[int]) -> list[tuple[int, OSError]]:
    """Sync some of the open files; return positions and errors of failed files."""
    failed = []
    for i in share:
        try:
            os.fsync(opened[i])
        except OSError as error:
            failed.append((i, error))
    return failed


def _begin_writing(opened: Iterable[int]) -> None:
    """Start the disk writes of the files to be synced, if the system supports it.

    This makes nothing durable and reports no errors. The later syncs do both.
    """
    libc = ctypes.CDLL(None)
    if not sys.platform.startswith("linux") or not hasattr(libc, "sync_file_range"):
        return
    begin = libc.sync_file_range
    begin.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    for descriptor in opened:
        begin(descriptor, 0, 0, _WRITE)


def sync_file(path: Path) -> None:
    """Sync the content of a file; the system reports failures of earlier writes here."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with disk_errors(path, os.fstat(descriptor).st_size):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Sync the created, renamed and removed entries of a directory."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        _check_directory_sync(error)
    finally:
        os.close(descriptor)


def _check_directory_sync(error: OSError) -> None:
    """Raise the error of a directory sync, unless the file system cannot do it."""
    # Some network file systems cannot sync directories.
    if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
        raise error


def replace_file(path: Path, text: str, *, draft: Path | None = None, durable: bool = True) -> None:
    """Write a text to a file, which changes in one step.

    Args:
        path: the file.
        text: the content.
        draft: a path on the same file system, which is written first. An existing file there is
            replaced. The default is a unique hidden path, which is removed after an error.
        durable: whether the content also survives a loss of power.

    Raises:
        OSError: a write to the disk failed. An old file is unchanged.
    """
    hidden = private_path(path, "draft") if draft is None else draft
    try:
        with open(hidden, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(hidden, path)
    except BaseException:
        if draft is None:
            with suppress(OSError):
                hidden.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def exchange(first: Path, second: Path) -> bool:
    """Swap two paths atomically; return whether the system supports it here."""
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
    """Remove a private file or directory; leave files that cannot be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class Span(NamedTuple):
    """Bytes of a file, and their position in a range of memory.

    Attributes:
        descriptor: descriptor of a regular file that has these bytes.
        offset: offset of the first byte in the file.
        start: offset of the first byte in the range.
        nbytes: number of bytes.
    """

    descriptor: int
    offset: int
    start: int
    nbytes: int


def map_private(descriptor: int, nbytes: int) -> Any:
    """Map the first bytes of a file copy-on-write; changes never reach the file.

    No memory is reserved for the changes. If memory were reserved, the system would refuse a file
    larger than the memory, even if a process changes little of the file. The descriptor may be
    closed at once.

    Args:
        descriptor: descriptor of a regular file with at least ``nbytes`` bytes.
        nbytes: number of bytes to map, at least 1.

    Returns:
        An object with the buffer interface. Views of its buffer keep the object alive. The mapping
        ends with the object. A forked process has a separate mapping.

    Raises:
        OSError: the system refuses the mapping, for example with ``ENOMEM`` for too many mappings.
    """
    return _owned(_map(None, nbytes, 0, descriptor, 0), nbytes)


def map_common(descriptor: int, nbytes: int) -> Any:
    """Map the first bytes of a file; all mappings of the file share changes.

    A mapping of at least one large page begins at a multiple of the size of large pages. Otherwise
    the system could not use large pages. Arguments, result and errors are as for ``map_private``.
    """
    if nbytes < LARGE_PAGE:
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_WRITE)
    room = -(-nbytes // LARGE_PAGE) * LARGE_PAGE + LARGE_PAGE
    start = _map(None, room, mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-start // LARGE_PAGE) * LARGE_PAGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = _MMAP(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    if found != address:
        code = ctypes.get_errno()
        _MUNMAP(start, room)
        raise OSError(code, os.strerror(code))
    stop = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for first, last in ((start, address), (stop, start + room)):
        if first < last:
            _MUNMAP(first, last - first)
    return _owned(address, nbytes)


def map_spans(nbytes: int, spans: Iterable[Span]) -> Any:
    """Map parts of files to one range of memory; changes never reach the files.

    Bytes outside all spans are zero, and take memory once they are written. Only whole pages of a
    file can be mapped to whole pages of memory. So up to a page at either end of a span is copied.
    If ``offset`` and ``start`` of a span have different remainders modulo the page size, the whole
    span is copied.

    Args:
        nbytes: size of the range, at least 1.
        spans: parts of the range, without overlaps. The descriptors may be closed afterwards.

    Returns:
        As ``map_private``.

    Raises:
        OSError: the system refuses the mapping, for example with ``ENOMEM`` for too many mappings,
            or a file has too few bytes.
    """
    page = mmap.PAGESIZE
    address = _map(None, nbytes, mmap.MAP_ANONYMOUS, -1, 0)
    memory = _owned(address, nbytes)
    view = memoryview(memory).cast("B")
    for span in spans:
        stop = span.start + span.nbytes
        first, last = -(-span.start // page) * page, stop // page * page
        if (span.start - span.offset) % page or first >= last:
            first = last = stop
        else:
            at = span.offset + first - span.start
            _map(address + first, last - first, _MAP_FIXED, span.descriptor, at)
        for low, high in ((span.start, first), (last, stop)):
            _read_into(view[low:high], span.descriptor, span.offset + low - span.start)
    return memory


def _map(address: int | None, nbytes: int, flags: int, descriptor: int, offset: int) -> int:
    """Map a file privately without reserving memory; return the address."""
    flags |= mmap.MAP_PRIVATE | _NO_RESERVE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = _MMAP(address, nbytes, access, flags, descriptor, offset)
    if found in (None, _FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    assert found is not None
    return found


def _owned(address: int, nbytes: int) -> Any:
    """Return an object over mapped memory, which unmaps it when it is deleted."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    # The finalizer runs when no view can use the memory any more. It does not run at exit, because
    # tensors may outlive it and the system then unmaps the memory.
    weakref.finalize(memory, _MUNMAP, address, nbytes).atexit = False
    return memory


def _read_into(view: memoryview, descriptor: int, offset: int) -> None:
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise OSError(errno.EIO, f"the file ends {len(view)} bytes too early")
        view, offset = view[count:], offset + count


def _no_reserve() -> int:
    """Return MAP_NORESERVE for this processor; Python defines it since 3.13."""
    known = getattr(mmap, "MAP_NORESERVE", 0)
    if known or sys.platform != "linux":
        return known
    return 0x4000 if platform.machine() in ("x86_64", "aarch64", "riscv64") else 0


def _system() -> tuple[Callable[..., int | None], Callable[[int, int], int]]:
    """Return ``mmap`` and ``munmap`` of the C library of a 64-bit system."""
    library = ctypes.CDLL(None, use_errno=True)
    map_, unmap = library.mmap, library.munmap
    map_.restype = ctypes.c_void_p
    number, size, offset = ctypes.c_int, ctypes.c_size_t, ctypes.c_int64
    map_.argtypes = [ctypes.c_void_p, size, number, number, number, offset]
    unmap.restype = number
    unmap.argtypes = [ctypes.c_void_p, size]
    return map_, unmap


LARGE_PAGE: Final = 2 << 20
_MAP_FIXED: Final = 0x10
"""MAP_FIXED, equal on all systems with ``mmap``. Python does not define it."""
_FAILED: Final = (1 << 64) - 1
_NO_RESERVE: Final = _no_reserve()
_MMAP, _MUNMAP = _system()
