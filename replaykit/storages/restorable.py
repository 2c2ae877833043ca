"""Take the rows of a column storage out as plain columns, and put them back or map them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows, RowChunks
from replaykit.errors import SchemaError
from replaykit.schema import Rows, Schema, take_apart, zeros_of
from replaykit.storages.column_storage import AnyColumns, ColumnStorage
from replaykit.storages.columns import Columns
from replaykit.storages.content import (
    Content,
    FollowedColumn,
    Group,
    from_plain,
    rebuilt_column,
    to_plain,
)
from replaykit.storages.dedup_columns import OnceColumns
from replaykit.storages.dedup_streams import StreamColumns, keys_of
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.storages.next_rows import Pairs
from replaykit.storages.records import PackedLeaves, plan_records
from replaykit.storages.tensor_bytes import by_value, from_value, picked
from replaykit.structure import Branch, Path

__all__ = ["RestorableStorage", "adopt_mapped", "mapped_rows", "why_not_mapped"]

_BLOCK_BYTES = 4 * 2**20
"""How much of a load is copied at a time: what is in between stays in the processor's cache."""
_WHOLE_BYTES = 2**26


@dataclass(frozen=True)
class _Target:
    """Where rows will lie: the number of time slots there are, or will be."""

    slots: int


class RestorableStorage(ColumnStorage):
    """A column storage whose rows can be saved, loaded, pickled and copied."""

    def content(self) -> Content:
        """Returns the stored rows as views, not copies; the caller holds the lock."""
        columns, length = self._columns, self.ledger.length
        if columns is None:
            return Content(0)
        leaves: dict[Path, Any] = {}
        if isinstance(columns, OnceColumns):
            packed = columns.rows.packed(length)
            leaves.update(columns.rows.view(length))
            elements, values = columns.own_following(length)
            steps = columns.links.steps(length) if isinstance(columns, StreamColumns) else None
            for path, root in columns.pairs.root_of.items():
                leaves[path] = FollowedColumn(
                    leaves[root], elements, values[path], columns.lanes, steps
                )
        else:
            packed = columns.packed(length)
            leaves.update(columns.view(length))
        views = tuple(leaves[path] for path in columns.schema.leaves)
        group = Group(columns.schema, views, columns.changes, columns.follow_memory, packed)
        return Content(length, self.lanes, (group,))

    def check_content(self, content: Content) -> _Target | None:
        """Checks that rows of another storage fit; hand the result to ``load_content``.

        Nothing changes, and no memory is taken yet.

        Raises:
            SchemaError: layout or lanes differ. KeyError: there is no column ``lane_key``.
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
    def takes_over_whole(self) -> bool:
        return self._columns is None and not self.load_hooks

    def load_content(
        self, content: Content, target: _Target | None, rows: torch.Tensor | None
    ) -> None:
        """Copies checked rows in: all to their own slots, or ``rows`` to slots ``0, 1, ...``.

        Takes memory first, if there is none yet: what can fail, fails before anything changes.
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
            # Its files are there once and for all, with nothing stored in them yet.
            self._columns = columns
            self._adopt(columns)
            self.recovery.note(range(self.ledger.length))
        _fill(columns, leaves, content.rows, rows, content.ledger, group.packed)
        if content.check is not None:
            content.check()
        self._columns = columns
        self._adopt(columns)

    def _completed(self, content: Content) -> Group:
        """The rows of some content, with zeros in those added columns here that they lack."""
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

    def _forget_columns(self, slots: int, size: int) -> None:
        """Is as before the first write, with room for that many slots and rows."""
        self._columns = self._matcher = None
        self.ledger.slots, self.max_size = slots, size

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the stored rows.

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
                    "dumps(path), which saves any records"
                )
            stored = None
            if self._columns is not None:
                leaves = self._columns.view(content.rows)
                for path in leaves:  # what is no view is let go one by one
                    leaves[path] = leaves[path].clone()
                stored = self._build(leaves, self.visible_shape())
            added = (
                []
                if self.schema is None
                else [p for p in self.schema.leaves if p in self.schema.added]
            )
            return {
                "_storage": to_plain(stored),
                "initialized": self.initialized,
                "_len": content.rows * self.lanes.numel(),
                **({"_added": added} if added else {}),
            }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        content = self.content_of(state_dict)
        with self.lock:
            target = self.check_content(content)
            limit = target.slots if target is not None else self.ledger.slots
            if content.rows > limit:
                raise ValueError(f"expected at most {limit} rows, got {content.rows}")
            self.load_content(content, target, None)
            self.edits += 1
            self.ledger.clear()
            self.ledger.advance(content.rows)
            self.indexes.restore(None, None, None)

    def content_of(self, state_dict: Mapping[str, Any]) -> Content:
        """Reads a storage's state dict.

        Raises:
            ValueError: an entry is missing or contradicts another one.
        """
        missing = {"_storage", "initialized", "_len"} - set(state_dict)
        if missing:
            raise ValueError(f"expected the entries _storage, initialized, _len; missing {missing}")
        stored = state_dict["_storage"]
        if stored is None:
            if state_dict["_len"]:
                raise ValueError(f"expected {state_dict['_len']} rows, got none")
            return Content(0)
        rows = take_apart(from_plain(stored), self.ndim)
        if rows.batch.numel() != state_dict["_len"]:
            raise ValueError(f"expected {state_dict['_len']} rows, got {rows.batch.numel()}")
        schema = Schema(rows.root)
        added = {tuple(path) for path in state_dict.get("_added", ())}
        if added:
            first = schema.part([path for path in schema.leaves if path not in added])
            schema = first.with_added(schema.root)
        group = Group(schema, tuple(rows.leaves[path] for path in schema.leaves))
        return Content(len(rows), rows.batch[1:], (group,))

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            state = super().__getstate__()
            content = self.content()
            columns = [by_value(group.plain_columns()) for group in content.groups]
            state["ledger"] = by_value(self.ledger.state())
            state["_matcher"] = None
            state["indexes"] = self.indexes.state()
            state["_columns"] = (self.schema, self.lanes, columns[0]) if columns else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        stored, ledger = state["_columns"], from_value(state["ledger"])
        episodes = state["indexes"]
        super().__setstate__({**state, "_columns": None, "ledger": Ledger(ledger["slots"])})
        self.indexes = EpisodeIndexes(self)
        self.ledger.restore(ledger, None)
        if stored is not None:
            schema, lanes, columns = from_value(stored)
            columns = [rebuilt_column(column, columns, lanes) for column in columns]
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
    """Writes the first ``count`` rows of the leaves, or ``rows`` of them, oldest first, to slots
    ``0, 1, ...``, block by block.

    Args:
        ledger: of the rows; None: they lie in the order in which they were written.
        packed: the records in which some of the leaves lie.
    """
    count = count if rows is None else len(rows)
    if isinstance(columns, StreamColumns) and not count:
        columns.clear()
    elif isinstance(columns, StreamColumns):
        keys = picked(leaves[columns.key], slice(None) if rows is None else rows)
        known = ledger is not None and rows is None
        order = ledger.write_order() if known and ledger is not None else arange(count)
        columns.begin(keys_of(keys[:count], columns.schema.leaves[columns.key].dtype), order)
    elif isinstance(columns, OnceColumns):
        columns.let_go_unread()
    row_bytes = columns.schema.row_bytes() * columns.lanes.numel()
    # Nothing is in between where rows are copied as they lie.
    whole = rows is None and isinstance(columns, Columns) and columns.lies_as(packed)
    block = max(1, (_WHOLE_BYTES if whole else _BLOCK_BYTES) // max(row_bytes, 1))
    pieces = [leaf for leaf in leaves.values() if isinstance(leaf, RowChunks)]
    start = stop = 0
    while stop < count:
        start, stop = stop, min(stop + block, count)
        if rows is None and pieces and not whole:
            # Rows that lie in one piece are written from where they are.
            border = min(leaf.border(start) for leaf in pieces)
            stop = border if start + block // 8 < border < stop else stop
        kept = slice(start, stop) if rows is None else rows[start:stop]
        if isinstance(columns, StreamColumns):
            columns.fill(start, leaves, kept)
        elif isinstance(columns, OnceColumns):
            columns.scatter(arange(start, stop), leaves, kept)
        else:
            columns.fill(start, stop - start, leaves, kept, packed)


_SPARE_ENTRIES = 64


def mapped_rows(group: Group, schema: Schema, slots: int, ndim: int) -> Columns:
    """Returns columns over rows in files; nothing is read.

    Args:
        group: whose columns are MappedRows, or fields of records.
        schema: of those leaves that every row has.
        slots: how many there are to be.

    Raises:
        OSError: the system refuses to map them.
    """
    packed, layout, records = group.packed, None, None
    tensors: dict[Path, torch.Tensor] = {}
    if packed is not None:
        records = packed.records.spanned(slots)
        tensors = packed.fields(records, schema)
        layout = plan_records(schema)
        if not packed.lie_as(layout):  # columns then, though side by side
            layout = records = None
    leaves = group.leaves
    tensors |= {path: leaves[path].spanned(slots) for path in schema.leaves if path not in tensors}
    return Columns(schema, tensors, ndim, layout=layout, records=records, mapped=True)


def adopt_mapped(columns: OnceColumns, group: Group, rows: int) -> None:
    """Has columns over ``mapped_rows`` take what the checkpoint has beside the rows, where it lies;
    nothing is read.

    Args:
        group: that ``why_not_mapped`` says nothing of.
        rows: how many are stored.

    Raises:
        OSError: the system refuses to map it.
    """
    followed = {path: group.leaves[path] for path in columns.pairs.root_of}
    first: FollowedColumn = next(iter(followed.values()))
    table, used = None, len(first.elements)
    if used:
        # With room for those to come: more is made by copying all.
        entries = min(2 * used + _SPARE_ENTRIES, columns.slots * columns.lanes.numel())
        tensors = {p: cast(MappedRows, c.values).spanned(entries) for p, c in followed.items()}
        table = Columns(columns.pairs.beside, tensors, 1, mapped=True)
    if isinstance(columns, StreamColumns):
        columns.link([cast(MappedRows, column.steps) for column in followed.values()])
    elements = [cast(MappedRows, column.elements) for column in followed.values()]
    columns.adopt_later(elements, table, rows)


def why_not_mapped(
    content: Content, pairs: Pairs | None, slots: int, *, linked: bool
) -> tuple[Path, str] | None:
    """Which leaf of a checkpoint cannot be used as it lies, and why; None: each of them can.

    Args:
        pairs: which leaves a storage has once; None: it has none.
        slots: how many it is to have.
        linked: whether its rows follow each other by stream.
    """
    for group in content.groups:
        leaves = group.leaves
        packed = () if group.packed is None else group.packed.offsets
        once = [column for column in leaves.values() if isinstance(column, FollowedColumn)]
        for path, column in leaves.items():
            root = None if pairs is None else pairs.root_of.get(path)
            why = ""
            if isinstance(column, FollowedColumn):
                why = _why_not_followed(column, once[0], None if root is None else leaves[root])
                if not why and linked != (column.steps is not None):
                    why = "which was stored once with another lane_key"
                if not why and not linked and content.rows < slots:
                    why = _why_not_ended(column, content)
            elif root is not None:
                why = "which lies in every row there, and not once (dedup_next)"
            elif path not in packed and not isinstance(column, MappedRows):
                why = "which lies elsewhere"
            if why:
                return path, why
    return None


def _why_not_followed(column: FollowedColumn, first: FollowedColumn, source: Any) -> str:
    if source is None:
        return "which was stored once (dedup_next)"
    steps, mapped = column.steps, isinstance(column.values, MappedRows)
    # Whether they hold the same is looked at when they are read.
    same = len(column.elements) == len(first.elements) and (steps is None) == (first.steps is None)
    if column.source is source and mapped and same:
        return ""
    return "which does not follow the key that it is stored under, as others do"


def _why_not_ended(column: FollowedColumn, content: Content) -> str:
    # In a full ring the first row comes after the last one; here no row does.
    cells = content.lanes.numel()
    last = arange((content.rows - 1) * cells, content.rows * cells)
    if content.rows and not torch.equal(column.elements[-cells:], last):
        return "whose last row is followed by the first one, in another capacity"
    return ""
