"""Defer signals while state is changed, so that Ctrl-C never leaves it half changed.

Python runs the handler of a signal between any two bytecodes of the main thread, and the handler of
SIGINT raises KeyboardInterrupt there. Inside of ``deferred`` signals are noted instead, and handled
where state is whole: at ``check()``, in a wait, inside of ``allowed``, and at the end.

SIGINT or SIGTERM that comes again a second after one that is still noted is handled at once, so
that a program can be stopped in whatever it hangs.

Example:
    >>> from replaykit.interrupts import Lock
    >>> lock = Lock()
    >>> with lock, lock:
    ...     lock.acquire(blocking=False)
    True
    >>> lock.release()
"""

from __future__ import annotations

# The module behind `signal`, which spends 15 microseconds on enums.
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

_LOOK = 0.05
"""Seconds between looks for signals, for a main thread that waits."""

_PATIENCE = 1.0
"""Seconds after which a signal that is repeated is handled at once."""

_ENDING = (int(signal.SIGINT), int(signal.SIGTERM))
_NAMES = (
    *("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM"),
    *("SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2"),
)
_NUMBERS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


class _Noter:
    """Stands in for a handler: notes signals while it is in use, and hands them on afterwards."""

    def __init__(self, signals: _Signals, handler: Any) -> None:
        self.signals, self.handler, self.in_use = signals, handler, True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.in_use:
            self.signals.note(number, frame)
        else:
            self.handler(number, frame)


class _Signals:
    """What the compiled core does, without it: the signals of the main thread."""

    def __init__(self) -> None:
        self.depth = self.open = self.shields = 0
        self._held: list[tuple[int, _Noter]] = []
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
                    noter = _Noter(self, handler)
                    self._held.append((number, noter))
                    _signal.signal(number, noter)
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        raised: BaseException | None = None
        back = len(self._held)
        while back:
            try:
                number, noter = self._held[back - 1]
                if _signal.getsignal(number) is noter:
                    _signal.signal(number, noter.handler)
                noter.in_use = False
                back -= 1
            except BaseException as error:  # of a handler that was back already
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

    def note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        since = dict(self._pending).get(number)
        again = since is not None and number in _ENDING and now - since >= _PATIENCE
        if (self.open and not self.shields) or again:
            self._pending = [one for one in self._pending if one[0] != number]
            self._handle(number, frame)
        elif since is None:
            self._pending.append((number, now))

    def _handle(
        self, number: int, frame: FrameType | None, held: list[tuple[int, _Noter]] | None = None
    ) -> None:
        for known, noter in self._held if held is None else held:
            if known == number:
                noter.handler(number, frame)
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
    """A re-entrant lock; signals wait while the main thread holds it."""

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
"""A context in which signals of the main thread are noted, and handled at its end.

It may be nested, and costs a microsecond; other threads have no signals to handle."""

allowed: Any
"""A context within ``deferred`` in which they are handled as they come: for waits that the system
does, where an error leaves nothing behind."""

shielded: Any
"""A context within ``deferred`` in which ``check`` and waits leave them noted: for taking back what
was begun."""

check: Callable[[], None]
"""Handles what was noted: raises KeyboardInterrupt where Ctrl-C has come. For places where an error
leaves nothing behind."""

Lock: Any
"""A re-entrant lock, as ``threading.RLock``; signals are deferred while the main thread has it.

Waiting for it in the main thread is ended by a signal whose handler raises.
"""

if _core is None:
    _signals = _Signals()
    deferred, allowed, shielded = _Deferred(_signals), _Allowed(_signals), _Shielded(_signals)
    check, Lock = _signals.check, _Lock
else:
    deferred, allowed, shielded = _core.Deferred(), _core.Allowed(), _core.Shielded()
    check, Lock = _core.check_interrupts, _core.Lock


def acquire(lock: Any) -> None:
    """Take a ``threading.Lock`` inside of ``deferred``, however long that takes.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile; the lock is not taken.
    """
    if lock.acquire(blocking=False):
        return
    while not lock.acquire(timeout=_LOOK):
        check()


def wait_for(changed: threading.Condition, predicate: Callable[[], bool]) -> None:
    """Wait inside of ``deferred`` until a condition, which is held, makes a predicate true.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile.
    """
    while not changed.wait_for(predicate, _LOOK):
        check()
