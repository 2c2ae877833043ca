"""Writes of one client on their way to the actor: small ones together, all in order."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from replaykit._compat import TensorDict, fields_of, has_names, new_tensordict
from replaykit.remote.packing import Message, pack
from replaykit.remote.replies import RemoteResult, Reply

__all__ = ["Outbox"]

MOST_UNDER_WAY = 16
"""Messages that may be unanswered; the next write then waits for the oldest."""

_AT_EXIT_SECONDS = 5.0


class Outbox:
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
    """

    def __init__(
        self,
        write: Callable[[list[int], Message], Any],
        call: Callable[[str, Any, Mapping[str, Any]], Any],
        rows: int = 0,
        seconds: float = 0.05,
    ) -> None:
        self._write, self._call = write, call
        self._rows, self._seconds = rows, seconds
        self._lock = threading.RLock()
        self._kept: _Kept | None = None
        self._reply: Reply | None = None
        self._waiting: list[Written] = []
        self._timer: threading.Timer | None = None
        self._under_way: deque[tuple[Reply, list[Written]]] = deque()
        self._failed: deque[Exception] = deque()
        if rows > 1:
            _send_at_exit(self)

    def put(self, name: str, data: Any, keywords: Mapping[str, Any]) -> Written:
        """Takes a write; returns what it will return.

        Raises:
            Exception: what an earlier write has raised whose result nobody has asked for. This one
                was not taken then.
        """
        self._raise_failed()
        with self._lock:
            written = self._keep(name, data) if self._rows > 1 and not keywords else None
            if written is None:
                self.send()
                reply = Reply(self._call(name, data, keywords))
                written = Written(reply, None)
                self._under_way.append((reply, [written]))
        self._relieve()
        return written

    def _keep(self, name: str, data: Any) -> Written | None:
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
            self._reply = Reply(send=self.send)
            self._timer = threading.Timer(self._seconds, self._send_later)
            self._timer.daemon = True
            self._timer.start()
        kept.take(data, count, single=name == "add")
        written = Written(self._reply, len(self._waiting))
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

    def settle(self, timeout: float | None = None) -> None:
        """Sends what is kept and waits until all has been written.

        Raises:
            Exception: what a write has raised whose result nobody has asked for; the oldest, and
                each time another.
        """
        self.send()
        while True:
            with self._lock:
                if not self._under_way:
                    break
                entry = self._under_way.popleft()
            self._finish(*entry, timeout)
        self._raise_failed()

    def _relieve(self) -> None:
        while True:
            with self._lock:
                if len(self._under_way) <= MOST_UNDER_WAY:
                    return
                entry = self._under_way.popleft()
            self._finish(*entry, None)

    def _finish(self, reply: Reply, waiting: list[Written], timeout: float | None) -> None:
        """Waits for one answer, and keeps the errors that nobody knows of."""
        try:
            reply.get(timeout)
        except TimeoutError:
            if not reply.is_ready():
                with self._lock:
                    self._under_way.appendleft((reply, waiting))
                raise
        except Exception:  # found again below, by whoever asks
            pass
        for written in waiting:
            if not written.seen:
                try:
                    written.result()
                except Exception as error:
                    self._note(error)
                    if written.position is None or error is reply.error:
                        break  # one error for all

    def _note(self, error: Exception) -> None:
        with self._lock:
            self._failed.append(error)

    def _raise_failed(self) -> None:
        """Raises the oldest error that nobody knows of; the next call raises the next."""
        with self._lock:
            error = self._failed.popleft() if self._failed else None
        if error is not None:
            raise error

    def _send_later(self) -> None:
        """In a thread of its own, ``seconds`` after the first row: nobody is there to tell."""
        try:
            self.send()
        except Exception as error:
            self._note(error)


class Written(RemoteResult):
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


_OPEN: weakref.WeakSet[Outbox] = weakref.WeakSet()
_at_exit_lock = threading.Lock()


def _send_at_exit(outbox: Outbox) -> None:
    """What is kept at the end of the program is sent before Ray, which is up by now, goes down."""
    with _at_exit_lock:
        if not _OPEN:
            atexit.unregister(_settle_all)
            atexit.register(_settle_all)
        _OPEN.add(outbox)


def _settle_all() -> None:
    for outbox in list(_OPEN):
        with contextlib.suppress(Exception):
            outbox.settle(_AT_EXIT_SECONDS)
