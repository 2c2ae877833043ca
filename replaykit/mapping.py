"""Mapping files copy-on-write, without keeping them open: one, or parts of several in a row.

Python's ``mmap`` keeps a descriptor for each mapping before 3.13: a data set of 80 columns would
hold 80 of the 1024 that a process usually has. So the system's own ``mmap`` is called where it can
be, and memory is given back when the last tensor over it is gone.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

__all__ = ["LARGE_PAGE", "Span", "can_map_spans", "map_common", "map_private", "map_spans"]


class Span(NamedTuple):
    """Bytes of a file that are to lie in a range of memory.

    Attributes:
        descriptor: of a regular file that has these bytes.
        offset: of the first one in the file.
        start: of the first one in the range.
        nbytes: how many there are.
    """

    descriptor: int
    offset: int
    start: int
    nbytes: int


def map_private(descriptor: int, nbytes: int) -> Any:
    """Maps the first bytes of a file, to be read and changed; changes never reach the file.

    No memory is reserved for the changes: reserving would refuse a file larger than the memory,
    though a process changes little of it. The descriptor may be closed at once.

    Args:
        descriptor: of a regular file that has ``nbytes`` bytes.
        nbytes: at least 1.

    Returns:
        An object with the buffer interface. What is made from its buffer keeps it alive, and the
        mapping ends with it; a forked process has one of its own.

    Raises:
        OSError: the system refuses, for example with ``ENOMEM`` for too many mappings.
    """
    if _SYSTEM is None:
        return _map_by_python(descriptor, nbytes)
    return _owned(_map(None, nbytes, 0, descriptor, 0), nbytes)


def map_common(descriptor: int, nbytes: int) -> Any:
    """Maps the first bytes of a file, to be read and changed; all who map it see the changes.

    From the size of a large page on the memory begins at a multiple of it, without which the system
    cannot use large pages. Arguments, result and errors as for ``map_private``.
    """
    if _SYSTEM is None or nbytes < LARGE_PAGE:
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_WRITE)
    map_, unmap = _SYSTEM
    room = -(-nbytes // LARGE_PAGE) * LARGE_PAGE + LARGE_PAGE
    start = _map(None, room, mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-start // LARGE_PAGE) * LARGE_PAGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = map_(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0)
    if found != address:
        code = ctypes.get_errno()
        unmap(start, room)
        raise OSError(code, os.strerror(code))
    stop = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    for first, last in ((start, address), (stop, start + room)):
        if first < last:
            unmap(first, last - first)
    return _owned(address, nbytes)


def can_map_spans() -> bool:
    """Whether this system can map parts of files where one wants them to be."""
    return _SYSTEM is not None


def map_spans(nbytes: int, spans: Iterable[Span]) -> Any:
    """Makes one range of memory out of parts of files, to be read and changed; changes never reach
    the files.

    What no span covers is zero, and takes memory when it is written. Only whole pages of a file can
    be mapped, and only where a page of memory begins: at most a page at either end of a span is
    copied, and all of a span whose offset and start are not the same modulo a page.

    Args:
        nbytes: size of the range, at least 1.
        spans: parts of it; they do not overlap. The descriptors may be closed afterwards.

    Returns:
        As ``map_private``.

    Raises:
        NotImplementedError: the system's own ``mmap`` is not at hand (``can_map_spans``).
        OSError: the system refuses, for example with ``ENOMEM`` for too many mappings, or a file
            has less bytes.
    """
    if _SYSTEM is None:
        raise NotImplementedError("mapping parts of files in a row needs a 64-bit POSIX system")
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
    """Maps privately without reserving memory; returns the address."""
    assert _SYSTEM is not None
    flags |= mmap.MAP_PRIVATE | _NO_RESERVE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    found = _SYSTEM[0](address, nbytes, access, flags, descriptor, offset)
    if found in (None, _FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    assert found is not None
    return found


def _owned(address: int, nbytes: int) -> Any:
    """Returns an object over mapped memory, which is unmapped with it."""
    assert _SYSTEM is not None
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Called when the object is about to go, at which time nothing is left that could use the
    # memory. Not at exit: tensors may outlive it, and the system unmaps then anyway.
    weakref.finalize(memory, _SYSTEM[1], address, nbytes).atexit = False
    return memory


def _read_into(view: memoryview, descriptor: int, offset: int) -> None:
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise OSError(errno.EIO, f"the file ends {len(view)} bytes too early")
        view, offset = view[count:], offset + count


def _map_by_python(descriptor: int, nbytes: int) -> mmap.mmap:
    options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    if _NO_RESERVE:
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        return mmap.mmap(
            descriptor, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **options
        )
    return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY, **options)


def _no_reserve() -> int:
    """Returns the flag MAP_NORESERVE; Python has it from 3.13, its number varies by processor."""
    known = getattr(mmap, "MAP_NORESERVE", 0)
    if known or sys.platform != "linux":
        return known
    return 0x4000 if platform.machine() in ("x86_64", "aarch64", "i686", "riscv64") else 0


def _system() -> tuple[Callable[..., int | None], Callable[[int, int], int]] | None:
    """Returns ``mmap`` and ``munmap`` of the C library, if their types are known here."""
    # With 32 bits the type of an offset differs between libraries.
    if os.name != "posix" or sys.maxsize < 1 << 32:
        return None
    try:
        library = ctypes.CDLL(None, use_errno=True)
        map_, unmap = library.mmap, library.munmap
    except (OSError, AttributeError):
        return None
    map_.restype = ctypes.c_void_p
    number, size, offset = ctypes.c_int, ctypes.c_size_t, ctypes.c_int64
    map_.argtypes = [ctypes.c_void_p, size, number, number, number, offset]
    unmap.restype = number
    unmap.argtypes = [ctypes.c_void_p, size]
    return map_, unmap


LARGE_PAGE: Final = 2 << 20
_MAP_FIXED: Final = 0x10
"""The same number on all systems with ``mmap``; Python does not name it."""
_FAILED: Final = (1 << 64) - 1
_NO_RESERVE: Final = _no_reserve()
_SYSTEM: Final = _system()
