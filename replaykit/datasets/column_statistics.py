"""Compute statistics of columns over the chosen episodes of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from replaykit.storages.column_storage import ColumnStorage
from replaykit.structure import Path
from replaykit.ted import format_key, unravel

__all__ = ["column_statistics"]

Array = np.ndarray[Any, Any]

_BLOCK = 8 << 20
"""Bytes of the float64 copy of a block of rows."""

_SORTED = 128 << 20
"""Bytes of the columns that are sorted at once for quantiles."""

_MASK: Path = ("mask",)


def column_statistics(
    storage: ColumnStorage, keys: Sequence[Any] | None, quantiles: Sequence[float]
) -> TensorDict:
    """Return statistics of columns, as ``CorpusExperienceReplay.statistics`` describes.

    Raises:
        KeyError: a key is not stored.
        ValueError: a quantile is outside [0, 1].
        TypeError: a requested column is complex.
    """
    levels = np.array([float(level) for level in quantiles])
    if not ((levels >= 0) & (levels <= 1)).all():
        raise ValueError(f"expected quantiles as numbers from 0 to 1, got {list(quantiles)}")
    leaves = storage.require().schema.leaves
    paths = list(leaves) if keys is None else [unravel(key) for key in keys]
    for path in paths:
        if path not in leaves:
            raise KeyError(f"no column {format_key(path)} in the data set")
    found = TensorDict({}, [])
    for path in paths:
        if leaves[path].dtype.is_complex:
            if keys is not None:
                raise TypeError(f"key {format_key(path)}: expected real numbers")
            continue
        if not leaves[path].shape.numel():
            continue
        found.set(path, TensorDict(_of_column(_Column(storage, path), levels), []))
    return found


class _Column:
    """The rows of a column that are no padding, in blocks.

    Attributes:
        shape: shape of a row.
        size: numbers of a row.
    """

    def __init__(self, storage: ColumnStorage, path: Path) -> None:
        self._columns, self._path, self._count = storage.require(), path, len(storage)
        leaves = self._columns.schema.leaves
        # In split data sets, a stored row is a padded episode.
        self._padded = storage.ndim == 1 and _MASK in leaves and path != _MASK
        shape = leaves[path].shape
        self.shape = shape[1:] if self._padded else shape
        self.size = self.shape.numel()
        self._step = max(1, _BLOCK // (8 * shape.numel()))

    def blocks(self) -> Iterator[Array]:
        """Yield the rows in order, ``[N, size]``."""
        for start in range(0, self._count, self._step):
            rows = torch.arange(start, min(start + self._step, self._count))
            paths = [self._path, _MASK] if self._padded else [self._path]
            found = self._columns.gather_keys(paths, rows)
            values = found[self._path]
            if self._padded:
                values = values[found[_MASK].reshape(values.shape[:2])]
            if values.dtype is torch.bfloat16:
                values = values.float()
            yield values.reshape(len(values), self.size).numpy()


def _of_column(column: _Column, levels: Array) -> dict[str, torch.Tensor]:
    count = np.zeros(column.size, np.int64)
    nan, mean, squares = count.copy(), np.zeros(column.size), np.zeros(column.size)
    least: Any = None
    most: Any = None
    for block in column.blocks():
        if not len(block):
            continue
        low, high = np.fmin.reduce(block, 0), np.fmax.reduce(block, 0)
        least, most = (low, high) if least is None else (np.fmin(least, low), np.fmax(most, high))
        real = ~np.isnan(block)
        here = real.sum(0)
        nan += len(block) - here
        values = np.where(real, block, 0).astype(np.float64)
        center = values.sum(0) / np.maximum(here, 1)
        apart, total = center - mean, np.maximum(count + here, 1)
        squares += (np.where(real, values - center, 0) ** 2).sum(0)
        squares += apart**2 * (count * here / total)
        mean += apart * (here / total)
        count += here
    known = np.where(count > 0, 1.0, np.nan)
    made = {
        "mean": mean * known,
        "std": np.sqrt(squares / np.maximum(count, 1)) * known,
        "min": least,
        "max": most,
        "nan": nan,
    }
    if len(levels):
        made["quantiles"] = _quantiles(column, levels, int(count.max()))
    return {
        name: torch.from_numpy(value.reshape((*value.shape[:-1], *column.shape)))
        for name, value in made.items()
    }


def _quantiles(column: _Column, levels: Array, rows: int) -> Array:
    """Return quantiles ``[Q, size]``, interpolated linearly between two numbers."""
    first = next(column.blocks())
    if first.dtype in (np.uint8, np.bool_):
        return _of_counts(_counted(column.blocks(), column.size), levels)
    width = max(1, _SORTED // (8 * max(rows, 1)))
    made = []
    for start in range(0, column.size, width):
        part = np.concatenate([block[:, start : start + width] for block in column.blocks()])
        quantile: Callable[..., Any] = np.quantile
        if part.dtype.kind == "f":
            part = part.astype(np.float64)
            quantile = np.nanquantile if np.isnan(part).any() else np.quantile
        made.append(quantile(part, levels, axis=0))
    return np.concatenate(made, 1)


def _counted(blocks: Iterator[Array], size: int) -> Array:
    """Return how often each byte occurs in each number of a row, int64 ``[size, 256]``."""
    counts = np.zeros(size * 256, np.int64)
    for block in blocks:
        at = block.astype(np.int64) + 256 * np.arange(size)
        counts += np.bincount(at.reshape(-1), minlength=size * 256)
    return counts.reshape(size, 256)


def _of_counts(counts: Array, levels: Array) -> Array:
    ends = counts.cumsum(1)
    places = levels * (ends[0, -1] - 1)
    low = np.floor(places)
    below, above = (
        np.stack([(ends > place).argmax(1) for place in part]).astype(np.float64)
        for part in (low, np.ceil(places))
    )
    return below + (above - below) * (places - low)[:, None]
