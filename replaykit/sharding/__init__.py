"""One buffer over several processes: rows in shards, draws as of one big buffer."""

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
