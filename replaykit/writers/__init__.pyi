# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.writers.episode_writer import (
    EpisodeWriter,
    Evictor,
    Fifo,
    LowestPriority,
    MostSampled,
    Oldest,
    Uniform,
)
from replaykit.writers.max_value import (
    TensorDictMaxValueWriter,
)
from replaykit.writers.ring_writers import (
    ImmutableDatasetWriter,
    LaneWriter,
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
)
from replaykit.writers.writer import (
    Writer,
)

__all__ = [
    "EpisodeWriter",
    "Evictor",
    "Fifo",
    "ImmutableDatasetWriter",
    "LaneWriter",
    "LowestPriority",
    "MostSampled",
    "Oldest",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Uniform",
    "Writer",
]
