"""Mapping a file copy-on-write, without keeping it open.

Python's ``mmap`` keeps a descriptor for each mapping before 3.13: a data set of 80 columns would
hold 80 of the 1024 that a process usually has. So the system's own ``mmap`` is called where it can
be, and memory is given back when the last tensor over it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

__all__ = ["map_private"]


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
    map_, unmap = _SYSTEM
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    address = map_(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address in (None, _FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Called when the object is about to go, at which time nothing is left that could use the
    # memory. Not at exit: tensors may outlive it, and the system unmaps then anyway.
    weakref.finalize(memory, unmap, address, nbytes).atexit = False
    return memory


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


_FAILED: Final = (1 << 64) - 1
_NO_RESERVE: Final = _no_reserve()
_SYSTEM: Final = _system()
