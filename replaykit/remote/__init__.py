"""The buffer behind Ray."""

from replaykit._ray import DEFAULT_REMOTE_CLASS_CONFIG
from replaykit.remote.client import RayReplayBufferClient
from replaykit.remote.owner import RayReplayBuffer
from replaykit.remote.replies import RemoteResult

__all__ = [
    "DEFAULT_REMOTE_CLASS_CONFIG",
    "RayReplayBuffer",
    "RayReplayBufferClient",
    "RemoteResult",
]
