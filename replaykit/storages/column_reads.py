"""Read rows of column storages, and index their episodes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch

from replaykit.episodes import EpisodeIndex
from replaykit.episodes.boundaries import RESTORED, SEVERED
from replaykit.episodes.streams import stream_keys
from replaykit.schema import Matcher, Rows, Schema
from replaykit.storages.columns import Columns
from replaykit.storages.content import Content
from replaykit.storages.dedup_columns import DedupColumns
from replaykit.storages.episode_indexes import EpisodeIndexes
from replaykit.storages.episode_tags import state_of_subset
from replaykit.storages.indexing import (
    as_cells,
    as_index,
    check_cells,
    indexed_shape,
    is_stored,
    unravel_index,
)
from replaykit.storages.ledger import Ledger
from replaykit.storages.memory import as_device
from replaykit.storages.storage import Storage
from replaykit.structure import Path, build
from replaykit.ted import format_key, unravel

AnyColumns = Columns | DedupColumns
"""Dense columns, or columns that store each next observation once."""

_BYTES_AT_ONCE = 1 << 18
"""Bytes of the largest batch that the caller's thread reads, in 60 us. With a thread of the core, a
loop with batches of 180 kB is a fifth slower. A loop with batches of 360 kB is hardly faster."""


class ColumnReads(Storage):
    """The half of ``ColumnStorage`` that reads rows, and whose episode indexes follow commits.

    Args:
        lane_key: the column that names the stream of a row; see LazyTensorStorage.

    Attributes:
        indexes: the episode indexes, one per rule.

    Raises:
        ValueError: ``lane_key`` is given with ``ndim > 1``.
    """

    def __init__(self, max_size: int, *, device: Any, ndim: int, lane_key: Any = None) -> None:
        super().__init__(max_size, ndim=ndim)
        self.lane_key: Path | None = None if lane_key is None else unravel(lane_key)
        if self.lane_key is not None and ndim > 1:
            raise ValueError(
                f"expected lane_key with ndim=1, because its streams share one flat storage; got "
                f"ndim={ndim}, whose lanes are its other dimensions"
            )
        self.indexes = EpisodeIndexes(cast(Any, self))
        # The taken rows of a queue in the memory of this process; see ``taken_rows``.
        self.taken_table: Any = None
        self._device = device if device == "auto" else as_device(device)
        self._columns: AnyColumns | None = None
        self._matcher: Matcher | None = None
        self._at_cursor = False

    # -- episodes -----------------------------------------------------------------------------

    def _check_lane_key(self, leaves: Collection[Path]) -> None:
        if self.lane_key is not None and self.lane_key not in leaves:
            known = ", ".join(map(format_key, leaves)) if () not in leaves else "a tensor"
            raise KeyError(
                f"expected the lane_key {format_key(self.lane_key)}, which names the stream of a "
                f"row, got {known}"
            )

    def commit(self, rows: Rows) -> None:
        self.ledger.advance(rows.batch[0])
        self.indexes.append(rows, self.ledger.log.number)

    @property
    def episodes(self) -> EpisodeIndex:
        """The episode index of the stored rows.

        The caller holds the lock while it uses the index.

        Raises:
            RuntimeError: nothing was written yet, or the rows are not TensorDicts.
        """
        return self.indexes.of()

    def cut(self, lanes: Any, *, reset: bool = False) -> None:
        self.indexes.cut(lanes, RESTORED if reset else SEVERED)

    def resume(self, *, over: bool) -> None:
        if over:
            self.indexes.cut(code=RESTORED)
        else:
            self.indexes.reopen()

    def lanes_named(self, lane: Any) -> Any:
        if self.lane_key is None:
            return super().lanes_named(lane)
        if lane is None or not self.ledger.length:
            return None
        index, leaf = self.episodes, cast(Any, self).schema.leaves[self.lane_key]
        values = torch.as_tensor(lane, device="cpu")
        if not values.numel():
            return np.zeros(index.lanes, bool)
        is_mask = values.dtype is torch.bool and leaf.dtype is not torch.bool
        if is_mask or (values.is_floating_point() and not leaf.dtype.is_floating_point):
            raise TypeError(f"expected keys of streams as {leaf.dtype}, got {values.dtype}")
        cells = values.to(leaf.dtype).reshape(-1, *leaf.shape)
        same = cells.to(values.dtype).numpy().reshape(-1) == values.numpy().reshape(-1)
        if not (values.is_floating_point() or same.all()):  # 256 is no stream of uint8
            raise IndexError(f"expected streams as {leaf.dtype}, got {values.tolist()!r}")
        lanes = index.pool.ranks(stream_keys(cells))
        if (lanes < 0).any():
            wrong = cells[int(lanes.argmin())].tolist()
            raise IndexError(f"expected a stream with stored rows, got {wrong!r}")
        return np.isin(np.arange(index.lanes), lanes)

    def episode_state(self) -> dict[str, Any] | None:
        return self.indexes.state()

    def episodes_of_subset(
        self,
        content: Content,
        state: dict[str, Any] | None,
        old: Ledger,
        rows: torch.Tensor | None,
    ) -> dict[str, Any] | None:
        if rows is None or (len(rows) == content.rows and old.oldest_first):
            return state
        return state_of_subset(content, state, old, rows, self.lane_key)

    def restore_episodes(
        self, state: dict[str, Any] | None, old: Ledger, rows: torch.Tensor | None
    ) -> None:
        self.indexes.restore(state, old, rows)

    # -- description --------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """True once the first write has fixed the schema and allocated the memory."""
        return self._columns is not None

    @property
    def schema(self) -> Schema | None:
        return None if self._columns is None else self._columns.schema

    @property
    def device(self) -> torch.device | str:
        return self._device if self._columns is None else self._columns.device

    @property
    def lanes(self) -> torch.Size:
        return torch.Size() if self._columns is None else self._columns.lanes

    @property
    def shape(self) -> torch.Size | None:
        if self._columns is None:
            return None
        return torch.Size([self.ledger.length, *self.lanes])

    def __len__(self) -> int:
        if self.recovery is not None:
            self.recovery.poll()
        return self.ledger.length if self.ndim == 1 else self.ledger.length * self.lanes.numel()

    def __repr__(self) -> str:
        content = "" if self.schema is None else f", {self.schema!r}"
        return (
            f"{type(self).__name__}(len={len(self)}, max_size={self.max_size}, "
            f"ndim={self.ndim}, device={self.device}{content})"
        )

    # -- reading ------------------------------------------------------------------------------

    def require(self) -> AnyColumns:
        """Return the columns; RuntimeError before the first write."""
        if self._columns is None:
            raise RuntimeError(
                "Cannot get elements out of a non-initialized storage: nothing is stored yet, and "
                "the first write fixes keys and shapes"
            )
        return self._columns

    def get(self, index: Any) -> Any:
        """Read stored rows: views for an int or a slice, copies for any other index.

        For ``ndim > 1``, a tensor ``[..., ndim]`` of at least two dimensions holds coordinates. A
        tuple indexes dimension by dimension. Any other index selects time slots.

        Raises:
            RuntimeError: nothing was written yet.
            IndexError: rows that are not stored.
        """
        with self.lock:
            columns = self.require()
            if self.ndim > 1:
                return self._get_cells(columns, index)
            at = as_index(index, self.ledger.length)
            if isinstance(at, torch.Tensor):
                leaves = columns.gather(at.reshape(-1), self.ledger.length)
                if at.ndim != 1:
                    leaves = {p: v.view(*at.shape, *v.shape[1:]) for p, v in leaves.items()}
                return self._build(leaves, at.shape)
            columns.changes.expose()
            leaves = columns.view(self.ledger.length, at)
            return self._build(leaves, indexed_shape(self.visible_shape(), at))

    def _get_cells(self, columns: AnyColumns, index: Any) -> Any:
        if (
            isinstance(index, torch.Tensor)
            and index.ndim > 1
            and index.dtype != torch.bool
            and index.shape[-1] == self.ndim
        ):
            check_cells(index, self.visible_shape())
            flat = columns.gather(index.reshape(-1, self.ndim), self.ledger.length)
            leaves = {p: v.view(*index.shape[:-1], *v.shape[1:]) for p, v in flat.items()}
            return self._build(leaves, index.shape[:-1])
        index, batch = as_cells(index, self.visible_shape())
        columns.changes.expose()
        return self._build(columns.view(self.ledger.length, index), batch)

    def read(self, index: torch.Tensor, *, own: bool = True, contiguous: bool = False) -> Any:
        """Read copies of rows.

        The small leaves are views of one allocation, unless ``contiguous`` is set.
        """
        with self.lock:
            return self.read_held(index, contiguous)

    def read_held(self, index: torch.Tensor, contiguous: bool) -> Any:
        """Read as ``read`` does. The caller holds the lock."""
        columns = self._columns
        if columns is None:
            columns = self.require()
        if self.ndim > 1 and columns.device.type == "cpu":
            check_cells(index, self.visible_shape())
        return columns.read(index, self.ledger.length, contiguous=contiguous)

    def reads_at_once(self, count: int) -> bool:
        """Return whether ``begin_held`` is about as fast as a call that wakes a thread."""
        columns = self._columns
        if type(columns) is not Columns or columns.advise or columns.device.type != "cpu":
            return False
        return columns.native or count * columns.row_bytes <= _BYTES_AT_ONCE

    def begin_held(self, index: torch.Tensor, contiguous: bool) -> tuple[Any, Any]:
        """Begin to read rows, if ``reads_at_once`` allows it. The caller holds the lock.

        If there are more than a few rows, a thread of the compiled core reads them. It needs
        neither the lock nor the interpreter. Writes wait for it.

        Returns:
            The rows, and an object or None. If there is an object, the caller must call its
            ``wait`` method before it uses the rows.
        """
        columns = self._columns
        if type(columns) is not Columns or not columns.native:
            return self.read_held(index, contiguous), None
        if len(index) * columns.row_bytes <= _BYTES_AT_ONCE:
            return self.read_held(index, contiguous), None
        if self.ndim > 1:
            check_cells(index, self.visible_shape())
        return columns.begin_read(index, self.ledger.length, contiguous)

    def view_at(self, index: Any = None, *, time_dim: int = 0) -> Any:
        """Return stored rows with time along ``time_dim``.

        The rows are views unless torch has to copy.

        Raises:
            IndexError: rows that are not stored.
            RuntimeError: nothing was written yet.
        """
        with self.lock:
            columns, shape = self.require(), self.visible_shape(time_dim)
            at, batch = (None, shape) if index is None else as_cells(index, shape)
            columns.changes.expose()
            leaves = columns.view(self.ledger.length, at, time_dim=time_dim)
            return self._build(leaves, batch)

    def __iter__(self) -> Iterator[Any]:
        if self.ndim == 1:
            yield from super().__iter__()
            return
        for row in range(len(self)):
            cell = unravel_index(torch.tensor(row, device="cpu"), self.lanes)
            yield self.get(tuple(cell.tolist()))

    def visible_shape(self, time_dim: int = 0) -> torch.Size:
        """Return the shape of the stored rows with time along ``time_dim``."""
        shape = [self.ledger.length, *self.lanes]
        if time_dim:
            shape[0], shape[time_dim] = shape[time_dim], shape[0]
        return torch.Size(shape)

    def _build(self, leaves: Mapping[Path, torch.Tensor], batch: torch.Size) -> Any:
        columns = self.require()
        return build(columns.schema.root, leaves, torch.Size(batch), columns.device)

    def contains(self, item: Any) -> bool | torch.Tensor:
        """Return whether rows are stored: bool for an int, bool ``[K]`` for a tensor.

        A tensor is int ``[K]`` or ``[K, ndim]``.

        Raises:
            TypeError: ``item`` is neither an int nor an integer tensor.
        """
        if self.ndim > 1 and isinstance(item, torch.Tensor) and item.ndim > 1:
            inside: Any = is_stored(item, torch.tensor(self.visible_shape(), device=item.device))
            return inside.all(-1)
        return is_stored(item, self.ledger.length)


def read_pinned(
    storage: ColumnReads, index: torch.Tensor, contiguous: bool
) -> tuple[Any, list[int]]:
    """Read as ``read_held`` does, but memory of at least 1 MiB is pinned.

    Returns:
        The rows, and the addresses of the pinned memory.
    """
    addresses: list[int] = []
    memory = storage.require().batch_memory
    memory.pinned = os.getpid(), addresses  # a process forked meanwhile must not pin memory
    try:
        return storage.read_held(index, contiguous), addresses
    finally:
        memory.pinned = None
