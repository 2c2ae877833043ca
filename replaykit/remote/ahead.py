"""Requests for batches that are under way before anybody asks for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from replaykit.remote.replies import Reply

__all__ = ["Ahead"]


class Ahead:
    """Keeps ``depth`` requests under way, and hands out their answers in order.

    ``_lock`` guards the queue; nobody waits for an answer with it.

    Args:
        request: sends one and returns its reply.
        depth: how many are under way; 0: each is made when it is asked for.
        late: what to raise where an answer has not come in time.
    """

    def __init__(
        self,
        request: Callable[[], Reply],
        depth: int,
        late: type[TimeoutError] = TimeoutError,
    ) -> None:
        self._request, self._depth, self._late = request, depth, late
        self._lock = threading.Lock()
        self._replies: deque[Reply] = deque()

    def take(self) -> Reply:
        """Returns the oldest reply and sends further requests."""
        with self._lock:
            while len(self._replies) <= self._depth:
                self._replies.append(self._request())
            return self._replies.popleft()

    def next(self, timeout: float | None = None) -> Any:
        """Returns the next batch.

        A request that failed may have been made too early: the next one is taken, at last one that
        is made now. What has been drawn is handed out, whatever else has failed.

        Raises:
            TimeoutError: or ``late``: not within that many seconds; the request stays under way.
                Otherwise what `Reply.get` raises of a request that was made after this call.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            early = set(self._replies)
        while True:
            reply = self.take()
            try:
                return reply.get(None if until is None else max(0.0, until - time.monotonic()))
            except BaseException as error:
                if reply.error is None:  # nobody knows yet what it is
                    with self._lock:
                        self._replies.appendleft(reply)
                    if isinstance(error, TimeoutError):
                        raise self._late(
                            f"a batch that was asked for ahead waited {timeout or 0:g} s: "
                            "the actor has not answered yet"
                        ) from None
                    raise
                if reply not in early:
                    raise

    def drop(self) -> None:
        """Forgets what is under way."""
        with self._lock:
            self._replies.clear()
