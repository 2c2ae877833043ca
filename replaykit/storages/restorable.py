"""Save the rows of a column storage as plain columns, and load or map them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows, RowChunks
from replaykit.declared import decode_state
from replaykit.episodes.streams import stream_keys
from replaykit.errors import SchemaError
from replaykit.schema import Rows, Schema, split_leaves, zeros_of
from replaykit.storages.column_storage import AnyColumns, ColumnStorage
from replaykit.storages.columns import Columns
from replaykit.storages.content import (
    Content,
    Group,
    RowsState,
    to_plain,
)
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.storages.memory import by_value, from_value, picked
from replaykit.storages.next_rows import Pairs
from replaykit.storages.records import PackedLeaves, plan_records
from replaykit.storages.references import (
    NEXT,
    OBSERVATION,
    ReferencedColumn,
    rebuilt_columns,
)
from replaykit.storages.taken_rows import load_taken, taken_mask
from replaykit.structure import Branch, Path

_BLOCK_BYTES = 4 * 2**20
"""Bytes of a block of a load. Its temporary values stay in the processor's cache."""
_WHOLE_BYTES = 2**26


@dataclass(frozen=True)
class _Target:
    """The target of a load, with the number of time slots that it has or will have."""

    slots: int


class RestorableStorage(ColumnStorage):
    """A column storage whose rows can be saved, loaded, pickled and copied."""

    def content(self) -> Content:
        """Return views of the stored rows; the caller holds the lock."""
        columns, length = self._columns, self.ledger.length
        if columns is None:
            return Content(0)
        leaves: dict[Path, Any] = {}
        if isinstance(columns, DedupColumns):
            packed = columns.rows.packed(length)
            leaves.update(columns.rows.view(length))
            known, values = columns.table.content(length)
            for path, root in columns.pairs.root_of.items():
                source, own = leaves[root], values[path]
                leaves[root] = ReferencedColumn(source, own, known, OBSERVATION, self.lanes)
                leaves[path] = ReferencedColumn(source, own, known, NEXT, self.lanes)
        else:
            packed = columns.packed(length)
            leaves.update(columns.view(length))
        views = tuple(leaves[path] for path in columns.schema.leaves)
        group = Group(columns.schema, views, columns.changes, columns.refresh_addresses, packed)
        return Content(length, self.lanes, (group,))

    def check_content(self, content: Content) -> _Target | None:
        """Check that rows of another storage fit; return the target for ``load_content``.

        Nothing changes, and no memory is allocated yet.

        Raises:
            SchemaError: the layout or the lanes differ.
            KeyError: the rows have no column ``lane_key``.
        """
        if not content.groups and not content.rows:
            return None if self._columns is None else _Target(self._columns.slots)
        group = self._completed(content)
        if len(content.lanes) != self.ndim - 1:
            raise SchemaError(
                f"expected rows of a storage with ndim={self.ndim}, "
                f"got ndim={len(content.lanes) + 1}"
            )
        if self._columns is None:
            self._check_lane_key(group.schema.leaves)
            return _Target(self._slots_for(content.lanes))
        self._columns.schema.check(group.schema.root)
        if content.lanes != self.lanes:
            raise SchemaError(
                f"expected lanes of sizes {list(self.lanes)}, got {list(content.lanes)}"
            )
        return _Target(self._columns.slots)

    @property
    def checks_before_load(self) -> bool:
        return self._columns is None and not self.load_hooks

    def load_content(
        self, content: Content, target: _Target | None, rows: torch.Tensor | None
    ) -> None:
        """Copy checked rows to their own slots, or ``rows`` to slots ``0, 1, ...``.

        Missing memory is allocated first, so that a failure leaves the storage unchanged.
        """
        if not content.groups:
            if content.check is not None:
                content.check()
            self.clear()
            return
        group = self._completed(content)
        leaves = group.leaves
        columns = self._columns
        if columns is None:
            first = Rows(group.schema.root, leaves, torch.Size([0, *content.lanes]))
            columns = self._allocate(group.schema, content.lanes, first)
        if self.recovery is not None:
            # The storage never gives up its files, so it adopts the columns before the copy.
            self._columns = columns
            self._adopt(columns)
            self.recovery.journal_rows(range(self.ledger.length))
        try:
            _fill(columns, leaves, content.rows, rows, content.ledger, group.packed)
        except BaseException:
            if isinstance(columns, DedupColumns):
                columns.outdate(self.ledger)  # the rows of the ledger are still there
            if self._columns is None:
                self._release_memory(columns)
            raise
        if content.check is not None:
            content.check()
        self._columns = columns
        self._adopt(columns)

    def _completed(self, content: Content) -> Group:
        """Return the rows of ``content``, with zeros for added columns that it lacks."""
        group, columns = content.single_group(), self._columns
        if columns is None or columns.schema.added <= group.schema.leaves.keys():
            return group
        missing = [path for path in columns.schema.added if path not in group.schema.leaves]
        schema = group.schema.with_added(columns.schema.part(missing).root)
        batch, found = torch.Size([content.rows, *content.lanes]), group.leaves
        leaves = (
            found[path] if path in found else zeros_of(leaf, batch, columns.device)
            for path, leaf in schema.leaves.items()
        )
        return replace(group, schema=schema, columns=tuple(leaves))

    def undo_content(self) -> Callable[[], None]:
        if self._columns is None:
            slots, size = self.ledger.slots, self.max_size
            return lambda: self._forget_columns(slots, size)
        content = replace(self.content().copied(), ledger=self.ledger)
        return lambda: self.load_content(content, self.check_content(content), None)

    def check_resizable(self) -> None:
        if self.recovery is not None:
            raise RuntimeError(
                "expected a storage without recover=True or shared=True, whose files and mappings "
                f"have a fixed size, got {self!r}"
            )

    @contextlib.contextmanager
    def resized(self, max_size: int, rows: torch.Tensor | None) -> Iterator[None]:
        """Copy the rows that stay into columns of another capacity; see ``Storage.resized``."""
        if self._columns is not None:
            self.indexes.index_pending()
        with self._undone_on_error(self.indexes):
            if self._columns is not None:
                with self._replacing_memory(self._columns):
                    self._copy_rows(max_size, rows)
                    yield
                return
            self.max_size = max_size
            self.ledger.resize(max_size, None)
            yield

    def _copy_rows(self, max_size: int, rows: torch.Tensor | None) -> None:
        ledger = self.ledger
        old, content = Ledger.saved(ledger.state()), replace(self.content(), ledger=ledger)
        group, indexes = content.single_group(), self.indexes.state()
        indexes_kept = self.episodes_of_subset(content, indexes, old, rows)
        self.max_size = max_size
        first = Rows(group.schema.root, group.leaves, torch.Size([0, *self.lanes]))
        columns = self._allocate(group.schema, self.lanes, first)
        _fill(columns, group.leaves, content.rows, rows, ledger, group.packed)
        taken = taken_mask(self)
        ledger.resize(columns.slots, rows)
        self._columns, self.taken_table = columns, None
        self._adopt(columns)
        load_taken(self, taken, rows)
        self.indexes.restore(indexes_kept, old, rows, restarted=False)

    def _replacing_memory(self, columns: AnyColumns) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the memory of ``columns`` is replaced."""
        return contextlib.nullcontext()

    def _release_memory(self, columns: AnyColumns) -> None:
        """Remove the files of columns that a failed load has made."""

    def _forget_columns(self, slots: int, size: int) -> None:
        """Return to the state before the first write, for ``slots`` slots, ``size`` rows.

        Recoverable and shared rows keep their layout, because other processes may have their files.
        """
        if self.recovery is not None:
            self.clear()
            return
        if self._columns is not None:
            self._release_memory(self._columns)
        self._columns = self._matcher = None
        self.ledger.slots, self.max_size = slots, size

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the stored rows.

        Raises:
            TypeError: the rows are pytrees other than TensorDicts, tensorclasses and tensors.
        """
        with self.lock:
            content = self.content()
            root = self.schema.root if self.schema else None
            if isinstance(root, Branch) and root.kind in ("mapping", "sequence"):
                raise TypeError(
                    f"Objects of type {root.cls.__name__} are not supported by "
                    f"{type(self).__name__}.state_dict: expected TensorDicts or tensors; use "
                    "dumps(path), which saves any rows"
                )
            stored = None
            if self._columns is not None:
                leaves = self._columns.view(content.rows)
                for path in leaves:  # one by one, so that each leaf that is not a view is released
                    leaves[path] = leaves[path].clone()
                stored = self._build(leaves, self.visible_shape())
            added = [p for p in self.schema.leaves if p in self.schema.added] if self.schema else []
            return {
                "_storage": to_plain(stored),
                "initialized": self.initialized,
                "_len": content.rows * self.lanes.numel(),
                **({"_added": added} if added else {}),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load_rows(self.content_of(state_dict))

    def content_of(self, state_dict: Mapping[str, Any]) -> Content:
        """Read the rows of a state dict.

        Raises:
            ValueError: an entry is missing or contradicts another one.
        """
        state = decode_state(RowsState, state_dict, "the state of a storage")
        if state._storage is None:
            if state._len:
                raise ValueError(f"expected {state._len} rows, got none")
            return Content(0)
        rows = state.rows(lambda rows: split_leaves(rows, self.ndim))
        if rows.batch.numel() != state._len:
            raise ValueError(f"expected {state._len} rows, got {rows.batch.numel()}")
        schema = Schema(rows.root)
        added = set(state._added)
        if added:
            first = schema.part([path for path in schema.leaves if path not in added])
            schema = first.with_added(schema.root)
        group = Group(schema, tuple(rows.leaves[path] for path in schema.leaves))
        return Content(len(rows), rows.batch[1:], (group,))

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            state = super().__getstate__()
            content = self.content()
            columns = [by_value(list(group.plain_columns())) for group in content.groups]
            state["ledger"], state["_log"] = by_value(self.ledger.state()), self.ledger.log
            state["_matcher"] = None
            state["indexes"] = self.indexes.state()
            state["_columns"] = (self.schema, self.lanes, columns[0]) if columns else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        stored, ledger, log = state["_columns"], from_value(state["ledger"]), state.pop("_log")
        episodes = state["indexes"]
        super().__setstate__({**state, "_columns": None, "ledger": Ledger(ledger["slots"])})
        self.indexes = EpisodeIndexes(self)
        self.ledger.restore(ledger, None)
        self.ledger.log = log  # the copied followers go on
        if stored is not None:
            schema, lanes, (columns, references) = from_value(stored)
            columns = rebuilt_columns(columns, references, lanes)
            rows = Rows(schema.root, dict(zip(schema.leaves, columns, strict=True)), torch.Size())
            self._columns = self._allocate(schema, lanes, rows)
            self._adopt(self._columns)
            _fill(self._columns, rows.leaves, self.ledger.length, None, self.ledger)
            self.indexes.restore(episodes, self.ledger, None, restarted=False)


def _fill(
    columns: AnyColumns,
    leaves: Mapping[Path, Any],
    count: int,
    rows: torch.Tensor | None,
    ledger: Ledger | None,
    packed: PackedLeaves | None = None,
) -> None:
    """Write rows of ``leaves`` to slots ``0, 1, ...``, block by block.

    Args:
        columns: the target.
        leaves: the leaves by path, with rows in memory or in files.
        count: number of rows to write if ``rows`` is None, from the first row on.
        rows: the numbers of the rows to write, oldest first; None for the first ``count`` rows.
        ledger: the ledger of the rows; None if they are in write order.
        packed: the records that hold some of the leaves.
    """
    count = count if rows is None else len(rows)
    if isinstance(columns, DedupColumns):
        known = ledger is not None and rows is None
        order = ledger.write_order() if known and ledger is not None else arange(count)
        keys = None
        if columns.key is not None and count:
            values = picked(leaves[columns.key], slice(None) if rows is None else rows)
            keys = stream_keys(values[:count].view(columns.schema.leaves[columns.key].dtype))
        tables = {leaf.references for leaf in leaves.values() if isinstance(leaf, ReferencedColumn)}
        for references in tables:
            references.array()  # a check
        columns.reserve(max((references.overflow for references in tables), default=0))
        columns.begin_fill(count, keys, order)
    row_bytes = columns.schema.row_bytes() * columns.lanes.numel()
    # Rows of the same layout are copied without temporary values.
    whole = rows is None and isinstance(columns, Columns) and columns.lies_as(packed)
    block = max(1, (_WHOLE_BYTES if whole else _BLOCK_BYTES) // max(row_bytes, 1))
    pieces = [leaf for leaf in leaves.values() if isinstance(leaf, RowChunks)]
    start = stop = 0
    while stop < count:
        start, stop = stop, min(stop + block, count)
        if rows is None and pieces and not whole:
            # If a block does not cross a chunk border, it is copied directly from the file.
            border = min(leaf.border(start) for leaf in pieces)
            stop = border if start + block // 8 < border < stop else stop
        kept = slice(start, stop) if rows is None else rows[start:stop]
        if isinstance(columns, DedupColumns):
            columns.fill(start, leaves, kept)
        else:
            columns.fill(start, stop - start, leaves, kept, packed)


_SPARE_ENTRIES = 64


def mapped_rows(group: Group, schema: Schema, slots: int, ndim: int) -> Columns:
    """Return columns over rows in files, without reading them.

    Args:
        group: the rows; each column is a MappedRows, or is in records.
        schema: the leaves of every row.
        slots: the number of slots of the columns.
        ndim: number of leading dimensions that count as rows.

    Raises:
        OSError: the system refuses to map them.
    """
    packed, layout, records = group.packed, None, None
    tensors: dict[Path, torch.Tensor] = {}
    if packed is not None:
        records = packed.records.spanned(slots)
        tensors = packed.fields(records, schema)
        layout = plan_records(schema)
        if not packed.lie_as(layout):  # map separate columns, with the stride of the records
            layout = records = None
    tensors |= {
        path: _source(group.leaves[path]).spanned(slots)
        for path in schema.leaves
        if path not in tensors
    }
    return Columns(schema, tensors, ndim, layout=layout, records=records, mapped=True)


def adopt_mapped(columns: DedupColumns, group: Group, rows: int) -> None:
    """Map the overflow entries and references of a checkpoint, without reading them.

    Args:
        columns: columns over ``mapped_rows``.
        group: rows for which ``why_not_mapped`` returns None.
        rows: number of stored rows.

    Raises:
        OSError: the system refuses to map them.
    """
    nexts = {path: group.leaves[path] for path in columns.pairs.root_of}
    references = list(dict.fromkeys(column.references for column in nexts.values()))
    table, used = None, references[0].overflow
    if used:
        # The table has free entries for later writes, because growth would copy the whole table.
        limit = columns.slots * columns.lanes.numel()
        entries = max(used, min(2 * used + _SPARE_ENTRIES, limit))
        tensors = {p: cast(MappedRows, c.values).spanned(entries) for p, c in nexts.items()}
        table = Columns(columns.pairs.overflow, tensors, 1, mapped=True)
    columns.table.adopt_later(references, table, rows)


def why_not_mapped(content: Content, pairs: Pairs | None) -> tuple[Path, str] | None:
    """Return a leaf of a checkpoint that cannot be mapped, and the reason.

    Return None if all leaves can be mapped.

    Args:
        content: the rows of the checkpoint.
        pairs: the leaves that the storage stores once; None if there are none.
    """
    for group in content.groups:
        leaves = group.leaves
        packed = () if group.packed is None else group.packed.offsets
        root_of = {} if pairs is None else pairs.root_of
        for path, column in leaves.items():
            why = ""
            if path in root_of:
                why = _why_not_paired(column, leaves[root_of[path]])
            elif isinstance(column, ReferencedColumn) and path not in root_of.values():
                why = "which was stored once (dedup_next)"
            elif path not in packed and not isinstance(_source(column), MappedRows):
                why = "which is not in one of the mapped files"
            if why:
                return path, why
    return None


def _source(column: Any) -> Any:
    return column.source if isinstance(column, ReferencedColumn) else column


def _why_not_paired(column: Any, root: Any) -> str:
    if not isinstance(column, ReferencedColumn):
        return "which is stored in every row there, and not once (dedup_next)"
    if column.source is _source(root) and isinstance(column.values, MappedRows):
        return ""
    return "which does not follow the key that it is stored under, as others do"
