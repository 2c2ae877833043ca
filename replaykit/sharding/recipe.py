"""What every shard is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replaykit.buffer import ReplayBuffer
from replaykit.samplers import RandomSampler
from replaykit.sharding.facts import Terms
from replaykit.sharding.laws import law_of
from replaykit.storages.column_storage import ColumnStorage

__all__ = ["ShardRecipe"]


@dataclass(frozen=True)
class ShardRecipe:
    """What every shard is made of: factories, since each has parts of its own.

    Attributes:
        terms: what masses are measured in when nobody says; None: not without being asked.
        timeout: seconds within which clients are done with a call, or give it up.
    """

    storage: Callable[[], Any]
    sampler: Callable[[], Any] | None
    writer: Callable[[], Any] | None
    transform_factory: Callable[[], Any] | None
    priority_key: Any
    checkpoint_dir: str | None
    checkpoint_interval: float
    num_shards: int
    shard_key: Any
    terms: Terms | None = None
    timeout: float = 60.0

    def make(self) -> ReplayBuffer:
        """Returns a new buffer.

        Raises:
            ValueError: parts that do not divide among shards; says which and why.
        """
        buffer = ReplayBuffer(
            storage=self.storage,
            sampler=RandomSampler if self.sampler is None else self.sampler,
            writer=self.writer,
            transform_factory=self.transform_factory,
            priority_key=self.priority_key,
            delayed_init=False,
        )
        storage, writer = buffer.storage, buffer.writer
        if not isinstance(storage, ColumnStorage) or storage.ndim > 1:
            raise ValueError(
                "expected a tensor or memmap storage with ndim=1 for shards, got "
                f"{storage!r}; lanes are told apart by shard_key= and lane_key="
            )
        mismatch = getattr(storage, "on_mismatch", None)
        if getattr(storage, "dedup_next", False) and mismatch == "error":
            raise ValueError(
                "expected on_mismatch='dense' with dedup_next for shards, got 'error': others have "
                "stored their parts of a batch when one refuses its own"
            )
        if not writer.keeps_order:
            raise ValueError(
                f"expected a writer that keeps the order for shards, got a {type(writer).__name__}"
            )
        law_of(buffer.sampler)
        if self.shard_key is None and (
            buffer.sampler.needs_write_order or buffer._chain.spans_rows
        ):
            raise ValueError(
                "expected shard_key= with slices, and with transforms that read the rows around, "
                "hold rows back or follow what is written: without it the rows of an episode go to "
                "different shards"
            )
        return buffer

    def folder(self, shard: int) -> Path | None:
        """Where a shard keeps its own checkpoint."""
        if self.checkpoint_dir is None:
            return None
        return Path(self.checkpoint_dir).expanduser() / f"shard-{shard:05d}"
