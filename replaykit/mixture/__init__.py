"""Mixtures, which sample several buffers as one."""

from replaykit.mixture.choosing import SamplerEnsemble
from replaykit.mixture.ensemble import ReplayBufferEnsemble
from replaykit.mixture.member_parts import Ramp, StorageEnsemble, WriterEnsemble
from replaykit.mixture.whole_batches import JointBatch, ScheduledChoice

__all__ = [
    "JointBatch",
    "Ramp",
    "ReplayBufferEnsemble",
    "SamplerEnsemble",
    "ScheduledChoice",
    "StorageEnsemble",
    "WriterEnsemble",
]
