"""Run tasks in threads, each of which begins when the one before it has begun."""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from replaykit.interrupts import acquire

__all__ = ["Outcome", "Task", "ThreadPool", "new_lock"]

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


Task = Callable[[], Callable[[], None] | None]
"""What is done in turn; it returns what may be done beside others. Neither raises."""


class Outcome:
    """What comes of a task, for the one who waits for it. A lock is a quarter of a ``Future``."""

    __slots__ = ("_error", "_ready", "_value")

    def __init__(self) -> None:
        self._ready = threading.Lock()
        self._ready.acquire()
        self._value: object = None
        self._error: BaseException | None = None

    def set(self, value: object, error: BaseException | None = None) -> None:
        """Says what it is; once."""
        self._value, self._error = value, error
        self._ready.release()

    def get(self) -> object:
        """Waits for it, returns the value or raises the error; for one caller, once."""
        acquire(self._ready)
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            self = None  # type: ignore[assignment] # the error knows this frame


class ThreadPool:
    """Up to ``count`` threads. One at a time has the turn: it does what is to be done in turn, and
    passes the turn on before it does the rest. One at a time waits for the next task, so that
    nobody is woken but who has something to do. Who leaves a task may do it himself, if nobody has
    the turn.

    They are daemons, since they wait for ever, and are joined before the interpreter ends: work of
    torch must not be under way then. ``ending``: that has begun; what has not begun never will.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._tasks: deque[Task] = deque()
        # For each task that is for a thread, if it is not done before, 1; for each thread, 0.
        self._calls: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._gate, self._turn = threading.Lock(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self.ending = False
        _join_at_exit()
        _CREWS.add(self)

    def leave(self, task: Task) -> None:
        """Has a task done after those before it, by who calls ``help``. Not for two at once."""
        self._tasks.append(task)

    def give(self, task: Task) -> None:
        """Has a task done by a thread after those before it. Not for two at once.

        Raises:
            RuntimeError: the system gives no thread, and there is none yet. The task is not given.
        """
        self._one_more()
        self._tasks.append(task)
        self._calls.put(1)

    def help(self, *, wait: bool = False) -> list[Callable[[], None]]:
        """Does the tasks that are there in this thread, if nobody has the turn.

        Returns what may be done beside others. What is left is for ``hand_over``.

        Args:
            wait: for whoever has the turn; then nothing is left.
        """
        rest = []
        while self._tasks and self._has_turn(wait):
            try:
                beside = self._next()
            finally:
                self._turn.release()
            if beside is not None:
                rest.append(beside)
        return rest

    def _has_turn(self, wait: bool) -> bool:
        if wait:
            acquire(self._turn)
        return wait or self._turn.acquire(blocking=False)

    @property
    def left(self) -> bool:
        """Whether there are tasks that nobody has begun."""
        return bool(self._tasks)

    def hand_over(self) -> None:
        """Has threads do what is left. Not for two at once.

        Raises:
            RuntimeError: as ``give``.
        """
        for _ in range(len(self._tasks)):
            self._one_more()
            self._calls.put(1)

    def _one_more(self) -> None:
        """Starts a thread, if there are not all of them."""
        if len(self._threads) < self._count:
            number = len(self._threads)
            thread = threading.Thread(
                target=_work, args=(self,), name=f"{self._name}_{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:
                    raise
            else:
                self._threads.append(thread)

    def _next(self) -> Callable[[], None] | None:
        """Does what is next, if somebody has not done it already. For who has the turn."""
        return self._tasks.popleft()() if self._tasks else None

    def dismiss(self) -> None:
        """Has the threads end when they have done what was given; may be called from anywhere."""
        for _ in self._threads:
            self._calls.put(0)

    def join(self) -> None:
        """Waits until the threads that were dismissed have ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def abandon(self) -> None:
        """Ends at the end of the process: what is being done is waited for, the rest is not."""
        if self._process == os.getpid():
            self.ending = True
            self.dismiss()
            self.join()


def _work(crew: ThreadPool) -> None:
    while True:
        with crew._gate:
            if not crew._calls.get() or crew.ending:
                return
            with crew._turn:
                rest = crew._next()
        if rest is not None:
            rest()
        del rest  # nothing is held while it waits


_CREWS: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


@functools.cache
def _join_at_exit() -> None:
    atexit.register(_abandon_all)


def _abandon_all() -> None:
    for crew in list(_CREWS):
        crew.abandon()
