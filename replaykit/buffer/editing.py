"""Read and edit stored rows: indexing, columns, and rows in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import torch
from tensordict import is_tensorclass
from typing_extensions import Self

from replaykit._compat import (
    LazyStackedTensorDict,
    arange,
    as_tensor,
    is_tensordict,
)
from replaykit.buffer.core import (
    DataT,
    SamplerT,
    StorageT,
    WriterT,
)
from replaykit.buffer.drawing import Drawing
from replaykit.buffer.row_context import apply_all, fetch_all
from replaykit.buffer.sampling import is_ragged, with_each
from replaykit.schema import Schema
from replaykit.storages import ListStorage, Storage, TensorStorage
from replaykit.storages.indexing import as_index, elements_at, unravel_index
from replaykit.structure import flatten, map_leaves
from replaykit.ted import RESERVED_KEYS, Key, format_key, unravel

__all__ = ["Editing", "column_of", "is_key"]


class Editing(Drawing[DataT, StorageT, SamplerT, WriterT]):
    """``rb[...]``, ``set_``, ``set_at_``, ``update_``, reading and writing in physical order."""

    # -- reading ------------------------------------------------------------------------------

    @overload
    def __getitem__(self, index: str | tuple[str, ...]) -> Any: ...
    @overload
    def __getitem__(self, index: Any) -> DataT: ...
    def __getitem__(self, index: Any) -> Any:
        """Return stored rows in physical order, or a column.

        Args:
            index: int, slice, list, LongTensor or bool mask. For ``ndim > 1`` also a tuple of
                these. It applies to the layout of written data, so that ``rb[i] == rb[:][i]``. A
                key selects a column of ``rb[:]``.

        The rows are collated and transformed. Without transforms, ints and slices of tensor
        storages return views. TensorDicts of a TensorDictReplayBuffer carry ``index``, as samples
        do. It is int64 in the shape of the rows, or ``[..., ndim]`` with lanes. TensorDicts of a
        ReplayBuffer do not carry it.

        Raises:
            IndexError: a row is not stored.
            KeyError: the key does not exist.
            RuntimeError: nothing was written yet.
        """
        if is_key(index):
            return column_of(self[:], index)
        cells: list[torch.Tensor] = []
        rows = self._rows_at(index, cells)
        if not cells or not is_tensordict(rows):
            return rows
        return _numbered(rows, cells[0], self._storage)

    def _cells_at(self, index: Any, storage: Storage) -> torch.Tensor:
        """Return the ``index`` of the rows that an index selects, in their shape.

        The caller holds the lock.
        """
        if storage.ndim == 1:
            return arange(len(storage))[as_index(index, len(storage))]
        lanes = storage.lanes
        elements = elements_at(index, storage.ledger.length, lanes, self._layout(storage))
        return unravel_index(elements, lanes)

    def _rows_at(self, index: Any, cells: list[torch.Tensor]) -> Any:
        """Return ``rb[index]`` without its ``index``.

        If rows of this buffer carry the ``index``, the method appends it to ``cells``.
        """
        with self._locked() as storage:
            if storage.ndim > 1:
                # The index applies to the layout of written data.
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
        # Transforms get the rows along one dimension, for any shape of the index.
        made = apply_all(chain, rows.reshape(-1) if shape else rows.unsqueeze(0), found)
        return made.reshape(shape) if shape else made[0]

    def _fetched_at(self, index: Any, storage: Storage) -> tuple[Any, Any, torch.Size] | None:
        """Return the neighbouring rows that transforms need for the rows at an index.

        The result includes the chain and the shape that the index selects. It is None if no
        transform reads neighbouring rows. If neighbours are missing, the surroundings are cut
        short, as at the beginning of an episode.
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
        """Return all stored rows, or the first ``end``, in slot order: ``rb[:end]``.

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
        """Replace stored rows, or a column if ``index`` is a key.

        Inverse transforms apply to rows. Length, cursor, ``write_count``, priorities and
        generations do not change.

        Values for all rows may add columns, as in ``rb["advantage"] = x``, ``rb[:] = rows`` and
        ``write_all(rows)``. Rows written later without these columns get zeros in them, until they
        are edited. An edit whose rows lack added columns leaves these columns unchanged. After an
        added column, the buffer draws its prefetched batches again.

        Raises:
            IndexError: a row is not stored.
            SchemaError: keys, shapes or dtypes differ, or a new key would mark the ends of
                episodes.
            RuntimeError: columns are added to rows that are shared, recovered, or from a data set.

        A new column needs memory for all slots. It is stored separately from the rows' records, so
        a sample makes one more memory access per row.

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
            if single:  # transforms receive a batch, as in add
                value, index = self.storage.batch_of_one(value, 0), as_tensor([index])
            value = self._chain.inv(value)
            if value is None:
                return
        with self._locked() as storage:
            before = storage.schema
            storage.edit(index, value, time_dim=self._layout(storage))
            self._refresh_prefetched(before)

    def _set_column(self, key: Key, value: Any) -> None:
        """Set a stored or new key of all rows, or all keys nested below it."""
        _, found = flatten(value, 0)
        values = {(*key, *path): leaf for path, leaf in found.items()}
        with self._locked() as storage:
            if isinstance(storage, ListStorage):
                storage.edit_columns(values)
                return
            before = storage.schema
            columns = self._columns()
            columns.edit_columns(values, time_dim=self._layout(storage), adds=True)
            self._refresh_prefetched(before)

    def _refresh_prefetched(self, before: Schema | None) -> None:
        """Draw prefetched batches again if columns were added."""
        if self._storage.schema is not before:
            self._rewind()

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Replace the first ``end`` stored rows in slot order: ``rb[:end] = data``.

        Args:
            data: the new rows. If they replace all stored rows, they may have new keys.
            end: number of rows; None for as many as ``data`` has.

        Raises:
            IndexError: more rows are given than are stored.
            SchemaError, RuntimeError: as for ``rb[...] = data``.

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
            self._refresh_prefetched(before)

    def set_(self, key: Any, value: torch.Tensor) -> Self:
        """Replace a whole column; return the buffer. Transforms do not apply.

        To add a column, use ``rb[key] = value``.

        Args:
            key: a stored key; a tuple for a nested key.
            value: a tensor ``[N, *F]``; with lanes, ``[*lanes, T, *F]``.

        Raises:
            KeyError: the column does not exist.
            SchemaError: the shape or dtype differs; nothing has changed.

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
        """Replace some rows of a column; return the buffer. Transforms do not apply.

        Args:
            value: a tensor ``[K, *F]``, or ``[*F]`` if ``index`` is an int.
            index: int, slice, list, LongTensor or bool mask of rows.

        Raises:
            KeyError, IndexError, SchemaError: as for ``set_`` and indexing; nothing has changed.
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
        """Replace several whole columns; return the buffer. Transforms do not apply.

        Args:
            input_dict_or_td: nested mapping or TensorDict of columns ``[N, *F]``.
            clone: copy the values first. Needed if the values are views of the buffer's own
                columns.
            keys_to_update: replace only these keys, and all keys nested below them. Keys missing
                from the input are ignored.

        Raises:
            KeyError, SchemaError: as for ``set_``; nothing has changed.

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
        """Return the time dimension of ``rb[:]``."""
        return self.dim_extend if storage.ndim > 1 else 0


def is_key(index: Any) -> bool:
    """Return whether the index in ``rb[...]`` names a column."""
    if isinstance(index, tuple):
        return bool(index) and all(is_key(part) for part in index)
    return isinstance(index, str)


def column_of(rows: Any, key: Any) -> Any:
    """Return a column of rows; KeyError with the existing columns if it is missing."""
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
    """Return a TensorDict of rows with their index, if the shapes still fit."""
    shape = cells.shape if storage.ndim == 1 else cells.shape[:-1]
    if is_ragged(rows) and len(shape) == 1:
        dim = storage.stack_dim % rows.batch_dims
        fits = rows.batch_size[dim] == shape[0] and rows.stack_dim == dim
        return with_each(rows, {"index": cells}) if fits else rows
    if rows.batch_size[: len(shape)] != shape:  # a transform or collate_fn made another shape
        return rows
    return rows.copy().set("index", _for_each(cells, rows.batch_size, len(shape)))


def _for_each(cells: torch.Tensor, batch: torch.Size, dims: int) -> torch.Tensor:
    """Return the index of rows, expanded to the batch dimensions inside each row."""
    inner = batch[dims:]
    if not inner:
        return cells
    shape = [*cells.shape[:dims], *[1] * len(inner), *cells.shape[dims:]]
    return cells.view(shape).expand(*batch, *cells.shape[dims:])


def _is_single(index: Any) -> bool:
    """Return whether an index selects one row, not a batch."""
    if isinstance(index, (torch.Tensor, np.ndarray)):
        return index.ndim == 0
    return isinstance(index, (int, np.integer))


def _nothing_of(collate: Callable[[Any], Any], dim: int) -> Callable[[Any], Any]:
    """Return a function that makes an empty batch.

    The function collates one row, and cuts the batch to length 0 along ``dim``.
    """

    def collated(rows: Any) -> Any:
        if rows is None:
            raise RuntimeError("nothing is stored")
        batch = collate(rows)
        if isinstance(batch, LazyStackedTensorDict):
            batch = batch.contiguous()  # an empty stack has no keys
        if isinstance(batch, (dict, tuple)):
            return map_leaves(batch, lambda leaf: leaf[:0])
        at = dim if dim >= 0 else dim + batch.ndim
        return batch[(slice(None),) * at + (slice(0, 0),)]

    return collated


def _count(data: Any) -> int:
    """Return the number of rows of data; for a mapping, the rows of its first tensor."""
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
    """Return a copy for a transform to edit; only tensors are copied."""
    if isinstance(rows, torch.Tensor) or is_tensordict(rows) or is_tensorclass(rows):
        return rows.clone()
    if isinstance(rows, dict):
        return {key: _own(value) for key, value in rows.items()}
    if isinstance(rows, (list, tuple)):
        items = [_own(value) for value in rows]
        return type(rows)(*items) if hasattr(rows, "_fields") else type(rows)(items)
    return rows
