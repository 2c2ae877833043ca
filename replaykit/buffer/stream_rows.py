"""Take the oldest rows of streams out of a buffer, or all rows at once."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import Self

from replaykit._compat import is_tensordict, lookup
from replaykit.buffer.draw import rewind
from replaykit.buffer.write import empty_rows
from replaykit.episodes import EpisodeIndex
from replaykit.episodes.streams import stream_keys
from replaykit.errors import Closed, NotEnoughData
from replaykit.interrupts import check
from replaykit.keywords import whole_number
from replaykit.pace import checked_timeout
from replaykit.storages.column_storage import ColumnStorage, with_episodes
from replaykit.storages.indexing import elements_of, unravel_index
from replaykit.storages.removal import check_removable, named_lanes, remove_oldest, stream_index
from replaykit.storages.taken_rows import any_taken, row_ids, take_elements, taken

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer

Array = np.ndarray[Any, Any]

_POLL_S = 0.05
"""Longest wait in one call, so that signals are handled."""


class Arrivals:
    """Lets calls wait for new rows. A copy has no waiting calls.

    Attributes:
        waiting: number of calls that wait.
        closed: True from ``close`` on, until ``reopen``.
    """

    def __init__(self) -> None:
        self.waiting, self.closed = 0, False
        self._changed = threading.Condition()

    def notify(self) -> None:
        """Wake the calls that wait."""
        with self._changed:
            self._changed.notify_all()

    def close(self, closed: bool = True) -> None:
        """End all waits, or allow waits again."""
        self.closed = closed
        self.notify()

    def wait(self, seconds: float) -> None:
        """Wait for rows. The caller holds no lock."""
        with self._changed:
            self._changed.wait(min(seconds, _POLL_S))

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


def _streams(buffer: ReplayBuffer, storage: Any, name: str) -> EpisodeIndex | None:
    """Return the index of the streams; None without rows. The caller holds the lock."""
    check_removable(storage, name)
    if buffer._writer.kind not in ("lanes", "episodes"):
        raise ValueError(
            f"{name} expected a LaneWriter or EpisodeWriter, which find the free slots, got "
            f"{type(buffer._writer).__name__}"
        )
    return stream_index(storage, name) if storage.initialized else None


def _checked_lanes(buffer: ReplayBuffer, lane: Any) -> Array | None:
    """Return the declared streams that a call names; None if the writer declares none.

    Raises:
        IndexError: a stream is not declared.
    """
    declared = getattr(buffer._writer, "lanes", None)
    if declared is None or lane is None:
        return declared
    named = np.atleast_1d(np.asarray(lane))
    if not np.isin(named, declared).all():
        raise IndexError(f"expected some of the streams {declared.tolist()}, got {named.tolist()}")
    return named


def empty_streams(
    buffer: ReplayBuffer, empty_write_count: bool, lane: Any, protected: bool
) -> None:
    """Remove all rows, or those of streams; leave protected episodes unless ``protected``."""
    with buffer._locked() as storage:
        writer: Any = buffer._writer
        spared = not protected and len(storage) and getattr(writer, "protect", None) is not None
        if lane is not None or (spared and writer.protected().any()):
            remove_stream_rows(buffer, None, lane, "empty(lane=)", protected=not spared)
            if lane is None:
                writer.evicted = 0
        else:
            empty_rows(buffer, empty_write_count)


def remove_stream_rows(
    buffer: ReplayBuffer, count: int | None, lane: Any, name: str, *, protected: bool = True
) -> int:
    """Remove up to ``count`` of the oldest rows of each stream; None for all rows."""
    if count is not None:
        count = whole_number("n", count, 0)
    with buffer._locked() as found:
        storage: Any = found
        index = _streams(buffer, storage, name)
        if index is None or not len(storage):
            return 0
        if (declared := _checked_lanes(buffer, lane)) is not None:  # some may have no rows yet
            lane = declared[index.pool.known(declared.tolist())]
        lanes = named_lanes(storage, index, lane)
        sizes = index.sizes()[lanes]
        counts = sizes if count is None else np.minimum(sizes, count)
        if not protected:
            counts[buffer._writer.protected()[lanes]] = 0  # type: ignore[attr-defined]
        kept = counts > 0
        rewind(buffer)
        remove_oldest(storage, lanes[kept], counts[kept])
        return int(counts.sum())


class StreamQueues:
    """The streams of a storage as queues, of which each has a prefix of taken rows.

    The streams are those of a ``lane_key``, the lanes of ``ndim > 1``, or all rows as one stream.
    The caller holds the lock.

    Attributes:
        sizes: the number of stored rows of each stream, int64 ``[streams]``.

    Raises:
        RuntimeError: the storage has a ``lane_key``, and rows were placed by hand.
    """

    def __init__(self, storage: ColumnStorage, name: str) -> None:
        self._storage, ledger = storage, storage.ledger
        self._index = None
        if storage.lane_key is not None and ledger.length:
            self._index = stream_index(storage, name)
            self.sizes = self._index.sizes()
            return
        lanes = 0 if storage.lane_key is not None or not ledger.length else storage.lanes.numel()
        self.sizes = np.full(lanes, ledger.length)
        self._order = None if ledger.in_order else ledger.write_order().numpy()

    @property
    def written(self) -> Array:
        """The number of rows that each stream got since it was indexed, int64 ``[streams]``."""
        if self._index is None:
            return self.sizes
        _, until = self._index.bounds(np.arange(len(self.sizes)))
        return np.asarray(until)

    def named(self, lane: Any) -> Array:
        """Return the numbers of streams, int64 ``[K]``, in the given order.

        None is for all lanes, or for the streams with rows that were not taken.

        Raises:
            IndexError: a stream has no stored rows.
            ValueError: a stream is named twice.
        """
        storage = self._storage
        if lane is None:
            every = np.arange(len(self.sizes))
            return every if self._index is None else every[self.sizes > self.taken(every)]
        keys = np.atleast_1d(np.asarray(lane))
        if storage.lane_key is None:
            storage.lanes_named(lane)
            if len(np.unique(keys)) < len(keys):
                raise ValueError(f"expected each lane once, got {keys.tolist()}")
            return keys.astype(np.int64)
        if self._index is None:
            raise IndexError(f"expected streams with stored rows, got {keys.tolist()}")
        chosen = named_lanes(storage, self._index, lane)
        return chosen[np.argsort(np.argsort(keys, kind="stable"), kind="stable")]

    def elements(self, lanes: Array, number: Array) -> Array:
        """Return the elements of rows, given streams and the rows' ages, 0 for the oldest row."""
        if self._index is not None:
            return self._index.element(self._index.bounds(lanes)[0] + number, lanes)
        ledger = self._storage.ledger
        if self._order is None:
            slot = (ledger.cursor - ledger.length + number) % ledger.slots
        else:
            slot = self._order[number]
        return np.asarray(slot * self._storage.lanes.numel() + lanes)

    def taken(self, lanes: Array) -> Array:
        """Return how many rows of streams were taken, int64 ``[K]``. Cost: O(K log rows)."""
        low, high = np.zeros(len(lanes), np.int64), self.sizes[lanes].copy()
        if not any_taken(self._storage):
            return low
        while (left := np.flatnonzero(low < high)).size:
            middle = (low[left] + high[left]) // 2
            gone = taken(self._storage, self.elements(lanes[left], middle))
            low[left[gone]], high[left[~gone]] = middle[gone] + 1, middle[~gone]
        return low


_PAUSES = (0.0005, 0.001, 0.002, 0.005)
"""Seconds between looks at the rows of other processes. The last value repeats."""
_NEED = ", which take(), drain() and overwrite=False need"

_CLOSED = "closed"
"""File in the folder of shared rows that ends the waits of all processes."""


class _Wait:
    """The wait of one call for rows, or for room. No lock is held.

    Args:
        timeout: seconds; None for no limit.
        text: the text of the error at the end of the time.
    """

    def __init__(self, buffer: ReplayBuffer, timeout: float | None, text: str) -> None:
        seconds = checked_timeout(timeout)
        self._until = math.inf if seconds is None else time.monotonic() + seconds
        self._buffer, self._text, self._looks = buffer, f"{text} within {timeout} s", 0

    def __enter__(self) -> Self:
        self._buffer._arrivals.waiting += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer._arrivals.waiting -= 1

    def pause(self) -> None:
        """Wait for a change, or for a short time. Raises TimeoutError."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError(self._text) from None
        pause = _PAUSES[min(self._looks, len(_PAUSES) - 1)] if self._buffer._shared else _POLL_S
        self._looks += 1
        self._buffer._arrivals.wait(min(left, pause))
        check()


def _closed_file(buffer: ReplayBuffer) -> Path | None:
    recovery = buffer.storage.recovery
    return recovery.home.folder / _CLOSED if buffer._shared else None


def is_closed(buffer: ReplayBuffer) -> bool:
    """Return whether waits have ended, here or for all processes."""
    file = _closed_file(buffer)
    return buffer._arrivals.closed or (file is not None and os.path.exists(file))


def close_queues(buffer: ReplayBuffer, closed: bool) -> None:
    """End the waits of all processes, or allow waits again."""
    file = _closed_file(buffer)
    if file is not None and closed:
        file.touch()
    elif file is not None:
        file.unlink(missing_ok=True)
    buffer._arrivals.close(closed)


def take_rows(buffer: ReplayBuffer, n: int, lanes: Any, timeout: float | None) -> Any:
    """Return the ``n`` oldest rows of each stream ``[B, n]``, and remove them."""
    n = whole_number("n", n, 1)
    if lanes is not None and not np.asarray(lanes).size:
        raise ValueError("expected at least one stream, got none; lanes=None means all streams")
    buffer._ready()
    with _Wait(buffer, timeout, f"expected {n} rows of each stream") as wait:
        while True:
            if is_closed(buffer):
                return None
            try:
                found = _take(buffer, n, lanes)
            except NotEnoughData:
                if timeout == 0:
                    raise
            else:
                buffer._arrivals.notify()  # writers may wait for room
                return found
            wait.pause()


def _removes(buffer: ReplayBuffer, storage: Any) -> bool:
    """Return whether rows that are taken leave the storage at once. They cannot in a ring."""
    try:
        check_removable(storage, "")
    except ValueError:
        return False
    return buffer._writer.kind in ("lanes", "episodes")


def _queues(buffer: ReplayBuffer, storage: ColumnStorage, name: str) -> StreamQueues:
    if buffer._sampler.consumes:
        raise ValueError(
            f"{name} expected a sampler that uses no rows up, got {buffer._sampler!r}; sample() "
            "with a ConsumingSampler(order='age') returns the oldest rows once"
        )
    return StreamQueues(storage, name)


def _take(buffer: ReplayBuffer, n: int, lane: Any) -> Any:
    with buffer._locked() as found:
        storage, writer = with_episodes(found, _NEED), buffer._writer
        limit = getattr(writer, "length", storage.ledger.slots)
        if n > limit:
            raise ValueError(f"expected n of at most {limit} rows of a stream, got {n}")
        declared = _checked_lanes(buffer, lane)
        if not len(storage):
            raise NotEnoughData(f"expected {n} rows of each stream, got an empty storage")
        queues = _queues(buffer, storage, "take()")
        try:
            chosen = queues.named(lane if declared is None else declared)
        except IndexError as error:
            if storage.lane_key is None:
                raise
            raise NotEnoughData(f"{n} rows of each stream: {error}") from None
        first = queues.taken(chosen)
        left = queues.sizes[chosen] - first
        if not len(chosen) or (left < n).any():
            raise NotEnoughData(
                f"expected {n} rows of each of {len(chosen)} streams, got "
                f"{min(left, default=0)} of one"
            )
        rewind(buffer)
        number = (first[:, None] + np.arange(n)).reshape(-1)
        elements = queues.elements(np.repeat(chosen, n), number)
        rows = _read(storage, elements, n)
        if _removes(buffer, storage):
            remove_oldest(storage, chosen, first + n)  # also rows that were taken from a ring
        else:
            take_elements(storage, elements)
        return rows


def _read(storage: ColumnStorage, elements: Array, steps: int) -> Any:
    """Return copies of rows ``[lanes, steps]``, given their elements lane by lane."""
    index = torch.from_numpy(elements)
    index = index if storage.ndim == 1 else unravel_index(index, storage.lanes)
    return storage.get(index.unflatten(0, (-1, steps)))


class Room(_Wait):
    """The condition that a write replaces only rows that were taken.

    Raises:
        ValueError: parts of the buffer do not keep the order of a queue.
    """

    def __init__(self, buffer: ReplayBuffer, timeout: float | None) -> None:
        buffer._ready()
        holds = [e for e in buffer._chain.entries if callable(getattr(e.transform, "flush", None))]
        if buffer._writer.kind not in ("round_robin", "lanes") or buffer._sampler.consumes or holds:
            raise ValueError(
                "overwrite=False expected a RoundRobinWriter or LaneWriter, a sampler that uses no "
                f"rows up, and transforms that hold no rows back, got {buffer!r}"
            )
        super().__init__(buffer, timeout, "expected room for all rows")

    def stored(self) -> int:
        """Return the number of stored rows. Raises Closed after waits have ended."""
        if is_closed(self._buffer):
            raise Closed("expected an open queue, but close() or shutdown() was called")
        return len(self._buffer)

    def fits(self, storage: Any, rows: Any) -> bool:
        """Return whether there is room for prepared rows. The caller holds the lock.

        Raises:
            Closed: waits have ended.
            ValueError: there is never room for that many rows.
        """
        self.stored()
        storage, writer = with_episodes(storage, _NEED), self._buffer._writer
        if writer.kind == "lanes":
            keys = stream_keys(rows.leaves[storage.lane_key])
            keys, counts = np.unique(keys, return_counts=True)
            most, what = writer.length, "a stream"  # type: ignore[attr-defined]
        else:
            counts, most, what = np.array([len(rows)]), storage.slots_for(rows), "the storage"
        if counts.max() > most:
            raise ValueError(
                f"overwrite=False expected at most {most} rows of {what}, got {counts.max()}"
            )
        if not len(storage):
            return True
        if writer.kind != "lanes":
            slots = storage.ledger.next_slots(len(rows)).numpy()
            slots = slots[slots < storage.ledger.length]
            return bool(taken(storage, elements_of(slots, storage.lanes.numel())).all())
        queues, index = StreamQueues(storage, "overwrite=False"), storage.episodes
        known, lanes = np.array(index.pool.known(keys.tolist())), index.lanes_with(keys)
        left = queues.sizes[lanes] - queues.taken(lanes)
        return bool((left + counts[known] <= most).all())


def drain_rows(buffer: ReplayBuffer, skip: int, aligned: bool) -> Any:
    """Return all rows in order of time, ``[lanes, T]``, and remove them."""
    skip = whole_number("skip", skip, 0)
    with buffer._locked() as found:
        storage = with_episodes(found, _NEED)
        queues = _queues(buffer, storage, "drain()")
        lanes = queues.named(None)
        first = queues.taken(lanes)
        sizes = queues.sizes[lanes] - first
        declared = getattr(buffer._writer, "lanes", None)
        if declared is not None:
            sizes = np.append(sizes, np.zeros(len(declared) - len(sizes), int))
        if not len(sizes) or sizes.min() != sizes.max() or sizes[0] <= skip:
            raise NotEnoughData(
                f"expected lanes of equal numbers of rows, more than {skip}, got "
                f"{min(sizes, default=0)} to {max(sizes, default=0)}"
            )
        written = queues.written[lanes]
        if aligned and (written != written[0]).any():
            raise NotEnoughData(
                f"aligned=True expected lanes that got equal numbers of rows, got "
                f"{int(written.min())} to {int(written.max())}"
            )
        steps = int(sizes[0]) - skip
        number = (first[:, None] + np.arange(skip, skip + steps)).reshape(-1)
        elements = queues.elements(np.repeat(lanes, steps), number)
        rows = _read(storage, elements, steps)
        if is_tensordict(rows) and lookup(rows, ("position",)) is None:
            rows["position"] = torch.from_numpy(row_ids(storage, elements)).view(-1, steps)
        empty_rows(buffer, empty_write_count=False)
        return rows
