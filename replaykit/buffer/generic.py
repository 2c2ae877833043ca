"""What a buffer is generic in, for type checkers: its batches and its components."""

from __future__ import annotations

from tensordict import TensorDict
from typing_extensions import TypeVar

from replaykit.samplers import PrioritizedSampler, Sampler
from replaykit.storages import Storage
from replaykit.writers import Writer

__all__ = ["DataT", "PrioritizedT", "SamplerT", "StorageT", "WriterT"]

# Each has a default, so that ``ReplayBuffer`` alone stands for every buffer of TensorDicts, and is
# covariant, so that a buffer with a special sampler is one of these.
DataT = TypeVar("DataT", default=TensorDict, covariant=True)
StorageT = TypeVar("StorageT", bound=Storage, default=Storage, covariant=True)
SamplerT = TypeVar("SamplerT", bound=Sampler, default=Sampler, covariant=True)
WriterT = TypeVar("WriterT", bound=Writer, default=Writer, covariant=True)
PrioritizedT = TypeVar("PrioritizedT", bound=Sampler, default=PrioritizedSampler, covariant=True)
