"""What threads do in one piece stays in one piece in a process that forks off meanwhile."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref

__all__ = ["new_lock"]

_MOST_SECONDS = 0.5
"""How long a fork waits for all locks together: a holder may wait for the thread that forks."""

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
_taken = threading.local()


def new_lock() -> threading.Lock:
    """Returns a lock during which no process forks off, if that does not take half a second."""
    _register()
    lock = threading.Lock()
    _locks.add(lock)
    return lock


@functools.cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_take, after_in_parent=_let_go, after_in_child=_let_go)


def _take() -> None:
    until = time.monotonic() + _MOST_SECONDS
    _taken.locks = [
        lock for lock in list(_locks) if lock.acquire(timeout=max(0.0, until - time.monotonic()))
    ]


def _let_go() -> None:
    for lock in _taken.__dict__.pop("locks", ()):
        lock.release()
