"""Distribute one replay buffer over the shards of several processes."""

from replaykit.sharding.protocol import (
    BarrierBusy,
    ShardDied,
    ShardLoss,
    ShardLossWarning,
    ShardSilent,
)
from replaykit.sharding.shard_draws import ShardedResult
from replaykit.sharding.sharded_buffer import ShardedClient, ShardedReplayBuffer

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
