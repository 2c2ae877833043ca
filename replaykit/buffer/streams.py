"""The stored streams of rows: their episodes, and where they are severed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replaykit.buffer.episodes import Episodes
from replaykit.buffer.generic import DataT, SamplerT, StorageT, WriterT
from replaykit.buffer.writing import Writing
from replaykit.storages import Storage
from replaykit.storages.column_storage import ColumnStorage

__all__ = ["Streams"]


class Streams(Writing[DataT, StorageT, SamplerT, WriterT]):
    """``episodes``, ``cut``."""

    @property
    def episodes(self) -> Episodes:
        """The stored episodes as objects, and what is known of each row's; see `Episodes`.

        Cost: none before something is asked.

        Raises:
            RuntimeError: a storage that does not know where episodes end, or records that are no
                TensorDicts.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
            >>> done = torch.tensor([0, 0, 1, 0], dtype=torch.bool)
            >>> _ = rb.extend(TensorDict({"next": {"done": done}}, [4]))
            >>> [episode.length for episode in rb.episodes]
            [3, 1]
        """
        with self._locked() as storage:
            if not isinstance(storage, ColumnStorage):
                raise RuntimeError(
                    f"a {type(storage).__name__} does not know where episodes end; use a tensor or "
                    "memmap storage"
                )
            if storage.initialized:
                _ = storage.episodes  # refuses here what has no keys
            return Episodes(storage)

    def cut(self, lane: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """Ends the episodes that are being written, without a flag: the stream is severed there.

        What is written next belongs to another episode, which begins in the middle. Rows that
        transforms hold back are stored before, as by ``flush``, those of all lanes.

        Args:
            lane: number of a lane, or several; None: all. In a storage with ``lane_key`` the
                lanes are its streams, by what stands in that column.

        Raises:
            IndexError: no such lane. RuntimeError: a storage that does not know where episodes
                end.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ReplayBuffer
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(100))
            >>> for _ in range(2):
            ...     _ = rb.extend(TensorDict({"next": {"done": torch.zeros(3, dtype=bool)}}, [3]))
            ...     rb.cut()
            >>> rb.episodes.lengths
            tensor([3, 3])
        """
        with self._locked() as storage:
            storage.lanes_named(lane)  # refuses before anything is stored
            if type(storage).cut is not Storage.cut:
                self.flush()
            self._writer.cut(lane)
