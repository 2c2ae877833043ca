"""Which records come next."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from replaykit.samplers.base import Sampler
from replaykit.samplers.consuming import ConsumingSampler
from replaykit.samplers.prioritized import PrioritizedSampler
from replaykit.samplers.prioritized_slices import PrioritizedSliceSampler
from replaykit.samplers.random import RandomSampler
from replaykit.samplers.schedulers import (
    LambdaScheduler,
    LinearScheduler,
    ParameterScheduler,
    SchedulerList,
    StepScheduler,
)
from replaykit.samplers.sequence import Sequence
from replaykit.samplers.slices import SliceSampler
from replaykit.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from replaykit.samplers.staleness import StalenessAwareSampler
from replaykit.samplers.units import SampleUnit, Transition
from replaykit.samplers.without_replacement import SamplerWithoutReplacement

if TYPE_CHECKING:
    from replaykit.ensembles import SamplerEnsemble

__all__ = [
    "ConsumingSampler",
    "LambdaScheduler",
    "LinearScheduler",
    "ParameterScheduler",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "SampleUnit",
    "Sampler",
    "SamplerEnsemble",
    "SamplerWithoutReplacement",
    "SchedulerList",
    "Sequence",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "StepScheduler",
    "Transition",
]


def __getattr__(name: str) -> Any:
    # A public name of this room for what stands above it; nothing in the room uses it.
    if name == "SamplerEnsemble":
        return importlib.import_module("replaykit.ensembles").SamplerEnsemble
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
