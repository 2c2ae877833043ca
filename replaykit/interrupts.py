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

# The module behind `signal`. A call of `signal` itself spends 15 microseconds on enums.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from replaykit import native

__all__ = ["Lock", "acquire", "allowed", "check", "deferred", "shielded", "wait_for"]

_POLL_S = 0.05
"""Seconds between checks for signals while the main thread waits."""

_PATIENCE = 1.0
"""Seconds that a signal is pending before the same signal is handled at once."""

_ENDING = (int(signal.SIGINT), int(signal.SIGTERM))
_NAMES = (
    *("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM"),
    *("SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2"),
)
_NUMBERS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


class _Deferrer:
    """A handler that records signals while in use. Later it calls the old handler."""

    def __init__(self, signals: _Signals, handler: Any) -> None:
        self.signals, self.handler, self.in_use = signals, handler, True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.in_use:
            self.signals.defer(number, frame)
        else:
            self.handler(number, frame)


class _Signals:
    """The signals of the main thread, in Python instead of the compiled core."""

    def __init__(self) -> None:
        self.depth = self.open = self.shields = 0
        self._held: list[tuple[int, _Deferrer]] = []
        self._pending: list[tuple[int, float]] = []
        self._at_fork = False

    def here(self) -> bool:
        return threading.get_ident() == threading.main_thread().ident

    def enter(self) -> None:
        if not self.here():
            return
        if self.depth == 0:
            self._hold()
        self.depth += 1

    def leave(self) -> None:
        if self.depth == 0 or not self.here():
            return
        self.depth -= 1
        if self.depth == 0:
            self.open = self.shields = 0
            self._give_back()

    def check(self) -> None:
        while self._pending and not self.shields and self.here():
            number, _ = self._pending.pop(0)
            self._handle(number, None)

    def _hold(self) -> None:
        if not self._at_fork and hasattr(os, "register_at_fork"):
            self._at_fork = True
            os.register_at_fork(after_in_child=self._forked)
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    deferrer = _Deferrer(self, handler)
                    self._held.append((number, deferrer))
                    _signal.signal(number, deferrer)
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        raised: BaseException | None = None
        back = len(self._held)
        while back:
            try:
                number, deferrer = self._held[back - 1]
                if _signal.getsignal(number) is deferrer:
                    _signal.signal(number, deferrer.handler)
                deferrer.in_use = False
                back -= 1
            except BaseException as error:  # raised by a handler that was restored before
                raised = error
        held, self._held = self._held, []
        noted, self._pending = self._pending, []
        for number, _ in noted:
            try:
                if raised is None:
                    self._handle(number, None, held)
                else:
                    signal.raise_signal(number)
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised

    def defer(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        since = dict(self._pending).get(number)
        again = since is not None and number in _ENDING and now - since >= _PATIENCE
        if (self.open and not self.shields) or again:
            self._pending = [one for one in self._pending if one[0] != number]
            self._handle(number, frame)
        elif since is None:
            self._pending.append((number, now))

    def _handle(
        self, number: int, frame: FrameType | None, held: list[tuple[int, _Deferrer]] | None = None
    ) -> None:
        for known, deferrer in self._held if held is None else held:
            if known == number:
                deferrer.handler(number, frame)
                return

    def _forked(self) -> None:
        self.depth = self.open = self.shields = 0
        self._pending.clear()
        self._give_back()


class _Deferred:
    def __init__(self, signals: _Signals) -> None:
        self._signals = signals

    def __enter__(self) -> None:
        self._signals.enter()

    def __exit__(self, *_: object) -> None:
        self._signals.leave()


class _Allowed:
    def __init__(self, signals: _Signals) -> None:
        self._signals = signals

    def __enter__(self) -> None:
        signals = self._signals
        if signals.depth and signals.here():
            signals.check()
            signals.open += 1

    def __exit__(self, *_: object) -> None:
        signals = self._signals
        if signals.open and signals.here():
            signals.open -= 1


class _Shielded:
    def __init__(self, signals: _Signals) -> None:
        self._signals = signals

    def __enter__(self) -> None:
        signals = self._signals
        if signals.depth and signals.here():
            signals.shields += 1

    def __exit__(self, *_: object) -> None:
        signals = self._signals
        if signals.shields and signals.here():
            signals.shields -= 1


class _Lock:
    """A re-entrant lock; signals are deferred while the main thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        deferred.__enter__()
        try:
            if blocking and timeout < 0:
                acquire(self._lock)
            elif not self._lock.acquire(blocking, timeout if blocking else -1):
                deferred.__exit__(None, None, None)
                return False
        except BaseException:
            deferred.__exit__(None, None, None)
            raise
        return True

    def release(self) -> None:
        self._lock.release()
        deferred.__exit__(None, None, None)

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


_core = native.core()

deferred: Any
"""A context that records signals of the main thread, and handles them at its end.

The context may be nested, and costs a microsecond. In other threads, the context does nothing."""

allowed: Any
"""A context within ``deferred`` that handles signals on arrival.

Use this context for waits in system calls, where an error leaves nothing half done."""

shielded: Any
"""A context within ``deferred`` in which ``check`` and waits handle no signals.

Use this context for rollbacks, which must not be interrupted.
"""

check: Callable[[], None]
"""Handle the recorded signals; raise KeyboardInterrupt after Ctrl-C.

Call this function only where an error leaves nothing half done."""

Lock: Any
"""A lock like ``threading.RLock`` that defers signals in the main thread.

Signals are deferred while the main thread holds the lock. If the handler of a signal raises, a wait
for the lock ends.
"""

if _core is None:
    _signals = _Signals()
    deferred, allowed, shielded = _Deferred(_signals), _Allowed(_signals), _Shielded(_signals)
    check, Lock = _signals.check, _Lock
else:
    deferred, allowed, shielded = _core.Deferred(), _core.Allowed(), _core.Shielded()
    check, Lock = _core.check_interrupts, _core.Lock


def acquire(lock: Any) -> None:
    """Acquire a ``threading.Lock`` inside ``deferred``; wait without a time limit.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed during the wait; the lock is not acquired.
    """
    if lock.acquire(blocking=False):
        return
    while not lock.acquire(timeout=_POLL_S):
        check()


def wait_for(changed: threading.Condition, predicate: Callable[[], bool]) -> None:
    """Wait inside ``deferred``, with a condition held, until a predicate is true.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed during the wait.
    """
    while not changed.wait_for(predicate, _POLL_S):
        check()
