"""Read and finish batches in threads, after callers have drawn them."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from replaykit.interrupts import acquire
from replaykit.transfer import Arrival


@dataclass(slots=True)
class Mark:
    """The state of a sampler and of a generator before a draw.

    Attributes:
        token: the result of ``Sampler.mark``.
        random: the state of the generator; None if the draw used another generator.
        after: the state of the generator after the draw and its read. A rollback resets the
            generator only if no other code has used it since.
    """

    token: Any
    random: torch.Tensor | None
    after: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class Draw:
    """A draw: the rows that a sampler chose for a batch, and how to undo it.

    Its fields never change. A frozen class would need a call to set each of them.

    Attributes:
        index: the rows of the batch.
        info: the sampler's values for these rows.
        anchors: the index that the sampler drew, before the sample unit changed it.
        ran_out: whether the draw ended a pass.
        size: the batch size that was requested.
        written: the next row id of the storage at the draw.
        storage, sampler: the parts that made the draw.
        was_out: the sampler's ``ran_out`` before the draw.
        number: the number of the draw among the draws of its buffer; 0 if it is never undone.
        mark: the state before the draw; None if the draw can only be put back.
        kept: whether the buffer keeps the draw if its batch fails, and delivers it next.
        removed: the number in the storage's log after the latest removal before the draw.
    """

    index: torch.Tensor
    info: dict[Any, Any]
    anchors: torch.Tensor
    ran_out: bool
    size: int
    written: int
    storage: Any
    sampler: Any
    was_out: bool = False
    number: int = 0
    mark: Mark | None = None
    kept: bool = False
    removed: int = 0


@dataclass(slots=True)
class DrawnBatch:
    """The rows that were read for a draw, until their delivery.

    Attributes:
        collate, stack_dim: settings of the storage that the rows were read from.
        fresh: the rows were read for this draw alone, and are delivered unchanged.
        numbered: the rows contain ``index`` for transforms.
        sampler: the sampler that completes the rows; None if nothing is to be completed.
        fetched: the neighbouring rows that transforms have read.
        begun: a read of the rows that may be unfinished. Code waits for this read before it uses
            the rows.
        pinned: addresses of the memory of rows that is pinned, and only in this batch.
        arrival: the batch is on its way to a device.
    """

    draw: Draw
    rows: Any
    collate: Callable[[Any], Any] | None
    stack_dim: int
    fresh: bool
    numbered: bool
    sampler: Any
    fetched: Any
    begun: Any
    pinned: Collection[int] = ()
    arrival: Arrival | None = None


class Outdated(Exception):
    """Another buffer over the storage has overwritten rows of a draw before they were read."""


class AheadBatch:
    """A batch that a caller has drawn. It is read and finished before its delivery.

    The rows are read by a prefetch thread, by a write, or when the batch is taken from the queue,
    whichever comes first. A prefetch thread finishes the batch, or the caller that has taken it.

    Args:
        draw: the draw; None if it failed.
        written: the storage's next row id at a draw that failed.
        batch: the rows of the draw, if they are read already.
        error: the error of the draw, and later that of reading or finishing the batch.
        late: finish the batch at its delivery.
        stream: the CUDA stream of the draw if the rows are on a CUDA device. They are read and
            finished there, after the draw and before later work of the caller.
    """

    __slots__ = (
        "_claim", "_done", "batch", "draw", "error", "is_read", "late", "made", "stream", "written"
    )  # fmt: skip

    def __init__(
        self,
        draw: Any,
        written: int = 0,
        *,
        batch: Any = None,
        error: BaseException | None = None,
        late: bool = False,
        stream: Any = None,
    ) -> None:
        self.draw, self.written, self.batch, self.stream = draw, written, batch, stream
        self.is_read = draw is None or batch is not None or error is not None
        self.error, self.late = error, late
        self.made: Any = None
        self._claim, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    @property
    def is_last(self) -> bool:
        """True if the next draw must wait: this one ended a pass, or failed."""
        return self.draw is None or self.draw.ran_out

    def read(self, source: _Source) -> None:
        """Read the rows once. The caller holds the storage's lock."""
        if not self.is_read:
            try:
                with self._in_stream():
                    self.batch = source._read_ahead(self.draw)
            except Exception as error:
                self.error = error
            self.is_read = True  # at last, because `make` looks without the lock

    def claim(self) -> bool:
        """Return True to the first caller, which then calls ``make``."""
        return self._claim.acquire(blocking=False)

    def make(self, source: _Source) -> None:
        """Finish the batch, whose rows are read; an exception becomes ``error``."""
        try:
            if self.error is None and not self.late:
                with self._in_stream():
                    self.made = source._finish(self.batch)
        except BaseException as error:
            self.error = error
        finally:
            self._done.release()

    def _in_stream(self) -> Any:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait(self, source: _Source) -> None:
        """Finish the batch, or wait until the thread that makes it is done."""
        if self.claim():
            self.make(source)
        else:
            acquire(self._done)


class _Source(Protocol):
    def _locked(self, *, settled: bool = True) -> Any: ...

    def _read_ahead(self, draw: Any) -> Any: ...

    def _finish(self, batch: Any) -> Any: ...


class Prefetcher:
    """The batches that are drawn ahead, in the order of delivery.

    ``sample`` draws, with the storage's lock held, the batch that will be delivered ``depth`` calls
    later. So the order of draws is the order of calls. Threads read and finish the batches. A write
    first reads the draws that are not read yet, so each batch has the rows as of its draw.

    After a batch that ends a pass, or a failed draw, nothing is drawn until it is taken.

    The threads hold no reference to the buffer and end with it. A forked process does not have
    them. ``process`` is the process in which they run. The storage's lock guards the queue.
    """

    def __init__(self, depth: int, source: _Source) -> None:
        self.depth = depth
        self.process = os.getpid()
        self._source = weakref.ref(source)
        self._queue: deque[AheadBatch] = deque()
        self._closed = False
        self._reading = _lock_for_forks()
        self._threads = ThreadPoolExecutor(depth, "replaykit-prefetch")

    def __len__(self) -> int:
        return len(self._queue)

    def top_up(self, count: int, draw: Callable[[], AheadBatch]) -> list[AheadBatch]:
        """Draw until ``count`` batches are queued; return the new ones.

        Raises:
            RuntimeError: the buffer was shut down.
        """
        if self._closed:
            raise RuntimeError("this buffer was shut down")
        made = []
        while len(self._queue) < count and not (self._queue and self._queue[-1].is_last):
            made.append(draw())
            self._queue.append(made[-1])
        return made

    def pop(self) -> AheadBatch:
        """Remove and return the next batch."""
        return self._queue.popleft()

    def submit(self, batches: list[AheadBatch]) -> None:
        """Let threads make batches."""
        for batch in batches:
            if batch.error is None and not (batch.late and batch.is_read):
                try:
                    self._threads.submit(_make, self._source, self._reading, batch)
                except RuntimeError:  # no thread can be started, so the caller makes the batch
                    return

    def read_all(self) -> None:
        """Read the rows of all draws, before a write. The caller holds the storage's lock."""
        source = self._source()
        if source is not None:
            for batch in self._queue:
                batch.read(source)

    def pending(self) -> list[Any]:
        """Return the undelivered draws, in order."""
        return [batch.draw for batch in self._queue if batch.draw is not None]

    def clear(self) -> list[Any]:
        """Drop all batches and return their draws."""
        undelivered = self.pending()
        self._queue.clear()
        return undelivered

    def shutdown(self) -> None:
        """Join the threads; later calls of ``top_up`` raise RuntimeError.

        Batches that no thread has begun are left to callers that wait for them.
        """
        self._closed = True
        self._threads.shutdown(cancel_futures=True)


def _make(source: weakref.ref[_Source], reading: threading.Lock, batch: AheadBatch) -> None:
    buffer = source()
    if buffer is None or not batch.claim():
        return
    try:
        if not batch.is_read:
            with reading, buffer._locked(settled=False):
                batch.read(buffer)
    except BaseException as error:  # a caller may wait for the batch
        batch.error = error
    batch.make(buffer)


_MOST_SECONDS = 0.5
"""Maximum seconds that a fork waits for all reads, since a reader may wait for its caller."""

_locks: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
_taken = threading.local()


def _lock_for_forks() -> threading.Lock:
    """Return a lock. A fork waits for the lock's release, but at most half a second.

    A read that a fork interrupts would hold the storage's lock in the child for ever.
    """
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
