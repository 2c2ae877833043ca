"""A column that is another one, a row later: how observations stored once travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.checkpoint import MappedRows, RowChunks
from replaykit.storages.carrying import carried
from replaykit.storages.number_sets import rising_below

__all__ = ["FollowedColumn", "plain_column", "rebuilt_column"]

Column = torch.Tensor | RowChunks


class FollowedColumn:
    """Rows ``[n, *lanes, *F]`` of which each is another row of ``source``, or has its own value.

    Looks enough like a tensor to be read: ``len``, ``shape``, ``dtype``, ``device``, and indexing
    by int, slice (forward) and int64 ``[K]``, which copies just those rows. The other row is
    the next one, after the last the first, or lies as far away as ``steps`` say.

    Args:
        source: the column of which this one is the next row, ``[n, *lanes, *F]``.
        elements: those that have their own value, counted through rows and lanes; rising int64
            ``[K]``.
        values: their values, ``[K, *F]``.
        lanes: how many dimensions of a row are lanes.
        steps: int32 or int64 ``[n]``, without lanes; ``0 <= row + steps[row] < n``.

    Elements and steps that lie in files yet, MappedRows, are not looked at before a row is asked
    for, which raises ValueError where they are others.

    Raises:
        ValueError: the parts do not fit each other.
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
                f"expected values {source.dtype} {[len(elements), *self._feature]} beside a "
                f"column {list(self.shape)}, got {values.dtype} {list(values.shape)}"
            )

    def over(self, source: Column) -> FollowedColumn:
        """The same over another column, or a copy of the one that it has."""
        lanes = self.shape[1 : len(self.shape) - len(self._feature)]
        return FollowedColumn(source, self.elements, self.values, lanes, self.steps)

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
    """Returns a column as it is, and one that follows another as plain values and tensors."""
    if not isinstance(column, FollowedColumn):
        return column
    place = next(i for i, other in enumerate(columns) if other is column.source)
    if column.steps is None:
        return {"follows": place, "elements": column.elements, "values": column.values}
    # Under other names: who does not know of steps refuses them.
    return {
        "follows": place, "own": column.elements, "own_values": column.values,
        "steps": column.steps,
    }  # fmt: skip


def rebuilt_column(record: Any, columns: list[Any], lanes: torch.Size) -> Any:
    """Puts together what ``plain_column`` took apart.

    Raises:
        ValueError: it is not what that gave.
    """
    if not isinstance(record, Mapping):
        return record
    names = ("own", "own_values") if "steps" in record else ("elements", "values")
    place, elements, values = (record.get(name) for name in ("follows", *names))
    source = columns[place] if type(place) is int and 0 <= place < len(columns) else None
    if not isinstance(source, (torch.Tensor, RowChunks)):
        raise ValueError(f"expected the place of a column that another one follows, got {place!r}")
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
        raise ValueError(f"expected the values beside a column, got {type(values).__name__}")
    steps = _checked_steps(record["steps"], source.shape[0], lanes) if "steps" in record else None
    return FollowedColumn(source, elements, values, lanes, steps)


def _checked_steps(steps: Any, rows: int, lanes: torch.Size) -> torch.Tensor | MappedRows:
    if isinstance(steps, RowChunks) and not isinstance(steps, MappedRows):
        steps = steps[:]
    if not (
        isinstance(steps, (torch.Tensor, MappedRows))
        and steps.dtype in (torch.int32, torch.int64)
        and steps.shape == (rows,)
        and not lanes
    ):
        raise ValueError(f"expected how far away {rows} rows lie that follow others, got {steps!r}")
    return steps if isinstance(steps, MappedRows) else _inside(steps)


def _inside(steps: torch.Tensor) -> torch.Tensor:
    rows = len(steps)
    after = arange(rows).to(steps.device) + steps
    if rows and not 0 <= int(after.min()) <= int(after.max()) < rows:
        raise ValueError(f"expected rows in [0, {rows}) after others, got {after}")
    return steps
