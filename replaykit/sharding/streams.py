"""Streams of rows over shards: what transforms hold back, and where episodes are cut."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from replaykit._compat import as_tensor
from replaykit.sharding.patches import Patched

__all__ = ["Streamed"]


class Streamed(Patched):
    """``flush`` and ``cut``."""

    def flush(self) -> torch.Tensor:
        """Stores the rows that the shards' transforms hold back, as ``ReplayBuffer.flush`` does:
        what was written until now is all there is.

        Returns:
            The index of each row, int64 ``[K]``, shard by shard.

        Raises:
            TimeoutError: a shard has died and not come back, or does not answer.

        It does not wait for a rate limiter, which counts the rows, but for this handle's writes
        that one holds up. Cost: one message to each shard.

        Example:
            >>> import torch
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer
            >>> with ShardedReplayBuffer(num_shards=2, storage=lambda: LazyTensorStorage(10),
            ...                          backend="local") as rb:
            ...     rb.flush()
            tensor([], dtype=torch.int64)
        """
        self._check_open()
        self._outbox.settle()
        members, names = self._members, self._names

        def send(shard: int, stamp: Any) -> Any:
            return members.send(shard, "flush", stamp)

        answers = self._writes(list(range(names.num_shards)), send)
        self._tickets.told()
        return torch.cat([names.join(shard, answers[shard][0]) for shard in sorted(answers)])

    def cut(self, lane: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """Ends the episodes that are being written, without a flag, as ``ReplayBuffer.cut`` does:
        what is written next belongs to others, which begin in the middle.

        Args:
            lane: streams of storages with ``lane_key``, by what stands in that column, in whichever
                shards they are; None: all.

        Raises:
            IndexError: nothing is stored of one of the streams; none has been cut then.
            TimeoutError: a shard has died and not come back, or does not answer.

        Rows that transforms hold back are stored before, as by ``flush``. Cost: one message to each
        shard, two with ``lane``.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from replaykit import LazyTensorStorage, ShardedReplayBuffer, SliceSampler
            >>> with ShardedReplayBuffer(
            ...     num_shards=2, storage=lambda: LazyTensorStorage(100), shard_key="env",
            ...     sampler=lambda: SliceSampler(slice_len=2), backend="local",
            ... ) as rb:
            ...     for first in (0, 2):
            ...         _ = rb.extend(TensorDict({
            ...             "env": torch.zeros(2).long(), "t": torch.arange(first, first + 2),
            ...             "next": {"done": torch.zeros(2, dtype=bool)}}, [2]))
            ...         rb.cut()
            ...     starts = rb.sample(200)["t"][::2]
            >>> starts.unique()
            tensor([0, 2])
        """
        self._check_open()
        self._outbox.settle()
        members = self._members
        where: dict[int, torch.Tensor | None] = dict.fromkeys(range(self._names.num_shards))
        if lane is not None:
            where = self._shards_of(as_tensor(lane).cpu())

        def send(shard: int, stamp: Any) -> Any:
            return members.send(shard, "cut", stamp, where[shard])

        self._writes(list(where), send)
        self._tickets.told()

    def _shards_of(self, lanes: torch.Tensor) -> dict[int, torch.Tensor | None]:
        """The shards that have rows of streams, with the keys of these.

        Raises:
            IndexError: no shard has rows of one.
        """
        members = self._members
        until = time.monotonic() + members.timeout
        members.present()
        for shard in range(self._names.num_shards):
            members.wait_for([shard], until)
        answers = members.ask_all("streams", lanes)
        told = {shard: answer for shard, answer in answers.items() if answer is not None}
        if not told:
            return {}  # nothing is stored, as in one buffer without rows
        known = torch.stack([has for _, has in told.values()]).any(0)
        if not bool(known.all()):
            missing = next(iter(told.values()))[0][~known].tolist()
            raise IndexError(f"expected streams of which rows are stored, got {missing}")
        return {shard: cells[has] for shard, (cells, has) in told.items() if bool(has.any())}
