"""What storages with one tensor per leaf share: schema, slots, indexing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from replaykit._compat import TensorDict, dtype_name
from replaykit.episodes import InterleavedIndex
from replaykit.episodes.interleaved import stream_keys
from replaykit.errors import SchemaError
from replaykit.schema import Rows, Schema, take_apart
from replaykit.storages.column_reads import AnyColumns, ColumnReads
from replaykit.storages.columns import Columns
from replaykit.storages.dedup_columns import OnceColumns
from replaykit.storages.dedup_streams import StreamColumns
from replaykit.storages.indexing import (
    as_cells,
    as_index,
    as_slots,
    check_no_hole,
    check_range,
    in_order,
    indexed_shape,
    last_occurrences,
    order_of_all,
    with_lanes,
)
from replaykit.storages.memory import allocate
from replaykit.storages.records import plan_records
from replaykit.storages.schema_match import MatchedRows, Matcher
from replaykit.storages.storage import Edit, with_edit
from replaykit.storages.tensor_bytes import carried
from replaykit.structure import Branch, Leaf, Node, Path
from replaykit.ted import EPISODE_KEYS, FLAG_KEYS, RESERVED_KEYS, format_key, unravel

__all__ = ["AnyColumns", "ColumnStorage"]


class ColumnStorage(ColumnReads):
    """What storages with one tensor per leaf share; see TensorStorage and LazyTensorStorage."""

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
            self.look()  # another process may have fixed keys and shapes
        matcher = self._matcher
        if matcher is not None and not time_dim and len(optional) <= 1:
            known = matcher.rows(data, single=single, optional=next(iter(optional), None))
            if known is not None:
                return known
        rows = take_apart(
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
        # Checked again: another thread may have made the first write since `prepare`, or have
        # added a column.
        if self._columns is not None and self._columns.schema.added:
            rows.complete(self._columns.schema)
        self._check(rows)
        if self._columns is None:
            self._columns = self._allocate(Schema(rows.root), rows.batch[1:], rows)
            self._adopt(self._columns)

    def write(self, slots: torch.Tensor, rows: Rows, kept: torch.Tensor | slice) -> None:
        if self.indexes.stale or (self.lane_key is not None and not self._at_cursor):
            self._settle()
        if self.recovery is not None and not self._at_cursor:
            self.recovery.note(slots.numpy())
        self.require().scatter(slots, rows.leaves, kept)

    def write_ring(self, first: int, rows: Rows, skipped: int) -> None:
        large = self.lane_key is not None and 2 * len(rows) > self.ledger.slots
        if large or self.indexes.stale:
            self._settle()
        if self.recovery is not None:
            self.recovery.note_ring(first + skipped, len(rows) - skipped)
        # A storage that defines `write` anew means every write. Addresses are in the order of the
        # schema that they were found by; the rows may have been prepared for another storage.
        if type(self).write is ColumnStorage.write:
            columns = self.require()
            matched = isinstance(rows, MatchedRows) and rows.matcher is self._matcher
            if isinstance(columns, OnceColumns):
                columns.write_ring(first, rows, skipped, matched=matched)
                return
            if matched and columns.scatter_ring(
                (first + skipped) % columns.slots,
                len(rows),
                rows.addresses,  # type: ignore[attr-defined]
                skipped,
            ):
                return
        self._at_cursor = True
        try:
            super().write_ring(first, rows, skipped)
        finally:
            self._at_cursor = False

    def _settle(self) -> None:
        """Before stored rows are overwritten: whoever derives something from them reads first what
        a checkpoint says of them, so that what is wrong with it is found before anything changes.
        """
        if self.indexes.stale:
            self.announce()
        self.indexes.settle()

    def _adopt(self, columns: AnyColumns) -> None:
        if self.ndim == 1:
            self._matcher = Matcher(columns.schema)
        self.ledger.slots = columns.slots
        self.max_size = columns.slots * columns.lanes.numel()

    def _allocate(self, schema: Schema, lanes: torch.Size, rows: Rows | None) -> AnyColumns:
        """Takes memory for rows of that schema."""
        return self._take_memory(schema, lanes, rows)

    def _take_memory(self, schema: Schema, lanes: torch.Size, rows: Rows | None) -> Columns:
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
        """Rows with copies of those leaves that are views of what is stored, for who looks at them
        again when they have been written. Cost: below a microsecond a leaf, where none is."""
        columns = self._columns
        if columns is None:
            return rows
        held = columns.rows if isinstance(columns, OnceColumns) else columns
        given = rows.leaves
        leaves = {
            path: held.own(leaf) if leaf.device == held.device else leaf
            for path, leaf in given.items()
        }
        same = all(leaf is given[path] for path, leaf in leaves.items())
        return rows if same else Rows(rows.root, leaves, rows.batch)

    def write_by_stream(self, slots: torch.Tensor, rows: Rows, kept: torch.Tensor | slice) -> None:
        """What ``write`` does, of rows each of which is the newest of its stream in turn: the next
        ones go on from them."""
        columns = self._columns
        if not isinstance(columns, StreamColumns):
            self.write(slots, rows, kept)
        elif type(self).write is ColumnStorage.write:
            self._settle()
            if self.recovery is not None:
                self.recovery.note(slots.numpy())
            matched = isinstance(rows, MatchedRows) and rows.matcher is self._matcher
            columns.write_streams(slots, rows, kept, matched=matched)
        else:
            going_on = columns.going_on
            self.write(slots, rows, kept)
            columns.goes_on_from(going_on, stream_keys(rows.leaves[columns.key]))

    def cut(self, lanes: Any) -> None:
        super().cut(lanes)
        if isinstance(self._columns, StreamColumns):
            index = None if lanes is None else self.episodes
            self._columns.sever(index.keys(lanes) if isinstance(index, InterleavedIndex) else None)
        elif isinstance(self._columns, OnceColumns):
            self._columns.sever(lanes)

    def resume(self, *, over: bool) -> None:
        super().resume(over=over)
        if over and isinstance(self._columns, OnceColumns):
            self._columns.sever(None)

    def slots_for(self, rows: Rows) -> int:
        return self.ledger.slots if self.initialized else self._slots_for(rows.batch[1:])

    def _slots_for(self, lanes: torch.Size) -> int:
        return -(-self.max_size // lanes.numel())

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes rows at dim-0 positions: an int takes one row, anything else a batch.

        A batch for all stored rows adds the columns that the storage lacks. A slice without an end
        ends with the capacity, or with the stored rows where the batch has as many as these.

        ``set_cursor=True`` makes them new records, the last one the newest; ``False`` replaces
        stored ones, and length, cursor, positions and generations stay. Where nothing is stored,
        ``False`` makes new records too, and the cursor stays.

        Raises:
            IndexError: a position outside ``[0, max_size)``, or beyond the stored rows with
                ``set_cursor=False``.
            RuntimeError: slots below the highest one written would stay without a record.
            SchemaError: the data does not fit; ValueError: other number of rows than positions.
        """
        single = isinstance(cursor, int)
        try:
            rows = self.prepare(data, single=single)
        except SchemaError:
            if single or not self._takes_columns(cursor, data):
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
            self._check(rows)
            are_new = set_cursor or not self.ledger.length
            if are_new:
                check_no_hole(slots, self.ledger.length)
            else:
                check_range(slots, 0, self.ledger.length)
            self.accept(rows)
            last = last_occurrences(slots)
            self._note_edit(None, slots.numpy())
            self.write(slots[last], rows, last)
            if are_new:
                self.ledger.place(slots, move_cursor=set_cursor)
                self.notify(slots if self.ndim == 1 else with_lanes(slots, self.lanes))
            else:
                self.indexes.edited(self.require().schema.leaves)
                if self.recovery is not None:
                    self.recovery.made()

    def edit(self, index: Any, value: Any, *, time_dim: int = 0) -> None:
        """Replaces stored rows; ``index`` addresses the layout of ``rb[:]``.

        An edit of all rows adds the columns that the storage lacks. Added columns that the value
        lacks stay as they are.

        Raises:
            IndexError: rows that are not stored. SchemaError: keys, shapes or dtypes differ.
            RuntimeError: a storage that takes no more columns.
        """
        with self.lock:
            columns = self.require()
            at, batch = self._edit_index(index, time_dim)
            rows = take_apart(value, len(batch))
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

    def _takes_columns(self, cursor: Any, data: Any) -> bool:
        """Writes data that has new columns and is for all stored rows; whether it was.

        Raises:
            As ``edit``.
        """
        with self.lock:
            if self._columns is None:
                return False
            rows = take_apart(data, self.ndim)
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

    def _slots_at(self, cursor: Any, rows: Rows) -> torch.Tensor:
        """The positions that a low-level write of these rows names."""
        limit, length = self.slots_for(rows), self.ledger.length
        if isinstance(cursor, slice) and cursor.stop is None:
            stored = range(*cursor.indices(length))
            if stored and len(stored) == len(rows):
                limit = length
        return as_slots(cursor, limit)

    def _edit(
        self,
        schema: Schema,
        leaves: Mapping[Path, torch.Tensor],
        at: Any,
        batch: torch.Size,
        time_dim: int,
    ) -> None:
        """Write checked leaves into stored rows; those that are new in ``schema`` become columns.

        Raises:
            RuntimeError: this storage takes no more columns. SchemaError: a key that says where
                episodes end. MemoryError, OSError: there is no room. Nothing has changed then.
        """
        columns = self.require()
        if schema is not columns.schema:
            new = [path for path in schema.leaves if path not in columns.schema.leaves]
            self._check_addable(new)
            columns.check_writable()
            tensors = self._memory_for(schema.part(new))
            for path, tensor in tensors.items():
                _fill(tensor[: self.ledger.length], leaves[path], time_dim)
            # With their values, so that nobody sees them without.
            self._note_edit(new, None)
            columns.add(schema, tensors)
            self._adopt(columns)
            leaves = {path: leaf for path, leaf in leaves.items() if path not in tensors}
        self._assign(leaves, at, batch, time_dim)

    def _check_addable(self, paths: Collection[Path]) -> None:
        """Raises where columns cannot be added to the stored rows; names the first of them."""
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
        """Take memory for columns that are added: zeros ``[slots, *lanes, *F]``."""
        columns = self.require()
        tensors, _ = allocate(schema, columns.slots, columns.lanes, columns.device, None)
        for tensor in tensors.values():
            carried(tensor).zero_()
        return tensors

    def _assign(
        self, leaves: Mapping[Path, torch.Tensor], at: Any, batch: torch.Size, time_dim: int
    ) -> None:
        """Writes leaves into stored rows; of rows that are named twice the last one counts."""
        if not leaves:
            return
        columns = self.require()
        columns.check_writable()
        if self.recovery is not None:
            slots = _slots_of(at, self.visible_shape(time_dim), time_dim)
            self.recovery.note(slots, leaves)
        self._note_edit(leaves, None)
        self.indexes.edited(leaves)
        columns.assign(self.ledger.length, leaves, at, batch, time_dim=time_dim)
        if self.recovery is not None:
            self.recovery.made()

    def put(self, cells: Sequence[torch.Tensor], leaves: Mapping[Path, torch.Tensor]) -> None:
        """Replaces values of distinct stored rows; the caller holds the lock and has checked them.

        Args:
            cells: int64 ``[K]`` for each dimension of the rows.
            leaves: ``[K, *F]`` by path.
        """
        if self.recovery is not None:
            self.recovery.note(np.unique(cells[0].numpy()), leaves)
        self._note_edit(leaves, cells[0].numpy())
        self.indexes.edited(leaves)
        self.require().put(cells, leaves)
        if self.recovery is not None:
            self.recovery.made()

    def _note_edit(
        self, leaves: Collection[Path] | None, slots: np.ndarray[Any, Any] | None
    ) -> None:
        """Counts a change of stored rows, and says which it is."""
        self.edits += 1
        paths = None if leaves is None else frozenset(leaves)
        edit = Edit(self.edits, paths, None if slots is None else slots.copy())
        # A new tuple: copies are made of the storage meanwhile.
        rows = self.ledger.slots * self.lanes.numel()
        self.recent_edits = with_edit(self.recent_edits, edit, rows)

    def leaf(self, key: Any) -> Leaf:
        """Returns feature shape and dtype of a column.

        Raises:
            KeyError: no leaf of that name.
        """
        return self.require().schema.leaf(key)

    def column(self, key: Any, *, time_dim: int = 0) -> torch.Tensor:
        """Returns the stored rows of one leaf: a view, but for keys that are stored once.

        Raises:
            KeyError: no leaf of that name.
        """
        self.leaf(key)
        columns = self.require()
        with self.lock:
            columns.changes.expose()
            view = columns.column(unravel(key), self.ledger.length)
        return view.transpose(0, time_dim) if time_dim else view

    def edit_columns(
        self,
        values: Mapping[Path, Any],
        index: Any = None,
        *,
        time_dim: int = 0,
        adds: bool = False,
    ) -> None:
        """Replaces stored values of some leaves: whole columns, or the rows at ``index``.

        Args:
            adds: whether whole columns that are not stored are added.

        Raises:
            KeyError: no such leaf. IndexError: rows that are not stored. SchemaError: another
                shape or dtype. RuntimeError: a storage that takes no more columns. Nothing has
                changed then.
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
                leaves[path] = _fitting(path, value, leaf.dtype, batch + leaf.shape)
            self._edit(schema, leaves, at, batch, time_dim)

    def _edit_index(self, index: Any, time_dim: int) -> tuple[Any, torch.Size]:
        """The index of rows to edit, and the shape of the rows that it selects."""
        shape = self.visible_shape(time_dim)
        if self.ndim > 1:
            return as_cells(index, shape)
        at = as_index(index, len(self))
        return at, indexed_shape(shape, at)

    def clear(self) -> None:
        """Forgets all rows; their memory stays.

        Cost: where rows were placed by hand or edited since episodes were last asked for, one pass
        over their flags: whether the last episode is open says how the next one begins.
        """
        if self._columns is not None:
            self.indexes.settle()
            self._columns.clear()


def _slots_of(at: Any, shape: torch.Size, time_dim: int) -> np.ndarray[Any, Any] | range:
    """The slots that an index of rows of a shape names, whose dimension ``time_dim`` is time."""
    length = shape[time_dim]
    if isinstance(at, slice) and at == slice(None):
        return range(length)
    times = np.arange(length).reshape([-1 if d == time_dim else 1 for d in range(len(shape))])
    named = torch.from_numpy(times).expand(shape)[at]
    slots = np.unique(named.numpy())
    if len(slots) and slots[-1] - slots[0] == len(slots) - 1:
        return range(int(slots[0]), int(slots[-1]) + 1)
    return slots


def _tree(path: Path, value: Any, batch: torch.Size, root: Node) -> Node:
    """The containers that lead to a new column, of the kind of those that are stored.

    Raises:
        SchemaError: the value is not one of as many rows as there are.
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


def _fill(rows: torch.Tensor, values: torch.Tensor, time_dim: int) -> None:
    """Copies the values of all stored rows, laid out as ``rb[:]`` is, into a column."""
    target = carried(rows)
    (target.transpose(0, time_dim) if time_dim else target).copy_(carried(values))


def _fitting(path: Path, value: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Returns the value if it fits without cast or broadcast; flags may lack their last 1."""
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
