"""Write and edit the rows of storages with one tensor per leaf."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from replaykit._compat import TensorDict, dtype_name
from replaykit.episodes.streams import stream_keys
from replaykit.errors import SchemaError
from replaykit.schema import MatchedRows, Matcher, Rows, Schema, split_leaves
from replaykit.storages.column_reads import AnyColumns, ColumnReads
from replaykit.storages.columns import Columns
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.indexing import (
    as_cells,
    as_index,
    check_no_hole,
    check_range,
    distinct_elements,
    in_order,
    indexed_shape,
    last_occurrences,
    order_of_all,
    with_lanes,
)
from replaykit.storages.memory import allocate, carried
from replaykit.storages.records import plan_records
from replaykit.structure import Branch, Leaf, Node, Path
from replaykit.ted import (
    EPISODE_KEYS,
    FLAG_KEYS,
    RESERVED_KEYS,
    RETURN_VALID,
    format_key,
    unravel,
)


class ColumnStorage(ColumnReads):
    """The base of TensorStorage and LazyTensorStorage: one tensor per leaf."""

    # -- writing ------------------------------------------------------------------------------

    def prepare(
        self,
        data: Any,
        *,
        single: bool = False,
        time_dim: int = 0,
        optional: Collection[Path] = (),
    ) -> Rows:
        if self._columns is None:
            self.poll()  # another process may have fixed keys and shapes
        matcher = self._matcher
        if matcher is not None:
            known = matcher.rows(data, single=single, time_dim=time_dim, optional=optional)
            if known is not None:
                return known
        rows = split_leaves(
            data,
            self.ndim,
            single=single,
            time_dim=time_dim,
            optional=optional,
            schema=self.schema,
        )
        if len(rows):
            if self._columns is not None:
                rows.complete(self._columns.schema)
            self._check(rows)
        return rows

    def _check(self, rows: Rows) -> None:
        if self._columns is None:
            self._check_lane_key(rows.leaves)
            return
        self._columns.schema.check(rows.root)
        if rows.batch[1:] != self.lanes:
            raise SchemaError(
                f"expected lanes of sizes {list(self.lanes)}, got {list(rows.batch[1:])}"
            )

    def accept(self, rows: Rows) -> None:
        if type(rows) is MatchedRows and rows.matcher is self._matcher:
            return
        # Since `prepare`, another thread may have made the first write or added a column.
        if self._columns is not None and self._columns.schema.added:
            rows.complete(self._columns.schema)
        self._check(rows)
        if self._columns is None:
            self._columns = self._allocate(Schema(rows.root), rows.batch[1:], rows)
            self._adopt(self._columns)

    def write(self, slots: torch.Tensor, rows: Rows, kept: torch.Tensor | slice) -> None:
        if self.indexes.pending() or (self.lane_key is not None and not self._at_cursor):
            self._before_overwrite()
        if self.recovery is not None and not self._at_cursor:
            self.recovery.journal_rows(slots.numpy())
        self.require().scatter(slots, rows.leaves, kept)

    def write_ring(self, first: int, rows: Rows, skipped: int) -> None:
        count = rows.batch[0]
        large = 2 * count > self.ledger.slots  # and may overwrite rows that wait for the indexes
        indexes = self.indexes
        behind = indexes.seen != self.ledger.log.number and indexes.pending()
        if large or behind or indexes.loaded:
            self._before_overwrite()
        if self.recovery is not None:
            self.recovery.journal_ring(first + skipped, count - skipped)
        # A subclass that overrides `write` expects all writes to go through it. Addresses are in
        # the order of the matcher's schema, so rows prepared for another storage cannot use them.
        if type(self).write is ColumnStorage.write:
            columns = self.require() if self._columns is None else self._columns
            matched = type(rows) is MatchedRows and rows.matcher is self._matcher
            if isinstance(columns, DedupColumns):
                columns.write_ring(first, rows, skipped, matched=matched)
                return
            if matched and columns.scatter_ring(
                (first + skipped) % columns.slots,
                count,
                rows.addresses,  # type: ignore[attr-defined]
                skipped,
            ):
                return
        self._at_cursor = True
        try:
            super().write_ring(first, rows, skipped)
        finally:
            self._at_cursor = False

    def _before_overwrite(self) -> None:
        """Update all data derived from stored rows, before a write overwrites them.

        Listeners and indexes may have to read rows from a checkpoint for this. If the checkpoint is
        damaged, they raise an error before any row changes.
        """
        if self.indexes.loaded:
            self.announce()
        self.indexes.index_pending()

    def _adopt(self, columns: AnyColumns) -> None:
        if self.ndim == 1 or isinstance(columns, Columns):
            self._matcher = Matcher(columns.schema, columns.lanes)
        self.ledger.slots = columns.slots
        self.max_size = columns.slots * columns.lanes.numel()

    def _allocate(self, schema: Schema, lanes: torch.Size, rows: Rows | None) -> AnyColumns:
        """Allocate columns for rows of a schema."""
        return self._allocate_memory(schema, lanes, rows)

    def _allocate_memory(self, schema: Schema, lanes: torch.Size, rows: Rows | None) -> Columns:
        device = self._device
        if device == "auto":
            device = torch.device("cpu")
            if rows is not None:
                device = next(iter(rows.leaves.values())).device
        slots = self._slots_for(lanes)
        layout = plan_records(schema)
        tensors, records = allocate(schema, slots, lanes, device, layout)
        return Columns(schema, tensors, self.ndim, layout=layout, records=records)

    def apart(self, rows: Rows) -> Rows:
        """Return rows whose leaves share no memory with the stored rows.

        Leaves that are views of stored rows are copied. A caller needs this if it reads the rows
        again after it has written them. Cost: below a microsecond for each leaf that is not a view.
        """
        columns = self._columns
        if columns is None:
            return rows
        held = columns.rows if isinstance(columns, DedupColumns) else columns
        given = rows.leaves
        leaves = {
            path: held.own(leaf) if leaf.device == held.device else leaf
            for path, leaf in given.items()
        }
        same = all(leaf is given[path] for path, leaf in leaves.items())
        return rows if same else Rows(rows.root, leaves, rows.batch)

    def place_by_stream(self, slots: torch.Tensor, rows: Rows, *, distinct: bool) -> None:
        """Write and commit as ``place`` does; each row becomes the newest row of its stream.

        The next rows of the streams continue after these rows. See ``Ledger.place_in_streams``.
        """
        kept = slice(None) if distinct else last_occurrences(slots)
        tables = self.ledger.reserve(slots)
        self._write_streams(slots[kept], rows, kept)
        self.ledger.place_in_streams(slots, tables)
        self.indexes.placed(rows, slots.numpy())

    def _write_streams(self, slots: torch.Tensor, rows: Rows, kept: torch.Tensor | slice) -> None:
        columns = self._columns
        if not isinstance(columns, DedupColumns) or columns.key is None:
            self.write(slots, rows, kept)
        elif type(self).write is ColumnStorage.write:
            self._before_overwrite()
            if self.recovery is not None:
                self.recovery.journal_rows(slots.numpy())
            matched = isinstance(rows, MatchedRows) and rows.matcher is self._matcher
            columns.write_streams(slots, rows, kept, matched=matched)
        else:
            continuing = columns.continuing
            self.write(slots, rows, kept)
            columns.continues_from(continuing, stream_keys(rows.leaves[columns.key]))

    def cut(self, lanes: Any, *, reset: bool = False) -> None:
        super().cut(lanes, reset=reset)
        if isinstance(self._columns, DedupColumns):
            by_stream = lanes is not None and self.lane_key is not None
            self._columns.sever(self.episodes.keys(lanes) if by_stream else lanes)

    def resume(self, *, over: bool) -> None:
        super().resume(over=over)
        if over and isinstance(self._columns, DedupColumns):
            self._columns.sever(None)

    def slots_for(self, rows: Rows) -> int:
        return self.ledger.slots if self.initialized else self._slots_for(rows.batch[1:])

    def _slots_for(self, lanes: torch.Size) -> int:
        return -(-self.max_size // lanes.numel())

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows at slots: one row at an int, a batch at any other index.

        A batch that covers all stored rows also adds the columns that the storage lacks. A slice
        without an end selects slots up to the capacity. But if the batch has as many rows as are
        stored, the slice ends after the stored rows.

        ``set_cursor=True`` writes new rows, and the last row of the batch becomes the newest.
        ``False`` replaces stored rows, and keeps length, cursor, row ids and generations. If
        nothing is stored, ``False`` also writes new rows, but keeps the cursor.

        Rows follow one another in slot order. If a row was not written right after the row in the
        slot before it, episodes end between them, in all streams of a ``lane_key``.

        Raises:
            IndexError: a slot outside ``[0, max_size)``, or beyond the stored rows with
                ``set_cursor=False``.
            RuntimeError: a slot below the highest written slot would stay without a row.
            SchemaError: the data does not fit.
            ValueError: the numbers of rows and slots differ.
        """
        single = isinstance(cursor, int)
        try:
            rows = self.prepare(data, single=single)
        except SchemaError:
            if single or not self._write_new_columns(cursor, data):
                raise
            if not set_cursor:
                return
            rows = self.prepare(data)
        with self.lock:
            slots = self._slots_at(cursor, rows)
            if len(slots) != len(rows):
                raise ValueError(f"expected {len(slots)} rows for as many slots, got {len(rows)}")
            if not len(slots):
                return
            are_new = set_cursor or not self.ledger.length
            if are_new:
                check_no_hole(slots, self.ledger.length)
            else:
                check_range(slots, 0, self.ledger.length)
            self.accept(rows)
            if are_new:
                self.place(slots, rows, move_cursor=set_cursor)
                self.notify(slots if self.ndim == 1 else with_lanes(slots, self.lanes))
                return
            last = last_occurrences(slots)
            self.indexes.settle()
            try:
                self.write(slots[last], rows, last)
            finally:
                # Only now, because `write` indexes the rows that pending changes name.
                self.ledger.log.edit(slots.numpy())
            if self.recovery is not None:
                self.recovery.made()

    def edit(self, index: Any, value: Any, *, time_dim: int = 0) -> None:
        """Replace stored rows; ``index`` selects them in the layout of ``rb[:]``.

        An edit of all rows adds the columns that the storage lacks. If the value lacks a column
        that was added by an earlier edit, this column stays unchanged.

        Raises:
            IndexError: rows that are not stored.
            SchemaError: keys, shapes or dtypes differ.
            RuntimeError: the storage cannot add columns.
        """
        with self.lock:
            columns = self.require()
            at, batch = self._edit_index(index, time_dim)
            rows = split_leaves(value, len(batch))
            schema, leaves = columns.schema, rows.leaves
            if rows.batch == batch and not leaves.keys() <= schema.leaves.keys():
                shape = self.visible_shape(time_dim)
                order = order_of_all(at, batch, shape)
                if order is not None:
                    schema = schema.with_added(rows.root)
                    leaves = {p: in_order(v, order, batch, shape) for p, v in leaves.items()}
            schema.without_added(leaves).check(rows.root)
            if rows.batch != batch:
                raise SchemaError(f"expected rows of shape {list(batch)}, got {list(rows.batch)}")
            if leaves is not rows.leaves:
                at, batch = slice(None), shape
            self._edit(schema, leaves, at, batch, time_dim)

    def _write_new_columns(self, cursor: Any, data: Any) -> bool:
        """Write data for all stored rows, including new columns.

        Return whether the data was written. If the data has no new columns, or is not for all
        stored rows, nothing has changed.

        Raises:
            The same errors as ``edit``.
        """
        with self.lock:
            if self._columns is None:
                return False
            rows = split_leaves(data, self.ndim)
            slots = self._slots_at(cursor, rows)
            batch = torch.Size([len(slots), *self.lanes])
            if (
                rows.leaves.keys() <= self._columns.schema.leaves.keys()
                or rows.batch != batch
                or len(slots) != self.ledger.length
                or order_of_all(slots, batch, self.visible_shape()) is None
            ):
                return False
            self.edit(slots, data)
            return True

    def _edit(
        self,
        schema: Schema,
        leaves: Mapping[Path, torch.Tensor],
        at: Any,
        batch: torch.Size,
        time_dim: int,
    ) -> None:
        """Write checked leaves into stored rows, and add columns.

        Leaves that are new in ``schema`` become columns. If it raises, nothing has changed.

        Raises:
            RuntimeError: this storage cannot add columns.
            SchemaError: a new key would mark the ends of episodes.
            MemoryError, OSError: there is no room for the columns.
        """
        columns = self.require()
        if schema is not columns.schema:
            new = [path for path in schema.leaves if path not in columns.schema.leaves]
            self._check_addable(new)
            columns.check_writable()
            tensors = self._memory_for(schema.part(new))
            for path, tensor in tensors.items():
                rows = carried(tensor[: self.ledger.length]).transpose(0, time_dim)
                rows.copy_(carried(leaves[path]))
            # The values are written before readers can access the columns.
            self.ledger.log.edit(None, new)
            columns.add(schema, tensors)
            self._adopt(columns)
            leaves = {path: leaf for path, leaf in leaves.items() if path not in tensors}
        elements, length = None, self.ledger.length
        if time_dim or not (isinstance(at, slice) and at.indices(length) == (0, length, 1)):
            elements, last = distinct_elements(at, length, self.lanes, time_dim)
            leaves = {
                path: carried(leaf).reshape(batch.numel(), *leaf.shape[len(batch) :])[last]
                for path, leaf in leaves.items()
            }
        self.put(elements, leaves)

    def _check_addable(self, paths: Collection[Path]) -> None:
        """Raise an error that names a column if columns cannot be added to the rows."""
        name = format_key(next(iter(paths)))
        if self.recovery is not None:
            how = "shared=True" if self.recovery.shared else "recover=True"
            raise RuntimeError(
                f"key {name}: expected a stored key, since the files of rows with {how} are laid "
                f"out by the first write; write {name} with the first rows"
            )
        for path in paths:
            if path in FLAG_KEYS or path in EPISODE_KEYS:
                raise SchemaError(
                    f"key {format_key(path)}: expected a stored key, since it says where episodes "
                    "end; write it with the first rows"
                )
            if path[0] in RESERVED_KEYS:
                raise SchemaError(
                    f"key {format_key(path)}: expected another key, since the buffer puts this one "
                    "into samples"
                )

    def _memory_for(self, schema: Schema) -> dict[Path, torch.Tensor]:
        """Allocate columns to add: zeros ``[slots, *lanes, *F]``."""
        columns = self.require()
        tensors, _ = allocate(schema, columns.slots, columns.lanes, columns.device, None)
        for tensor in tensors.values():
            carried(tensor).zero_()
        return tensors

    def put(self, elements: torch.Tensor | None, leaves: Mapping[Path, torch.Tensor]) -> None:
        """Replace values of distinct stored rows.

        The caller holds the lock and has checked the rows.

        Args:
            elements: the rows, as ``slot * lanes + lane``, int64 ``[K]`` on the CPU; None for all.
            leaves: the new values by path, ``[K, *F]`` or, for all rows, ``[length, *lanes, *F]``.
        """
        columns, length, slots = self.require(), self.ledger.length, None
        columns.check_writable()
        # If the rows keep their ends, no index has to read all rows again. But ReturnToGo knows by
        # an edit of their ends that rows were replaced, whose returns it has to compute.
        replaced = elements is None or RETURN_VALID in leaves
        bounding = [] if replaced else self.indexes.bounding(leaves)
        if elements is not None and bounding:
            old = columns.gather_keys(bounding, elements)
            new = {path: carried(leaves[path]).to(columns.device) for path in bounding}
            kept = {path for path in bounding if torch.equal(carried(old[path]), new[path])}
            leaves = {path: leaf for path, leaf in leaves.items() if path not in kept}
        if not leaves:
            return
        self.indexes.before_edit(leaves)
        if elements is not None:
            slots = elements.numpy()
            if self.ndim > 1:
                slots = np.unique(slots // self.lanes.numel())
        self.ledger.log.edit(slots, leaves)
        if self.recovery is not None:
            self.recovery.journal_rows(range(length) if slots is None else slots, leaves)
        columns.put(elements, leaves, length)
        if self.recovery is not None:
            self.recovery.made()

    def leaf(self, key: Any) -> Leaf:
        """Return the feature shape and the dtype of a column.

        Raises:
            KeyError: no leaf of that name.
        """
        return self.require().schema.leaf(key)

    def column(self, key: Any, *, time_dim: int = 0) -> torch.Tensor:
        """Return the stored rows of one leaf: a view, or a copy for deduplicated keys.

        Raises:
            KeyError: no leaf of that name.
        """
        self.leaf(key)
        columns = self.require()
        with self.lock:
            columns.changes.expose()
            view = columns.column(unravel(key), self.ledger.length)
        return view.transpose(0, time_dim)

    def edit_columns(
        self,
        values: Mapping[Path, Any],
        index: Any = None,
        *,
        time_dim: int = 0,
        adds: bool = False,
    ) -> None:
        """Replace values of some leaves in all stored rows, or in the rows at ``index``.

        Args:
            adds: whether to add whole columns that are not stored yet.

        Raises:
            KeyError: there is no such leaf.
            IndexError: rows that are not stored.
            SchemaError: a shape or dtype differs.
            RuntimeError: the storage cannot add columns.

        If it raises, nothing has changed.
        """
        with self.lock:
            at, batch = slice(None), self.visible_shape(time_dim)
            if index is not None:
                at, batch = self._edit_index(index, time_dim)
            schema = self.require().schema
            if adds and batch.numel():
                new = {path: v for path, v in values.items() if path not in schema.leaves}
                for path, value in new.items():
                    schema = schema.with_added(_tree(path, value, batch, schema.root))
            leaves = {}
            for path, value in values.items():
                leaf = schema.leaf(path)
                leaves[path] = fitted(path, value, leaf.dtype, batch + leaf.shape)
            self._edit(schema, leaves, at, batch, time_dim)

    def _edit_index(self, index: Any, time_dim: int) -> tuple[Any, torch.Size]:
        """Return the index of rows to edit, and the shape of the rows that it selects."""
        shape = self.visible_shape(time_dim)
        if self.ndim > 1:
            return as_cells(index, shape)
        at = as_index(index, len(self))
        return at, indexed_shape(shape, at)

    def clear(self) -> None:
        """Remove all rows; their memory stays.

        Cost: one pass over flags, if rows were placed by hand or edited since the last use of
        episodes. The pass finds out whether the last episode is open, because the start of the next
        episode depends on it.
        """
        if self._columns is not None:
            self.indexes.index_pending()
            self._columns.clear()


def _tree(path: Path, value: Any, batch: torch.Size, root: Node) -> Node:
    """Return containers for a new column, of the same kind as those of stored rows.

    Raises:
        SchemaError: the value is not a tensor, or its batch shape is not ``batch``.
    """
    if not isinstance(value, torch.Tensor) or value.shape[: len(batch)] != batch:
        given = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        wanted = ", ".join(map(str, batch))
        raise SchemaError(
            f"key {format_key(path)}: expected a tensor of shape [{wanted}, ...], got {given}"
        )
    node: Node = Leaf(value.shape[len(batch) :], value.dtype)
    mapping = isinstance(root, Branch) and root.kind == "mapping"
    for part in reversed(path):
        kind, cls = ("mapping", dict) if mapping else ("tensordict", TensorDict)
        node = Branch(kind, ((part, node),), cls)
    return node


def fitted(path: Path, value: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Return the value in the shape ``shape``, without cast or broadcast.

    A flag may lack its last dimension of size 1.

    Raises:
        SchemaError: the value does not fit.
    """
    if not isinstance(value, torch.Tensor):
        raise SchemaError(f"key {format_key(path)}: expected a tensor, got {type(value).__name__}")
    if path in FLAG_KEYS and [*value.shape, 1] == list(shape):
        value = value.unsqueeze(-1)
    if value.dtype != dtype or value.shape != shape:
        raise SchemaError(
            f"key {format_key(path)}: expected {dtype_name(dtype)} {list(shape)}, "
            f"got {dtype_name(value.dtype)} {list(value.shape)}"
        )
    return value.detach()


def with_episodes(storage: object, need: str = "") -> ColumnStorage:
    """Return a storage that has an episode index.

    Args:
        need: a clause for the error that names the part that needs the index.

    Raises:
        RuntimeError: the storage has no episode index.
    """
    if not isinstance(storage, ColumnStorage):
        raise RuntimeError(
            f"a {type(storage).__name__} does not know where episodes end{need}; use a tensor or "
            "memmap storage"
        )
    return storage
