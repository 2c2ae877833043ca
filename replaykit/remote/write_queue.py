"""Writes of one client on their way to the actor: small ones together, all in order."""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from replaykit._compat import TensorDict, fields_of, has_names, new_tensordict
from replaykit.remote.requests import RemoteResult, Reply, told
from replaykit.remote.wire_format import Message, pack

__all__ = ["WriteQueue", "leave_all"]

MOST_UNDER_WAY = 16
"""Messages that may be unanswered; the next write then waits for the oldest."""

_AT_EXIT_SECONDS = 5.0
"""How long the end of the program waits for all that is under way, together."""


class WriteQueue:
    """Sends writes in the order in which they were given.

    With ``rows`` above 1, writes of fewer rows are kept until there are that many, or for
    ``seconds``, and then go as one message; a write of another layout, or of what is no plain
    TensorDict, sends those before it first. Rows are copied when they are given.

    ``_lock`` guards what is kept, the order of sending and errors to be told; nobody waits for an
    answer with it.

    Args:
        write: sends rows of several calls (counts, rows) and returns an object reference.
        call: sends one call (name, data, keywords) and returns an object reference.
        rows: how many rows go together at most; 0 or 1: every write goes alone.
        seconds: how long a row is kept at most.
        actor: to whom it writes.
    """

    def __init__(
        self,
        write: Callable[[list[int], Message], Any],
        call: Callable[[str, Any, Mapping[str, Any]], Any],
        rows: int = 0,
        seconds: float = 0.05,
        actor: Any = None,
    ) -> None:
        self.actor = actor
        self._write, self._call = write, call
        self._rows, self._seconds = rows, seconds
        self._lock = threading.RLock()
        self._kept: _Kept | None = None
        self._reply: Reply | None = None
        self._waiting: list[WriteResult] = []
        self._timer: threading.Timer | None = None
        self._under_way: deque[tuple[Reply, list[WriteResult]]] = deque()
        self._failed: deque[Exception] = deque()

    def put(self, name: str, data: Any, keywords: Mapping[str, Any]) -> WriteResult:
        """Takes a write; returns what it will return.

        Raises:
            Exception: what an earlier write has raised whose result nobody has asked for. This one
                was not taken then.
        """
        self._raise_failed()
        with self._lock:
            _register(self)
            written = self._keep(name, data) if self._rows > 1 and not keywords else None
            if written is None:
                self.send()
                reply = Reply(self._call(name, data, keywords))
                written = WriteResult(reply, None)
                self._under_way.append((reply, [written]))
        self._wait(MOST_UNDER_WAY, None)
        _look_at_others()
        return written

    def _keep(self, name: str, data: Any) -> WriteResult | None:
        """Keeps rows, to be sent with others; None where they are too many, or of no such kind."""
        layout = _layout(data, single=name == "add")
        count = 1 if name == "add" else len(data) if layout is not None else 0
        if layout is None or not 0 < count < self._rows:
            return None
        kept = self._kept
        if kept is None or kept.layout != layout or kept.used + count > self._rows:
            self.send()
            if kept is None or kept.layout != layout:
                kept = self._kept = _Kept(layout, data, self._rows, single=name == "add")
        if self._reply is None:
            timer = threading.Timer(self._seconds, self._send_later)
            timer.daemon = True
            timer.start()  # it waits for the lock
            self._timer, self._reply = timer, Reply(send=self.send)
        kept.take(data, count, single=name == "add")
        written = WriteResult(self._reply, len(self._waiting))
        self._waiting.append(written)
        if kept.used == self._rows:
            self.send()
        return written

    def send(self) -> None:
        """Sends what is kept; waits for nothing."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._reply is None or self._kept is None:
                return
            reply, self._reply = self._reply, None
            waiting, self._waiting = self._waiting, []
            counts, rows = self._kept.taken()
            try:
                reply.ref = self._write(counts, pack(rows))
            except Exception as error:
                reply.fail(error)
                raise
            self._under_way.append((reply, waiting))

    def settle(self) -> None:
        """Sends what is kept and waits until all has been written.

        Raises:
            Exception: what a write has raised whose result nobody has asked for; the oldest, and
                each time another.
        """
        self.send()
        self._wait(0, None)
        self._raise_failed()

    def leave(self, until: float | None = None) -> tuple[list[Exception], int]:
        """Sends what is kept and waits until all has been written, at most until then; forgets it.

        Args:
            until: by ``time.monotonic()``; None: without end.

        Returns:
            All errors that nobody knows of, and how many messages had no answer.
        """
        try:
            self.send()
        except Exception as error:
            self._note(error)
        self._wait(0, until)
        with self._lock:
            failed, unanswered = list(self._failed), len(self._under_way)
            self._failed.clear()
            self._under_way.clear()
            self._unregister()
            return failed, unanswered

    def look(self) -> None:
        """Takes note of the answers that have come; waits for none."""
        self._wait(0, 0.0)

    def _wait(self, most: int, until: float | None) -> None:
        """Waits until no more than that many messages are unanswered, in their order; keeps the
        errors that nobody knows of."""
        while True:
            with self._lock:
                if len(self._under_way) <= most:
                    self._unregister()
                    return
                entry = self._under_way[0]  # others see it until it has been looked at
            reply, waiting = entry
            try:
                reply.get(None if until is None else max(0.0, until - time.monotonic()))
            except Exception:
                if not reply.known:  # not yet
                    return
            with self._lock:
                if not (self._under_way and self._under_way[0] is entry):
                    continue  # somebody else's
                self._under_way.popleft()
                self._look(reply, waiting)

    def _look(self, reply: Reply, waiting: list[WriteResult]) -> None:
        """Keeps the errors that nobody knows of, of an answer that has come."""
        for written in waiting:
            if not written.seen:
                try:
                    written.result()
                except Exception as error:
                    self._failed.append(error)
                    if written.position is None or error is reply.error:
                        return  # one error for all

    def _unregister(self) -> None:
        """Once there is nothing to wait for, and nothing to tell."""
        if self._reply is None and not self._under_way and not self._failed:
            _PENDING.pop(id(self), None)

    def _note(self, error: Exception) -> None:
        with self._lock:
            self._failed.append(error)

    def _raise_failed(self) -> None:
        """Raises the oldest error that nobody knows of; the next call raises the next."""
        with self._lock:
            error = self._failed.popleft() if self._failed else None
            self._unregister()
        if error is not None:
            raise error

    def _send_later(self) -> None:
        """In a thread of its own, ``seconds`` after the first row: nobody is there to tell."""
        try:
            self.send()
        except Exception as error:
            self._note(error)


class WriteResult(RemoteResult):
    """What a write will return: where its rows lie.

    Attributes:
        position: which of the writes in its message it is; None: the only one.
        seen: whether somebody has asked for it, and so been told of an error.
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


class _Kept:
    """Rows of one layout, one after the other in memory that is used again and again."""

    def __init__(self, layout: Any, example: TensorDict, rows: int, *, single: bool) -> None:
        self.layout = layout
        self.used = 0
        self._counts: list[int] = []
        self._columns: list[torch.Tensor] = []
        self._table = self._like(example, rows, 0 if single else 1)

    def _like(self, example: TensorDict, rows: int, lead: int) -> TensorDict:
        """An empty table of rows like those, on the CPU; its columns in the order of `_leaves`."""
        fields: dict[str, Any] = {}
        for name, value in fields_of(example).items():
            if type(value) is TensorDict:
                fields[name] = self._like(value, rows, lead)
                continue
            shape = (rows, *value.shape[lead:])
            fields[name] = torch.empty(shape, dtype=value.dtype, device="cpu")
            self._columns.append(fields[name])
        return new_tensordict(fields, torch.Size((rows, *example.batch_size[lead:])), None)

    def take(self, data: TensorDict, count: int, *, single: bool) -> None:
        start = self.used
        for column, leaf in zip(self._columns, _leaves(data), strict=True):
            (column[start] if single else column[start : start + count]).copy_(leaf.detach())
        self.used += count
        self._counts.append(0 if single else count)

    def taken(self) -> tuple[list[int], TensorDict]:
        """What each call has given, and all rows, which are to be packed before the next comes."""
        counts, self._counts = self._counts, []
        rows, self.used = self._table[: self.used], 0
        return counts, rows


def _layout(data: Any, *, single: bool) -> Any:
    """What rows must have in common to lie in one table; None where they can lie in none."""
    if type(data) is not TensorDict or has_names(data):
        return None
    lead = 0 if single else 1
    if len(data.batch_size) != lead:
        return None
    return _layout_below(data, lead)


def _layout_below(data: TensorDict, lead: int) -> Any:
    found = []
    for name, value in fields_of(data).items():
        if type(value) is torch.Tensor and value.layout is torch.strided:
            found.append((name, value.dtype, value.shape[lead:]))
        elif type(value) is TensorDict and not has_names(value):
            below = _layout_below(value, lead)
            if below is None:
                return None
            found.append((name, below, value.batch_size[lead:]))
        else:
            return None
    return tuple(found)


def _leaves(data: TensorDict) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in fields_of(data).values():
        if type(value) is TensorDict:
            found += _leaves(value)
        else:
            found.append(value)
    return found


_PENDING: dict[int, WriteQueue] = {}
"""Those with rows that may not be stored yet, or errors that nobody knows of, also after their
handles have gone. Each is put here and taken out under its own lock."""

_FEW = 64
"""So many may lie there without being looked at."""
_looked_at = [_FEW]
"""How many there were when all were looked at."""


def _register(outbox: WriteQueue) -> None:
    """What is under way at the end of the program is waited for before Ray, which is up by now,
    goes down."""
    if not _PENDING:
        atexit.unregister(_leave_at_exit)
        atexit.register(_leave_at_exit)
    _PENDING[id(outbox)] = outbox


def _look_at_others() -> None:
    """Lets go of those that nobody uses any more; now and then, since it asks each for answers."""
    if len(_PENDING) >= 2 * _looked_at[0]:
        for outbox in list(_PENDING.values()):
            outbox.look()
        _looked_at[0] = max(_FEW, len(_PENDING))


def leave_all(until: float | None, actor: Any = None) -> tuple[list[Exception], int]:
    """Has all outboxes of this process that write to an actor send what they keep, and waits.

    Args:
        until: as for ``WriteQueue.leave``, for all of them together.
        actor: None: to any.

    Returns:
        As ``WriteQueue.leave``.
    """
    failed: list[Exception] = []
    unanswered = 0
    for outbox in list(_PENDING.values()):
        if actor is None or outbox.actor is actor:
            errors, left = outbox.leave(until)
            failed += errors
            unanswered += left
    return failed, unanswered


def _leave_at_exit() -> None:
    """Nobody is there to be told of writes that are lost: they are warned of."""
    failed, unanswered = leave_all(time.monotonic() + _AT_EXIT_SECONDS)
    if unanswered:
        failed.append(TimeoutError(f"{unanswered} messages had no answer"))
    if failed:
        warnings.warn(
            f"writes were not stored, or may not have been, when the program ended: {told(failed)}",
            RuntimeWarning,
            stacklevel=1,
        )
