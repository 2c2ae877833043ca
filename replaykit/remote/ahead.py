"""Requests for batches that are under way before anybody asks for them."""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable
from typing import Any

from replaykit.remote.replies import Reply, first_come, until_one_comes

__all__ = ["Ahead", "Taken"]

_Entry = tuple[int, Reply]
"""A request: the how manyth it is, and its answer."""


class Ahead:
    """Keeps up to ``depth`` requests under way, and hands out their answers.

    ``_lock`` guards the queue; nobody waits for an answer with it.

    Args:
        request: sends a message that asks for so many batches, and returns the reply of each.
        depth: how many are under way at most; 0: each is asked for when it is needed.
        late: what to raise where an answer has not come in time.
        any_order: hand out whatever has come, the oldest first. Requests that wait in the actor for
            a rate limiter go on in no order there: who would wait for the oldest might wait for
            rows that only come once the batch that is here has been used.
        together: how many are asked for by one message, once batches are known to be small. Then
            that many fewer may be under way, but one: what is waited for has been sent before.
    """

    def __init__(
        self,
        request: Callable[[int], list[Reply]],
        depth: int,
        late: type[TimeoutError] = TimeoutError,
        *,
        any_order: bool = False,
        together: int = 1,
    ) -> None:
        self._request, self._depth, self._late = request, depth, late
        self.any_order = any_order
        self._together = together
        self._are_small = False
        self._lock = threading.Lock()
        self._queue: list[_Entry] = []
        self._made = 0

    def take(self) -> Taken:
        """Takes the oldest request, and sends further ones."""
        with self._lock:
            before = self._made
            return Taken(self, self._oldest(), before)

    def _oldest(self) -> _Entry:
        together = self._together if self._are_small else 1
        room = self._depth + 1 - len(self._queue)
        if room >= together or not self._queue:
            while room > 0:
                replies = self._request(together if room >= together else 1)
                self._queue += enumerate(replies, self._made)
                self._made += len(replies)
                room -= len(replies)
        return self._queue.pop(0)

    def look(self, reply: Reply) -> None:
        """Takes note of what batches are like."""
        self._are_small = reply.small

    def next(self, timeout: float | None = None) -> Any:
        """Returns the next batch; see `Taken` for those that failed.

        Raises:
            TimeoutError: or ``late``: not within that many seconds; the request stays under way.
                Otherwise what `Reply.get` raises of a request that was made after this call.
        """
        taken = self.take()
        try:
            return taken.get(timeout)
        except BaseException as error:
            if taken.entry[1].error is None:  # nobody knows yet what it is
                with self._lock:
                    insort(self._queue, taken.entry)
                if isinstance(error, TimeoutError):
                    raise self._late(
                        f"a batch that was asked for ahead waited {timeout or 0:g} s: "
                        "the actor has not answered yet"
                    ) from None
            raise

    def pass_over(self, taken: Taken, failed: _Entry) -> None:
        """Gives the oldest of those under way in the place of one that has failed."""
        with self._lock:
            if taken.entry is failed:
                taken.entry = self._oldest()

    def exchange(self, taken: Taken, timeout: float | None) -> bool:
        """Gives one that has come in the place of one that has not; False: none has, in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            if taken.entry[1].is_ready():
                return True
            found = first_come(self.choice(taken), _left(until))
            if found is None:
                return False
            with self._lock:
                for place, entry in enumerate(self._queue):
                    if entry[1] is found:
                        del self._queue[place]
                        insort(self._queue, taken.entry)
                        taken.entry = entry
                        return True

    def choice(self, taken: Taken) -> list[Reply]:
        """The answers that may be given to whoever has taken that one."""
        with self._lock:
            return [taken.entry[1], *(reply for _, reply in self._queue)]

    def drop(self) -> None:
        """Forgets what is under way."""
        with self._lock:
            self._queue.clear()


class Taken:
    """The answer to a request that was made ahead, to be asked like a `Reply`.

    One that failed may have been made too early: then it is the next one's answer, at last that of
    one that was made after this was taken, and the error of that one, which nobody else is told.
    What has been drawn is handed out, whatever else has failed.

    Attributes:
        entry: the request whose answer it is, as far as is known.
    """

    def __init__(self, ahead: Ahead, entry: _Entry, before: int) -> None:
        self._ahead, self._before = ahead, before
        self.entry = entry

    def sent(self) -> Any:
        """Returns the object reference of that request."""
        return self.entry[1].sent()

    def get(self, timeout: float | None = None) -> Any:
        """Returns the batch; TimeoutError: not within that many seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._ahead.any_order and not self._ahead.exchange(self, _left(until)):
                raise TimeoutError(f"no answer within {timeout or 0:g} seconds")
            entry = self.entry
            try:
                batch = entry[1].get(_left(until))
                self._ahead.look(entry[1])
                return batch
            except Exception:
                if not self._passed_over(entry):
                    raise

    async def wait(self) -> Any:
        """Returns the batch to a coroutine."""
        while True:
            if self._ahead.any_order:
                await until_one_comes(self._ahead.choice(self))
                if not self._ahead.exchange(self, 0.0):
                    continue  # somebody else has taken it
            entry = self.entry
            try:
                batch = await entry[1].wait()
                self._ahead.look(entry[1])
                return batch
            except Exception:
                if not self._passed_over(entry):
                    raise

    def is_ready(self) -> bool:
        """Whether ``get`` would not wait."""
        while True:
            if self._ahead.any_order:
                self._ahead.exchange(self, 0.0)
            entry = self.entry
            if not entry[1].is_ready():
                return False
            try:
                entry[1].get()
            except Exception:
                if self._passed_over(entry):
                    continue
            return True

    def _passed_over(self, entry: _Entry) -> bool:
        """Whether it failed and was asked for before this was taken; then the next one counts."""
        number, reply = entry
        if reply.error is None or number >= self._before:
            return False
        self._ahead.pass_over(self, entry)
        return True


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
