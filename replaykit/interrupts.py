"""Defer signals during changes of state, so that Ctrl-C never interrupts a change.

Python may run the handler of a signal between any two bytecodes of the main thread. The handler of
SIGINT raises KeyboardInterrupt there. Inside ``deferred``, signals are recorded. They are handled
later, when the state is consistent: at ``check()``, in a wait, inside ``allowed``, and at the end.

A SIGINT or SIGTERM is handled at once if the same signal has been pending for a second. A program
that hangs can therefore always be stopped.

Example:
    >>> from replaykit.interrupts import Lock
    >>> lock = Lock()
    >>> with lock, lock:
    ...     lock.acquire(blocking=False)
    True
    >>> lock.release()
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from replaykit import native

_POLL_S = 0.05
"""Seconds between checks for signals while the main thread waits."""

deferred: Any = native.core.Deferred()
"""A context that records signals of the main thread, and handles them at its end.

The context may be nested, and costs a microsecond. In other threads, the context does nothing."""

allowed: Any = native.core.Allowed()
"""A context within ``deferred`` that handles signals on arrival.

Use this context for waits in system calls, where an error leaves nothing half done."""

shielded: Any = native.core.Shielded()
"""A context within ``deferred`` in which ``check`` and waits handle no signals.

Use this context for rollbacks, which must not be interrupted.
"""

sealed: Any = native.core.Sealed()
"""A context within ``deferred`` in which repeated signals wait, too.

Use this context for calls of libraries that cannot handle an error in a callback, and call
``check`` between them.
"""

check: Callable[[], None] = native.core.check_interrupts
"""Handle the recorded signals; raise KeyboardInterrupt after Ctrl-C.

Call this function only where an error leaves nothing half done."""

Lock: Any = native.core.Lock
"""A lock like ``threading.RLock`` that defers signals in the main thread.

Signals are deferred while the main thread holds the lock. If the handler of a signal raises, a wait
for the lock ends.
"""

_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The objects that have made a lock in this process."""

_making: Any = Lock()
"""The lock of the making of locks."""


class ProcessLock:
    """An attribute with a lock, which is made at its first use in each process.

    A forked process gets another lock. A thread that held the lock at the fork does not exist in
    the forked process, so it could never release the lock.

    Args:
        make: function that returns the lock of an object.

    Cost: that of a plain attribute, after the first use.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            return self
        with _making:
            _drop_locks_in_children()
            if "lock" not in owner.__dict__:  # the first use in another thread may have made it
                _owners[id(owner)] = owner
                owner.__dict__["lock"] = self._make(owner)
            return owner.__dict__["lock"]


@functools.cache
def _drop_locks_in_children() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_drop_locks)


def _drop_locks() -> None:
    global _making
    _making = Lock()
    for owner in list(_owners.values()):
        owner.__dict__.pop("lock", None)
    _owners.clear()


def acquire(lock: Any, timeout: float | None = None) -> bool:
    """Acquire a ``threading.Lock`` inside ``deferred``; return whether it is acquired in time.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed during the wait; the lock is not acquired.
    """
    until = math.inf if timeout is None else time.monotonic() + timeout
    acquired = bool(lock.acquire(blocking=False))
    while not acquired and (left := until - time.monotonic()) > 0:
        acquired = lock.acquire(timeout=min(left, _POLL_S))
        if not acquired:
            check()
    return acquired


def wait_for(changed: threading.Condition, predicate: Callable[[], bool]) -> None:
    """Wait inside ``deferred``, with a condition held, until a predicate is true.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed during the wait.
    """
    while not changed.wait_for(predicate, _POLL_S):
        check()
