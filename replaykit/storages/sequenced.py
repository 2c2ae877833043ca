"""Storages that know where the episodes of their rows begin and end."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch

from replaykit.episodes import EpisodeIndex, InterleavedIndex
from replaykit.episodes.codes import RESTORED
from replaykit.schema import Rows
from replaykit.storages.base import Storage
from replaykit.storages.content import Content
from replaykit.storages.indexes import EpisodeIndexes
from replaykit.storages.ledger import Ledger
from replaykit.storages.left_out import state_of_kept
from replaykit.structure import Path
from replaykit.ted import format_key, unravel

__all__ = ["SequencedStorage"]


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
