"""Represent the rows of a storage as columns, for checkpoints and transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import is_tensorclass

from replaykit._compat import TensorDict, TensorDictBase, arange, is_non_tensor, is_tensordict
from replaykit.checkpoint import MappedRows, RowChunks
from replaykit.checkpoint.dirty_chunks import RECORDS, Changes, TrackedTensor
from replaykit.declared import Count, Positive, decode_state
from replaykit.errors import SchemaError
from replaykit.schema import Schema, split_leaves
from replaykit.storages.indexing import rising_below
from replaykit.storages.ledger import Ledger
from replaykit.storages.records import PackedLeaves, field_of
from replaykit.storages.tensor_bytes import carried
from replaykit.structure import Node, Path, build

__all__ = [
    "Content",
    "Group",
    "LinkedColumn",
    "from_plain",
    "plain_column",
    "rebuilt_column",
    "to_plain",
]

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


Column = torch.Tensor | RowChunks


class LinkedColumn:
    """A column that takes each row from a row of ``source`` or from separate values.

    It has the shape of ``source``. The row of ``source`` is by default the next row in the ring.
    With ``steps``, it is the row at the given distance. The column can be read like a tensor: it
    has ``len``, ``shape``, ``dtype`` and ``device``. An index is an int, a forward slice or int64
    ``[K]``, and copies only its rows.

    Args:
        source: the column from which rows are taken, ``[n, *lanes, *F]``.
        elements: the elements (``row * lanes + lane``) that have separate values, rising int64
            ``[K]``.
        values: the values of these elements, ``[K, *F]``.
        lanes: sizes of the dimensions after time.
        steps: distances to the other rows, int32 or int64 ``[n]``, with ``0 <= row + steps[row] <
            n``. They are allowed only without lanes.

    Elements and steps that are MappedRows, in files, are read and checked only when rows are read.
    If they are invalid, that read raises ValueError.

    Raises:
        ValueError: the arguments contradict each other.
    """

    def __init__(
        self,
        source: Column,
        elements: torch.Tensor | MappedRows,
        values: Column,
        lanes: torch.Size,
        steps: torch.Tensor | MappedRows | None = None,
    ) -> None:
        self.steps = steps
        self.source = source
        self.elements = elements
        self.values = values
        self.shape = torch.Size(source.shape)
        self.dtype = source.dtype
        self.device = source.device
        self._cells = lanes.numel()
        self._feature = self.shape[1 + len(lanes) :]
        if (
            self.shape[1 : 1 + len(lanes)] != lanes
            or values.dtype != source.dtype
            or tuple(values.shape) != (len(elements), *self._feature)
        ):
            raise ValueError(
                f"expected overflow values {source.dtype} {[len(elements), *self._feature]} for a "
                f"column {list(self.shape)}, got {values.dtype} {list(values.shape)}"
            )

    def over(self, source: Column) -> LinkedColumn:
        """Return the same column over another source, such as a copy of this source."""
        lanes = self.shape[1 : len(self.shape) - len(self._feature)]
        return LinkedColumn(source, self.elements, self.values, lanes, self.steps)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, int):
            return self._rows(torch.tensor([index % len(self)], device="cpu"))[0]
        if isinstance(index, slice):
            return self._rows(arange(*index.indices(len(self))))
        return self._rows(index)

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        elements, steps = self.elements, self.steps
        if isinstance(elements, MappedRows):
            elements = rising_below(len(self) * self._cells, elements[:])
        if isinstance(steps, MappedRows):
            steps = _inside(steps[:])
        return elements, steps

    def _rows(self, index: torch.Tensor) -> torch.Tensor:
        index = index.to(self.elements.device)
        if not len(index):
            shape = (0, *self.shape[1:])
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        elements, steps = self._tables()
        after = (index + 1) % len(self) if steps is None else index + steps[index]
        source = self.source
        found = source[after] if isinstance(source, RowChunks) else carried(source)[after]
        if len(elements):
            cells = arange(self._cells).to(index.device)
            wanted = (index[:, None] * self._cells + cells).reshape(-1)
            place = torch.searchsorted(elements, wanted).clamp_(max=len(elements) - 1)
            at = (elements[place] == wanted).nonzero().flatten()
            values = self.values
            rows = place[at]
            own = values[rows] if isinstance(values, RowChunks) else carried(values)[rows]
            flat = carried(found).view(len(wanted), *self._feature)
            flat.index_copy_(0, at, carried(own))
        return found.view(self.dtype)


def plain_column(column: Any, columns: tuple[Any, ...]) -> Any:
    """Return a column unchanged, or a LinkedColumn as plain values and tensors."""
    if not isinstance(column, LinkedColumn):
        return column
    place = next(i for i, other in enumerate(columns) if other is column.source)
    if column.steps is None:
        return {"follows": place, "elements": column.elements, "values": column.values}
    # The names differ, so that a reader without support for steps refuses the column.
    return {
        "follows": place, "own": column.elements, "own_values": column.values,
        "steps": column.steps,
    }  # fmt: skip


def rebuilt_column(record: Any, columns: list[Any], lanes: torch.Size) -> Any:
    """Rebuild a column from the result of ``plain_column``.

    Raises:
        ValueError: the record is not such a result.
    """
    if not isinstance(record, Mapping):
        return record
    names = ("own", "own_values") if "steps" in record else ("elements", "values")
    place, elements, values = (record.get(name) for name in ("follows", *names))
    source = columns[place] if type(place) is int and 0 <= place < len(columns) else None
    if not isinstance(source, (torch.Tensor, RowChunks)):
        raise ValueError(f"expected the number of a column that another one follows, got {place!r}")
    stop = source.shape[0] * lanes.numel()
    if isinstance(elements, RowChunks) and not isinstance(elements, MappedRows):
        elements = elements[:]
    if not (
        isinstance(elements, (torch.Tensor, MappedRows))
        and elements.dtype == torch.int64
        and len(elements.shape) == 1
        and len(elements) <= stop
    ):
        raise ValueError(f"expected rising elements of a column, got {elements!r}")
    if isinstance(elements, torch.Tensor):
        rising_below(stop, elements)
    if not isinstance(values, (torch.Tensor, RowChunks)):
        raise ValueError(f"expected the overflow values of a column, got {type(values).__name__}")
    steps = _checked_steps(record["steps"], source.shape[0], lanes) if "steps" in record else None
    return LinkedColumn(source, elements, values, lanes, steps)


def _checked_steps(steps: Any, rows: int, lanes: torch.Size) -> torch.Tensor | MappedRows:
    if isinstance(steps, RowChunks) and not isinstance(steps, MappedRows):
        steps = steps[:]
    if not (
        isinstance(steps, (torch.Tensor, MappedRows))
        and steps.dtype in (torch.int32, torch.int64)
        and steps.shape == (rows,)
        and not lanes
    ):
        raise ValueError(f"expected the distances of {rows} rows to their next ones, got {steps!r}")
    return steps if isinstance(steps, MappedRows) else _inside(steps)


def _inside(steps: torch.Tensor) -> torch.Tensor:
    rows = len(steps)
    after = arange(rows).to(steps.device) + steps
    if rows and not 0 <= int(after.min()) <= int(after.max()) < rows:
        raise ValueError(f"expected next rows in [0, {rows}), got {after}")
    return steps


@dataclass(frozen=True)
class _SavedGroup:
    schema: Any
    columns: list[Any]
    records: Any = None


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

    Columns are ``[n, *lanes, *F]``. A column is a tensor, rows in files, or a LinkedColumn. All
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

    def plain_columns(self) -> list[Any]:
        """Return the columns as tensors, and each LinkedColumn as a mapping of tensors."""
        return [plain_column(column, self.columns) for column in self.columns]

    def to_state(self, *, tracked: bool = False) -> dict[str, Any]:
        """Return plain values and tensors: the columns, or their offsets in ``records``.

        A save sets ``tracked``, so that it writes only the changed rows of tensors whose changes
        are recorded.
        """
        changes, packed = self.changes if tracked else None, self.packed
        columns = self.plain_columns()
        fields = {} if packed is None else packed.to_state(self.schema)
        for place, path in enumerate(self.schema.leaves):
            if path in fields:
                columns[place] = fields[path]
            elif changes is not None and isinstance(columns[place], torch.Tensor):
                columns[place] = TrackedTensor(columns[place], changes, path, self.check)
        state = {"schema": self.schema.to_json(), "columns": columns}
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
    made = {id(c): c.clone() for c in columns if not isinstance(c, LinkedColumn)}
    return tuple(
        column.over(made[id(column.source)])
        if isinstance(column, LinkedColumn)
        else made[id(column)]
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
    columns = [rebuilt_column(column, columns, lanes) for column in columns]
    sizes = set()
    for (path, leaf), column in zip(schema.leaves.items(), columns, strict=True):
        if not isinstance(column, (torch.Tensor, RowChunks, LinkedColumn)):
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
