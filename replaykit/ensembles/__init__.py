"""Ensembles, which sample several buffers as one."""

from replaykit.ensembles.ensemble import ReplayBufferEnsemble
from replaykit.ensembles.ensemble_sampler import SamplerEnsemble
from replaykit.ensembles.ensemble_storage import StorageEnsemble, WriterEnsemble

__all__ = ["ReplayBufferEnsemble", "SamplerEnsemble", "StorageEnsemble", "WriterEnsemble"]
