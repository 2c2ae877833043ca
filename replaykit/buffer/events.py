"""Report the events of a buffer, and count and save by them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch

from replaykit.buffer.source import seconds_left
from replaykit.declared import Positive, Rule, decode_state, read_value, within
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


HISTOGRAM = "histogram:"
"""The prefix of lists whose numbers are a distribution, and are not added up."""


_Number = Annotated[Any, Rule("a number", lambda value: type(value) in (int, float))]
"""A number that may be NaN, for example the loss of a failed update."""


@dataclass(frozen=True)
class _State:
    sums: dict[str, _Number]
    windows: dict[str, list[_Number]]


class Metrics:
    """Sums and recent values of named numbers, which events of buffers and callers report.

    With ``attach``, the keys "write", "evict" and "sample" count rows, and "episode_end" counts
    ended episodes. The state is saved with the buffer. All methods may be called from any thread.

    Args:
        window: number of recent values of each key that are stored.
        every: number of written rows between two calls of ``log``.
        log: a function that receives the values of ``get_report()``; None for none.

    Raises:
        ValueError: ``window`` or ``every`` is not an int of at least 1.

    Example:
        >>> import torch
        >>> from replaykit import LazyTensorStorage, Metrics, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
        >>> metrics = Metrics().attach(rb)
        >>> for _ in range(3):
        ...     _ = rb.extend(torch.zeros(2))
        >>> _ = rb.sample()
        >>> metrics.report({"loss": 0.5}, {"return": [1.0, 3.0]})
        >>> values, windows = metrics.get_report()
        >>> values["write/cumulative"], values["evict/cumulative"], values["return"]
        (6.0, 2.0, 2.0)
        >>> windows["write"]
        [2.0, 2.0, 2.0]
    """

    def __init__(
        self,
        window: int = 1000,
        every: int = 10_000,
        log: Callable[[dict[str, float]], object] | None = None,
    ) -> None:
        self.window: int = read_value(Positive, window, "window")
        self.every: int = read_value(Positive, every, "every")
        self.log = log
        self._sums: dict[str, float] = {}
        self._windows: dict[str, deque[float]] = {}
        self._lock = threading.Lock()
        self._due = self.every

    def attach(self, buffer: Any) -> Metrics:
        """Count the events of a buffer, and save the state with it; return the metrics."""
        for kind in EVENTS:
            buffer.on(kind, self._count, state=self)
        return self

    def _count(self, event: Event) -> None:
        self.report({event.kind: event.count})
        written = self._sums.get("write", 0)
        if event.kind == "write" and written >= self._due:
            self._due = written + self.every
            if self.log is not None:
                self.log(self.get_report()[0])

    def report(
        self,
        scalars: Mapping[str, float] | None = None,
        lists: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Add numbers.

        Args:
            scalars: a number for each key.
            lists: several numbers for each key. Those of keys that begin with "histogram:" have no
                sum.
        """
        added = {**{key: [value] for key, value in (scalars or {}).items()}, **(lists or {})}
        checked = {key: [float(value) for value in values] for key, values in added.items()}
        with self._lock:
            for key, values in checked.items():
                self._windows.setdefault(key, deque(maxlen=self.window)).extend(values)
                if not key.startswith(HISTOGRAM):
                    self._sums[key] = self._sums.get(key, 0.0) + sum(values)

    @contextlib.contextmanager
    def timer(self, key: str) -> Iterator[None]:
        """Report the seconds that the block takes."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.report({key: time.perf_counter() - begun})

    def get_report(
        self, keys: Iterable[str] | None = None
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Return values and recent numbers.

        Args:
            keys: the keys; None for all. Unknown keys are left out.

        Returns:
            Two results. The first has the mean of the recent numbers under each key, and the sum of
            all numbers under ``"<key>/cumulative"``. The second has the recent numbers.
        """
        with self._lock:
            known = list(self._windows) if keys is None else [k for k in keys if k in self._windows]
            windows = {key: list(self._windows[key]) for key in known}
            sums = {f"{key}/cumulative": self._sums[key] for key in known if key in self._sums}
        means = {key: sum(numbers) / len(numbers) for key, numbers in windows.items() if numbers}
        return {**means, **sums}, windows

    def state_dict(self) -> dict[str, Any]:
        """Return all sums and recent numbers."""
        with self._lock:
            windows = {key: list(numbers) for key, numbers in self._windows.items()}
            return {"sums": dict(self._sums), "windows": windows}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load sums and recent numbers; raise ValueError if the state is invalid."""
        state = decode_state(_State, state_dict, "the state of Metrics")
        with self._lock:
            self._sums = dict(state.sums)
            windows = state.windows.items()
            self._windows = {key: deque(numbers, self.window) for key, numbers in windows}
            self._due = self._sums.get("write", 0) + self.every


_Seconds = Annotated[float, within(0)]


class PeriodicSave:
    """Saves a buffer after a number of written rows and a number of seconds.

    A thread calls ``rb.dumps(path)``, so writers only wait while the save takes its snapshot. An
    error is logged, and the next due save tries again. ``rb.loads(path)`` reads the checkpoint.

    Args:
        buffer: the buffer.
        path: the directory of the checkpoint.
        every: number of rows that are written between the beginnings of two saves.
        min_seconds: minimum seconds between the beginnings of two saves.

    Attributes:
        count: number of finished saves.
        error: the error of the last save; None if it succeeded.

    Raises:
        ValueError: ``every`` is not an int of at least 1, or ``min_seconds`` is negative.

    Example:
        >>> import tempfile, torch
        >>> from replaykit import LazyTensorStorage, PeriodicSave, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> folder = tempfile.mkdtemp()
        >>> with PeriodicSave(rb, folder, every=10, min_seconds=0) as saves:
        ...     _ = rb.extend(torch.arange(12))
        >>> other = ReplayBuffer(storage=LazyTensorStorage(100))
        >>> other.loads(folder)
        >>> saves.count, len(other)
        (1, 12)
    """

    def __init__(
        self,
        buffer: Any,
        path: str | os.PathLike[str],
        *,
        every: int = 100_000,
        min_seconds: float = 600.0,
    ) -> None:
        self._buffer, self.path = buffer, Path(path)
        self.every: int = read_value(Positive, every, "every")
        self.min_seconds: float = read_value(_Seconds, min_seconds, "min_seconds")
        self.count = 0
        self.error: Exception | None = None
        self._rows, self._begun = 0, time.monotonic()
        self._lock, self._closed = threading.Lock(), False
        self._thread: threading.Thread | None = None
        self._remove = buffer.on("write", self._count)

    def _count(self, event: Event) -> None:
        with self._lock:
            if self._closed:  # this call began before close()
                return
            self._rows += event.count
            now, running = time.monotonic(), self._thread is not None and self._thread.is_alive()
            if running or self._rows < self.every or now - self._begun < self.min_seconds:
                return
            self._rows, self._begun = 0, now
            self._thread = threading.Thread(target=self._save, name="replaykit-periodic-save")
            self._thread.start()

    def _save(self) -> None:
        try:
            self._buffer.dumps(self.path)
        except Exception as error:
            self.error = error
            _LOG.exception("the buffer could not be saved in %s", self.path)
        else:
            self.count, self.error = self.count + 1, None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a save that is being made; return False after ``timeout`` seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def close(self) -> None:
        """Begin no further save, and wait for one that is being made."""
        self._remove()
        with self._lock:
            self._closed = True
        self.wait()

    def __enter__(self) -> PeriodicSave:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
