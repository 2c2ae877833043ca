"""Composition: a storage, a sampler and a writer as one buffer."""

from replaykit.buffer.buffer_dataset import BufferDataset
from replaykit.buffer.buffer_variants import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from replaykit.buffer.dataloader import BufferLoader
from replaykit.buffer.edit import ConditionalUpdateResult
from replaykit.buffer.episodes import Episode, Episodes
from replaykit.buffer.replay_buffer import ReplayBuffer

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
