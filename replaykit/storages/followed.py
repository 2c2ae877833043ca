"""A column that is another one, a row later: how observations stored once travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from replaykit._compat import arange
from replaykit.checkpoint import RowChunks
from replaykit.storages.carrying import carried

__all__ = ["FollowedColumn", "plain_column", "rebuilt_column"]

Column = torch.Tensor | RowChunks


class FollowedColumn:
    """Rows ``[n, *lanes, *F]`` of which each is the next row of ``source``, or has its own value.

    Looks enough like a tensor to be read: ``len``, ``shape``, ``dtype``, ``device``, and indexing
    by int, slice (forward) and int64 ``[K]``, which copies just those rows. After the last row
    comes the first one.

    Args:
        source: the column of which this one is the next row, ``[n, *lanes, *F]``.
        elements: those that have their own value, counted through rows and lanes; rising int64
            ``[K]``.
        values: their values, ``[K, *F]``.
        lanes: how many dimensions of a row are lanes.

    Raises:
        ValueError: the parts do not fit each other.
    """

    def __init__(
        self, source: Column, elements: torch.Tensor, values: Column, lanes: torch.Size
    ) -> None:
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

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, int):
            return self._rows(torch.tensor([index % len(self)], device="cpu"))[0]
        if isinstance(index, slice):
            return self._rows(arange(*index.indices(len(self))))
        return self._rows(index)

    def _rows(self, index: torch.Tensor) -> torch.Tensor:
        index = index.to(self.elements.device)
        if not len(index):
            shape = (0, *self.shape[1:])
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        after = (index + 1) % len(self)
        source = self.source
        found = source[after] if isinstance(source, RowChunks) else carried(source)[after]
        if len(self.elements):
            cells = arange(self._cells).to(index.device)
            wanted = (index[:, None] * self._cells + cells).reshape(-1)
            place = torch.searchsorted(self.elements, wanted).clamp_(max=len(self.elements) - 1)
            at = (self.elements[place] == wanted).nonzero().flatten()
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
    return {"follows": place, "elements": column.elements, "values": column.values}


def rebuilt_column(record: Any, columns: list[Any], lanes: torch.Size) -> Any:
    """Puts together what ``plain_column`` took apart.

    Raises:
        ValueError: it is not what that gave.
    """
    if not isinstance(record, Mapping):
        return record
    place, elements, values = (record.get(name) for name in ("follows", "elements", "values"))
    source = columns[place] if type(place) is int and 0 <= place < len(columns) else None
    if not isinstance(source, (torch.Tensor, RowChunks)):
        raise ValueError(f"expected the place of a column that another one follows, got {place!r}")
    if isinstance(elements, RowChunks):
        elements = elements[:]
    if not (
        isinstance(elements, torch.Tensor)
        and elements.dtype == torch.int64
        and elements.ndim == 1
        and bool((elements.diff() > 0).all())
        and (not len(elements) or int(elements[0]) >= 0)
        and (not len(elements) or int(elements[-1]) < source.shape[0] * lanes.numel())
    ):
        raise ValueError(f"expected rising elements of a column, got {elements!r}")
    if not isinstance(values, (torch.Tensor, RowChunks)):
        raise ValueError(f"expected the values beside a column, got {type(values).__name__}")
    return FollowedColumn(source, elements, values, lanes)
