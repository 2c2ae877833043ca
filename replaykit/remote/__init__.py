"""Use a buffer in a Ray actor."""

from replaykit._ray import DEFAULT_REMOTE_CLASS_CONFIG
from replaykit.remote.ray_buffer import RayReplayBuffer, RayReplayBufferClient
from replaykit.remote.requests import RemoteResult

__all__ = [
    "DEFAULT_REMOTE_CLASS_CONFIG",
    "RayReplayBuffer",
    "RayReplayBufferClient",
    "RemoteResult",
]
