"""Composition: a storage, a sampler and a writer as one buffer."""

from replaykit.buffer.conditional import ConditionalUpdateResult
from replaykit.buffer.episodes import Episode, Episodes
from replaykit.buffer.iterable import BufferDataset
from replaykit.buffer.loading import BufferLoader
from replaykit.buffer.named import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from replaykit.buffer.replay import ReplayBuffer, TensorDictReplayBuffer

__all__ = [
    "BufferDataset",
    "BufferLoader",
    "ConditionalUpdateResult",
    "Episode",
    "Episodes",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]
