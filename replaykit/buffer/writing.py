"""Rows on their way in."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from replaykit._compat import TensorDictBase
from replaykit.buffer.core import BufferCore
from replaykit.buffer.generic import DataT, SamplerT, StorageT, WriterT
from replaykit.buffer.pacing import rows_given, rows_of, rows_stored
from replaykit.buffer.priorities import written_priorities
from replaykit.interrupts import deferred
from replaykit.pace import INSERT, Ticket
from replaykit.storages import Storage
from replaykit.writers.base import single_index

__all__ = ["Writing"]


class Writing(BufferCore[DataT, StorageT, SamplerT, WriterT]):
    """``add``, ``extend``, ``empty``."""

    def add(self, data: Any, *, timeout: float | None = None) -> int | torch.Tensor | None:
        """Stores one row.

        Args:
            data: what one row is: a TensorDict (with batch dimensions, these belong to the row),
                tensor, tensorclass or pytree; for a ListStorage any object. For ``ndim > 1``: one
                time step of all lanes, ``[*lanes]``. Leaves of pytrees may be arrays, NumPy
                scalars, Python numbers (float: torch's default dtype; int: int64) and lists of
                numbers; see ``docs/environments.md``.
            timeout: as for ``extend``.

        Returns:
            Its slot; int64 ``[prod(lanes), ndim]`` for ``ndim > 1``; None where a writer refuses
            it or an inverse transform swallows it.

        Raises:
            SchemaError: keys, shapes or dtypes differ from those of the first write; a ValueError.
            TypeError: something that the storage cannot hold.
            RateLimiterTimeout: as ``extend``; a TimeoutError.

        A UserWarning is given if the first row is a TensorDict with batch dimensions, which is
        usually a batch by mistake. Storages for rows of several shapes give no warning.

        Nothing has changed if it raises. Cost: O(1).

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(2))
            >>> rb.add(torch.tensor(5.0)), rb.add(torch.tensor(6.0)), rb.add(torch.tensor(7.0))
            (0, 1, 0)
        """
        single = not len(self.transform)
        if not self._writer.write_count:
            _warn_of_batch(data, self._storage)
        if not single:
            # Transforms see a batch of one row, as they do in extend.
            data = self.storage.batch_of_one(data, self.dim_extend)
        with deferred, self._insert_ticket(timeout) as ticket:
            index = self._brought_in(data, ticket, single=single)
        if index.ndim == 1 and len(index) != 1:
            return index if len(index) else None
        return single_index(index) if len(index) else None

    def extend(
        self,
        data: Any,
        *,
        update_priority: bool | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Stores a batch.

        Args:
            data: TensorDict, tensorclass, tensor or pytree with rows along dimension 0 (for
                ``ndim > 1``: ``[*lanes, T]``), or a list with one element per row, each as for
                ``add``, at one Python step a row. A tuple is a pytree, except in list storages,
                where its elements are the rows.
            update_priority: ``False`` ignores priorities that the data carries under
                ``priority_key``; the rows then get the sampler's default.
            timeout: seconds to wait where the buffer's rate limiter has no room for the rows; 0:
                none at all, None: without end. Without a rate limiter nothing waits.

        Returns:
            The slot of each row: int64 ``[B]``; ``[T * prod(lanes), ndim]``, time-major, for
            ``ndim > 1``; -1 where a writer refused the row.

        Raises:
            SchemaError: keys, shapes or dtypes differ from those of the first write; a ValueError.
            ValueError: priorities that are NaN, negative or infinite, or not one per row.
            TypeError: something that the storage cannot hold.
            RateLimiterTimeout: samples lag behind; a TimeoutError. ValueError: so many rows at
                once would wait for ever. RuntimeError: the buffer was shut down meanwhile.

        Nothing has changed if it raises. Readers see all rows of the batch or none. Cost: one
        pass over the bytes.

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
        self._ready()
        with deferred, self._insert_ticket(timeout) as ticket:
            return self._brought_in(data, ticket, update_priority=update_priority)

    def _brought_in(
        self,
        data: Any,
        ticket: Ticket | None,
        *,
        single: bool = False,
        update_priority: bool | None = None,
    ) -> torch.Tensor:
        """Stores what transforms make of a batch, after what they held back before a restart."""
        chained = len(self.transform) > 0
        if chained and ticket is not None:
            # Transforms may hold rows back: they see none that is not stored in the end.
            ticket.admit(rows_given(data, self._storage.ndim, single=single), self._size)
        first = self.flush() if self._restarted else None
        if chained:
            data = self._chain.inv(data)
            if data is None:
                return self._nothing() if first is None else first
        index = self._store(data, single=single, update_priority=update_priority, ticket=ticket)
        return index if first is None else torch.cat([first, index])

    def flush(self) -> torch.Tensor:
        """Stores the rows that transforms hold back, as ``NStep(..., when="write")`` does: what
        was written until now is all there is.

        The first write after a load begins with it: what was held back when the buffer was saved
        ends there, and nothing goes over the restart. It does not wait for a rate limiter, which
        counts the rows.

        Returns:
            The slot of each row, as ``extend``.

        Raises:
            As ``extend``.

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
        if not len(rows):
            return self._nothing()
        for transform in self._listening:
            transform.check_rows(self._storage, rows)
        priorities = written_priorities(
            data,
            self._priority_key,
            self._sampler,
            len(rows),
            wanted=update_priority,
            single=single,
            time_dim=self.dim_extend,
            ndim=self._storage.ndim,
        )
        if ticket is not None and not ticket.admitted:
            ticket.admit(rows_of(rows), self._size)
        with self._locked(patient=True) as storage:
            if self._sampler.consumes:
                free = self._sampler.free(storage, len(rows))
                index = self._writer.write_reusing(rows, free)
            else:
                index = self._writer.write(rows)
            if single:
                self._sampler.add(index)
            else:
                self._sampler.extend(index)
            if self._sampler.prioritized:
                if priorities is None:
                    self._sampler.mark_update(index, storage=storage)
                else:
                    self._sampler.update_priority(index, priorities, storage=storage)
            if self._listening:
                for transform in self._listening:
                    transform.written(storage)
            storage.notify(index, source=self)
            if self._pace is not None:
                (self._pace.ticket(INSERT, None) if ticket is None else ticket).used(
                    rows_stored(index)
                )
        return index

    def _nothing(self) -> torch.Tensor:
        ndim = self._storage.ndim
        return torch.empty((0, ndim) if ndim > 1 else (0,), dtype=torch.int64, device="cpu")

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets all records, also those that transforms hold back; keys, shapes and memory stay.

        Handles to forgotten records (index and generation) stay stale for ever.

        Args:
            empty_write_count: whether ``write_count`` starts again at 0, and the counts of a rate
                limiter in ``stats``. Its law begins anew in any case.

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
            self._take_prepared()
            self._sampler.empty()
            self._chain.empty()
            if self._pace is not None:
                # With the counts of before both sides might wait for ever: no row is there to be
                # sampled, and those that were written leave no room for others.
                self._pace.start_from(0, counting_on=not empty_write_count)

    def mark_update(self, index: Any) -> None:
        """Gives rows the sampler's default priority; without priorities: nothing.

        Also how a buffer is told that another one over the same storage has written.
        """
        with self._locked() as storage:
            self._sampler.mark_update(index, storage=storage)

    def _about_to_write(self) -> None:
        """Told by the storage, whose lock is held, before the first write to rows that were loaded.

        Raises:
            CheckpointError: what the sampler is to go on from contradicts itself.
        """
        self._sampler.about_to_write()


def _warn_of_batch(data: Any, storage: Storage) -> None:
    """Says that a row has batch dimensions, where neither lanes nor the storage explain them."""
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
