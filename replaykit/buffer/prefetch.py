"""Draw and make batches ahead, in threads, in the order in which they were requested."""

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
"""How often who draws ahead looks whether others still wait for the lock, and for how long."""


@dataclass(slots=True)
class Origin:
    """Where a draw comes from, and what there was before it, for taking it back.

    ``size``: the batch size that was asked for. ``ran_out``: what the sampler said before.
    ``random``, ``random_after``: states of the generator around it, where they may be needed.
    """

    storage: Any
    sampler: Any
    size: int
    ran_out: bool
    random: torch.Tensor | None = None
    random_after: torch.Tensor | None = None


@dataclass(slots=True)
class Drawn:
    """A draw: the index, what is known of it, whether it ended a pass, and the rows read.

    ``anchors`` is the index as the sampler gave it, before the sample unit. ``collate`` and
    ``stack_dim`` belong to the storage that the rows were read from. ``sampler`` is who drew it;
    ``fetched`` is what the transforms have read besides. ``size``: the batch size asked for.
    ``written``: the storage's next position at the draw. ``random``: the state of the buffer's
    generator before the transforms drew from it; None where nobody may ask for it. ``fresh``: the
    rows were read for this draw alone, and go to who asked for them as they are. ``arrival``: the
    batch is on its way to a device. ``late``: the batch is made of the rows when it is delivered.
    ``begun``: to be waited for before anybody looks at the rows. ``numbered``: transforms see
    ``index`` in the rows.
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

    def kept(self) -> Drawn:
        """The draw alone, to be delivered later."""
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
    """A batch under way. ``drawn`` and ``written`` are set with the storage's lock held.

    ``written``: how far the storage was written when the draw was tried. ``here``: the draw was
    left for who has asked for it, and the batch is made of it when it is delivered.
    ``void``: not drawn, because a draw before it had ended a pass; ``release`` is then the number
    of the release that it waits for.
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

    def _abandon(self, entry: Any, *, settled: bool = True) -> None: ...


class Prefetcher:
    """Keeps ``depth`` batches in the making.

    Draws take place one after the other in the order of submission, so that they are the draws
    that a buffer without prefetch would make; what comes after a draw runs in parallel. After a
    draw that ends a pass, or fails, none follows before it has been delivered.

    What a thread changes counts for none of the draws that it had submitted before: it waits for
    them first (``settle``). So which draws know of it follows from the program alone.

    A draw that is over sooner than it is handed to a thread is made by who asks for it, at once,
    where nobody is in the way (``_draws_at_once``): in the same order, so that it is the same draw.

    The threads hold no reference to the buffer and end with it. They stay behind when a process
    forks: ``process`` says where they are.
    """

    def __init__(self, depth: int, source: _Source) -> None:
        self.depth = depth
        self.process = os.getpid()
        self._source = weakref.ref(source)
        self._changed = threading.Condition()
        # A draw that a fork has cut would have used random numbers and be lost.
        self._drawing = new_lock()
        self._entries: deque[_Entry] = deque()
        self._era = 0
        self._tickets = 0
        self._settled = 0  # tickets whose draws have taken place, or never will; they do in order
        self._settling = 0
        self._own = threading.local()  # .last: the tickets up to the last one of a thread's own
        self._halted = False
        self._waiting: list[None] = []
        self._releases = 0
        self._closed = False
        self._crew = ThreadPool(depth, "replaykit-prefetch")
        weakref.finalize(self, self._crew.dismiss).atexit = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._entries)

    def next(self) -> tuple[Drawn, Any]:
        """Returns the oldest batch, with its draw, and tops up; None for one that is yet to be
        made of a draw that is ``late``.

        Raises:
            Exception: whatever making that batch has raised.
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
                if self._crew.left and here:
                    self._draw_here()
                result = entry.outcome.get()
            except BaseException as error:
                with shielded:
                    if source is not None:
                        source._abandon(entry, settled=isinstance(error, Exception))
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
        """Whether a draw failed ahead of time, and rows have been written since."""
        source = self._source()
        return entry.drawn is None and source is not None and source._written() != entry.written

    def _await_release(self, number: int) -> None:
        """Waits until another thread has delivered the batch that ended a pass; later passes may
        have ended by the time this thread is awake: it waits for one only."""
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
        """``here``: the draws are left for ``_draw_here``."""
        if self._closed:
            raise RuntimeError("this buffer was shut down")
        while len(self._entries) < depth:
            entry = _Entry(self._era, here)
            # First, since it may fail; whoever does it waits for the lock that is held here.
            hand = self._crew.leave if here else self._crew.give
            hand(functools.partial(_run, weakref.ref(self), entry))
            self._entries.append(entry)
            self._tickets += 1
            self._own.last = self._tickets

    def _draw_here(self) -> None:
        """Makes the draws that were asked for in this thread, or has threads make them where it
        would have to wait for others."""
        source = self._source()
        lock = None if source is None or self._waiting else source._free_lock()
        if lock is not None:
            try:
                rest = self._crew.help()
            finally:
                lock.release()
            for beside in rest:
                beside()
            # An interrupt is of this call, and not of the one that would have got the batch.
            if (cut := self._own.__dict__.pop("cut", None)) is not None:
                raise cut
        if self._crew.left:
            self._hand_over()

    def _hand_over(self) -> None:
        with self._changed, contextlib.suppress(RuntimeError):
            if not self._closed:
                self._crew.hand_over()
                return
        for beside in self._crew.help(wait=True):  # there are no threads
            beside()

    def feed(self, count: int) -> None:
        """Has draws that were kept be read at once, before anything is written; without a thread to
        do it, when a batch is asked for. The storage's lock is held."""
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
                self._settled += 1
                if self._settling:
                    self._changed.notify_all()
                # A batch that was given up meanwhile is never delivered, so never released.
                if not entry.void and (entry.claimed or entry.era == self._era):
                    self._halted = self._halted or ended
        return drawn

    def settle(self, *locks: Any) -> None:
        """Waits until the draws have taken place that this thread has submitted.

        A draw waits for the storage's lock alone, and comes before what is made of draws.

        Args:
            locks: those that draws take: who holds one of them does not wait.
        """
        last = getattr(self._own, "last", 0)
        if last <= self._settled or self.process != os.getpid():
            return
        if any(lock._is_owned() for lock in locks):
            return
        if self._crew.left:  # of a call that was interrupted, perhaps
            self._hand_over()
        with self._changed:
            self._settling += 1
            try:
                wait_for(
                    self._changed,
                    lambda: self._settled >= last or self._closed or self._crew.ending,
                )
            finally:
                self._settling -= 1

    def acquire(self, lock: Any) -> None:
        """Takes the storage's lock; the next draw lets whoever waits for it here go first."""
        if not lock.acquire(blocking=False):
            self._waiting.append(None)
            try:
                lock.acquire()
            finally:
                self._waiting.pop()

    def give_way(self, lock: Any) -> None:
        """Lets those have the storage's lock who have waited for it while a batch was drawn: a
        lock goes to whoever comes first, which would be who draws; he comes again at once."""
        if not self._waiting:
            return
        until = time.monotonic() + _MOST_SECONDS
        while self._waiting and time.monotonic() < until and not lock._is_owned():
            time.sleep(_PAUSE)

    def forget(self, entry: _Entry) -> None:
        """Gives up a batch that was waited for. The storage's lock is held."""
        with self._changed:
            entry.claimed, entry.era = False, -1

    def left_behind(self) -> list[Drawn]:
        """Returns the draws not delivered, in a process that has forked off and has no threads."""
        return [entry.drawn for entry in self._entries if entry.drawn is not None]

    def wanted(self, entry: _Entry) -> bool:
        """Whether a batch is still waited for. The storage's lock is held."""
        return entry.claimed or entry.era == self._era

    def pending(self) -> list[Drawn]:
        """Returns the draws made and not delivered, in order. The storage's lock is held."""
        with self._changed:
            return [entry.drawn for entry in self._entries if entry.drawn is not None]

    def clear(self) -> list[Drawn]:
        """Gives up all batches, but for those that a thread is already waiting for; returns their
        draws. The storage's lock is held."""
        with self._changed:
            undelivered = [entry.drawn for entry in self._entries if entry.drawn is not None]
            self._entries.clear()
            self._era += 1
            self._go_on()
        return undelivered

    def shutdown(self) -> None:
        """Joins the threads; ``next`` raises RuntimeError from now on."""
        with self._changed:
            self._closed = True
            self._entries.clear()
            self._era += 1
            self._changed.notify_all()
        self._crew.dismiss()
        self._crew.join()


def _run(reference: weakref.ref[Prefetcher], entry: _Entry) -> Callable[[], None] | None:
    """Draws; returns what makes the batch of it, beside other draws."""
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
    """Draws made ahead by threads, and those kept for later, which come first.

    ``_drawn_by``: the ensembles that draw from the buffer.
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

        def _locked(self, *, patient: bool = False, settled: bool = True) -> Any: ...

    def _settle_draws(self, locks: tuple[Any, ...] = ()) -> None:
        """Waits for the draws that this thread has had made ahead, which know of nothing that it
        does afterwards: of this buffer, and of ensembles that draw from it.

        Args:
            locks: of what these draws read besides; who holds one does not wait.
        """
        if not self._initialized or (self._prefetcher is None and not self._drawn_by):
            return
        locks = (*locks, self._storage.lock)
        if self._prefetcher is not None:
            self._prefetcher.settle(*locks)
        for reference in self._drawn_by:
            ensemble = reference()
            if ensemble is not None:
                ensemble._settle_draws(locks)

    def _draws_at_once(self) -> bool:
        """Whether a draw ahead and what is made of it take little longer than to hand it over."""
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
        """The lock of the storage, taken; None where somebody has it."""
        lock = self._storage.lock
        return lock if lock.acquire(blocking=False) else None

    def _queue(self) -> Prefetcher | None:
        """What prepares batches in threads; a forked process, where they are not, gets others."""
        queue = self._prefetcher
        if queue is not None and queue.process != os.getpid():
            with self._locked():
                if self._prefetcher is queue:
                    self._pending.extendleft(reversed(queue.left_behind()))
                    queue = self._prefetcher = Prefetcher(queue.depth, cast(Any, self))
                return self._prefetcher
        return queue

    def _feed(self) -> None:
        """Has draws that were kept be read now, before anything is written. The lock is held."""
        if self._pending and not self._closed and (queue := self._queue()) is not None:
            queue.feed(len(self._pending))

    def _made_again(self) -> list[Drawn]:
        """Has batches made ahead be made anew, of the same draws, which it returns in order: who
        loads what is saved now has no others. The lock is held."""
        draws = self._take_prepared()
        kept = self._readable(draws)
        self._pending = deque(draws[:kept])
        self._feed()
        return draws[:kept]

    def _readable(self, draws: list[Drawn]) -> int:
        """How many of the draws can be read again; the others are given back. The lock is held."""
        return len(draws)

    def _take_prepared(self) -> list[Drawn]:
        """Gives up batches drawn ahead; returns their draws in order. The lock is held."""
        queue = self._queue()
        # A thread may still be making a batch of one: what is read anew must not be what it takes.
        drawn = [] if queue is None else [one.kept() for one in queue.clear()]
        # The queue is fed from what was kept, so what is left of that comes after it.
        drawn = [*drawn, *self._pending]
        self._pending.clear()
        return drawn
