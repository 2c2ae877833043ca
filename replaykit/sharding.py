"""Distribute one replay buffer over shards. The names are defined in `replaykit.distributed`."""

from replaykit.distributed import (
    BarrierBusy,
    ShardDied,
    ShardedClient,
    ShardedReplayBuffer,
    ShardedResult,
    ShardLoss,
    ShardLossWarning,
    ShardSilent,
)

__all__ = [
    "BarrierBusy",
    "ShardDied",
    "ShardLoss",
    "ShardLossWarning",
    "ShardSilent",
    "ShardedClient",
    "ShardedReplayBuffer",
    "ShardedResult",
]
