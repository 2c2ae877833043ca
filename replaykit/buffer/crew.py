"""Threads that do tasks, of which each begins when the one before it has begun."""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable

__all__ = ["Crew", "Outcome", "Task"]

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
        self._ready.acquire()
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            self = None  # type: ignore[assignment] # the error knows this frame


class Crew:
    """Up to ``count`` threads. One at a time has the turn: it waits for the next task, does what is
    to be done in turn, and passes the turn on before it does the rest. So nobody is woken but who
    has something to do.

    They are daemons, since they wait for ever, and are joined before the interpreter ends: work of
    torch must not be under way then. ``ending``: that has begun; what has not begun never will.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self.ending = False
        _join_at_exit()
        _CREWS.add(self)

    def give(self, task: Task) -> None:
        """Has a task done after those given before. Not for two threads at once.

        Raises:
            RuntimeError: the system gives no thread, and there is none yet. The task is not given.
        """
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
        self._tasks.put(task)

    def dismiss(self) -> None:
        """Has the threads end when they have done what was given; may be called from anywhere."""
        for _ in self._threads:
            self._tasks.put(None)

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


def _work(crew: Crew) -> None:
    while True:
        with crew._turn:
            task = crew._tasks.get()
            if task is None or crew.ending:
                return
            rest = task()
        if rest is not None:
            rest()
        del task, rest  # nothing is held while it waits


_CREWS: weakref.WeakSet[Crew] = weakref.WeakSet()


@functools.cache
def _join_at_exit() -> None:
    atexit.register(_abandon_all)


def _abandon_all() -> None:
    for crew in list(_CREWS):
        crew.abandon()
