"""Composition: a storage, a sampler and a writer as one buffer."""

from replaykit.buffer.buffer_dataset import BufferDataset
from replaykit.buffer.dataloader import BufferLoader
from replaykit.buffer.episode_views import Episode, Episodes
from replaykit.buffer.replay_buffer import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from replaykit.buffer.row_updates import ConditionalUpdateResult

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
