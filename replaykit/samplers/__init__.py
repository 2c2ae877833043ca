"""Which records come next."""

from replaykit.samplers.base import Sampler
from replaykit.samplers.random import RandomSampler
from replaykit.samplers.units import SampleUnit, Transition
from replaykit.samplers.without_replacement import SamplerWithoutReplacement

__all__ = ["RandomSampler", "SampleUnit", "Sampler", "SamplerWithoutReplacement", "Transition"]
