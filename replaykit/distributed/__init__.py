"""Use replay buffers in other processes: one in a Ray actor, or one over several shards."""

from replaykit.distributed.protocol import (
    BarrierBusy,
    ShardDied,
    ShardLoss,
    ShardLossWarning,
    ShardSilent,
)
from replaykit.distributed.ray_buffer import RayReplayBuffer, RayReplayBufferClient
from replaykit.distributed.requests import RemoteResult, ShardedResult
from replaykit.distributed.sharded_buffer import ShardedReplayBuffer
from replaykit.distributed.sharded_client import ShardedClient

__all__ = [
    "BarrierBusy",
    "RayReplayBuffer",
    "RayReplayBufferClient",
    "RemoteResult",
    "ShardDied",
    "ShardLoss",
    "ShardLossWarning",
    "ShardSilent",
    "ShardedClient",
    "ShardedReplayBuffer",
    "ShardedResult",
]
