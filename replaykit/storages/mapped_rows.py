"""Rows of a checkpoint where they lie: columns over its files, copy-on-write."""

from __future__ import annotations

from typing import Any, cast

import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows
from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.content import Content, Group
from replaykit.storages.followed import FollowedColumn
from replaykit.storages.once import OnceColumns
from replaykit.storages.once_streams import StreamColumns
from replaykit.storages.pairs import Pairs
from replaykit.storages.records import plan_records
from replaykit.structure import Path

__all__ = ["adopt_mapped", "mapped_rows", "why_not_mapped"]

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
