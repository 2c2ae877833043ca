"""Represent the rows of a storage as columns, for checkpoints and transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import is_tensorclass

from replaykit._compat import TensorDict, TensorDictBase, is_non_tensor, is_tensordict
from replaykit.checkpoint import RowChunks
from replaykit.checkpoint.dirty_chunks import RECORDS, Changes, TrackedTensor
from replaykit.declared import Count, Positive, decode_state
from replaykit.errors import SchemaError
from replaykit.schema import Schema, split_leaves
from replaykit.storages.ledger import Ledger
from replaykit.storages.records import PackedLeaves, field_of
from replaykit.storages.references import (
    NEXT,
    OBSERVATION,
    REFERENCES_KEY,
    ReferencedColumn,
    rebuilt_columns,
)
from replaykit.structure import Node, Path, build

_BATCH, _DEVICE = "__batch_size", "__device"


def to_plain(value: Any) -> Any:
    """Return a TensorDict of tensors as a dictionary; anything else unchanged.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from replaykit.storages.content import from_plain, to_plain
        >>> plain = to_plain(TensorDict({"x": torch.zeros(2)}, [2]))
        >>> plain["x"], plain["__batch_size"]
        (tensor([0., 0.]), torch.Size([2]))
        >>> from_plain(plain).batch_size
        torch.Size([2])
    """
    if not is_tensordict(value) or not _representable(value):
        return value
    plain = {key: to_plain(item) for key, item in value.items()}
    return {**plain, _BATCH: value.batch_size, _DEVICE: value.device}


def from_plain(value: Any) -> Any:
    """Rebuild TensorDicts, also in a list; return other values unchanged."""
    if type(value) is list:
        return [from_plain(item) for item in value]
    if not isinstance(value, Mapping) or _BATCH not in value:
        return value
    items = {key: from_plain(item) for key, item in value.items() if key not in (_BATCH, _DEVICE)}
    return TensorDict(items, value[_BATCH], device=value.get(_DEVICE))


@dataclass(frozen=True)
class RowsState:
    """The rows of a storage in a ``state_dict``."""

    _storage: Any
    initialized: bool
    _len: Count
    _added: list[tuple[Any, ...]] = field(default_factory=list)

    def rows(self, read: Callable[[Any], Any]) -> Any:
        """Return the result of ``read`` for the rows, with TensorDicts.

        Raises:
            ValueError: the rows are damaged.
        """
        try:
            return read(from_plain(self._storage))
        except (TypeError, RuntimeError, AttributeError) as error:
            raise ValueError(f"expected the rows of a storage, got {error}") from None


def _representable(value: TensorDictBase) -> bool:
    taken = any(key in (_BATCH, _DEVICE) for key in value.keys())  # noqa: SIM118 - not a mapping
    return not taken and not any(is_non_tensor(item) for item in value.values())


@dataclass(frozen=True)
class _SavedGroup:
    schema: Any
    columns: list[Any]
    records: Any = None
    references: Any = None


@dataclass(frozen=True)
class _SavedContent:
    rows: Count
    lanes: list[Positive]
    groups: list[_SavedGroup]
    plain: dict  # the rows by position
    order: Any = None


@dataclass(frozen=True)
class Group:
    """Rows of one schema, as columns in the order of the schema's leaves.

    Columns are ``[n, *lanes, *F]``. A column is a tensor, rows in files, or a ReferencedColumn. All
    three are read like tensors.

    Attributes:
        changes: the record of the last write to each row of the tensors; None if there is no
            record.
        check: function that raises an error if the memory of the tensors was released.
        packed: the records, and the leaves whose columns are views of them; None if no leaf is in
            records.
    """

    schema: Schema
    columns: tuple[Any, ...]
    changes: Changes | None = None
    check: Callable[[], None] | None = None
    packed: PackedLeaves | None = None

    def plain_columns(self) -> tuple[list[Any], Any]:
        """Return the columns as tensors, and the references of rows; see ``rebuilt_columns``."""
        places = {id(column): place for place, column in enumerate(self.columns)}
        roots = {
            id(column.source): place
            for place, column in enumerate(self.columns)
            if isinstance(column, ReferencedColumn) and column.kind == OBSERVATION
        }
        columns, references = list(self.columns), None
        for place, column in enumerate(self.columns):
            if not isinstance(column, ReferencedColumn):
                continue
            columns[place] = column.source
            if column.kind == NEXT:
                root = roots.get(id(column.source), places.get(id(column.source)))
                columns[place] = {"follows": root, "entries": column.values}
                references = column.references.direct(column.lanes)
        return columns, references

    def to_state(self, *, tracked: bool = False) -> dict[str, Any]:
        """Return plain values and tensors: the columns, or their offsets in ``records``.

        A save sets ``tracked``, so that it writes only the changed rows of tensors whose changes
        are recorded.
        """
        changes, packed = self.changes if tracked else None, self.packed
        columns, references = self.plain_columns()
        fields = {} if packed is None else packed.to_state(self.schema)
        for place, path in enumerate(self.schema.leaves):
            if path in fields:
                columns[place] = fields[path]
            elif changes is not None and isinstance(columns[place], torch.Tensor):
                columns[place] = TrackedTensor(columns[place], changes, path, self.check)
        state: dict[str, Any] = {"schema": self.schema.to_json(), "columns": columns}
        if references is not None:
            state["references"] = references
            moved = any(
                isinstance(c, ReferencedColumn) and c.references.moved for c in self.columns
            )
            if changes is not None and not moved:
                state["references"] = TrackedTensor(references, changes, REFERENCES_KEY, self.check)
        if packed is not None:
            records = packed.records
            if changes is not None:
                padding = packed.padding(self.schema)
                records = TrackedTensor(records, changes, RECORDS, self.check, padding)
            state["records"] = records
        return state

    @property
    def leaves(self) -> dict[Path, Any]:
        """The columns by path."""
        return dict(zip(self.schema.leaves, self.columns, strict=True))

    def rows(self, lanes: torch.Size) -> Iterator[Any]:
        """Yield copies of the rows one by one."""
        for row in range(len(self.columns[0])):
            leaves = {path: column[row].clone() for path, column in self.leaves.items()}
            yield build(self.schema.root, leaves, lanes, None)


@dataclass(frozen=True)
class Content:
    """The rows of a storage.

    Attributes:
        rows: number of rows (time slots, if there are lanes).
        lanes: sizes of the dimensions after time.
        groups: one group for tensor storages, or one group per layout for lists.
        order: int64 ``[rows]``, the group of each row, or -1 for plain rows; None if all rows are
            in one group. The rows of a group keep their order.
        plain: rows of lists that are neither tensors nor containers of tensors, in their order.
        check: function that raises an error if the rows are damaged, for storages with
            ``checks_before_load``. Such a storage calls the function after it has read the rows,
            and before it counts them as stored.
        ledger: the ledger with the write order of the rows; None if the rows are in write order.
    """

    rows: int
    lanes: torch.Size = field(default_factory=torch.Size)
    groups: tuple[Group, ...] = ()
    order: torch.Tensor | None = None
    plain: tuple[Any, ...] = ()
    check: Callable[[], None] | None = None
    ledger: Ledger | None = None

    def copied(self) -> Content:
        """Return the rows of a column storage, copied to separate memory."""
        groups = tuple(Group(group.schema, _copies(group.columns)) for group in self.groups)
        return replace(self, groups=groups)

    def single_group(self) -> Group:
        """Return the only group.

        Raises:
            SchemaError: the rows have several layouts, or there are no rows.
        """
        if len(self.groups) != 1 or self.plain:
            raise SchemaError(
                f"expected rows of one layout, got {len(self.groups)} layouts and "
                f"{len(self.plain)} rows that are not tensors; "
                "only ListStorage and LazyStackStorage hold mixed rows"
            )
        return self.groups[0]

    @classmethod
    def of_items(cls, items: list[Any]) -> Content:
        """Sort rows by layout.

        Tensors and containers of tensors go into groups; the other rows are plain.
        """
        numbers: dict[str, int] = {}
        groups: list[tuple[Node, list[dict[Path, torch.Tensor]]]] = []
        order: list[int] = []
        plain: list[Any] = []
        for item in items:
            if not (is_tensordict(item) or is_tensorclass(item) or isinstance(item, torch.Tensor)):
                plain.append(item)
                order.append(-1)
                continue
            try:
                rows = split_leaves(item, 1, single=True)
            except (TypeError, SchemaError):
                plain.append(item)  # the save encodes it, or refuses it with its position
                order.append(-1)
                continue
            # Groups are in the order in which their layouts first occur.
            number = numbers.setdefault(repr(rows.root), len(groups))
            if number == len(groups):
                groups.append((rows.root, []))
            groups[number][1].append(rows.leaves)
            order.append(number)
        mixed = bool(plain) or len(groups) > 1
        return cls(
            len(order),
            torch.Size(),
            tuple(_stacked(root, leaves) for root, leaves in groups),
            torch.tensor(order, dtype=torch.int64, device="cpu") if mixed else None,
            tuple(plain),
        )

    def items(self) -> list[Any]:
        """Return copies of the rows, one by one. Cost: one Python step per row."""
        streams = [iter(self.plain), *(group.rows(self.lanes) for group in self.groups)]
        order = [0] * self.rows if self.order is None else self.order.tolist()
        return [next(streams[number + 1]) for number in order]

    def to_state(self, *, tracked: bool = False) -> dict[str, Any]:
        """Return the content as plain values and tensors, without copies of the columns.

        A save sets ``tracked``. It then writes only the changed rows of columns whose changes are
        recorded.

        Raises:
            TypeError: a key of a pytree is neither a string nor an int.
        """
        for group in self.groups:
            for path in group.schema.leaves:
                if not all(isinstance(part, (str, int)) for part in path):
                    raise TypeError(f"expected keys that are strings or ints, got {path}")
        return {
            "rows": self.rows,
            "lanes": list(self.lanes),
            "groups": [group.to_state(tracked=tracked) for group in self.groups],
            "order": self.order,
            # Keys are positions, which an error names if a row cannot be saved.
            "plain": dict(zip(self._plain_rows(), self.plain, strict=True)),
        }

    def _plain_rows(self) -> list[int]:
        return [] if self.order is None else (self.order == -1).nonzero().flatten().tolist()

    @classmethod
    def from_state(cls, state: object) -> Content:
        """Rebuild the content from the result of ``to_state``.

        Raises:
            ValueError: an entry is missing or contradicts another entry; the error names it.
        """
        saved = decode_state(_SavedContent, state, "a storage's content")
        rows, lanes, order, plain = saved.rows, torch.Size(saved.lanes), saved.order, saved.plain
        groups = tuple(_group_from_state(group, lanes) for group in saved.groups)
        sizes = [len(plain), *(len(group.columns[0]) for group in groups)]
        if order is None:
            counts = [0, rows] if rows or groups else [0]
        elif isinstance(order, torch.Tensor) and order.shape == (rows,):
            known = bool(((order >= -1) & (order < len(groups))).all())
            counts = torch.bincount(order + 1, minlength=len(sizes)).tolist() if known else []
        else:
            raise ValueError(f"expected the group of each of {rows} rows, got {order!r}")
        if counts != sizes:
            raise ValueError(f"expected groups of {counts} rows, got {sizes}")
        content = cls(rows, lanes, groups, order, tuple(plain.values()))
        if content._plain_rows() != list(plain):
            raise ValueError(f"expected plain rows {content._plain_rows()}, got {list(plain)}")
        return content


def _copies(columns: tuple[Any, ...]) -> tuple[Any, ...]:
    made: dict[int, Any] = {}

    def copied(part: Any) -> Any:
        return made.setdefault(id(part), part.clone())

    return tuple(
        column.copied(copied(column.source), copied(column.references))
        if isinstance(column, ReferencedColumn)
        else copied(column)
        for column in columns
    )


def _group_from_state(saved: _SavedGroup, lanes: torch.Size) -> Group:
    schema = Schema.from_json(saved.schema)
    columns = list(saved.columns)
    if not columns or len(columns) != len(schema.leaves):
        raise ValueError(f"expected {len(schema.leaves)} columns, got {len(columns)}")
    offsets, records = {}, saved.records
    for place, path in enumerate(schema.leaves):
        column = columns[place]
        if isinstance(column, Mapping) and "field" in column:
            columns[place] = field_of(column, records)
            offsets[path] = column["field"]
    columns = rebuilt_columns(columns, saved.references, lanes)
    sizes = set()
    for (path, leaf), column in zip(schema.leaves.items(), columns, strict=True):
        if not isinstance(column, (torch.Tensor, RowChunks, ReferencedColumn)):
            raise ValueError(f"expected a tensor for {path}, got {type(column).__name__}")
        expected = [*lanes, *leaf.shape]
        if column.dtype != leaf.dtype or list(column.shape[1:]) != expected:
            raise ValueError(
                f"expected {leaf.dtype} rows of shape {expected} for {path}, "
                f"got {column.dtype} {list(column.shape[1:])}"
            )
        sizes.add(column.shape[0])
    if len(sizes) > 1:
        raise ValueError(f"expected columns of one length, got {sorted(sizes)}")
    packed = PackedLeaves(records, offsets) if offsets else None
    return Group(schema, tuple(columns), packed=packed)


def _stacked(root: Node, rows: list[dict[Path, torch.Tensor]]) -> Group:
    schema = Schema(root)
    return Group(schema, tuple(torch.cat([row[path] for row in rows]) for path in schema.leaves))
