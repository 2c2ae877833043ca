"""Mixtures, which sample several buffers as one."""

from replaykit.mixture.choosing import SamplerEnsemble
from replaykit.mixture.ensemble import ReplayBufferEnsemble
from replaykit.mixture.member_parts import StorageEnsemble, WriterEnsemble

__all__ = ["ReplayBufferEnsemble", "SamplerEnsemble", "StorageEnsemble", "WriterEnsemble"]
