"""Write rows into a buffer, and read and edit stored rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import torch
from tensordict import is_tensorclass
from typing_extensions import Self

from replaykit._compat import (
    LazyStackedTensorDict,
    TensorDictBase,
    arange,
    as_tensor,
    is_tensordict,
)
from replaykit.buffer.core import (
    BufferCore,
    DataT,
    SamplerT,
    StorageT,
    WriterT,
    rows_given,
    rows_of,
    rows_stored,
)
from replaykit.buffer.row_context import apply_all, fetch_all
from replaykit.buffer.row_updates import written_priorities
from replaykit.buffer.sampling import is_ragged, with_each
from replaykit.interrupts import deferred
from replaykit.pace import INSERT, Ticket
from replaykit.schema import Schema
from replaykit.storages import ListStorage, Storage, TensorStorage
from replaykit.storages.indexing import as_index, elements_at, unravel_index
from replaykit.structure import flatten, map_leaves
from replaykit.ted import RESERVED_KEYS, Key, format_key, unravel
from replaykit.writers.writer import single_index

__all__ = ["Editing", "Writing", "column_of", "is_key"]


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


class Editing(BufferCore[DataT, StorageT, SamplerT, WriterT]):
    """``rb[...]``, ``set_``, ``set_at_``, ``update_``, reading and writing in physical order."""

    # -- reading ------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> DataT: ...
    def __getitem__(self, index: Any) -> Any:
        """Returns stored rows in physical order, or a column.

        Args:
            index: int, slice, list, LongTensor, bool mask; for ``ndim > 1`` also a tuple of them,
                in the layout the caller wrote, so that ``rb[i] == rb[:][i]``. A key gives that
                column of ``rb[:]``.

        Collated and transformed. Without transforms, ints and slices of tensor storages are views.
        TensorDicts of a TensorDictReplayBuffer carry ``index`` as samples do, int64 in the shape of
        the rows (``[..., ndim]``, as coordinates); those of a ReplayBuffer do not.

        Raises:
            IndexError: rows that are not stored. KeyError: no such key. RuntimeError: nothing was
                written yet.
        """
        if is_key(index):
            return column_of(self[:], index)
        cells: list[torch.Tensor] = []
        rows = self._rows_at(index, cells)
        if not cells or not is_tensordict(rows):
            return rows
        return _numbered(rows, cells[0], self._storage)

    def _cells_at(self, index: Any, storage: Storage) -> torch.Tensor:
        """The ``index`` of rows that an index selects, in their shape. The lock is held."""
        if storage.ndim == 1:
            return arange(len(storage))[as_index(index, len(storage))]
        lanes = storage.lanes
        elements = elements_at(index, storage.ledger.length, lanes, self._layout(storage))
        return unravel_index(elements, lanes)

    def _rows_at(self, index: Any, cells: list[torch.Tensor]) -> Any:
        """What ``rb[index]`` gives, without an index; that goes to ``cells``, where it is told."""
        with self._locked() as storage:
            if storage.ndim > 1:
                # The layout that was written, indexed as a whole.
                rows = self._columns().view_at(index, time_dim=self.dim_extend)
            else:
                rows = storage.get(index)
            if self._reads_index:
                cells.append(self._cells_at(index, storage))
            single = storage.ndim == 1 and _is_single(index)
            prepared = self._fetched_at(index, storage)
            collate = storage.collate if self._collate_fn is None else self._collate_fn
            if not single and isinstance(rows, list) and not rows and self._collate_fn is None:
                rows = storage.get(slice(0, 1)) if len(storage) else None
                collate = _nothing_of(collate, storage.stack_dim)
        if not single:
            rows = collate(rows)
        if not len(self._chain):
            return rows
        rows = _own(rows)
        if cells and is_tensordict(rows):
            rows = _numbered(rows, cells[0], storage)
        if prepared is None:
            return self._chain.forward(rows)
        chain, found, shape = prepared
        if len(shape) == 1 or rows.batch_size != shape:
            return apply_all(chain, rows, found)
        # Transforms see rows, not the grid in which they are asked for.
        made = apply_all(chain, rows.reshape(-1) if shape else rows.unsqueeze(0), found)
        return made.reshape(shape) if shape else made[0]

    def _fetched_at(self, index: Any, storage: Storage) -> tuple[Any, Any, torch.Size] | None:
        """What transforms that read the rows around need for an index, and the shape that it
        selects; None without any.

        Rows without all that they need are cut short as they are at the beginning of an episode.
        """
        chain = self._chain
        if not chain.reads_around:
            return None
        if storage.ndim > 1:
            lanes = storage.lanes
            elements = elements_at(index, storage.ledger.length, lanes, self._layout(storage))
            cells = unravel_index(elements.reshape(-1), lanes)
        else:
            elements = arange(len(storage))[as_index(index, len(storage))]
            cells = elements.reshape(-1)
        found = fetch_all(chain, storage, cells, {}, self._generator)
        return chain, found, elements.shape

    def read_all_in_order(self, end: int | None = None) -> DataT:
        """Returns all stored rows, or the first ``end``, in physical order: ``rb[:end]``.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(torch.arange(5))
            >>> rb.read_all_in_order(), rb.read_all_in_order(end=2)
            (tensor([3, 4, 2]), tensor([3, 4]))
        """
        return self[:end]

    # -- writing ------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replaces stored rows, or a column where ``index`` is a key.

        Inverse transforms apply to rows. Length, cursor, ``write_count``, priorities and
        generations stay.

        What is given for all rows may bring new columns: ``rb["advantage"] = x``, ``rb[:] = rows``,
        ``write_all(rows)``. Rows that are written later without them hold zeros there, until they
        are edited. Added columns that the rows of an edit lack stay as they are. Batches that this
        buffer has prepared ahead are read again.

        Raises:
            IndexError: rows that are not stored. SchemaError: keys, shapes or dtypes differ, or a
                new key that says where episodes end. RuntimeError: new columns of rows that are
                shared, recovered, or those of a data set.

        Cost of a new column: memory for it in all slots. It lies outside of the rows' records, so
        that a sample reads one place more.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(10))
            >>> _ = rb.extend(TensorDict({"reward": torch.arange(3.0)}, [3]))
            >>> rb["advantage"] = rb["reward"] - rb["reward"].mean()
            >>> rb[:2]["advantage"]
            tensor([-1.,  0.])
            >>> _ = rb.add(TensorDict({"reward": torch.tensor(7.0)}, []))
            >>> rb["advantage"]
            tensor([-1.,  0.,  1.,  0.])
        """
        if is_key(index):
            self._set_column(unravel(index), value)
            return
        if len(self.transform):
            single = _is_single(index) and self.storage.ndim == 1
            if single:  # transforms see a batch, as they do in add
                value, index = self.storage.batch_of_one(value, 0), as_tensor([index])
            value = self._chain.inv(value)
            if value is None:
                return
        with self._locked() as storage:
            before = storage.schema
            storage.edit(index, value, time_dim=self._layout(storage))
            self._follow_schema(before)

    def _set_column(self, key: Key, value: Any) -> None:
        """Sets a key of all rows, or all keys below it, stored or not."""
        _, found = flatten(value, 0)
        values = {(*key, *path): leaf for path, leaf in found.items()}
        with self._locked() as storage:
            if isinstance(storage, ListStorage):
                storage.edit_columns(values)
                return
            before = storage.schema
            columns = self._columns()
            columns.edit_columns(values, time_dim=self._layout(storage), adds=True)
            self._follow_schema(before)

    def _follow_schema(self, before: Schema | None) -> None:
        """Has batches that were prepared ahead read again, where columns were added."""
        if self._storage.schema is not before:
            self._made_again()

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Replaces the first ``end`` stored rows in physical order: ``rb[:end] = data``.

        Args:
            data: rows; of all that are stored, also with keys that are not stored yet.
            end: number of rows; None: as many as ``data`` has.

        Raises:
            IndexError: more rows than are stored. SchemaError, RuntimeError: as ``rb[...] = ``.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(torch.arange(3))
            >>> rb.write_all(torch.tensor([7, 8]))
            >>> rb[:]
            tensor([7, 8, 2])
        """
        if data is None:
            raise TypeError("expected rows to write, got None")
        if end is None:
            end = _count(data)
        if len(self.transform):
            data = self._chain.inv(data)
            if data is None:
                return
        with self._locked() as storage:
            stored = len(storage)
            if storage.ndim > 1:
                stored = self._columns().visible_shape(self.dim_extend)[0]
            if not 0 <= end <= stored:
                raise IndexError(f"expected at most the {stored} stored rows, got {end}")
            before = storage.schema
            storage.edit(slice(0, end), data, time_dim=self._layout(storage))
            self._follow_schema(before)

    def set_(self, key: Any, value: torch.Tensor) -> Self:
        """Replaces a whole column; returns the buffer. Transforms do not apply.

        ``rb[key] = value`` also adds one.

        Args:
            key: a stored key, nested as a tuple.
            value: ``[N, *F]`` (``[*lanes, T, *F]``).

        Raises:
            KeyError: no such column. SchemaError: another shape or dtype; nothing has changed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(TensorDict({"x": torch.zeros(2)}, [2]))
            >>> rb.set_("x", torch.tensor([1.0, 2.0]))["x"]
            tensor([1., 2.])
        """
        with self._locked() as storage:
            self._columns().edit_columns({unravel(key): value}, time_dim=self._layout(storage))
        return self

    def set_at_(self, key: Any, value: torch.Tensor, index: Any) -> Self:
        """Replaces some rows of a column; returns the buffer. Transforms do not apply.

        Args:
            value: ``[K, *F]``, ``[*F]`` for an int.
            index: int, slice, list, LongTensor or bool mask of rows.

        Raises:
            KeyError, IndexError, SchemaError: as ``set_`` and indexing do; nothing has changed.
        """
        with self._locked() as storage:
            self._columns().edit_columns(
                {unravel(key): value}, index, time_dim=self._layout(storage)
            )
        return self

    def update_(
        self,
        input_dict_or_td: Any,
        clone: bool = False,
        *,
        keys_to_update: Sequence[Any] | None = None,
    ) -> Self:
        """Replaces several whole columns; returns the buffer. Transforms do not apply.

        Args:
            input_dict_or_td: nested mapping or TensorDict of columns ``[N, *F]``.
            clone: copy the values first; needed where they are views of the buffer's own columns.
            keys_to_update: only these, with all that is nested below them; those that the input
                does not have are ignored.

        Raises:
            KeyError, SchemaError: as ``set_``; nothing has changed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(3))
            >>> _ = rb.extend(TensorDict({"a": torch.zeros(1), "b": torch.ones(1)}, [1]))
            >>> _ = rb.update_({"a": rb["b"], "b": rb["a"]}, clone=True)
            >>> rb["a"], rb["b"]
            (tensor([1.]), tensor([0.]))
        """
        _, leaves = flatten(input_dict_or_td, 0)
        chosen = [()] if keys_to_update is None else [unravel(key) for key in keys_to_update]
        values = {
            path: value.clone() if clone else value
            for path, value in ((unravel(path), value) for path, value in leaves.items())
            if path[0] not in RESERVED_KEYS and any(path[: len(key)] == key for key in chosen)
        }
        with self._locked() as storage:
            self._columns().edit_columns(values, time_dim=self._layout(storage))
        return self

    def _columns(self) -> TensorStorage:
        storage = self._storage
        if not isinstance(storage, TensorStorage):
            raise RuntimeError(
                f"a {type(storage).__name__} has no columns; use a tensor or memmap storage"
            )
        return storage

    def _layout(self, storage: Storage) -> int:
        """Dimension of ``rb[:]`` that is time."""
        return self.dim_extend if storage.ndim > 1 else 0


def is_key(index: Any) -> bool:
    """Whether what stands in ``rb[...]`` names a column."""
    if isinstance(index, tuple):
        return bool(index) and all(is_key(part) for part in index)
    return isinstance(index, str)


def column_of(rows: Any, key: Any) -> Any:
    """Returns a column of rows; KeyError where there is none, with those that there are."""
    value = rows
    for part in unravel(key):
        known = is_tensordict(value) or is_tensorclass(value) or isinstance(value, dict)
        value = value.get(part, None) if known else None
    if value is None:
        names = rows.keys(True, True) if is_tensordict(rows) else ()
        listed = ", ".join(sorted(format_key(unravel(name)) for name in names))
        raise KeyError(f"no key {format_key(unravel(key))}{listed and '; there are ' + listed}")
    return value


def _numbered(rows: Any, cells: torch.Tensor, storage: Storage) -> Any:
    """A TensorDict of stored rows with their index, if it still has the shape of that."""
    shape = cells.shape if storage.ndim == 1 else cells.shape[:-1]
    if is_ragged(rows) and len(shape) == 1:
        dim = storage.stack_dim % rows.batch_dims
        fits = rows.batch_size[dim] == shape[0] and rows.stack_dim == dim
        return with_each(rows, {"index": cells}) if fits else rows
    if rows.batch_size[: len(shape)] != shape:  # a transform, or a collate_fn
        return rows
    return rows.copy().set("index", _for_each(cells, rows.batch_size, len(shape)))


def _for_each(cells: torch.Tensor, batch: torch.Size, dims: int) -> torch.Tensor:
    """The index of rows, expanded to the batch dimensions that each of them has."""
    inner = batch[dims:]
    if not inner:
        return cells
    shape = [*cells.shape[:dims], *[1] * len(inner), *cells.shape[dims:]]
    return cells.view(shape).expand(*batch, *cells.shape[dims:])


def _is_single(index: Any) -> bool:
    """Whether an index stands for one row rather than a batch."""
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return index.ndim == 0
    return isinstance(index, (int, np.integer))


def _nothing_of(collate: Callable[[Any], Any], dim: int) -> Callable[[Any], Any]:
    """Collates no rows: what a batch of one would be, cut to nothing along ``dim``."""

    def collated(rows: Any) -> Any:
        if rows is None:
            raise RuntimeError("nothing is stored")
        batch = collate(rows)
        if isinstance(batch, LazyStackedTensorDict):
            batch = batch.contiguous()  # a stack of nothing knows no keys
        if isinstance(batch, (dict, tuple)):
            return map_leaves(batch, lambda leaf: leaf[:0])
        at = dim if dim >= 0 else dim + batch.ndim
        return batch[(slice(None),) * at + (slice(0, 0),)]

    return collated


def _count(data: Any) -> int:
    """Number of rows of data: of its first tensor, if it is a mapping of them."""
    while isinstance(data, (dict, tuple)) and len(data):
        data = next(iter(data.values())) if isinstance(data, dict) else data[0]
    if getattr(data, "shape", None):
        return int(data.shape[0])
    if not hasattr(data, "__len__") or hasattr(data, "shape"):
        given = "one row" if hasattr(data, "shape") else repr(data)
        raise TypeError(
            f"expected a batch of rows to write, got {given}; rb[index] = row replaces one row"
        )
    return len(data)


def _own(rows: Any) -> Any:
    """A copy that a transform may edit; objects that are no tensors as they are."""
    if isinstance(rows, torch.Tensor) or is_tensordict(rows) or is_tensorclass(rows):
        return rows.clone()
    if isinstance(rows, dict):
        return {key: _own(value) for key, value in rows.items()}
    if isinstance(rows, (list, tuple)):
        items = [_own(value) for value in rows]
        return type(rows)(*items) if hasattr(rows, "_fields") else type(rows)(items)
    return rows
