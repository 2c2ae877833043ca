# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.writers.base import (
    Writer,
)
from replaykit.writers.immutable import (
    ImmutableDatasetWriter,
)
from replaykit.writers.lanes import (
    LaneWriter,
)
from replaykit.writers.max_value import (
    TensorDictMaxValueWriter,
)
from replaykit.writers.round_robin import (
    RoundRobinWriter,
    TensorDictRoundRobinWriter,
)

__all__ = [
    "ImmutableDatasetWriter",
    "LaneWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
]
