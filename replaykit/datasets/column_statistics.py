"""Statistics of columns: in one pass, and of chosen episodes with quantiles."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from replaykit.native import MOST_MOMENTS, moments
from replaykit.storages.column_storage import ColumnStorage
from replaykit.structure import Path
from replaykit.ted import format_key, no_key, unravel
from replaykit.transforms.batch_values import as_keys

Array = np.ndarray[Any, Any]

_BLOCK = 8 << 20
"""Bytes of the float64 copy of a block of rows."""

_COUNTS = 128 << 20
"""Bytes of the counts of digits that the passes for quantiles hold at once."""

_MASK: Path = ("mask",)


def column_statistics(
    storage: ColumnStorage,
    keys: Sequence[Any] | None,
    quantiles: Sequence[float],
    channels: Mapping[Any, int],
    without: Collection[Path] = (),
) -> TensorDict:
    """Return statistics of columns, as ``CorpusExperienceReplay.statistics`` describes.

    Raises:
        KeyError: a key is not stored.
        ValueError: a quantile is outside [0, 1], or a dimension of channels does not exist.
        TypeError: a requested column is complex, holds encoded images, or has rows without numbers.
            Or ``keys`` is not a list, or ``channels`` not a mapping.
    """
    levels = np.array([float(level) for level in quantiles])
    if not ((levels >= 0) & (levels <= 1)).all():
        raise ValueError(f"expected quantiles as numbers from 0 to 1, got {list(quantiles)}")
    leaves = storage.require().schema.leaves
    every = [path for path in leaves if path not in without]
    paths = every if keys is None else as_keys(keys)
    if not isinstance(channels, Mapping):
        raise TypeError(f"channels: expected a mapping of keys to dimensions, got {channels!r}")
    dims = {unravel(key): dim for key, dim in channels.items()}
    for path in [*paths, *dims]:
        if path not in leaves:
            raise no_key(path, leaves, "column")
    found = TensorDict({}, [])
    for path in paths:
        leaf = leaves[path]
        if path in without or leaf.dtype.is_complex or not leaf.shape.numel():
            if keys is not None:
                what = "encoded images" if path in without else f"{leaf.dtype} {list(leaf.shape)}"
                raise TypeError(f"key {format_key(path)}: expected real numbers, got {what}")
            continue
        found.set(path, TensorDict(_of_column(_Column(storage, path, dims.get(path)), levels), []))
    return found


class _Column:
    """The rows of a column that are no padding, in blocks.

    Args:
        channel: the dimension of a row whose numbers have separate statistics; None for all
            dimensions.

    Attributes:
        shape: shape of a statistic.
        size: numbers of a statistic.
    """

    def __init__(self, storage: ColumnStorage, path: Path, channel: int | None) -> None:
        self._columns, self._path, self._count = storage.require(), path, len(storage)
        leaves = self._columns.schema.leaves
        # In split data sets, a stored row is a padded episode.
        self._padded = storage.ndim == 1 and _MASK in leaves and path != _MASK
        shape = leaves[path].shape
        self.shape = shape[1:] if self._padded else shape
        self._channel = channel
        if channel is not None:
            row, self._channel = self.shape, channel % max(1, len(self.shape))
            if not -len(row) <= channel < len(row):
                raise ValueError(
                    f"channels: expected a dimension of rows {list(row)} for "
                    f"{format_key(path)}, got {channel}"
                )
            sizes = (n if dim == self._channel else 1 for dim, n in enumerate(row))
            self.shape = torch.Size(sizes)
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
            if self._channel is not None:
                values = values.movedim(1 + self._channel, -1)
            yield values.reshape(-1, self.size).numpy()


def _of_column(column: _Column, levels: Array) -> dict[str, torch.Tensor]:
    count = np.zeros(column.size, np.int64)
    nan, mean, squares = count.copy(), np.zeros(column.size), np.zeros(column.size)
    least: Any = None
    most: Any = None
    rows = 0
    for block in column.blocks():
        if not len(block):
            continue
        rows += len(block)
        low, high = np.fmin.reduce(block, 0), np.fmax.reduce(block, 0)
        least, most = (low, high) if least is None else (np.fmin(least, low), np.fmax(most, high))
        finite = np.isfinite(block)
        here = finite.sum(0)
        nan += np.isnan(block).sum(0)
        values = np.where(finite, block, 0).astype(np.float64)
        center = values.sum(0) / np.maximum(here, 1)
        apart, total = center - mean, np.maximum(count + here, 1)
        squares += (np.where(finite, values - center, 0) ** 2).sum(0)
        squares += apart**2 * (count * here / total)
        mean += apart * (here / total)
        count += here
    infinite = np.isinf(least) | np.isinf(most)
    with np.errstate(invalid="ignore"):  # the mean of both infinities is NaN
        ends = least.astype(np.float64) + most
    made = {
        "mean": np.where(infinite, ends, np.where(count > 0, mean, np.nan)),
        "std": np.where(infinite | (count == 0), np.nan, np.sqrt(squares / np.maximum(count, 1))),
        "min": least,
        "max": most,
        "nan": nan,
    }
    if len(levels):
        made["quantiles"] = _quantiles(column, levels, rows - nan)
    return {
        name: torch.from_numpy(value.reshape((*value.shape[:-1], *column.shape)))
        for name, value in made.items()
    }


def _quantiles(column: _Column, levels: Array, count: Array) -> Array:
    """Return quantiles ``[Q, size]`` of ``count`` numbers, interpolated as NumPy does."""
    places = levels[:, None] * np.maximum(count - 1, 0)
    low = np.floor(places)
    step = max(1, _COUNTS // (8 * 256 * 2 * len(levels)))
    made = []
    for start in range(0, column.size, step):
        part = slice(start, start + step)
        ranks = np.concatenate([low[:, part], np.ceil(places[:, part])]).astype(np.int64)
        made.append(_of_ranks(column, part, ranks))
    below, above = np.split(np.concatenate(made, 1).astype(np.float64), 2)
    share = places - low
    with np.errstate(invalid="ignore"):  # between equal infinities
        apart = above - below
        found = np.where(share < 0.5, below + apart * share, above - apart * (1 - share))
    return np.where(count > 0, np.where(below == above, below, found), np.nan)


def _of_ranks(column: _Column, part: slice, ranks: Array) -> Array:
    """Return the numbers of some ranks ``[R, width]`` in each sorted column; NaNs are last.

    Each pass counts the next byte among the numbers that begin with the bytes found so far.
    """
    found = np.zeros(ranks.shape, np.uint64)
    ranks, width = ranks.copy(), ranks.shape[1]
    offsets = 256 * np.arange(width)
    dtype = next(column.blocks()).dtype
    for shift in range(8 * dtype.itemsize - 8, -1, -8):
        known = found[:1] if not found.any() else found  # at first, all ranks need one count
        counts = np.zeros((len(known), width * 256), np.int64)
        for block in column.blocks():
            bits = _sortable(block[:, part])
            rest = bits >> np.array(shift, bits.dtype)
            place = (rest & np.array(255, bits.dtype)).astype(np.int64) + offsets
            begins = rest // 256 if dtype.itemsize > 1 else np.zeros_like(rest)
            for start, own in zip(known.astype(bits.dtype), counts, strict=True):
                own += np.bincount(place[begins == start], minlength=width * 256)
        ends = counts.reshape(len(known), width, 256).cumsum(2)
        ends = np.broadcast_to(ends, (len(ranks), width, 256))
        byte = (ends > ranks[:, :, None]).argmax(2)
        before = np.take_along_axis(ends, np.maximum(byte - 1, 0)[:, :, None], 2)[:, :, 0]
        ranks -= np.where(byte > 0, before, 0)
        found = (found << np.uint64(8)) | byte.astype(np.uint64)
    return _unsorted(found, dtype)


def _sortable(values: Array) -> Array:
    """Return unsigned integers in the order of the values, with NaNs at the end."""
    size = values.dtype.itemsize
    found: Array = np.ascontiguousarray(values).view(f"u{size}")
    sign = np.array(1 << (8 * size - 1), found.dtype)
    if values.dtype.kind == "f":
        found = np.where(found & sign, ~found, found | sign)
        found[np.isnan(values)] = np.iinfo(found.dtype).max
    elif values.dtype.kind == "i":
        found = found ^ sign
    return found


def _unsorted(bits: Array, dtype: Any) -> Array:
    """Return the values of ``_sortable`` integers, given as uint64."""
    found = bits.astype(f"u{dtype.itemsize}")
    sign = np.array(1 << (8 * dtype.itemsize - 1), found.dtype)
    if dtype.kind == "f":
        found = np.where(found & sign, found ^ sign, ~found)
    elif dtype.kind == "i":
        found = found ^ sign
    return found.view(dtype)


_SCALE: Final = 64
"""The exponent of ``2 ** -64``, by which numbers are scaled if a sum would overflow."""


@dataclass
class Statistics:
    """Minimum, maximum, mean, standard deviation and number of NaNs of a column.

    NaNs are counted separately, and infinities count as numbers. For complex numbers, only the NaNs
    are counted. The mean and the sum of squared distances from the mean are updated block by block.
    Therefore these values neither overflow nor lose digits if the numbers are far from zero. Only
    the last digits of the result depend on the blocks. The blocks do not depend on the number of
    workers.

    Example:
        >>> import numpy as np
        >>> from replaykit.datasets.column_statistics import Statistics
        >>> found = Statistics()
        >>> found.add(np.array([1.0, np.nan, 3.0]))
        >>> found.to_json()
        {'min': 1.0, 'max': 3.0, 'mean': 2.0, 'std': 1.0, 'nan': 1}
    """

    count: int = 0
    nan: int = 0
    least: Any = None
    largest: Any = None
    mean: float = 0.0
    squares: float = 0.0

    def add(self, block: npt.NDArray[Any]) -> None:
        """Add the numbers of a block, in O(values) time and less than 2 MiB of memory."""
        flat = block.reshape(-1)
        for start in range(0, flat.size, MOST_MOMENTS):
            part = flat[start : start + MOST_MOMENTS]
            if part.dtype.kind == "c":
                self.nan += int(np.count_nonzero(np.isnan(part)))
            else:
                self._add(part)

    def _add(self, block: npt.NDArray[Any]) -> None:
        if block.dtype.kind == "b":
            count, mean = block.size, float(np.count_nonzero(block) / block.size)
            squares = count * mean * (1 - mean)
            self.merge(Statistics(count, 0, mean == 1.0, mean > 0.0, mean, squares))
            return
        if block.dtype == np.float16:
            block = block.astype(np.float32)
        count, *found = moments(block)
        self.nan += block.size - count
        if count:
            self.merge(Statistics(count, 0, *(found if _is_known(*found) else _scaled(block))))

    def merge(self, other: Statistics) -> None:
        """Add the statistics of the following numbers."""
        self.nan += other.nan
        if not other.count:
            return
        self.least = other.least if self.least is None else min(self.least, other.least)
        self.largest = other.largest if self.largest is None else max(self.largest, other.largest)
        total = self.count + other.count
        apart = other.mean - self.mean
        if math.isfinite(apart * other.count):
            self.mean += apart * other.count / total
        else:
            self.mean = self.mean * (self.count / total) + other.mean * (other.count / total)
        self.squares += other.squares + apart * apart * self.count * other.count / total
        self.count = total

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as JSON values, with ``None`` if a number is not finite."""
        known = self.count > 0
        return {
            "min": _finite(self.least),
            "max": _finite(self.largest),
            "mean": _finite(self.mean) if known else None,
            "std": _finite(math.sqrt(self.squares / self.count)) if known else None,
            "nan": self.nan,
        }


def _is_known(least: Any, largest: Any, mean: float, squares: float) -> bool:
    """Return whether the mean is finite, or infinite because a number is infinite."""
    return math.isfinite(mean) or not (math.isfinite(least) and math.isfinite(largest))


def _scaled(block: npt.NDArray[Any]) -> tuple[Any, Any, float, float]:
    """Return the moments of numbers whose sum exceeds the largest float."""
    _, least, largest, mean, squares = moments(np.ldexp(block, -_SCALE))
    return (
        math.ldexp(least, _SCALE),
        math.ldexp(largest, _SCALE),
        math.ldexp(mean, _SCALE),
        squares * 4.0**_SCALE,
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
