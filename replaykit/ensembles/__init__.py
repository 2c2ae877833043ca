"""Several buffers sampled as one."""

from replaykit.ensembles.replay import ReplayBufferEnsemble
from replaykit.ensembles.sampler import SamplerEnsemble
from replaykit.ensembles.storage import StorageEnsemble
from replaykit.ensembles.writer import WriterEnsemble

__all__ = ["ReplayBufferEnsemble", "SamplerEnsemble", "StorageEnsemble", "WriterEnsemble"]
