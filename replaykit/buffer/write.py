"""Write rows: transforms, rate limiter, writer, and the parts that follow writes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from replaykit._compat import TensorDictBase, is_tensordict
from replaykit.buffer.draw import drop_draws
from replaykit.buffer.episodes import check_tags, tag_written
from replaykit.buffer.priorities import written_priorities
from replaykit.interrupts import deferred
from replaykit.pace import INSERT, Ticket, checked_timeout
from replaykit.storages import Storage
from replaykit.structure import flatten

if TYPE_CHECKING:
    from replaykit.buffer.replay_buffer import ReplayBuffer


def rows_of(rows: Any) -> int:
    """Return the number of prepared rows, summed over all lanes."""
    batch = getattr(rows, "batch", None)
    return len(rows) if batch is None else math.prod(batch)


def rows_stored(index: torch.Tensor) -> int:
    """Return how many rows were stored, given the index from a writer."""
    return len(index) if index.ndim > 1 else int(np.count_nonzero(index.numpy() >= 0))


def rows_given(data: Any, ndim: int, *, single: bool) -> int:
    """Return the likely number of rows in data before transforms.

    ``single``: the data is a batch of one row.
    """
    if is_tensordict(data) or hasattr(data, "batch_size"):
        shape = tuple(data.batch_size)
    elif isinstance(data, torch.Tensor):
        shape = tuple(data.shape)
    elif isinstance(data, list):
        if not data:
            return 0
        return len(data) * (1 if ndim == 1 else rows_given(data[0], ndim - 1, single=False))
    else:
        try:
            leaves = flatten(data, 0)[1]
        except TypeError:
            return 1 if single or not isinstance(data, Sized) else len(data)
        return max((rows_given(leaf, ndim, single=single) for leaf in leaves.values()), default=0)
    return math.prod(shape[:ndim]) if shape else 1


def warn_of_batch(data: Any, storage: Storage) -> None:
    """Warn if a row has unexpected batch dimensions."""
    if not isinstance(data, TensorDictBase) or not data.batch_dims:
        return
    if storage.ndim > 1 or getattr(storage, "rows_have_batches", False):
        return
    warnings.warn(
        f"Using `add()` with a TensorDict that has batch_size={list(data.batch_size)} stores it as "
        "one row; extend() stores a batch of rows",
        stacklevel=3,
    )


def write_in_turn(
    buffer: ReplayBuffer,
    data: Any,
    timeout: float | None,
    single: bool,
    update_priority: bool | None,
    room: Any = None,
    tags: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Store a batch once the rate limiter admits it, and there is ``room`` (``Room``), if given."""
    options: Any = {
        "single": single,
        "update_priority": update_priority,
        "room": room,
        "tags": tags,
    }
    if timeout is not None:
        timeout = checked_timeout(timeout)
    if buffer._pace is None:
        if not buffer._chain.entries and not buffer._restarted:
            # All changes are made under the lock, which defers signals, too.
            return store_rows(buffer, data, **options)
        with deferred:
            return bring_in(buffer, data, None, **options)
    with deferred, buffer._pace.ticket(INSERT, timeout) as ticket:
        return bring_in(buffer, data, ticket, **options)


def bring_in(
    buffer: ReplayBuffer,
    data: Any,
    ticket: Ticket | None,
    **options: Any,
) -> torch.Tensor:
    """Store the transformed rows of a batch. Rows held back before a load come first."""
    chained = buffer._chain.entries
    if chained and ticket is not None:
        # Transforms may hold rows back, so they must not receive rows that are refused later.
        room = options["room"]
        ticket.admit(
            rows_given(data, buffer._storage.ndim, single=options["single"]),
            buffer.__len__ if room is None else room.stored,
        )
    first = flush_rows(buffer) if buffer._restarted else None
    if chained:
        data = buffer._chain.inv(data)
        if data is None:
            return buffer._writer._no_rows() if first is None else first
    index = store_rows(buffer, data, ticket=ticket, **options)
    return index if first is None else torch.cat([first, index])


def flush_rows(buffer: ReplayBuffer) -> torch.Tensor:
    """Store the rows that transforms hold back, as if their streams ended here."""
    with deferred:
        restarted, buffer._restarted = buffer._restarted, False
        held = list(buffer.transform.flush())
        if not held:
            return buffer._writer._no_rows()
        with buffer._locked() as storage:
            if restarted:
                storage.resume(over=False)
            try:
                return torch.cat([store_rows(buffer, data) for data in held])
            finally:
                if restarted:
                    storage.resume(over=True)


def store_rows(
    buffer: ReplayBuffer,
    data: Any,
    *,
    single: bool = False,
    update_priority: bool | None = None,
    ticket: Ticket | None = None,
    room: Any = None,
    tags: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    rows = buffer._writer.prepare(data, single=single, optional=(buffer._priority_key,))
    count = len(rows)
    if not count:
        return buffer._writer._no_rows()
    for transform in buffer._listening:
        transform.check_rows(buffer._storage, rows)
    priorities = written_priorities(
        data,
        buffer._priority_key,
        buffer._sampler,
        count,
        wanted=update_priority,
        single=single,
        time_dim=buffer._dim_extend or 0,
        ndim=buffer._storage.ndim,
    )
    if ticket is not None and not ticket.admitted:
        ticket.admit(rows_of(rows), buffer.__len__ if room is None else room.stored)
    if not buffer._shared and buffer._prefetcher is None and room is None:
        storage = buffer._storage
        with storage.lock:
            if storage is buffer._storage:  # not exchanged during the wait
                return write_rows(buffer, storage, rows, count, single, priorities, ticket, tags)
    while True:
        with buffer._locked(patient=True) as storage:
            if room is None or room.fits(storage, rows):
                return write_rows(buffer, storage, rows, count, single, priorities, ticket, tags)
        room.pause()


def write_rows(
    buffer: ReplayBuffer,
    storage: Storage,
    rows: Any,
    count: int,
    single: bool,
    priorities: torch.Tensor | None,
    ticket: Ticket | None,
    tags: Mapping[str, Any] | None,
) -> torch.Tensor:
    """Write prepared rows, and inform the other components. The caller holds the lock."""
    if tags is not None:
        check_tags(storage, rows, tags)
    sampler, removed = buffer._sampler, storage.ledger.log.removed
    if sampler.consumes:
        index = buffer._writer.write_reusing(rows, sampler.free(storage, count))
    else:
        index = buffer._writer.write(rows)
    if tags is not None:
        tag_written(storage, index, tags)
    if single:
        sampler.add(index)
    else:
        sampler.extend(index)
    if sampler.prioritized:
        if priorities is not None:
            sampler.update_priority(index, priorities, storage=storage)
        elif not sampler.follows_log:
            sampler.mark_update(index, storage=storage)
        elif storage.ledger.log.removed != removed:  # follow now: the log forgets removals
            sampler.mark_update(index[:0], storage=storage)
    for transform in buffer._listening:
        transform.written(storage)
    if buffer._arrivals.waiting:
        buffer._arrivals.notify()
    if len(storage._listeners) > 1:  # another one than this buffer
        storage.notify(index, source=buffer)
    if buffer._pace is not None:
        (buffer._pace.ticket(INSERT, None) if ticket is None else ticket).used(rows_stored(index))
    return index


def empty_rows(buffer: ReplayBuffer, empty_write_count: bool = True) -> None:
    """Remove all rows, including rows that transforms hold back."""
    with buffer._locked():
        buffer._writer.empty(empty_write_count)
        drop_draws(buffer)
        buffer._sampler.empty()
        buffer._chain.empty()
        buffer._arrivals.notify()  # there is room for waiting writes
        if buffer._pace is not None:
            # With the old counts both sides might wait for ever. There would be no row to
            # sample, and the counts would not admit writes.
            buffer._pace.start_from(0, counting_on=not empty_write_count)
