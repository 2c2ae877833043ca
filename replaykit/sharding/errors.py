"""What can go wrong between shards."""

from __future__ import annotations

__all__ = ["BarrierBusy", "ShardDied", "ShardLossWarning", "ShardSilent"]


class ShardDied(ConnectionError):
    """A shard does not answer any more."""

    def __init__(self, shard: int, incarnation: int) -> None:
        super().__init__(f"shard {shard} (incarnation {incarnation}) has died")
        self.shard, self.incarnation = shard, incarnation

    def __reduce__(self) -> tuple[type[ShardDied], tuple[int, int]]:
        return ShardDied, (self.shard, self.incarnation)


class ShardSilent(TimeoutError):
    """A shard has not answered in time; it may still do what it was asked for."""


class BarrierBusy(RuntimeError):
    """Somebody else saves or loads all shards at this moment."""


class ShardLossWarning(UserWarning):
    """Rows were lost with a shard that died; the text is that of a ``ShardLoss``."""
