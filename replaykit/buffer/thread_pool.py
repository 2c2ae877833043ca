"""Run tasks in threads: first parts one after the other, second parts in parallel."""

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
"""Maximum seconds that a fork waits for all locks, since a holder may wait for it."""

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
_taken = threading.local()


def new_lock() -> threading.Lock:
    """Return a lock. A fork waits for the lock's release, but at most half a second."""
    _register()
    lock = threading.Lock()
    _locks.add(lock)
    return lock


@functools.cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_take, after_in_parent=_drop, after_in_child=_drop)


def _take() -> None:
    until = time.monotonic() + _MOST_SECONDS
    _taken.locks = [
        lock for lock in list(_locks) if lock.acquire(timeout=max(0.0, until - time.monotonic()))
    ]


def _drop() -> None:
    for lock in _taken.__dict__.pop("locks", ()):
        lock.release()


Task = Callable[[], Callable[[], None] | None]
"""A function that runs in turn. It returns its second part, which may run in parallel, or None.
Neither raises."""


class Outcome:
    """The result of a task, for one waiting caller.

    Its lock costs a quarter of the time of a ``Future``.
    """

    __slots__ = ("_error", "_ready", "_value")

    def __init__(self) -> None:
        self._ready = threading.Lock()
        self._ready.acquire()
        self._value: object = None
        self._error: BaseException | None = None

    def set(self, value: object, error: BaseException | None = None) -> None:
        """Set the value or the error, once."""
        self._value, self._error = value, error
        self._ready.release()

    def get(self) -> object:
        """Wait, then return the value or raise the error. Call it once."""
        acquire(self._ready)
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            self = None  # type: ignore[assignment] # the error refers to this frame


class ThreadPool:
    """Up to ``count`` threads that run tasks in turn.

    Threads take turns. The thread that has the turn runs a task, and passes the turn on before it
    runs the second part of the task. Only one thread waits for the next task, so that no thread
    wakes without work. If no thread has the turn, a caller may run the tasks that it has queued
    with ``leave``.

    The threads are daemons, because they wait for tasks for ever. They are joined before the
    interpreter ends, because torch must not run then. From then on ``ending`` is True, and tasks
    that have not begun will never run.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._tasks: deque[Task] = deque()
        # 1 for each task that a thread runs if the task is still queued; 0 ends a thread.
        self._calls: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._gate, self._turn = threading.Lock(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()
        self.ending = False
        _join_at_exit()
        _POOLS.add(self)

    def leave(self, task: Task) -> None:
        """Queue a task for a caller of ``help``. This method is not thread-safe."""
        self._tasks.append(task)

    def give(self, task: Task) -> None:
        """Queue a task for a thread. This method is not thread-safe.

        Raises:
            RuntimeError: there is no thread yet, and the system cannot start one. The task is not
                queued.
        """
        self._one_more()
        self._tasks.append(task)
        self._calls.put(1)

    def help(self, *, wait: bool = False) -> list[Callable[[], None]]:
        """Run the queued tasks in this thread while no other thread has the turn.

        Args:
            wait: True to wait for the turn if another thread has it. After such a call, no task
                remains in the queue.

        Returns:
            The second parts of the tasks, which may run in parallel. Call ``hand_over`` to give the
            remaining tasks to threads.
        """
        rest = []
        while self._tasks and self._has_turn(wait):
            try:
                second = self._next()
            finally:
                self._turn.release()
            if second is not None:
                rest.append(second)
        return rest

    def _has_turn(self, wait: bool) -> bool:
        if wait:
            acquire(self._turn)
        return wait or self._turn.acquire(blocking=False)

    @property
    def left(self) -> bool:
        """True if there are tasks that no thread has begun."""
        return bool(self._tasks)

    def hand_over(self) -> None:
        """Give the remaining tasks to threads. This method is not thread-safe.

        Raises:
            RuntimeError: as for ``give``.
        """
        for _ in range(len(self._tasks)):
            self._one_more()
            self._calls.put(1)

    def _one_more(self) -> None:
        """Start a thread, unless all threads run."""
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
        """Run the next task, if one is left. The caller has the turn."""
        return self._tasks.popleft()() if self._tasks else None

    def dismiss(self) -> None:
        """Make the threads end after the queued tasks. A finalizer may call this."""
        for _ in self._threads:
            self._calls.put(0)

    def join(self) -> None:
        """Wait until the dismissed threads have ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def abandon(self) -> None:
        """End the threads at exit; wait for running tasks and drop the others."""
        if self._process == os.getpid():
            self.ending = True
            self.dismiss()
            self.join()


def _work(pool: ThreadPool) -> None:
    while True:
        with pool._gate:
            if not pool._calls.get() or pool.ending:
                return
            with pool._turn:
                rest = pool._next()
        if rest is not None:
            rest()
        del rest  # a waiting thread holds no reference


_POOLS: weakref.WeakSet[ThreadPool] = weakref.WeakSet()


@functools.cache
def _join_at_exit() -> None:
    atexit.register(_abandon_all)


def _abandon_all() -> None:
    for pool in list(_POOLS):
        pool.abandon()
