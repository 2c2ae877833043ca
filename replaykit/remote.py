"""Use a buffer in a Ray actor. The names are defined in `replaykit.distributed`."""

from replaykit._ray import DEFAULT_REMOTE_CLASS_CONFIG
from replaykit.distributed import RayReplayBuffer, RayReplayBufferClient, RemoteResult

__all__ = [
    "DEFAULT_REMOTE_CLASS_CONFIG",
    "RayReplayBuffer",
    "RayReplayBufferClient",
    "RemoteResult",
]
