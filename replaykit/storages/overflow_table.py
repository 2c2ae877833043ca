"""Allocate memory for the observations that exceed one for each row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from replaykit.schema import Schema
from replaykit.storages.columns import Columns
from replaykit.storages.memory import allocate
from replaykit.storages.records import plan_records
from replaykit.storages.tensor_bytes import carried

Grow = Callable[[Schema, int, Columns | None], Columns]
"""``grow(schema, entries, table)`` returns columns with ``entries`` slots and the table's
values."""

_FIRST_ENTRIES = 64


def grow_in_memory(device: torch.device) -> Grow:
    """Return a function that copies a table into a larger one on a device."""

    def grow(schema: Schema, entries: int, table: Columns | None) -> Columns:
        layout = plan_records(schema)
        tensors, records = allocate(schema, entries, torch.Size(), device, layout)
        grown = Columns(schema, tensors, 1, layout=layout, records=records)
        if table is not None:
            for path, column in table.tensors.items():
                carried(grown[path])[: table.slots] = carried(column)
        return grown

    return grow


def grown_entries(known: int, more: int, elements: int) -> int:
    """Return the size of a table that doubles, and never has more entries than elements."""
    return min(max(_FIRST_ENTRIES, 2 * known, known + more), elements)
