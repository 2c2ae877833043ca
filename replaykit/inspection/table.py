"""Rows of any origin, read a block at a time: what statistics and plots are made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from replaykit.datasets.engine.statistics import Statistics

__all__ = ["Column", "Table", "TensorColumn", "blocks", "evenly", "measure"]

Array = npt.NDArray[Any]

_BLOCK_BYTES: Final = 1 << 20
_RUNS: Final = 64
"""Into how many runs of rows a sample is divided: reading single ones of a compressed file costs
as much as reading all of it."""


class Column(Protocol):
    """The values of one key."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one row."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""

    @property
    def rows(self) -> int:
        """How many there are."""

    def read(self, start: int, stop: int) -> Array:
        """Returns the rows ``start .. stop - 1``, ``[stop - start, *shape]``."""

    def episode(self, number: int, most: int) -> Array:
        """Returns rows of an episode, in order: all, or so many that lie evenly in it."""


@dataclass(frozen=True)
class TensorColumn:
    """A column over a tensor, or over what gives tensors for slices and indices.

    Attributes:
        values: ``[N, *shape]``.
        rows_of: the rows of an episode by its number, int64 ``[n]``.
        lanes: how many of the dimensions are those of rows, as one is.
    """

    values: Any
    rows_of: Callable[[int], Array]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: int
    lanes: tuple[int, ...] = ()

    def read(self, start: int, stop: int) -> Array:
        width = math.prod(self.lanes)
        if width == 1:
            return _numpy(self.values[start:stop]).reshape(-1, *self.shape)
        if not width:
            return np.empty((0, *self.shape), self.dtype)
        first, last = start // width, -(-stop // width)
        block = _numpy(self.values[first:last]).reshape(-1, *self.shape)
        return block[start - first * width : stop - first * width]

    def episode(self, number: int, most: int) -> Array:
        rows = evenly(self.rows_of(number), most)
        width = math.prod(self.lanes)
        if width == 1:
            return _numpy(self.values[torch.from_numpy(rows)]).reshape(-1, *self.shape)
        found = [self.read(int(row), int(row) + 1) for row in rows]
        return np.concatenate(found) if found else np.empty((0, *self.shape), self.dtype)


def evenly(values: Array, most: int) -> Array:
    """Returns all values, or so many of them that lie evenly."""
    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).round().astype(np.int64)]


def _numpy(tensor: torch.Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return tensor.detach().cpu().numpy()


@dataclass(frozen=True)
class Table:
    """Columns and what they mean.

    Attributes:
        columns: by key, as in `KeyFacts`.
        episodes: how many there are.
        actions, rewards: the keys that hold them.
        priorities: of rows that lie evenly, as they were set, ``[K]``; ``None`` where there are
            none.
        prioritized: how many rows have one.
    """

    columns: Mapping[str, Column] = field(default_factory=dict)
    episodes: int = 0
    actions: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    priorities: Array | None = None
    prioritized: int = 0

    def images(self) -> list[str]:
        """Returns the keys of images: uint8 of ``[H, W]``, ``[H, W, C]`` or ``[C, H, W]``.

        Those of the states that rows arrive at are the same ones, and are left out.
        """
        return [
            key
            for key, column in self.columns.items()
            if column.dtype == np.uint8
            and not any(part.startswith("next") for part in key.split("/"))
            and is_image(column.shape)
        ]


def is_image(shape: Sequence[int]) -> bool:
    """Whether uint8 of such a shape is taken for an image."""
    if len(shape) == 2:
        return min(shape) >= 8
    if len(shape) != 3 or sorted(shape)[1] < 8:
        return False
    return shape[-1] in (1, 3, 4) or shape[0] in (1, 3, 4)


def blocks(column: Column, most_bytes: int | None) -> Iterator[Array]:
    """Yields all rows of a column in blocks, or of a large one those that lie evenly in it.

    Args:
        most_bytes: how much is read at most; ``None``: all. Memory: about 1 MiB, or one row.
    """
    row_bytes = max(1, math.prod(column.shape) * column.dtype.itemsize)
    step = max(1, _BLOCK_BYTES // row_bytes)
    if most_bytes is None or column.rows * row_bytes <= most_bytes:
        for start in range(0, column.rows, step):
            yield column.read(start, min(start + step, column.rows))
        return
    wanted = max(1, most_bytes // row_bytes)
    runs = min(_RUNS, wanted)
    length = max(1, wanted // runs)
    for start in np.linspace(0, column.rows - length, runs).astype(np.int64).tolist():
        for begin in range(start, start + length, step):
            yield column.read(begin, min(begin + step, start + length))


def measure(column: Column, most_bytes: int | None) -> tuple[dict[str, Any], int]:
    """Returns the statistics of a column, and of how many rows they are; see `blocks`."""
    statistics, rows = Statistics(), 0
    for block in blocks(column, most_bytes):
        statistics.add(block)
        rows += len(block)
    return statistics.to_json(), rows
