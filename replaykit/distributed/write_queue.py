"""Send the writes of one client in order, and record the writes that a shard received."""

from __future__ import annotations

import atexit
import functools
import itertools
import multiprocessing.util
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from replaykit._compat import TensorDict, has_names
from replaykit.distributed.protocol import BarrierBusy, Message, pack
from replaykit.distributed.requests import RemoteResult, Reply, joined_texts, one_of
from replaykit.errors import RateLimiterTimeout, SchemaError
from replaykit.interrupts import deferred
from replaykit.pace import checked_timeout
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
        actor: the actor that receives the writes, or another object if it is no actor. With None,
            the end of the program does not wait for the writes.

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
        self._unsent: _Unsent | None = None
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
        unsent = self._unsent
        if unsent is not None and (root != unsent.root or unsent.rows + count > self._rows):
            self.send()
        if self._unsent is None:
            timer = threading.Timer(self._seconds, self._send_all)
            timer.daemon = True
            timer.start()  # the timer's call waits for the lock
            self._unsent = _Unsent(root, Reply(send=self.send), timer)
        written = self._unsent.add(leaves, count, single=single)
        if self._unsent.rows == self._rows:
            self.send()
        return written

    def send(self) -> None:
        """Send the unsent rows without waiting for an answer."""
        with deferred, self._lock:
            unsent, self._unsent = self._unsent, None
            if unsent is None or self._write is None:
                return
            unsent.timer.cancel()
            try:
                unsent.reply.ref = self._write(unsent.counts, pack(unsent.data()))
            except Exception as error:
                unsent.reply.store(None, error)
                raise
            self._under_way.append((unsent.reply, unsent.waiting))

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
        self._send_all()
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
            _leave_at_exit_of(os.getpid())
        _PENDING[id(self)] = self

    def _unregister(self) -> None:
        """Remove the queue from `_PENDING` if it has no writes and no errors left."""
        if self._unsent is None and not self._under_way and not self._failed:
            _PENDING.pop(id(self), None)

    def _raise_failed(self) -> None:
        """Raise the oldest error that no caller has received.

        The next call raises the next error.
        """
        with self._lock:
            error = self._failed.popleft() if self._failed else None
            self._unregister()
        if error is not None:
            raise error

    def _send_all(self) -> None:
        """Send the unsent rows and store any error.

        The thread of a timer calls this method ``seconds`` after the first row.
        """
        try:
            self.send()
        except Exception as error:
            with self._lock:
                self._failed.append(error)


@dataclass
class _Unsent:
    """The rows of several writes that are sent in one message.

    Attributes:
        counts: the number of rows of each ``extend``, and 0 for each ``add``.
    """

    root: Node
    reply: Reply
    timer: threading.Timer
    rows: int = 0
    counts: list[int] = field(default_factory=list)
    columns: dict[Path, list[torch.Tensor]] = field(default_factory=dict)
    waiting: list[WriteResult] = field(default_factory=list)

    def add(self, leaves: Mapping[Path, torch.Tensor], count: int, *, single: bool) -> WriteResult:
        """Copy the rows of a write; return its future result."""
        self.rows += count
        self.counts.append(0 if single else count)
        for path, leaf in leaves.items():
            copied = leaf.to("cpu", copy=True)
            self.columns.setdefault(path, []).append(copied[None] if single else copied)
        self.waiting.append(WriteResult(self.reply, len(self.waiting)))
        return self.waiting[-1]

    def data(self) -> Any:
        """Return all rows in their container."""
        leaves = {path: torch.cat(column) for path, column in self.columns.items()}
        return build(self.root, leaves, torch.Size([self.rows]), None)


class WriteResult(RemoteResult):
    """The future result of a write, the index of its rows.

    Attributes:
        position: index of the write in its message, or None if it is the only write.
        seen: whether a caller has asked for the result, and so received any error.
    """

    def __init__(self, reply: Reply, position: int | None) -> None:
        super().__init__(reply, self._own)
        self._reply: Reply = reply
        self.position = position
        self.seen = False

    def result(self, timeout: float | None = None) -> Any:
        timeout = checked_timeout(timeout)
        try:
            value = self._reply.get(timeout)
        except TimeoutError as error:
            # If the answer is only late, it may be an error that no caller has received.
            self.seen = error is self._reply.error
            raise
        except Exception:
            self.seen = True
            raise
        self.seen = True
        return self._picked(value)

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


SETTLING_S = 10.0
"""Seconds that ``close`` waits for writes that a rate limiter delays.

It does not wait longer, since possibly no caller will sample again.
"""


def check_left(failed: list[Exception], unanswered: int) -> None:
    """Raise one error for all errors and unanswered messages that ``close`` has found.

    The arguments are results of ``WriteQueue.leave`` or `leave_all`.
    """
    if unanswered:
        text = "writes still had to wait for samples when the buffer was closed: they are lost"
        failed = [*failed, RuntimeError(text)]
    if failed:
        raise one_of(failed)


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


@functools.cache
def _leave_at_exit_of(process: int) -> None:
    """Wait for writes also in a process of multiprocessing, in which `atexit` does not run."""
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _leave_at_exit, exitpriority=0)


_REFUSED: Any = object()
"""The marker that is recorded instead of an answer for a refused part."""


class Stamp(NamedTuple):
    """The write to which a message belongs.

    Attributes:
        client, number: the client, and the sequence number of the write among the client's writes.
        shards: bit mask in which bit s is set if shard s has a part of the write.
        done: all writes of this client with sequence numbers below ``done`` have ended.
    """

    client: str
    number: int
    shards: int
    done: int


class KnownWrites(NamedTuple):
    """The writes of which a shard has received parts.

    Attributes:
        came: for each write, the bit mask of the shards that have parts of it. Writes that ended
            long ago are left out, and so are writes of clients that have been silent for long.
        done: for each client, the number below which all writes have ended.
    """

    came: dict[tuple[str, int], int]
    done: dict[str, int]


def missing_parts(found: dict[int, KnownWrites]) -> dict[int, set[tuple[str, int]]]:
    """Return the missing parts of incomplete writes, by shard.

    Example:
        >>> from replaykit.distributed.write_queue import KnownWrites, missing_parts
        >>> ahead = KnownWrites({("a", 7): 0b11}, {"a": 7})
        >>> missing_parts({0: ahead, 1: KnownWrites({}, {"a": 5})})
        {1: {('a', 7)}}
    """
    done: dict[str, int] = {}
    for known in found.values():
        for client, number in known.done.items():
            done[client] = max(number, done.get(client, 0))
    missing: dict[int, set[tuple[str, int]]] = {}
    for known in found.values():
        for name, bits in known.came.items():
            if name[1] < done.get(name[0], 0):
                continue
            for shard, other in found.items():
                if bits >> shard & 1 and name not in other.came:
                    missing.setdefault(shard, set()).add(name)
    return missing


class Barrier:
    """The record of the writes that a shard has received, and a gate for new writes.

    The gate delays new writes while all shards freeze their rows for a save. A batch can have parts
    in several shards. If any part was written before the freeze, all shards admit the other parts.
    If no part was written before the freeze, all parts wait. After the admitted parts have arrived,
    every batch is in the shards completely or not at all.

    A client sends a part again if the answer was lost with a connection or a shard. The shard then
    gives the same answer, even after a restart from a checkpoint.

    Args:
        within: seconds after which a client has finished a write or given up.

    The class is not thread-safe; callers hold the lock of the shard. Memory: the writes under way
    of each client that has written in the last ``4 * within + 60`` seconds. Clients do not repeat
    older writes.
    """

    def __init__(self, within: float = 60.0) -> None:
        self._answers: dict[str, dict[int, tuple[int, Any]]] = {}
        self._done: dict[str, int] = {}
        # The time of each client's last write, ordered so that the first client has been silent
        # longest. A save considers only writes that are newer than all forgotten writes. So no
        # shard waits for a forgotten write.
        self._heard: dict[str, float] = {}
        self._young_s, self._forgotten_s = 2 * within + 30, 4 * within + 60
        self._token: str | None = None
        self._until = 0.0
        self._through: set[tuple[str, int]] = set()

    # -- writes -------------------------------------------------------------------------------

    def admits(self, stamp: Stamp) -> bool:
        """Return whether a part may be written now, or has already been written."""
        if not self.frozen:
            return True
        name = (stamp.client, stamp.number)
        return name in self._through or self.answer(stamp) is not None

    def answer(self, stamp: Stamp) -> tuple[Any] | None:
        """Return the answer to a written part as a 1-tuple, or None for other parts."""
        found = self._answers.get(stamp.client, {}).get(stamp.number)
        return None if found is None or found[1] is _REFUSED else (found[1],)

    def came(self, stamp: Stamp, answer: Any) -> None:
        """Record a written part and its answer, a plain value or a tensor."""
        known = self._answers.setdefault(stamp.client, {})
        done = self._done[stamp.client] = max(stamp.done, self._done.get(stamp.client, 0))
        for number in [number for number in known if number < done]:
            del known[number]
        known[stamp.number] = (stamp.shards, answer)
        now = time.monotonic()
        self._heard.pop(stamp.client, None)
        self._heard[stamp.client] = now
        for client, heard in list(itertools.islice(self._heard.items(), 2)):
            if now - heard > self._forgotten_s:
                for table in (self._heard, self._answers, self._done):
                    table.pop(client, None)

    def refused(self, stamp: Stamp) -> None:
        """Record a refused part, so that no save waits for it."""
        self.came(stamp, _REFUSED)

    # -- saves --------------------------------------------------------------------------------

    @property
    def frozen(self) -> bool:
        """True while new writes have to wait.

        New writes wait at most for the seconds given to ``freeze``.
        """
        return self._token is not None and time.monotonic() < self._until

    def freeze(self, token: str, seconds: float) -> KnownWrites:
        """Start to delay new writes; return the writes that have already been received.

        Raises:
            BarrierBusy: another client is already delaying writes.
        """
        if self.frozen and self._token != token:
            raise BarrierBusy("another client is saving or loading all shards; try again later")
        now = time.monotonic()
        self._token, self._until, self._through = token, now + seconds, set()
        came = {
            (client, number): shards
            for client, known in self._answers.items()
            if now - self._heard[client] < self._young_s
            for number, (shards, _) in known.items()
        }
        return KnownWrites(came, dict(self._done))

    def let_through(self, token: str, writes: set[tuple[str, int]]) -> None:
        """Admit the parts of writes that were begun in other shards."""
        self.check(token)
        self._through |= writes

    def has_all(self, writes: set[tuple[str, int]]) -> bool:
        """Return whether the parts of these writes have been received."""
        return all(
            number in self._answers.get(client, {}) or number < self._done.get(client, 0)
            for client, number in writes
        )

    def forget(self, writes: set[tuple[str, int]]) -> None:
        """Forget these writes, since their other parts will not arrive."""
        for client, number in writes:
            self._answers.get(client, {}).pop(number, None)

    def check(self, token: str) -> None:
        """Raise RuntimeError unless writes have been delayed since ``freeze``."""
        if not self.frozen or self._token != token:
            raise RuntimeError("the shards were held back for too long, and accept writes again")

    def thaw(self, token: str) -> None:
        """Admit new writes if this token belongs to the current freeze."""
        if self._token == token:
            self._token, self._through = None, set()

    # -- state --------------------------------------------------------------------------------

    def state(self) -> list[list[Any]]:
        """Return the writes under way, as plain values."""
        return [
            [client, number, shards, answer.tolist() if hasattr(answer, "tolist") else answer]
            for client, known in self._answers.items()
            for number, (shards, answer) in known.items()
            if answer is not _REFUSED
        ]

    def load(self, state: Iterable[Sequence[Any]]) -> None:
        """Replace all recorded writes."""
        self._answers, self._done, self._heard = {}, {}, {}
        now = time.monotonic()
        for client, number, shards, answer in state:
            self._answers.setdefault(client, {})[number] = (shards, answer)
            self._heard[client] = now
