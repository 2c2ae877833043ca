"""Make batches in threads before callers ask for them, in the order of requests."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from replaykit.buffer.thread_pool import Outcome, ThreadPool, new_lock
from replaykit.interrupts import shielded, wait_for
from replaykit.samplers import Sampler, SampleUnit, Transition
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage
from replaykit.transfer import Arrival
from replaykit.transforms import Compose

__all__ = ["Drawn", "Origin", "PrefetchState", "Prefetcher"]

_PAUSE, _MOST_SECONDS = 2e-5, 0.02
"""Seconds between a drawing thread's checks for lock waiters, and in total."""


@dataclass(slots=True)
class Origin:
    """The storage and sampler of a draw, and the state before it, for a rollback.

    Attributes:
        size: the batch size that was requested.
        ran_out: the sampler's ``ran_out`` before the draw.
        random, random_after: states of the generator before and after the draw, if they may be
            needed.
    """

    storage: Any
    sampler: Any
    size: int
    ran_out: bool
    random: torch.Tensor | None = None
    random_after: torch.Tensor | None = None


@dataclass(slots=True)
class Drawn:
    """A draw: the index, its info, whether it ended a pass, and the rows read.

    Attributes:
        anchors: the index that the sampler drew, before the sample unit changed it.
        collate, stack_dim: settings of the storage that the rows were read from.
        sampler: the sampler that made the draw.
        fetched: the neighbouring rows that transforms have read.
        size: the batch size that was requested.
        written: the next row id of the storage at the draw.
        random: the state of the buffer's generator before transforms used it; None if no later read
            needs it.
        fresh: the rows were read for this draw alone, and are delivered unchanged.
        arrival: the batch is on its way to a device.
        late: the batch is not made in advance, but from the rows at delivery.
        begun: a read of the rows that may be unfinished. Code waits for this read before it uses
            the rows.
        numbered: the rows contain ``index`` for transforms.
    """

    index: torch.Tensor
    info: dict[Any, Any]
    ran_out: bool
    anchors: torch.Tensor
    rows: Any = None
    collate: Callable[[Any], Any] | None = None
    stack_dim: int = 0
    origin: Origin | None = None
    sampler: Any = None
    fetched: Any = None
    size: int = 0
    written: int = 0
    random: torch.Tensor | None = None
    fresh: bool = False
    arrival: Arrival | None = None
    late: bool = False
    begun: Any = None
    numbered: bool = False

    def without_rows(self) -> Drawn:
        """Return the draw without its rows, for a later delivery."""
        return Drawn(
            self.index,
            self.info,
            self.ran_out,
            self.anchors,
            size=self.size,
            written=self.written,
            random=self.random,
        )


@dataclass
class _Entry:
    """A requested batch. The storage's lock guards ``drawn`` and ``written``.

    Attributes:
        here: the requesting thread itself makes the draw, and the batch at delivery.
        void: no draw was made, because an earlier draw had ended a pass.
        release: the number of the release that a void entry waits for.
        written: the next row id of the storage when the draw was tried.
    """

    era: int
    here: bool = False
    claimed: bool = False
    void: bool = False
    release: int = 0
    written: int = 0
    drawn: Drawn | None = None
    outcome: Outcome = field(default_factory=Outcome)


class _Source(Protocol):
    def _draws_at_once(self) -> bool: ...

    def _free_lock(self) -> Any: ...

    def _draw_ahead(self, entry: Any) -> Drawn | None: ...

    def _finish(self, drawn: Drawn) -> Any: ...

    def _written(self) -> int: ...

    def _abandon(self, entry: Any, *, wait_for_draws: bool = True) -> None: ...


class Prefetcher:
    """A queue of ``depth`` requested batches.

    Draws are made one after the other, in the order of requests. Each draw therefore equals the
    draw of a buffer without prefetch at the time of the request. The work after a draw runs in
    parallel. If a draw fails or ends a pass, the next draw waits until the batch of that draw is
    delivered.

    A thread that changes the buffer first waits for the draws that it has requested
    (``wait_for_draws``). The order of calls in the program thus determines the draws that see the
    change.

    A draw may take less time than its handover to a thread. The caller then makes the draw itself,
    unless another thread holds the turn or the lock (``_draws_at_once``). The order and the draws
    stay the same.

    The threads hold no reference to the buffer and end with it. A forked process does not have
    them. ``process`` is the process in which they run.
    """

    def __init__(self, depth: int, source: _Source) -> None:
        self.depth = depth
        self.process = os.getpid()
        self._source = weakref.ref(source)
        self._changed = threading.Condition()
        # A draw that a fork interrupts would use random numbers, and its batch would be lost.
        self._drawing = new_lock()
        self._entries: deque[_Entry] = deque()
        self._era = 0
        self._tickets = 0
        # The number of requests that were drawn or dropped, in order.
        self._draws_done = 0
        self._settling = 0
        self._own = threading.local()  # .last is the number of the thread's newest request
        self._halted = False
        self._waiting: list[None] = []
        self._releases = 0
        self._closed = False
        self._pool = ThreadPool(depth, "replaykit-prefetch")
        weakref.finalize(self, self._pool.dismiss).atexit = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._entries)

    def next(self) -> tuple[Drawn, Any]:
        """Return the oldest batch with its draw, and request further ones.

        The batch is None if its draw is ``late``. The caller then makes the batch.

        Raises:
            Exception: any error that occurred while the batch was made.
        """
        source = self._source()
        while True:
            here = source is not None and source._draws_at_once()
            with self._changed:
                self._top_up(1, here=here)
                entry = self._entries.popleft()
                entry.claimed = True
                self._top_up(self.depth, here=here)
            try:
                if self._pool.left and here:
                    self._draw_here()
                result = entry.outcome.get()
            except BaseException as error:
                with shielded:
                    if source is not None:
                        source._abandon(entry, wait_for_draws=isinstance(error, Exception))
                    self._release(entry.drawn is None or entry.drawn.ran_out)
                if isinstance(error, Exception) and self._outdated(entry):
                    continue
                raise
            if not entry.void:
                assert entry.drawn is not None
                self._release(entry.drawn.ran_out)
                return entry.drawn, result
            self._await_release(entry.release)

    def _outdated(self, entry: _Entry) -> bool:
        """Return whether rows were written since a failed draw."""
        source = self._source()
        return entry.drawn is None and source is not None and source._written() != entry.written

    def _await_release(self, number: int) -> None:
        """Wait until another thread has delivered the batch that ended a pass.

        Later passes may have ended before this thread wakes. It waits only for the one with this
        number.
        """
        with self._changed:
            wait_for(self._changed, lambda: self._releases >= number or self._closed)

    def _release(self, ended: bool) -> None:
        if ended:
            with self._changed:
                self._go_on()
                while self._entries and self._entries[0].void:
                    self._entries.popleft()
                if not self._closed:
                    self._top_up(self.depth)

    def _go_on(self) -> None:
        self._halted = False
        self._releases += 1
        self._changed.notify_all()

    def _top_up(self, depth: int, *, here: bool = False) -> None:
        """Request batches until ``depth`` are queued. With ``here``, ``_draw_here`` draws."""
        if self._closed:
            raise RuntimeError("this buffer was shut down")
        while len(self._entries) < depth:
            entry = _Entry(self._era, here)
            # This comes first, because it may fail. A thread that runs it waits for the lock held
            # here.
            hand = self._pool.leave if here else self._pool.give
            hand(functools.partial(_run, weakref.ref(self), entry))
            self._entries.append(entry)
            self._tickets += 1
            self._own.last = self._tickets

    def _draw_here(self) -> None:
        """Make the requested draws in this thread, or hand them to the prefetch threads.

        This thread makes the draws if it need not wait.
        """
        source = self._source()
        lock = None if source is None or self._waiting else source._free_lock()
        if lock is not None:
            try:
                rest = self._pool.help()
            finally:
                lock.release()
            for make in rest:
                make()
            # An interrupt ends this call, not the later call that gets the batch.
            if (cut := self._own.__dict__.pop("cut", None)) is not None:
                raise cut
        if self._pool.left:
            self._hand_over()

    def _hand_over(self) -> None:
        with self._changed, contextlib.suppress(RuntimeError):
            if not self._closed:
                self._pool.hand_over()
                return
        for make in self._pool.help(wait=True):  # no threads exist
            make()

    def feed(self, count: int) -> None:
        """Request reads of kept draws now, before any write.

        Without a thread, the draws are read when a batch is requested. The caller holds the
        storage's lock.
        """
        with self._changed, contextlib.suppress(RuntimeError):
            self._top_up(min(count, self.depth))

    def _draw(self, entry: _Entry) -> Drawn | None:
        with self._changed:
            entry.void, entry.release = self._halted, self._releases + 1
        ended = False
        try:
            source = self._source()
            if entry.void or source is None:
                entry.void = True
                return None
            with self._drawing:
                drawn = source._draw_ahead(entry)
            entry.void = drawn is None
            ended = drawn is not None and drawn.ran_out
        except BaseException:
            ended = True
            raise
        finally:
            with self._changed:
                self._draws_done += 1
                if self._settling:
                    self._changed.notify_all()
                # A batch dropped meanwhile is never delivered, and so never released.
                if not entry.void and (entry.claimed or entry.era == self._era):
                    self._halted = self._halted or ended
        return drawn

    def wait_for_draws(self, *locks: Any) -> None:
        """Wait until the draws that this thread has requested are made.

        A draw waits only for the storage's lock. The work on its batch comes after the draw.

        Args:
            locks: the locks that these draws take. A thread that holds one of them does not wait.
        """
        last = getattr(self._own, "last", 0)
        if last <= self._draws_done or self.process != os.getpid():
            return
        if any(lock._is_owned() for lock in locks):
            return
        if self._pool.left:  # an interrupted call may have left tasks
            self._hand_over()
        with self._changed:
            self._settling += 1
            try:
                wait_for(
                    self._changed,
                    lambda: self._draws_done >= last or self._closed or self._pool.ending,
                )
            finally:
                self._settling -= 1

    def acquire(self, lock: Any) -> None:
        """Take the storage's lock. The next draw gives way to this thread."""
        if not lock.acquire(blocking=False):
            self._waiting.append(None)
            try:
                lock.acquire()
            finally:
                self._waiting.pop()

    def give_way(self, lock: Any) -> None:
        """Let the threads that wait for the storage's lock take it before the next draw.

        A lock goes to the first thread that requests it. Without a pause, the drawing thread would
        take it again at once.
        """
        if not self._waiting:
            return
        until = time.monotonic() + _MOST_SECONDS
        while self._waiting and time.monotonic() < until and not lock._is_owned():
            time.sleep(_PAUSE)

    def forget(self, entry: _Entry) -> None:
        """Drop a batch that a caller waited for. The caller holds the storage's lock."""
        with self._changed:
            entry.claimed, entry.era = False, -1

    def left_behind(self) -> list[Drawn]:
        """Return the undelivered draws in a forked process, which has no threads."""
        return [entry.drawn for entry in self._entries if entry.drawn is not None]

    def wanted(self, entry: _Entry) -> bool:
        """Return whether a batch is still wanted. The caller holds the storage's lock."""
        return entry.claimed or entry.era == self._era

    def pending(self) -> list[Drawn]:
        """Return the undelivered draws, in order. The caller holds the storage's lock."""
        with self._changed:
            return [entry.drawn for entry in self._entries if entry.drawn is not None]

    def clear(self) -> list[Drawn]:
        """Drop all batches and return their draws.

        A batch that a thread already waits for is still delivered. The caller holds the storage's
        lock.
        """
        with self._changed:
            undelivered = [entry.drawn for entry in self._entries if entry.drawn is not None]
            self._entries.clear()
            self._era += 1
            self._go_on()
        return undelivered

    def shutdown(self) -> None:
        """Join the threads; later calls of ``next`` raise RuntimeError."""
        with self._changed:
            self._closed = True
            self._entries.clear()
            self._era += 1
            self._changed.notify_all()
        self._pool.dismiss()
        self._pool.join()


def _run(reference: weakref.ref[Prefetcher], entry: _Entry) -> Callable[[], None] | None:
    """Draw, and return a function that makes the batch alongside other draws."""
    prefetcher = reference()
    if prefetcher is None:
        return None
    try:
        drawn = prefetcher._draw(entry)
    except BaseException as error:
        if not isinstance(error, Exception):
            prefetcher._own.cut = error
        entry.outcome.set(None, error)
        return None
    source = prefetcher._source()
    if drawn is None or source is None:
        entry.outcome.set(None)
        return None
    return functools.partial(_make, source, drawn, entry)


def _make(source: _Source, drawn: Drawn, entry: _Entry) -> None:
    try:
        result = None if drawn.late else source._finish(drawn)
    except BaseException as error:
        entry.outcome.set(None, error)
    else:
        entry.outcome.set(result)


class PrefetchState:
    """The prefetched and kept draws of a buffer. Kept draws precede new draws.

    ``_drawn_by`` holds references to the ensembles that draw from the buffer.
    """

    _initialized: bool
    _closed: bool
    _storage: Storage
    _prefetcher: Prefetcher | None
    _pending: deque[Drawn]
    _sampler: Sampler
    _sample_unit: SampleUnit
    _chain: Compose
    _collate_fn: Callable[[Any], Any] | None
    _target: torch.device | None
    _pin_memory: bool
    _batch_size: int | None
    _drawn_by: tuple[weakref.ref[Any], ...] = ()

    if TYPE_CHECKING:

        def _locked(self, *, patient: bool = False, wait_for_draws: bool = True) -> Any: ...

    def _wait_for_draws(self, locks: tuple[Any, ...] = ()) -> None:
        """Wait for the draws that this thread has requested.

        These are draws of this buffer and of ensembles that draw from it. Later changes by the
        thread do not affect them.

        Args:
            locks: further locks that these draws take. A thread that holds one of them does not
                wait.
        """
        if not self._initialized or (self._prefetcher is None and not self._drawn_by):
            return
        locks = (*locks, self._storage.lock)
        if self._prefetcher is not None:
            self._prefetcher.wait_for_draws(*locks)
        for reference in self._drawn_by:
            ensemble = reference()
            if ensemble is not None:
                ensemble._wait_for_draws(locks)

    def _draws_at_once(self) -> bool:
        """Return whether a draw with its batch takes little longer than a handover."""
        storage, sampler = self._storage, self._sampler
        if "prompt" not in vars(type(sampler)) or not isinstance(storage, ColumnStorage):
            return False
        if len(self._chain) or self._collate_fn is not None or self._target is not None:
            return False
        if self._pin_memory or type(storage).read is not ColumnStorage.read:
            return False
        if type(self._sample_unit) is not Transition:
            return False
        return storage.reads_at_once(self._batch_size or 0)

    def _free_lock(self) -> Any:
        """Take and return the lock of the storage; None if another thread holds it."""
        lock = self._storage.lock
        return lock if lock.acquire(blocking=False) else None

    def _queue(self) -> Prefetcher | None:
        """Return the prefetcher. A forked process gets a new one with new threads."""
        queue = self._prefetcher
        if queue is not None and queue.process != os.getpid():
            with self._locked():
                if self._prefetcher is queue:
                    self._pending.extendleft(reversed(queue.left_behind()))
                    queue = self._prefetcher = Prefetcher(queue.depth, cast(Any, self))
                return self._prefetcher
        return queue

    def _feed(self) -> None:
        """Read kept draws now, before any write. The caller holds the lock."""
        if self._pending and not self._closed and (queue := self._queue()) is not None:
            queue.feed(len(self._pending))

    def _made_again(self) -> list[Drawn]:
        """Make prefetched batches again from the same draws; return the draws in order.

        A state that is saved now contains the same draws. The caller holds the lock.
        """
        draws = self._withdraw_prefetched()
        kept = self._readable(draws)
        self._pending = deque(draws[:kept])
        self._feed()
        return draws[:kept]

    def _readable(self, draws: list[Drawn]) -> int:
        """Return the number of draws that can be read again; roll back the others.

        The caller holds the lock.
        """
        return len(draws)

    def _withdraw_prefetched(self) -> list[Drawn]:
        """Drop prefetched batches; return their draws in order.

        The caller holds the lock.
        """
        queue = self._queue()
        # Copies, because a thread may still make a batch from a draw and remove its rows.
        drawn = [] if queue is None else [one.without_rows() for one in queue.clear()]
        # The queue is filled from the kept draws, so the remaining kept draws come after it.
        drawn = [*drawn, *self._pending]
        self._pending.clear()
        return drawn
