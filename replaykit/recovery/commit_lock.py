"""A lock whose last release commits."""

from __future__ import annotations

from collections.abc import Callable

from replaykit.interrupts import Lock

__all__ = ["CommitLock"]


class CommitLock:
    """A re-entrant lock that settles what was done while it was held before it is let go.

    Args:
        settle: called by the thread that holds it, at its outermost release.

    Example:
        >>> from replaykit.recovery import CommitLock
        >>> lock = CommitLock(lambda: print("settled"))
        >>> with lock, lock:
        ...     print("held")
        held
        settled
    """

    def __init__(self, settle: Callable[[], None]) -> None:
        self._lock = Lock()
        self._settle = settle
        self._depth = 0  # guarded by the lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Takes the lock; see ``threading.RLock``."""
        if not self._lock.acquire(blocking, timeout):
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        """Gives it back. What ``settle`` raises is raised, and it is given back all the same."""
        try:
            if self._depth == 1:
                self._settle()
        finally:
            self._depth -= 1
            self._lock.release()

    def _is_owned(self) -> bool:
        """Whether this thread holds it, as of a ``threading.RLock``."""
        return bool(self._lock._is_owned())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
