# Written by `python -m tests.generated` from replaykit/registry.py.

from replaykit.samplers.consuming import (
    ConsumingSampler,
)
from replaykit.samplers.episode_measures import (
    Coverage,
)
from replaykit.samplers.prioritized import (
    PrioritizedSampler,
)
from replaykit.samplers.prioritized_slices import (
    PrioritizedSliceSampler,
)
from replaykit.samplers.sampler import (
    Sampler,
    SampleUnit,
    Transition,
)
from replaykit.samplers.schedulers import (
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    SchedulerList,
    StepScheduler,
)
from replaykit.samplers.sequence import (
    Sequence,
)
from replaykit.samplers.slices import (
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from replaykit.samplers.staleness import (
    StalenessAwareSampler,
)
from replaykit.samplers.uniform import (
    RandomSampler,
    SamplerWithoutReplacement,
)

__all__ = [
    "ConsumingSampler",
    "Coverage",
    "LambdaScheduler",
    "LinearScheduler",
    "ParameterScheduler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "SampleUnit",
    "Sampler",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "Sequence",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "StepScheduler",
    "Transition",
]
