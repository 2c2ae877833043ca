"""Send the writes of one client in order, and combine small writes."""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import torch

from replaykit._compat import TensorDict, has_names
from replaykit.distributed.requests import RemoteResult, Reply, joined_texts
from replaykit.distributed.wire_format import Message, pack
from replaykit.errors import RateLimiterTimeout, SchemaError
from replaykit.interrupts import deferred
from replaykit.structure import Node, Path, build, flatten

MOST_UNDER_WAY = 16
"""The maximum number of unanswered messages.

A further write waits for the answer to the oldest message.
"""

_POLL_S = 0.005

_AT_EXIT_SECONDS = 5.0
"""Seconds that the program waits at its end for all pending writes together."""


class WriteQueue:
    """A queue of the unanswered writes of one client, which sends them in their order.

    With ``rows`` above 1, smaller writes wait until they have ``rows`` rows in total, or for
    ``seconds``. The queue then sends them as one message. If a write has another layout, or is not
    a plain TensorDict, the waiting writes are sent before it. ``put`` copies the rows.

    ``_lock`` guards the unsent rows, the order of messages, and the errors to raise. No thread
    holds it while it waits for an answer.

    Args:
        write: function ``(counts, rows)`` that sends the rows of several calls and returns an
            object reference, or None if the queue combines no writes.
        rows: maximum number of rows in a common message. With 0 or 1, every write is sent
            separately.
        seconds: maximum seconds for which a row waits before it is sent.
        actor: the actor that receives the writes. With None, the end of the program does not wait
            for the writes.

    Attributes:
        held_up: whether a rate limiter delays the oldest write.
    """

    def __init__(
        self,
        write: Callable[[list[int], Message], Any] | None = None,
        rows: int = 0,
        seconds: float = 0.05,
        actor: Any = None,
    ) -> None:
        self.actor = actor
        self.held_up = False
        self._write = write
        self._rows, self._seconds = rows, seconds
        self._lock = threading.RLock()
        self._root: Node | None = None
        self._columns: dict[Path, list[torch.Tensor]] = {}
        self._counts: list[int] = []
        self._used = 0
        self._reply: Reply | None = None
        self._waiting: list[WriteResult] = []
        self._timer: threading.Timer | None = None
        self._under_way: deque[tuple[Reply, list[WriteResult]]] = deque()
        self._failed: deque[Exception] = deque()

    def put(
        self,
        send: Callable[[], Reply],
        rows: Any = None,
        *,
        single: bool = False,
    ) -> WriteResult:
        """Put a write into the queue; return its future result.

        Args:
            send: function that sends the write and returns its future answer.
            rows: the rows of the write if it may be combined with other writes, or None.
            single: whether ``rows`` is one row without a batch dimension.

        Raises:
            Exception: the error of an earlier write whose result no caller asked for. If this error
                is raised, the new write is not put into the queue.
        """
        self._raise_failed()
        with deferred, self._lock:  # Ctrl-C waits until the queue knows the write
            self._register()
            combined = self._rows > 1 and rows is not None
            written = self._append(rows, single=single) if combined else None
            if written is None:
                self.send()
                reply = send()
                written = WriteResult(reply, None)
                self._under_way.append((reply, [written]))
        self._wait(MOST_UNDER_WAY, None)
        _poll_others()
        return written

    def _append(self, data: Any, *, single: bool) -> WriteResult | None:
        """Copy rows, to send them together with other rows.

        The result is None if this is impossible, because the rows are too many or not a plain
        TensorDict.
        """
        if type(data) is not TensorDict or has_names(data):
            return None
        try:
            root, leaves = flatten(data, 0 if single else 1)
        except (TypeError, SchemaError):  # it has other values than tensors
            return None
        count = 1 if single else len(data)
        if not 0 < count < self._rows:
            return None
        if self._counts and (root != self._root or self._used + count > self._rows):
            self.send()
        if self._reply is None:
            timer = threading.Timer(self._seconds, self._send_later)
            timer.daemon = True
            timer.start()  # the timer's call waits for the lock
            self._timer, self._reply = timer, Reply(send=self.send)
        self._root = root
        self._used += count
        self._counts.append(0 if single else count)
        for path, leaf in leaves.items():
            copied = leaf.to("cpu", copy=True)
            self._columns.setdefault(path, []).append(copied[None] if single else copied)
        written = WriteResult(self._reply, len(self._waiting))
        self._waiting.append(written)
        if self._used == self._rows:
            self.send()
        return written

    def send(self) -> None:
        """Send the unsent rows without waiting for an answer."""
        with deferred, self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._reply is None or self._write is None or self._root is None:
                return
            reply, self._reply = self._reply, None
            waiting, self._waiting = self._waiting, []
            counts, columns, self._counts, self._columns = self._counts, self._columns, [], {}
            used, self._used = self._used, 0
            try:
                leaves = {path: torch.cat(column) for path, column in columns.items()}
                rows = build(self._root, leaves, torch.Size([used]), None)
                reply.ref = self._write(counts, pack(rows))
            except Exception as error:
                reply.fail(error)
                raise
            self._under_way.append((reply, waiting))

    def flush(self, until: float | None = None, *, held_up: bool = True) -> None:
        """Send the unsent rows and wait until all writes are stored.

        Args:
            until: time of ``time.monotonic()`` at which the wait ends, or None to wait without a
                limit.
            held_up: True to wait also for writes that a rate limiter delays.

        Raises:
            RateLimiterTimeout: some writes are not stored at the time ``until``.
            Exception: the oldest error of a write whose result no caller asked for. Each call
                raises the next such error.
        """
        self.send()
        self._wait(0, until, held_up=held_up)
        if until is not None and self._under_way:
            raise RateLimiterTimeout("earlier writes of this handle still wait for samples")
        self._raise_failed()

    def check(self) -> None:
        """Raise the oldest error of a write that has been answered; do not wait."""
        self.poll()
        self._raise_failed()

    def leave(self, until: float | None = None) -> tuple[list[Exception], int]:
        """Send the unsent rows, wait for all answers, and give up on missing answers.

        Args:
            until: time of ``time.monotonic()`` at which the wait ends, or None to wait without a
                limit.

        Returns:
            All errors that no caller has received, and the number of unanswered messages.
        """
        try:
            self.send()
        except Exception as error:
            self._store_error(error)
        self._wait(0, until)
        with self._lock:
            failed, unanswered = list(self._failed), len(self._under_way)
            self._failed.clear()
            self._under_way.clear()
            self._unregister()
            return failed, unanswered

    def poll(self) -> None:
        """Process the answers that have arrived; do not wait."""
        self._wait(0, 0.0)

    def _wait(self, most: int, until: float | None, *, held_up: bool = True) -> None:
        """Wait until at most ``most`` messages are unanswered; store their errors.

        The answers are processed in the order of the messages. If ``held_up`` is False, the wait
        ends when a rate limiter delays the oldest write.
        """
        while True:
            with self._lock:
                if len(self._under_way) <= most:
                    self._unregister()
                    return
                entry = self._under_way[0]  # stays in the queue until its answer is processed
            reply, waiting = entry
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                reply.get(left if held_up else _POLL_S)
            except Exception:
                if not reply.known:  # no answer yet
                    if held_up or self.held_up:
                        return
                    continue
            with self._lock:
                if not (self._under_way and self._under_way[0] is entry):
                    continue  # another thread has processed it
                self._under_way.popleft()
                self._collect_errors(reply, waiting)

    def _collect_errors(self, reply: Reply, waiting: list[WriteResult]) -> None:
        """Store the errors of an answer that no caller has received."""
        for written in waiting:
            if not written.seen:
                try:
                    written.result()
                except Exception as error:
                    self._failed.append(error)
                    if written.position is None or error is reply.error:
                        return  # the error applies to all writes

    def _register(self) -> None:
        """Make the end of the program wait for the pending writes of the queue.

        Ray is already running, so this exit handler is newer than Ray's and runs first.
        """
        if self.actor is None:
            return
        if not _PENDING:
            atexit.unregister(_leave_at_exit)
            atexit.register(_leave_at_exit)
        _PENDING[id(self)] = self

    def _unregister(self) -> None:
        """Remove the queue from `_PENDING` if it has no writes and no errors left."""
        if self._reply is None and not self._under_way and not self._failed:
            _PENDING.pop(id(self), None)

    def _store_error(self, error: Exception) -> None:
        with self._lock:
            self._failed.append(error)

    def _raise_failed(self) -> None:
        """Raise the oldest error that no caller has received.

        The next call raises the next error.
        """
        with self._lock:
            error = self._failed.popleft() if self._failed else None
            self._unregister()
        if error is not None:
            raise error

    def _send_later(self) -> None:
        """Send the unsent rows and store any error.

        The thread of a timer calls this method ``seconds`` after the first row.
        """
        try:
            self.send()
        except Exception as error:
            self._store_error(error)


class WriteResult(RemoteResult):
    """The future result of a write, the index of its rows.

    Attributes:
        position: index of the write in its message, or None if it is the only write.
        seen: whether a caller has asked for the result, and so received any error.
    """

    def __init__(self, reply: Reply, position: int | None) -> None:
        super().__init__(reply, self._own)
        self.position = position
        self.seen = False

    def result(self, timeout: float | None = None) -> Any:
        try:
            found = super().result(timeout)
        except TimeoutError:
            self.seen = self.done()
            raise
        except Exception:
            self.seen = True
            raise
        self.seen = True
        return found

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from super().__await__())
        except Exception:
            self.seen = True
            raise

    def _own(self, value: Any) -> Any:
        self.seen = True
        if self.position is None:
            return value
        succeeded, found = value[self.position]
        if not succeeded:
            raise found
        return found


_PENDING: dict[int, WriteQueue] = {}
"""The queues whose rows may not be stored yet, or whose errors were not raised.

Queues stay here even after their handles are deleted. Each queue is added and removed under its
lock.
"""

_FEW = 64
"""The minimum value in `_looked_at`."""
_looked_at = [_FEW]
"""The number of pending queues after the last poll.

The next poll follows when this number has doubled.
"""


def _poll_others() -> None:
    """Release queues that are no longer in use.

    This is done rarely, since it polls every queue.
    """
    if len(_PENDING) >= 2 * _looked_at[0]:
        for write_queue in list(_PENDING.values()):
            write_queue.poll()
        _looked_at[0] = max(_FEW, len(_PENDING))


def leave_all(until: float | None, actor: Any = None) -> tuple[list[Exception], int]:
    """Call ``leave`` for all queues of this process that write to an actor.

    Args:
        until: the same as for ``WriteQueue.leave``, for all queues together.
        actor: the actor, or None for all actors.

    Returns:
        The same as for ``WriteQueue.leave``, over all queues.
    """
    failed: list[Exception] = []
    unanswered = 0
    for write_queue in list(_PENDING.values()):
        if actor is None or write_queue.actor is actor:
            errors, left = write_queue.leave(until)
            failed += errors
            unanswered += left
    return failed, unanswered


def _leave_at_exit() -> None:
    """Wait for pending writes at the end of the program; warn if writes are lost."""
    failed, unanswered = leave_all(time.monotonic() + _AT_EXIT_SECONDS)
    if unanswered:
        failed.append(TimeoutError(f"{unanswered} messages had no answer"))
    if failed:
        warnings.warn(
            "writes were not stored, or may not have been, when the program ended: "
            f"{joined_texts(failed)}",
            RuntimeWarning,
            stacklevel=1,
        )
