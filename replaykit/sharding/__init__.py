"""One buffer over several processes: rows in shards, draws as of one big buffer."""

from replaykit.sharding.ahead import ShardedResult
from replaykit.sharding.client import ShardedClient
from replaykit.sharding.core import ShardedReplayBuffer
from replaykit.sharding.errors import BarrierBusy, ShardDied, ShardLossWarning, ShardSilent
from replaykit.sharding.facts import ShardLoss

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
