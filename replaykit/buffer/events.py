"""Call functions after writes, ends of episodes, evictions and samples."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.buffer.source import seconds_left
from replaykit.errors import Closed
from replaykit.interrupts import deferred
from replaykit.keywords import one_of
from replaykit.pace import checked_timeout
from replaykit.storages import Storage
from replaykit.storages.change_log import ChangeKind
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.indexing import unravel_index

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer

_LOG = logging.getLogger(__name__)

EVENTS = ("write", "episode_end", "evict", "sample")

_POLL_S = 0.1
"""Seconds between looks at a stop event, and at buffers of other processes."""


@dataclass(frozen=True)
class Event:
    """A change or a sample of a buffer, for the functions of ``rb.on``.

    Attributes:
        kind: "write", "episode_end", "evict" or "sample".
        count: number of rows that were written, removed or sampled, or of episodes that ended.
        index: slots as ``rb.extend`` returns them: of written rows that are still stored, of the
            last rows of episodes, or of the sampled rows. None for "evict".

    Example:
        >>> from replaykit import Event
        >>> Event("evict", 3).count
        3
    """

    kind: str
    count: int
    index: torch.Tensor | None = None


class Observers:
    """The functions of a buffer that are called after events.

    Events of rows follow from the change log. So a write that another buffer made over the same
    storage is part of the next events. A forked process calls none of the functions that it
    inherits: their locks may be taken, and a second save would go to the same folder. Ctrl-C waits
    until all functions were called, so none of them misses an event.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._functions: dict[str, list[Callable[[Event], object]]] = {kind: [] for kind in EVENTS}
        self._states: list[Any] = []
        with buffer._locked(settled=False) as storage:
            self.look(storage)

    def add(self, kind: str, fn: Callable[[Event], object], state: Any) -> Callable[[], None]:
        """Register a function; return a function that removes it."""
        one_of("event", kind, EVENTS)
        names = ("state_dict", "load_state_dict")
        if not callable(fn):
            raise TypeError(f"expected a function for {kind!r} events, got {type(fn).__name__}")
        if state is not None and not all(callable(getattr(state, name, None)) for name in names):
            raise TypeError(f"expected state with {' and '.join(names)}, got {state!r}")
        entry = functools.partial(fn)  # one function may be registered several times
        # Lists are replaced and not changed, because other threads may be iterating over them.
        with self._lock:
            self._functions[kind] = [*self._functions[kind], entry]
            if state is not None and all(one is not state for one in self._states):
                self._states = [*self._states, state]

        def remove() -> None:
            with self._lock:
                found = self._functions[kind]
                self._functions[kind] = [one for one in found if one is not entry]

        return remove

    @property
    def inherited(self) -> bool:
        """True in a process that was forked after the functions were registered."""
        return self._process != os.getpid()

    def look(self, storage: Storage) -> None:
        """Begin the next events with the present rows."""
        ledger = storage.ledger
        self._ledger, self._place, self._stored = ledger, ledger.place_in_log, ledger.length

    def after_write(self, buffer: ReplayBuffer) -> None:
        """Call the functions for all changes of rows since the last call, without a lock."""
        with deferred:
            with buffer._locked(settled=False) as storage:
                events = self._changes(storage) if storage.ledger is self._ledger else []
                self.look(storage)
            for event in events:
                self._call(event)

    def after_sample(self, index: torch.Tensor) -> None:
        """Call the functions for a batch, without a lock."""
        with deferred:
            self._call(Event("sample", len(index), index))

    def _changes(self, storage: Storage) -> list[Event]:
        ledger, cells = storage.ledger, storage.lanes.numel()
        changes = ledger.log.since(self._place[0])
        _, slots = ledger.written_since(self._place)
        if changes is None or any(change.kind is ChangeKind.MOVE for change in changes):
            written, evicted = len(slots), 0  # after a load, other rows are stored
        else:
            written = ledger.next_position - self._place[1]
            evicted = self._stored + written - ledger.length
        events = []
        if evicted:
            events.append(Event("evict", evicted * cells))
        if written:
            slots = np.unique(slots)
            flat = (slots[:, None] * cells + np.arange(cells)).reshape(-1)
            events.append(Event("write", written * cells, _index(storage, flat)))
            if self._functions["episode_end"]:
                events += _ends(storage, slots)
        return events

    def _call(self, event: Event) -> None:
        if self.inherited:
            return
        for fn in self._functions[event.kind]:
            try:
                fn(event)
            except Exception:
                _LOG.exception("a function for %r events of a buffer raised", event.kind)

    # -- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of registered objects, by class name and number."""
        return {name: one.state_dict() for name, one in self._named().items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load the states of objects that are registered now; others keep their states."""
        for name, one in self._named().items():
            if name in states:
                one.load_state_dict(states[name])

    def _named(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in self._states:
            name = type(one).__name__
            found[f"{name}.{sum(key.startswith(f'{name}.') for key in found)}"] = one
        return found


def _index(storage: Storage, flat: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the index of rows ``slot * lanes + lane``, int64 ``[K]``."""
    index = torch.from_numpy(np.ascontiguousarray(flat))
    return index if storage.ndim == 1 else unravel_index(index, storage.lanes)


def _ends(storage: Storage, slots: np.ndarray[Any, Any]) -> list[Event]:
    """Return the event of the episodes that end at rows in slots, if there are any."""
    if not isinstance(storage, ColumnStorage):
        return []
    try:
        episodes = storage.episodes
    except (KeyError, RuntimeError):  # no column shows ends
        return []
    time, lane, _ = episodes.ended_among(slots)
    if not len(time):
        return []
    return [Event("episode_end", len(time), _index(storage, episodes.element(time, lane)))]


def wait_ready(
    source: Any, timeout: float | None = None, stop: threading.Event | None = None
) -> bool:
    """Wait until a buffer, ensemble or joint batch can be sampled.

    Writes of this process end the wait at once. Writes of other processes, and ``stop``, end it
    within a tenth of a second.

    Args:
        source: an object with ``can_sample``.
        timeout: maximum seconds to wait; None for no limit.
        stop: an event that ends the wait.

    Returns:
        True when ``source`` can be sampled, False after the timeout.

    Raises:
        Closed: ``stop`` was set.

    Example:
        >>> import threading, torch
        >>> from replaykit import LazyTensorStorage, ReplayBuffer, wait_ready
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(9), batch_size=2)
        >>> wait_ready(rb, timeout=0)
        False
        >>> threading.Timer(0.01, rb.extend, [torch.zeros(3)]).start()
        >>> wait_ready(rb, timeout=60)
        True
    """
    seconds, changed = checked_timeout(timeout), threading.Event()
    until = None if seconds is None else time.monotonic() + seconds
    removers = [buffer.on("write", lambda _: changed.set()) for buffer in _buffers_in(source)]
    try:
        while True:
            changed.clear()
            if stop is not None and stop.is_set():
                raise Closed("expected a wait until the buffer is ready, but stop was set")
            if source.can_sample():
                return True
            left = seconds_left(until)
            if left == 0:
                return False
            changed.wait(_POLL_S if left is None else min(left, _POLL_S))
    finally:
        for remove in removers:
            remove()


def _buffers_in(source: Any) -> list[Any]:
    members = getattr(source, "members", None)
    if members is None:
        return [source] if callable(getattr(source, "on", None)) else []
    values = members.values() if isinstance(members, Mapping) else members
    return [buffer for member in values for buffer in _buffers_in(member)]
