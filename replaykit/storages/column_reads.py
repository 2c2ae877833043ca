"""Read rows of column storages, and index their episodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch

from replaykit.episodes import EpisodeIndex, InterleavedIndex
from replaykit.episodes.episode_laws import RESTORED
from replaykit.schema import Rows, Schema
from replaykit.storages.columns import Columns
from replaykit.storages.content import Content
from replaykit.storages.dedup_columns import OnceColumns
from replaykit.storages.episode_indexes import EpisodeIndexes, state_of_kept
from replaykit.storages.indexing import (
    as_cells,
    as_index,
    check_cells,
    indexed_shape,
    unravel_index,
)
from replaykit.storages.ledger import Ledger
from replaykit.storages.memory import as_device
from replaykit.storages.schema_match import Matcher
from replaykit.storages.storage import Storage
from replaykit.structure import Path, build
from replaykit.ted import format_key, unravel

__all__ = ["AnyColumns", "ColumnReads", "SequencedStorage"]


class SequencedStorage(Storage):
    """A storage whose indexes of episodes are told of every commit.

    Args:
        lane_key: column that says to which of several streams a row belongs; see
            LazyTensorStorage.

    Attributes:
        indexes: the indexes of episodes, one a rule.

    Raises:
        ValueError: ``lane_key`` with ``ndim > 1``.
    """

    def __init__(self, max_size: int, *, ndim: int, lane_key: Any) -> None:
        super().__init__(max_size, ndim=ndim)
        self.lane_key: Path | None = None if lane_key is None else unravel(lane_key)
        if self.lane_key is not None and ndim > 1:
            raise ValueError(
                f"expected lane_key with ndim=1, where streams lie row by row in one flat storage; "
                f"got ndim={ndim}, whose lanes are its other dimensions"
            )
        self.indexes = EpisodeIndexes(cast(Any, self))

    def _check_lane_key(self, leaves: Collection[Path]) -> None:
        if self.lane_key is not None and self.lane_key not in leaves:
            known = ", ".join(map(format_key, leaves)) if () not in leaves else "a tensor"
            raise KeyError(
                f"expected the lane_key {format_key(self.lane_key)}, which says to which stream a "
                f"row belongs, got {known}"
            )

    def commit(self, rows: Rows) -> None:
        self.ledger.advance(len(rows))
        self.indexes.note(rows)

    def commit_by_stream(self, rows: Rows, slots: torch.Tensor, displacing: Any, turn: Any) -> None:
        """Makes rows count as stored that were written at slots of their streams; see
        ``InterleavedIndex.placed``."""
        self.ledger.place_by_stream(slots)
        self.indexes.placed(rows, slots.numpy(), displacing, turn)

    @property
    def episodes(self) -> EpisodeIndex:
        """Where the stored episodes begin and end; hold the lock while asking.

        Raises:
            RuntimeError: nothing was written yet, or records are no TensorDicts.
        """
        return self.indexes.of()

    def cut(self, lanes: Any) -> None:
        self.indexes.cut(lanes)

    def resume(self, *, over: bool) -> None:
        if over:
            self.indexes.cut(code=RESTORED)
        else:
            self.indexes.reopen()

    def lanes_named(self, lane: Any) -> Any:
        if self.lane_key is None:
            return super().lanes_named(lane)
        index = self.episodes if lane is not None and self.ledger.length else None
        return index.lanes_of(lane) if isinstance(index, InterleavedIndex) else None

    def episode_state(self) -> dict[str, Any] | None:
        return self.indexes.state()

    def episodes_of_kept(
        self,
        content: Content,
        state: dict[str, Any] | None,
        old: Ledger,
        rows: torch.Tensor | None,
    ) -> dict[str, Any] | None:
        if rows is None or len(rows) == content.rows:
            return state
        return state_of_kept(content, state, old, rows, self.lane_key)

    def restore_episodes(
        self, state: dict[str, Any] | None, old: Ledger, rows: torch.Tensor | None
    ) -> None:
        self.indexes.restore(state, old, rows)


AnyColumns = Columns | OnceColumns
"""How rows lie: all leaves of each, or those that follow in the next row only there."""

_BYTES_AT_ONCE = 1 << 18
"""Up to so many bytes of a batch: 60 us of a gather. A thread of the core that did it made a loop
of 180 kB a batch by a fifth slower, and one of 360 kB hardly faster."""


class ColumnReads(SequencedStorage):
    """The half of ``ColumnStorage`` that changes nothing."""

    def __init__(self, max_size: int, *, device: Any, ndim: int, lane_key: Any = None) -> None:
        super().__init__(max_size, ndim=ndim, lane_key=lane_key)
        self._device = device if device == "auto" else as_device(device)
        self._columns: AnyColumns | None = None
        self._matcher: Matcher | None = None
        self._at_cursor = False

    # -- description --------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """Whether the first write has fixed the schema and taken the memory."""
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
        self.look()
        return self.ledger.length if self.ndim == 1 else self.ledger.length * self.lanes.numel()

    def __repr__(self) -> str:
        content = "" if self.schema is None else f", {self.schema!r}"
        return (
            f"{type(self).__name__}(len={len(self)}, max_size={self.max_size}, "
            f"ndim={self.ndim}, device={self.device}{content})"
        )

    # -- reading ------------------------------------------------------------------------------

    def require(self) -> AnyColumns:
        """Returns the columns; RuntimeError before the first write."""
        if self._columns is None:
            raise RuntimeError(
                "Cannot get elements out of a non-initialized storage: nothing is stored yet, and "
                "the first write fixes keys and shapes"
            )
        return self._columns

    def get(self, index: Any) -> Any:
        """Reads stored rows; ints and slices give views, everything else fresh memory.

        For ``ndim > 1``: a tensor ``[..., ndim]`` of two dimensions or more holds coordinates, a
        tuple indexes dimension by dimension, anything else indexes time.

        Raises:
            RuntimeError: nothing was written yet. IndexError: rows that are not stored.
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
        """Reads rows into fresh memory: small leaves as views of one allocation, unless
        ``contiguous``."""
        with self.lock:
            return self.read_held(index, contiguous)

    def read_held(self, index: torch.Tensor, contiguous: bool) -> Any:
        """What ``read`` does, for who holds the lock."""
        columns = self.require()
        if self.ndim > 1 and columns.device.type == "cpu":
            check_cells(index, self.visible_shape())
        return columns.read(index, self.ledger.length, contiguous=contiguous)

    def reads_at_once(self, count: int) -> bool:
        """Whether ``begin_held`` of that many rows takes little longer than to tell a thread."""
        columns = self._columns
        if type(columns) is not Columns or columns.advise or columns.device.type != "cpu":
            return False
        return columns.native or count * columns.row_bytes <= _BYTES_AT_ONCE

    def begin_held(self, index: torch.Tensor, contiguous: bool) -> tuple[Any, Any]:
        """What ``read_held`` does, where ``reads_at_once``: of more than a few rows by a thread of
        the core, which needs neither lock nor interpreter. Writes wait for it.

        Returns:
            The rows, and what has a ``wait`` to be called before anybody looks at them, or None.
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
        """Returns stored rows with time along ``time_dim``: views, until torch has to copy.

        Raises:
            IndexError: rows that are not stored. RuntimeError: nothing was written yet.
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
        """Shape of the stored rows with time along ``time_dim``."""
        shape = [self.ledger.length, *self.lanes]
        if time_dim:
            shape[0], shape[time_dim] = shape[time_dim], shape[0]
        return torch.Size(shape)

    def _build(self, leaves: Mapping[Path, torch.Tensor], batch: torch.Size) -> Any:
        columns = self.require()
        return build(columns.schema.root, leaves, torch.Size(batch), columns.device)

    def contains(self, item: Any) -> bool | torch.Tensor:
        """Whether rows are stored: bool for an int, bool ``[K]`` for ``[K]`` or ``[K, ndim]``.

        Raises:
            TypeError: neither an int nor an integer tensor.
        """
        length = self.ledger.length
        if isinstance(item, int) and not isinstance(item, bool):
            return -length <= item < length
        if (
            not isinstance(item, torch.Tensor)
            or item.dtype == torch.bool
            or item.is_floating_point()
        ):
            raise TypeError(f"expected an int or an integer tensor, got {type(item).__name__}")
        if self.ndim > 1 and item.ndim > 1:
            limits = torch.tensor(self.visible_shape(), device=item.device)
            return ((item >= 0) & (item < limits)).all(-1)
        return (item >= 0) & (item < length)
