# Written by `python -m tests.generated` from replaykit/registry.py.

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
    "ImmutableDatasetWriter",
    "LaneWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
]
