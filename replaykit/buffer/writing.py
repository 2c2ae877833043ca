"""Write rows into a buffer, flush held rows, and empty it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from replaykit._compat import (
    TensorDictBase,
)
from replaykit.buffer.core import (
    DataT,
    SamplerT,
    StorageT,
    WriterT,
    rows_given,
    rows_of,
    rows_stored,
)
from replaykit.buffer.drawing import Drawing
from replaykit.buffer.row_updates import written_priorities
from replaykit.interrupts import deferred
from replaykit.pace import INSERT, Ticket, checked_timeout
from replaykit.storages import Storage
from replaykit.writers.writer import single_index

__all__ = ["Writing"]


class Writing(Drawing[DataT, StorageT, SamplerT, WriterT]):
    """``add``, ``extend``, ``empty``."""

    def add(self, data: Any, *, timeout: float | None = None) -> int | torch.Tensor | None:
        """Store one row.

        Args:
            data: one row, as a TensorDict, tensor, tensorclass or pytree; for a ListStorage any
                object. The batch dimensions of a TensorDict belong to the row. For ``ndim > 1``,
                one time step of all lanes, ``[*lanes]``. Leaves of pytrees may be arrays, NumPy
                scalars, Python numbers and lists of numbers. A Python float gets torch's default
                dtype, an int int64. See ``docs/environments.md``.
            timeout: as for ``extend``.

        Returns:
            The slot of the row; for ``ndim > 1``, the slots int64 ``[prod(lanes), ndim]``. None if
            the writer refuses the row or an inverse transform drops it.

        Raises:
            SchemaError: keys, shapes or dtypes differ from the first write; a ValueError.
            TypeError: the storage cannot hold a value.
            RateLimiterTimeout: as for ``extend``; a TimeoutError.

        If the first row is a TensorDict with batch dimensions, a UserWarning is issued. Such a row
        is usually a batch that was meant for ``extend``. Storages for rows of several shapes do not
        warn.

        If the call raises, nothing has changed, unless a custom sampler or transform raises after
        the rows are stored. Cost: O(1).

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
            >>> rb.add(torch.tensor(5.0)), rb.add(torch.tensor(6.0)), rb.add(torch.tensor(7.0))
            (0, 1, 0)
        """
        if not self._initialized:
            self._ready()
        single = not self._chain.entries
        if not self._writer.write_count:
            _warn_of_batch(data, self._storage)
        if not single:
            # Transforms receive a batch of one row, as in extend.
            data = self.storage.batch_of_one(data, self.dim_extend)
        index = self._in_time(data, timeout, single, None)
        count = index.shape[0]
        if index.ndim == 1 and count != 1:
            return index if count else None
        return single_index(index) if count else None

    def extend(
        self,
        data: Any,
        *,
        update_priority: bool | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Store a batch of rows.

        Args:
            data: a TensorDict, tensorclass, tensor or pytree with rows along dimension 0; for
                ``ndim > 1``, of shape ``[*lanes, T]``. Also a list with one element per row, each
                as for ``add``. A list costs one Python step per row. A tuple is a pytree. For list
                storages, however, its elements are the rows.
            update_priority: if False, ignore the priorities under ``priority_key`` in the data. The
                rows then get the sampler's default priority.
            timeout: maximum seconds to wait until the buffer's rate limiter admits the rows. With 0
                the call does not wait; None is no limit. Without a rate limiter it has no effect.

        Returns:
            The slot of each row, int64 ``[B]``. For ``ndim > 1`` the shape is ``[T * prod(lanes),
            ndim]``, with time first. The slot is -1 for a row that the writer refused.

        Raises:
            SchemaError: keys, shapes or dtypes differ from the first write; a ValueError.
            ValueError: priorities are NaN, negative or infinite, or there is not one per row. Also
                if the rate limiter can never admit that many rows in one call.
            TypeError: the storage cannot hold a value.
            RateLimiterTimeout: the timeout has passed before samples caught up; a TimeoutError.
            RuntimeError: the buffer was shut down during the wait.

        If the call raises, nothing has changed, unless a custom sampler or transform raises after
        the rows are stored. Readers get all rows of the batch or none. Cost: one pass over the
        bytes.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
            >>> rb.extend(TensorDict({"x": torch.zeros(3)}, [3]))
            tensor([0, 1, 2])
            >>> rb.extend(TensorDict({"y": torch.zeros(3)}, [3]))
            Traceback (most recent call last):
            replaykit.errors.SchemaError: key 'x': expected float32 [], got nothing; key 'y': ...
        """
        if not self._initialized:
            self._ready()
        return self._in_time(data, timeout, False, update_priority)

    def _in_time(
        self, data: Any, timeout: float | None, single: bool, update_priority: bool | None
    ) -> torch.Tensor:
        """Store a batch once the rate limiter admits it."""
        if timeout is not None:
            timeout = checked_timeout(timeout)
        if self._pace is None:
            with deferred:
                return self._brought_in(data, None, single=single, update_priority=update_priority)
        with deferred, self._pace.ticket(INSERT, timeout) as ticket:
            return self._brought_in(data, ticket, single=single, update_priority=update_priority)

    def _brought_in(
        self,
        data: Any,
        ticket: Ticket | None,
        *,
        single: bool = False,
        update_priority: bool | None = None,
    ) -> torch.Tensor:
        """Store the transformed rows of a batch. Rows held back before a load come first."""
        chained = self._chain.entries
        if chained and ticket is not None:
            # Transforms may hold rows back, so they must not receive rows that are refused later.
            ticket.admit(rows_given(data, self._storage.ndim, single=single), self._size)
        first = self.flush() if self._restarted else None
        if chained:
            data = self._chain.inv(data)
            if data is None:
                return self._nothing() if first is None else first
        index = self._store(data, single=single, update_priority=update_priority, ticket=ticket)
        return index if first is None else torch.cat([first, index])

    def flush(self) -> torch.Tensor:
        """Store the rows that transforms hold back, as if their streams ended here.

        For example, ``NStep(..., when="write")`` holds rows back. The first write after a load
        begins with a flush, so that no row spans the restart. A rate limiter counts the flushed
        rows, but the flush does not wait for it.

        Returns:
            The slot of each row, as for ``extend``.

        Raises:
            As for ``extend``.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
            >>> rb.flush()
            tensor([], dtype=torch.int64)
        """
        with deferred:
            restarted, self._restarted = self._restarted, False
            held = list(self.transform.flush())
            if not held:
                return self._nothing()
            with self._locked() as storage:
                if restarted:
                    storage.resume(over=False)
                try:
                    return torch.cat([self._store(data) for data in held])
                finally:
                    if restarted:
                        storage.resume(over=True)

    def _store(
        self,
        data: Any,
        *,
        single: bool = False,
        update_priority: bool | None = None,
        ticket: Ticket | None = None,
    ) -> torch.Tensor:
        rows = self._writer.prepare(data, single=single, optional=(self._priority_key,))
        count = len(rows)
        if not count:
            return self._nothing()
        for transform in self._listening:
            transform.check_rows(self._storage, rows)
        priorities = written_priorities(
            data,
            self._priority_key,
            self._sampler,
            count,
            wanted=update_priority,
            single=single,
            time_dim=self._dim_extend or 0,
            ndim=self._storage.ndim,
        )
        if ticket is not None and not ticket.admitted:
            ticket.admit(rows_of(rows), self._size)
        if not self._shared and self._prefetcher is None:
            storage = self._storage
            with storage.lock:
                if storage is self._storage:  # not exchanged during the wait
                    return self._write(storage, rows, count, single, priorities, ticket)
        with self._locked(patient=True) as storage:
            return self._write(storage, rows, count, single, priorities, ticket)

    def _write(
        self,
        storage: Storage,
        rows: Any,
        count: int,
        single: bool,
        priorities: torch.Tensor | None,
        ticket: Ticket | None,
    ) -> torch.Tensor:
        """Write prepared rows, and inform the other components. The caller holds the lock."""
        sampler = self._sampler
        if sampler.consumes:
            index = self._writer.write_reusing(rows, sampler.free(storage, count))
        else:
            index = self._writer.write(rows)
        if single:
            sampler.add(index)
        else:
            sampler.extend(index)
        if sampler.prioritized:
            if priorities is None:
                sampler.mark_update(index, storage=storage)
            else:
                sampler.update_priority(index, priorities, storage=storage)
        for transform in self._listening:
            transform.written(storage)
        storage.notify(index, source=self)
        if self._pace is not None:
            (self._pace.ticket(INSERT, None) if ticket is None else ticket).used(rows_stored(index))
        return index

    def _nothing(self) -> torch.Tensor:
        ndim = self._storage.ndim
        return torch.empty((0, ndim) if ndim > 1 else (0,), dtype=torch.int64, device="cpu")

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all rows, including rows that transforms hold back.

        Keys, shapes and memory stay. A removed row's index and generation never name a row again.

        Args:
            empty_write_count: reset ``write_count``, and a rate limiter's counts in ``stats``, to
                0. The rate limiter itself starts over in any case.

        Raises:
            RuntimeError: the writer does not allow writing.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
            >>> _ = rb.extend(torch.zeros(2))
            >>> rb.empty()
            >>> len(rb), rb.write_count
            (0, 0)
        """
        with self._locked():
            self._writer.empty(empty_write_count)
            self._drop_draws()
            self._sampler.empty()
            self._chain.empty()
            if self._pace is not None:
                # With the old counts both sides might wait for ever. There would be no row to
                # sample, and the counts would not admit writes.
                self._pace.start_from(0, counting_on=not empty_write_count)

    def mark_update(self, index: Any) -> None:
        """Give rows the sampler's default priority. No effect without priorities.

        Also call it to report rows that another buffer over the same storage has written.
        """
        with self._locked() as storage:
            self._sampler.mark_update(index, storage=storage)

    def _about_to_write(self) -> None:
        """Prepare the sampler for the first write to loaded rows.

        The storage calls this with its lock held.

        Raises:
            CheckpointError: the saved data for the sampler are contradictory.
        """
        self._sampler.about_to_write()


def _warn_of_batch(data: Any, storage: Storage) -> None:
    """Warn if a row has unexpected batch dimensions."""
    if not isinstance(data, TensorDictBase) or not data.batch_dims:
        return
    if storage.ndim > 1 or getattr(storage, "rows_have_batches", False):
        return
    warnings.warn(
        f"Using `add()` with a TensorDict that has batch_size={list(data.batch_size)} stores it as "
        "one row; extend() stores a batch of rows",
        UserWarning,
        stacklevel=3,
    )
