"""Writes that a client does not wait for, in the order in which they were given."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from replaykit.buffer.crew import Crew
from replaykit.errors import RateLimiterTimeout
from replaykit.sharding.ahead import ShardedResult
from replaykit.sharding.errors import ShardSilent

__all__ = ["Outbox"]

_MOST = 16
"""Writes under way, beyond which the oldest is waited for: they hold copies of their rows."""


_LOOK_AGAIN_S = 0.005


class Outbox:
    """Brings writes to their shards in a thread of its own, one after the other. Thread-safe.

    The thread starts with the first write and ends with the outbox, after what was given.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: deque[_Write] = deque()
        self._crew: Crew | None = None
        self._held_up = False

    def put(self, deliver: Callable[[], Any], *, paced: bool = False) -> ShardedResult:
        """Has a write done after those given before; returns what will come of it.

        ``paced``: it may be held up.
        """
        write = _Write(paced)
        with self._lock:
            if self._crew is None:
                self._crew = Crew(1, "replaykit-outbox")
                weakref.finalize(self, self._crew.dismiss).atexit = False
            self._crew.give(functools.partial(_run, deliver, write))
            self._under_way.append(write)
            ahead = list(self._under_way)[:-_MOST]
        for other in ahead:
            other.done.wait()
        return ShardedResult(write.get, write.done.is_set)

    def settle(self, until: float | None = None, *, held_up: bool = True) -> None:
        """Waits until all is written.

        Args:
            until: no longer than that.
            held_up: also while one is held up.

        Raises:
            RateLimiterTimeout: not all is written by then.
            Exception: what a write has raised whose result nobody has asked for; once.
        """
        with self._lock:
            under_way = list(self._under_way)
        for write in under_way:
            if held_up:
                if not write.done.wait(None if until is None else max(0, until - time.monotonic())):
                    raise RateLimiterTimeout(
                        "writes that this handle was given before wait for samples"
                    )
            else:
                while not write.done.wait(_LOOK_AGAIN_S) and not self._held_up:
                    pass
        self.check()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """In the thread of the writes: while one waits for others than shards."""
        self._held_up = True
        try:
            yield
        finally:
            self._held_up = False

    def check(self) -> None:
        """Raises as ``settle`` what has been raised by now; does not wait."""
        with self._lock:
            while self._under_way and self._under_way[0].done.is_set():
                write = self._under_way.popleft()
                if write.error is not None and not write.asked:
                    write.asked = True
                    raise write.error


class _Write:
    """A write under way, and what has come of it."""

    def __init__(self, paced: bool) -> None:
        self.paced = paced
        self.done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self.asked = False

    def get(self, within: float | None, held_up: float | None) -> Any:
        if self.paced and not self.done.wait(held_up):
            raise RateLimiterTimeout(
                f"rows that were sent have not been written within {held_up or 0:g} s; they may "
                "still wait for samples"
            )
        if not self.done.wait(within):
            raise ShardSilent(f"rows that were sent have not been written within {within or 0:g} s")
        self.asked = True
        if self.error is not None:
            raise self.error
        return self.value


def _run(deliver: Callable[[], Any], write: _Write) -> None:
    try:
        write.value = deliver()
    except BaseException as error:
        write.error = error
    finally:
        write.done.set()
