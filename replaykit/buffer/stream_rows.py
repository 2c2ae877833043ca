"""Take the oldest rows of streams out of a buffer, or all rows at once."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit.buffer.draw import rewind
from replaykit.buffer.write import empty_rows
from replaykit.errors import NotEnoughData
from replaykit.keywords import whole_number
from replaykit.pace import checked_timeout
from replaykit.storages.column_storage import ColumnStorage
from replaykit.storages.removal import (
    check_removable,
    named_lanes,
    oldest_slots,
    remove_oldest,
    stream_index,
)

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer
    from replaykit.episodes import EpisodeIndex

__all__ = ["Arrivals", "drain_rows", "remove_stream_rows", "take_rows"]

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


def remove_stream_rows(buffer: ReplayBuffer, count: int | None, lane: Any, name: str) -> int:
    """Remove up to ``count`` of the oldest rows of each stream; None for all rows."""
    if count is not None:
        count = whole_number("n", count, 0)
    with buffer._locked() as found:
        storage: Any = found
        index = _streams(buffer, storage, name)
        if index is None or not len(storage):
            return 0
        rewind(buffer)
        lanes = named_lanes(storage, index, lane)
        sizes = index.sizes()[lanes]
        counts = sizes if count is None else np.minimum(sizes, count)
        kept = counts > 0
        remove_oldest(storage, lanes[kept], counts[kept])
        return int(counts.sum())


def take_rows(buffer: ReplayBuffer, n: int, lanes: Any, timeout: float | None) -> Any:
    """Return the ``n`` oldest rows of each stream ``[B, n]``, and remove them."""
    n = whole_number("n", n, 1)
    until = None if timeout is None else time.monotonic() + (checked_timeout(timeout) or 0.0)
    arrivals = buffer._arrivals
    arrivals.waiting += 1
    try:
        while True:
            if arrivals.closed:
                return None
            try:
                return _take(buffer, n, lanes)
            except (NotEnoughData, IndexError):
                left = 3600.0 if until is None else until - time.monotonic()
                if timeout == 0:
                    raise
                if left <= 0:
                    text = f"expected {n} rows of each stream within {timeout} s"
                    raise TimeoutError(text) from None
            arrivals.wait(left)
    finally:
        arrivals.waiting -= 1


def _take(buffer: ReplayBuffer, n: int, lane: Any) -> Any:
    with buffer._locked() as found:
        storage: Any = found
        index = _streams(buffer, storage, "take()")
        limit = getattr(buffer._writer, "length", n)
        if n > limit:
            raise ValueError(f"expected n of at most {limit} rows of a stream, got {n}")
        if index is None or not len(storage):
            raise NotEnoughData(f"expected {n} rows of each stream, got an empty storage")
        lane = getattr(buffer._writer, "lanes", None) if lane is None else lane
        chosen = named_lanes(storage, index, lane)
        if lane is not None:  # in the given order
            keys = torch.as_tensor(lane).reshape(-1).tolist()
            chosen = chosen[np.argsort(np.argsort(keys, kind="stable"), kind="stable")]
        sizes = index.sizes()[chosen]
        if not len(chosen) or (sizes < n).any():
            raise NotEnoughData(
                f"expected {n} rows of each of {len(chosen)} streams, got "
                f"{int(sizes.min(initial=0))} of one"
            )
        rewind(buffer)
        counts = np.full(len(chosen), n)
        slots = oldest_slots(index, chosen, counts)
        rows = storage.read(torch.from_numpy(slots)).reshape(len(chosen), n)
        remove_oldest(storage, chosen, counts)
        return rows


def drain_rows(buffer: ReplayBuffer, skip: int) -> Any:
    """Return all rows in order of time, ``[lanes, T]``, and remove them."""
    skip = whole_number("skip", skip, 0)
    with buffer._locked() as storage:
        if not isinstance(storage, ColumnStorage):
            raise RuntimeError(f"a {type(storage).__name__} has no lanes; use a tensor storage")
        length = storage.ledger.length
        sizes, slots = np.array([length]), storage.ledger.write_order()
        if storage.lane_key is not None and length:
            index = stream_index(storage, "drain()")
            sizes = index.sizes()
            slots = torch.from_numpy(oldest_slots(index, np.arange(len(sizes)), sizes))
        declared = getattr(buffer._writer, "lanes", None)
        missing = 0 if declared is None else len(declared) - len(sizes)
        if not length or missing or sizes.min() != sizes.max() or sizes[0] <= skip:
            sizes = np.append(sizes, [0] * missing)
            raise NotEnoughData(
                f"expected lanes of equal numbers of rows, more than {skip}, got "
                f"{int(sizes.min())} to {int(sizes.max())}"
            )
        steps = int(sizes[0])
        row_id = storage.ledger.positions(slots)
        if storage.ndim == 1:
            rows = storage.read(slots).reshape(len(sizes), steps)
            row_id = row_id.reshape(len(sizes), steps)
        else:
            rows = storage.get(slots).reshape(steps, -1).transpose(0, 1)
            row_id = row_id.expand(rows.shape[0], steps)
        rows = rows[:, skip:].clone()
        rows["position"] = row_id[:, skip:].clone()
        empty_rows(buffer, empty_write_count=False)
        return rows
